"""The race of deeper/06_norms_and_activations: which norm, which feed-forward block?

    OMP_NUM_THREADS=1 python benchmarks/blocks.py [steps]     (writes assets/blocks.csv)

Small models on the stories of `StoryLanguage`, as large as each other: LayerNorm or RMSNorm, and
ReLU, GELU or SiLU, plain (F = 4 C) or gated (F = 8/3 C); and, as a control, RMSNorm with gated
blocks of F = 4 C, which have more weights. Each kind is tried at rates a factor of
two apart with seed 0, until the best one is not the smallest or largest tried; it is run there
with seeds 1 and 2 as well. The file holds every run: held-out bits a byte.
"""

import csv
import itertools
import sys
from functools import partial
from pathlib import Path

from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.training.documents import DocumentBatches, StoryDocuments
from minillm.layers import MLP, GatedMLP, LayerNorm, RMSNorm
from minillm.model import CausalLM
from minillm.stories.language import StoryLanguage
from minillm.support.family import FAMILIES, Family
from minillm.training import TrainConfig, evaluate, train

C, DEPTH = 72, 2
NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
ACTIVATIONS = ("relu", "gelu", "silu")
WIDTHS = {"plain": 4 * C, "gated": 8 * C // 3, "gated, wide": 4 * C}
KINDS = list(itertools.product(NORMS, ACTIVATIONS, ("plain", "gated")))
KINDS += [("RMSNorm", activation, "gated, wide") for activation in ACTIVATIONS]


def make(norm: str, activation: str, block: str, vocab_size: int, end: int, seed: int) -> CausalLM:
    """A model of that kind."""

    def mlp(config: ModelConfig, layer: int) -> MLP | GatedMLP:
        if block == "plain":
            return MLP(C, WIDTHS[block], activation=activation, bias=False)
        return GatedMLP(C, WIDTHS[block], activation=activation)

    FAMILIES["kind"] = Family(norm=lambda config: NORMS[norm](C), mlp=mlp)
    config = ModelConfig(
        vocab_size, C, DEPTH, 2, 4 * C, "kind", rope_theta=1e5, tie_word_embeddings=True,
        initializer_range=0.08, eos_token_id=end,
    )  # fmt: skip
    return CausalLM(config, seed=seed)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 900
    language = StoryLanguage("en")
    tokenizer = BPETokenizer.train(
        language.corpus(1000, seed=0), 1024, special_tokens=["<|endoftext|>"], add_bos=True
    )
    end, held_out = tokenizer.eos_token_id, language.corpus(60, seed="held out")
    out = Path(__file__).parents[1] / "assets" / "blocks.csv"
    with out.open("w", newline="") as file:
        write = csv.writer(file, lineterminator="\n").writerow
        write(["norm", "activation", "block", "parameters", "rate", "seed", "bits_per_byte"])

        def bits(kind: tuple[str, str, str], rate: float, seed: int) -> float:
            model = make(*kind, tokenizer.vocab_size, end, seed)
            documents = StoryDocuments(language, tokenizer.encode_ordinary, seed=seed)
            batches = DocumentBatches(documents, 4, 256, eos_token_id=end)
            settings = TrainConfig(steps, max_lr=rate, min_lr=rate / 100, warmup_steps=20)
            train(model, batches, settings)
            found = evaluate(model, tokenizer, held_out)
            size = sum(p.numel() for p in model.parameters())
            write([*kind, size, f"{rate:g}", seed, f"{found:.4f}"])
            file.flush()
            print(f"  {kind} rate {rate:g}, seed {seed}: {found:.4f}", flush=True)
            return found

        for kind in KINDS:
            tried = {rate: bits(kind, rate, 0) for rate in (1e-2, 2e-2)}
            while (best := min(tried, key=tried.__getitem__)) in (min(tried), max(tried)):
                beyond = best / 2 if best == min(tried) else best * 2
                tried[beyond] = bits(kind, beyond, 0)
            row = [tried[best], *map(partial(bits, kind, best), (1, 2))]
            print(f"{kind} best rate {best:g}: " + "  ".join(f"{x:.4f}" for x in row), flush=True)


if __name__ == "__main__":
    main()
