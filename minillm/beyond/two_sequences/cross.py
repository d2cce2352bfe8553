"""Attention of one sequence to another: queries from here, keys and values from there.

Explained in beyond/15_two_sequences; beyond/16_pictures lets texts read pictures with it.
"""

# Built from notebooks/beyond/15_two_sequences.ipynb: edit there, then make build.

from collections.abc import Callable

from torch import Tensor, nn

from minillm.attention import attention
from minillm.heads import merge_heads, split_heads
from minillm.support.checks.attention import check_input
from minillm.support.checks.kinds import check_sizes

__all__ = ["CrossAttention"]


class CrossAttention(nn.Module):
    """Attention whose queries come from one sequence, and whose keys and values come from another.

    `keys_values` reads the other one, once; `forward` asks it as often as there is a new query.
    Nothing is stored here, and nothing grows.

    Args:
        num_kv_heads: num_heads if not given; fewer are shared, as in `MultiHeadAttention`.
        bias: whether the four matrices add one.
        qk_norm: makes a norm of a given size, for each query and key (Llama 3.2 Vision).
        dropout: share of attention weights set to zero while training.
    Raises: ValueError if the sizes do not fit each other.
    Source: Vaswani et al. 2017, section 3.2.3, "encoder-decoder attention".
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        qk_norm: Callable[[int], nn.Module] | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        G = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes(hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=G)
        if hidden_size % num_heads:
            raise ValueError(f"{hidden_size=} is no multiple of {num_heads=}")
        if num_heads % G:
            raise ValueError(f"{num_heads} query heads cannot share {G} key heads equally")
        D = hidden_size // num_heads
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, G
        self.dropout = dropout
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, G * D, bias=bias)
        self.v_proj = nn.Linear(hidden_size, G * D, bias=bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.q_norm = qk_norm(D) if qk_norm else None
        self.k_norm = qk_norm(D) if qk_norm else None

    def keys_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """What queries will read. Shape: (B, S, C) -> (B, G, S, D) twice."""
        check_input(source, self.hidden_size)
        k, v = (split_heads(p(source), self.num_kv_heads) for p in (self.k_proj, self.v_proj))
        return (k if self.k_norm is None else self.k_norm(k).to(v.dtype)), v

    def forward(
        self, x: Tensor, keys_values: tuple[Tensor, Tensor], *, mask: Tensor | None = None
    ) -> Tensor:
        """Let each position of x read the other sequence; one that may read nothing gets zeros.

        Shape: x (B, T, C), keys and values (B, G, S, D), mask bool, broadcastable to (B, H, T, S),
            True = may read -> (B, T, C).
        Raises: ValueError if they do not fit.
        """
        check_input(x, self.hidden_size)
        k, v = keys_values
        q = split_heads(self.q_proj(x), self.num_heads)
        if self.q_norm is not None:
            q = self.q_norm(q).to(v.dtype)  # autocast widens norms
        dropout = self.dropout if self.training else 0.0
        return self.o_proj(merge_heads(attention(q, k, v, mask=mask, dropout_p=dropout)))
