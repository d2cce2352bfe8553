"""Which device to compute on. Written by hand."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["pick_device"]


def pick_device() -> torch.device:
    """The best device of this machine, unless the environment variable MINILLM_DEVICE names one."""
    import torch

    if name := os.environ.get("MINILLM_DEVICE"):
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
