"""The loss of logits of 16 bits, summed in float32 without a copy of them (deeper/07_gradients)."""

# Built from notebooks/deeper/07_gradients.ipynb: edit there, then make build.

from typing import Any

import torch
from torch import Tensor

__all__ = ["HalfPrecisionLoss", "summed_loss"]


class HalfPrecisionLoss(torch.autograd.Function):
    """The summed loss of 16-bit logits (N, V) in float32, some rows at a time.

    The gradient is made in one go, prediction minus truth; no float32 copy of all logits exists.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        counted = targets != ignore_index
        targets = targets.where(counted, 0)
        normaliser = torch.cat([logits[rows].float().logsumexp(-1) for rows in _slices(logits)])
        picked = logits.gather(1, targets[:, None])[:, 0].float()
        ctx.save_for_backward(logits, targets, counted, normaliser)
        return torch.where(counted, normaliser - picked, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, counted, normaliser = ctx.saved_tensors
        scale = torch.where(counted, d_loss, 0.0)[:, None]
        gradient = torch.empty_like(logits)
        for rows in _slices(logits):
            p = (logits[rows].float() - normaliser[rows, None]).exp_().mul_(scale[rows])
            gradient[rows] = p.scatter_add_(1, targets[rows, None], -scale[rows])
        return gradient, None, None


def _slices(logits: Tensor) -> list[slice]:
    """Rows that fit into a processor's cache together, or, on a GPU, keep it busy."""
    numbers = 2**18 if logits.device.type == "cpu" else 2**26
    size = max(1, numbers // logits.shape[-1])
    return [slice(start, start + size) for start in range(0, max(1, len(logits)), size)]


def summed_loss(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """The sum of the losses, in nats and float32. Shape: logits (N, V), targets (N,) -> scalar."""
    return HalfPrecisionLoss.apply(logits, targets, ignore_index)
