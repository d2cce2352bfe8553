"""Attention: one function, three backends with the same numbers (notebook 03).

q is (B, H, T, D), k is (B, G, S, D), v is (B, G, S, E); G divides H, and query head h reads key
head h // (H / G). Masks are bool, True where a query may read; who may read nothing gets zeros.
"""

# Built from notebooks/03_attention.ipynb: edit there, then make build.

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.masks import build_mask as build_mask
from minillm.masks import causal_mask as causal_mask
from minillm.scores import Rules, fold_heads, make_rules, masked_scores, mix_values
from minillm.scores import attention_weights as attention_weights
from minillm.scores import online_softmax as online_softmax
from minillm.scores import repeat_kv as repeat_kv
from minillm.scores import softmax as softmax
from minillm.tiled import tiled_attention

__all__ = [
    "attention",
    "attention_weights",
    "build_mask",
    "causal_mask",
    "online_softmax",
    "repeat_kv",
    "softmax",
]


def _eager(q: Tensor, k: Tensor, v: Tensor, rules: Rules, dropout_p: float) -> Tensor:
    weights = F.dropout(softmax(masked_scores(q, k, rules), dim=-1), dropout_p)
    return mix_values(weights, v).to(q.dtype)


# Without this instruction our products take over twice flash's time; an older torch does not say.
_MULTIPLIES_BFLOAT16 = getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16", False)


def _products_are_quicker(q: Tensor, k: Tensor, v: Tensor, rules: Rules, dropout_p: float) -> bool:
    """Is a CPU about to train in bfloat16, on short rows, with no rule but causality?"""
    T, S = q.shape[2], k.shape[2]
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or not _MULTIPLIES_BFLOAT16:
        return False
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    plain = rules.mask is None and rules.bias is None and not dropout_p
    return recorded and plain and max(T, S) <= 512 and (T == S or not rules.is_causal)


def _products(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> Tensor:
    """Attention as two products of all heads at once, the weights (T, S) kept in bfloat16.

    Not for float16, in which a score may overflow.
    """
    (B, H, T, _), G, S = q.shape, k.shape[1], k.shape[2]
    q, k, v = fold_heads(q, G).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    future = q.new_zeros(T, S)
    if rules.is_causal:
        future = future.fill_(-torch.inf).triu_(1)
    with torch.autocast("cpu", enabled=False):  # else softmax would be in float32, and slower
        scores = torch.baddbmm(future.repeat(H // G, 1), q, k.mT, alpha=rules.scale)
        return torch.bmm(torch.softmax(scores, -1), v).reshape(B, H, T, v.shape[2])


def _sdpa(q: Tensor, k: Tensor, v: Tensor, rules: Rules, dropout_p: float) -> Tensor:
    scale, mask, bias, is_causal = rules
    if _products_are_quicker(q, k, v, rules, dropout_p):
        return _products(q, k, v, rules)
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
        q = fold_heads(q, G)
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


_BACKENDS = {"eager": _eager, "sdpa": _sdpa, "tiled": tiled_attention}


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
    rules = make_rules(q, k, v, mask, bias, is_causal, scale)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {sorted(_BACKENDS)}, got {backend!r}")
    return _BACKENDS[backend](q, k, v, rules, dropout_p)
