"""Graders of 10_real_text: the interval of a text, sizes of files to predict, orders mixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from minillm.exercises import Unsolved, check_table, exercise, is_number

_CHANCES = (
    {"a": Fraction(1, 2), "b": Fraction(1, 4), "c": Fraction(1, 4)},
    {"z": Fraction(1, 3), "a": Fraction(2, 3)},
    {"x": Fraction(1, 10), "y": Fraction(2, 10), "b": Fraction(7, 10)},
)
_TEXTS = ("", "b", "bac", "cab", "z", "aaz", "zazaz", "yb", "bxyb", "xxxx")


def _interval(
    text: str, chances: Mapping[str, Fraction], *, narrowed: bool = True
) -> tuple[Fraction, Fraction]:
    """Low and width; with `narrowed` False, shares are always taken of the whole."""
    low, width = Fraction(0), Fraction(1)
    for letter in text:
        for other, p in chances.items():
            if other == letter:
                break
            low += (width if narrowed else 1) * p
        width *= chances[letter]
    return low, width


@exercise(
    "10_real_text.1",
    "begin with low 0 and width 1; each letter takes its share of the interval that is left",
    "the width is the probability of the text, and low says which text of all it is",
)
def _intervals(answer: Callable[..., Any]) -> str | None:
    for chances in _CHANCES:
        for text in (t for t in _TEXTS if set(t) <= set(chances)):
            got = answer(text, dict(chances))
            if got is None or got is ...:
                raise Unsolved
            case = f"{text!r} with {', '.join(f'{k} {p}' for k, p in chances.items())}"
            if not (isinstance(got, tuple | list) and len(got) == 2):
                return f"{case}: the answer is (low, width), not {got!r}"
            if any(isinstance(x, float) for x in got):
                return f"{case}: a float holds 53 bits and a long text needs more: use Fraction"
            low, width = _interval(text, chances)
            if tuple(got) == (low, width):
                continue
            others = {
                "those are the ends of the interval; asked are low and width": (low, low + width),
                "the shares stand in the dictionary's order, not in the alphabet's": _interval(
                    text, dict(sorted(chances.items()))
                ),
                "a letter's share is of the interval that is left, not of the whole": _interval(
                    text, chances, narrowed=False
                ),
                "the first letter must narrow the interval first": _interval(text[::-1], chances),
            }
            for hint, other in others.items():
                if tuple(got) == other:
                    return f"{case}: {hint}"
            if got[1] == width:
                return f"{case}: the width is right, low is not: add the shares before the letter's"
            return f"{case}: it is low {low}, width {width}, not {got[0]}, {got[1]}"
    return None


FILES: dict[str, int] = {
    "1,000 throws of a fair coin": 125,
    "1,000 bytes, a model that gives each of 256 the same chance": 1000,
    "1,000 letters, each of which had a chance of 1/8": 375,
    "100,000 bytes at 2.2 bits a byte": 27_500,
}
_HINTS = {
    "1,000 throws of a fair coin": "a throw is one bit, and eight bits are a byte",
    "1,000 bytes, a model that gives each of 256 the same chance": "-log2(1/256) bits each",
    "1,000 letters, each of which had a chance of 1/8": "-log2(1/8) bits each, eight to a byte",
    "100,000 bytes at 2.2 bits a byte": "add the bits of all bytes, then divide by eight",
}


def _slip(question: str, value: Any) -> str | None:
    if value == 8 * FILES[question]:
        return "these are bits; asked are bytes"
    if math.isclose(value, FILES[question] * math.log(2), rel_tol=0.01):
        return "those would be nats; a file has bits"
    return None


@exercise(
    "10_real_text.2",
    "a file has as many bits as the model is surprised by",
    "bits add up, and eight of them are a byte: a loss is the size of a file",
)
def _sizes(answer: Any) -> str | None:
    return check_table(
        answer,
        FILES,
        _HINTS,
        _slip,
        kind="a whole number of bytes",
        fits=lambda value: is_number(value) and value > 0,
        near=0.5,
    )


_ROWS: tuple[tuple[dict[str, int], dict[str, float]], ...] = (
    ({"e": 3, "a": 1}, {"e": 0.5, "a": 0.25, "t": 0.25}),
    ({"t": 1}, {"e": 0.125, "a": 0.5, "t": 0.375}),
    ({}, {"e": 0.5, "t": 0.5}),
    ({"e": 2, "a": 5, "t": 1}, {"e": 0.2, "a": 0.3, "t": 0.4, "x": 0.1}),
)


@exercise(
    "10_real_text.3",
    "what the counts get and what the shorter context gets must add up to 1",
    "the weight d / (n + d) that goes to the shorter context is taken from the counts",
)
def _mixture(answer: Callable[..., Any]) -> str | None:
    for row, shorter in _ROWS:
        got = answer(dict(row), dict(shorter))
        if got is None or got is ...:
            raise Unsolved
        case = f"row {row}, shorter {shorter}"
        if not isinstance(got, dict) or got.keys() != shorter.keys():
            return f"{case}: a dictionary with all of {sorted(shorter)} as keys is asked for"
        n, d = sum(row.values()), len(row)
        if not n:
            if all(math.isclose(got[x], shorter[x]) for x in shorter):
                continue
            return f"{case}: nothing was seen here, so the shorter context says it alone"
        total = math.fsum(got.values())
        if not math.isclose(total, 1.0, abs_tol=1e-9):
            return f"{case}: the probabilities sum to {total:.3f}, not to 1"
        want = {x: (row.get(x, 0) + d * p) / (n + d) for x, p in shorter.items()}
        if all(math.isclose(got[x], want[x], abs_tol=1e-9) for x in want):
            continue
        if all(math.isclose(got[x], row.get(x, 0) / n, abs_tol=1e-9) for x in want):
            return f"{case}: those are the counts alone; what was not seen gets nothing"
        if all(math.isclose(got[x], (row.get(x, 0) + p) / (n + 1)) for x, p in shorter.items()):
            return f"{case}: the shorter context's weight is d / (n + d), not 1 / (n + 1)"
        x = max(want, key=lambda key: abs(got[key] - want[key]))
        return f"{case}: {x!r} has {want[x]:.4f}, not {got[x]:.4f}"
    return None
