"""The graders of 10_exact_targets accept right answers and say what is wrong with wrong ones."""

import math
from collections import Counter
from fractions import Fraction

from minillm.training import cross_entropy


def ignorance(cards, drawn):
    return sum(math.log(cards / (cards - k)) for k in range(drawn))


def by_factorials(cards, drawn):
    """Another right way: ln(n^m (n - m)! / n!)."""
    return drawn * math.log(cards) + math.lgamma(cards - drawn + 1) - math.lgamma(cards + 1)


def targets(left, drawn, condition=True):
    found = []
    for k, token in enumerate(drawn):
        following = Counter(card[k] for card in left if len(card) > k)
        found.append({t: n / following.total() for t, n in following.items()})
        if condition:
            left = [card for card in left if card[k] == token]
    return found


def by_prefix(left, drawn):
    """Another right way: fractions, the cards chosen by their beginning."""
    found = []
    for k in range(len(drawn)):
        same = [card for card in left if card[:k] == drawn[:k]]
        found.append({c[k]: Fraction(sum(d[k] == c[k] for d in same), len(same)) for c in same})
    return found


def flat(left, drawn):
    return [dict.fromkeys(row, 1 / len(row)) for row in targets(left, drawn)]


def shares_of_all(left, drawn):
    return [
        {t: p * sum(c[:k] == drawn[:k] for c in left) / len(left) for t, p in row.items()}
        for k, row in enumerate(targets(left, drawn))
    ]


def by_the_last_token(left, drawn):
    """Looks at the token before only: "a red" and "one red" are mixed."""
    found = []
    for k in range(len(drawn)):
        same = [c for c in left if len(c) > k and (k == 0 or c[k - 1] == drawn[k - 1])]
        following = Counter(card[k] for card in same)
        found.append({t: n / following.total() for t, n in following.items()})
    return found


def swapped(left, drawn):
    """Sums to 1, and is wrong at the first token."""
    return [{drawn[0]: 1.0}, *targets(left, drawn)[1:]] if len(drawn) > 1 else targets(left, drawn)


def log_probs(logits):
    return logits.log_softmax(-1)


def total(logits, probs):
    return -(probs * log_probs(logits)).sum()


def counted(probs):
    return (probs.sum(-1) > 0).sum()


def loss(logits, probs):
    return total(logits, probs) / counted(probs)


def divergence(logits, probs):
    own = -(probs * probs.clamp(min=1e-30).log()).sum() / counted(probs)
    return loss(logits, probs) - own


def hard(logits, probs):
    ids = probs.argmax(-1).masked_fill(probs.sum(-1) == 0, -100)
    return cross_entropy(logits, ids)


RIGHT = {
    "10_exact_targets.1": ignorance,
    "10_exact_targets.2": targets,
    "10_exact_targets.3": loss,
}
WRONG = [
    ("10_exact_targets.1", lambda n, m: ignorance(n, m) / math.log(2), "these are bits"),
    ("10_exact_targets.1", lambda n, m: -ignorance(n, m), "the number is positive"),
    ("10_exact_targets.1", lambda n, m: (m - 1) * math.log(n / (n - 1)), "two that are gone"),
    ("10_exact_targets.1", lambda n, m: m * math.log(n), "in all"),
    ("10_exact_targets.1", lambda n, m: math.log(math.perm(n, m)), "a perfect model pays"),
    ("10_exact_targets.1", lambda n, m: math.log(n / (n - m + 1)), "the last draw alone"),
    ("10_exact_targets.1", lambda n, m: ignorance(n, m + 1), "nothing is gone"),
    ("10_exact_targets.1", lambda n, m: 0.1, "nats, and it is"),
    ("10_exact_targets.2", lambda left, drawn: [{t: 1.0} for t in drawn], "that is the sample"),
    (
        "10_exact_targets.2",
        lambda left, drawn: targets(left, drawn, False),
        "only cards that begin",
    ),
    ("10_exact_targets.2", flat, "not the tokens"),
    ("10_exact_targets.2", by_the_last_token, "all tokens so far"),
    ("10_exact_targets.2", shares_of_all, "sum to 1"),
    ("10_exact_targets.2", swapped, "token 1 is not right"),
    ("10_exact_targets.2", lambda left, drawn: targets(left, drawn)[:1], "a list of 2"),
    ("10_exact_targets.2", lambda left, drawn: [0.5] * len(drawn), "each entry is a dictionary"),
    ("10_exact_targets.3", lambda x, p: -(p * log_probs(x)).mean(), "size of the vocabulary"),
    ("10_exact_targets.3", lambda x, p: -(p * log_probs(x)).sum(-1).mean(), "padding is no target"),
    ("10_exact_targets.3", total, "the sum of all targets"),
    ("10_exact_targets.3", lambda x, p: -loss(x, p), "a loss is positive"),
    ("10_exact_targets.3", divergence, "own entropy"),
    ("10_exact_targets.3", lambda x, p: -(p * x).sum() / counted(p), "the softmax is missing"),
    ("10_exact_targets.3", hard, "only the likeliest"),
    ("10_exact_targets.3", lambda x, p: -(p * log_probs(x)).sum(-1), "one number"),
]


def test_other_right_ways():
    from minillm.exercises import grade

    assert grade("10_exact_targets.1", by_factorials).status == "correct"
    assert grade("10_exact_targets.2", by_prefix).status == "correct"
    assert grade("10_exact_targets.3", cross_entropy).status == "correct"
