"""Attention with many heads: one class for MHA, GQA and MQA.

It takes hidden states to hidden states, (B, T, C) -> (B, T, C); rotation, mask and cache come from
the caller. Explained in notebook 04.
"""

# Built from notebooks/04_multihead.ipynb: edit there, then make build.

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from minillm.attention import attention
from minillm.support.checks.attention import check_heads, check_input, check_split

__all__ = ["MultiHeadAttention", "SupportsUpdate", "merge_heads", "split_heads"]


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Cut the last dimension into heads and move the heads in front of the positions.

    Shape: (B, T, H * D) -> (B, H, T, D), a view.
    Raises: ValueError if the last dimension is not a multiple of `num_heads`.
    """
    check_split(x, num_heads)
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Lay the heads of each position side by side again: (B, H, T, D) -> (B, T, H * D)."""
    return x.transpose(1, 2).flatten(2)


class SupportsUpdate(Protocol):
    """One layer's cache: takes the new keys and values, gives back all of them."""

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


class MultiHeadAttention(nn.Module):
    """Attention with `num_heads` query heads that share `num_kv_heads` key and value heads.

    MHA if the two are equal (the default), MQA if there is one key head, GQA in between.
    The names of its parts are those of Hugging Face's Llama.
    Args:
        head_dim: size of a head; hidden_size // num_heads if not given.
        bias, out_bias: whether q_proj, k_proj and v_proj, and whether o_proj, add a bias.
        qk_norm: makes a norm of a given size, for each query and key before rotation (Qwen3).
        scale: factor on the scores; 1 / sqrt(head_dim) if not given.
        dropout: share of attention weights dropped while training.
    Raises: ValueError if the sizes do not fit each other.
    Source: Vaswani et al. 2017, section 3.2.2; MQA Shazeer 2019; GQA Ainslie et al. 2023.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: Callable[[int], nn.Module] | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        check_heads(hidden_size, num_heads, num_kv_heads, head_dim, dropout)
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.num_kv_heads = G = num_kv_heads or num_heads
        self.head_dim = D = head_dim or hidden_size // num_heads
        self.scale = D**-0.5 if scale is None else scale
        self.dropout = dropout
        self.q_proj = nn.Linear(hidden_size, num_heads * D, bias=bias)
        self.k_proj = nn.Linear(hidden_size, G * D, bias=bias)
        self.v_proj = nn.Linear(hidden_size, G * D, bias=bias)
        self.o_proj = nn.Linear(num_heads * D, hidden_size, bias=out_bias)
        self.q_norm = qk_norm(D) if qk_norm else None
        self.k_norm = qk_norm(D) if qk_norm else None

    def forward(
        self,
        x: Tensor,
        *,
        rope: Callable[[Tensor], Tensor] | None = None,
        mask: Tensor | None = None,
        is_causal: bool = False,
        cache: SupportsUpdate | None = None,
    ) -> Tensor:
        """Let each position read from all that the mask allows, cached positions included.

        Shape: x (B, T, C); mask bool, broadcastable to (B, H, T, S), True = may read -> (B, T, C).
        Raises: ValueError if x does not fit.
        """
        check_input(x, self.hidden_size)
        q = split_heads(self.q_proj(x), self.num_heads)  # (B, H, T, D)
        k = split_heads(self.k_proj(x), self.num_kv_heads)  # (B, G, T, D)
        v = split_heads(self.v_proj(x), self.num_kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)  # autocast widens norms
        if rope is not None:
            q, k = rope(q), rope(k)
        if cache is not None:
            k, v = cache.update(k, v)  # (B, G, S, D): the new positions and all before them
        dropout = self.dropout if self.training else 0.0
        y = attention(q, k, v, mask=mask, is_causal=is_causal, scale=self.scale, dropout_p=dropout)
        return self.o_proj(merge_heads(y))
