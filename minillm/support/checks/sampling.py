"""Refusals of logits and of what a sampler draws from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minillm.support.checks.kinds import check_number
from minillm.support.checks.words import quoted

if TYPE_CHECKING:
    from torch import Tensor


_RANGES = {  # in words, and whether a number is in it
    "temperature": ("> 0", lambda x: x > 0),
    "top_k": (">= 1", lambda x: x >= 1),
    "top_p": ("in (0, 1]", lambda x: 0 < x <= 1),
    "min_p": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("> 0", lambda x: x > 0),
}


def check_range(name: str, value: Any) -> None:
    """Raises: ValueError unless the number is in the range that its name has."""
    words, fits = _RANGES[name]
    if not fits(value):
        raise ValueError(f"{name} must be {words}, got {value}")


def check_sampler(sampler: Any) -> None:
    """Raises: ValueError for settings of a `Sampler` that are no numbers or out of range."""
    for name in ["temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"]:
        check_number(name, getattr(sampler, name))
    if not sampler.temperature >= 0:
        raise ValueError(f"temperature must be >= 0, got {sampler.temperature}")
    check_range("repetition_penalty", sampler.repetition_penalty)
    for name in ["top_k", "top_p", "min_p"]:
        if (value := getattr(sampler, name)) is not None:
            check_number(name, value, whole=name == "top_k")
            check_range(name, value)


def check_seeds(seeds: Sequence[int], row: int) -> None:
    """Raises: ValueError if a row has no seed."""
    if row >= len(seeds):
        raise ValueError(f"{row + 1} rows but only {len(seeds)} seeds")


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


def check_ends(ends: Sequence[int], V: int) -> None:
    """Raises: ValueError for end tokens outside a vocabulary of V."""
    if any(not 0 <= i < V for i in ends):
        raise ValueError(f"end tokens {ends}, but ids are 0..{V - 1}")


def check_length_penalty(value: float, longest: int) -> None:
    """Raises: ValueError unless this is a finite number, and `longest` to its power, too."""
    check_number("length_penalty", value)
    if not abs(value) * math.log(longest) < 700:
        power = f"{longest}**length_penalty"
        raise ValueError(f"length_penalty and {power} must be finite, got {value}")


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
