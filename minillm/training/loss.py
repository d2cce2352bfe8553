"""The loss of a batch, in nats, and its gradient, batch after batch (deeper/07_gradients)."""

# Built from notebooks/deeper/07_gradients.ipynb: edit there, then make build.

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["accumulate_gradients", "cross_entropy"]


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Negative log-likelihood of the targets in nats, in float32 (float64 if the logits are).

    Targets are ids, or probabilities of all ids, whose expected loss is taken; a row of zeros does
    not count. `mean` divides by the number of targets that count; if none does, there is nothing to
    learn: 0.

    Shape: logits (..., V), targets (...) or, of floating point, (..., V) -> scalar.
    Raises: ValueError for shapes that do not fit; on the CPU, for targets outside the vocabulary
        and for probabilities that are none; TypeError for logits that are no tensor.
    """
    if not isinstance(logits, Tensor):
        kind = type(logits).__name__
        raise TypeError(f"the model must return its logits (B, T, V), a tensor, not a {kind}")
    if targets.is_floating_point() and logits.shape == targets.shape:
        return _expected_loss(logits, targets, reduction)
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}")
    logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long()
    counted = targets != ignore_index
    if targets.device.type == "cpu" and counted.any():
        low, high = (int(x) for x in targets[counted].aminmax())
        if low < 0 or high >= logits.shape[-1]:
            raise ValueError(f"targets {low}..{high} outside the vocabulary of {logits.shape[-1]}")
    if logits.dtype in (torch.float16, torch.bfloat16):
        total = _HalfPrecisionLoss.apply(logits, targets, ignore_index)
    else:
        total = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return total if reduction == "sum" else total / counted.sum().clamp(min=1)


def _expected_loss(logits: Tensor, probs: Tensor, reduction: str) -> Tensor:
    """The loss of targets that are known by their probabilities."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    logits, probs = logits.reshape(-1, logits.shape[-1]), probs.reshape(-1, logits.shape[-1])
    sums = probs.sum(-1)
    counted = sums != 0
    if probs.device.type == "cpu" and not (
        (probs >= 0).all() and torch.allclose(sums[counted], sums.new_ones(()), atol=1e-3)
    ):
        raise ValueError("targets of floating point are probabilities: from 0, of sum 1 (or all 0)")
    total = F.cross_entropy(logits, probs.to(logits.dtype), reduction="sum")
    return total if reduction == "sum" else total / counted.sum().clamp(min=1)


class _HalfPrecisionLoss(torch.autograd.Function):
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


def accumulate_gradients(
    forward: Callable[[Tensor], Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    count: int,
    *,
    precision: str = "float32",
    world_size: int = 1,
    communicate: Callable[[bool], AbstractContextManager[Any]] = nullcontext,
    extra_loss: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Gradients of (sum of all losses) / `count`, batch after batch; returns that sum, in nats.

    `count` is the number of targets in all batches of all processes: a mean of means is wrong.
    Processes average their gradients, hence the factor `world_size`; each batch is taken within
    `communicate(last)`, so that they do so once, after the last. The mean of `extra_loss(targets)`,
    asked after each forward pass, has a part in the gradients and none in the returned sum.
    """
    device, losses = batches[0][0].device, []
    for i, (inputs, targets) in enumerate(batches):
        with communicate(i == len(batches) - 1):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                logits = forward(inputs)
            loss = cross_entropy(logits, targets, reduction="sum")
            total = loss * (world_size / max(1, count))
            if extra_loss is not None:
                total = total + extra_loss(targets) / len(batches)
            total.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()
