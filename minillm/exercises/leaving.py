"""Graders of 17: sums counted, a row-parallel layer, the parents of kept tokens, int8 by rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minillm.exercises import check_numbers, exercise
from minillm.fast.export import quantize_rows

PREDICTED = {
    "all-reduces in a forward pass": 20,
    "all-reduces in a forward and a backward pass": 40,
    "bytes of the tensor that one all-reduce adds up": 2 * 100 * 512 * 4,
    "all-reduces of one decoding step": 20,
    "bytes of the tensor in a decoding step of 2 rows": 2 * 512 * 4,
}
HINTS = {
    "all-reduces in a forward pass": "how many blocks has a layer, and how many sums has a block?",
    "all-reduces in a forward and a backward pass": "which tensor's gradient comes from all heads?",
    "bytes of the tensor that one all-reduce adds up": (
        "a sum ends a block: what shape has a block's output, and how large is a float32?"
    ),
    "all-reduces of one decoding step": "a step is a forward pass; does its length matter?",
    "bytes of the tensor in a decoding step of 2 rows": "how many new tokens has each row?",
}


@exercise(
    "17.1",
    "count the blocks; then write down the shape of what a block gives back",
    "the number of sums is the model's, their size the batch's; weights are never sent",
)
def _predicted(answer: Any) -> str | None:
    return check_numbers(answer, PREDICTED, HINTS)


@exercise(
    "17.2",
    "what does each process compute from its own numbers, and what belongs to none of them?",
    "parts are added, and what is not a part is added once",
)
def _row_parallel(answer: Callable[[list[Tensor], list[Tensor], Tensor | None], Any]) -> str | None:
    for size, with_bias in ((2, False), (1, True), (2, True), (4, True)):
        draw = torch.Generator().manual_seed(size)
        layer = torch.randn(3, 8, generator=draw, dtype=torch.float64)
        x = torch.randn(5, 8, generator=draw, dtype=torch.float64)
        bias = torch.randn(3, generator=draw, dtype=torch.float64) if with_bias else None
        wanted = x @ layer.T + (0 if bias is None else bias)
        case = f"{size} process{'es' * (size > 1)}, {'a' if with_bias else 'no'} bias"
        parts = ([*x.chunk(size, 1)], [*layer.chunk(size, 1)])
        got = answer(*parts, bias)
        if not isinstance(got, Tensor) or got.shape != wanted.shape:
            return f"{case}: return one tensor (B, out) = (5, 3), as every process has it"
        if torch.allclose(got, wanted, atol=1e-9):
            continue
        if bias is not None and torch.allclose(got, wanted + (size - 1) * bias, atol=1e-9):
            return f"{case}: the bias is in it {size} times; whose is it?"
        if bias is not None and torch.allclose(got, wanted - bias, atol=1e-9):
            return f"{case}: the bias is missing"
        if torch.allclose(got * size, wanted, atol=1e-9):
            return f"{case}: a mean was taken; each process has other inputs, not another estimate"
        return f"{case}: the numbers are others than those of x Wᵀ + bias"
    return None


PARENTS = {4: (0, 1), 5: (2, 3), 6: (4, 2), 7: (6, 5), 8: (1, 1), 9: (8, 0), 10: (7, 9)}


@exercise(
    "17.3",
    "a parent has parents too: when are you done?",
    "a kept token needs everything below it, or no merge leads to it",
)
def _with_parents(
    answer: Callable[[set[int], Mapping[int, tuple[int, int]]], Any],
) -> str | None:
    cases = [({4}, {4, 0, 1}), ({3}, {3}), ({6}, {6, 4, 2, 0, 1}), (set(), set())]
    cases += [({9, 5}, {9, 8, 1, 0, 5, 2, 3}), ({10}, set(range(11)))]
    for keep, wanted in cases:
        given, parents = set(keep), dict(PARENTS)
        got = answer(given, parents)
        case = f"keep {sorted(keep)} with parents {PARENTS}"
        if given != keep or parents != PARENTS:
            return f"{case}: the arguments were changed; return a new set"
        if not isinstance(got, set | frozenset | list | tuple):
            return f"{case}: return a set of ids"
        if missing := wanted - set(got):
            if asked := missing & keep:
                return f"{case}: {min(asked)} is asked for, and missing"
            below, child = max(
                (id_, i) for i in wanted for id_ in parents.get(i, ()) if id_ in missing
            )
            return f"{case}: {below} is missing; what is {child} merged from?"
        if extra := set(got) - wanted:
            return f"{case}: {min(extra)} is not needed"
    deep = {i: (i - 1, 0) for i in range(1, 200)}  # no deeper: recursion is a right answer, too
    if set(answer({199}, deep)) != set(range(200)):
        return "a token with 199 merges below it: not all of them are kept"
    return None


@exercise(
    "17.4",
    "try it on a row of negative numbers, then look at what 0.9 of a step becomes",
    "the largest size of a row counts, whatever its sign, and steps are rounded to the nearest",
)
def _int8_rows(answer: Callable[[Tensor], Any]) -> str | None:
    for seed, shift in ((0, 0.0), (1, -2.0), (2, 2.0)):
        weight = torch.randn(6, 9, generator=torch.Generator().manual_seed(seed)) + shift
        got = answer(weight.clone())
        if not isinstance(got, tuple | list) or len(got) != 2:
            return "return the whole numbers and the factors"
        rows, scale = got
        if not isinstance(rows, Tensor) or rows.dtype != torch.int8 or rows.shape != weight.shape:
            return f"the whole numbers are int8 {tuple(weight.shape)}"
        if not isinstance(scale, Tensor) or scale.shape != (6, 1):
            return "one factor for each row: (6, 1)"
        wanted_rows, wanted_scale = quantize_rows(weight)
        if not torch.allclose(scale, wanted_scale):
            if torch.allclose(scale, weight.amax(1, keepdim=True) / 127):
                return "the factor: what is the largest number of a row whose numbers are negative?"
            return "the factor: with 127 of them, what is to be reached, and in which row?"
        if not torch.equal(rows, wanted_rows):
            off = ((rows * scale - weight).abs() / scale).max().item()
            return f"a number is off by {off:.2f} steps; half a step is possible"
    return None
