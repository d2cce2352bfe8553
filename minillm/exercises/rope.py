"""Graders of notebook 05: wavelengths, the NTK base, rotating by hand, converting a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minillm.exercises import exercise
from minillm.nn.multihead import MultiHeadAttention
from minillm.nn.rope import RotaryEmbedding, interleaved_to_half
from minillm.nn.rope_scaling import rope_frequencies


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


@exercise(
    "05.1", "Write wavelengths(head_dim, base): the words per full turn of each pair, (D/2,)."
)
def _wavelengths(answer: Callable[[int, float], Tensor]) -> str | None:
    for head_dim, base in ((8, 10000.0), (64, 500000.0), (2, 10.0)):
        got = torch.as_tensor(answer(head_dim, base)).float()
        frequencies, _ = rope_frequencies(head_dim, base=base)
        want, case = 2 * math.pi / frequencies, f"head_dim {head_dim} and base {base:g}"
        if _close(got, want):
            continue
        if got.shape != want.shape:
            pairs = head_dim // 2
            return f"{case}: expected one number for each of {pairs} pairs, got {tuple(got.shape)}"
        if _close(got, frequencies):
            return f"{case}: these are the angles per word, the question is words per turn"
        if _close(got, 1 / frequencies):
            return f"{case}: these are words per radian, and a full turn has 2 pi of them"
        if _close(got, want.flip(0)):
            return f"{case}: the order is from fast to slow, yours begins with the slowest pair"
        return f"{case}: the first pair needs {want[0]:.2f} words, the last {want[-1]:.2f}"
    return None


@exercise("05.2", "Write ntk_base(base, head_dim, factor): the base of static NTK scaling.")
def _ntk_base(answer: Callable[[float, int, float], float]) -> str | None:
    for base, head_dim, factor in ((10000.0, 8, 4.0), (10000.0, 128, 2.0), (500000.0, 64, 1.0)):
        got = float(answer(base, head_dim, factor))
        want = base * factor ** (head_dim / (head_dim - 2))
        if math.isclose(got, want, rel_tol=1e-6):
            continue
        if factor != 1 and math.isclose(got, base * factor, rel_tol=1e-6):
            return (
                f"base * factor slows the last of {head_dim // 2} pairs only by "
                f"factor ** {(head_dim - 2) / head_dim:.3f}: its exponent is (D - 2)/D, not 1"
            )
        slowed = (got / base) ** ((head_dim - 2) / head_dim) if got > 0 else math.nan
        return (
            f"with head_dim {head_dim} your base {got:.6g} slows the slowest pair "
            f"{slowed:.3f} times instead of {factor:g}"
        )
    return None


@exercise(
    "05.3", "Write rotate(x, positions, frequencies): half-split pairs of x (B, H, T, D), turned."
)
def _rotate(answer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> str | None:
    for seed, positions in enumerate((torch.arange(4), torch.tensor([7, 8, 30, 2]))):
        x, (frequencies, _) = _draw(2, 3, 4, 6, seed=seed), rope_frequencies(6)
        kept = x.clone()
        got = answer(x, positions, frequencies)
        if not torch.equal(x, kept):
            return "x itself has changed: return a new tensor and leave the input alone"
        if got.shape != x.shape:
            return f"the shape {tuple(x.shape)} became {tuple(got.shape)}"
        half, interleaved = (RotaryEmbedding(6, interleaved=i) for i in (False, True))
        if _close(got, half(positions[None])(x)):
            continue
        if _close(got, interleaved(positions[None])(x)):
            return "you turned the pairs (0, 1), (2, 3), ...: half-split pairs are (i, i + D/2)"
        if _close(got, half(-positions[None])(x)):
            return "you turned the other way round: (a, b) becomes (a cos - b sin, b cos + a sin)"
        if _close(got, half(torch.arange(4)[None])(x)):
            return f"for positions {positions.tolist()} you turned by 0, 1, 2, 3: use the positions"
        if not _close(got.norm(dim=-1), x.norm(dim=-1), 1e-3):
            return "the length of a vector changed: a rotation keeps a^2 + b^2 of every pair"
        return f"positions {positions.tolist()} are turned, but not by position times frequency"
    return None


def _attend(weights: dict[str, Tensor], H: int, G: int, x: Tensor, *, interleaved: bool) -> Tensor:
    module = MultiHeadAttention(24, H, num_kv_heads=G, head_dim=8, bias="q_proj.bias" in weights)
    module.load_state_dict(weights)
    rope = RotaryEmbedding(8, interleaved=interleaved)
    with torch.no_grad():
        return module(x, rope=rope(torch.arange(x.shape[1])[None]), is_causal=True)


@exercise(
    "05.4", "Write convert(weights, num_heads, num_kv_heads): interleaved pairs to half-split."
)
def _convert(answer: Callable[[dict[str, Tensor], int, int], dict[str, Tensor]]) -> str | None:
    for H, G, bias in ((3, 3, False), (4, 2, False), (6, 3, True)):
        module = MultiHeadAttention(24, H, num_kv_heads=G, head_dim=8, bias=bias)
        shapes = {name: p.shape for name, p in module.state_dict().items()}
        weights = {n: _draw(*s, seed=i) * 0.5 for i, (n, s) in enumerate(shapes.items())}
        x = _draw(2, 5, 24, seed=99)
        want = _attend(weights, H, G, x, interleaved=True)
        got = dict(answer({name: w.clone() for name, w in weights.items()}, H, G))
        if got.keys() != weights.keys():
            odd = ", ".join(sorted(got.keys() ^ weights.keys()))
            return f"the result should hold the names that came in; look at {odd}"
        if any(got[n].shape != s for n, s in shapes.items()):
            return "a weight changed its shape: conversion only reorders rows"
        for name in ("v_proj.weight", "o_proj.weight"):
            if not torch.equal(got[name], weights[name]):
                return f"{name} is reordered, but values are never rotated: leave it alone"
        if _close(_attend(got, H, G, x, interleaved=False), want, 1e-3):
            continue
        if bias and torch.equal(got["q_proj.bias"], weights["q_proj.bias"]):
            return "the biases of q and k have to follow their rows"
        right = interleaved_to_half(weights["k_proj.weight"], G)
        if G != H and not torch.equal(got["k_proj.weight"], right):
            return f"k_proj has {G} heads here, not {H}: reorder within its own heads"
        return f"with {H} query and {G} key heads the converted attention gives other outputs"
    return None
