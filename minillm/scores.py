"""Scores and softmax: the parts of attention, whole or a rectangle at a time (notebook 03).

q is (B, H, T, D), k is (B, G, S, D), v is (B, G, S, E); G divides H, and query head h reads key
head h // (H / G). Masks are bool, True where a query may read; who may read nothing gets zeros.
"""

# Built from notebooks/03_attention.ipynb: edit there, then make build.

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Rules",
    "attention_weights",
    "fold_heads",
    "make_rules",
    "masked_scores",
    "mix_values",
    "online_softmax",
    "precise",
    "rectangle",
    "repeat_kv",
    "softmax",
]


def softmax(x: Tensor, dim: int) -> Tensor:
    """Shares that sum to 1 along `dim`, safe from overflow; all zeros where every entry is -inf.

    Half precision is computed in float32. `torch.softmax` gives NaN where we give zeros.
    """
    if x.numel() == 0:  # no keys at all, or no queries: no maximum to subtract
        return x
    scores = precise(x)
    largest = scores.amax(dim, keepdim=True).detach().clamp(min=torch.finfo(scores.dtype).min)
    shares = torch.exp(scores - largest)
    total = shares.sum(dim, keepdim=True)
    return (shares / total.masked_fill(total == 0, 1.0)).to(x.dtype)


def precise(x: Tensor) -> Tensor:
    """`x` in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def online_softmax(x: Tensor, *, block_size: int = 1) -> Tensor:
    """Softmax along the last dimension; maximum and sum come from a single pass over blocks.

    Raises: ValueError if the block size is not positive.
    Source: Milakov and Gimelshein 2018, algorithm 3; by blocks, as FlashAttention does.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be positive, got {block_size}")
    scores = precise(x)
    largest = scores.new_full((*x.shape[:-1], 1), torch.finfo(scores.dtype).min)
    total = torch.zeros_like(largest)
    for block in scores.split(block_size, dim=-1):
        previous = largest
        largest = torch.maximum(previous, block.amax(-1, keepdim=True))
        total = total * torch.exp(previous - largest)  # the old terms under the new maximum
        total = total + torch.exp(block - largest).sum(-1, keepdim=True)
    return (torch.exp(scores - largest) / total.masked_fill(total == 0, 1.0)).to(x.dtype)


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    """Each key or value head `repeats` times in a row: query head h finds head h // repeats.

    Shape: (B, G, S, D) -> (B, G * repeats, S, D); a copy, unless there is nothing to repeat.
    Raises: ValueError if `repeats` is not positive.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be positive, got {repeats}")
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


class Rules(NamedTuple):
    """All that turns dot products into scores; mask and bias have four dimensions."""

    scale: float
    mask: Tensor | None
    bias: Tensor | None
    is_causal: bool


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """How much each query reads from each key: rows sum to 1, or to 0 if all keys are forbidden.

    Shape: q (B, H, T, D), k (B, G, S, D) -> (B, H, T, S); mask and bias broadcast to it.
    Raises: ValueError as `attention` does.
    Source: Vaswani et al. 2017, equation 1.
    """
    rules = make_rules(q, k, k, mask, bias, is_causal, scale)
    return softmax(masked_scores(q, k, rules), dim=-1).to(q.dtype)


def masked_scores(
    q: Tensor,
    k: Tensor,
    rules: Rules,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> Tensor:
    """A rectangle of scores, in at least float32, -inf where a query may not read."""
    first, last = rows.start or 0, k.shape[2] if columns.stop is None else columns.stop
    first += k.shape[2] - q.shape[2]  # the position of the first query, counted as keys are
    q, k = precise(q[:, :, rows]), precise(k[:, :, columns])
    scores = (fold_heads(q, k.shape[1]) @ k.mT).view(*q.shape[:3], k.shape[2]) * rules.scale
    if rules.bias is not None:
        scores = scores + rectangle(rules.bias, rows, columns)
    if rules.mask is not None:
        scores = scores.masked_fill(~rectangle(rules.mask, rows, columns), -torch.inf)
    if rules.is_causal and last > first + 1:
        queries = torch.arange(first, first + q.shape[2], device=q.device)
        keys = torch.arange(columns.start or 0, last, device=q.device)
        scores = scores.masked_fill(keys > queries[:, None], -torch.inf)
    return scores


def fold_heads(x: Tensor, groups: int) -> Tensor:
    """(B, H, T, D) -> (B, G, H/G * T, D): heads that share a key head as rows of one matrix."""
    return x.reshape(*x.shape[:1], groups, x.shape[1] // groups * x.shape[2], x.shape[3])


def rectangle(x: Tensor, rows: slice, columns: slice) -> Tensor:
    """A rectangle of a mask or bias, whose last two dimensions may be 1: a view."""
    rows = rows if x.shape[2] > 1 else slice(None)
    return x[:, :, rows, columns if x.shape[3] > 1 else slice(None)]


def make_rules(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Rules:
    """The caller's options, made uniform. Raises: ValueError with the offending values."""
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise ValueError(f"q, k, v must be (batch, heads, positions, size), got {_shapes(q, k, v)}")
    (B, H, T, D), (_, G, S, _) = q.shape, k.shape
    if k.shape != (B, G, S, D) or v.shape[:3] != (B, G, S) or G == 0 or H % G:
        raise ValueError(f"batch, heads, positions or sizes do not fit: {_shapes(q, k, v)}")
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise ValueError(f"q, k, v must have one float dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if is_causal and T > S:
        raise ValueError(f"causal: fewer keys than queries ({T} queries, {S} keys)")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, True where a query may read, got {mask.dtype}")
    if bias is not None and not bias.is_floating_point():
        raise ValueError(f"bias must be floating point, got {bias.dtype}")
    mask = None if mask is None else _four_dimensions("mask", mask, (B, H, T, S))
    if bias is not None:
        wide = torch.promote_types(q.dtype, torch.float32)
        bias = _four_dimensions("bias", bias.to(wide), (B, H, T, S))
    scale = D**-0.5 if scale is None else scale
    return Rules(scale, mask, bias, is_causal and T > 1)  # the last query may read every key


def _four_dimensions(name: str, x: Tensor, target: tuple[int, ...]) -> Tensor:
    sizes = zip(reversed(x.shape), reversed(target), strict=False)
    if x.ndim > 4 or not all(size in (1, wanted) for size, wanted in sizes):
        raise ValueError(f"{name} {tuple(x.shape)} does not broadcast to {target}")
    return x if x.ndim == 4 else x[(None,) * (4 - x.ndim)]


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def mix_values(weights: Tensor, v: Tensor) -> Tensor:
    """Mixtures of values: (B, H, T, S) times (B, G, S, E) -> (B, H, T, E)."""
    mixed = fold_heads(weights, v.shape[1]) @ precise(v)
    return mixed.view(*weights.shape[:3], v.shape[3])
