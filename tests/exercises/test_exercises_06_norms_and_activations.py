"""Graders of norms and activations accept right answers and say what is wrong with others."""

MOVED = {
    "x + branch": 6,
    "x.float()": 6,
    "wide.pow(2), in float32": 8,
    "sum and norm in one kernel: read x and branch, write both results": 8,
}
ONE, TWO = "06_norms_and_activations.1", "06_norms_and_activations.2"


def size(x):
    return x.square().mean() ** 0.5


def stream(x, branches, *, pre=True, post=False, add=True):
    for branch in branches:
        y = branch(x / size(x) if pre else x)
        x = x + y if add else y
        x = x / size(x) if post else x
    return x


RIGHT = {ONE: lambda x, b: size(stream(x, b)), TWO: MOVED}
WRONG = [
    (ONE, lambda x, b: size(stream(x, b, add=False)), "they do not replace it"),
    (ONE, lambda x, b: size(stream(x, b, pre=False)), "given the normed stream"),
    (ONE, lambda x, b: size(stream(x, b, pre=False, post=True)), "nothing divides the stream"),
    (ONE, lambda x, b: size(x), "before the branches"),
    (ONE, lambda x, b: size(stream(x, b)) ** 2, "its root"),
    (ONE, lambda x, b: stream(x, b).norm(), "average the squares"),
    (ONE, lambda x, b: stream(x, b).std(correction=0), "subtract no mean"),
    (ONE, lambda x, b: 1 / size(stream(x, b)), "what is left of the road"),
    (ONE, lambda x, b: stream(x, b), "return one number"),
    (ONE, lambda x, b: 7.0, "I expected"),
    (TWO, {**MOVED, "x + branch": 4}, "two are read and one is written"),
    (TWO, {**MOVED, "x.float()": 4}, "how many are written"),
    (TWO, {**MOVED, "wide.pow(2), in float32": 4}, "four bytes a number now"),
    (TWO, {**MOVED, "x.float()": ...}, "not filled in yet"),
    (TWO, [6, 6, 8, 8], "a dictionary"),
]
