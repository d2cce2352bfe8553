"""Wrong answers of 17: exercise, answer, words that its message holds."""

import torch

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


def five_generations(keep, parents):
    for _ in range(5):
        keep = one_generation(keep, parents)
    return keep


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
    ("17.3", one_generation, "1 is missing; what is 4 merged from"),
    ("17.3", lambda keep, parents: set(keep), "is missing"),
    ("17.3", lambda keep, parents: set(range(11)), "is not needed"),
    ("17.3", lambda keep, parents: with_parents(keep, parents) - set(keep), "4 is asked for"),
    ("17.3", changes, "the arguments were changed"),
    ("17.3", lambda keep, parents: 3, "return a set"),
    ("17.3", five_generations, "199 merges below it"),
    ("17.4", as_given, "whose numbers are negative"),
    ("17.4", not_rounded, "half a step is possible"),
    ("17.4", by_columns, "one factor for each row"),
    ("17.4", one_factor, "what is to be reached"),
    ("17.4", lambda w: (int8_rows(w)[0].float(), int8_rows(w)[1]), "int8 (6, 9)"),
    ("17.4", lambda w: int8_rows(w)[0], "return the whole numbers and the factors"),
]
