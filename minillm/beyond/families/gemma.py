"""Gemma: norms that multiply by 1 + weight, embeddings times the square root of their size.

Written by hand; deeper/10_families shows what it costs to forget either.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.layers import RMSNorm
from minillm.support.family import Family


@dataclass(frozen=True)
class GemmaConfig(ModelConfig):
    """Llama's keys; its feed-forward block has a GELU in the gate, and the head is tied."""

    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True


class Scaled(nn.Module):
    """Vectors of tokens times sqrt(C), which is rounded to their dtype as in the original."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return x * torch.full((), x.shape[-1] ** 0.5, dtype=x.dtype, device=x.device)


def norm(c: ModelConfig) -> nn.Module:
    """RMSNorm times 1 + weight."""
    return RMSNorm(c.hidden_size, eps=c.rms_norm_eps, offset=1.0)


def embedding(c: ModelConfig) -> nn.Module:
    """What Gemma does to the vectors of tokens."""
    return Scaled()


def read(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    """Early files say "gelu" and mean its approximation by tanh."""
    if found.get("hidden_act") == "gelu":
        found["hidden_act"] = "gelu_pytorch_tanh"


GEMMA = Family(
    config=GemmaConfig,
    norm=norm,
    embedding=embedding,
    architecture="GemmaForCausalLM",
    usual={"head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8192},
    unwritten="mlp_bias",
    reads="use_bidirectional_attention",
    read=read,
)
