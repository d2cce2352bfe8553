"""The loss of a batch, in nats, and of whole documents, in bits per byte (notebook 09)."""

# Built from notebooks/09_training.ipynb: edit there, then make build.

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.tokenizer.pretokenizer import well_formed
from minillm.training import distributed
from minillm.training.data import pad_rows

__all__ = ["accumulate_gradients", "cross_entropy", "evaluate", "token_byte_lengths"]


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


@torch.no_grad()
def evaluate(
    model: nn.Module,
    texts: Sequence[str],
    tokenizer: Any,
    *,
    batch_tokens: int = 8192,
    end_id: int | None = None,
) -> float:
    """Bits per byte of whole documents, each alone in its row.

    All nats, those of the end token included, over the bytes of the text.

    Comparable with `StoryLanguage.bits_per_byte`, with n-grams, and across tokenizers.

    Raises: ValueError for texts without a byte, or if no end token is known.
    """
    end_id = tokenizer.eos_token_id if end_id is None else end_id
    if end_id is None:
        raise ValueError("the tokenizer has no end token: say with end_id which one begins a text")
    texts = [well_formed(text) for text in texts]  # the text that is encoded has the bytes
    rows = sorted(([end_id, *tokenizer.encode_ordinary(t), end_id] for t in texts), key=len)
    num_bytes = sum(len(t.encode("utf-8")) for t in texts)
    if not num_bytes:
        raise ValueError(f"{len(texts)} texts without a byte: nothing to measure")
    device, was_training, nats = next(model.parameters()).device, model.training, 0.0
    model.eval()
    while rows:
        size = max(1, batch_tokens // len(rows[-1]))
        batch, rows = rows[-size:], rows[:-size]
        inputs, targets = pad_rows(batch, len(batch[-1]), end_id)
        logits = model(inputs.to(device))
        nats += float(cross_entropy(logits, targets.to(device), reduction="sum"))
    model.train(was_training)
    return nats / math.log(2) / num_bytes


def token_byte_lengths(tokenizer: Any) -> Tensor:
    """How many bytes of text each token stands for; 0 for special tokens and for ids without one.

    Shape: -> (V,) int64.
    """
    lengths = [0] * tokenizer.vocab_size
    for i in set(range(len(lengths))) - set(tokenizer.special_tokens.values()):
        with suppress(ValueError):  # ids may have gaps
            lengths[i] = len(tokenizer.decode_bytes([i]))
    return torch.tensor(lengths)


def accumulate_gradients(
    forward: Callable[[Tensor], Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    count: int,
    *,
    precision: str = "float32",
    world_size: int = 1,
) -> Tensor:
    """Gradients of (sum of all losses) / `count`, batch after batch; returns that sum, in nats.

    `count` is the number of targets in all batches of all processes: a mean of means is wrong.
    Processes average their gradients, hence the factor `world_size`.
    """
    device, losses = batches[0][0].device, []
    for i, (inputs, targets) in enumerate(batches):
        with distributed.communicate(forward, i == len(batches) - 1):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                logits = forward(inputs)
            loss = cross_entropy(logits, targets, reduction="sum")
            (loss * (world_size / max(1, count))).backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()
