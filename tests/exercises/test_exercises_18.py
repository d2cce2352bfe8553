"""The graders of 18 accept right answers and say what is wrong with wrong ones."""

import math

import pytest
import torch

from minillm.exercises import grade

PRICE_03, PRICE_05, PRICE_1, FREE, BEST_OF = (
    "success at price 0.3",
    "success at price 0.5",
    "success at price 1",
    "success as the price grows without bound",
    "J of best of 4 at price 0.2",
)
ENDS = {PRICE_03: 0.651, PRICE_05: 0.33, PRICE_1: 0.153, FREE: 0.063, BEST_OF: 0.199}


def best_policy(p, r, beta):
    return (torch.tensor(p).double().log() + torch.tensor(r).double() / beta).softmax(0).tolist()


def naive(p, r, beta):
    weights = [a * math.exp(b / beta) for a, b in zip(p, r, strict=True)]
    return [w / sum(weights) for w in weights]


def by_torch(p, r, beta):
    weights = torch.tensor(p) * (torch.tensor(r) / beta).exp()
    return (weights / weights.sum()).tolist()


def not_normed(p, r, beta):
    return [a * math.exp((b - max(r)) / beta) for a, b in zip(p, r, strict=True)]


def advantages(rewards, size):
    groups = torch.tensor(rewards).view(-1, size)
    spread = groups.std(-1, keepdim=True) + 1e-4
    return ((groups - groups.mean(-1, keepdim=True)) / spread).flatten().tolist()


def as_asked(rewards, size):
    groups = torch.tensor(rewards).view(size, -1)
    spread = groups.std() + 1e-4
    return ((groups - groups.mean(-1, keepdim=True)) / spread).flatten().tolist()


def half_mended(rewards, size):
    groups = torch.tensor(rewards).view(-1, size)
    spread = groups.std() + 1e-4
    return ((groups - groups.mean(-1, keepdim=True)) / spread).flatten().tolist()


def not_divided(rewards, size):
    groups = torch.tensor(rewards).view(-1, size)
    return (groups - groups.mean(-1, keepdim=True)).flatten().tolist()


def with_n(rewards, size):
    groups = torch.tensor(rewards).view(-1, size)
    spread = groups.std(-1, keepdim=True, correction=0) + 1e-4
    return ((groups - groups.mean(-1, keepdim=True)) / spread).flatten().tolist()


def no_epsilon(rewards, size):
    groups = torch.tensor(rewards).view(-1, size)
    spread = groups.std(-1, keepdim=True)
    return ((groups - groups.mean(-1, keepdim=True)) / spread).flatten().tolist()


def no_epsilon_no_nan(rewards, size):
    return torch.tensor(no_epsilon(rewards, size)).nan_to_num().tolist()


def transposed(rewards, size):
    groups = torch.tensor(rewards).view(size, -1).T
    return advantages(groups.flatten().tolist(), size)


def pass_at_k(n, c, k):
    none = 1.0
    for i in range(k):
        none *= max(n - c - i, 0) / (n - i)
    return 1 - none


RIGHT = {"18.1": best_policy, "18.2": ENDS, "18.3": advantages, "18.4": pass_at_k}
WRONG = [
    ("18.1", naive, "subtract the largest r"),
    ("18.1", by_torch, "NaN"),
    ("18.1", not_normed, "not to 1"),
    ("18.1", lambda p, r, beta: best_policy(p, r, 1 / beta), "divided by beta"),
    ("18.1", lambda p, r, beta: best_policy(p, r, 1), "beta is missing"),
    ("18.1", lambda p, r, beta: best_policy([1.0] * len(p), r, beta), "reference p is missing"),
    ("18.1", lambda p, r, beta: best_policy(p, [-x for x in r], beta), "more probable"),
    ("18.1", lambda p, r, beta: p[:1], "1 numbers for 2 texts"),
    ("18.1", lambda p, r, beta: p, "should be"),
    ("18.1", lambda p, r, beta: [float(x == max(r)) for x in r], "keeps texts"),
    ("18.2", {**ENDS, PRICE_03: 1.0}, "is 28 here"),
    ("18.2", {**ENDS, PRICE_05: 0.463}, "divide by Z"),
    ("18.2", {**ENDS, PRICE_1: 0.17}, "divide by Z"),
    ("18.2", {**ENDS, FREE: 0}, "moves away"),
    ("18.2", {**ENDS, BEST_OF: 0.228}, "what the frontier asks"),
    ("18.2", {**ENDS, BEST_OF: ...}, "not filled in"),
    ("18.2", {**ENDS, FREE: "q"}, "write a number, not 'q'"),
    ("18.2", {**ENDS, FREE: math.nan}, "not nan"),
    ("18.2", {**ENDS, FREE: True}, "write a number, not True"),
    ("18.2", [0.651], "a dictionary"),
    ("18.3", as_asked, "each group alone"),
    ("18.3", half_mended, "each group has its own"),
    ("18.3", not_divided, "divide by the standard deviation"),
    ("18.3", with_n, "by n - 1"),
    ("18.3", no_epsilon, "NaN; add 0.0001"),
    ("18.3", no_epsilon_no_nan, "the 0.0001 beside"),
    ("18.3", transposed, "neighbours in the list"),
    ("18.3", lambda rewards, size: advantages(rewards, size)[:size], "2 numbers for 6"),
    ("18.3", lambda rewards, size: [0.0] * len(rewards), "should be"),
    ("18.4", lambda n, c, k: 1 - pass_at_k(n, c, k), "none is right"),
    ("18.4", lambda n, c, k: 1 - (1 - c / n) ** k, "too low"),
    ("18.4", lambda n, c, k: c / n, "pass@1"),
    ("18.4", lambda n, c, k: k * c / n, "k times"),
    ("18.4", lambda n, c, k: math.comb(c, k) / math.comb(n, k), "all k are right"),
    ("18.4", lambda n, c, k: c * math.comb(n - c, k - 1) / math.comb(n, k), "exactly one"),
    ("18.4", lambda n, c, k: 0.5, "0.5 should be"),
]
ALSO_RIGHT = [
    ("18.2", {**ENDS, FREE: 1 / 16, PRICE_03: 0.65142}),
    ("18.4", lambda n, c, k: 1 - math.comb(n - c, k) / math.comb(n, k)),
]


@pytest.mark.parametrize(("name", "answer"), ALSO_RIGHT)
def test_other_right_answers(name, answer):
    assert grade(name, answer).status == "correct"
