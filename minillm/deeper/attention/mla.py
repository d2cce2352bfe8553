"""Multi-head latent attention (MLA): keys and values of all heads from one small vector.

Its two forms, naive and absorbed, give the same numbers at different costs. Explained in the
deeper page 04_latent_attention.
"""

# Built from notebooks/deeper/04_latent_attention.ipynb: edit there, then make build.

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.attention import attention, causal_mask
from minillm.heads import SupportsUpdate, merge_heads, split_heads
from minillm.support.checks.attention import check_input
from minillm.support.checks.kinds import check_sizes

__all__ = [
    "MultiHeadLatentAttention",
    "latent_attention_absorbed",
    "latent_attention_naive",
    "multiplications",
]


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


_RMS_NORM = partial(nn.RMSNorm, eps=1e-6)


class MultiHeadLatentAttention(nn.Module):
    """Attention whose keys and values all come from one small latent vector a position (MLA).

    Cached are the normalised latent and one rotated key that all heads share, never keys and values
    of single heads. The names and shapes of its parts are those of Hugging Face's DeepSeek-V3.

    Args:
        kv_lora_rank: R, the size of the latent.
        qk_nope_head_dim: N, the size of a query's part that meets the latent, unrotated.
        qk_rope_head_dim: P, the size of a query's part that meets the shared rotated key.
        v_head_dim: V, the size of a head's value.
        q_lora_rank: size of a latent for the queries; without one they come straight from x.
        norm: makes a norm of a given size, for both latents.
        scale: factor on the scores; 1 / sqrt(N + P) if not given.
    Raises: ValueError if a size is below 1.
    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1, equations 37 to 47.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        norm: Callable[[int], nn.Module] = _RMS_NORM,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        R, N, P, V = kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        check_sizes(hidden_size=hidden_size, num_heads=num_heads, q_lora_rank=q_lora_rank)
        check_sizes(kv_lora_rank=R, qk_nope_head_dim=N, qk_rope_head_dim=P, v_head_dim=V)
        self.hidden_size, self.num_heads, self.q_lora_rank = hidden_size, num_heads, q_lora_rank
        self.kv_lora_rank, self.v_head_dim = R, V
        self.qk_nope_head_dim, self.qk_rope_head_dim = N, P
        self.scale = (N + P) ** -0.5 if scale is None else scale
        self.absorb: bool | None = None  # for calls that do not say
        self.cache_shape = (1, R, P)  # heads, size of a key, size of a value
        self.numbers_read = num_heads * (N + P + V)  # compared with, and averaged, for each key
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, num_heads * (N + P), bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=False)
            self.q_a_layernorm = norm(q_lora_rank)
            self.q_b_proj = nn.Linear(q_lora_rank, num_heads * (N + P), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, R + P, bias=False)
        self.kv_a_layernorm = norm(R)
        self.kv_b_proj = nn.Linear(R, num_heads * (N + V), bias=False)
        self.o_proj = nn.Linear(num_heads * V, hidden_size, bias=False)

    def _queries(self, x: Tensor) -> Tensor:
        if self.q_lora_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def absorbing_pays(self, num_queries: int, num_keys: int) -> bool:
        """Whether T queries and S keys cost fewer multiplications absorbed than naive."""
        N, P, V = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        sizes = {"rank": self.kv_lora_rank, "nope_dim": N, "rope_dim": P, "value_dim": V}
        naive, absorbed = multiplications(num_queries, num_keys, **sizes)
        return absorbed < naive

    def forward(
        self,
        x: Tensor,
        *,
        rope: Callable[[Tensor], Tensor] | None = None,
        mask: Tensor | None = None,
        is_causal: bool = False,
        cache: SupportsUpdate | None = None,
        absorb: bool | None = None,
    ) -> Tensor:
        """As `MultiHeadAttention.forward`; the cache gets latent (B, 1, T, R) and key (B, 1, T, P).

        absorb: True or False forces the absorbed or the naive form. None asks the attribute of that
            name; if that is None too, absorbed where there is a cache and `absorbing_pays`.
        Shape: x (B, T, C); mask bool, broadcastable to (B, H, T, S), True = may read -> (B, T, C).
        Raises: ValueError if x does not fit.
        """
        check_input(x, self.hidden_size)
        N, P, R = self.qk_nope_head_dim, self.qk_rope_head_dim, self.kv_lora_rank
        q = split_heads(self._queries(x), self.num_heads)  # (B, H, T, N + P)
        latent, k_pe = self.kv_a_proj_with_mqa(x).unsqueeze(1).split([R, P], dim=-1)
        latent = self.kv_a_layernorm(latent).to(k_pe.dtype)  # (B, 1, T, R); autocast widens norms
        if rope is not None:
            q_nope, q_pe = q.split([N, P], dim=-1)
            q, k_pe = torch.cat([q_nope, rope(q_pe)], dim=-1), rope(k_pe)
        if cache is not None:
            latent, k_pe = cache.update(latent, k_pe)  # (B, 1, S, R), (B, 1, S, P)
        absorb = self.absorb if absorb is None else absorb
        if absorb is None:
            absorb = cache is not None and self.absorbing_pays(x.shape[1], latent.shape[2])
        attend = latent_attention_absorbed if absorb else latent_attention_naive
        b = self.kv_b_proj  # with an adapter (nn.lora) it has a method for the whole matrix
        weight = b.matrix() if hasattr(b, "matrix") else b.weight  # type: ignore[operator]
        y = attend(q, latent, k_pe, weight, scale=self.scale, mask=mask, is_causal=is_causal)
        return self.o_proj(merge_heads(y))
