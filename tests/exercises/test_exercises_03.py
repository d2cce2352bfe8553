"""The graders of notebook 03 accept right answers and say what is wrong with wrong ones."""

import math

import pytest
import torch
import torch.nn.functional as F

from minillm.attention import attention, attention_weights, causal_mask, softmax
from minillm.exercises import grade


def attend(q, k, v, root=None, mask=None, dim=-1):
    mask = causal_mask(len(q), len(k)) if mask is None else mask
    scores = q @ k.T / (q.shape[1] ** 0.5 if root is None else root)
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), dim).nan_to_num(0.0) @ v


def attend_by_loop(q, k, v):
    """One query at a time; unlike the solution, without a mask."""
    rows = []
    for t in range(len(q)):
        last = t + len(k) - len(q) + 1
        scores = torch.stack([q[t] @ k[s] for s in range(last)]) / q.shape[1] ** 0.5
        weights = torch.exp(scores - scores.max())
        rows.append((weights / weights.sum()) @ v[:last])
    return torch.stack(rows)


def attend_naively(q, k, v):
    scores = torch.exp(q @ k.T / q.shape[1] ** 0.5) * causal_mask(len(q), len(k))
    return scores / scores.sum(-1, keepdim=True) @ v


def attend_masked_late(q, k, v):
    return (torch.softmax(q @ k.T / q.shape[1] ** 0.5, -1) * causal_mask(len(q), len(k))) @ v


def attend_renormalised(q, k, v):
    weights = torch.softmax(q @ k.T / q.shape[1] ** 0.5, -1) * causal_mask(len(q), len(k))
    return weights / weights.sum(-1, keepdim=True) @ v


def attend_for_me(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(len(q), len(k)))


def attend_by_the_package(q, k, v):
    return attention(q[None, None], k[None, None], v[None, None], is_causal=True)[0, 0]


def weigh_by_the_package(q, k, v):
    return attention_weights(q[None, None], k[None, None], is_causal=True)[0, 0] @ v


def corner(q, k):
    return torch.ones(len(q), len(k)).tril().bool()


def all_open(q, k):
    return torch.ones(len(q), len(k), dtype=torch.bool)


def strictly_before(q, k):
    return all_open(q, k).tril(len(k) - len(q) - 1)


def attend_strictly_with_nan(q, k, v):
    scores = (q @ k.T / q.shape[1] ** 0.5).masked_fill(~strictly_before(q, k), -torch.inf)
    return torch.softmax(scores, -1) @ v


PREDICTIONS = {
    "score of query 1 with key 2": 22,
    "score of query 2 with key 3": 18,
    "first number of the output of query 2, rounded": 15,
    "True entries of causal_mask(2, 5)": 9,
    "weight of the first word on itself, causal": 1,
    "outputs that change if word 4 of 5 changes, causal": 2,
    "how many times the scores, if a text is 3 times as long": 9,
}


def prefix(P, T, S):
    return causal_mask(T, S) | (torch.arange(S) < P)


def top_left(P, T, S):
    return torch.ones(T, S).tril().bool() | (torch.arange(S) < P)


def mended(q, k, v, real, root=None, dim=-1, normalise=softmax):
    scores = q @ k.mT / (q.shape[-1] ** 0.5 if root is None else root)
    return normalise(scores.masked_fill(~real[:, None, :], -torch.inf), dim) @ v


def mended_by_renormalising(q, k, v, real):
    weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) * real[:, None, :]
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) @ v


def still_late(q, k, v, real):
    return (torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) * real[:, None, :]) @ v


def untouched(q, k, v, real):
    return (torch.softmax(q @ k.mT / q.shape[1] ** 0.5, 1) * real[:, None, :]) @ v


def large_negative(q, k, v, real):
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~real[:, None, :], -1e9)
    return torch.softmax(scores, -1) @ v


def mended_with_other_padding(*x):
    """What padding itself gets back does not matter."""
    return mended(*x) + 5 * (~x[3] & x[3].any(1, keepdim=True))[:, :, None]


def mended_by_large_negative(*x):
    """A row without any word reads evenly, and is then set to zero."""
    return large_negative(*x) * x[3].any(1)[:, None, None]


def wrong_axis_of_mask(q, k, v, real):
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~real[:, :, None], -torch.inf)
    return softmax(scores, -1) @ v


def also_causal(q, k, v, real):
    mask = real[:, None, :] & causal_mask(q.shape[1], q.shape[1])
    return softmax((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf), -1) @ v


def circle(T, back=1, length=120.0, D=2):
    """Positions as hours of a clock; a query points to the hour before its own."""
    angle = 2 * math.pi * torch.arange(T) / max(T, 3)
    turned = angle - back * 2 * math.pi / max(T, 3)
    k = torch.stack([torch.cos(angle), torch.sin(angle)], 1) * length
    return torch.stack([torch.cos(turned), torch.sin(turned)], 1) * length, k


def bits(T):
    """Positions in binary, as -1 and 1; unlike the clock, of the six digits of 0 to 63."""

    def digits(n):
        return torch.stack([2.0 * (n >> b & 1) - 1 for b in range(6)], 1)

    places = torch.arange(T)
    return 30 * digits((places - 1) % 64), digits(places)


def first_position(T):
    k = torch.zeros(T, 2)
    k[0] = 30.0
    return torch.ones(T, 2), k


def masked_with(low, late, q, k, v):
    T, S = len(q), len(k)
    allowed = torch.ones(T, S).tril(S - T + late).bool()
    return ((q @ k.T / q.shape[1] ** 0.5).masked_fill(~allowed, low)).softmax(-1) @ v


RIGHT = {
    "03.1": attend,
    "03.2": PREDICTIONS,
    "03.3": prefix,
    "03.4": mended,
    "03.5": circle,
}
MORE_RIGHT = [
    ("03.1", attend_by_loop),
    ("03.4", mended_by_large_negative),
    ("03.4", mended_with_other_padding),
    ("03.5", bits),
]


WRONG = [
    ("03.1", lambda *x: masked_with(-20.0, 0, *x), "a forbidden score of -20"),
    ("03.1", lambda *x: masked_with(-torch.inf, 1, *x), "one key too many"),
    ("03.1", lambda q, k, v: attend(q, k, v, root=1), "not divided by the square root"),
    ("03.1", lambda q, k, v: attend(q, k, v, root=q.shape[1]), "not by its square root"),
    ("03.1", lambda q, k, v: attend(q, k, v, root=len(k) ** 0.5), "not of S"),
    ("03.1", lambda q, k, v: attend(q, k, v, mask=all_open(q, k)), "nothing is masked"),
    ("03.1", lambda q, k, v: attend(q, k, v, mask=corner(q, k)), "first key, not the last"),
    ("03.1", lambda q, k, v: attend(q, k, v, mask=strictly_before(q, k)), "read itself, too"),
    ("03.1", attend_strictly_with_nan, "read itself, too"),
    ("03.1", lambda q, k, v: attend(q, k, v, dim=0), "softmax runs along the queries"),
    ("03.1", lambda q, k, v: attend(q, k, v, mask=~causal_mask(len(q), len(k))), "upside down"),
    ("03.1", attend_masked_late, "the mask comes after softmax"),
    ("03.1", attend_naively, "exp without subtracting"),
    ("03.1", lambda q, k, v: attend(q, k, v, mask=causal_mask(len(q), len(q))), "it raised"),
    ("03.1", attend_renormalised, "a mask after softmax, which can leave"),
    ("03.1", attend_for_me, "PyTorch's attention does it for you"),
    ("03.1", attend_by_the_package, "the package's attention does it for you"),
    ("03.1", weigh_by_the_package, "the package's attention does it for you"),
    ("03.1", lambda q, k, v: attend(q, k, v, root=v.shape[1] ** 0.5), "not of E"),
    ("03.1", lambda q, k, v: attend(q, k, v).mT, "should have shape (5, 3)"),
    ("03.2", {**PREDICTIONS, "score of query 2 with key 3": 20}, "dot product of the two rows"),
    ("03.2", {**PREDICTIONS, "True entries of causal_mask(2, 5)": 3}, "the one before?"),
    ("03.2", {**PREDICTIONS, "weight of the first word on itself, causal": 0}, "what else"),
    (
        "03.2",
        {**PREDICTIONS, "how many times the scores, if a text is 3 times as long": 3},
        "every query meets every key",
    ),
    ("03.2", {**PREDICTIONS, "score of query 1 with key 2": ...}, "6 of 7; score of query 1"),
    ("03.2", {**PREDICTIONS, "score of query 1 with key 2": 18}, "counted from 1"),
    (
        "03.2",
        {**PREDICTIONS, "first number of the output of query 2, rounded": 14.99},
        "Then round",
    ),
    ("03.2", {**PREDICTIONS, "score of query 1 with key 2": "22"}, "write a number"),
    ("03.2", [20, 22], "a dictionary"),
    ("03.3", top_left, "prefix_mask(2, 3, 7) is aligned top-left"),
    ("03.3", lambda P, T, S: causal_mask(T, S), "is only causal"),
    ("03.3", lambda P, T, S: ~prefix(P, T, S), "upside down"),
    ("03.3", lambda P, T, S: prefix(P, T, S).float(), "should be of type torch.bool"),
    ("03.3", lambda P, T, S: prefix(P, S, S), "should have shape (3, 7)"),
    ("03.3", lambda P, T, S: prefix(P + 1, T, S), "query 0 (position 0) must not read key 2"),
    ("03.4", untouched, "still there: the divisor, the dimension of softmax"),
    ("03.4", still_late, "still there: masking after softmax"),
    ("03.4", lambda *x: mended(*x, dim=1), "still there: the dimension of softmax"),
    ("03.4", lambda *x: mended(*x, root=6**0.5), "still there: the divisor"),
    ("03.4", lambda *x: mended(*x, normalise=torch.softmax), "zeros, but gives NaN"),
    ("03.4", large_negative, "it reads the padding"),
    ("03.4", mended_by_renormalising, "padding has by far the largest score"),
    ("03.4", wrong_axis_of_mask, "right without padding"),
    ("03.4", also_causal, "a causal mask was not asked for"),
    ("03.4", lambda q, k, v, real: mended(q, k, v, real, root=4), "even for a text without"),
    ("03.5", lambda T: circle(T, back=0), "position 1 reads itself most"),
    ("03.5", lambda T: circle(T, length=10.0), "longer vectors"),
    ("03.5", first_position, "position 2 reads position 0 most, not 1"),
    ("03.5", lambda T: (torch.eye(T).roll(-1, 1) * 30, torch.eye(T)), "should be at most 8"),
    ("03.5", lambda T: circle(T)[0], "return two tensors"),
    ("03.5", lambda T: circle(T + 1), "both should be (T, D)"),
]


@pytest.mark.parametrize(("name", "answer"), MORE_RIGHT)
def test_other_right_answers_are_accepted(name, answer):
    assert grade(name, answer).status == "correct"
