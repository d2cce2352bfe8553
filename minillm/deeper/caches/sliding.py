"""A cache that keeps the last positions only: a ring for sliding windows.

Explained in notebooks/deeper/08_serving_caches.ipynb.
"""

# Built from notebooks/deeper/08_serving_caches.ipynb: edit there, then make build.

from typing import Any

import torch
from torch import Tensor

from minillm.cache import CacheLayer
from minillm.support.checks.cache import check_kept, check_shorter

__all__ = ["SlidingLayer"]


class SlidingLayer(CacheLayer):
    """A ring of `window` slots: position p lies in slot p % window until p + window does."""

    _first: int = 0  # the oldest position stored

    def __init__(self, *args: Any, window: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.window = min(window, self.max_length or window)
        self._buffers = self.allocate(self.window)

    @property
    def num_stored(self) -> int:
        """How many positions are stored."""
        return self.length - self._first

    @property
    def nbytes(self) -> int:
        return self.num_stored * sum(ring[:, :, :1].nbytes for ring in self._buffers)

    def key_positions(self, num_new: int) -> Tensor:
        end = self.new_length(num_new)
        if num_new > 1:  # the past in order, then the new
            return torch.arange(self._first, end, device=self.device)
        slots = torch.arange(min(end, self.window), device=self.device)  # the ring as it lies
        return end - 1 - (end - 1 - slots) % self.window

    def check_crop(self, length: int) -> None:
        """Raises: ValueError if what comes next would read what is overwritten."""
        check_shorter(self, length)
        if length < self.length and self._first > max(0, length - self.window + 1):
            raise ValueError(
                f"cannot crop {self.length} positions to {length}: "
                f"the ring of {self.window} has overwritten those before {self._first}"
            )

    def reset(self) -> None:
        self.length = self._first = 0

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        check_kept(self, keys, values)
        keys, values = keys.detach(), values.detach()
        start, end = self.length, self.new_length(keys.shape[2])
        if self._shared:
            self._move(0)
        several = end - start > 1
        if several:  # read before writing: the first of them still see what the last overwrite
            past = torch.arange(self._first, start, device=self.device) % self.window
            old = [ring[:, :, past] for ring in self._buffers]
            found = [torch.cat(pair, dim=2) for pair in zip(old, (keys, values), strict=True)]
        oldest = max(start, end - self.window)
        slots = torch.arange(oldest, end, device=self.device) % self.window
        for ring, new in zip(self._buffers, (keys, values), strict=True):
            ring.index_copy_(2, slots, new[:, :, oldest - start :])
        if not several:
            found = [ring[:, :, :end] for ring in self._buffers]
        self.length, self._first = end, max(self._first, end - self.window)
        return found[0], found[1]
