"""Wrong answers of 18: exercise, answer, words that its message holds."""

import math
import statistics

from minillm.exercises import rewards


def tilted(p, r, beta, *, minus=True):
    most = max(r) if minus else 0
    weights = [a * math.exp((b - most) / beta) for a, b in zip(p, r, strict=True)]
    return [w / sum(weights) for w in weights]


def ends(**changes):
    answer = dict(rewards.ENDS)
    return answer | {list(answer)[int(key[1:])]: value for key, value in changes.items()}


def advantages(rewards, size, *, mean=statistics.fmean, spread=statistics.stdev, more=1e-4):
    groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
    return [(r - mean(g)) / (spread(g) + more) for g in groups for r in g]


def transposed(rewards, size):
    apart = len(rewards) // size
    return advantages([r for i in range(apart) for r in rewards[i::apart]], size)


def one_spread(rewards, size):
    return advantages(rewards, size, spread=lambda _: statistics.stdev(rewards))


def none_right(n, c, k):
    return math.comb(n - c, k) / math.comb(n, k)


WRONG = [
    ("18.1", lambda p, r, beta: tilted(p, r, beta, minus=False), "subtract the largest r first"),
    ("18.1", lambda p, r, beta: tilted(p, r, 1 / beta), "divided by beta, not multiplied"),
    ("18.1", lambda p, r, beta: tilted(p, r, 1), "beta is missing"),
    ("18.1", lambda p, r, beta: tilted([1] * len(p), r, beta), "the reference p is missing"),
    ("18.1", lambda p, r, beta: tilted(p, [-x for x in r], beta), "a text more probable"),
    ("18.1", lambda p, r, beta: [float(x == max(r)) for x in r], "texts of less reward, too"),
    ("18.1", lambda p, r, beta: [a * math.exp(b) for a, b in zip(p, r, strict=True)], "not to 1"),
    ("18.1", lambda p, r, beta: [math.nan] * len(p), "NaN"),
    ("18.1", lambda p, r, beta: p[:1], "1 numbers for 2 texts"),
    ("18.1", lambda p, r, beta: p, "should be"),
    ("18.2", ends(_0=0.908), "is 28 here"),
    ("18.2", ends(_1=0.463), "is 7.4 here"),
    ("18.2", ends(_2=0.0625), "is e; divide by Z"),
    ("18.2", ends(_3=0), "moves away from the reference"),
    ("18.2", ends(_4=0.228), "what the frontier asks for s"),
    ("18.2", ends(_4=math.nan), "not nan"),
    ("18.2", ends(_0=...), "not filled in yet"),
    ("18.2", [0.651], "a dictionary with the 5 questions"),
    ("18.3", lambda r, size: advantages(r, len(r) // size), "each group alone"),
    ("18.3", one_spread, "each group has its own standard deviation"),
    ("18.3", transposed, "neighbours in the list"),
    ("18.3", lambda r, size: advantages(r, size, spread=lambda _: 1 - 1e-4), "standard deviation"),
    ("18.3", lambda r, size: advantages(r, size, spread=statistics.pstdev), "by n - 1, not by n"),
    (
        "18.3",
        lambda r, size: advantages(r, size, spread=lambda g: statistics.stdev(g) or 1, more=0),
        "the 0.0001 beside",
    ),
    ("18.3", lambda r, size: [math.nan] * len(r), "which may be 0"),
    ("18.3", lambda r, size: advantages(r, size, mean=lambda _: 0), "should sum to 0"),
    ("18.3", lambda r, size: [0.0] * len(r), "should be"),
    ("18.3", lambda r, size: r[:size], "2 numbers for 6 rollouts"),
    ("18.4", none_right, "none is right"),
    ("18.4", lambda n, c, k: 1 - (1 - c / n) ** k, "in the place of p is too low"),
    ("18.4", lambda n, c, k: c / n, "this is pass@1"),
    ("18.4", lambda n, c, k: k * c / n, "k times pass@1"),
    ("18.4", lambda n, c, k: math.comb(c, k) / math.comb(n, k), "all k are right"),
    ("18.4", lambda n, c, k: c * math.comb(n - c, k - 1) / math.comb(n, k), "exactly one is right"),
    ("18.4", lambda n, c, k: 1.0, "1.0 should be"),
]
