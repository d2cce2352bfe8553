"""Caches for whole models: a layer each for keys and values, of one of five kinds.

Explained in notebooks/07_cache.ipynb. A model asks `key_positions` before each forward pass, builds
its mask from them, and hands each of its layers `cache[i]`.
"""

# Built from notebooks/07_cache.ipynb: edit there, then make build.

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.cache_fixed import SlidingLayer, StaticLayer
from minillm.cache_layers import CacheLayer, DynamicLayer, QuantizedLayer
from minillm.cache_paged import PagedLayer

__all__ = ["CACHE_KINDS", "KVCache", "make_cache"]


def _check_whole(lengths: list[int]) -> None:
    """Raises: ValueError if some layers have taken tokens that others have not."""
    if min(lengths) != max(lengths):
        raise ValueError(
            f"the layers hold {lengths} positions: a forward pass was cut off; "
            f"call crop({lengths[-1]}) or reset()"
        )


class _Stack:
    """Layers that take each forward pass together: one length, and one answer where keys are."""

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        self.layers = list(layers)
        for layer in self.layers:
            layer.join(self.layers[-1])

    def __getitem__(self, index: int) -> CacheLayer:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def length(self) -> int:
        """How many positions have passed through all layers, padding included."""
        return self.layers[-1].length

    @property
    def batch_size(self) -> int:
        return self.layers[0].batch_size

    @property
    def nbytes(self) -> int:
        """Bytes of the filled positions of all layers; what two forks share counts in both."""
        return sum(layer.nbytes for layer in self.layers)

    def query_positions(self, num_new: int) -> Tensor:
        """The positions of the next `num_new` tokens. Shape: -> (T,) long."""
        return self.layers[0].query_positions(num_new)

    def key_positions(self, num_new: int) -> Tensor:
        """The position of each key that every layer's `update` of `num_new` tokens will return.

        Ask before a forward pass. A position of -1 marks an empty slot.

        Shape: -> (S,) long.
        Raises: ValueError if they do not fit, or if the last pass was cut off between two layers.
        """
        if not torch.compiler.is_compiling():
            _check_whole([layer.length for layer in self.layers])
        return self.layers[0].key_positions(num_new)


class KVCache(_Stack):
    """A cache layer for each layer of a model: `cache[i].update(keys, values)`."""

    def crop(self, length: int) -> None:
        """Go back to the first `length` positions, as if the later ones had never been.

        Raises: ValueError if there are fewer, or if a ring has overwritten what comes next needs.
        """
        for layer in self.layers:
            layer.check_crop(length)
        for layer in self.layers:
            layer.crop(length)

    def reset(self) -> None:
        """Forget everything; the memory stays for the next sequence."""
        for layer in self.layers:
            layer.reset()

    def fork(self) -> "KVCache":
        """A twin with the same past, which the two share until one of them writes."""
        return KVCache([layer.fork() for layer in self.layers])

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Row i becomes what row rows[i] was: to follow the best beams, to copy a row, to drop one.

        Raises: ValueError if there is no such row.
        """
        rows = torch.as_tensor(rows, dtype=torch.long)
        if rows.ndim != 1 or len(rows) == 0 or rows.min() < 0 or rows.max() >= self.batch_size:
            raise ValueError(f"rows {rows.tolist()} of a cache with {self.batch_size} rows")
        for layer in self.layers:
            layer.reorder(rows.to(layer.device))


CACHE_KINDS: dict[str, type[CacheLayer]] = {
    "dynamic": DynamicLayer,
    "static": StaticLayer,
    "sliding": SlidingLayer,
    "paged": PagedLayer,
    "quantized": QuantizedLayer,
}


def _refuse_below_one(**sizes: int | None) -> None:
    """Raises: ValueError that names a size below 1; None is no size."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} is below 1")


def make_cache(
    kind: str = "dynamic",
    *,
    num_layers: int,
    batch_size: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    max_length: int | None = None,
    window: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> KVCache:
    """An empty cache of one of the kinds dynamic, static, sliding, paged and quantized.

    Args:
        max_length: more positions are an error; "static" needs it and reserves the memory.
        window: how many positions a query reads, itself included. "sliding" needs it and keeps no
            more; the other kinds keep everything and leave the window to the mask.
        block_size: positions in a block of a "paged" cache.
    Raises: ValueError for an unknown kind, a size below 1, a missing argument.
    """
    if kind not in CACHE_KINDS:
        raise ValueError(f"no cache kind {kind!r}; there are {', '.join(CACHE_KINDS)}")
    shape = {"batch_size": batch_size, "num_kv_heads": num_kv_heads}
    shape |= {"key_dim": key_dim, "value_dim": value_dim}
    _refuse_below_one(num_layers=num_layers, **shape, block_size=block_size)
    _refuse_below_one(max_length=max_length, window=window)
    options: dict[str, Any] = {"max_length": max_length, "dtype": dtype, "device": device}
    if kind == "sliding":
        if window is None:
            raise ValueError("a sliding cache needs window")
        options["window"] = window
    if kind == "paged":
        options["block_size"] = block_size
    return KVCache([CACHE_KINDS[kind](**shape, **options) for _ in range(num_layers)])
