"""The loss of a batch, in nats (notebook 07)."""

# Built from notebooks/07_training.ipynb: edit there, then make build.

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.checks import check_targets

__all__ = ["cross_entropy"]


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Negative log-likelihood of the targets in nats, in float32 (float64 if the logits are).

    `mean` divides by the number of targets that count; if none does, there is nothing to learn: 0.
    Nothing is shifted here: of ids (B, T), `cross_entropy(model(ids)[:, :-1], ids[:, 1:])`.
    Targets of floating point are probabilities of all ids (`minillm.training.expected_loss`).

    Shape: logits (..., V), targets (...) or, of floating point, (..., V) -> scalar.
    Raises: ValueError for shapes that do not fit; on the CPU, for targets outside the vocabulary;
        TypeError for logits that are no tensor.
    """
    check_targets(logits, targets, ignore_index)
    if targets.is_floating_point():
        from minillm.training.expected_loss import expected_loss

        return expected_loss(logits, targets, reduction)
    logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long()
    if logits.dtype in (torch.float16, torch.bfloat16):
        from minillm.training.half_precision import summed_loss

        total = summed_loss(logits, targets, ignore_index)
    else:
        total = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    count = (targets != ignore_index).sum()
    return total if reduction == "sum" else total / count.clamp(min=1)
