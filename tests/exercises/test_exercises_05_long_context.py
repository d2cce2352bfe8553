"""The graders of 05_long_context accept right answers and say what is wrong with wrong ones."""

import math

import torch

from minillm.deeper.attention.rope_scaling import rope_frequencies

SLOWER = {
    ("linear", 0): 4,
    ("linear", 63): 4.0,
    ("static NTK", 0): 1,
    ("static NTK", 63): 4,
    ("dynamic NTK", 63): 13,
    ("llama3", 0): 1,
    ("llama3", 63): 4,
}


def theta(head_dim, base):
    return base ** (-torch.arange(0, head_dim, 2) / head_dim)


def turns(head_dim, base, length):
    return length * theta(head_dim, base) / (2 * math.pi)


RIGHT = {
    "05_long_context.1": turns,
    "05_long_context.2": lambda base, D, s: base * s ** (D / (D - 2)),
    "05_long_context.3": SLOWER,
}
WRONG = [
    ("05_long_context.1", lambda D, b, n: n * theta(D, b), "these are radians"),
    ("05_long_context.1", lambda D, b, n: 360 * turns(D, b, n), "these are degrees"),
    ("05_long_context.1", lambda D, b, n: 2 * math.pi / theta(D, b), "these are words per turn"),
    ("05_long_context.1", lambda D, b, n: turns(D, b, 1), "the turns in one word"),
    ("05_long_context.1", lambda D, b, n: turns(D, b, n).flip(0), "from fast to slow"),
    ("05_long_context.1", lambda D, b, n: turns(D, b, n).floor(), "parts of a turn count"),
    ("05_long_context.1", lambda D, b, n: turns(D, 10000.0, n), "the first pair makes"),
    (
        "05_long_context.1",
        lambda D, b, n: n * b ** (-torch.arange(D) / D) / (2 * math.pi),
        "each of 4 pairs",
    ),
    ("05_long_context.2", lambda base, D, s: base * s, "only by"),
    ("05_long_context.2", lambda base, D, s: base * s ** ((D - 2) / D), "upside down"),
    ("05_long_context.2", lambda base, D, s: base * s**2, "slows the slowest pair"),
    ("05_long_context.2", lambda base, D, s: -base, "a base is positive"),
    ("05_long_context.3", {**SLOWER, ("linear", 0): 1}, "treats all pairs alike"),
    ("05_long_context.3", {**SLOWER, ("static NTK", 0): 4}, "what is the power 0"),
    ("05_long_context.3", {**SLOWER, ("dynamic NTK", 63): 4}, "in the place of s"),
    ("05_long_context.3", {**SLOWER, ("llama3", 0): 4}, "hundreds of times"),
    ("05_long_context.3", {**SLOWER, ("llama3", 63): 1}, "does not turn once"),
    ("05_long_context.3", {**SLOWER, ("linear", 63): 0.25}, "not the share that is left"),
    ("05_long_context.3", {**SLOWER, ("linear", 63): ...}, "not filled in"),
    ("05_long_context.3", {**SLOWER, ("linear", 63): "4"}, "write a number"),
    ("05_long_context.3", [4, 4], "a dictionary"),
]


def test_the_frequencies_used_here_are_the_modules():
    torch.testing.assert_close(theta(64, 500000.0), rope_frequencies(64, base=500000.0)[0])


def test_the_predicted_numbers_are_the_modules():
    plain, _ = rope_frequencies(128)
    scalings = {
        "linear": {"rope_type": "linear", "factor": 4.0},
        "dynamic NTK": {"rope_type": "dynamic", "factor": 4.0},
        "llama3": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    }
    found = {
        name: rope_frequencies(128, scaling=scaling, max_position_embeddings=4096, length=16384)[0]
        for name, scaling in scalings.items()
    }
    found["static NTK"] = rope_frequencies(128, base=10000.0 * 4 ** (128 / 126))[0]
    for (name, pair), times in SLOWER.items():
        assert math.isclose(plain[pair] / found[name][pair], times, rel_tol=1e-4)
