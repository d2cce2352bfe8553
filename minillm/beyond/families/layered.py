"""Layers of two kinds: some read all the past, some a window of it, each kind with its rotation.

What Gemma 3, OLMo 3 and gpt-oss share; and attention in two parts, of which gpt-oss and Qwen3.5
change one each. Written by hand; deeper/10_families draws their layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from minillm.attention import attention, build_mask
from minillm.cache import KVCache
from minillm.config import UNSET, ModelConfig
from minillm.deeper.attention.rope_scaling import RotaryEmbedding
from minillm.heads import MultiHeadAttention, merge_heads, split_heads
from minillm.model import Decoder, llama_rotary
from minillm.rope import Rotation
from minillm.support.checks.kinds import TABLE, Kind, list_of, whole
from minillm.support.modes import make_cache

FULL, WINDOW = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LayeredConfig(ModelConfig):
    """Llama's keys, and which layers read no more than `sliding_window` positions."""

    layer_types: tuple[str, ...] = UNSET  # of each layer; without them the pattern decides
    sliding_window_pattern: int = 4  # so many layers on, one reads all
    rope_local: Mapping[str, Any] = UNSET  # the rotation of layers with a window

    local_theta: ClassVar[float | None] = None  # its base; None: they turn as the others
    kinds: ClassVar[Mapping[str, Kind]] = {
        **ModelConfig.kinds,
        "layer_types": list_of((f"{FULL} or {WINDOW}", lambda x: x in (FULL, WINDOW))),
        "sliding_window_pattern": whole(1),
        "rope_local": TABLE,
    }

    def follows(self) -> dict[str, Any]:
        local = None if self.local_theta is None else {"rope_theta": self.local_theta}
        return {**super().follows(), "rope_local": local}

    def check(self) -> None:
        super().check()
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            given = f"{len(self.layer_types)} layer_types"
            raise ValueError(f"{given}, but num_hidden_layers is {self.num_hidden_layers}")
        if self.rope_local is not None:
            if self.rope_local.get("rope_type") == "dynamic":
                raise ValueError("rope_local: rope_type 'dynamic' is not supported")
            self.local()

    def has_window(self, layer: int) -> bool:
        """Whether that layer reads a window only."""
        if self.layer_types is None:
            return (layer + 1) % self.sliding_window_pattern != 0
        return self.layer_types[layer] == WINDOW

    def local(self) -> "ModelConfig":
        """A config of Llama's that turns as the layers with a window do."""
        keys = {name: getattr(self, name) for name in ModelConfig.__dataclass_fields__}
        scaling = {**self.rope_local}
        keys |= {"model_type": "llama", "rope_theta": scaling.pop("rope_theta", self.rope_theta)}
        return ModelConfig(**{**keys, "rope_scaling": scaling or None})


class Rotations(RotaryEmbedding):
    """The rotation of layers that read all, and with it that of the others."""

    local: torch.nn.Module

    def forward(self, position_ids: Tensor) -> Any:
        return super().forward(position_ids), self.local(position_ids)


def rotary(c: LayeredConfig) -> torch.nn.Module:
    """A rotation of all layers, or one for each kind."""
    if c.rope_local is None:
        return llama_rotary(c)
    length = c.max_position_embeddings
    made = Rotations(
        c.head_dim, base=c.rope_theta, scaling=c.rope_scaling, max_position_embeddings=length
    )
    made.local = llama_rotary(c.local())
    return made


class RingsAndWhole(KVCache):
    """Layers that keep everything beside rings: the mask of a pass is one of all positions."""

    def key_positions(self, num_new: int) -> Tensor:
        device = super().key_positions(num_new).device  # asked, as it may refuse
        return torch.arange(self.length + num_new, device=device)


class LayeredDecoder(Decoder):
    """A stack whose masks and rotations come in pairs: for layers that read all, for the others.

    Its own config has no window, so that the mask that a `Decoder` makes is that of all the past.
    """

    only_checks: ClassVar[tuple[str, ...]] = ("prepare", "layer_mask")  # see `with_window`

    def __init__(self, config: LayeredConfig) -> None:
        super().__init__(config)
        numbers = range(config.num_hidden_layers)
        self.has_window = tuple(config.has_window(layer) for layer in numbers)
        self.window = config.sliding_window if any(self.has_window) else None

    @property
    def config(self) -> Any:
        """The model's, without the window; also once an adapter or a smaller vocabulary sets it."""
        return self._config

    @config.setter
    def config(self, config: ModelConfig) -> None:
        self._config = replace(config, sliding_window=None)

    def with_window(self, mask: Tensor | None, slots: Tensor, keys: Tensor) -> Any:
        """A mask of all the past, and beside it that of layers with a window.

        `keys` are the positions that such a layer's keys hold, as `build_mask` takes them.
        """
        near = build_mask(slots, keys, window=self.window)
        return mask, near if mask is None else near & mask[..., keys]

    def prepare(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Any, bool]:
        positions, mask, is_causal = super().prepare(input_ids, attention_mask, position_ids, cache)
        past, T = 0 if cache is None else cache.length, input_ids.shape[1]
        if self.window is not None and past + T > self.window:
            slots = torch.arange(past, past + T, device=input_ids.device)
            first = self.has_window.index(True)
            keys = slots if cache is None else cache[first].key_positions(T)
            mask = self.with_window(mask, slots, keys)
        return positions, mask, is_causal

    def layer_mask(
        self, layer: int, mask: Any, position_ids: Tensor, cache: KVCache | None
    ) -> Tensor | None:
        return mask[self.has_window[layer]] if isinstance(mask, tuple) else mask

    def layer_rotation(self, layer: int, rope: Any, position_ids: Tensor) -> Rotation:
        return rope[self.has_window[layer]] if isinstance(rope, tuple) else rope

    def make_cache(self, model: Any, kind: str, sizes: dict[str, Any]) -> KVCache:
        """A cache of that kind, of which "sliding" keeps a ring only where a window reads."""
        if kind != "sliding":
            return make_cache(kind, **sizes)
        kinds = ("sliding" if near else "dynamic" for near in self.has_window)
        return RingsAndWhole([make_cache(k, **{**sizes, "num_layers": 1})[0] for k in kinds])


class TwoPartAttention(MultiHeadAttention):
    """Llama's attention, made from a config, in two parts: what is projected, and how it is read.

    Shape: (B, T, C) -> (B, T, C).
    """

    def __init__(self, c: ModelConfig, **changes: Any) -> None:
        changes |= {"num_kv_heads": c.num_key_value_heads, "head_dim": c.head_dim}
        changes |= {"bias": c.attention_bias, "out_bias": c.attention_bias}
        changes |= {"dropout": c.attention_dropout}
        super().__init__(c.hidden_size, c.num_attention_heads, **changes)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, and what `read` takes besides. Shape: -> (B, heads, T, D)."""
        k, v = (split_heads(y, self.num_kv_heads) for y in (self.k_proj(x), self.v_proj(x)))
        return split_heads(self.q_proj(x), self.num_heads), k, v

    def read(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        """What queries find. Shape: keys and values (B, G, S, D) -> (B, H, T, D)."""
        dropout = self.dropout if self.training else 0.0
        return attention(q, k, v, scale=self.scale, dropout_p=dropout, **given)

    def forward(
        self,
        x: Tensor,
        *,
        rope: Any = None,
        mask: Tensor | None = None,
        is_causal: bool = False,
        cache: Any = None,
    ) -> Tensor:
        q, k, v, *more = self.project(x)
        if rope is not None:
            q, k = rope(q), rope(k)
        if cache is not None:
            k, v = cache.update(k, v)
        y = self.read(q, k, v, *more, mask=mask, is_causal=is_causal)
        return self.o_proj(merge_heads(y))


def write_ropes(config: LayeredConfig, data: dict[str, Any]) -> None:
    """Both rotations, under the key of transformers 5, beside those of older versions."""
    whole_rope = {"rope_type": "default", **(data["rope_scaling"] or {})}
    whole_rope["rope_theta"] = data["rope_theta"]
    near = {"rope_type": "default", **data.pop("rope_local")}
    data["rope_parameters"] = {FULL: whole_rope, WINDOW: near}
