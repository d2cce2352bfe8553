"""Which device and dtype to compute on, its random numbers, how many processes. By hand."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

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


def fresh_rng_state(seed: int, device: torch.device) -> dict[str, Tensor]:
    """Where random numbers of that seed begin; those in use stay as they are."""
    import torch

    before = rng_state(device)
    torch.manual_seed(seed)
    fresh = rng_state(device)
    set_rng_state(before, device)
    return fresh


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


class OneProcess:
    """What several processes do in common, done by one: see `deeper.training.distributed`."""

    rank, size = 0, 1

    def wrap(self, model: nn.Module) -> nn.Module:
        """What to call for the model."""
        return model

    def share(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows of a batch that are ours."""
        return batch

    def communicate(self, forward: Any, now: bool) -> Any:
        """Within this, a backward pass; with `now` it is the last of a step."""
        return nullcontext()

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        return value


def processes_of(parallel: Literal["ddp", "fsdp", "tensor"]) -> OneProcess:
    """The processes that torchrun has started and `distributed.start` brought together, or one."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return OneProcess()
    from minillm.deeper.training.distributed import Processes

    return Processes(parallel)


def forward_of(model: nn.Module, processes: OneProcess, compiled: bool) -> tuple[nn.Module, Any]:
    """The model without `torch.compile`'s shell, and what to call for it in training."""
    import torch

    inner = getattr(model, "_orig_mod", model)
    forward = processes.wrap(inner)
    if forward is inner is not model:
        return inner, model  # compiled already, in the caller's way
    return inner, torch.compile(forward) if compiled or inner is not model else forward
