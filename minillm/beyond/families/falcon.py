"""Falcon: attention and feed-forward block stand side by side, under LayerNorm.

Written by hand; deeper/10_families says what else Falcon does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from minillm.beyond.families.gpt2 import layer_norm, plain_mlp
from minillm.config import ModelConfig
from minillm.heads import SupportsUpdate
from minillm.model import llama_layer, make_part
from minillm.rope import Rotation
from minillm.support.checks.kinds import SWITCH, Kind, whole
from minillm.support.family import Family


@dataclass(frozen=True)
class FalconConfig(ModelConfig):
    """Llama's keys, and how the two halves of a layer stand."""

    hidden_act: str = "gelu"
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    parallel_attn: bool = True  # attention and feed-forward side by side,
    num_ln_in_parallel_attn: int = 1  # under one norm (7B) or two (40B, 180B)

    kinds: ClassVar[Mapping[str, Kind]] = {
        **ModelConfig.kinds,
        "parallel_attn": SWITCH,
        "num_ln_in_parallel_attn": whole(1, 2),
    }

    def follows(self) -> dict[str, Any]:
        return {**super().follows(), "intermediate_size": 4 * self.hidden_size}


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


def layer(c: FalconConfig, number: int) -> nn.Module:
    """Falcon's layer, under one norm or two; the usual one if the config says so."""
    if not c.parallel_attn:
        return llama_layer(c, number)
    attention, mlp = make_part("attention", c), make_part("mlp", c, number)
    second = make_part("norm", c) if c.num_ln_in_parallel_attn == 2 else None
    return ParallelLayer(attention, mlp, make_part("norm", c), second)


def read(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    """How many keys and norms a Falcon has follows from three switches."""
    new = found.pop("new_decoder_architecture", False)
    if not found.setdefault("parallel_attn", True) and new:
        raise ValueError("falcon: new_decoder_architecture without parallel_attn is not supported")
    multi_query = found.pop("multi_query", True)
    if new:
        found.setdefault("num_ln_in_parallel_attn", 2)
    else:
        found["num_key_value_heads"] = 1 if multi_query else found["num_attention_heads"]
        found.pop("num_ln_in_parallel_attn", None)
    found["mlp_bias"] = found.setdefault("attention_bias", False)


def write(config: FalconConfig, data: dict[str, Any]) -> None:
    """The inverse."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    two = config.num_ln_in_parallel_attn == 2
    new = config.parallel_attn and (two or kv_heads not in (1, heads))
    data |= {"alibi": False, "new_decoder_architecture": new, "multi_query": kv_heads == 1}
    data["num_ln_in_parallel_attn"] = config.num_ln_in_parallel_attn if new else None


_NAMES = [
    ("model.embed_tokens.", "transformer.word_embeddings."),
    ("model.norm.", "transformer.ln_f."),
    ("model.layers.", "transformer.h."),
    (".self_attn.qkv.", ".self_attention.query_key_value."),
    (".self_attn.o_proj.", ".self_attention.dense."),
    (".mlp.up_proj.", ".mlp.dense_h_to_4h."),
    (".mlp.down_proj.", ".mlp.dense_4h_to_h."),
]


def names(c: FalconConfig) -> list[tuple[str, str]]:
    """Names of weights; two norms have other names than one."""
    two = [(".input_layernorm.", ".ln_attn."), (".post_attention_layernorm.", ".ln_mlp.")]
    return _NAMES + (two if c.num_ln_in_parallel_attn == 2 else [])


FALCON = Family(
    config=FalconConfig,
    norm=layer_norm,
    mlp=plain_mlp,
    layer=layer,
    architecture="FalconForCausalLM",
    spelling={
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
        "rms_norm_eps": "layer_norm_epsilon",
        "attention_bias": "bias",
    },
    aliases={"n_embed": "hidden_size"},
    reads="alibi",
    unwritten="mlp_bias head_dim",
    names=names,
    read=read,
    write=write,
)
