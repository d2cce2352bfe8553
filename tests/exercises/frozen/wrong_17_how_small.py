"""Wrong answers of 17_how_small: exercise, answer, words that its message holds."""

import torch

PREDICTED = {
    "weights before": 500_000,
    "weights after": 410_000,
    "bytes of the pruned embedding in float32": 40_000,
    "bytes of the pruned embedding in int8, a float32 factor a row": 10_400,
    "by how many steps an int8 number may be off, at most": 0.5,
}
BEFORE, AFTER, FLOATS, INT8, OFF = PREDICTED


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


def no_zeros(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def by_range(weight):
    scale = (weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)) / 254
    return (weight / scale).round().to(torch.int8), scale


def empties(weight):
    answer = int8_rows(weight)
    weight.zero_()
    return answer


WRONG = [
    ("17_how_small.1", one_generation, "1 is missing; what is 4 merged from"),
    ("17_how_small.1", lambda keep, parents: set(keep), "is missing"),
    ("17_how_small.1", lambda keep, parents: set(range(11)), "is not needed"),
    (
        "17_how_small.1",
        lambda keep, parents: with_parents(keep, parents) - set(keep),
        "4 is asked for",
    ),
    ("17_how_small.1", changes, "the arguments were changed"),
    ("17_how_small.1", lambda keep, parents: 3, "return a set"),
    ("17_how_small.1", five_generations, "199 merges below it"),
    ("17_how_small.2", as_given, "whose numbers are negative"),
    ("17_how_small.2", not_rounded, "half a step is possible"),
    ("17_how_small.2", by_columns, "one factor for each row"),
    ("17_how_small.2", one_factor, "what is to be reached"),
    ("17_how_small.2", lambda w: (int8_rows(w)[0].float(), int8_rows(w)[1]), "int8 (6, 9)"),
    ("17_how_small.2", lambda w: int8_rows(w)[0], "return the whole numbers and the factors"),
    ("17_how_small.2", no_zeros, "what is 0 divided by it"),
    ("17_how_small.2", by_range, "its size decides"),
    ("17_how_small.2", empties, "the argument was changed"),
    ("17_how_small.3", {**PREDICTED, BEFORE: 600_000}, "is there once"),
    ("17_how_small.3", {**PREDICTED, AFTER: 50_000}, "a token's own"),
    ("17_how_small.3", {**PREDICTED, INT8: 10_000}, "besides"),
    ("17_how_small.3", {**PREDICTED, OFF: 1}, "two whole numbers"),
    ("17_how_small.3", {**PREDICTED, OFF: float("nan")}, "two whole numbers"),
    ("17_how_small.3", [1], "a dictionary"),
]
