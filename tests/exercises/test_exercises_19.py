"""The graders of 19 accept right answers and say what is wrong with wrong ones."""

import numpy as np
import pytest

from minillm.exercises import grade

PREDICTED = {
    "k of the last doubling, floor 0.1": 1,
    "loss at x = 16, floor 0.1": 0.2,
    "loss at x = 16, floor 0": 0.18,
    "loss at x = 16, floor 0.25": 0.26,
    "doublings from x = 8 until the loss is 0.1125, floor 0.1": 4,
}
LAST, KNOWN, ZERO, HIGH, DOUBLINGS = PREDICTED


def power_law(x, losses, floor):
    slope, start = np.polyfit(np.log(x), np.log(np.array(losses) - floor), 1)
    return np.exp(start), -slope


def exponential(x, losses, floor):
    slope, start = np.polyfit(x, np.log(np.array(losses) - floor), 1)
    return np.exp(start), -slope


def base_ten(x, losses, floor):
    slope, start = np.polyfit(np.log10(x), np.log10(np.array(losses) - floor), 1)
    return np.exp(start), -slope


def two_points(x, losses, floor):
    return power_law([x[0], x[-1]], [losses[0], losses[-1]], floor)


def intervals(x, y, picks, low=0.1, torn=False):
    found = []
    for pick in picks:
        sizes, losses = np.log(x)[pick], np.log(y)[list(range(len(x))) if torn else pick]
        found.append(-np.polyfit(sizes, losses, 1)[0])
    found.sort()
    cut = int(low * len(found))
    return found[cut], found[len(found) - 1 - cut]


def quantiles(x, y, picks):
    found = [-np.polyfit(np.log(x)[pick], np.log(y)[pick], 1)[0] for pick in picks]
    return np.quantile(found, [0.1, 0.9])


def one_off(x, y, picks):
    low, high = intervals(x, y, picks), intervals(x, y, picks, low=0.05)
    return low[0], high[1]


def best_size(A, a, B, b, compute):
    """By trying: ever finer around the best."""
    low, high = 0.0, np.log(compute)
    for _ in range(6):
        n = np.linspace(low, high, 1001)
        best = int((A * np.exp(-a * n) + B * np.exp(-b * (np.log(compute / 6) - n))).argmin())
        low, high = n[max(best - 1, 0)], n[min(best + 1, 1000)]
    return np.exp(n[best])


def by_formula(A, a, B, b, compute, six=6, same=False, other=False):
    ratio = A / B if same else a * A / (b * B)
    return ratio ** (1 / (a + b)) * (compute / six) ** ((a if other else b) / (a + b))


ONE, TWO, THREE, FOUR = (f"19.{number}" for number in (1, 2, 3, 4))
RIGHT = {ONE: power_law, TWO: PREDICTED, THREE: intervals, FOUR: best_size}
WRONG = [
    (ONE, lambda x, y, floor: power_law(x, y, 0.0), "the floor is not subtracted"),
    (ONE, lambda x, y, floor: power_law(x, y, floor)[::-1], "c first"),
    (ONE, lambda *args: (power_law(*args)[0], -power_law(*args)[1]), "k is positive"),
    (ONE, lambda *args: (np.log(power_law(*args)[0]), power_law(*args)[1]), "e to the power"),
    (ONE, lambda x, *rest: power_law(np.exp(np.array(x) / max(x)), *rest), "c is 1.6 and k 1,"),
    (ONE, exponential, "take the logarithm of x"),
    (ONE, base_ten, "have base 10"),
    (ONE, lambda x, y, floor: (2 * power_law(x, y, floor)[0], power_law(x, y, floor)[1]), "k is r"),
    (ONE, lambda x, y, floor: power_law(x, y, floor)[1], "two numbers"),
    (ONE, two_points, "least squares uses all"),
    (TWO, {**PREDICTED, LAST: 2}, "2 to what"),
    (TWO, {**PREDICTED, KNOWN: 0.1}, "by the same factor"),
    (TWO, {**PREDICTED, ZERO: 0.2}, "by which factor did the loss"),
    (TWO, {**PREDICTED, HIGH: 0.25}, "then 0.05"),
    (TWO, {**PREDICTED, DOUBLINGS: 3}, "how often must"),
    (TWO, {**PREDICTED, DOUBLINGS: ...}, "not filled in"),
    (THREE, lambda x, y, picks: intervals(x, y, picks, torn=True), "draw both together"),
    (THREE, lambda x, y, picks: intervals(x, y, picks, low=0), "leave a tenth out"),
    (THREE, lambda x, y, picks: intervals(x, y, picks)[::-1], "the lower end first"),
    (THREE, lambda x, y, picks: [-e for e in intervals(x, y, picks)[::-1]], "other sign"),
    (THREE, lambda x, y, picks: intervals(x, y, picks, low=0.3), "the exponents go from"),
    (THREE, quantiles, "nothing in between"),
    (THREE, one_off, "left out above as below, 2"),
    (FOUR, lambda *law: (by_formula(*law), 1.0), "one number"),
    (FOUR, lambda *law: by_formula(*law) / 1e9, "not billions"),
    (FOUR, lambda *law: law[-1] / 6 / by_formula(*law), "the number of tokens"),
    (FOUR, lambda *law: by_formula(*law, six=1), "six operations"),
    (FOUR, lambda *law: by_formula(*law, same=True), "not the two terms"),
    (FOUR, lambda *law: by_formula(*law, other=True), "which of the two exponents"),
    (FOUR, lambda *law: 2 * by_formula(*law), "a little more and a little less"),
]


def test_other_right_answers():
    assert grade(FOUR, by_formula).status == "correct"
    assert grade(ONE, lambda *args: np.array(power_law(*args))).status == "correct"


def test_a_dictionary_of_dots_is_unsolved():
    assert grade(TWO, dict.fromkeys(PREDICTED, ...)).status == "unsolved"


@pytest.mark.parametrize("law", [(406.4, 0.34, 410.7, 0.28, 5.76e23), (2.0, 0.5, 3.0, 0.5, 6e8)])
def test_the_formula_is_the_minimum(law):
    assert by_formula(*law) == pytest.approx(best_size(*law), rel=1e-3)
