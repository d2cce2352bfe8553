"""Graders of 13: inputs and targets, targets counted, packed rows mended, a preference's loss."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from minillm.exercises import check_table, check_values, exercise


def _targets(ids: Sequence[int], mask: Sequence[bool]) -> tuple[list[int], list[int]]:
    return list(ids[:-1]), [i if m else -100 for i, m in zip(ids[1:], mask[1:], strict=True)]


@exercise(
    "13.1",
    "which id stands opposite each input, and whose place in the mask decides about it?",
    "a target belongs to the position before it, and the mask is shifted with the targets",
)
def _inputs_and_targets(answer: Callable[[list[int], list[bool]], Any]) -> str | None:
    cases = [
        ([5, 6, 7, 8, 9], [False, False, True, True, False]),
        ([3, 4, 0, 4, 9, 4], [True, False, True, False, False, True]),
        ([1, 2], [False, True]),
    ]
    for ids, mask in cases:
        wanted = _targets(ids, mask)
        case = f"ids {ids}, mask {mask}"
        given = list(ids), list(mask)
        got = answer(*given)
        if not isinstance(got, tuple | list) or len(got) != 2:
            return f"{case}: return two lists, the inputs and the targets"
        inputs, targets = (list(part) for part in got)
        if (inputs, targets) == wanted:
            if given != (ids, mask):
                return f"{case}: the lists that were given are changed: make new ones"
            continue
        if (targets, inputs) == wanted:
            return f"{case}: return the inputs first, then the targets"
        if -100 in inputs:
            return f"{case}: the model reads all ids; -100 belongs to the targets alone"
        if inputs == ids:
            return f"{case}: nothing follows the last id, so it is no input"
        if inputs != wanted[0]:
            return f"{case}: the inputs should be {wanted[0]}, not {inputs}"
        if targets == [i if m else -100 for i, m in zip(ids[:-1], mask, strict=False)]:
            return f"{case}: a target is the id that follows the input, not the input itself"
        if targets == [i if m else -100 for i, m in zip(ids[1:], mask, strict=False)]:
            return f"{case}: the mask says whether an id is learned, not whether one is read"
        if targets == ids[1:]:
            return f"{case}: the mask is not used"
        if len(targets) != len(inputs):
            return f"{case}: {len(inputs)} inputs and {len(targets)} targets"
        return f"{case}: the targets should be {wanted[1]}, not {targets}"
    return None


COUNTED = {
    "one answer of 3 tokens, the end token marked": 4,
    "one answer of 3 tokens, the end token outside the marks": 3,
    "an empty answer, the end token marked": 1,
    "two answers, of 3 and 2 tokens, the end tokens marked": 7,
    "the first and the fourth of these, packed in one row": 11,
    "one answer of 3 tokens, the end token marked, in a row cut after 2 tokens of the answer": 2,
}
HINTS = {
    "one answer of 3 tokens, the end token marked": "the model must also learn to stop",
    "one answer of 3 tokens, the end token outside the marks": "what is not marked does not count",
    "an empty answer, the end token marked": "saying nothing is an answer, too: how does it end?",
    "two answers, of 3 and 2 tokens, the end tokens marked": "how many end tokens are there?",
    "the first and the fourth of these, packed in one row": "does packing change the targets?",
    "one answer of 3 tokens, the end token marked, in a row cut after 2 tokens of the answer": (
        "what stands before the cut?"
    ),
}


@exercise(
    "13.2",
    "write the tokens of the answer down, one by one; which are marked?",
    "an end token is a target like any other, and a row that is cut never shows it",
)
def _counted(answer: Any) -> str | None:
    return check_table(answer, COUNTED, HINTS)


@exercise(
    "13.3",
    "what would the second example of the row see if it stood alone, and at which position?",
    "packed is alone: positions begin again with each example, and nobody reads a neighbour",
)
def _alone(answer: Callable[[list[int]], Any]) -> str | None:
    for numbers in ([4, 4, 4], [7, 7, 2, 2, 2, 9], [3, 3, 8, 8, 8, 8, 1]):
        T = len(numbers)
        begins = [t for t in range(T) if t == 0 or numbers[t] != numbers[t - 1]]
        first = [max(b for b in begins if b <= t) for t in range(T)]
        places = [t - first[t] for t in range(T)]
        wanted = [[first[t] <= s <= t for s in range(T)] for t in range(T)]
        got = answer(list(numbers))
        case = f"numbers {numbers}"
        if not isinstance(got, tuple | list) or len(got) != 2:
            return f"{case}: return the positions and the mask"
        positions, mask = list(got[0]), [[bool(v) for v in row] for row in got[1]]
        if positions != places:
            if positions == list(range(T)):
                return f"{case}: the positions go on from one example to the next"
            return f"{case}: the positions should be {places}, not {positions}"
        if [len(row) for row in mask] != [T] * T:
            return f"{case}: the mask has {T} rows of {T}"
        for t in range(T):
            for s in range(T):
                if mask[t][s] == wanted[t][s]:
                    continue
                if s > t:
                    return f"{case}: query {t} reads key {s}, which comes later"
                if not wanted[t][s]:
                    return f"{case}: query {t} reads key {s}, of another example"
                return f"{case}: query {t} must read key {s}"
    return None


@exercise(
    "13.4",
    "how much more than the reference does the model prefer the chosen answer?",
    "only the change against the reference counts, and a pair that is settled moves little",
)
def _preference(answer: Callable[[float, float, float, float, float], Any]) -> str | None:
    rng = random.Random(0)
    cases: list[tuple[float, ...]] = [(-4.0, -6.0, -5.0, -5.0, 0.1), (-3.0, -3.0, -3.0, -3.0, 0.5)]
    cases += [(*(round(rng.uniform(-9, -1), 2) for _ in range(4)), 0.3) for _ in range(3)]
    cases += [(-900.0, -10.0, -10.0, -900.0, 1.0), (-10.0, -900.0, -900.0, -10.0, 1.0)]
    for case in cases:
        chosen, rejected, ref_chosen, ref_rejected, beta = case
        margin = (chosen - ref_chosen) - (rejected - ref_rejected)
        wanted = _softplus(-beta * margin)
        named = f"chosen {chosen}, rejected {rejected}, reference {ref_chosen}, {ref_rejected}"
        named += f", beta {beta}"
        try:
            got = float(answer(*case))
        except (OverflowError, ValueError) as error:
            return f"{named}: {error}; large numbers need another form of the same formula"
        others = {
            "the reference is missing": _softplus(-beta * (chosen - rejected)),
            "the sign is the other way round": _softplus(beta * margin),
            "the minus before the logarithm is missing": -wanted,
            "beta belongs inside, before the margin": _softplus(-margin),
            "beta multiplies the margin, not the loss": beta * _softplus(-margin),
            "the logarithm is missing": -_sigmoid(beta * margin),
            "this is the margin itself": -beta * margin,
        }
        said = f"{got} is not {wanted:.6f}"
        if why := check_values(got, wanted, others, otherwise=said):
            return f"{named}: {why}"
    return None


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _sigmoid(x: float) -> float:
    return math.exp(-_softplus(-x))
