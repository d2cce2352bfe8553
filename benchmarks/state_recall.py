"""Recall of beyond/12_state pushed further: 32 keys, until a trained state fails; three seeds.

    OMP_NUM_THREADS=1 python benchmarks/state_recall.py

A pair (a key, one of 16 values) is one token, a question another. Models have one layer of 32
numbers. Prints the share of right answers by the number of pairs told. Some three minutes of CPU.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.model import CausalLM

KEYS, VALUES, TOLD = 32, 16, (1, 2, 4, 8, 16, 32)
BASE = {"vocab_size": KEYS * VALUES + KEYS, "hidden_size": 32, "num_hidden_layers": 1}
BASE |= {"initializer_range": 0.1}
RUNS = (("attention", 800), ("state 16", 1600), ("state 1", 1600))


def draw(rows: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pairs told, then a question for each in another order: ids (rows, 2 pairs), answers."""
    keys = torch.rand(rows, KEYS, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(VALUES, (rows, pairs), generator=generator)
    order = torch.rand(rows, pairs, generator=generator).argsort(1)
    asked, wanted = keys.gather(1, order), values.gather(1, order)
    return torch.cat([keys * VALUES + values, KEYS * VALUES + asked], 1), wanted


def make(kind: str, seed: int) -> CausalLM:
    """Attention, or one head with a state of that many columns."""
    if kind == "attention":
        more = {"model_type": "qwen3", "num_attention_heads": 1, "intermediate_size": 64}
    else:
        state = {"state_size": int(kind.split()[1]), "num_heads": 1}
        more = {"model_type": "mamba2", "state": state}
    return CausalLM(ModelConfig(**BASE, **more), seed=seed)


def fit(model: nn.Module, loss_of_a_batch: Callable[[], Tensor], steps: int, lr: float) -> None:
    """AdamW, the rate warmed up over 20 steps and then down half a cosine to a twentieth."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    for step in range(steps):
        loss = loss_of_a_batch()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        cosine = 0.525 + 0.475 * math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 20) * cosine
        optimizer.step()


def train(model: CausalLM, seed: int, steps: int, lr: float = 2e-2) -> None:
    """Rows of 1 to 32 pairs, 32 a step."""
    generator = torch.Generator().manual_seed(seed)

    def loss_of_a_batch() -> Tensor:
        pairs = int(torch.randint(1, KEYS + 1, (), generator=generator))
        ids, wanted = draw(32, pairs, generator)
        logits = model(ids, logits_to_keep=pairs)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    fit(model, loss_of_a_batch, steps, lr)


@torch.no_grad()
def accuracy(model: CausalLM, pairs: int) -> float:
    ids, wanted = draw(300, pairs, torch.Generator().manual_seed(99))
    return (model(ids, logits_to_keep=pairs).argmax(-1) == wanted).float().mean().item()


def main() -> None:
    print(f"{'pairs told':28}", *(f"{pairs:5}" for pairs in TOLD))
    for kind, steps in RUNS:
        for seed in range(3):
            model = make(kind, seed)
            train(model, seed, steps)
            row = (f"{accuracy(model, pairs):5.2f}" for pairs in TOLD)
            print(f"{kind:10} {steps:5} steps, seed {seed}", *row, flush=True)


if __name__ == "__main__":
    main()
