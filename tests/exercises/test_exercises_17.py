"""The graders of 17 accept right answers and say what is wrong with wrong ones."""

import pytest
import torch

from minillm.exercises import grade

PREDICTED = {
    "all-reduces in a forward pass": 20,
    "all-reduces in a forward and a backward pass": 40,
    "bytes of the tensor that one all-reduce adds up": 409_600,
    "all-reduces of one decoding step": 20.0,
    "bytes of the tensor in a decoding step of 2 rows": 4096,
}
FORWARD, BOTH, BYTES, STEP, STEP_BYTES = PREDICTED


def row_parallel(inputs, weights, bias, times=1, mean=False):
    parts = [x @ w.T for x, w in zip(inputs, weights, strict=True)]
    y = sum(parts) / (len(parts) if mean else 1)
    return y if bias is None else y + times * bias


def joined(x, w, b):
    y = torch.cat(x, 1) @ torch.cat(w, 1).T
    return y if b is None else y + b


def write_key(keys, new, position):
    slots = torch.arange(keys.shape[2])
    return torch.where((slots == position)[:, None], new, keys)


def in_place(keys, new, position):
    keys[:, :, position.item()] = new[:, :, 0]
    return keys


def by_number(keys, new, position):
    return in_place(keys.clone(), new, position)


def next_slot(keys, new, position):
    return write_key(keys, new, position + 1)


def everywhere(keys, new, position):
    return new.expand_as(keys).clone()


def cleared(keys, new, position):
    return write_key(torch.zeros_like(keys), new, position)


def by_index(keys, new, position):
    return keys.clone().index_copy(2, position, new)


RIGHT = {"17.1": PREDICTED, "17.2": row_parallel, "17.3": write_key}
ALSO_RIGHT = [("17.3", by_index), ("17.2", lambda x, w, b: stacked(x, w, b))]


def stacked(x, w, b):
    y = torch.stack([a @ c.T for a, c in zip(x, w, strict=True)]).sum(0)
    return y if b is None else y + b


def for_two(inputs, weights, bias):
    y = inputs[0] @ weights[0].T + inputs[1] @ weights[1].T
    return y if bias is None else y + bias


def spends(inputs, weights, bias):
    y = row_parallel(inputs, weights, bias)
    for x in inputs:
        x.zero_()
    return y


def adds_to_bias(inputs, weights, bias):
    y = row_parallel(inputs, weights, None)
    return y if bias is None else bias.add_(1).add(y) - 1


def takes_new(keys, new, position):
    written = write_key(keys, new, position)
    new.zero_()
    return written


def by_slices(keys, new, position):
    p = int(position)
    return torch.cat([keys[:, :, :p], new, keys[:, :, p + 1 :]], 2)


WRONG = [
    ("17.1", {**PREDICTED, FORWARD: 10}, "how many blocks has a layer"),
    ("17.1", {**PREDICTED, BOTH: 20}, "which tensor's gradient"),
    ("17.1", {**PREDICTED, BYTES: 102_400}, "how large is a float32"),
    ("17.1", {**PREDICTED, STEP: 1}, "does its length matter"),
    ("17.1", {**PREDICTED, STEP_BYTES: 409_600}, "how many new tokens"),
    ("17.1", {**PREDICTED, STEP: ...}, "not filled in yet"),
    ("17.1", {**PREDICTED, BOTH: "forty"}, "write a number"),
    ("17.1", [20, 40], "a dictionary"),
    ("17.2", lambda x, w, b: row_parallel(x, w, b, times=len(x)), "the bias is in it 2 times"),
    ("17.2", lambda x, w, b: row_parallel(x, w, None), "1 process, a bias: the bias is missing"),
    ("17.2", lambda x, w, b: row_parallel(x, w, b, mean=True), "a mean was taken"),
    ("17.2", lambda x, w, b: x[0] @ w[0].T, "other"),
    ("17.2", lambda x, w, b: [row_parallel(x, w, b)], "return one tensor"),
    ("17.2", joined, "no process has those of another"),
    ("17.2", for_two, "1 process, a bias: a process was asked for"),
    ("17.2", spends, "the arguments were changed"),
    ("17.2", adds_to_bias, "the bias was changed"),
    ("17.3", in_place, "keys were changed"),
    ("17.3", by_number, "no program of it knows all positions"),
    ("17.3", next_slot, "the slot after it was written"),
    ("17.3", everywhere, "all slots were written"),
    ("17.3", cleared, "the other slots are empty now"),
    ("17.3", lambda k, n, p: n, "return all keys"),
    ("17.3", takes_new, "the new key or the position was changed"),
    ("17.3", by_slices, "by int() or .item()"),
]


@pytest.mark.parametrize(("name", "answer"), ALSO_RIGHT)
def test_other_forms_are_right_too(name, answer):
    assert grade(name, answer).status == "correct"
