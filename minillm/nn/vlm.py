"""Language models that read pictures: placeholders in the text, or attention through a gate.

Explained in notebooks/beyond/16_pictures.ipynb. `PictureLM` computes what Hugging Face's LLaVA
does, `GatedCrossAttentionLayer` is the layer of Llama 3.2 Vision (Mllama).
"""

# Built from notebooks/beyond/16_pictures.ipynb: edit there, then make build.

import torch
from torch import Tensor, nn

from minillm.nn.attention import attention
from minillm.nn.layers import GatedMLP, RMSNorm
from minillm.nn.multihead import check_input, check_sizes, merge_heads, split_heads

__all__ = ["GatedCrossAttentionLayer", "PictureAttention"]


class PictureAttention(nn.Module):
    """Cross-attention with shared key heads, no biases, and normalised queries and keys.

    `keys_values` reads the picture, once; `forward` asks it as often as there is a new token.

    Args:
        num_kv_heads: num_heads if not given.
        eps: of the norms of queries and keys, one norm each, over a head.
    Raises: ValueError if the sizes do not fit each other.
    Source: the cross-attention of Llama 3.2 Vision.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        eps: float = 1e-5,
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
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, G * D, bias=False)
        self.v_proj = nn.Linear(hidden_size, G * D, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.q_norm, self.k_norm = RMSNorm(D, eps=eps), RMSNorm(D, eps=eps)

    def keys_values(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the text will read. Shape: (B, S, C) -> (B, G, S, D) twice."""
        check_input(features, self.hidden_size)
        k, v = (split_heads(p(features), self.num_kv_heads) for p in (self.k_proj, self.v_proj))
        return self.k_norm(k).to(v.dtype), v

    def forward(
        self, x: Tensor, keys_values: tuple[Tensor, Tensor], *, mask: Tensor | None = None
    ) -> Tensor:
        """Let each token read the picture; one that may read nothing gets zeros.

        Shape: x (B, T, C), mask bool, broadcastable to (B, H, T, S) -> (B, T, C).
        """
        check_input(x, self.hidden_size)
        k, v = keys_values
        q = self.q_norm(split_heads(self.q_proj(x), self.num_heads)).to(v.dtype)
        return self.o_proj(merge_heads(attention(q, k, v, mask=mask)))


class GatedCrossAttentionLayer(nn.Module):
    """A layer between two decoder layers, through which the text may look at a picture.

    Attention to the picture and a feed-forward block, each added through a gate, tanh of one
    learned number. The gates begin at 0: with new layers the model is exactly the text model.
    Where `mask` lets a token read nothing, its vector stays as it is. transformers' Mllama lets
    such a token read the whole picture in the attention, the original code of Llama 3.2 does not.

    Raises: ValueError if the sizes do not fit each other, or the mask does not.
    Source: Alayrac et al. 2022 (Flamingo), section 2.2; names as in Hugging Face's Mllama.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
        *,
        num_kv_heads: int | None = None,
        activation: str = "silu",
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps=eps)
        self.cross_attn = PictureAttention(
            hidden_size, num_heads, num_kv_heads=num_kv_heads, eps=eps
        )
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1))
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=eps)
        self.mlp = GatedMLP(hidden_size, intermediate_size, activation=activation)
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1))

    def keys_values(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the text will read, to be kept while it grows. Shape: (B, S, C) -> (B, G, S, D)."""
        return self.cross_attn.keys_values(features)

    def forward(
        self, x: Tensor, keys_values: tuple[Tensor, Tensor], *, mask: Tensor | None = None
    ) -> Tensor:
        """One step of the text through the layer.

        Shape: x (B, T, C), mask bool (B or 1, T or 1, S), True = may read -> (B, T, C).
        """
        if mask is not None:
            B, T, S = len(x), x.shape[1], keys_values[0].shape[2]
            fits = mask.ndim == 3 and all(
                n in (1, size) for n, size in zip(mask.shape, (B, T, S), strict=True)
            )
            if not fits or mask.dtype != torch.bool:
                wanted = f"bool (B, T, S) = {(B, T, S)}"
                raise ValueError(f"mask must be {wanted}, not {mask.dtype} {tuple(mask.shape)}")
        heads = None if mask is None else mask[:, None]
        read = self.cross_attn(self.input_layernorm(x), keys_values, mask=heads)
        x = x + self.cross_attn_attn_gate.tanh() * read
        block = self.mlp(self.post_attention_layernorm(x))
        if mask is not None:
            block = block * mask.any(-1, keepdim=True)
        return x + self.cross_attn_mlp_gate.tanh() * block
