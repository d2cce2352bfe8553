"""Gemma 3, its text part: norms before and after each block, on q and k; five windows, one without.

Written by hand; deeper/10_families shows what it costs to forget one of its habits.
Source: Gemma Team 2025 (Gemma 3 technical report), section 2; numbers as transformers' gemma3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minillm.beyond.families.gemma import embedding, norm
from minillm.beyond.families.layered import LayeredConfig, LayeredDecoder, rotary, write_ropes
from minillm.layers import RMSNorm
from minillm.model import llama_attention, make_part
from minillm.support.checks.kinds import POSITIVE, Kind
from minillm.support.family import Family


@dataclass(frozen=True)
class Gemma3Config(LayeredConfig):
    """Gemma's habits; scores are divided by the root of a number that need not be the head's size.

    The trained rotation is slow (1e6) where all the past is read, and Llama's in the windows.
    """

    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    rope_theta: float = 1e6
    sliding_window_pattern: int = 6
    query_pre_attn_scalar: float = 256
    final_logit_softcapping: float | None = None  # scores stay between minus this and this

    local_theta: ClassVar[float | None] = 1e4
    kinds: ClassVar[Mapping[str, Kind]] = {
        **LayeredConfig.kinds,
        **dict.fromkeys(["query_pre_attn_scalar", "final_logit_softcapping"], POSITIVE),
    }


class Sandwich(nn.Module):
    """Each block between two norms, and added back. Shape: (B, T, C) -> (B, T, C)."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, *norms: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = norms[:2]
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norms[2:]

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        y = self.self_attn(self.input_layernorm(x), **given)
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


def attention(c: Gemma3Config) -> nn.Module:
    """Llama's, with norms that multiply by 1 + weight on q and k, and a scale of its own."""
    made: Any = llama_attention(c)
    made.q_norm, made.k_norm = (
        RMSNorm(c.head_dim, eps=c.rms_norm_eps, offset=1.0) for _ in range(2)
    )
    made.scale = c.query_pre_attn_scalar**-0.5
    return made


def layer(c: Gemma3Config, number: int) -> nn.Module:
    """Attention and feed-forward block, each between norms."""
    parts = make_part("attention", c), make_part("mlp", c, number)
    return Sandwich(*parts, *(make_part("norm", c) for _ in range(4)))


def capped(head: nn.Module, inputs: Any, scores: Tensor, cap: float) -> Tensor:
    """Scores, bent to between -cap and cap."""
    return torch.tanh(scores / cap) * cap


def scores(c: Gemma3Config) -> Any:
    """The cap of the config; published files have none."""
    cap = c.final_logit_softcapping
    return None if cap is None else partial(capped, cap=cap)


GEMMA3 = Family(
    config=Gemma3Config,
    norm=norm,
    attention=attention,
    embedding=embedding,
    layer=layer,
    rotary=rotary,
    decoder=LayeredDecoder,
    scores=scores,
    architecture="Gemma3ForCausalLM",
    spelling={"hidden_act": "hidden_activation"},
    usual={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "rope_theta": 1e6,
    },
    reads="use_bidirectional_attention",
    unwritten="mlp_bias",
    windowed=True,
    gguf_names={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    write=write_ropes,
)
