"""Generation on one CPU thread beside transformers: same weights, same tokens, tokens per second.

    OMP_NUM_THREADS=1 python benchmarks/decode.py            # the two shapes at batch 1 and 8
    OMP_NUM_THREADS=1 python benchmarks/decode.py --compile  # with torch.compile as well (minutes)

Each round times every contender once, in turn. Printed are medians, the ratio to the better one of
transformers' dynamic and static cache, and which share of the memory bandwidth it takes to read all
weights once a token.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
import transformers

from minillm.deeper.fast.packed import PackedLM
from minillm.deeper.pretrained.load import from_pretrained
from minillm.generation import generate

SHAPES = {
    "28M": (4096, 512, 8, 8, 4, 1408),
    "1M": (1024, 128, 4, 4, 2, 352),
}
KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
KEYS += ("num_key_value_heads", "intermediate_size")


def bandwidth(size: int = 2**28) -> float:
    """Bytes per second that one thread reads from memory: the best of several passes."""
    x = torch.ones(size // 4)
    x.sum()
    best = 0.0
    for _ in range(5):
        start = time.process_time()
        x.sum()
        best = max(best, size / (time.process_time() - start))
    return best


def contenders(theirs, ours, packed, ids, new, args):
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def them(kind):
        return lambda: theirs.generate(ids, cache_implementation=kind, **options)

    def us(model, **more):
        return lambda: generate(model, ids, max_new_tokens=new, eos_token_id=None, **more)

    found = {
        "transformers, dynamic": them("dynamic"),
        "transformers, static": them("static"),
        "minillm": us(ours),
        "minillm, packed": us(packed),
    }
    if args.compile:
        found["minillm, packed, compiled"] = us(packed, cache="static", compile=True)
    return found


def measure(runs, rounds):
    results, seconds = {}, {name: [] for name in runs}
    for name, run in runs.items():  # warm up, and the tokens to compare
        results[name] = run()
    for name, ids in results.items():
        assert torch.equal(ids, results["transformers, dynamic"]), f"{name}: other tokens"
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(s) for name, s in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rate = bandwidth()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, 1 thread, float32")
    print(f"memory bandwidth of one thread: {rate / 1e9:.1f} GB/s\n")
    for name in args.shapes:
        shape = dict(zip(KEYS, SHAPES[name], strict=True))
        more = {"max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": None}
        config = transformers.LlamaConfig(**shape, **more, initializer_range=0.1)
        torch.manual_seed(0)
        theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            ours, _ = from_pretrained(folder)
        packed = PackedLM(ours)
        print(f"packed, by the clock: {packed.ways}")
        for batch in args.batches:
            ids = torch.randint(1, shape["vocab_size"], (batch, args.prompt))
            runs = contenders(theirs, ours, packed, ids, args.new, args)
            seconds = measure(runs, args.rounds)
            best = min(s for n, s in seconds.items() if n.startswith("transformers"))
            read = 4 * (ours.num_parameters() - ours.model.embed_tokens.weight.numel())
            print(f"{name}, batch {batch}, {args.prompt} + {args.new} tokens")
            for contender, s in seconds.items():
                share = read * args.new / s / rate
                tokens = batch * args.new / s
                limit = f", {share:.0%} of the bandwidth" if batch == 1 else ""
                print(f"  {contender:27} {tokens:8.1f} tokens/s  {best / s:5.2f}x{limit}")
            print(flush=True)


if __name__ == "__main__":
    main()
