"""Graders of 18: the best policy, ends of runs predicted, advantages mended, pass@k from draws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from minillm.exercises import check_table, check_values, exercise

Policy = Callable[[list[float], list[float], float], Any]


def _tilted(p: Sequence[float], powers: Sequence[float]) -> list[float]:
    most = max(powers)
    weights = [a * math.exp(x - most) for a, x in zip(p, powers, strict=True)]
    return [w / sum(weights) for w in weights]


def _differs(got: Sequence[float], wanted: Sequence[float]) -> bool:
    return any(not abs(a - b) <= 1e-5 for a, b in zip(got, wanted, strict=True))


@exercise(
    "18.1",
    "by which factor does the best policy multiply a text's probability, before all sum to 1?",
    "the best policy is the reference times exp(r / beta), and the sum Z makes it a distribution",
)
def _best_policy(answer: Policy) -> str | None:
    cases: list[tuple[list[float], list[float], float]] = [
        ([0.25, 0.75], [1.0, 0.0], 0.5),
        ([0.1, 0.2, 0.3, 0.4], [0.0, 2.0, -1.0, 0.5], 2.0),
        ([0.5, 0.3, 0.2], [1.0, 1.0, 0.0], 0.2),
        ([0.5, 0.25, 0.25], [2.0, 1.0, 0.0], 0.001),
    ]
    for p, r, beta in cases:
        case = f"p {p}, r {r}, beta {beta}"
        try:
            got = [float(x) for x in answer(list(p), list(r), beta)]
        except OverflowError:
            return f"{case}: exp(r / beta) is too large; subtract the largest r first"
        if len(got) != len(p):
            return f"{case}: {len(got)} numbers for {len(p)} texts"
        if any(math.isnan(x) for x in got):
            return f"{case}: NaN; exp(r / beta) is too large, so subtract the largest r first"
        wanted = _tilted(p, [x / beta for x in r])
        others = {
            "the reward is divided by beta, not multiplied": _tilted(p, [x * beta for x in r]),
            "beta is missing": _tilted(p, r),
            "the reference p is missing": _tilted([1.0] * len(p), [x / beta for x in r]),
            "more reward should make a text more probable": _tilted(p, [-x / beta for x in r]),
            "the best policy keeps texts of less reward, too": [float(x == max(r)) for x in r],
        }
        said = f"{[round(x, 4) for x in got]} should be {[round(x, 4) for x in wanted]}"
        if not abs(sum(got) - 1) <= 1e-5:
            said = f"the numbers sum to {sum(got):.4f}, not to 1"
        if why := check_values(got, wanted, others, near=1e-5, otherwise=said):
            return f"{case}: {why}"
    return None


def _success(beta: float, q: float = 1 / 16) -> float:
    return q / (q + (1 - q) * math.exp(-1 / beta))


def _best_of(n: int, beta: float, q: float = 1 / 16) -> float:
    s = 1 - (1 - q) ** n
    return s - beta * (s * math.log(s / q) + (1 - s) * math.log((1 - s) / (1 - q)))


ENDS = {
    "success at price 0.3": round(_success(0.3), 3),
    "success at price 0.5": round(_success(0.5), 3),
    "success at price 1": round(_success(1.0), 3),
    "success as the price grows without bound": 0.062,  # 0.0625: either neighbour is accepted
    "J of best of 4 at price 0.2": round(_best_of(4, 0.2), 3),
}
HINTS = {
    "success at price 0.3": "exp(1 / beta) is 28 here; the foxes have weight q times that",
    "success at price 0.5": "exp(1 / beta) is 7.4 here; divide by Z",
    "success at price 1": "exp(1 / beta) is e; divide by Z",
    "success as the price grows without bound": "then nobody moves away from the reference",
    "J of best of 4 at price 0.2": "s = 1 - (1 - q)^4, less 0.2 times what the frontier asks for s",
}


@exercise(
    "18.2",
    "REINFORCE aims at the best policy: which share of foxes has that one at each price?",
    "the price decides where on the frontier a run should end, before it has begun",
)
def _ends(answer: Any) -> str | None:
    return check_table(answer, ENDS, HINTS, near=0.0011)


def _advantages(rewards: Sequence[float], size: int) -> list[float]:
    groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
    return [(r - statistics.fmean(g)) / (statistics.stdev(g) + 1e-4) for g in groups for r in g]


@exercise(
    "18.3",
    "how many rows has the table of groups, and over what is the spread of each taken?",
    "each group is its own yardstick, and one in which all rewards are equal teaches nothing",
)
def _mended(answer: Callable[[list[float], int], Any]) -> str | None:
    cases: list[tuple[list[float], int]] = [
        ([1.0, 0.0, 5.0, 5.0, 0.0, 9.0], 2),
        ([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0], 4),
        ([0.0, 0.0, 0.0, 1.0, 0.0, 2.0], 3),
    ]
    for rewards, size in cases:
        wanted = _advantages(rewards, size)
        case = f"rewards {rewards}, groups of {size}"
        got = [float(x) for x in answer(list(rewards), size)]
        if len(got) != len(wanted):
            return f"{case}: {len(got)} numbers for {len(wanted)} rollouts"
        if not _differs(got, wanted):
            continue
        if any(math.isnan(x) for x in got):
            return f"{case}: NaN; add 0.0001 to the standard deviation, which may be 0"
        for i in range(0, len(got), size):
            if not abs(sum(got[i : i + size])) <= 1e-5:
                return f"{case}: the advantages of a group should sum to 0, each group alone"
        groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
        plain = [r - statistics.fmean(g) for g in groups for r in g]
        with_n = [
            (r - statistics.fmean(g)) / (statistics.pstdev(g) + 1e-4) for g in groups for r in g
        ]
        spread = statistics.stdev(rewards) + 1e-4
        bare = [(r - statistics.fmean(g)) / (statistics.stdev(g) or 1) for g in groups for r in g]
        strided = [r for i in range(len(groups)) for r in rewards[i :: len(groups)]]
        others = {
            "divide by the standard deviation, too": plain,
            "the standard deviation divides by n - 1, not by n": with_n,
            "each group has its own standard deviation": [x / spread for x in plain],
            "the 0.0001 beside the standard deviation is missing": bare,
            "a group is `size` neighbours in the list": _advantages(strided, size),
        }
        said = f"{[round(x, 3) for x in got]} should be {[round(x, 3) for x in wanted]}"
        if why := check_values(got, wanted, others, near=1e-5, otherwise=said):
            return f"{case}: {why}"
    return None


@exercise(
    "18.4",
    "in how many ways can k of the n draws be chosen, and in how many of them is none right?",
    "from n draws, pass@k for every k up to n can be estimated without a new draw",
)
def _pass_at_k(answer: Callable[[int, int, int], Any]) -> str | None:
    for n, c, k in [(10, 3, 1), (10, 3, 4), (16, 1, 16), (5, 0, 2), (6, 4, 3), (200, 7, 100)]:
        all_ways = math.comb(n, k)
        wanted = 1 - math.comb(n - c, k) / all_ways
        got = float(answer(n, c, k))
        case = f"n {n}, c {c}, k {k}"
        others = {
            "this is the chance that none is right": 1 - wanted,
            "c / n in the place of p is too low": 1 - (1 - c / n) ** k,
            "this is pass@1": c / n,
            "this is k times pass@1, which may exceed 1": k * c / n,
            "this is the chance that all k are right": math.comb(c, k) / all_ways,
            "this is the chance that exactly one is right": c * math.comb(n - c, k - 1) / all_ways,
        }
        said = f"{got} should be {wanted:.6f}"
        if why := check_values(got, wanted, others, near=1e-9, otherwise=said):
            return f"{case}: {why}"
    return None
