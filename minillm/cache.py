"""Caches of keys and values: what all kinds agree on, the kind that grows, and whole caches.

A model asks `key_positions` before each forward pass, builds its mask from them, and hands each of
its layers `cache[i]`. Explained in notebook 08.
"""

# Built from notebooks/08_cache.ipynb: edit there, then make build.

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.support.checks.cache import check_kept, check_rows_kept
from minillm.support.checks.kinds import check_sizes

__all__ = ["CacheLayer", "DynamicLayer", "KVCache", "make_cache"]


class CacheLayer:
    """One layer's keys and values, without gradients; subclasses say where they lie."""

    length: int = 0  # how many positions have passed
    holds_keys: bool = True  # keys and values of positions, and no state that sums them up
    fixed_shapes: bool = False  # whether a step of one token always sees tensors of the same shapes
    _buffers: tuple[Tensor, ...] = ()
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

    def allocate(self, num_slots: int) -> tuple[Tensor, ...]:
        """Buffers with room for `num_slots` positions. Shape: -> (B, G, num_slots, dim) each."""
        B, G = self.batch_size, self.num_kv_heads
        return tuple(self._zeros(B, G, num_slots, dim) for dim in self.dims)

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer for this layer; what is never filled must not be NaN, since 0 x NaN is NaN."""
        with torch.inference_mode(False):  # a cache may outlive the inference mode it was made in
            return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def admit(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The two without gradients. Raises: ValueError if shape, dtype or device do not fit."""
        for name, x, dim in (("keys", keys, self.dims[0]), ("values", values, self.dims[1])):
            T = keys.shape[2] if keys.ndim == 4 else "T"
            check_kept(name, x, (self.batch_size, self.num_kv_heads, T, dim), self)
        if keys.requires_grad or values.requires_grad:
            return keys.detach(), values.detach()
        return keys, values

    def new_length(self, num_new: int) -> int:
        """The length after `num_new` more positions. Raises: ValueError if they do not fit."""
        if num_new < 1:
            raise ValueError(f"a step has at least one new position, not {num_new}")
        end = self.length + num_new
        if self.max_length is not None and end > self.max_length:
            raise ValueError(
                f"{num_new} new positions after {self.length} exceed max_length={self.max_length}"
            )
        return end

    def query_positions(self, num_new: int) -> Tensor:
        """The positions of the next `num_new` tokens. Shape: -> (T,) long."""
        return torch.arange(self.length, self.new_length(num_new), device=self.device)

    def key_positions(self, num_new: int) -> Tensor:
        """The position of each key that `update` of `num_new` tokens will return; -1 where none is.

        Shape: -> (S,) long.
        """
        return torch.arange(self.new_length(num_new), device=self.device)

    def check_crop(self, length: int) -> None:
        """Raises: ValueError if the cache cannot go back to its first `length` positions."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop {self.length} positions to {length}")

    def crop(self, length: int) -> None:
        """Go back to the first `length` positions. Raises: ValueError as `check_crop`."""
        self.check_crop(length)
        self.length = length

    def reset(self) -> None:
        """Forget everything; the memory stays for the next sequence."""
        self.length = 0

    @property
    def num_stored(self) -> int:
        """How many positions are stored."""
        return self.length

    @property
    def nbytes(self) -> int:
        """Bytes of the filled positions; what two forks share counts in both."""
        return self.num_stored * sum(b[:, :, :1].nbytes for b in self._buffers)

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens and return what there is to attend to, as `key_positions` told.

        Shape: (B, G, T, key_dim), (B, G, T, value_dim) -> (B, G, S, key_dim), (B, G, S, value_dim).
        Raises: ValueError if they do not fit; nothing has changed then.
        """
        raise NotImplementedError

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

    def copies(self) -> tuple[Tensor, ...]:
        """The buffers anew, for a writer that shares them."""
        with torch.inference_mode(False):
            return tuple(b.clone() for b in self._buffers)

    def join(self, last: "CacheLayer") -> None:
        """Called when layers become one cache, with its last layer that holds keys."""


class DynamicLayer(CacheLayer):
    """Buffers that double when they are full: on average, a token is copied less than twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers = self.allocate(0)

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.store(*self.admit(keys, values))
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
        capacity = self._buffers[0].shape[2]
        if end > capacity:
            capacity = max(2 * capacity, end + 64)
            capacity = min(capacity, self.max_length or capacity)
        fresh = self.allocate(capacity)
        for new, old in zip(fresh, self._buffers, strict=True):
            new[:, :, : self.length] = old[:, :, : self.length]
        self._buffers, self._shared = fresh, False


class KVCache:
    """A cache layer for each layer of a model: `cache[i].update(keys, values)`.

    A model makes one of its own sizes:

        cache = model.make_cache(batch_size=1)
        logits = model(ids, cache=cache)  # (1, T, V); afterwards cache.length is T
    """

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        self.layers = list(layers)
        self._asked = next((x for x in self.layers[::-1] if x.holds_keys), self.layers[-1])
        for layer in self.layers:
            layer.join(self._asked)

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
        return self._asked.query_positions(num_new)

    def key_positions(self, num_new: int) -> Tensor:
        """The position of each key that every layer's `update` of `num_new` tokens will return.

        Ask before a forward pass. A position of -1 marks an empty slot.

        Shape: -> (S,) long.
        Raises: ValueError if they do not fit, or if the last pass was cut off between two layers.
        """
        if not torch.compiler.is_compiling():
            lengths = [layer.length for layer in self.layers]
            if min(lengths) != max(lengths):
                raise ValueError(
                    f"the layers hold {lengths} positions: a forward pass was cut off; "
                    f"call crop({lengths[-1]}) or reset()"
                )
        return self._asked.key_positions(num_new)

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

        Raises: ValueError if there is no such row (`rows` that lie on a GPU are not looked at).
        """
        rows = torch.as_tensor(rows, dtype=torch.long)
        check_rows_kept(rows, self.batch_size)
        for layer in self.layers:
            layer.reorder(rows)


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
    """An empty cache, "dynamic" or of another kind (`deeper.caches.kinds`: its options).

    Of a model's sizes, `model.make_cache(kind, batch_size=...)` makes it.

    Args:
        kind: "dynamic" (grows), "static", "sliding", "paged" or "quantized".
        max_length: positions that a static cache has room for.
    Raises: ValueError for an unknown kind, a size below 1, a missing argument.
    """
    sizes = {"batch_size": batch_size, "num_kv_heads": num_kv_heads}
    sizes |= {"key_dim": key_dim, "value_dim": value_dim}
    check_sizes(num_layers=num_layers, max_length=max_length, window=window, **sizes)
    make: Any = DynamicLayer
    if kind != "dynamic":
        from minillm.deeper.caches.kinds import layer_maker

        make = layer_maker(kind, window=window, block_size=block_size)
    options: dict[str, Any] = {"max_length": max_length, "dtype": dtype, "device": device}
    return KVCache([make(**sizes, **options) for _ in range(num_layers)])
