"""The loss of targets that are known by their probabilities (deeper/07_gradients)."""

# Built from notebooks/deeper/07_gradients.ipynb: edit there, then make build.

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["count_expected", "expected_loss"]


def expected_loss(logits: Tensor, probs: Tensor, reduction: str = "mean") -> Tensor:
    """The cross-entropy, in nats, of targets that are probabilities of all ids.

    A row of zeros does not count, as the label -100 does not among ids.

    Shape: logits (..., V), probs (..., V) -> scalar.
    Raises: ValueError, on the CPU, for what cannot be probabilities.
    """
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


def count_expected(probs: Tensor, token_bytes: Tensor | None) -> list[int]:
    """Targets that count, and the bytes of text that they are expected to stand for."""
    num_bytes = 0 if token_bytes is None else (probs @ token_bytes.to(probs)).sum()
    return [int((probs.sum(-1) != 0).sum()), round(float(num_bytes))]
