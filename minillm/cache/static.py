"""A cache whose buffers never grow: fixed slots, fit for compiled decoding (notebook 07)."""

# Built from notebooks/07_cache.ipynb: edit there, then make build.

import copy
from typing import Any

import torch
from torch import Tensor, nn

from minillm.cache.base import CacheLayer

__all__ = ["StaticLayer"]


class _Slots(CacheLayer):
    """Position, keys and values as tensors that never move; `length` is for the world outside."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.max_length is None:
            raise ValueError("a static cache needs max_length")
        shape = (self.batch_size, self.num_kv_heads, self.max_length)
        self._place(self.zeros(1, dtype=torch.long), *(self.zeros(*shape, d) for d in self.dims))
        self._length: int | None = 0
        self._last: CacheLayer | None = None  # who moves the position on, if not this layer

    def _place(self, position: Tensor, keys: Tensor, values: Tensor) -> None:
        self._store = nn.Module()  # CUDA graphs use a module's buffers where they lie
        for name, tensor in (("position", position), ("keys", keys), ("values", values)):
            self._store.register_buffer(name, tensor)
        self._shared = False

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

    def reorder(self, rows: Tensor) -> None:
        with torch.inference_mode(False):
            self._place(self._store.position, *(b[rows] for b in self._buffers))
        self.batch_size = len(rows)

    def join(self, last: CacheLayer) -> None:
        self._store.position, self._last = last._store.position, None if self is last else last


class StaticLayer(_Slots):
    """Buffers of `max_length` slots; a step of one token gets them whole: no shape ever changes.

    Several tokens at once (a prompt) get the filled slots only, unless a compiler is at work.
    The position is a tensor, shared by the layers of a cache and moved on by the last, so that a
    compiled step neither waits for its value nor is compiled anew for it; `length` is for the world
    outside. A compiled step cannot check for overflow: ask `reach` before it.
    """

    def query_positions(self, num_new: int) -> Tensor:
        return self._store.position + torch.arange(num_new, device=self.device)

    def key_positions(self, num_new: int) -> Tensor:
        end = self.max_length if torch.compiler.is_compiling() else self.reach(num_new)
        slots = torch.arange(self.max_length if num_new == 1 else end, device=self.device)
        return torch.where(slots < self._store.position + num_new, slots, -1)

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.admit(keys, values)
        T = keys.shape[2]
        if torch.compiler.is_compiling():
            slots, self._length, end = self.query_positions(T), None, self.max_length
        else:
            start, end = self.length, self.reach(T)
            slots, self._length = torch.arange(start, end, device=self.device), end
        if self._shared:
            self._place(self._store.position, *self.copies())
        for buffer, new in zip(self._buffers, (keys, values), strict=True):
            buffer.index_copy_(2, slots, new)
        if self._last is None:
            self._store.position.add_(T)
        return self._buffers if T == 1 else tuple(b[:, :, :end] for b in self._buffers)

    def fork(self) -> "StaticLayer":
        twin = copy.copy(self)
        with torch.inference_mode(False):
            twin._place(self._store.position.clone(), *self._buffers)
        self._shared = twin._shared = True
        return twin
