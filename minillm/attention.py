"""Attention: softmax, masks from positions, three backends with the same numbers (notebook 03).

q is (B, H, T, D), k is (B, G, S, D), v is (B, G, S, E); G divides H, and query head h reads key
head h // (H / G). Masks are bool, True where a query may read; who may read nothing gets zeros.
"""

# Built from notebooks/03_attention.ipynb: edit there, then make build.

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

__all__ = [
    "attention",
    "attention_weights",
    "build_mask",
    "causal_mask",
    "online_softmax",
    "repeat_kv",
    "softmax",
]


def softmax(x: Tensor, dim: int) -> Tensor:
    """Shares that sum to 1 along `dim`, safe from overflow; all zeros where every entry is -inf.

    Half precision is computed in float32. `torch.softmax` gives NaN where we give zeros.
    """
    if x.numel() == 0:  # no keys at all, or no queries: no maximum to subtract
        return x
    scores = _precise(x)
    largest = scores.amax(dim, keepdim=True).detach().clamp(min=torch.finfo(scores.dtype).min)
    shares = torch.exp(scores - largest)
    total = shares.sum(dim, keepdim=True)
    return (shares / total.masked_fill(total == 0, 1.0)).to(x.dtype)


def _precise(x: Tensor) -> Tensor:
    """`x` in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def online_softmax(x: Tensor, *, block_size: int = 1) -> Tensor:
    """Softmax along the last dimension; maximum and sum come from a single pass over blocks.

    Raises: ValueError if the block size is not positive.
    Source: Milakov and Gimelshein 2018, algorithm 3; by blocks, as FlashAttention does.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be positive, got {block_size}")
    scores = _precise(x)
    largest = scores.new_full((*x.shape[:-1], 1), torch.finfo(scores.dtype).min)
    total = torch.zeros_like(largest)
    for block in scores.split(block_size, dim=-1):
        previous = largest
        largest = torch.maximum(previous, block.amax(-1, keepdim=True))
        total = total * torch.exp(previous - largest)  # the old terms under the new maximum
        total = total + torch.exp(block - largest).sum(-1, keepdim=True)
    return (torch.exp(scores - largest) / total.masked_fill(total == 0, 1.0)).to(x.dtype)


def causal_mask(
    num_queries: int, num_keys: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Which keys each query may read: itself and all before it, aligned to the end.

    Shape: -> (T, S) bool, True where query t may attend to key s, i.e. s <= t + (S - T).
    Raises: ValueError if there are fewer keys than queries.
    Source: Vaswani et al. 2017, section 3.2.3; bottom-right alignment as FlashAttention 2.1.
    """
    if num_queries > num_keys:
        raise ValueError(
            f"causal: fewer keys than queries ({num_queries} queries, {num_keys} keys)"
        )
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return ones.tril(diagonal=num_keys - num_queries)


def build_mask(
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    key_valid: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Which keys each query may read: not later than itself, not empty, not padding, not too far.

    Args:
        key_positions: the position that each key slot holds, -1 where the slot is empty.
        key_valid: False where a key is padding.
        window: how many positions a query reads, its own included; None for all.
    Shape: (T,) or (B, T), (S,) or (B, S), key_valid (B, S) -> bool (T, S), or (B, 1, T, S) if
        any of them has a batch.
    Raises: ValueError if the window is not positive or the shapes do not fit.
    """
    if window is not None and window < 1:
        raise ValueError(f"window must be positive, got {window}")
    given = [query_positions, key_positions] + ([] if key_valid is None else [key_valid])
    batches = {x.shape[0] for x in given if x.ndim == 2}
    fits = key_valid is None or key_valid.shape[1:] == key_positions.shape[-1:]
    if not fits or len(batches - {1}) > 1 or any(x.ndim not in (1, 2) for x in given):
        shapes = ", ".join(str(tuple(x.shape)) for x in given)
        raise ValueError(f"positions of queries, of keys, key_valid do not fit: {shapes}")
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    mask = (distance >= 0) & (key_positions >= 0)[..., None, :]
    if window is not None:
        mask = mask & (distance < window)
    if key_valid is not None:
        mask = mask & key_valid[:, None, :].bool()
    return mask if mask.ndim == 2 else mask[:, None]


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    """Each key or value head `repeats` times in a row: query head h finds head h // repeats.

    Shape: (B, G, S, D) -> (B, G * repeats, S, D); a copy, unless there is nothing to repeat.
    Raises: ValueError if `repeats` is not positive.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be positive, got {repeats}")
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


class _Rules(NamedTuple):
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
    rules = _check(q, k, k, mask, bias, is_causal, scale)
    return softmax(_scores(q, k, rules), dim=-1).to(q.dtype)


def _scores(
    q: Tensor,
    k: Tensor,
    rules: _Rules,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> Tensor:
    """A rectangle of scores, in at least float32, -inf where a query may not read."""
    first, last = rows.start or 0, k.shape[2] if columns.stop is None else columns.stop
    first += k.shape[2] - q.shape[2]  # the position of the first query, counted as keys are
    q, k = _precise(q[:, :, rows]), _precise(k[:, :, columns])
    scores = (_fold(q, k.shape[1]) @ k.mT).view(*q.shape[:3], k.shape[2]) * rules.scale
    if rules.bias is not None:
        scores = scores + _part(rules.bias, rows, columns)
    if rules.mask is not None:
        scores = scores.masked_fill(~_part(rules.mask, rows, columns), -torch.inf)
    if rules.is_causal and last > first + 1:
        queries = torch.arange(first, first + q.shape[2], device=q.device)
        keys = torch.arange(columns.start or 0, last, device=q.device)
        scores = scores.masked_fill(keys > queries[:, None], -torch.inf)
    return scores


def _fold(x: Tensor, groups: int) -> Tensor:
    """(B, H, T, D) -> (B, G, H/G * T, D): heads that share a key head as rows of one matrix."""
    return x.reshape(*x.shape[:1], groups, x.shape[1] // groups * x.shape[2], x.shape[3])


def _part(x: Tensor, rows: slice, columns: slice) -> Tensor:
    """A rectangle of a mask or bias, whose last two dimensions may be 1: a view."""
    rows = rows if x.shape[2] > 1 else slice(None)
    return x[:, :, rows, columns if x.shape[3] > 1 else slice(None)]


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> _Rules:
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
    return _Rules(scale, mask, bias, is_causal and T > 1)  # the last query may read every key


def _four_dimensions(name: str, x: Tensor, target: tuple[int, ...]) -> Tensor:
    sizes = zip(reversed(x.shape), reversed(target), strict=False)
    if x.ndim > 4 or not all(size in (1, wanted) for size, wanted in sizes):
        raise ValueError(f"{name} {tuple(x.shape)} does not broadcast to {target}")
    return x if x.ndim == 4 else x[(None,) * (4 - x.ndim)]


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _eager(q: Tensor, k: Tensor, v: Tensor, rules: _Rules, dropout_p: float) -> Tensor:
    weights = F.dropout(softmax(_scores(q, k, rules), dim=-1), dropout_p)
    return _mix(weights, v).to(q.dtype)


def _mix(weights: Tensor, v: Tensor) -> Tensor:
    """Mixtures of values: (B, H, T, S) times (B, G, S, E) -> (B, H, T, E)."""
    mixed = _fold(weights, v.shape[1]) @ _precise(v)
    return mixed.view(*weights.shape[:3], v.shape[3])


class _TiledAttention(Function):
    """Attention that holds one tile of scores at a time, forward and backward.

    Source: Dao 2023, FlashAttention-2, algorithms 1 and 2; a tile is a few PyTorch calls here.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rules: _Rules
    ) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        log_sums = _precise(q.new_empty(*q.shape[:3], 1))
        for rows in _slices(q.shape[2]):
            largest = torch.full_like(log_sums[:, :, rows], torch.finfo(log_sums.dtype).min)
            total, mixed = torch.zeros_like(largest), torch.zeros_like(_precise(out[:, :, rows]))
            for columns in _columns(rows, q, k, rules):
                scores, previous = _scores(q, k, rules, rows, columns), largest
                largest = torch.maximum(previous, scores.amax(-1, keepdim=True))
                shares, shrink = torch.exp(scores - largest), torch.exp(previous - largest)
                total = total * shrink + shares.sum(-1, keepdim=True)
                mixed = mixed * shrink + _mix(shares, v[:, :, columns])
            out[:, :, rows] = mixed / total.masked_fill(total == 0, 1.0)
            log_sum = largest + torch.log(total)
            log_sums[:, :, rows] = log_sum.masked_fill(total == 0, torch.inf)  # exp(s - inf) is 0
        ctx.save_for_backward(q, k, v, bias, rules.mask, out, log_sums)
        ctx.rules = rules._replace(mask=None, bias=None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, mask, out, log_sums = ctx.saved_tensors
        rules, G = ctx.rules._replace(mask=mask, bias=bias), k.shape[1]
        grad_q, grad_k, grad_v = (torch.zeros_like(_precise(x)) for x in (q, k, v))
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        inner = (_precise(grad) * _precise(out)).sum(-1, keepdim=True)
        for rows in _slices(q.shape[2]):
            for columns in _columns(rows, q, k, rules):
                scores = _scores(q, k, rules, rows, columns)
                shares = torch.exp(scores - log_sums[:, :, rows])
                grad_shares = _mix(_precise(grad[:, :, rows]), v[:, :, columns].mT)
                grad_scores = shares * (grad_shares - inner[:, :, rows])
                if grad_bias is not None:
                    part = _part(grad_bias, rows, columns)
                    part += grad_scores.sum_to_size(part.shape)
                grad_scores *= rules.scale
                grad_q[:, :, rows] += _mix(grad_scores, k[:, :, columns])
                grad_k[:, :, columns] += _fold(grad_scores, G).mT @ _fold(
                    _precise(q[:, :, rows]), G
                )
                grad_v[:, :, columns] += _fold(shares, G).mT @ _fold(_precise(grad[:, :, rows]), G)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_bias, None


def _slices(stop: int, size: int = 128) -> list[slice]:
    return [slice(i, min(i + size, stop)) for i in range(0, stop, size)]


def _columns(rows: slice, q: Tensor, k: Tensor, rules: _Rules) -> list[slice]:
    """The tiles of keys that these queries read; what is all future is never computed."""
    return _slices(rows.stop + k.shape[2] - q.shape[2] if rules.is_causal else k.shape[2])


def _tiled(q: Tensor, k: Tensor, v: Tensor, rules: _Rules, dropout_p: float) -> Tensor:
    if dropout_p:
        raise ValueError(f"the tiled backend has no dropout, got dropout_p={dropout_p}")
    return _TiledAttention.apply(q, k, v, rules.bias, rules)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, rules: _Rules, dropout_p: float) -> Tensor:
    scale, mask, bias, is_causal = rules
    if is_causal and not (mask is None and bias is None and q.shape[2] == k.shape[2]):
        causal = causal_mask(q.shape[2], k.shape[2], device=q.device)
        mask, is_causal = causal if mask is None else mask & causal, False
    if bias is not None:
        bias = bias.to(q.dtype) if q.is_cuda else bias  # CUDA's kernels want one type
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    (B, H, T, D), G, E = q.shape, k.shape[1], v.shape[3]
    if T > 1 and E < D and not q.is_cuda:  # flash on a CPU wants values as wide as keys
        v = F.pad(v, (0, D - E))
    if H > G and T == 1:  # one query a head: the heads of a group become the queries of one head
        q = _fold(q, G)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], G, H // G, mask.shape[3])
    elif H > G and q.is_cuda and (mask is not None or E != D):
        k, v = repeat_kv(k, H // G), repeat_kv(v, H // G)  # else CUDA falls back to the formula
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        enable_gqa=q.shape[1] > k.shape[1],
    )  # fmt: skip
    out = out if out.shape[1] == H else out.reshape(B, H, T, E)
    return out if out.shape[3] == E else out[..., :E]


_BACKENDS = {"eager": _eager, "sdpa": _sdpa, "tiled": _tiled}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "sdpa",
) -> Tensor:
    """Each query's mixture of the values, weighted by the softmax of its scores with the keys.

    Args:
        mask: True where a query may read; one that may read nothing gets zeros, and no gradient.
        bias: added to the scaled scores (ALiBi, relative positions).
        is_causal: no query reads a key after it, aligned to the end; combines with `mask`.
        scale: of the dot products, 1 / sqrt(D) if None.
        dropout_p: share of the weights to drop; the caller passes 0 outside training.
        backend: "sdpa" (PyTorch's kernels), "eager" (the formula) or "tiled" (memory linear in T).
    Shape: q (B, H, T, D), k (B, G, S, D), v (B, G, S, E) -> (B, H, T, E); mask and bias
        broadcast to (B, H, T, S).
    Raises: ValueError if shapes or types do not fit, or if causal with T > S.
    Source: Vaswani et al. 2017, equation 1.
    """
    rules = _check(q, k, v, mask, bias, is_causal, scale)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {sorted(_BACKENDS)}, got {backend!r}")
    return _BACKENDS[backend](q, k, v, rules, dropout_p)
