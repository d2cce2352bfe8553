"""Graders of 10_four_bits: a product of levels, bits a number, a divergence."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from minillm.exercises import Unsolved, check_table, exercise, is_number


def _row(seed: int, groups: int) -> tuple[list[float], list[int], list[float], list[float]]:
    draw = random.Random(seed)
    x = [draw.uniform(-1, 1) for _ in range(32 * groups)]
    levels = [draw.randrange(16) for _ in x]
    scale = [draw.uniform(0.01, 0.1) for _ in range(groups)]
    return x, levels, scale, [draw.uniform(-1, 0) for _ in range(groups)]


@exercise(
    "10_four_bits.1",
    "for each 32: the scale times one sum, and the least number times another",
    "a product needs no decoded matrix: scale and least number wait until the sums are there",
)
def _product(answer: Callable[..., Any]) -> str | None:
    for seed, groups in ((0, 1), (1, 2), (2, 3)):
        x, levels, scale, least = _row(seed, groups)
        got = answer(list(x), list(levels), list(scale), list(least))
        if got is None or got is ...:
            raise Unsolved
        case = f"{32 * groups} numbers"
        if not is_number(got):
            return f"{case}: the product of two rows is one number, not {got!r:.60}"
        parts = [range(32 * g, 32 * g + 32) for g in range(groups)]
        sums = [sum(x[i] * levels[i] for i in part) for part in parts]
        alone = [sum(x[i] for i in part) for part in parts]
        scaled = sum(s * v for s, v in zip(scale, sums, strict=True))
        shifts = sum(m * v for m, v in zip(least, alone, strict=True))
        if math.isclose(got, scaled + shifts, abs_tol=1e-6):
            continue
        for hint, other in {
            "the least numbers are missing: each is times the sum of its 32 numbers of x": scaled,
            "each least number is times the sum of x, not added once": scaled + sum(least),
            "the scales are missing": sum(sums) + shifts,
            "each 32 numbers have their own scale": scale[0] * sum(sums) + least[0] * sum(alone),
        }.items():
            if math.isclose(got, other, abs_tol=1e-6):
                return f"{case}: {hint}"
        return f"{case}: it is {scaled + shifts:.4f}, not {got:.4f}"
    return None


PACKED = "Q8_0 as two matrices of four bits, packed"
BITS: dict[str, float] = {"Q4_0": 4.5, "Q4_1": 5, "Q4_K": 4.5, "Q8_0 in a file": 8.5, PACKED: 10}
_HINTS = {
    "Q4_0": "16 bytes of levels and a float16 for 32 numbers",
    "Q4_1": "16 bytes of levels and two float16 for 32 numbers",
    "Q4_K": "128 bytes of levels, twelve of scales and two float16 for 256 numbers",
    "Q8_0 in a file": "32 bytes of levels and a float16 for 32 numbers",
    PACKED: "each of the two has a scale and a zero of its own, in bfloat16, for 32 levels",
}


def _slip(kind: str, value: Any) -> str | None:
    if value == (8 if kind.startswith("Q8") else 4):
        return "these are the levels alone; scales take room, too"
    if kind == PACKED and value == 9:
        return "the product wants a zero beside each scale, also where the file has none"
    return None


@exercise(
    "10_four_bits.2",
    "count the bytes of a block, times eight, over its numbers",
    "four bits are four and a half or five; eight bits as two times four are ten",
)
def _bits(answer: Any) -> str | None:
    return check_table(
        answer,
        BITS,
        _HINTS,
        _slip,
        kind="a number of bits",
        fits=lambda value: is_number(value) and value > 0,
        near=0.01,
    )


@exercise(
    "10_four_bits.3",
    "normalise both, weigh log p - log q by p, add over tokens, take the mean over positions",
    "a divergence is never negative, and 0 only between equal probabilities",
)
def _kl(answer: Callable[..., Any]) -> str | None:
    import torch

    generator = torch.Generator().manual_seed(0)
    for T, V in ((1, 3), (4, 7)):
        logits, exact = torch.randn(2, T, V, generator=generator).unbind(0)
        got = answer(logits.clone(), exact.clone())
        if got is None or got is ...:
            raise Unsolved
        got = float(got) if isinstance(got, torch.Tensor) and got.numel() == 1 else got
        case = f"logits ({T}, {V})"
        if not is_number(got):
            return f"{case}: one number is asked for, not {got!r:.60}"
        q, p = logits.log_softmax(-1), exact.log_softmax(-1)
        each = (p.exp() * (p - q)).sum(-1)
        wanted = each.mean().item()
        if math.isclose(got, wanted, rel_tol=1e-4):
            continue
        for hint, other in {
            "that is the divergence the other way round: p are the exact model's": (
                q.exp() * (q - p)
            )
            .sum(-1)
            .mean(),
            "those are bits; asked are nats": each.mean() / math.log(2),
            "that is the sum over positions; asked is a token's mean": each.sum(),
            "the mean is over positions alone, tokens are summed": each.mean() / V,
            "scores are no logarithms of probabilities before log_softmax": (
                exact.exp() * (exact - logits)
            )
            .sum(-1)
            .mean(),
            "the cross entropy has the exact model's own entropy in it": -(p.exp() * q)
            .sum(-1)
            .mean(),
        }.items():
            if math.isclose(got, float(other), rel_tol=1e-4):
                return f"{case}: {hint}"
        return f"{case}: it is {wanted:.4f}, not {got:.4f}"
    return None
