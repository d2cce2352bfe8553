"""Mixtral and Qwen3-MoE: Llama and Qwen3 with experts, and what DeepSeek-V3 shares with them.

Written by hand; beyond/11_experts explains the block.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import nn

from minillm.beyond.experts.moe import SparseMoeBlock
from minillm.beyond.experts.routing import check_experts
from minillm.beyond.families.qwen import write_window
from minillm.config import UNSET, ModelConfig
from minillm.model import llama_attention, llama_mlp
from minillm.support.checks.config import check_given
from minillm.support.checks.kinds import NOT_NEGATIVE, SWITCH, Kind, list_of, whole
from minillm.support.family import Family


@dataclass(frozen=True)
class SparseConfig(ModelConfig):
    """Llama's keys, and how many experts there are, of which each token uses a few."""

    num_experts: int = UNSET  # 0 or None: no layer is sparse
    num_experts_per_tok: int = UNSET

    kinds: ClassVar[Mapping[str, Kind]] = {
        **ModelConfig.kinds,
        "num_experts": whole(0),
        **dict.fromkeys(["num_experts_per_tok", "moe_intermediate_size"], whole(1)),
    }

    def is_sparse(self, layer: int) -> bool:
        """Whether experts, of which each token uses a few, are this layer's feed-forward block."""
        return bool(self.num_experts)

    def check(self) -> None:
        super().check()
        if any(map(self.is_sparse, range(self.num_hidden_layers))):
            self.check_experts()

    def check_experts(self) -> None:
        """Raises: ValueError for experts that no router can choose so."""
        check_given(self, "num_experts_per_tok")
        check_experts(self.num_experts, self.num_experts_per_tok, 1, 1)


@dataclass(frozen=True)
class MixtralConfig(SparseConfig):
    """All layers are sparse."""

    rms_norm_eps: float = 1e-5
    router_aux_loss_coef: float = 0.001  # of the loss that balances experts, for training

    kinds: ClassVar[Mapping[str, Kind]] = {
        **SparseConfig.kinds,
        "num_experts": whole(1),
        "router_aux_loss_coef": NOT_NEGATIVE,
    }

    def check(self) -> None:
        check_given(self, "num_experts")
        super().check()


@dataclass(frozen=True)
class Qwen3MoeConfig(SparseConfig):
    """A layer is sparse if `decoder_sparse_step` divides its number, counted from 1."""

    moe_intermediate_size: int = UNSET  # of one expert
    norm_topk_prob: bool = False  # whether the weights of the chosen add up to 1
    router_aux_loss_coef: float = 0.001
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()  # these are dense whatever their number

    kinds: ClassVar[Mapping[str, Kind]] = {
        **SparseConfig.kinds,
        "norm_topk_prob": SWITCH,
        "router_aux_loss_coef": NOT_NEGATIVE,
        "decoder_sparse_step": whole(1),
        "mlp_only_layers": list_of(whole(0)),
    }

    def is_sparse(self, layer: int) -> bool:
        chosen = (layer + 1) % self.decoder_sparse_step == 0
        return bool(self.num_experts) and chosen and layer not in self.mlp_only_layers

    def check(self) -> None:
        check_given(self, "num_experts")
        super().check()

    def check_experts(self) -> None:
        check_given(self, "num_experts_per_tok moe_intermediate_size")
        super().check_experts()


def mixtral_mlp(c: MixtralConfig, layer: int) -> nn.Module:
    """Experts, of which each token uses a few."""
    sizes = c.hidden_size, c.intermediate_size, c.num_experts, c.num_experts_per_tok
    return SparseMoeBlock(*sizes, activation=c.hidden_act)


def qwen3_moe_mlp(c: Qwen3MoeConfig, layer: int) -> nn.Module:
    """Experts, or in a dense layer one block for all tokens."""
    if not c.is_sparse(layer):
        return llama_mlp(c, layer)
    sizes = c.hidden_size, c.moe_intermediate_size, c.num_experts, c.num_experts_per_tok
    return SparseMoeBlock(*sizes, activation=c.hidden_act, norm_topk_prob=c.norm_topk_prob)


def _need_experts(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    if "num_experts" not in found:
        raise ValueError("a mixtral config lacks num_local_experts")


def _read_qwen(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    if "num_experts" not in found:
        raise ValueError("a qwen3_moe config lacks num_experts")
    if not found["num_experts"]:  # then what else is said of them means nothing
        drop_experts(found, Qwen3MoeConfig, keep="num_experts")


def drop_experts(found: dict[str, Any], config: type[ModelConfig], keep: str = "") -> None:
    """Take out of a table what a config without experts does not say."""
    for key in config.__dataclass_fields__.keys() - ModelConfig.__dataclass_fields__.keys():
        if key != keep:
            found.pop(key, None)


def _write_qwen(config: ModelConfig, data: dict[str, Any]) -> None:
    write_window(config, data)
    if not data["num_experts"]:
        drop_experts(data, Qwen3MoeConfig, keep="num_experts")


MIXTRAL = Family(
    config=MixtralConfig,
    mlp=mixtral_mlp,
    architecture="MixtralForCausalLM",
    spelling={"num_experts": "num_local_experts"},
    aliases={"num_experts": "num_experts"},
    usual={"rope_theta": 1e6, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    unwritten="mlp_bias attention_bias",
    windowed=True,
    names=(
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    ),
    read=_need_experts,
)
QWEN3_MOE = Family(
    config=Qwen3MoeConfig,
    attention=partial(llama_attention, qk_norm=True),
    mlp=qwen3_moe_mlp,
    architecture="Qwen3MoeForCausalLM",
    aliases={"num_local_experts": "num_experts"},  # as transformers 5 writes it
    usual={
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
    unwritten="mlp_bias",
    windowed=True,
    read=_read_qwen,
    write=_write_qwen,
)
