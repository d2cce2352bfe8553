"""Which device to compute on: CUDA if there is one, else Apple's MPS, else the CPU.

Explained in notebooks/10_minillm.ipynb.
"""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

import os

import torch

__all__ = ["pick_device"]


def pick_device() -> torch.device:
    """The best device of this machine, unless the environment variable MINILLM_DEVICE names one."""
    if name := os.environ.get("MINILLM_DEVICE"):
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
