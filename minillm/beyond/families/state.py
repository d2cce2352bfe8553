"""Mamba, Mamba-2 and Bamba: layers that keep a state of fixed size in the place of keys and values.

Written by hand; beyond/12_state explains them.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from minillm.beyond.state.mamba import Mamba2Mixer
from minillm.beyond.state.mamba_parts import StateSizes, at_least_float32, check_heads
from minillm.beyond.state.selective_scan import MambaMixer
from minillm.beyond.state.state_cache import StateCache, StateLayer
from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.deeper.attention.rope_layouts import PartialRotation
from minillm.deeper.attention.rope_scaling import RotaryEmbedding
from minillm.model import Decoder, llama_layer, make_part
from minillm.support.checks.config import check_shared
from minillm.support.checks.kinds import Kind, list_of, number, whole
from minillm.support.family import Family
from minillm.support.modes import make_cache


@dataclass(frozen=True)
class MambaConfig(ModelConfig):
    """Layers with a state and nothing else: Llama's keys but those of attention."""

    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    state: Any = None  # a `StateSizes` of `beyond.state.mamba_parts`, or a table of its keys

    positions: ClassVar[str] = "none"
    stateful: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.state, Mapping):
            known = {f.name for f in fields(StateSizes)}
            if strange := sorted(set(self.state) - known):
                names = ", ".join(map(repr, strange))
                raise ValueError(f"state has no {names}, but {sorted(known)}")
            object.__setattr__(self, "state", StateSizes(**self.state))
        super().__post_init__()

    def has_state(self, layer: int) -> bool:
        """Whether a memory of fixed size stands in this layer where others have attention."""
        return True

    @property
    def attends(self) -> bool:
        """Whether any layer has keys and values."""
        return not all(map(self.has_state, range(self.num_hidden_layers)))

    def follows(self) -> dict[str, Any]:
        return {}

    def check(self) -> None:
        self.check_state()
        keys = ("num_attention_heads", "intermediate_size")
        if wrong := [f"{key} {getattr(self, key)}" for key in keys if getattr(self, key)]:
            raise ValueError(f"{self.model_type} has neither attention nor MLP: {', '.join(wrong)}")
        check_shared(self)

    def check_state(self) -> None:
        """Raises: ValueError for sizes that cannot be computed."""
        kind, given = self.model_type, self.state
        if not isinstance(given, StateSizes):
            raise ValueError(f"a {kind} config needs state, a StateSizes or a table, not {given!r}")


@dataclass(frozen=True)
class Mamba2Config(MambaConfig):
    """Mamba with heads."""

    tie_word_embeddings: bool = False

    def check_state(self) -> None:
        super().check_state()
        check_heads(self.hidden_size, self.state)


@dataclass(frozen=True)
class BambaConfig(Mamba2Config):
    """Mamba-2 with a feed-forward block, and layers between that attend."""

    attn_layer_indices: tuple[int, ...] = ()
    partial_rotary_factor: float = 1.0  # rotating this part of each head

    positions: ClassVar[str] = "rotary"
    kinds: ClassVar[Mapping[str, Kind]] = {
        **ModelConfig.kinds,
        "attn_layer_indices": list_of(whole(0)),
        "partial_rotary_factor": number("above 0, at most 1", lambda x: 0 < x <= 1),
    }

    def has_state(self, layer: int) -> bool:
        return layer not in self.attn_layer_indices

    def follows(self) -> dict[str, Any]:
        return ModelConfig.follows(self)

    @property
    def rotated(self) -> int:
        """How many numbers of a head turn."""
        return int(self.head_dim * self.partial_rotary_factor)

    def check(self) -> None:
        self.check_state()
        total = self.num_hidden_layers
        if strange := [i for i in self.attn_layer_indices if i >= total]:
            raise ValueError(f"attn_layer_indices {strange}: there are {total} layers")
        ModelConfig.check(self)


class MambaLayer(nn.Module):
    """A mixer, then a feed-forward block if there is one, each on a normalised copy and added back.

    It stands where a `DecoderLayer` may: `rope` and `is_causal` say the order to attention, and a
    state knows it. With `residual_in_fp32` a 16-bit model adds up in float32.

    Shape: x (B, T, C), mask (B, T) bool, False at padding -> (B, T, C)
    """

    def __init__(
        self,
        mixer: MambaMixer | Mamba2Mixer,
        mlp: nn.Module | None = None,
        *,
        norm: Callable[[], nn.Module],
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.residual_in_fp32 = residual_in_fp32
        self.input_layernorm, self.mamba = norm(), mixer
        self.post_attention_layernorm = None if mlp is None else norm()
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        *,
        rope: Any = None,
        mask: Tensor | None = None,
        is_causal: bool = True,
        cache: StateLayer | None = None,
    ) -> Tensor:
        if self.residual_in_fp32:
            x = at_least_float32(x)[0]
        x = x + self.mamba(self.input_layernorm(x), mask=mask, cache=cache)
        if self.mlp is None or self.post_attention_layernorm is None:
            return x
        return x + self.mlp(self.post_attention_layernorm(x))

    def make_cache(self, model: Any, kind: str, shape: Mapping[str, Any]) -> KVCache:
        """A cache for a model with layers of this kind; see `make_state_cache`."""
        return make_state_cache(model, kind, shape)

    @property
    def state_numbers(self) -> int:
        """How many numbers the state has."""
        return self.mamba.out_proj.in_features * self.mamba.state_size


def make_state_cache(model: Any, kind: str, shape: Mapping[str, Any]) -> KVCache:
    """A cache of that kind where a layer of the model attends, of fixed size where it has a state.

    Raises: ValueError as `make_cache` does.
    """
    mixers = [getattr(layer, "mamba", None) for layer in model.model.layers]
    count = mixers.count(None)
    one = {"num_layers": 1, "num_kv_heads": 1, "key_dim": 1, "value_dim": 1}
    checked = make_cache(kind, **{**shape, **({"num_layers": count} if count else one)})
    keys = checked.layers if count else []  # a kind says how keys lie, and here there may be none
    options = {key: shape[key] for key in ("max_length", "dtype", "device")}
    return StateCache(
        [
            keys.pop(0) if mixer is None else mixer.make_cache(shape["batch_size"], **options)
            for mixer in mixers
        ]
    )


def check_no_gap(attention_mask: Tensor) -> None:
    """Raises: ValueError for padding between tokens, which a convolution would read as zeros.

    A mask on a GPU is not looked at.
    """
    if attention_mask.device.type != "cpu":
        return
    real = attention_mask.bool()
    gap = ~real & (real.cumsum(-1) > 0)
    if (real & (gap.cumsum(-1) > 0)).any():
        raise ValueError("a model with states reads no padding between tokens: pad at one end")


class StateDecoder(Decoder):
    """A stack in which layers with a state are told which positions are padding: those at -1."""

    def layer_mask(
        self, layer: int, mask: Tensor | None, position_ids: Tensor, cache: KVCache | None
    ) -> Tensor | None:
        c: Any = self.config
        # which positions are no padding: all that a state asks
        return mask if mask is None or not c.has_state(layer) else position_ids >= 0

    def prepare(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor | None, bool]:
        past, c = 0 if cache is None else cache.length, cast("MambaConfig", self.config)
        given = input_ids, attention_mask, position_ids, cache
        positions, mask, is_causal = super().prepare(*given)
        if attention_mask is not None:  # -1 is no position
            check_no_gap(attention_mask)
            positions = torch.where(attention_mask[:, past:] == 0, -1, positions)
        return (positions, mask, is_causal) if c.attends else (positions, attention_mask, False)


def no_rotary(c: ModelConfig) -> None:
    """Nothing is rotated: a state knows the order."""


class PartialRotary(RotaryEmbedding):
    """A rotation of the first numbers of each head; the others stay."""

    def forward(self, position_ids: Tensor) -> Any:
        return PartialRotation(super().forward(position_ids))


def rotary(c: BambaConfig) -> RotaryEmbedding:
    """The rotation of the whole head, or of a part."""
    return (RotaryEmbedding if c.rotated == c.head_dim else PartialRotary)(
        c.rotated,
        base=c.rope_theta,
        scaling=c.rope_scaling,
        max_position_embeddings=c.max_position_embeddings,
    )


def layer(c: MambaConfig, number: int) -> nn.Module:
    """A layer that keeps a state, or where the config says so, one that attends."""
    if not c.has_state(number):
        return llama_layer(c, number)
    mixer: MambaMixer | Mamba2Mixer
    if isinstance(c, Mamba2Config):
        eps = c.rms_norm_eps
        mixer = Mamba2Mixer(c.hidden_size, c.state, activation=c.hidden_act, norm_eps=eps)
    else:
        mixer = MambaMixer(c.hidden_size, c.state, activation=c.hidden_act)
    mlp = None if c.intermediate_size is None else make_part("mlp", c, number)
    norm = partial(make_part, "norm", c)
    return MambaLayer(mixer, mlp, norm=norm, residual_in_fp32=c.state.residual_in_fp32)


# Keys of layers with a state: ours -> theirs, and what transformers takes a file without the key to
# mean.
_MAMBA: dict[str, tuple[str, Any]] = {
    "state_size": ("state_size", 16),
    "conv_kernel": ("conv_kernel", 4),
    "expand": ("expand", 2),
    "time_step_rank": ("time_step_rank", None),
    "use_bias": ("use_bias", False),
    "use_conv_bias": ("use_conv_bias", True),
    "residual_in_fp32": ("residual_in_fp32", True),
}
_MAMBA2: dict[str, tuple[str, Any]] = {
    "state_size": ("state_size", 128),
    "num_heads": ("num_heads", 128),
    "n_groups": ("n_groups", 8),
    "chunk_size": ("chunk_size", 256),
    "conv_kernel": ("conv_kernel", 4),
    "expand": ("expand", 2),
    "time_step_limit": ("time_step_limit", (0.0, math.inf)),
    "use_bias": ("use_bias", False),
    "use_conv_bias": ("use_conv_bias", True),
    "residual_in_fp32": ("residual_in_fp32", True),
}
_BAMBA: dict[str, tuple[str, Any]] = {
    "state_size": ("mamba_d_state", 256),
    "num_heads": ("mamba_n_heads", 128),
    "n_groups": ("mamba_n_groups", 1),
    "chunk_size": ("mamba_chunk_size", 256),
    "conv_kernel": ("mamba_d_conv", 4),
    "expand": ("mamba_expand", 2),
    "time_step_limit": ("time_step_limit", (0.0, math.inf)),
    "use_bias": ("mamba_proj_bias", False),
    "use_conv_bias": ("mamba_conv_bias", True),
}
_TABLES = {"mamba": _MAMBA, "mamba2": _MAMBA2, "bamba": _BAMBA}
_WIDTH = {"mamba": "intermediate_size", "mamba2": "head_dim", "bamba": "mamba_d_head"}


def read(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    """The sizes of layers with a state, as one table; heads that do not fit are refused."""
    kind = found["model_type"]
    state = {ours: found.pop(key, usual) for ours, (key, usual) in _TABLES[kind].items()}
    if state.get("time_step_rank") == "auto":
        state["time_step_rank"] = None
    if kind == "mamba2":
        found.pop("time_step_rank", None)  # which only Mamba has
    limit = state.get("time_step_limit")
    if isinstance(limit, list):  # transformers 5 writes infinity as a table
        words = {"Infinity": math.inf}
        state["time_step_limit"] = [
            words.get(str(x.get("__float__"))) if isinstance(x, Mapping) else x for x in limit
        ]
    channels = state["expand"] * found["hidden_size"]
    size, heads = found.pop(_WIDTH[kind], None), state.get("num_heads", 1)
    if size not in (None, "auto") and size * heads != channels:
        what = f"{_WIDTH[kind]} {size}" + (f" times {heads} heads" if heads > 1 else "")
        raise ValueError(f"{what} is not expand times hidden_size, {channels}")
    found["state"] = state
    if kind == "bamba":
        _read_part(found, data)


def _read_part(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    """Half of a head turns unless the table of the rotation says otherwise: nothing else counts."""
    inside = (data.get("rope_scaling") or data.get("rope_parameters") or {}).get(_PART)
    part = found[_PART] = float(0.5 if inside is None else inside)
    if (said := data.get(_PART)) not in (None, part):
        warnings.warn(f"{_PART} {said} is not used: bamba takes it to be {part}", stacklevel=5)


_PART = "partial_rotary_factor"


def write(config: MambaConfig, data: dict[str, Any]) -> None:
    """The inverse."""
    del data["state"]
    kind, state = config.model_type, config.state
    channels = state.expand * config.hidden_size
    for ours, (key, _) in _TABLES[kind].items():
        value = getattr(state, ours)
        data[key] = list(value) if isinstance(value, tuple) else value
    data[_WIDTH[kind]] = channels // (1 if kind == "mamba" else state.num_heads)
    if kind == "mamba":
        data["time_step_rank"] = state.time_step_rank or "auto"
    if isinstance(config, BambaConfig):
        data["rope_parameters"] = {
            **{"rope_type": "default", **(data.pop("rope_scaling") or {})},
            "rope_theta": float(config.rope_theta),
            "partial_rotary_factor": data.pop("partial_rotary_factor"),
        }


_BACKBONE = (
    ("model.embed_tokens.", "backbone.embeddings."),
    ("model.norm.", "backbone.norm_f."),
    ("model.layers.", "backbone.layers."),
    (".mamba.", ".mixer."),
    # after the layer's number, as the mixer has a norm of that name too
    *((f"{digit}.input_layernorm.", f"{digit}.norm.") for digit in range(10)),
)
# No file of a model without attention has these; its layers have no feed-forward block either.
_OF_ATTENTION = """
    num_attention_heads num_key_value_heads head_dim attention_bias attention_dropout
    intermediate_size mlp_bias rope_theta rope_scaling
"""
_SPELLING = {"rms_norm_eps": "layer_norm_epsilon"}

MAMBA = Family(
    config=MambaConfig,
    layer=layer,
    rotary=no_rotary,
    decoder=StateDecoder,
    architecture="MambaForCausalLM",
    spelling=_SPELLING,
    unwritten=_OF_ATTENTION,
    names=_BACKBONE,
    read=read,
    write=write,
)
MAMBA2 = replace(MAMBA, config=Mamba2Config, architecture="Mamba2ForCausalLM")
BAMBA = Family(
    config=BambaConfig,
    layer=layer,
    rotary=rotary,
    decoder=StateDecoder,
    architecture="BambaForCausalLM",
    usual={"num_key_value_heads": 8, "max_position_embeddings": 262144},
    names=(
        ("model.norm.", "model.final_layernorm."),
        (".post_attention_layernorm.", ".pre_ff_layernorm."),
        (".mlp.", ".feed_forward."),
    ),
    read=read,
    write=write,
)
