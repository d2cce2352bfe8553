"""Planted wrong answers of the page 10_your_own_part, each with the sentence it must earn."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.exercises.your_own_part import HAPPENS
from minillm.training import cross_entropy


def blocker(forbidden):
    """A step of the sampler, from a function of one row's ids and n."""

    def step(logits, previous_ids, n):
        logits = logits.clone()
        for row, ids in zip(logits, previous_ids.tolist(), strict=True):
            row[list(forbidden(ids, n))] = -math.inf
        return logits

    return step


def banned(ids, n):
    start = len(ids) - n + 1
    if start < 0:
        return set()
    runs = [ids[i : i + n] for i in range(start)]
    return {r[-1] for r in runs if min(r) >= 0 and r[:-1] == ids[start:]}


right = blocker(banned)


def in_place(logits, previous_ids, n):
    logits.copy_(right(logits, previous_ids, n))
    return logits


def first_row_for_all(logits, previous_ids, n):
    return right(logits, previous_ids[:1].expand(len(logits), -1), n)


def finite(logits, previous_ids, n):
    return right(logits, previous_ids, n).clamp(min=-100.0)


def padding_too(ids, n):
    start = len(ids) - n + 1
    runs = [ids[i : i + n] for i in range(start)] if start >= 0 else []
    return {r[-1] for r in runs if r[:-1] == ids[start:]}


def pairs_only(ids, n):
    return {b for a, b in pairwise(ids) if a == ids[-1]} if n > 1 else {*ids}


def slopes(logits, targets, weight):
    counts = (targets != -100)[..., None]
    log_z = logits.logsumexp(-1, keepdim=True)
    return 2 * weight * log_z * logits.softmax(-1) * counts / counts.sum()


def counts_of(targets):
    return (targets != -100)[..., None]


def one_off(logits, targets, weight):
    """One slope of 70 is wrong: the sentence must name it."""
    found = slopes(logits, targets, weight)
    found[1, 0, 4] += 1
    return found


RIGHT = {
    "10_your_own_part.1": right,
    "10_your_own_part.2": HAPPENS,
    "10_your_own_part.3": slopes,
}
ONE, TWO, THREE = RIGHT
WRONG = [
    (ONE, in_place, "take a copy"),
    (ONE, blocker(lambda ids, n: {*ids}), "what may not is n in a row"),
    (ONE, blocker(lambda ids, n: banned(ids, n - 1) if n > 1 else set()), "one too few"),
    (ONE, blocker(lambda ids, n: banned(ids, n + 1)), "nothing is forbidden"),
    (ONE, first_row_for_all, "each row has its own past"),
    (ONE, finite, "a forbidden one is -inf"),
    (ONE, blocker(padding_too), "padding is part of nothing"),
    (ONE, blocker(lambda ids, n: set(list(banned(ids, n))[:1])), "all places"),
    (ONE, blocker(pairs_only), "one too few"),
    (ONE, lambda logits, previous_ids, n: logits, "nothing is forbidden"),
    (ONE, blocker(lambda ids, n: banned(ids, n) | {7}), "forbidden should be"),
    (ONE, lambda logits, previous_ids, n: logits[0], "return scores"),
    (ONE, lambda logits, previous_ids, n: 3, "return scores"),
    (TWO, {**HAPPENS, "`Forgets` writes with a cache": "refused"}, "but a test compares"),
    (TWO, {**HAPPENS, "`Forgets` trains": "silent"}, "no cache in training"),
    (TWO, {**HAPPENS, "the same, then save_pretrained": "works"}, "another model"),
    (TWO, {**HAPPENS, "packed() of a model with your attention": "silent"}, "names the one"),
    (TWO, {**HAPPENS, "packed() of a model with your attention": ...}, "not filled in yet"),
    (TWO, {**HAPPENS, "`Forgets` trains": True}, 'write "works"'),
    (TWO, "works", "a dictionary"),
    (THREE, lambda x, t, w: slopes(x, t, w) / 2, "twice log Z"),
    (THREE, lambda x, t, w: slopes(x, t, w) * counts_of(t).sum(), "of a mean"),
    (
        THREE,
        lambda x, t, w: slopes(x, t, w) / x.softmax(-1),
        "its probability",
    ),
    (THREE, lambda x, t, w: slopes(x, t, w) / x.logsumexp(-1, keepdim=True), "log Z is missing"),
    (THREE, lambda x, t, w: slopes(x, torch.zeros_like(t), w), "do not count"),
    (THREE, lambda x, t, w: slopes(x, t, w) * counts_of(t).sum() / t.numel(), "that count"),
    (THREE, lambda x, t, w: slopes(x, t, 1), "the weight is missing"),
    (THREE, lambda x, t, w: (x.softmax(-1) - torch.eye(7)[t]) / 10, "no part of log Z"),
    (
        THREE,
        lambda x, t, w: slopes(x, torch.zeros_like(t), w) * t.numel() / counts_of(t).sum(),
        "the divisor is right, but",
    ),
    (THREE, lambda x, t, w: torch.zeros_like(x), "the slope of score"),
    (THREE, one_off, "the slope of score [1, 0, 4] is"),
    (THREE, lambda x, t, w: x.logsumexp(-1), "a slope for each score"),
]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 4))
def test_the_blocker_is_that_of_transformers(ids, n):
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    theirs = logits_process.NoRepeatNGramLogitsProcessor(n)
    logits, seen = torch.zeros(1, 6), torch.tensor([ids])
    assert torch.equal(right(logits, seen, n), theirs(seen, logits.clone()))


def test_the_slopes_are_autograds():
    logits = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[1, 2, -100, 3, 4], [0, -100, -100, 6, 5]])
    log_z = logits.logsumexp(-1)[targets != -100]
    (cross_entropy(logits, targets) * 0 + 0.3 * log_z.square().mean()).backward()
    torch.testing.assert_close(slopes(logits.detach(), targets, 0.3), logits.grad)
