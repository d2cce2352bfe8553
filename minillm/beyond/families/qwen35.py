"""Qwen3.5, its text part: three layers with a state that corrects itself, then gated attention.

Written by hand. Source: Yang et al. 2024 (Gated Delta Networks), equation 10; numbers as
transformers' qwen3_5.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.beyond.families.gemma import norm
from minillm.beyond.families.layered import TwoPartAttention
from minillm.beyond.families.state import MambaLayer, StateDecoder, rotary
from minillm.beyond.state.mamba import causal_conv, segment_decay
from minillm.beyond.state.mamba_parts import at_least_float32
from minillm.beyond.state.state_cache import StateLayer
from minillm.config import UNSET, ModelConfig
from minillm.heads import split_heads
from minillm.layers import ACTIVATIONS, RMSNorm
from minillm.model import llama_layer, make_part
from minillm.support.checks.kinds import Kind, list_of, number, whole
from minillm.support.family import Family
from minillm.support.modes import without_autocast

STATE, FULL = "linear_attention", "full_attention"
_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


@dataclass(frozen=True)
class Qwen35Config(ModelConfig):
    """Llama's keys, which layers keep a state, and the sizes of those."""

    layer_types: tuple[str, ...] = UNSET  # of each layer; without them the interval decides
    full_attention_interval: int = 4  # so many layers on, one attends
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25  # this part of each head turns

    stateful: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, Kind]] = {
        **ModelConfig.kinds,
        "layer_types": list_of((f"{STATE} or {FULL}", lambda x: x in (STATE, FULL))),
        **{f"linear_{size}": whole(1) for size in _SIZES},
        "full_attention_interval": whole(1),
        "partial_rotary_factor": number("above 0, at most 1", lambda x: 0 < x <= 1),
    }

    def has_state(self, layer: int) -> bool:
        """Whether that layer keeps a state in the place of keys and values."""
        if self.layer_types is None:
            return (layer + 1) % self.full_attention_interval != 0
        return self.layer_types[layer] == STATE

    @property
    def attends(self) -> bool:
        """Whether any layer has keys and values."""
        return not all(map(self.has_state, range(self.num_hidden_layers)))

    @property
    def rotated(self) -> int:
        """How many numbers of a head turn."""
        return int(self.head_dim * self.partial_rotary_factor)

    def check(self) -> None:
        super().check()
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            given = f"{len(self.layer_types)} layer_types"
            raise ValueError(f"{given}, but num_hidden_layers is {self.num_hidden_layers}")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            heads = f"linear_num_value_heads {self.linear_num_value_heads}"
            raise ValueError(f"{heads} do not share {self.linear_num_key_heads} key heads evenly")


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """A state that maps keys to values: it decays, and what it says of a key is corrected to v.

    Position t adds k_t u_t to the decayed state h, u_t = beta_t (v_t - h k_t). In a chunk each u
    depends on those before it, which is one triangular system; a chunk of 1 is the rule itself.

    Shape: q, k (B, H, T, D), v (B, H, T, E), decay (logarithms) and beta (B, H, T), state
    (B, H, D, E) -> (B, H, T, E) and the last state.
    """
    out, pieces = [], [x.split(chunk, 2) for x in (q, k, v, decay, beta)]
    for q, k, v, a, b in zip(*pieces, strict=True):
        between = segment_decay(a)  # (B, H, Q, Q), from position s to t >= s
        so_far = a.cumsum(-1).exp()[..., None]  # (B, H, Q, 1)
        system = (between * (k @ k.mT) * b[..., None]).tril(-1)
        wrong = b[..., None] * (v - so_far * (k @ state))
        u = torch.linalg.solve_triangular(system, wrong, upper=False, unitriangular=True)
        out.append(so_far * (q @ state) + (between * (q @ k.mT)) @ u)
        state = so_far[..., -1:, :] * state + (k * between[..., -1, :, None]).mT @ u
    return torch.cat(out, 2), state


class GatedDeltaNet(nn.Module):
    """A layer whose state is read by queries; what it says is normed and gated.

    Shape: x (B, T, C), mask (B, T) bool, False at padding -> (B, T, C)
    """

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        self.K, self.V = c.linear_num_key_heads, c.linear_num_value_heads
        self.state_size, self.value_size = c.linear_key_head_dim, c.linear_value_head_dim
        values = self.V * self.value_size
        self.sizes = [self.K * self.state_size] * 2 + [values]
        channels, C, width = sum(self.sizes), c.hidden_size, c.linear_conv_kernel_dim
        self.activation = ACTIVATIONS[c.hidden_act]
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels, bias=False)
        self.dt_bias, self.A_log = (nn.Parameter(torch.zeros(self.V)) for _ in range(2))
        self.norm = RMSNorm(self.value_size, eps=c.rms_norm_eps)
        self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a = (
            nn.Linear(C, size, bias=False) for size in (channels, values, self.V, self.V)
        )
        self.out_proj = nn.Linear(values, C, bias=False)

    def draw(self, generator: torch.Generator | None) -> None:
        """Begin with decays from slow to fast."""
        self.dt_bias.fill_(1.0)
        self.A_log.uniform_(-4.6, 2.8, generator=generator)  # rates from 0.01 to 16

    def make_cache(self, batch_size: int, **options: Any) -> StateLayer:
        """An empty memory for this layer."""
        window = (self.conv1d.kernel_size[0] - 1, self.conv1d.in_channels)
        state = (self.V, self.state_size, self.value_size)
        return StateLayer(batch_size, window, state, **options)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        T = x.shape[1]
        window, state = (None, None) if cache is None else cache.read(T, len(x))
        x = x if mask is None else x * mask[..., None]
        qkv, window = causal_conv(self.in_proj_qkv(x), self.conv1d.weight, None, window)
        z, beta, step = self.in_proj_z(x), self.in_proj_b(x).sigmoid(), self.in_proj_a(x)
        with without_autocast(x):
            qkv, step, beta, rate = at_least_float32(self.activation(qkv), step, beta, self.A_log)
            q, k, v = qkv.split(self.sizes, -1)
            q, k, v = (split_heads(y, n) for y, n in ((q, self.K), (k, self.K), (v, self.V)))
            q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
            q, k = (y.repeat_interleave(self.V // self.K, 1) for y in (q, k))
            decay = -rate.exp() * F.softplus(step + self.dt_bias)
            if mask is not None:  # at padding a state neither decays nor is corrected
                decay, beta = decay * mask[..., None], beta * mask[..., None]
            if state is None:
                state = q.new_zeros(len(x), self.V, self.state_size, self.value_size)
            given = q * self.state_size**-0.5, k, v, decay.transpose(1, 2), beta.transpose(1, 2)
            y, state = delta_rule(*given, state)
        if cache is not None:
            cache.write(window, state, T)
        gate = F.silu(at_least_float32(z)[0])
        y = self.norm(y.transpose(1, 2).to(x.dtype)).flatten(2) * gate
        return self.out_proj(y.to(x.dtype))


class GatedAttention(TwoPartAttention):
    """Attention whose output is multiplied by a sigmoid that q_proj makes beside each query."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__(c, qk_norm=partial(RMSNorm, eps=c.rms_norm_eps, offset=1.0))
        both = 2 * self.num_heads * self.head_dim
        self.q_proj = nn.Linear(c.hidden_size, both, bias=c.attention_bias)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        both, k, v = super().project(x)
        q, gate = both.chunk(2, -1)
        norms: Any = (self.q_norm, self.k_norm)
        q, k = (n(y).to(v.dtype) for n, y in zip(norms, (q, k), strict=True))
        return q, k, v, gate

    def read(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor, **given: Any) -> Tensor:
        return super().read(q, k, v, **given) * more[0].sigmoid()


def layer(c: Qwen35Config, number: int) -> nn.Module:
    """A layer that keeps a state, or one of Llama's with gated attention."""
    if not c.has_state(number):
        return llama_layer(c, number)
    mixer: Any = GatedDeltaNet(c)
    return MambaLayer(mixer, make_part("mlp", c, number), norm=partial(make_part, "norm", c))


def read(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    """Published files say what transformers does not read: further tokens, always a gate."""
    for key in ("attn_output_gate", "mamba_ssm_dtype", "mtp_num_hidden_layers"):
        found.pop(key, None)
    found.pop("mtp_use_dedicated_embeddings", None)


def write(config: Qwen35Config, data: dict[str, Any]) -> None:
    """The rotation's table, with the part that turns."""
    rope = {"rope_type": "default", **(data.pop("rope_scaling") or {})}
    rope |= {"rope_theta": data["rope_theta"]}
    data["rope_parameters"] = rope | {"partial_rotary_factor": data["partial_rotary_factor"]}


QWEN35 = Family(
    config=Qwen35Config,
    norm=norm,
    attention=GatedAttention,
    layer=layer,
    rotary=rotary,
    decoder=StateDecoder,
    architecture="Qwen3_5ForCausalLM",
    usual={"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32768},
    unwritten="mlp_bias",
    names=((".mamba.", ".linear_attn."),),
    read=read,
    write=write,
)
