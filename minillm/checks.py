"""Checks of what a caller hands in, for all rooms; each is one line where it is asked for.

Written by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_mask"]


def check_mask(mask: Tensor | None, name: str = "attention_mask") -> None:
    """Raises: ValueError for a mask that holds neither bools nor integers.

    Only the type is looked at: for a number of a tensor on a GPU one would have to wait.
    """
    if mask is not None and (mask.is_floating_point() or mask.is_complex()):
        wanted = "bool or an integer type: 1 is a token, 0 is padding"
        raise ValueError(f"{name} is {mask.dtype}; it must be {wanted}")
