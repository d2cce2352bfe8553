"""Refusals of what a cache is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def check_kept(layer: Any, keys: Tensor, values: Tensor) -> None:
    """Raises: ValueError unless they have the shapes, dtype and device of a cache's layer."""
    T = keys.shape[2] if keys.ndim == 4 else "T"
    for name, x, dim in zip(("keys", "values"), (keys, values), layer.dims, strict=True):
        shape = (layer.batch_size, layer.num_kv_heads, T, dim)
        if x.shape != shape:
            raise ValueError(f"{name} {tuple(x.shape)} do not fit a cache of {shape}")
        if x.dtype != layer.dtype or x.device != layer.device:
            found, wanted = f"{x.dtype} on {x.device}", f"{layer.dtype} on {layer.device}"
            raise ValueError(f"{name} are {found}, the cache {wanted}")


def check_more(layer: Any, num_new: int) -> None:
    """Raises: ValueError unless a layer has room for so many new positions, one at least."""
    if num_new < 1:
        raise ValueError(f"a step has at least one new position, not {num_new}")
    if layer.max_length is not None and layer.length + num_new > layer.max_length:
        raise ValueError(
            f"{num_new} new positions after {layer.length} exceed max_length={layer.max_length}"
        )


def check_shorter(layer: Any, length: int) -> None:
    """Raises: ValueError unless a layer has that many positions."""
    if not 0 <= length <= layer.length:
        raise ValueError(f"cannot crop {layer.length} positions to {length}")


def check_crop(layers: Sequence[Any], length: int) -> None:
    """Raises: ValueError unless each layer can go back to its first `length` positions.

    A kind that cannot always go back, a ring or a state, says so in a `check_crop` of its own.
    """
    for layer in layers:
        if hasattr(layer, "check_crop"):
            layer.check_crop(length)
        else:
            check_shorter(layer, length)


def check_agree(layers: Sequence[Any]) -> None:
    """Raises: ValueError unless all layers hold as many positions; a compiled step cannot look."""
    if torch.compiler.is_compiling():
        return
    lengths = [layer.length for layer in layers]
    if min(lengths) != max(lengths):
        raise ValueError(
            f"the layers hold {lengths} positions: a forward pass was cut off; "
            f"call crop({lengths[-1]}) or reset()"
        )


def check_rows(rows: Tensor, batch_size: int) -> None:
    """Raises: ValueError unless each is a row of a batch; rows on a GPU are not looked at."""
    wrong = rows.ndim != 1 or not len(rows)
    if not wrong and rows.device.type == "cpu":
        wrong = bool(rows.min() < 0 or rows.max() >= batch_size)
    if wrong:
        raise ValueError(f"rows {rows.tolist()} of a cache with {batch_size} rows")
