"""A layer's memory of fixed size, in the place of keys and values: a window and a state.

Written by hand; beyond/12_state shows it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.cache import CacheLayer, KVCache
from minillm.support.checks.cache import check_agree, check_crop, check_shorter


class StateLayer(CacheLayer):
    """A layer's memory of fixed size: the last inputs of its convolution, and its state.

    It holds what all positions so far have left, so it cannot go back to fewer, but for none.
    """

    holds_keys = False  # of positions, as the other kinds do

    def __init__(
        self,
        batch_size: int,
        window: Sequence[int],
        state: Sequence[int],
        *,
        max_length: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.batch_size, self.max_length, self.dtype = batch_size, max_length, dtype
        self.device = torch.empty(0, device=device).device
        self.state_dtype = torch.promote_types(dtype, torch.float32)
        self.shapes = (tuple(window), tuple(state))
        self.reset()

    def reset(self) -> None:
        self.length = 0
        window, state = ((self.batch_size, *shape) for shape in self.shapes)
        with torch.inference_mode(False):  # as in every cache
            past = torch.zeros(window, dtype=self.dtype, device=self.device)
            self._buffers = past, torch.zeros(state, dtype=self.state_dtype, device=self.device)

    def read(self, num_new: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Window and state before `num_new` more positions.

        Raises: ValueError if the positions or the rows do not fit.
        """
        self.new_length(num_new)
        if batch_size != self.batch_size:
            raise ValueError(f"{batch_size} rows do not fit a cache of {self.batch_size} rows")
        window, state = self._buffers
        return window, state

    def write(self, window: Tensor, state: Tensor, num_new: int) -> None:
        """Keep what `num_new` more positions have left."""
        self.length = self.new_length(num_new)
        with torch.inference_mode(False):
            kept = window.detach().to(self.dtype, copy=True), state.detach().clone()
        self._buffers = kept

    def key_positions(self, num_new: int) -> Tensor:
        """The new positions: there is nothing else to read one by one. Shape: -> (T,) long."""
        return self.query_positions(num_new)

    def check_crop(self, length: int) -> None:
        """Raises: ValueError for any but the last and the first: nothing else is kept."""
        check_shorter(self, length)
        if 0 < length < self.length:
            given = f"cannot crop {self.length} positions to {length}"
            raise ValueError(f"{given}: a state cannot go back; reset() and compute them anew")

    def crop(self, length: int) -> None:
        check_crop([self], length)
        if length == 0:
            self.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of window and state, however many positions have passed."""
        return sum(buffer.nbytes for buffer in self._buffers)


class StateCache(KVCache):
    """A cache in which a layer may hold a state: of keys, one that has them is asked."""

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        super().__init__(layers)
        with_keys = [layer for layer in layers if not isinstance(layer, StateLayer)]
        self._asked = [*with_keys, *layers][0]

    def query_positions(self, num_new: int) -> Tensor:
        return self._asked.query_positions(num_new)

    def key_positions(self, num_new: int) -> Tensor:
        check_agree(self.layers)
        return self._asked.key_positions(num_new)
