"""The losses that `cross_entropy` looks up: 16-bit logits, targets that are probabilities. By hand.

Explained in deeper/07_gradients.
"""

from torch import Tensor

from minillm.deeper.training.expected_loss import expected_loss
from minillm.deeper.training.half_precision import summed_loss


def other_loss(logits: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """As `cross_entropy`, of logits of 16 bits or of targets that are probabilities of all ids.

    Shape: logits (..., V), targets (...) or, of floating point, (..., V) -> scalar.
    """
    if targets.is_floating_point():
        return expected_loss(logits, targets, reduction)
    logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long()
    total = summed_loss(logits, targets, ignore_index)
    return total if reduction == "sum" else total / (targets != ignore_index).sum().clamp(min=1)
