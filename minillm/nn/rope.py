"""Rotary position embedding in both layouts of pairs, their conversion; and ALiBi.

Explained in notebooks/05_rope.ipynb.
"""

# Built from notebooks/05_rope.ipynb: edit there, then make build.

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minillm.nn.rope_scaling import read_scaling, rope_frequencies

__all__ = ["RotaryEmbedding", "Rotation", "half_to_interleaved", "interleaved_to_half"]


class Rotation:
    """The rotation of some positions: called on queries or keys, it turns them.

    `cos` and `sin` hold one entry a coordinate and carry YaRN's factor. Products are in float32.

    Shape: cos, sin (B, T, D) or (1, T, D); called on (B, H, T, D) -> (B, H, T, D)
    Raises: ValueError if the input has another number of positions or another head size.
    """

    def __init__(self, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
        self.cos, self.sin, self.interleaved = cos, sin, interleaved
        # (a, b) turns into (a cos - b sin, b cos + a sin): the first of a pair takes minus sin
        if interleaved:
            signed = torch.stack((-sin[..., 0::2], sin[..., 1::2]), -1).flatten(-2)
        else:
            first, second = sin.chunk(2, -1)
            signed = torch.cat((-first, second), -1)
        self._cos, self._sin = cos.unsqueeze(1), signed.unsqueeze(1)  # (B, 1, T, D)

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != self.cos.shape[-2:]:
            fits = tuple(self.cos.shape[-2:])
            raise ValueError(f"input {tuple(x.shape)} does not fit a rotation of (T, D) = {fits}")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.interleaved:
            partner = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner = wide.roll(wide.shape[-1] // 2, -1)
        return torch.addcmul(wide * self._cos, partner, self._sin).to(x.dtype)


def interleaved_to_half(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder a q or k projection: half-split pairs then give the scores of interleaved ones.

    Shape: weight (H*D, C), or bias (H*D,) -> the same
    Raises: ValueError if the rows do not make heads of even size.
    """
    return _heads(weight, num_heads).unflatten(1, (-1, 2)).transpose(1, 2).reshape(weight.shape)


def half_to_interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """The inverse of `interleaved_to_half`."""
    return _heads(weight, num_heads).unflatten(1, (2, -1)).transpose(1, 2).reshape(weight.shape)


def _heads(weight: Tensor, num_heads: int) -> Tensor:
    if num_heads < 1 or weight.shape[0] % (2 * num_heads):
        raise ValueError(f"{weight.shape[0]} rows do not make {num_heads} heads of even size")
    return weight.unflatten(0, (num_heads, -1))  # (H, D, ...)


def _covered(given: Mapping[str, Any], trained: int) -> float:
    """How many positions training and scaling cover; no limit for dynamic, or if nobody says."""
    scaled = given.get("factor", 1.0) * given.get("original_max_position_embeddings", trained)
    return math.inf if given["rope_type"] == "dynamic" else max(trained, scaled) or math.inf


class _Frequencies(nn.Module):
    """The frequencies of a rotary embedding, in float32 wherever the model goes; never saved."""

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        scaling: Mapping[str, Any] | None = None,
        interleaved: bool = False,
        max_position_embeddings: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.interleaved = head_dim, interleaved
        self._settings: dict[str, Any] = {"scaling": scaling and dict(scaling), "base": base}
        self._settings["max_position_embeddings"] = max_position_embeddings
        given = read_scaling(**self._settings)
        self.dynamic = given["rope_type"] == "dynamic"
        self.max_length = _covered(given, max_position_embeddings or 0)
        frequencies, self.attention_factor = self._frequencies(None)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def _frequencies(self, device: Any, length: Tensor | None = None) -> tuple[Tensor, float]:
        return rope_frequencies(self.head_dim, **self._settings, length=length, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        """Follow the model to another device, but not to 16 bits: those would ruin the angles."""
        super()._apply(fn, recurse)
        self.inv_freq, _ = self._frequencies(self.inv_freq.device)
        return self


class RotaryEmbedding(_Frequencies):
    """Turns positions into rotations; nothing is learned, nothing is saved.

    Args:
        base: the slowest pair turns once in almost 2 pi * base positions.
        scaling: Hugging Face's `rope_scaling` or `rope_parameters`, see `rope_frequencies`.
        interleaved: the pairs are (0, 1), (2, 3), ... instead of (0, D/2), (1, D/2 + 1), ...
        max_position_embeddings: the trained length; positions that it and the scaling do not cover
            warn, once.

    Shape: position_ids (B, T) or (1, T) -> Rotation
    Raises: ValueError as `rope_frequencies` does.
    """

    def forward(self, position_ids: Tensor) -> Rotation:
        device = position_ids.device
        if device.type == "cpu" and not torch.compiler.is_compiling():
            self.warn_beyond(int(position_ids.max()) + 1)  # elsewhere reading it would wait
        frequencies = self.inv_freq
        if self.dynamic:
            frequencies, _ = self._frequencies(device, position_ids.max() + 1)
        elif frequencies.device != device:  # built on "meta" and never moved
            frequencies, _ = self._frequencies(device)
        if self.interleaved:
            frequencies = frequencies.repeat_interleave(2)
        else:
            frequencies = torch.cat((frequencies, frequencies))
        angles = position_ids.unsqueeze(-1) * frequencies  # (B, T, D), float32
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return Rotation(cos, sin, interleaved=self.interleaved)

    def warn_beyond(self, length: int) -> None:
        """Warn, once, if a sequence is longer than training and scaling cover."""
        if length > self.max_length:
            warnings.warn(
                f"position {length - 1} lies beyond the {self.max_length:g} positions that this "
                "rotary embedding is good for: expect the loss to rise, or give it a scaling",
                stacklevel=2,
            )
            self.max_length = math.inf
