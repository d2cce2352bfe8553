"""Which device to compute on, in which dtype, and where its random numbers stand.

Written by hand.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["pick_device", "product_dtype", "rng_state", "set_rng_state", "to_float64"]

_WITHOUT_FLOAT64 = {"mps"}  # Apple's GPUs


def pick_device() -> torch.device:
    """The best device of this machine, unless the environment variable MINILLM_DEVICE names one."""
    import torch

    if name := os.environ.get("MINILLM_DEVICE"):
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Where torch's random numbers stand, on the CPU and on the device."""
    import torch

    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Go back to where `rng_state` was called."""
    import torch

    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])


def to_float64(x: Tensor) -> Tensor:
    """In float64; what lies on a device that lacks it comes to the CPU (and must be waited for)."""
    return (x.cpu() if x.device.type in _WITHOUT_FLOAT64 else x).double()


def product_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of a product with this weight: its own, or that of `torch.autocast` around us."""
    import torch

    kind = weight.device.type
    if weight.dtype == torch.float64:
        return weight.dtype
    # Torch 2.11 cannot compile the question; who compiles for a device has one that knows autocast.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    if known and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype
