"""The graders of 17 accept right answers and say what is wrong with wrong ones."""

import pytest
import torch

from minillm.exercises import check
from minillm.exercises.leaving import PREDICTED

RIGHT = dict(PREDICTED)


def said(capsys, name, answer):
    check(name, answer)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("question", "value", "hint"),
    [
        (0, 10, "how many blocks has a layer"),
        (1, 20, "which tensor's gradient"),
        (2, 2 * 100 * 512, "how large is a float32"),
        (3, 1, "does its length matter"),
        (4, 2 * 100 * 512 * 4, "how many new tokens"),
        (0, ..., "not filled in yet"),
        (1, "forty", "write a number"),
    ],
)
def test_predictions(capsys, question, value, hint):
    assert "17.1 correct" in said(capsys, "17.1", RIGHT)
    assert hint in said(capsys, "17.1", {**RIGHT, [*RIGHT][question]: value})
    assert "17.1 unsolved" in said(capsys, "17.1", dict.fromkeys(RIGHT, ...))


def row_parallel(inputs, weights, bias, times=1, mean=False):
    parts = [x @ w.T for x, w in zip(inputs, weights, strict=True)]
    y = sum(parts) / (len(parts) if mean else 1)
    return y if bias is None else y + times * bias


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda x, w, b: row_parallel(x, w, b, times=len(x)), "the bias is in it 2 times"),
        (lambda x, w, b: row_parallel(x, w, None), "the bias is missing"),
        (lambda x, w, b: row_parallel(x, w, b, mean=True), "a mean was taken"),
        (lambda x, w, b: x[0] @ w[0].T, "other"),
        (lambda x, w, b: [row_parallel(x, w, b)], "return one tensor"),
    ],
)
def test_row_parallel(capsys, answer, hint):
    assert "17.2 correct" in said(capsys, "17.2", row_parallel)
    assert hint in said(capsys, "17.2", answer)


def with_parents(keep, parents):
    found, left = set(), list(keep)
    while left:
        token = left.pop()
        if token not in found:
            found.add(token)
            left += parents.get(token, ())
    return found


def one_generation(keep, parents):
    return set(keep) | {p for t in keep for p in parents.get(t, ())}


def changes(keep, parents):
    keep |= with_parents(keep, parents)
    return keep


def one_pass_down(keep, parents):
    """Right only if every parent has a smaller id, and here that is so: accepted."""
    found = set(keep)
    for token in sorted(parents, reverse=True):
        if token in found:
            found |= set(parents[token])
    return found


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (one_generation, "is missing"),
        (lambda keep, parents: set(keep), "is missing"),
        (lambda keep, parents: set(range(11)), "is not needed"),
        (lambda keep, parents: with_parents(keep, parents) - set(keep), "is missing"),
        (changes, "the arguments were changed"),
        (lambda keep, parents: 3, "return a set"),
    ],
)
def test_parents(capsys, answer, hint):
    assert "17.3 correct" in said(capsys, "17.3", with_parents)
    assert "17.3 correct" in said(capsys, "17.3", one_pass_down)
    assert hint in said(capsys, "17.3", answer)


def int8_rows(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def as_given(weight):
    scale = weight.amax(1, keepdim=True) / 127
    return (weight / scale).to(torch.int8), scale


def not_rounded(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).to(torch.int8), scale


def by_columns(weight):
    scale = weight.abs().amax(0, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def one_factor(weight):
    scale = (weight.abs().max() / 127).expand(len(weight), 1)
    return (weight / scale).round().to(torch.int8), scale


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (as_given, "whose numbers are negative"),
        (not_rounded, "half a step is possible"),
        (by_columns, "one factor for each row"),
        (one_factor, "the factor"),
        (lambda w: (int8_rows(w)[0].float(), int8_rows(w)[1]), "int8 (6, 9)"),
        (lambda w: int8_rows(w)[0], "return the whole numbers and the factors"),
    ],
)
def test_int8(capsys, answer, hint):
    assert "17.4 correct" in said(capsys, "17.4", int8_rows)
    assert hint in said(capsys, "17.4", answer)
