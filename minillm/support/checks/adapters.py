"""Refusals of low-rank adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minillm.support.checks.kinds import SHARE, check_kind, number, whole

if TYPE_CHECKING:
    from torch import nn


_MOST_ALPHA = 1_000_000  # adapters in use have an alpha of 1 to some thousands


def check_adapter(name: str, layer: nn.Module, rank: Any, alpha: Any, dropout: Any) -> None:
    """Raises: ValueError if the layer can have no such adapter."""
    from torch import nn

    if hasattr(layer, "lora_A"):
        raise ValueError(f"{name} has an adapter already")
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"{name} is a {type(layer).__name__}, not a linear layer")
    shape = (layer.out_features, layer.in_features)
    check_kind(f"the rank for {name}, a matrix {shape},", rank, whole(1, min(shape)))
    alphas = number(f"from -{_MOST_ALPHA:,} to {_MOST_ALPHA:,}", lambda x: abs(x) <= _MOST_ALPHA)
    check_kind("alpha", alpha, alphas)
    check_kind("dropout", dropout, SHARE)
