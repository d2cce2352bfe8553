"""Graders of 17_how_small: the parents of kept tokens, int8 by rows, what pruning saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minillm.deeper.fast.small import quantize_rows
from minillm.exercises import check_table, check_values, exercise

PARENTS = {4: (0, 1), 5: (2, 3), 6: (4, 2), 7: (6, 5), 8: (1, 1), 9: (8, 0), 10: (7, 9)}


@exercise(
    "17_how_small.1",
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


SCALE_MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "what is the largest number of a row whose numbers are negative?": (
        lambda w: w.amax(1, keepdim=True) / 127
    ),
    "a row has a number of each sign; its size decides, not the distance of the two": (
        lambda w: (w.amax(1, keepdim=True) - w.amin(1, keepdim=True)) / 254
    ),
    "int8 ends at 127; with 128 the largest number would need 128": (
        lambda w: w.abs().amax(1, keepdim=True) / 128
    ),
    "with 127 of them, what is to be reached, and in which row?": (
        lambda w: (w.abs().max() / 127).expand(len(w), 1)
    ),
}


@exercise(
    "17_how_small.2",
    "try it on a row of negative numbers, then look at what 0.9 of a step becomes",
    "the largest size of a row counts, whatever its sign, and steps are rounded to the nearest",
)
def _int8_rows(answer: Callable[[Tensor], Any]) -> str | None:
    for seed, shift in ((0, 0.0), (1, -2.0), (2, 2.0)):
        weight = torch.randn(6, 9, generator=torch.Generator().manual_seed(seed)) + shift
        given = weight.clone()
        got = answer(given)
        if not torch.equal(given, weight):
            return "the argument was changed; return new tensors"
        if not isinstance(got, tuple | list) or len(got) != 2:
            return "return the whole numbers and the factors"
        rows, scale = got
        if not isinstance(rows, Tensor) or rows.dtype != torch.int8 or rows.shape != weight.shape:
            return f"the whole numbers are int8 {tuple(weight.shape)}"
        if not isinstance(scale, Tensor) or scale.shape != (6, 1):
            return "one factor for each row: (6, 1)"
        wanted_rows, wanted_scale = quantize_rows(weight)
        slips = ((said, mistake(weight)) for said, mistake in SCALE_MISTAKES.items())
        said = "how far does the largest number of a row lie from zero?"
        if why := check_values(scale, wanted_scale, slips, near=1e-5, otherwise=said):
            return f"the factor of row 0 is {scale[0].item():.4f}: {why}"
        if not torch.equal(rows, wanted_rows):
            off = ((rows * scale - weight).abs() / scale).max().item()
            return f"a number is off by {off:.2f} steps; half a step is possible"
    rows, scale = answer(torch.zeros(2, 3))
    if not torch.equal(scale, torch.ones(2, 1)) or rows.any():
        return f"a row of zeros has the factor {scale[0].item():g}; the task asks for 1, and zeros"
    return None


PREDICTED = {
    "weights before": 500_000,
    "weights after": 410_000,
    "bytes of the pruned embedding in float32": 40_000,
    "bytes of the pruned embedding in int8, a float32 factor a row": 10_400,
    "by how many steps an int8 number may be off, at most": 0.5,
}
HINTS = {
    "weights before": "the embedding has V rows of C numbers, and is there once",
    "weights after": "which weights are a token's own?",
    "bytes of the pruned embedding in float32": "100 rows are left; how large is a float32?",
    "bytes of the pruned embedding in int8, a float32 factor a row": (
        "a byte a number, and what each row needs besides"
    ),
    "by how many steps an int8 number may be off, at most": "what is between two whole numbers?",
}


@exercise(
    "17_how_small.3",
    "count the rows of the embedding, then the bytes of a row",
    "only a token's own rows go; int8 saves three bytes of four, less a factor a row",
)
def _predicted(answer: Any) -> str | None:
    return check_table(answer, PREDICTED, HINTS)
