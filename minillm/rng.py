"""Where torch's random numbers stand, to be saved and put back.

Explained in notebook 09 (training).
"""

# Built from notebooks/09_training.ipynb: edit there, then make build.

import torch
from torch import Tensor

__all__ = ["rng_state", "set_rng_state"]


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Where torch's random numbers stand, on the CPU and on the device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Go back to where `rng_state` was called."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])
