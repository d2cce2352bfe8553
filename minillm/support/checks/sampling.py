"""Refusals of logits and of what a sampler draws from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
from minillm.support.checks.words import quoted


def check_logits(x: Any, *, like: Tensor | None = None, made_by: object = None) -> None:
    """Raises: ValueError unless x is (B, V), not empty, or of that shape, if it was made of it."""
    shape = tuple(x.shape) if hasattr(x, "shape") else quoted(x)
    if like is not None and shape != tuple(like.shape):
        made_by = getattr(made_by, "__name__", made_by)
        raise ValueError(f"{made_by} must return logits {tuple(like.shape)}, not {shape}")
    if x.ndim != 2 or not x.numel():
        raise ValueError(f"logits must be (B, V), not empty, got {shape}")


def check_previous_ids(ids: Tensor, logits: Tensor) -> None:
    """Raises: ValueError unless ids are (B, T) for logits (B, V), and, on a CPU, all below V."""
    if ids.ndim != 2 or ids.shape[0] != logits.shape[0]:
        have, want = tuple(ids.shape), tuple(logits.shape)
        raise ValueError(f"previous_ids {have} must be (B, T) for logits {want}")
    V, on_cpu = logits.shape[-1], ids.device.type == "cpu"  # asking a GPU means waiting
    if on_cpu and ids.numel() and (largest := int(ids.amax())) >= V:
        raise ValueError(f"previous_ids hold {largest}, the vocabulary {V} tokens")


def check_rows(rows: Sequence[int], count: int) -> None:
    """Raises: ValueError unless rows are so many different numbers, 0 and up."""
    if not len(rows) == len(set(rows)) == count or min(rows) < 0:
        raise ValueError(f"rows {list(rows)} are not {count} different numbers, 0 and up")


def finite_maximum(logits: Tensor) -> Tensor:
    """The maximum of each row (B, 1). Raises: ValueError if one is NaN or infinite."""
    top = logits.amax(-1, keepdim=True)  # one NaN in a row makes it NaN
    # The one question that a `Sampler` asks a GPU at each step: it waits for the answer.
    if bool((top - top).any()):  # 0 for every finite number, NaN for all else
        raise ValueError("logits hold NaN or +inf, or a row has nothing but -inf")
    return top
