"""OLMo 2 and 3: norms after the blocks, none before; one norm over all queries, one over all keys.

Written by hand; deeper/10_families shows what it costs to forget either.
Source: OLMo 2 Team 2024 (2 OLMo 2 Furious), section 3.2; numbers as transformers' olmo2 and olmo3.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from minillm.beyond.families.layered import LayeredConfig, LayeredDecoder, rotary, write_ropes
from minillm.config import ModelConfig
from minillm.heads import merge_heads, split_heads
from minillm.layers import RMSNorm
from minillm.model import llama_attention, make_part
from minillm.support.family import Family


@dataclass(frozen=True)
class Olmo2Config(ModelConfig):
    """Llama's keys."""

    rms_norm_eps: float = 1e-5


@dataclass(frozen=True)
class Olmo3Config(LayeredConfig):
    """Three layers with a window to one without; a scaled rotation is of the latter only."""

    rms_norm_eps: float = 1e-5
    rope_theta: float = 5e5

    local_theta: ClassVar[float | None] = 5e5


class AllHeads(RMSNorm):
    """One norm of all heads of a position. Shape: (B, H, T, D) -> (B, H, T, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return split_heads(super().forward(merge_heads(x)), x.shape[1])


class PostNorm(nn.Module):
    """Each block reads x itself; what it gives is normed and added. Shape: (B, T, C) -> same."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, *norms: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.post_attention_layernorm, self.post_feedforward_layernorm = norms

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, **given))
        return x + self.post_feedforward_layernorm(self.mlp(x))


def attention(c: ModelConfig) -> nn.Module:
    """Llama's, with one norm over all queries of a position, and one over all its keys."""
    made: Any = llama_attention(c)
    made.q_norm, made.k_norm = (
        AllHeads(heads * c.head_dim, eps=c.rms_norm_eps)
        for heads in (c.num_attention_heads, c.num_key_value_heads)
    )
    return made


def layer(c: ModelConfig, number: int) -> nn.Module:
    """Attention and feed-forward block, each with a norm after it."""
    parts = make_part("attention", c), make_part("mlp", c, number)
    return PostNorm(*parts, make_part("norm", c), make_part("norm", c))


OLMO2 = Family(
    config=Olmo2Config,
    attention=attention,
    layer=layer,
    architecture="Olmo2ForCausalLM",
    unwritten="mlp_bias",
)
OLMO3 = Family(
    config=Olmo3Config,
    attention=attention,
    layer=layer,
    rotary=rotary,
    decoder=LayeredDecoder,
    architecture="Olmo3ForCausalLM",
    usual={"sliding_window": 4096, "rope_theta": 5e5},
    unwritten="mlp_bias sliding_window_pattern",
    windowed=True,
    write=write_ropes,
)
