"""Planted wrong answers of notebook 08, each with the sentence that it must earn."""

import math


def keep(probs, p, crossing=True):
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept, mass = [], 0.0
    for i in order:
        if mass + probs[i] > p and not crossing:
            break
        kept.append(i)
        mass += probs[i]
        if mass >= p:
            break
    return kept


def sharpen(probs, t):
    return [p ** (1 / t) / sum(q ** (1 / t) for q in probs) for p in probs]


def residual(p, q):
    rest = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    return [x / sum(rest) for x in rest]


def typical(probs, mass):
    entropy = -sum(p * math.log(p) for p in probs)
    far = sorted(range(len(probs)), key=lambda i: abs(-math.log(probs[i]) - entropy))
    while sum(probs[i] for i in far[:-1]) >= mass:
        far.pop()
    return far


RIGHT = {
    "08.1": sharpen,
    "08.2": keep,
    "08.3": lambda pieces, stop: "".join(pieces).partition(stop)[0],
    "08.4": residual,
    "08.5": typical,
}
WRONG = [
    ("08.1", lambda probs, t: [p ** (1 / t) for p in probs], "renormalise"),
    ("08.1", lambda probs, t: [p**t / sum(q**t for q in probs) for p in probs], "wrong way round"),
    ("08.1", lambda probs, t: list(probs), "changes nothing"),
    ("08.1", lambda probs, t: [1 / len(probs)] * len(probs), "I expected"),
    ("08.2", lambda probs, p: keep(probs, p, crossing=False), "nothing is left"),
    ("08.2", lambda probs, p: keep(probs, p, False) or keep(probs, 0), "the token that crosses p"),
    ("08.2", lambda probs, p: list(range(len(keep(probs, p)))), "I expected"),
    ("08.3", lambda pieces, stop: "".join(pieces), "across two pieces"),
    ("08.3", lambda pieces, stop: "".join(pieces).partition(stop)[0] + stop, "leave it out"),
    (
        "08.3",
        lambda pieces, stop: (
            "".join(pieces).rpartition(stop)[0] if stop in "".join(pieces) else "".join(pieces)
        ),
        "instead of the first",
    ),
    ("08.4", lambda p, q: [a - b for a, b in zip(p, q, strict=True)], "only the positive part"),
    ("08.4", lambda p, q: [max(a - b, 0) for a, b in zip(p, q, strict=True)], "renormalise"),
    ("08.4", lambda p, q: p, "counts tokens twice"),
    ("08.5", keep, "the most probable tokens"),
    ("08.5", lambda probs, mass: [len(probs) - 1], "I expected"),
    ("08.5", lambda probs, mass: [], "you kept no token"),
]


def test_typical_agrees_with_transformers():
    """The grader's idea of 08.5 is the one of transformers' TypicalLogitsWarper."""
    import torch
    from transformers.generation.logits_process import TypicalLogitsWarper

    from minillm.exercises.sampling import _typical_set

    probs = [0.4, 0.3, 0.15, 0.1, 0.05]
    for mass in (0.2, 0.5, 0.9):
        kept = TypicalLogitsWarper(mass)(None, torch.tensor([probs]).log())[0]
        assert kept.isfinite().nonzero()[:, 0].tolist() == _typical_set(probs, mass)
    assert math.isclose(sum(probs), 1)
