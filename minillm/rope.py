"""Rotary position embedding (notebook 05).

Stretched frequencies stand in deeper/attention/rope_scaling.py, the other layout of pairs in
deeper/attention/rope_layouts.py: both are looked up if a model asks.
"""

# Built from notebooks/05_rope.ipynb: edit there, then make build.

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RotaryEmbedding", "Rotation", "rope_periods"]


def rope_periods(
    head_dim: int, base: float | Tensor = 10000.0, *, device: torch.device | str | None = None
) -> Tensor:
    """How many positions each pair takes to turn by one radian, base^(2i / D): 1 / frequency.

    Shape: -> (D/2,) float32
    Raises: ValueError for an odd head_dim, and for a base that is not positive.
    Source: Su et al. 2021, section 3.2.2.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and at least 2, got {head_dim}")
    if not isinstance(base, Tensor) and not base > 0:
        raise ValueError(f"rope_theta must be positive, not {base}")
    return base ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)


class Rotation:
    """The rotation of some positions: called on queries or keys, it turns them.

    Number i of a head and number i + D/2 are a pair. `cos` and `sin` hold one entry per coordinate
    and carry the scaling's factor; `signed_sin` is `sin`, but negative for the first of each pair:
    x turns into x cos + partner signed_sin, in float32.

    Shape: cos, sin (B, T, D) or (1, T, D); called on (B, H, T, D) -> (B, H, T, D)
    Raises: ValueError if the input has another number of positions or another head size.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin, self.signed_sin = cos, sin, self.signed(sin)
        self._cos, self._sin = cos.unsqueeze(1), self.signed_sin.unsqueeze(1)  # (B, 1, T, D)

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != self.cos.shape[-2:]:
            fits = tuple(self.cos.shape[-2:])
            raise ValueError(f"input {tuple(x.shape)} does not fit a rotation of (T, D) = {fits}")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return torch.addcmul(wide * self._cos, self.partner(wide), self._sin).to(x.dtype)

    @staticmethod
    def spread(pairs: Tensor) -> Tensor:
        """One entry per pair becomes one per coordinate: (..., D/2) -> (..., D)."""
        return torch.cat((pairs, pairs), -1)

    @staticmethod
    def partner(x: Tensor) -> Tensor:
        """The other number of each number's pair."""
        return x.roll(x.shape[-1] // 2, -1)

    @staticmethod
    def signed(sin: Tensor) -> Tensor:
        """(a, b) turns into (a cos - b sin, b cos + a sin): the first of a pair takes minus sin."""
        first, second = sin.chunk(2, -1)
        return torch.cat((-first, second), -1)


class RotaryEmbedding(nn.Module):
    """Turns positions into rotations; nothing is learned, nothing is saved.

    Args:
        base: pair i turns by base^(-2i / D) radians per position: a larger base, slower pairs.
        scaling: Hugging Face's `rope_scaling` or `rope_parameters`, see `rope_frequencies`.
        interleaved: the pairs are (0, 1), (2, 3), ... instead of (0, D/2), (1, D/2 + 1), ...
        max_position_embeddings: the trained length; positions that it and the scaling do not cover
            warn, once.

    Shape: position_ids (B, T) or (1, T) -> Rotation
    Raises: ValueError as `rope_frequencies` does.
    """

    inv_freq: Tensor  # (D/2,), in float32 wherever the model goes

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
        self.head_dim, self.base, self.interleaved = head_dim, base, interleaved
        self.scaling = dict(scaling) if scaling else None
        self.max_position_embeddings = max_position_embeddings
        self.dynamic, self.max_length = False, max_position_embeddings or math.inf
        if self.scaling is not None:
            from minillm.deeper.attention.rope_scaling import covered_length, read_scaling

            given = read_scaling(self.scaling, base, max_position_embeddings)
            self.dynamic = given["rope_type"] == "dynamic"
            self.max_length = covered_length(given, max_position_embeddings)
        self.rotation = Rotation
        if interleaved:
            from minillm.deeper.attention.rope_layouts import InterleavedRotation

            self.rotation = InterleavedRotation
        frequencies, self.attention_factor = self._frequencies(None)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def _frequencies(
        self, device: torch.device | None, length: Tensor | None = None
    ) -> tuple[Tensor, float]:
        if self.scaling is None:
            return 1.0 / rope_periods(self.head_dim, self.base, device=device), 1.0
        from minillm.deeper.attention.rope_scaling import rope_frequencies

        return rope_frequencies(
            self.head_dim,
            base=self.base,
            scaling=self.scaling,
            max_position_embeddings=self.max_position_embeddings,
            length=length,
            device=device,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        """Follow the model to another device, but not to 16 bits: those would ruin the angles."""
        super()._apply(fn, recurse)
        self.inv_freq, _ = self._frequencies(self.inv_freq.device)
        return self

    def forward(self, position_ids: Tensor) -> Rotation:
        """The rotation of these positions, to be called on queries and keys. Shape: (B, T)."""
        device = position_ids.device
        if device.type == "cpu" and not torch.compiler.is_compiling():
            self.warn_beyond(int(position_ids.max()) + 1)  # elsewhere reading it would wait
        frequencies = self.inv_freq
        if self.dynamic:
            frequencies, _ = self._frequencies(device, position_ids.amax(-1)[..., None, None] + 1)
        elif frequencies.device != device:  # built on "meta" and never moved
            frequencies, _ = self._frequencies(device)
        frequencies = self.rotation.spread(frequencies)  # (D,)
        angles = position_ids.unsqueeze(-1) * frequencies  # (B, T, D), float32
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return self.rotation(cos, sin)

    def warn_beyond(self, length: int) -> None:
        """Warn, once, if a sequence is longer than training and scaling cover."""
        if length > self.max_length:
            warnings.warn(
                f"position {length - 1} lies beyond the {self.max_length:g} positions that this "
                "rotary embedding is good for: expect the loss to rise, or give it a scaling",
                stacklevel=2,
            )
            self.max_length = math.inf
