"""Graders of 09_speculative: the residual, chances of one guess, the best number of guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minillm.exercises import apart, check_table, check_values, exercise

PAIRS = (
    ([0.5, 0.3, 0.16, 0.02, 0.02], [0.05, 0.15, 0.2, 0.3, 0.3]),
    ([0.25, 0.25, 0.25, 0.25], [0.01, 0.02, 0.07, 0.9]),
    ([0.0, 1.0], [0.5, 0.5]),
)


def _positive(p: Sequence[float], q: Sequence[float]) -> list[float]:
    rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return [x / sum(rest) for x in rest]


@exercise(
    "09_speculative.1",
    "what must refusals add to what was accepted, so that p comes out?",
    "accepted guesses have given min(p, q) already; the residual gives what is missing to p",
)
def residual(answer: Callable[[list[float], list[float]], list[float]]) -> str | None:
    for p, q in PAIRS:
        want = _positive(p, q)
        got = [float(x) for x in answer(list(p), list(q))]
        case = f"for p = {p} and q = {q}"
        if len(got) != len(p):
            return f"{case} return {len(p)} probabilities, not {len(got)}"
        shared = [min(a, b) for a, b in zip(p, q, strict=True)]
        slips = {
            "this is what the draft has too much: p and q have changed places": _positive(q, p),
            "the replacement is drawn from p: tokens that the draft gave already count twice": p,
            "this is the overlap, which is accepted; asked is what is missing": (
                [x / sum(shared) for x in shared]
            ),
        }
        said = f"I expected {[round(x, 3) for x in want]}"
        if min(got) < 0:
            said = f"a probability of {min(got):.3f}: only the positive part counts"
        elif abs(sum(got) - 1) > 1e-6:
            said = f"your residual sums to {sum(got):.3f}: divide by its sum"
        if why := check_values(got, want, slips, otherwise=said):
            return f"{case} {why}"
    for p in ([0.25, 0.75], [0.5, 0.3, 0.2]):
        try:
            got = [float(x) for x in answer(list(p), list(p))]
        except ZeroDivisionError:
            return "for p = q nothing is missing, and you divide by zero: return p, for instance"
        if len(got) != len(p) or min(got) < 0 or not abs(sum(got) - 1) < 1e-6:
            return f"for p = q = {p} return some distribution, such as p; yours is {got}"
    return None


PREDICTIONS: dict[str, tuple[float, str]] = {
    "chance that token 0, once guessed, stands": (
        1,
        "the large model likes it more than the draft",
    ),
    "chance that token 2, once guessed, stands": (0.25, "p over q: 0.1 over 0.4"),
    "chance that a guess stands": (0.7, "the overlap: the smaller of p and q, summed"),
    "chance that a replacement is token 0": (1, "where is p greater than q?"),
    "chance that token 1 comes out": (0.3, "what does the whole method promise?"),
    "tokens per pass with K = 1": (1.7, "one token always, one more if the guess stands"),
}


@exercise(
    "09_speculative.2",
    "fill in the six numbers; most need one line of arithmetic, one needs none",
    "the overlap says how fast, and what comes out is p, whatever the draft is",
)
def predictions(answer: Any) -> str | None:
    return check_table(answer, *apart(PREDICTIONS), near=0.006)


def _speed(a: float, K: int, c: float) -> float:
    return sum(a**j for j in range(K + 1)) / (1 + K * c)


@exercise(
    "09_speculative.3",
    "write the speed as a function of K, then compare; what is the formula's value at a = 1?",
    "the better and cheaper the guesses, the more of them; a poor or dear draft is best left alone",
)
def best_number(answer: Callable[[float, float], int]) -> str | None:
    cases = [(0.8, 0.05), (0.4, 0.05), (0.8, 0.3), (0.4, 0.5), (0.9, 0.01), (0.0, 0.1), (0.3, 0.3)]
    for a, c in (*cases, (1.0, 0.1)):
        speeds = [_speed(a, K, c) for K in range(51)]
        want = next(K for K in range(51) if speeds[K] >= max(speeds) - 1e-12)
        try:
            got = answer(a, c)
        except ZeroDivisionError:
            return f"a = {a}, c = {c}: you divide by 1 - a; add up the powers of a in place of it"
        if isinstance(got, bool) or not hasattr(got, "__index__") or not 0 <= got <= 50:
            return f"return a whole number from 0 to 50, not {got!r}"
        if speeds[got] >= max(speeds) - 1e-12:  # of equal ones rounding decides
            continue
        case = f"a = {a}, c = {c}"
        if want == 0:
            return f"{case}: with K = {got} it is slower than without ({speeds[got]:.2f}): 0"
        if got == 50:
            return f"{case}: the most tokens per pass are not the best speed: guesses cost time"
        return f"{case}: K = {got} gives {speeds[got]:.3f}, another gives {max(speeds):.3f}"
    return None
