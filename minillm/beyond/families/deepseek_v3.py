"""DeepSeek-V3: keys and values from one latent, and experts that a sigmoid scores.

Written by hand; deeper/04_latent_attention explains the attention, beyond/11_experts the experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import nn

from minillm.beyond.experts.moe import SparseMoeBlock
from minillm.beyond.experts.routing import check_experts
from minillm.beyond.families.experts import SparseConfig
from minillm.config import UNSET, ModelConfig
from minillm.deeper.attention.mla import MultiHeadLatentAttention
from minillm.deeper.attention.rope_scaling import RotaryEmbedding, yarn_mscale
from minillm.layers import RMSNorm
from minillm.model import llama_mlp
from minillm.support.checks.config import check_given
from minillm.support.checks.kinds import POSITIVE, SWITCH, Kind, whole
from minillm.support.family import Family

_LATENT = "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"


@dataclass(frozen=True)
class DeepseekV3Config(SparseConfig):
    """Llama's keys, ranks of the latents, sizes of the parts of a head, and experts in groups.

    `head_dim` is the part of a key that rotates.
    """

    rope_interleave: bool = True  # the pairs that turn are neighbours
    q_lora_rank: int | None = None
    kv_lora_rank: int = UNSET
    qk_nope_head_dim: int = UNSET
    qk_rope_head_dim: int = UNSET
    v_head_dim: int = UNSET
    moe_intermediate_size: int = UNSET  # of one expert
    n_shared_experts: int = 0  # for all tokens, as one block
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 0  # layers from this one on are sparse

    kinds: ClassVar[Mapping[str, Kind]] = {
        **SparseConfig.kinds,
        **dict.fromkeys(f"q_lora_rank {_LATENT} n_group topk_group".split(), whole(1)),
        **dict.fromkeys(["n_shared_experts", "first_k_dense_replace"], whole(0)),
        "routed_scaling_factor": POSITIVE,
        **dict.fromkeys(["rope_interleave", "norm_topk_prob"], SWITCH),
    }

    def is_sparse(self, layer: int) -> bool:
        return bool(self.num_experts) and layer >= self.first_k_dense_replace

    def follows(self) -> dict[str, Any]:
        rotated = self.qk_rope_head_dim
        return {"num_key_value_heads": self.num_attention_heads, "head_dim": rotated}

    def check(self) -> None:
        check_given(self, f"num_attention_heads intermediate_size {_LATENT}")
        H, G, D, P = (
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            self.qk_rope_head_dim,
        )
        if self.attention_bias:
            raise ValueError("deepseek_v3 with attention_bias=True is not supported")
        if self.attention_dropout or P != D:
            given = f"dropout {self.attention_dropout}, head_dim {D}, qk_rope_head_dim {P}"
            rule = "deepseek_v3 drops nothing, and its head_dim is what rotates"
            raise ValueError(f"{rule}: {given}")
        if H != G:
            raise ValueError(
                f"deepseek_v3 has a key and a value for each of its {H} heads, not {G}"
            )
        super().check()

    def check_experts(self) -> None:
        check_given(self, "num_experts_per_tok moe_intermediate_size")
        check_experts(self.num_experts, self.num_experts_per_tok, self.n_group, self.topk_group)


def attention(c: DeepseekV3Config) -> nn.Module:
    """Attention whose keys and values come from one latent."""
    scaling = c.rope_scaling or {}
    mscale = yarn_mscale(scaling.get("factor") or 1.0, scaling.get("mscale_all_dim") or 0.0)
    return MultiHeadLatentAttention(
        c.hidden_size,
        c.num_attention_heads,
        kv_lora_rank=c.kv_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim,
        qk_rope_head_dim=c.qk_rope_head_dim,
        v_head_dim=c.v_head_dim,
        q_lora_rank=c.q_lora_rank,
        norm=partial(RMSNorm, eps=1e-6),  # as published, whatever rms_norm_eps says
        scale=(c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * mscale**2,
    )


def rotary(c: DeepseekV3Config) -> RotaryEmbedding:
    """The rotation of one part of each key."""
    return RotaryEmbedding(
        c.head_dim,
        base=c.rope_theta,
        scaling=c.rope_scaling,
        interleaved=c.rope_interleave,
        max_position_embeddings=c.max_position_embeddings,
    )


def mlp(c: DeepseekV3Config, layer: int) -> nn.Module:
    """Experts in groups and some for all tokens, or in a dense layer one block."""
    if not c.is_sparse(layer):
        return llama_mlp(c, layer)
    return SparseMoeBlock(
        c.hidden_size,
        c.moe_intermediate_size,
        c.num_experts,
        c.num_experts_per_tok,
        activation=c.hidden_act,
        shared_intermediate_size=c.n_shared_experts * c.moe_intermediate_size,
        scoring="sigmoid",
        norm_topk_prob=c.norm_topk_prob,
        routed_scaling_factor=c.routed_scaling_factor,
        n_group=c.n_group,
        topk_group=c.topk_group,
    )


_EXPERTS = """
    num_experts num_experts_per_tok moe_intermediate_size n_shared_experts norm_topk_prob
    routed_scaling_factor n_group topk_group first_k_dense_replace
""".split()
# What a file with experts means where it does not say so.
_USUAL = {"first_k_dense_replace": 3, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
_USUAL |= {"n_group": 8, "topk_group": 4}


def read(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    """Without experts what is said of them means nothing; head_dim has a key of its own."""
    if found.get("moe_layer_freq") == 1:  # others transformers does not look at: a warning says so
        del found["moe_layer_freq"]
    if found.get("num_experts"):
        found |= {key: value for key, value in _USUAL.items() if key not in data}
    else:
        for key in _EXPERTS:
            found.pop(key, None)
    if (size := found.pop("head_dim", None)) not in (None, found.get("qk_rope_head_dim")):
        raise ValueError(
            f"head_dim {size} is not what rotates, qk_rope_head_dim {found.get('qk_rope_head_dim')}"
        )
    scaling = data.get("rope_scaling") or data.get("rope_parameters") or {}
    if (
        found["rope_scaling"]
        and scaling.get("mscale_all_dim")
        and found["rope_scaling"]["rope_type"] != "yarn"
    ):
        raise ValueError(f"deepseek_v3: mscale_all_dim scales scores with yarn only, not {scaling}")


def write(config: ModelConfig, data: dict[str, Any]) -> None:
    """The inverse."""
    del data["head_dim"]
    if not data["n_routed_experts"]:
        for key in ("n_routed_experts", *_EXPERTS):
            data.pop(key, None)
        data["first_k_dense_replace"] = config.num_hidden_layers


DEEPSEEK_V3 = Family(
    config=DeepseekV3Config,
    attention=attention,
    mlp=mlp,
    rotary=rotary,
    architecture="DeepseekV3ForCausalLM",
    spelling={"num_experts": "n_routed_experts"},
    aliases={"num_local_experts": "num_experts"},
    usual={"q_lora_rank": 1536, "max_position_embeddings": 4096},
    unwritten="mlp_bias attention_dropout",
    read=read,
    write=write,
)
