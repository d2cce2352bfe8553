"""A full chain of logits processors on (64, 150000) logits, interleaved with transformers'.

    OMP_NUM_THREADS=1 python benchmarks/sampling.py

Prints medians over the rounds and the ratio ours / transformers (below 1: ours is quicker).
"""

import statistics
import time

import torch
from transformers.generation import logits_process as hf

from minillm.sampling import Sampler

ROWS, VOCABULARY, ROUNDS = 64, 150_000, 7
CHAINS = {
    "penalty, temperature, top-k 50, top-p, min-p": {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
    "penalty, temperature, top-p, min-p": {"top_p": 0.95, "min_p": 0.05},
    "penalty, temperature, top-p": {"top_p": 0.95},
}


def peer(top_k=None, top_p=None, min_p=None) -> hf.LogitsProcessorList:
    chain = [hf.RepetitionPenaltyLogitsProcessor(1.1), hf.TemperatureLogitsWarper(0.8)]
    chain += [hf.TopKLogitsWarper(top_k)] if top_k else []
    chain += [hf.TopPLogitsWarper(top_p)] if top_p else []
    chain += [hf.MinPLogitsWarper(min_p)] if min_p else []
    return hf.LogitsProcessorList(chain)


def main() -> None:
    g = torch.Generator().manual_seed(0)
    cases = {
        "peaked (a trained model's)": torch.randn(ROWS, VOCABULARY, generator=g) * 3,
        "flat (an untrained model's)": torch.randn(ROWS, VOCABULARY, generator=g) * 0.2,
    }
    ids = torch.randint(VOCABULARY, (ROWS, 200), generator=g)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {ROUNDS} rounds")
    print(f"{'logits':28} {'chain':46} {'ours ms':>8} {'peer ms':>8} {'ratio':>6}")
    for kind, logits in cases.items():
        for name, options in CHAINS.items():
            ours = Sampler(temperature=0.8, repetition_penalty=1.1, **options).process
            theirs = peer(**options)
            times: dict[str, list[float]] = {"ours": [], "peer": []}
            for _ in range(ROUNDS):
                start = time.perf_counter()
                a = ours(logits, ids)
                middle = time.perf_counter()
                b = theirs(ids, logits.clone())
                end = time.perf_counter()
                times["ours"].append(middle - start)
                times["peer"].append(end - middle)
            same = torch.equal(a.isfinite(), b.isfinite())
            mine, peers = (1e3 * statistics.median(t) for t in times.values())
            note = "" if same else "  (borders differ by rounding)"
            print(f"{kind:28} {name:46} {mine:8.1f} {peers:8.1f} {mine / peers:6.2f}{note}")


if __name__ == "__main__":
    main()
