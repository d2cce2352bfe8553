"""Other layouts of rotary pairs: neighbours, converted weights, a part of each head.

Explained in deeper/05_long_context.
"""

# Built from notebooks/deeper/05_long_context.ipynb: edit there, then make build.

import torch
from torch import Tensor

from minillm.rope import Rotation

__all__ = ["InterleavedRotation", "PartialRotation", "half_to_interleaved", "interleaved_to_half"]


class InterleavedRotation(Rotation):
    """A rotation whose pairs are neighbours: (0, 1), (2, 3), ...

    Shape: as of `Rotation`.
    """

    @staticmethod
    def spread(pairs: Tensor) -> Tensor:
        """One entry a pair becomes one a coordinate: (..., D/2) -> (..., D)."""
        return pairs.repeat_interleave(2, -1)

    @staticmethod
    def partner(x: Tensor) -> Tensor:
        """The other number of each number's pair."""
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)

    @staticmethod
    def signed(sin: Tensor) -> Tensor:
        """The first of each pair takes minus sin."""
        return torch.stack((-sin[..., 0::2], sin[..., 1::2]), -1).flatten(-2)


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


class PartialRotation:
    """A rotation of the first coordinates of each head; the others stay as they are.

    Shape: of a rotation of R coordinates, called on (B, H, T, D) with D >= R -> (B, H, T, D)
    """

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation

    def __call__(self, x: Tensor) -> Tensor:
        R = self.rotation.cos.shape[-1]
        return torch.cat((self.rotation(x[..., :R]), x[..., R:]), -1)
