"""The graders of 10_four_bits accept right answers and say what is wrong with wrong ones."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from minillm.exercises import grade
from minillm.exercises.four_bits import BITS, PACKED


def product(x, levels, scale, least):
    found = 0.0
    for g in range(len(scale)):
        part = slice(32 * g, 32 * g + 32)
        found += scale[g] * np.dot(x[part], levels[part]) + least[g] * sum(x[part])
    return float(found)


def decoded(x, levels, scale, least):
    """Another right way."""
    return sum(a * (scale[i // 32] * b + least[i // 32]) for i, (a, b) in enumerate(zip(x, levels)))  # noqa: B905


def kl(logits, exact):
    q, p = logits.log_softmax(-1), exact.log_softmax(-1)
    return F.kl_div(q, p, log_target=True, reduction="batchmean")


RIGHT = {"10_four_bits.1": product, "10_four_bits.2": BITS, "10_four_bits.3": kl}
WRONG = [
    ("10_four_bits.1", lambda x, q, s, m: product(x, q, s, [0] * len(m)), "least numbers are miss"),
    (
        "10_four_bits.1",
        lambda x, q, s, m: product(x, q, s, [0] * len(m)) + sum(m),
        "not added once",
    ),
    ("10_four_bits.1", lambda x, q, s, m: product(x, q, [1] * len(s), m), "scales are missing"),
    (
        "10_four_bits.1",
        lambda x, q, s, m: product(x, q, s[:1] * len(s), m[:1] * len(m)),
        "their own scale",
    ),
    ("10_four_bits.1", lambda x, q, s, m: x, "one number"),
    ("10_four_bits.1", lambda x, q, s, m: 7.0, "not 7.0000"),
    ("10_four_bits.2", {**BITS, "Q4_0": 4}, "levels alone"),
    ("10_four_bits.2", {**BITS, PACKED: 9}, "a zero beside each scale"),
    ("10_four_bits.2", {**BITS, "Q4_K": 5}, "twelve of scales"),
    ("10_four_bits.2", {**BITS, "Q4_1": "5"}, "a number of bits"),
    ("10_four_bits.3", lambda a, b: kl(b, a), "the other way round"),
    ("10_four_bits.3", lambda a, b: kl(a, b) / math.log(2), "asked are nats"),
    ("10_four_bits.3", lambda a, b: kl(a, b) * len(a), "the sum over positions"),
    ("10_four_bits.3", lambda a, b: kl(a, b) / a.shape[1], "tokens are summed"),
    ("10_four_bits.3", lambda a, b: (b.exp() * (b - a)).sum(-1).mean(), "before log_softmax"),
    (
        "10_four_bits.3",
        lambda a, b: F.cross_entropy(a, b.softmax(-1)),
        "the exact model's own entropy",
    ),
    ("10_four_bits.3", lambda a, b: torch.zeros(2), "one number"),
    ("10_four_bits.3", lambda a, b: 0.0, "not 0.0000"),
]


@pytest.mark.parametrize(("name", "answer"), [("10_four_bits.1", decoded)])
def test_other_right_answers(name, answer):
    assert grade(name, answer).status == "correct", grade(name, answer).message
