"""The two forms of multi-head latent attention as functions: one cost each, the same numbers.

`minillm.multihead.MultiHeadLatentAttention` calls them. Explained in notebook 04.
"""

# Built from notebooks/04_multihead.ipynb: edit there, then make build.

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention import attention, causal_mask

__all__ = ["latent_attention_absorbed", "latent_attention_naive", "multiplications"]


def latent_attention_naive(
    q: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    kv_weight: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Expand the latent to keys and values of every head, then attend as usual.

    Shape: q (B, H, T, N + P), latent (B, 1, S, R), k_pe (B, 1, S, P), kv_weight (H * (N + V), R)
        -> (B, H, T, V); mask as in `attention`.
    """
    num_heads, nope_dim = q.shape[1], q.shape[-1] - k_pe.shape[-1]
    kv = F.linear(latent.squeeze(1), kv_weight).unflatten(-1, (num_heads, -1)).transpose(1, 2)
    k_nope, v = kv.split([nope_dim, kv.shape[-1] - nope_dim], dim=-1)  # (B, H, S, N), (B, H, S, V)
    k = torch.cat([k_nope, k_pe.expand(-1, num_heads, -1, -1)], dim=-1)  # (B, H, S, N + P)
    return attention(q, k, v, mask=mask, is_causal=is_causal, scale=scale)


def latent_attention_absorbed(
    q: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    kv_weight: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The same numbers with no key or value of a single head: queries go to the latent's space.

    There the latent is key and value for all heads at once; what the rotated parts score is a bias.

    Shape: as `latent_attention_naive`; of all that is made, only scores and mask grow with H * S.
    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.2.
    """
    B, H, T, _ = q.shape
    (S, P), R = k_pe.shape[2:], latent.shape[-1]
    q_nope, q_pe = q.split([q.shape[-1] - P, P], dim=-1)
    per_head = kv_weight.unflatten(0, (H, -1))  # (H, N + V, R)
    w_k, w_v = per_head[:, : q_nope.shape[-1]], per_head[:, q_nope.shape[-1] :]
    if is_causal and T > 1:
        causal = causal_mask(T, S, device=q.device)
        mask = causal if mask is None else mask & causal
    if mask is not None:  # heads and queries become the rows of one head
        shape = torch.broadcast_shapes(mask.shape, (1, H, T, S))
        mask = mask.expand(shape).flatten(1, 2)[:, None]
    q_latent = torch.einsum("bhtn,hnr->bhtr", q_nope, w_k).reshape(B, 1, H * T, R)
    bias = (q_pe * scale).reshape(B, 1, H * T, P) @ k_pe.transpose(2, 3)  # (B, 1, H * T, S)
    y = attention(q_latent, latent, latent, mask=mask, bias=bias, scale=scale)
    return torch.einsum("bhtr,hvr->bhtv", y.view(B, H, T, R), w_v)


def multiplications(
    num_queries: int, num_keys: int, *, rank: int, nope_dim: int, rope_dim: int, value_dim: int
) -> tuple[int, int]:
    """What T queries and S keys cost one head, in the naive and in the absorbed form."""
    T, S, R, N, P, V = num_queries, num_keys, rank, nope_dim, rope_dim, value_dim
    naive = S * R * (N + V) + T * S * (N + P + V)
    absorbed = T * R * (N + V) + T * S * (R + P + R)
    return naive, absorbed
