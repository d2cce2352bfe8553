"""Refusals of what a cache is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def check_kept(name: str, x: Tensor, shape: tuple[Any, ...], layer: Any) -> None:
    """Raises: ValueError unless keys or values have that shape and the cache's dtype, device."""
    if x.shape != shape:
        raise ValueError(f"{name} {tuple(x.shape)} do not fit a cache of {shape}")
    if x.dtype != layer.dtype or x.device != layer.device:
        found, wanted = f"{x.dtype} on {x.device}", f"{layer.dtype} on {layer.device}"
        raise ValueError(f"{name} are {found}, the cache {wanted}")


def check_rows_kept(rows: Tensor, batch_size: int) -> None:
    """Raises: ValueError unless each is a row of a batch; rows on a GPU are not looked at."""
    wrong = rows.ndim != 1 or not len(rows)
    if not wrong and rows.device.type == "cpu":
        wrong = bool(rows.min() < 0 or rows.max() >= batch_size)
    if wrong:
        raise ValueError(f"rows {rows.tolist()} of a cache with {batch_size} rows")
