"""Graders of 05_long_context: turns of each pair, the NTK base, what each recipe slows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.deeper.attention.rope_scaling import rope_frequencies
from minillm.exercises import check_table, check_values, exercise


@exercise(
    "05_long_context.1",
    "the angle at position `length`, and how many radians a full turn has",
    "pairs that never turn once within the trained length are those that meet new angles beyond it",
)
def _turns(answer: Callable[[int, float, int], Tensor]) -> str | None:
    for head_dim, base, length in ((8, 10000.0, 100), (64, 500000.0, 8192), (2, 10.0, 7)):
        got = torch.as_tensor(answer(head_dim, base, length)).float()
        frequencies, _ = rope_frequencies(head_dim, base=base)
        want = length * frequencies / (2 * math.pi)
        case = f"head_dim {head_dim}, base {base:g}, length {length}"
        if got.shape != want.shape:
            pairs = head_dim // 2
            return f"{case}: expected one number for each of {pairs} pairs, got {tuple(got.shape)}"
        slips = {
            "these are radians, and a full turn has 2 pi of them": frequencies * length,
            "these are degrees, the question is full turns": 360 * want,
            f"these are words per turn, the question is turns in {length} words": length / want,
            "these are the turns in one word": want / length,
            "the order is from fast to slow, yours begins with the slowest pair": want.flip(0),
            "parts of a turn count too, the slow pairs have nothing else": want.floor(),
        }
        said = f"the first pair makes {want[0]:.4g} turns, the last {want[-1]:.4g}"
        if why := check_values(got, want, slips, near=1e-4, otherwise=said):
            return f"{case}: {why}"
    return None


@exercise(
    "05_long_context.2",
    "write down what the slowest pair turns by per word, under the old base and under the new",
    "a larger base slows every pair but the first, and the last one most",
)
def _ntk_base(answer: Callable[[float, int, float], float]) -> str | None:
    for base, head_dim, factor in ((10000.0, 8, 4.0), (10000.0, 128, 2.0), (500000.0, 64, 1.0)):
        got = float(answer(base, head_dim, factor))
        want = base * factor ** (head_dim / (head_dim - 2))
        if not got > 0:
            return f"with head_dim {head_dim} your base is {got:.6g}, and a base is positive"
        power = (head_dim - 2) / head_dim
        slips = {
            f"base * factor slows the last of {head_dim // 2} pairs only by factor ** {power:.3f}: "
            "its exponent is (D - 2)/D, not 1": base * factor,
            "the exponent is upside down: it has to undo (D - 2)/D, not to repeat it": (
                base * factor**power
            ),
        }
        said = (
            f"with head_dim {head_dim} your base {got:.6g} slows the slowest pair "
            f"{(got / base) ** power:.3f} times instead of {factor:g}"
        )
        if why := check_values(got, want, slips, otherwise=said):
            return why
    return None


SLOWER: dict[tuple[str, int], float] = {
    ("linear", 0): 4,
    ("linear", 63): 4,
    ("static NTK", 0): 1,
    ("static NTK", 63): 4,
    ("dynamic NTK", 63): 13,
    ("llama3", 0): 1,
    ("llama3", 63): 4,
}
WHY = {
    ("linear", 0): "linear treats all pairs alike",
    ("linear", 63): "linear treats all pairs alike",
    ("static NTK", 0): "it changes the base only: what is the power 0 of a base?",
    ("static NTK", 63): "for which pair is the new base chosen?",
    ("dynamic NTK", 63): "at four times the length, what stands in the place of s?",
    ("llama3", 0): "it turns hundreds of times in 4,096 words; what happens to such pairs?",
    ("llama3", 63): "it does not turn once in 4,096 words; what happens to such pairs?",
}


def _share(case: tuple[str, int], value: float) -> str | None:
    if SLOWER[case] > 1 and math.isclose(value, 1 / SLOWER[case], rel_tol=0.01):
        return "asked is how many times slower, not the share that is left"
    return None


@exercise(
    "05_long_context.3",
    "take the recipes one by one: what do they do to the first pair, what to the last?",
    "all four slow the slow end; the fast end is what tells them apart",
)
def _times_slower(answer: Any) -> str | None:
    return check_table(answer, SLOWER, WHY, _share, share=0.01)
