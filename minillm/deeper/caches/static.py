"""A cache whose buffers never grow: fixed slots, fit for compiled decoding.

Explained in notebooks/deeper/08_serving_caches.ipynb.
"""

# Built from notebooks/deeper/08_serving_caches.ipynb: edit there, then make build.

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minillm.cache import CacheLayer, KVCache
from minillm.support.checks.cache import check_kept

__all__ = ["StaticCache", "StaticLayer"]


class _Store(nn.Module):
    """Position, keys and values as buffers of a module: CUDA graphs use those where they lie."""

    position: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self, position: Tensor, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("position", position)
        self.register_buffer("keys", keys)
        self.register_buffer("values", values)


class StaticLayer(CacheLayer):
    """Buffers of `max_length` slots; a step of one token gets them whole: no shape ever changes.

    Several tokens at once (a prompt) get the filled slots only, unless a compiler is at work.
    The position is a tensor, shared by the layers of a cache and moved on by the last, so that a
    compiled step neither waits for its value nor is compiled anew for it; `length` is for the world
    outside. A compiled step cannot check for overflow: ask `new_length` before it.
    """

    fixed_shapes = True  # of what a step of one token sees
    max_length: int
    _store: _Store

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._length: int | None = 0
        self._last: StaticLayer | None = None  # who moves the position on, if not this layer
        super().__init__(*args, **kwargs)
        if self.max_length is None:
            raise ValueError("a static cache needs max_length")
        try:
            keys, values = self.allocate(self.max_length)
        except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
            asked = f"batch_size={self.batch_size}, max_length={self.max_length}"
            reason = (str(error) or "no memory").splitlines()[0]
            raise ValueError(f"no room for a static cache of {asked}: {reason}") from None
        self._buffers = keys, values

    @property
    def length(self) -> int:
        if self._length is None:  # a compiled step has moved on: look (and wait) once
            last = self._last
            self._length = int(self._store.position) if last is None else last.length
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        self._length = value
        self._store.position.fill_(value)

    @property
    def _buffers(self) -> tuple[Tensor, ...]:
        return self._store.keys, self._store.values

    @_buffers.setter
    def _buffers(self, buffers: tuple[Tensor, ...]) -> None:
        if hasattr(self, "_store"):
            position = self._store.position
        else:
            with torch.inference_mode(False):
                position = torch.zeros(1, dtype=torch.long, device=self.device)
        self._store = _Store(position, *buffers)

    def join(self, last: "StaticLayer") -> None:
        """Share the position of a cache's last layer, which moves it on."""
        self._store.position, self._last = last._store.position, last

    def query_positions(self, num_new: int) -> Tensor:
        return self._store.position + torch.arange(num_new, device=self.device)

    def key_positions(self, num_new: int) -> Tensor:
        end = self.max_length if torch.compiler.is_compiling() else self.new_length(num_new)
        slots = torch.arange(self.max_length if num_new == 1 else end, device=self.device)
        return torch.where(slots < self._store.position + num_new, slots, -1)

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        check_kept(self, keys, values)
        T = keys.shape[2]
        if torch.compiler.is_compiling():
            slots, self._length, end = self.query_positions(T), None, self.max_length
        else:
            start, end = self.length, self.new_length(T)
            slots, self._length = torch.arange(start, end, device=self.device), end
        if self._shared:
            with torch.inference_mode(False):
                self._buffers = tuple(b.clone() for b in self._buffers)
            self._shared = False
        store = self._store
        store.keys.index_copy_(2, slots, keys.detach())
        store.values.index_copy_(2, slots, values.detach())
        if self._last is None:
            store.position.add_(T)
        if T == 1:
            return store.keys, store.values
        return store.keys[:, :, :end], store.values[:, :, :end]

    def fork(self) -> "StaticLayer":
        twin = copy.copy(self)
        with torch.inference_mode(False):
            position = self._store.position.clone()
        twin._store = _Store(position, self._store.keys, self._store.values)
        twin._last, self._shared, twin._shared = None, True, True
        return twin


class StaticCache(KVCache):
    """Static layers as one cache: the last of them moves the position of all on."""

    def __init__(self, layers: Sequence[StaticLayer]) -> None:
        super().__init__(layers)
        for layer in layers[:-1]:
            layer.join(layers[-1])
