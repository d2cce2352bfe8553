"""Wrong answers of 19: exercise, answer, words that its message holds."""

import math

from minillm.exercises import scale


def line(x, y):
    """Slope and start of the least squares line."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    over = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope = over / sum((a - mean_x) ** 2 for a in x)
    return slope, mean_y - slope * mean_x


def power_law(x, losses, floor, *, log=math.log, of_x=math.log):
    slope, start = line([of_x(v) for v in x], [log(y - floor) for y in losses])
    return math.exp(start), -slope


def two_points(x, losses, floor):
    return power_law([x[0], x[-1]], [losses[0], losses[-1]], floor)


def predicted(**changes):
    answer = dict(scale.PREDICTED)
    return answer | {list(answer)[int(key[1:])]: value for key, value in changes.items()}


def exponents(x, y, picks, torn=False):
    logs = [math.log(v) for v in x], [math.log(v) for v in y]
    every = list(range(len(x)))
    return [
        -line([logs[0][i] for i in pick], [logs[1][i] for i in (every if torn else pick)])[0]
        for pick in picks
    ]


def interval(x, y, picks, *, low=None, high=None, torn=False):
    found = sorted(exponents(x, y, picks, torn))
    cut = len(found) // 10
    return found[cut if low is None else low], found[-1 - cut if high is None else high]


def best_size(A, a, B, b, compute, *, six=6, same=False, power=None):
    ratio = A / B if same else a * A / (b * B)
    return ratio ** (1 / (a + b)) * (compute / six) ** ((power or b) / (a + b))


WRONG = [
    ("19.1", lambda x, y, floor: power_law(x, y, 0), "the floor is not subtracted"),
    ("19.1", lambda x, y, floor: power_law(x, y, floor)[::-1], "c first"),
    ("19.1", lambda *a: (power_law(*a)[0], -power_law(*a)[1]), "k is positive"),
    ("19.1", lambda *a: (math.log(power_law(*a)[0]), power_law(*a)[1]), "c is e to the power"),
    ("19.1", lambda *a: power_law(*a, of_x=float), "take the logarithm of x, too"),
    ("19.1", lambda *a: power_law(*a, of_x=math.log10, log=math.log10), "have base 10"),
    ("19.1", two_points, "least squares uses all"),
    ("19.1", lambda *a: (2 * power_law(*a)[0], power_law(*a)[1]), "k is right"),
    ("19.1", lambda *a: power_law(*a)[1], "return two numbers"),
    ("19.1", lambda *a: (1.0, 2.0), "c is 1.6 and k 1, not 1 and 2"),
    ("19.2", predicted(_0=2), "and 2 to what"),
    ("19.2", predicted(_1=0.1), "by the same factor once more"),
    ("19.2", predicted(_2=0.2), "by which factor did the loss itself fall"),
    ("19.2", predicted(_3=0.25), "then 0.05: by which factor"),
    ("19.2", predicted(_4=3), "how often must 0.2 be halved"),
    ("19.2", predicted(_4=...), "not filled in yet"),
    ("19.3", lambda *a: interval(*a, torn=True), "draw both together"),
    ("19.3", lambda *a: interval(*a, low=0, high=-1), "leave a tenth out at either end"),
    ("19.3", lambda *a: interval(*a)[::-1], "the lower end first"),
    ("19.3", lambda *a: tuple(-k for k in interval(*a)[::-1]), "the slope with the other sign"),
    ("19.3", lambda *a: (interval(*a)[0], interval(*a)[1] + 0.01), "nothing in between"),
    ("19.3", lambda *a: (interval(*a)[0], interval(*a, high=-4)[1]), "left out above as below"),
    ("19.3", lambda *a: interval(*a, low=3, high=-4), "sorted, the exponents go from"),
    ("19.3", lambda *a: interval(*a)[0], "return the lower and the upper end"),
    ("19.4", lambda *law: law[-1] / 6 / best_size(*law), "asked is N"),
    ("19.4", lambda *law: (best_size(*law), 1.0), "return one number, N"),
    ("19.4", lambda *law: best_size(*law) / 1e9, "not billions"),
    ("19.4", lambda *law: best_size(*law, six=1), "six operations"),
    ("19.4", lambda *law: best_size(*law, same=True), "not the two terms"),
    ("19.4", lambda *law: best_size(*law, power=law[1]), "which of the two exponents"),
    ("19.4", lambda *law: 2 * best_size(*law), "a little more and a little less"),
]
