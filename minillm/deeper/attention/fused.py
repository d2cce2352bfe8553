"""PyTorch's kernels, asked in the way that they like: shared heads, narrow values, bfloat16.

`attention` looks here for what its own plain call does not do well. Explained in
deeper/03_flash_attention.
"""

# Built from notebooks/deeper/03_flash_attention.ipynb: edit there, then make build.

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention import causal_mask, repeat_kv

__all__ = ["by_backend", "find_backend", "fold_heads", "products", "products_are_quicker", "sdpa"]


def fold_heads(x: Tensor, groups: int) -> Tensor:
    """(B, H, T, D) -> (B, G, H/G * T, D): heads that share a key head as rows of one matrix."""
    return x.reshape(*x.shape[:1], groups, x.shape[1] // groups * x.shape[2], x.shape[3])


# The products won only where the processor has this instruction; an older torch does not say.
_CAPABILITIES: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()

_MULTIPLIES_BFLOAT16 = _CAPABILITIES.get("avx512_bf16", False)


def products_are_quicker(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    dropout_p: float,
) -> bool:
    """Is a CPU about to train in bfloat16, on short rows, with no rule but causality?"""
    if q.dtype != torch.bfloat16 or not (q.is_cpu and _MULTIPLIES_BFLOAT16):
        return False
    T, S = q.shape[2], k.shape[2]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    plain = mask is None and bias is None and not dropout_p
    return recorded and plain and max(T, S) <= 512 and (T == S or not is_causal)


def products(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Attention as two products of all heads at once, the weights (T, S) kept in bfloat16.

    Not for float16, in which a score may overflow.
    """
    (B, H, T, _), G, S = q.shape, k.shape[1], k.shape[2]
    q, k, v = fold_heads(q, G).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    future = q.new_zeros(T, S)
    if is_causal:
        future.masked_fill_(~causal_mask(T, S, device=q.device), -torch.inf)
    with torch.autocast("cpu", enabled=False):  # else softmax would be in float32, and slower
        scores = torch.baddbmm(future.repeat(H // G, 1), q, k.mT, alpha=scale)
        return torch.bmm(torch.softmax(scores, -1), v).reshape(B, H, T, v.shape[2])


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """Attention by PyTorch's kernels, for tensors that `attention` has checked; T > 1 if causal."""
    if products_are_quicker(q, k, v, mask, bias, is_causal, dropout_p):
        return products(q, k, v, is_causal, scale)
    if is_causal and not (mask is None and bias is None and q.shape[2] == k.shape[2]):
        causal = causal_mask(q.shape[2], k.shape[2], device=q.device)
        mask, is_causal = causal if mask is None else mask & causal, False
    allowed = mask
    if bias is not None:
        bias = bias if q.is_cpu else bias.to(q.dtype)  # a GPU's kernels want one type
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    (B, H, T, D), G, E = q.shape, k.shape[1], v.shape[3]
    if T > 1 and E < D and not q.is_cuda:  # flash on a CPU wants values as wide as keys
        v = F.pad(v, (0, D - E))
    if H > G and T == 1:  # one query a head: the heads of a group become the queries of one head
        q = fold_heads(q, G)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], G, H // G, mask.shape[3])
    elif H > G and not q.is_cpu and (mask is not None or E != D):
        k, v = repeat_kv(k, H // G), repeat_kv(v, H // G)  # else CUDA falls back to the formula
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        enable_gqa=q.shape[1] > k.shape[1],
    )  # fmt: skip
    out = out if out.shape[1] == H else out.reshape(B, H, T, E)
    if allowed is not None and q.is_cuda:  # cuDNN's kernel makes up what a row without keys reads
        out = out.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return out if out.shape[3] == E else out[..., :E]


def find_backend(name: str) -> Callable[..., Tensor]:
    """The function behind the name of a backend. Raises: ValueError if the name is unknown."""
    if name == "sdpa":
        return sdpa
    if name == "tiled":
        from minillm.deeper.attention.flash import tiled_attention

        return tiled_attention
    raise ValueError(f"backend must be one of ['eager', 'sdpa', 'tiled'], got {name!r}")


def by_backend(
    name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, *rest: Any
) -> Tensor:
    """What that backend computes; a bias comes in any float type, as any shape that broadcasts."""
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)].to(torch.promote_types(q.dtype, torch.float32))
    return find_backend(name)(q, k, v, mask, bias, *rest)
