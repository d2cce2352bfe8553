"""How one layer keeps keys and values: what all kinds agree on, and the two kinds that grow.

Explained in notebooks/07_cache.ipynb; `minillm.cache` makes whole caches of layers. Positions alone
say what a query may read (`key_positions`), so attention needs to know nothing of all this.
"""

# Built from notebooks/07_cache.ipynb: edit there, then make build.

import copy
from typing import Any

import torch
from torch import Tensor

__all__ = ["CacheLayer", "DynamicLayer", "QuantizedLayer", "quantize_int8"]


def _refuse_misfit(
    name: str, x: Tensor, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises: ValueError, with both sides, if `x` has another shape, dtype or device."""
    if x.shape != shape:
        raise ValueError(f"{name} {tuple(x.shape)} do not fit a cache of {shape}")
    if x.dtype != dtype or x.device != device:
        raise ValueError(f"{name} are {x.dtype} on {x.device}, the cache {dtype} on {device}")


class _Sized:
    """The sizes of a layer's cache, and what it lets in: keys and values that fit them."""

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

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer for this layer; what is never filled must not be NaN, since 0 x NaN is NaN."""
        with torch.inference_mode(False):  # a cache may outlive the inference mode it was made in
            return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def admit(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The two without gradients. Raises: ValueError if shape, dtype or device do not fit."""
        T = keys.shape[2] if keys.ndim == 4 else "T"
        for name, x, dim in (("keys", keys, self.dims[0]), ("values", values, self.dims[1])):
            expected = (self.batch_size, self.num_kv_heads, T, dim)
            _refuse_misfit(name, x, expected, self.dtype, self.device)
        if keys.requires_grad or values.requires_grad:
            return keys.detach(), values.detach()
        return keys, values


class _Timeline(_Sized):
    """How many positions have passed, which ones come next, and the way back."""

    length: int = 0

    def reach(self, num_new: int) -> int:
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
        return torch.arange(self.length, self.reach(num_new), device=self.device)

    def key_positions(self, num_new: int) -> Tensor:
        """The position of each key that `update` of `num_new` tokens will return; -1 where none is.

        Shape: -> (S,) long.
        """
        return torch.arange(self.reach(num_new), device=self.device)

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


class CacheLayer(_Timeline):
    """One layer's keys and values, without gradients; subclasses say where they lie."""

    _buffers: tuple[Tensor, ...] = ()
    _shared: bool = False

    @property
    def held(self) -> int:
        """How many positions are stored."""
        return self.length

    @property
    def nbytes(self) -> int:
        """Bytes of the filled positions; what two forks share counts in both."""
        return self.held * sum(b[:, :, :1].nbytes for b in self._buffers)

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
            self._buffers, self._shared = tuple(b[rows] for b in self._buffers), False
        self.batch_size = len(rows)

    def copies(self) -> tuple[Tensor, ...]:
        """The buffers anew, for a writer that shares them."""
        with torch.inference_mode(False):
            return tuple(b.clone() for b in self._buffers)

    def join(self, last: "CacheLayer") -> None:
        """Called when layers become one cache, with its last layer."""


class DynamicLayer(CacheLayer):
    """Buffers that double when they are full: on average, a token is copied less than twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers = self._allocate(0)

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.admit(keys, values)
        start, end = self.length, self.reach(keys.shape[2])
        if self._shared or end > self._buffers[0].shape[2]:
            self._move(end)
        for buffer, new in zip(self._buffers, self._encode(keys, values), strict=True):
            buffer[:, :, start:end] = new
        self.length = end
        return self._decode(*(buffer[:, :, :end] for buffer in self._buffers))

    def _move(self, end: int) -> None:
        """Into buffers of our own, at least as large as before, with room for `end` positions."""
        capacity = self._buffers[0].shape[2]
        if end > capacity:
            capacity = max(2 * capacity, end + 64)
            capacity = min(capacity, self.max_length or capacity)
        fresh = self._allocate(capacity)
        for new, old in zip(fresh, self._buffers, strict=True):
            new[:, :, : self.length] = old[:, :, : self.length]
        self._buffers, self._shared = fresh, False

    def _allocate(self, capacity: int) -> tuple[Tensor, ...]:
        B, G = self.batch_size, self.num_kv_heads
        return tuple(self.zeros(B, G, capacity, dim) for dim in self.dims)

    def _encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return keys, values

    def _decode(self, *buffers: Tensor) -> tuple[Tensor, Tensor]:
        return buffers


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127 and a scale for each vector: x is about numbers * scale.

    No entry is off by more than half a scale, which is 1/254 of the vector's largest entry.

    Shape: (..., D) -> (..., D) int8, (..., 1) float32.
    """
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    numbers = x / scale.clamp_min(torch.finfo(torch.float32).tiny)
    return numbers.round().to(torch.int8), scale


class QuantizedLayer(DynamicLayer):
    """Keys and values in int8, with a scale for each token and head.

    New tokens are read rounded, too, so that it makes no difference in how many chunks they came.
    """

    def _allocate(self, capacity: int) -> tuple[Tensor, ...]:
        shape = (self.batch_size, self.num_kv_heads, capacity)
        numbers = tuple(self.zeros(*shape, dim, dtype=torch.int8) for dim in self.dims)
        return numbers + tuple(self.zeros(*shape, 1, dtype=torch.float32) for _ in self.dims)

    def _encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        (k, k_scale), (v, v_scale) = quantize_int8(keys), quantize_int8(values)
        return k, v, k_scale, v_scale

    def _decode(self, *buffers: Tensor) -> tuple[Tensor, Tensor]:
        k, v, k_scale, v_scale = buffers
        return k.float().mul_(k_scale).to(self.dtype), v.float().mul_(v_scale).to(self.dtype)
