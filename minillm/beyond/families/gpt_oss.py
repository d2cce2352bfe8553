"""gpt-oss: a sink in each head's softmax, windows in every second layer, experts with biases.

Written by hand. Source: OpenAI 2025 (gpt-oss model card), section 2; numbers as transformers'
gpt_oss. Its published weights are of 4 bits (MXFP4), which are refused: a copy in 16 bits is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.attention import causal_mask
from minillm.beyond.experts.grouped import grouped_linear
from minillm.beyond.experts.routing import check_experts
from minillm.beyond.families.layered import LayeredConfig, LayeredDecoder, TwoPartAttention
from minillm.config import UNSET
from minillm.support.checks.config import check_given
from minillm.support.checks.kinds import POSITIVE, Kind, whole
from minillm.support.family import Family


@dataclass(frozen=True)
class GptOssConfig(LayeredConfig):
    """Llama's keys, experts, and the two numbers of their gate."""

    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    rope_theta: float = 150000.0
    sliding_window_pattern: int = 2
    num_experts: int = UNSET
    num_experts_per_tok: int = 4
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    kinds: ClassVar[Mapping[str, Kind]] = {
        **LayeredConfig.kinds,
        **dict.fromkeys(["num_experts", "num_experts_per_tok"], whole(1)),
        **dict.fromkeys(["swiglu_limit", "swiglu_alpha"], POSITIVE),
    }

    def check(self) -> None:
        super().check()
        check_given(self, "num_experts")
        check_experts(self.num_experts, self.num_experts_per_tok, 1, 1)

    def is_sparse(self, layer: int) -> bool:
        """Whether experts, of which each token uses a few, are this layer's feed-forward block."""
        return True


class SinkAttention(TwoPartAttention):
    """Attention whose heads may read nothing: a key of zeros, with a learned score, has no value.

    Shape: (B, T, C) -> (B, T, C). Source: Xiao et al. 2023, section 3.3 (a learnable sink).
    """

    def __init__(self, c: GptOssConfig) -> None:
        super().__init__(c)
        self.sinks = nn.Parameter(torch.zeros(c.num_attention_heads))

    def draw(self, generator: torch.Generator | None) -> None:
        """Begin with sinks of 0."""
        self.sinks.zero_()

    def read(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        T, S, mask = q.shape[2], k.shape[2], given["mask"]
        if given["is_causal"]:
            causal = causal_mask(T, S, device=q.device)
            mask = causal if mask is None else mask & causal
        k, v = (F.pad(y, (0, 0, 0, 1)) for y in (k, v))  # (B, G, S + 1, D)
        mask = None if mask is None else F.pad(mask, (0, 1), value=True)
        bias = F.pad(self.sinks[:, None, None], (S, 0))  # (H, 1, S + 1)
        return super().read(q, k, v, mask=mask, bias=bias)


class Blocks(nn.Module):
    """Experts with biases: gates and values take turns, both are clamped, the value grows by 1.

    Shape: x (N, C), indices and weights (N, k) -> (N, C).
    """

    def __init__(self, c: GptOssConfig) -> None:
        super().__init__()
        E, C, F_ = c.num_experts, c.hidden_size, c.intermediate_size
        self.limit, self.alpha = c.swiglu_limit, c.swiglu_alpha
        self.gate_up_proj = nn.Parameter(torch.empty(E, C, 2 * F_))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(E, 2 * F_))
        self.down_proj = nn.Parameter(torch.empty(E, F_, C))
        self.down_proj_bias = nn.Parameter(torch.zeros(E, C))

    def draw(self, generator: torch.Generator | None) -> None:
        """Begin with biases of 0."""
        self.gate_up_proj_bias.zero_()
        self.down_proj_bias.zero_()

    def gated(self, x: Tensor) -> Tensor:
        """(..., 2F) -> (..., F)."""
        gate, up = x[..., ::2].clamp(max=self.limit), x[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj, self.down_proj
        biases = self.gate_up_proj_bias, self.down_proj_bias
        if torch.compiler.is_compiling() or x.is_meta:  # no shape may depend on the choice
            dense = weights.new_zeros(len(x), len(down)).scatter(1, indices, weights)  # (N, E)
            y = self.gated(x @ gate_up + biases[0][:, None]) @ down + biases[1][:, None]
            return (y * dense.t()[..., None]).sum(0).to(x.dtype)
        chosen = indices.flatten()  # from here on as in `beyond.experts.moe.Experts`
        order = chosen.argsort(stable=True)
        tokens, expert = order // indices.shape[1], chosen.index_select(0, order)
        load = chosen.new_zeros(len(down)).index_add(0, chosen, torch.ones_like(chosen))
        counts, each = load.tolist(), [bias.index_select(0, expert) for bias in biases]
        y = grouped_linear(x.index_select(0, tokens), gate_up.mT, counts) + each[0]
        y = grouped_linear(self.gated(y), down.mT, counts) + each[1]
        y = y * weights.flatten().index_select(0, order)[:, None]
        return torch.zeros_like(x, dtype=y.dtype).index_add(0, tokens, y).to(x.dtype)


class OssExperts(nn.Module):
    """A router with biases, whose softmax is over the chosen, and the experts that it chooses.

    They are `blocks`, not `experts`: of that name each expert has a file's tensor of its own.
    """

    def __init__(self, c: GptOssConfig, layer: int) -> None:
        super().__init__()
        self.k = c.num_experts_per_tok
        self.router = nn.Linear(c.hidden_size, c.num_experts)
        self.blocks = Blocks(c)

    def draw(self, generator: torch.Generator | None) -> None:
        """Begin with biases of 0."""
        self.router.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        best, chosen = self.router(rows).topk(self.k, -1)
        return self.blocks(rows, chosen, best.softmax(-1)).view_as(x)

    def active_weights(self) -> int:
        """Numbers of experts that one token is multiplied with."""
        b = self.blocks
        return (b.gate_up_proj[0].numel() + b.down_proj[0].numel()) * self.k


def read(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    """A file that says nothing of a scaling means YaRN by 32, in transformers."""
    for key in ("router_aux_loss_coef", "experts_per_token", "initial_context_length"):
        found.pop(key, None)  # of training; said twice in published files
    if data.get("rope_parameters") is None and data.get("rope_scaling") is None:
        found["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }


def write(config: GptOssConfig, data: dict[str, Any]) -> None:
    """A rotation that is not scaled has to be said."""
    scaling = data["rope_scaling"] or {"rope_type": "default"}
    data["rope_parameters"] = {**scaling, "rope_theta": data["rope_theta"]}


GPT_OSS = Family(
    config=GptOssConfig,
    attention=SinkAttention,
    mlp=OssExperts,
    decoder=LayeredDecoder,
    architecture="GptOssForCausalLM",
    spelling={"num_experts": "num_local_experts"},
    usual={
        "num_experts": 128,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "rope_theta": 150000.0,
    },
    unwritten="mlp_bias rope_local sliding_window_pattern",
    windowed=True,
    names=((".mlp.blocks.", ".mlp.experts."),),
    read=read,
    write=write,
)
