"""The graders of notebook 05 accept the solutions and say what is wrong with wrong answers."""

import math

import torch

from minillm.nn.rope import RotaryEmbedding, interleaved_to_half
from minillm.nn.rope_scaling import rope_frequencies


def theta(head_dim, base):
    return base ** (-torch.arange(0, head_dim, 2) / head_dim)


def turn(x, positions, frequencies, sign=1.0):
    angles = sign * positions[:, None] * frequencies
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def turn_interleaved(x, positions, frequencies):
    return RotaryEmbedding(x.shape[-1], interleaved=True)(positions[None])(x)


def turn_in_place(x, positions, frequencies):
    x *= 1.0 + 1e-3
    return turn(x, positions, frequencies)


def convert(weights, heads, names=("q_proj", "k_proj"), kinds=("weight", "bias")):
    return {
        n: interleaved_to_half(w, heads[n[:6]]) if n[:6] in names and n[7:] in kinds else w
        for n, w in weights.items()
    }


RIGHT = {
    "05.1": lambda D, base: 2 * math.pi / theta(D, base),
    "05.2": lambda base, D, s: base * s ** (D / (D - 2)),
    "05.3": turn,
    "05.4": lambda w, H, G: convert(w, {"q_proj": H, "k_proj": G}),
}
WRONG = [
    ("05.1", lambda D, base: theta(D, base), "angles per word"),
    ("05.1", lambda D, base: 1 / theta(D, base), "words per radian"),
    ("05.1", lambda D, base: (2 * math.pi / theta(D, base)).flip(0), "from fast to slow"),
    ("05.1", lambda D, base: 2 * math.pi * base ** (torch.arange(D) / D), "each of 4 pairs"),
    ("05.1", lambda D, base: 2 * math.pi / theta(D, 10000.0), "the first pair needs"),
    ("05.2", lambda base, D, s: base * s, "only by"),
    ("05.2", lambda base, D, s: base * s ** ((D - 2) / D), "slows the slowest pair"),
    ("05.2", lambda base, D, s: -base, "nan times"),
    ("05.3", turn_interleaved, "half-split pairs are (i, i + D/2)"),
    ("05.3", lambda x, p, f: turn(x, p, f, -1.0), "the other way round"),
    ("05.3", lambda x, p, f: turn(x, torch.arange(len(p)), f), "you turned by 0, 1, 2, 3"),
    ("05.3", lambda x, p, f: turn(x, p, f) + x, "the length of a vector changed"),
    ("05.3", lambda x, p, f: turn(x, p, f * 0.5), "not by position times frequency"),
    ("05.3", lambda x, p, f: turn(x, p, f)[:, :1], "the shape (2, 3, 4, 6) became (2, 1, 4, 6)"),
    ("05.3", turn_in_place, "x itself has changed"),
    ("05.4", lambda w, H, G: w, "gives other outputs"),
    ("05.4", lambda w, H, G: {"q_proj.weight": w["q_proj.weight"]}, "look at k_proj.weight"),
    ("05.4", lambda w, H, G: {n: t[:4] for n, t in w.items()}, "changed its shape"),
    (
        "05.4",
        lambda w, H, G: convert(
            w, {"q_proj": H, "k_proj": G, "v_proj": G}, names=("q_proj", "k_proj", "v_proj")
        ),
        "v_proj.weight is reordered",
    ),
    (
        "05.4",
        lambda w, H, G: convert(w, {"q_proj": H, "k_proj": H}),
        "k_proj has 2 heads here, not 4",
    ),
    (
        "05.4",
        lambda w, H, G: convert(w, {"q_proj": H, "k_proj": G}, kinds=("weight",)),
        "biases of q and k have to follow",
    ),
]


def test_the_frequencies_used_here_are_the_modules():
    torch.testing.assert_close(theta(64, 500000.0), rope_frequencies(64, base=500000.0)[0])
