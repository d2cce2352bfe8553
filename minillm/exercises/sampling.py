"""Graders of notebook 08: temperature, nucleus, stop strings, residual, typical sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from minillm.exercises import exercise

CASES = ([0.5, 0.3, 0.16, 0.02, 0.02], [0.25, 0.25, 0.25, 0.25], [0.01, 0.02, 0.07, 0.9])


def _close(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    pairs = list(zip(ours, theirs, strict=False))
    return len(ours) == len(theirs) and all(abs(a - b) < 1e-6 for a, b in pairs)


def _floats(values: Sequence[float]) -> list[float]:
    return [float(v) for v in values]


@exercise(
    "08.1",
    "Write sharpen(probs, t): the list of probabilities after temperature t, without any logits.",
)
def _sharpen(answer: Callable[[list[float], float], list[float]]) -> str | None:
    for probs in CASES:
        for t in (0.5, 1.0, 3.0):
            powers = [p ** (1 / t) for p in probs]
            want = [x / sum(powers) for x in powers]
            got = _floats(answer(list(probs), t))
            if _close(got, want):
                continue
            if abs(sum(got) - 1) > 1e-6:
                return f"at t = {t} your numbers sum to {sum(got):.3f}: renormalise"
            if _close(got, [p**t / sum(q**t for q in probs) for p in probs]):
                return f"t = {t} acts the wrong way round: dividing logits by t is the power 1/t"
            if t != 1 and _close(got, probs):
                return f"t = {t} changes nothing: p/t renormalised is p again, the power 1/t is not"
            return f"for {probs} at t = {t} I expected {[round(x, 3) for x in want]}"
    return None


@exercise(
    "08.2",
    "Write nucleus(probs, p): the sorted indices of the fewest most probable tokens that reach p.",
)
def _nucleus(answer: Callable[[list[float], float], list[int]]) -> str | None:
    for probs in (*CASES[:1], *CASES[2:], [0.2, 0.5, 0.05, 0.25]):
        for p in (1e-6, 0.45, 0.6, 0.95, 0.985):
            order = sorted(range(len(probs)), key=lambda i: -probs[i])
            kept: list[int] = []
            while sum(probs[i] for i in kept) < p - 1e-9:
                kept.append(order[len(kept)])
            got = sorted(int(i) for i in answer(list(probs), p))
            if got == sorted(kept):
                continue
            if not got:
                return f"for {probs} and p = {p} nothing is left: keep at least the best token"
            if got == sorted(kept[:-1]):
                return f"for {probs} and p = {p} the token that crosses p was dropped: keep it"
            return f"for {probs} and p = {p} I expected {sorted(kept)}, not {got}"
    return None


@exercise(
    "08.3",
    "Write until(pieces, stop): the text of the pieces before the first occurrence of stop.",
)
def _until(answer: Callable[[list[str], str], str]) -> str | None:
    cases = [
        (["The", " end", ".", " And more"], " end."),
        (["a", "b", "c", "abd", "x"], "cab"),
        (["no", " stop", " here"], "END"),
        (["STOP at once"], "STOP"),
        (["one END two", " END three"], "END"),
        (["aa", "ab", "z"], "aab"),
    ]
    for pieces, stop in cases:
        text = "".join(pieces)
        want = text.partition(stop)[0]
        got = answer(list(pieces), stop)
        if got == want:
            continue
        if got == text:
            return f"for {pieces} you ran past {stop!r}, which lies across two pieces"
        if got == want + stop:
            return f"for {pieces} the stop string {stop!r} itself belongs to nobody: leave it out"
        if got == text.rpartition(stop)[0]:
            return f"for {pieces} you stopped at the last {stop!r} instead of the first"
        return f"for {pieces} and {stop!r} I expected {want!r}, not {got!r}"
    return None


@exercise(
    "08.4",
    "Write residual(p, q): the distribution from which a refused draft token is replaced.",
)
def _residual(answer: Callable[[list[float], list[float]], list[float]]) -> str | None:
    for p, q in ((CASES[0], [0.05, 0.15, 0.2, 0.3, 0.3]), (CASES[1], CASES[2])):
        rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        want = [x / sum(rest) for x in rest]
        got = _floats(answer(list(p), list(q)))
        if _close(got, want):
            continue
        if min(got) < 0:
            return f"a probability of {min(got):.3f}: only the positive part of p - q counts"
        if abs(sum(got) - 1) > 1e-6:
            return f"your residual sums to {sum(got):.3f}: renormalise"
        if _close(got, p):
            return "drawing the replacement from p counts tokens twice that the draft gave already"
        return f"for p = {p} and q = {q} I expected {[round(x, 3) for x in want]}"
    return None


def _typical_set(probs: Sequence[float], mass: float) -> list[int]:
    entropy = -sum(p * math.log(p) for p in probs if p)
    order = sorted(range(len(probs)), key=lambda i: abs(-math.log(probs[i]) - entropy))
    kept: list[int] = []
    while sum(probs[i] for i in kept) < mass - 1e-9:
        kept.append(order[len(kept)])
    return sorted(kept)


@exercise(
    "08.5",
    "Write typical(probs, mass): the sorted indices of the tokens whose surprise is nearest to the "
    "entropy, the fewest that reach the mass (Meister et al. 2023).",
)
def _typical(answer: Callable[[list[float], float], list[int]]) -> str | None:
    for probs in ([0.4, 0.3, 0.15, 0.1, 0.05], [0.7, 0.1, 0.08, 0.07, 0.05], [0.97, 0.02, 0.01]):
        for mass in (0.2, 0.5, 0.9):
            want = _typical_set(probs, mass)
            got = sorted(int(i) for i in answer(list(probs), mass))
            if got == want:
                continue
            if not got:
                return f"for {probs} and mass {mass} you kept no token: one at least must stay"
            best = sorted(range(len(probs)), key=lambda i: -probs[i])[: len(got)]
            if got == sorted(best):
                return (
                    f"for {probs} and mass {mass} you kept the most probable tokens: typical ones "
                    f"are those whose -log p is near the entropy, here {want}"
                )
            return f"for {probs} and mass {mass} I expected {want}, not {got}"
    return None
