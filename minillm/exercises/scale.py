"""Graders of 19: a power law above a floor, predictions, an interval mended, the best size."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minillm.exercises import check_table, check_values, exercise


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of the least squares line."""
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    over = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope = over / math.fsum((a - mean_x) ** 2 for a in x)
    return slope, mean_y - slope * mean_x


def _two(got: Any) -> tuple[float, float] | None:
    """An answer of two numbers, as a tuple, a list or an array."""
    try:
        low, high = got
        return float(low), float(high)
    except (TypeError, ValueError):
        return None


@exercise(
    "19.1",
    "what is a straight line, once the floor is taken away and logarithms are taken?",
    "above a known floor a power law is a straight line: its slope is the exponent",
)
def _power_law(answer: Callable[[list[float], list[float], float], Any]) -> str | None:
    noise = random.Random(0)
    cases = [([1.0, 2.0, 4.0, 8.0], [1.7, 0.9, 0.5, 0.3], 0.1)]
    for c, k, floor in ((50.0, 0.5, 0.09), (3e4, 1.1, 0.0), (0.4, 0.05, 2.0)):
        x = [1e3 * 2**i for i in range(6)]
        y = [floor + c / value**k * noise.uniform(0.9, 1.1) for value in x]
        cases.append((x, y, floor))
    for x, losses, floor in cases:
        logs = [math.log(value) for value in x]
        above = [math.log(y - floor) for y in losses]
        slope, start = _line(logs, above)
        case = f"x {x}, losses {[round(v, 3) for v in losses]}, floor {floor}"
        if (pair := _two(answer(list(x), list(losses), floor))) is None:
            return f"{case}: return two numbers, c and k"
        whole = _line(logs, [math.log(y) for y in losses])
        flat = _line(list(x), above)
        two = _line([logs[0], logs[-1]], [above[0], above[-1]])  # also the mean of all slopes
        slips = {
            "the right numbers in the wrong order: c first": (-slope, math.exp(start)),
            "the law falls with x: k is positive": (math.exp(start), slope),
            "c is e to the power of where the line starts": (start, -slope),
            "the floor is not subtracted": (math.exp(whole[1]), -whole[0]),
            "take the logarithm of x, too": (math.exp(flat[1]), -flat[0]),
            "the logarithms have base 10, the power has base e": (
                math.exp(start / math.log(10)),
                -slope,
            ),
        }
        said = f"c is {math.exp(start):.4g} and k {-slope:.4g}, not {pair[0]:.4g} and {pair[1]:.4g}"
        if math.isclose(pair[1], -slope, rel_tol=1e-6):
            said = f"k is right; c is {math.exp(start):.4g}, not {pair[0]:.4g}"
        elif math.isclose(pair[1], -two[0], rel_tol=1e-6):
            said = "k is that of the first and the last point; least squares uses all"
        if why := check_values(pair, (math.exp(start), -slope), slips, otherwise=said):
            return f"{case}: {why}"
    return None


def _exponents(
    x: Sequence[float], y: Sequence[float], sizes: list[list[int]], losses: list[list[int]]
) -> list[float]:
    """The exponents of all draws, in order: of the sizes and of the losses with these numbers."""
    logs = [math.log(v) for v in x], [math.log(v) for v in y]
    pairs = zip(sizes, losses, strict=True)
    return sorted(-_line([logs[0][i] for i in a], [logs[1][i] for i in b])[0] for a, b in pairs)


PREDICTED = {  # from the losses 1.7, 0.9, 0.5, 0.3 at x = 1, 2, 4, 8
    "k of the last doubling, floor 0.1": 1,
    "loss at x = 16, floor 0.1": 0.2,
    "loss at x = 16, floor 0": 0.18,
    "loss at x = 16, floor 0.25": 0.26,
    "doublings from x = 8 until the loss is 0.1125, floor 0.1": 4,
}
HINTS = {
    "k of the last doubling, floor 0.1": "what is left above 0.1, before and after, and 2 to what?",
    "loss at x = 16, floor 0.1": "what is above the floor falls by the same factor once more",
    "loss at x = 16, floor 0": "by which factor did the loss itself fall?",
    "loss at x = 16, floor 0.25": "0.25 is above the floor, then 0.05: by which factor, and again?",
    "doublings from x = 8 until the loss is 0.1125, floor 0.1": (
        "how often must 0.2 be halved until 0.0125 is left?"
    ),
}


@exercise(
    "19.2",
    "subtract the floor from the last two losses, and go on with what is left",
    "three floors, three futures from the same losses: where they part, only another run decides",
)
def _predicted(answer: Any) -> str | None:
    return check_table(answer, PREDICTED, HINTS)


@exercise(
    "19.3",
    "which losses belong to which sizes after the draw?",
    "what is drawn again is a whole run, its size and its loss together",
)
def _interval(
    answer: Callable[[list[float], list[float], list[list[int]]], Any],
) -> str | None:
    draw = random.Random(1)
    for count, times in ((4, 9), (8, 21)):
        x = [float(2**i) for i in range(count)]
        y = [10 / value**0.5 * draw.uniform(0.7, 1.4) for value in x]
        picks = [[draw.randrange(count) for _ in x] for _ in range(times)]
        picks = [pick if len(set(pick)) > 1 else list(range(count)) for pick in picks]
        right = _exponents(x, y, picks, picks)
        low, high = times // 10, times - 1 - times // 10
        case = f"{count} runs, drawn again {times} times"
        if (ends := _two(answer(list(x), list(y), [list(pick) for pick in picks]))) is None:
            return f"{case}: return the lower and the upper end"
        torn = _exponents(x, y, picks, [list(range(count))] * times)
        slips = {
            "each size has another run's loss: draw both together": (torn[low], torn[high]),
            "the lower end first": (right[high], right[low]),
            "these are the extremes: leave a tenth out at either end": (right[0], right[-1]),
            "the exponent is the slope with the other sign": (-right[high], -right[low]),
        }
        ordered = f"sorted, the exponents go from {right[low]:.3f} to {right[high]:.3f}"
        said = f"{ordered}, not from {ends[0]:.3f} to {ends[1]:.3f}"
        if not all(any(math.isclose(end, k, rel_tol=1e-6) for k in right) for end in ends):
            said = "the ends are two of the exponents found, nothing in between"
        elif math.isclose(ends[0], right[low], rel_tol=1e-6):
            said = f"as many are left out above as below, {low}"
        if why := check_values(ends, (right[low], right[high]), slips, otherwise=said):
            return f"{case}: {why}"
    return None


@exercise(
    "19.4",
    "put D = C / (6 N) into the law; where is its slope zero?",
    "the best size grows as a power of the compute, and both terms then fall equally fast",
)
def _best_size(
    answer: Callable[[float, float, float, float, float], Any],
) -> str | None:
    cases = [(1.0, 1.0, 1.0, 1.0, 6e4), (406.4, 0.34, 410.7, 0.28, 5.76e23)]
    cases += [(30.0, 0.4, 9e3, 0.9, 1e12), (2e3, 0.8, 50.0, 0.3, 1e12)]
    for A, a, B, b, compute in cases:
        budget = compute / 6  # N times D
        wanted = (a * A / (b * B)) ** (1 / (a + b)) * budget ** (b / (a + b))
        case = f"A {A:g}, a {a:g}, B {B:g}, b {b:g}, C {compute:g}"
        found = answer(A, a, B, b, compute)
        if isinstance(found, tuple | list):
            return f"{case}: return one number, N"
        got = float(found)
        both_alike = (A / B) ** (1 / (a + b)) * budget ** (b / (a + b))
        slips: Mapping[str, float] = {
            "that is the number of tokens; asked is N": budget / wanted,
            "N counts parameters, not billions of them": wanted / 1e9,
            "six operations for each parameter and token": wanted * 6 ** (b / (a + b)),
            "the slopes must be equal, not the two terms": both_alike,
            "which of the two exponents stands above the compute?": (
                (a * A / (b * B)) ** (1 / (a + b)) * budget ** (a / (a + b))
            ),
            "that is the loss at the best size": A / wanted**a + B / (budget / wanted) ** b,
        }
        said = f"not {got:.4g}; put a little more and a little less than it into the law"
        if why := check_values(got, wanted, slips, near=1e-3, otherwise=said):
            return f"{case}: {why}"
    return None
