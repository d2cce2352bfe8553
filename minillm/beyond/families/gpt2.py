"""GPT-2: LayerNorm, learned positions, biases everywhere, no gate.

Written by hand; deeper/10_families reads its files by hand.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.layers import MLP, LayerNorm
from minillm.model import Decoder
from minillm.support.checks.model import look_up
from minillm.support.family import Family


@dataclass(frozen=True)
class GPT2Config(ModelConfig):
    """Llama's keys, with defaults of its own; each position has a learned vector."""

    hidden_act: str = "gelu_new"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    mlp_bias: bool = True
    tie_word_embeddings: bool = True

    positions: ClassVar[str] = "learned"

    def follows(self) -> dict[str, Any]:
        return {**super().follows(), "intermediate_size": 4 * self.hidden_size}


class LearnedPositions(nn.Module):
    """Vectors of tokens, and of their positions, added."""

    def __init__(self, num_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.num_positions = num_positions
        self.positions = nn.Embedding(num_positions, hidden_size)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return x + look_up(self.positions, position_ids, "position")

    def check(self, position_ids: Tensor, length: int) -> None:
        """Raises: ValueError for positions beyond those learned.

        On a GPU asking for the last position waits for it, so this is asked only where `length`,
        padding included, leaves it open.
        """
        limit = self.num_positions
        if length <= limit or position_ids.is_meta:
            return
        if (last := int(position_ids.max())) >= limit:
            raise ValueError(f"position {last}, but this model has learned only {limit} positions")


class LearnedDecoder(Decoder):
    """A stack that has learned so many positions, and no more."""

    only_checks: ClassVar[tuple[str, ...]] = ("prepare",)  # masks and positions are the usual ones

    def prepare(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor | None, bool]:
        inputs = super().prepare(input_ids, attention_mask, position_ids, cache)
        if position_ids is None:
            past = 0 if cache is None else cache.length
            table: Any = self.embedding
            table.check(inputs[0], past + input_ids.shape[-1])
        return inputs


def layer_norm(c: ModelConfig) -> nn.Module:
    """LayerNorm with a bias."""
    return LayerNorm(c.hidden_size, eps=c.rms_norm_eps)


def plain_mlp(c: ModelConfig, layer: int) -> nn.Module:
    """A feed-forward block without a gate."""
    return MLP(c.hidden_size, c.intermediate_size, activation=c.hidden_act, bias=c.mlp_bias)


def embedding(c: ModelConfig) -> nn.Module:
    """What GPT-2 does to the vectors of tokens."""
    return LearnedPositions(c.max_position_embeddings, c.hidden_size)


def rotary(c: ModelConfig) -> None:
    """Nothing is rotated."""


GPT2 = Family(
    config=GPT2Config,
    norm=layer_norm,
    mlp=plain_mlp,
    embedding=embedding,
    rotary=rotary,
    decoder=LearnedDecoder,
    architecture="GPT2LMHeadModel",
    spelling={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
        "attention_dropout": "attn_pdrop",
    },
    aliases={
        key: key
        for key in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        )
    },
    reads="scale_attn_weights scale_attn_by_inverse_layer_idx add_cross_attention",
    usual={"max_position_embeddings": 1024},
    unwritten="mlp_bias attention_bias num_key_value_heads head_dim rope_theta rope_scaling",
    names=(
        ("model.embedding.positions.", "transformer.wpe."),
        ("model.embed_tokens.", "transformer.wte."),
        ("model.norm.", "transformer.ln_f."),
        ("model.layers.", "transformer.h."),
        (".input_layernorm.", ".ln_1."),
        (".post_attention_layernorm.", ".ln_2."),
        (".self_attn.qkv.", ".attn.c_attn."),
        (".self_attn.o_proj.", ".attn.c_proj."),
        (".mlp.up_proj.", ".mlp.c_fc."),
        (".mlp.down_proj.", ".mlp.c_proj."),
    ),
)
