"""The cache of keys and values: one layer's, in buffers that grow, and a whole model's.

A model asks `key_positions` before each forward pass, builds its mask from them, and hands each of
its layers `cache[i]`. Explained in notebook 08.
"""

# Built from notebooks/08_cache.ipynb: edit there, then make build.

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.support.checks.cache import check_agree, check_crop, check_kept, check_more, check_rows

__all__ = ["CacheLayer", "KVCache"]


class CacheLayer:
    """One layer's keys and values, in buffers that double when they are full."""

    length: int = 0  # how many positions have passed
    _shared: bool = False  # whether a fork may be reading the same buffers

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        max_length: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.batch_size, self.num_kv_heads = batch_size, num_kv_heads
        self.dims, self.max_length, self.dtype = (key_dim, value_dim), max_length, dtype
        self.device = torch.empty(0, device=device).device
        self._buffers = self.allocate(0)

    def allocate(self, num_slots: int) -> tuple[Tensor, ...]:
        """Buffers with room for `num_slots` positions. Shape: -> (B, G, num_slots, dim) each."""
        shapes = [(self.batch_size, self.num_kv_heads, num_slots, dim) for dim in self.dims]
        with torch.inference_mode(False):  # a cache may outlive the inference mode it was made in
            return tuple(torch.zeros(x, dtype=self.dtype, device=self.device) for x in shapes)

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens, without gradients; returns all that there is to attend to.

        Shape: (B, G, T, key_dim), (B, G, T, value_dim) -> (B, G, S, key_dim), (B, G, S, value_dim)
        Raises: ValueError if they do not fit; nothing has changed then.
        """
        check_kept(self, keys, values)
        keys, values = self.store(keys.detach(), values.detach())
        return keys, values

    def store(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Write new positions behind the old ones; returns views of all that is filled."""
        start, end = self.length, self.new_length(new[0].shape[2])
        if self._shared or end > self._buffers[0].shape[2]:
            self._move(end)
        for buffer, x in zip(self._buffers, new, strict=True):
            buffer[:, :, start:end] = x
        self.length = end
        return tuple(buffer[:, :, :end] for buffer in self._buffers)

    def _move(self, end: int) -> None:
        """Into buffers of our own, at least as large as before, with room for `end` positions."""
        room = self._buffers[0].shape[2]
        if end > room:
            room = max(2 * room, end + 64)
            room = min(room, self.max_length or room)
        fresh = self.allocate(room)
        for new, old in zip(fresh, self._buffers, strict=True):
            new[:, :, : self.length] = old[:, :, : self.length]
        self._buffers, self._shared = fresh, False

    def new_length(self, num_new: int) -> int:
        """The length after `num_new` more positions. Raises: ValueError if they do not fit."""
        check_more(self, num_new)
        return self.length + num_new

    def query_positions(self, num_new: int) -> Tensor:
        """The positions of the next `num_new` tokens. Shape: -> (T,) long."""
        return torch.arange(self.length, self.new_length(num_new), device=self.device)

    def key_positions(self, num_new: int) -> Tensor:
        """The position of each key that `update` of `num_new` tokens will return. Shape: -> (S,)"""
        return torch.arange(self.new_length(num_new), device=self.device)

    def crop(self, length: int) -> None:
        """Go back to the first `length` positions. Raises: ValueError if there are fewer."""
        check_crop([self], length)
        self.length = length

    def reset(self) -> None:
        """Forget everything; the memory stays for the next sequence."""
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the filled positions; what two forks share counts in both."""
        return self.length * sum(b[:, :, :1].nbytes for b in self._buffers)

    def fork(self) -> "CacheLayer":
        """A twin with the same past, in the same memory until one writes: that one copies first."""
        twin = copy.copy(self)
        self._shared = twin._shared = True
        return twin

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was."""
        with torch.inference_mode(False):
            self._buffers = tuple(b[rows.to(self.device)] for b in self._buffers)
        self._shared, self.batch_size = False, len(rows)


class KVCache:
    """A cache layer for each layer of a model: `cache[i].update(keys, values)`.

    `model.make_cache(batch_size=1)` makes one of the model's sizes, and `model(ids, cache=cache)`
    fills it.
    """

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        self.layers = list(layers)

    def __getitem__(self, index: int) -> CacheLayer:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        held = f"{self.batch_size} rows, {self.length} positions, {self.nbytes:,} bytes"
        return f"KVCache({len(self)} layers, {held})"

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
        """The position of each key that an `update` of `num_new` tokens will return, or -1 of none.

        Ask before a forward pass. Shape: -> (S,) long.
        Raises: ValueError if they do not fit, or if the last pass was cut off between two layers.
        """
        check_agree(self.layers)
        return self.layers[0].key_positions(num_new)

    def crop(self, length: int) -> None:
        """Go back to the first `length` positions. Raises: ValueError if a layer cannot."""
        check_crop(self.layers, length)  # all can go back, or none does
        for layer in self.layers:
            layer.crop(length)

    def reset(self) -> None:
        """Forget everything; the memory stays for the next sequence."""
        for layer in self.layers:
            layer.reset()

    def fork(self) -> "KVCache":
        """A twin with the same past, which the two share until one of them writes."""
        return type(self)([layer.fork() for layer in self.layers])

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Row i becomes what row rows[i] was. Raises: ValueError if there is no such row."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        check_rows(rows, self.batch_size)
        for layer in self.layers:
            layer.reorder(rows)
