"""Attention: softmax, masks, and one function with several backends that give the same numbers.

q is (B, H, T, D), k is (B, G, S, D), v is (B, G, S, E); G divides H, and query head h reads key
head h // (H / G). Masks are bool, True where a query may read; a query that may read nothing
gets zeros. Explained in notebook 03.
"""

# Built from notebooks/03_attention.ipynb: edit there, then make build.

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.support.checks.attention import (
    check_attention,
    check_causal,
    check_positions,
    check_repeats,
)

__all__ = [
    "attention",
    "attention_weights",
    "build_mask",
    "causal_mask",
    "repeat_kv",
    "softmax",
    "upcast",
]


def softmax(x: Tensor, dim: int) -> Tensor:
    """Probabilities along `dim`, safe from overflow; all zeros where every entry is -inf.

    Half precision is computed in float32. (`torch.softmax` gives NaN where we give zeros.)
    """
    if x.numel() == 0:  # no keys at all, or no queries: no maximum to subtract
        return x
    scores = upcast(x)
    row_max = scores.amax(dim, keepdim=True).detach().clamp(min=torch.finfo(scores.dtype).min)
    probs = torch.exp(scores - row_max)
    row_sum = probs.sum(dim, keepdim=True)
    return (probs / row_sum.masked_fill(row_sum == 0, 1.0)).to(x.dtype)


def upcast(x: Tensor) -> Tensor:
    """`x` in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def causal_mask(
    num_queries: int, num_keys: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Which keys each query may read: itself and all before it, aligned to the end.

    Shape: -> (T, S) bool, True where query t may attend to key s, i.e. s <= t + (S - T).
    Raises: ValueError if there are fewer keys than queries.
    Source: Vaswani et al. 2017, section 3.2.3; bottom-right alignment as FlashAttention 2.1.
    """
    check_causal(num_queries, num_keys)
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
    check_positions(query_positions, key_positions, key_valid, window)
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
    check_repeats(repeats)
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


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
    check_attention(q, k, k, mask, bias, is_causal)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    k = repeat_kv(k, q.shape[1] // k.shape[1])
    scores = upcast(q) @ upcast(k).mT * scale  # (B, H, T, S)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if is_causal:
        causal = causal_mask(q.shape[2], k.shape[2], device=q.device)
        mask = causal if mask is None else causal & mask
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return softmax(scores, dim=-1).to(q.dtype)


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
        dropout_p: fraction of the weights to drop; the caller passes 0 outside training.
        backend: "sdpa" (PyTorch's kernels), "eager" (the formula) or "tiled" (memory linear in T).
    Shape: q (B, H, T, D), k (B, G, S, D), v (B, G, S, E) -> (B, H, T, E), all of one float dtype;
        mask and bias broadcast to (B, H, T, S). 16 bits are summed in 32; no keys give zeros.
    Raises: ValueError if shapes or types do not fit, or if causal with T > S.
    Source: Vaswani et al. 2017, equation 1.
    """
    check_attention(q, k, v, mask, bias, is_causal, dropout_p)
    is_causal = is_causal and q.shape[2] > 1  # a single query, the last, may read every key
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if mask is not None and mask.ndim < 4:  # PyTorch asks for the dimensions of batch and heads
        mask = mask[(None,) * (4 - mask.ndim)]
    if backend == "eager":
        weights = attention_weights(
            upcast(q), upcast(k), mask=mask, bias=bias, is_causal=is_causal, scale=scale
        )
        v = upcast(repeat_kv(v, q.shape[1] // v.shape[1]))
        return (F.dropout(weights, dropout_p) @ v).to(q.dtype)
    alike = q.shape[1] == k.shape[1] and q.shape[3] == v.shape[3]
    if backend == "sdpa" and alike and bias is None and q.dtype != torch.bfloat16:
        if is_causal and (mask is not None or q.shape[2] < k.shape[2]):  # its own begins at key 0
            causal = causal_mask(q.shape[2], k.shape[2], device=q.device)
            mask, is_causal = causal if mask is None else mask & causal, False
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )
    from minillm.deeper.attention.fused import by_backend

    return by_backend(backend, q, k, v, mask, bias, is_causal, scale, dropout_p)
