"""Rotary position embedding (notebook 05).

For longer texts, and with neighbours as pairs: a subclass in deeper/attention/rope_scaling.py.
"""

# Built from notebooks/05_rope.ipynb: edit there, then make build.

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from minillm.support.checks.attention import check_pairs, check_turned, warn_beyond

__all__ = ["RotaryEmbedding", "Rotation", "rope_periods"]


def rope_periods(
    head_dim: int, base: float | Tensor = 10000.0, *, device: torch.device | str | None = None
) -> Tensor:
    """How many positions each pair takes to turn by one radian, base^(2i / D): 1 / frequency.

    Shape: -> (D/2,) float32
    Raises: ValueError for an odd head_dim, and for a base that is not positive.
    Source: Su et al. 2021, section 3.2.2.
    """
    check_pairs(head_dim, base)
    return base ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)


class Rotation:
    """The rotation of some positions: called on queries or keys, it turns them.

    Number i of a head and number i + D/2 are a pair. `cos` and `sin` hold one entry per coordinate;
    `signed_sin` is `sin`, but negative for the first of each pair: x turns into
    x cos + partner signed_sin, in float32.
    Shape: cos, sin (B, T, D) or (1, T, D); called on (B, H, T, D) -> (B, H, T, D)
    Raises: ValueError if the input has another number of positions or another head size.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin, self.signed_sin = cos, sin, self.signed(sin)
        self._cos, self._sin = cos.unsqueeze(1), self.signed_sin.unsqueeze(1)  # (B, 1, T, D)

    def __call__(self, x: Tensor) -> Tensor:
        check_turned(x, self.cos)
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

    Pair i turns by base^(-2i / D) radians per position: a larger base, slower pairs. Positions
    beyond `max_position_embeddings`, the trained length, warn, once.
    Shape: position_ids (B, T) or (1, T) -> Rotation
    Raises: ValueError as `rope_periods` does.
    """

    inv_freq: Tensor  # (D/2,), in float32 wherever the model goes

    def __init__(
        self, head_dim: int, *, base: float = 10000.0, max_position_embeddings: int | None = None
    ) -> None:
        super().__init__()
        self.head_dim, self.base = head_dim, base
        self.max_length: float = max_position_embeddings or math.inf
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """The angle by which each pair turns from one position to the next. Shape: -> (D/2,)."""
        return 1.0 / rope_periods(self.head_dim, self.base, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the model to another device, but not to 16 bits: those would ruin the angles."""
        super()._apply(fn, recurse)
        self.inv_freq = self.frequencies(self.inv_freq.device)
        return self

    def forward(self, position_ids: Tensor) -> Rotation:
        """The rotation of these positions, to be called on queries and keys. Shape: (B, T)."""
        if warn_beyond(position_ids, self.max_length):
            self.max_length = math.inf  # once is enough
        frequencies, device = self.inv_freq, position_ids.device
        if frequencies.device != device:  # built on "meta" and never moved
            frequencies = self.frequencies(device)
        angles = position_ids.unsqueeze(-1) * Rotation.spread(frequencies)  # (B, T, D), float32
        return Rotation(angles.cos(), angles.sin())
