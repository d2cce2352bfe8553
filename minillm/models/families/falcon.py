"""Falcon's layer, in which attention and feed-forward block stand side by side.

Written by hand; deeper/10_families says what else Falcon does.
"""

from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.model import llama_layer, make_part
from minillm.nn.multihead import SupportsUpdate
from minillm.nn.rope import Rotation

__all__ = ["ParallelLayer", "layer"]


class ParallelLayer(nn.Module):
    """Attention and feed-forward block, both read from x and both added to it.

    Without `norm2` both read the same normalised copy (Falcon-7B), else one each (40B, 180B).
    Shape: (B, T, C) -> (B, T, C).
    Source: Chowdhery et al. 2022 (PaLM), section 2, "parallel layers".
    """

    def __init__(
        self, attention: nn.Module, mlp: nn.Module, norm1: nn.Module, norm2: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.input_layernorm = norm1
        self.self_attn = attention
        self.post_attention_layernorm = norm2
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        *,
        rope: Rotation | None = None,
        mask: Tensor | None = None,
        is_causal: bool = False,
        cache: SupportsUpdate | None = None,
    ) -> Tensor:
        normed = self.input_layernorm(x)
        y = x + self.self_attn(normed, rope=rope, mask=mask, is_causal=is_causal, cache=cache)
        if self.post_attention_layernorm is not None:
            normed = self.post_attention_layernorm(x)
        return y + self.mlp(normed)


def layer(c: ModelConfig, number: int) -> nn.Module:
    """Falcon's layer, under one norm or two; the usual one if the config says so."""
    if not c.parallel_attn:
        return llama_layer(c, number)
    attention, mlp = make_part("attention", c), make_part("mlp", c, number)
    second = make_part("norm", c) if c.num_ln_in_parallel_attn == 2 else None
    return ParallelLayer(attention, mlp, make_part("norm", c), second)
