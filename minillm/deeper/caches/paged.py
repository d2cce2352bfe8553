"""Paging: keys and values in blocks anywhere in a pool, as an operating system keeps its memory.

Explained in notebooks/deeper/08_serving_caches.ipynb; vLLM does it for real.
"""

# Built from notebooks/deeper/08_serving_caches.ipynb: edit there, then make build.

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.cache import CacheLayer
from minillm.support.checks.cache import check_crop, check_kept

__all__ = ["BlockPool", "PagedLayer"]


class BlockPool:
    """Blocks of `block_size` positions, how many tables hold each one, and which are free."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.buffers = tuple(buffers)  # (blocks, block_size, G, dim)
        self.ref_counts: list[int] = []
        self.free: list[int] = []

    def take(self) -> int:
        """A free block, now held once; the pool doubles when there is none."""
        if not self.free:
            old, new = len(self.ref_counts), max(16, 2 * len(self.ref_counts))
            self._enlarge(new)
            self.ref_counts += [0] * (new - old)
            self.free = list(range(new - 1, old - 1, -1))
        block = self.free.pop()
        self.ref_counts[block] = 1
        return block

    def _enlarge(self, num_blocks: int) -> None:
        """The buffers again, with room for `num_blocks` blocks."""
        with torch.inference_mode(False):
            fresh = tuple(b.new_zeros(num_blocks, *b.shape[1:]) for b in self.buffers)
        for larger, buffer in zip(fresh, self.buffers, strict=True):
            larger[: len(buffer)] = buffer
        self.buffers = fresh

    def share(self, blocks: Sequence[int]) -> list[int]:
        """The same blocks, for one more holder."""
        for block in blocks:
            self.ref_counts[block] += 1
        return list(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer; a block that nobody holds is free."""
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free.append(block)

    def copy_on_write(self, block: int) -> int:
        """The block itself if one holds it, otherwise a copy for the writer."""
        if self.ref_counts[block] == 1:
            return block
        copied = self.take()
        for buffer in self.buffers:
            buffer[copied] = buffer[block]
        self.release([block])
        return copied


class PagedLayer(CacheLayer):
    """Each row's positions lie in blocks of a pool; its block table lists them.

    Forks share blocks, and who writes into a shared block copies that block alone. `update` gathers
    the blocks into one tensor; a server's kernel spares itself that and reads them where they lie.

    Source: Kwon et al. 2023, sections 4.1 to 4.4.
    """

    def __init__(self, *args: Any, block_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shape = (0, block_size, self.num_kv_heads)
        self.pool = BlockPool([b.new_empty(*shape, b.shape[-1]) for b in self._buffers])
        self.block_size = block_size
        self.block_table: list[list[int]] = [[] for _ in range(self.batch_size)]
        self._sent: list[list[int]] = []  # the table that lies on the device

    @property
    def nbytes(self) -> int:
        slot = sum(b.shape[2] * b.shape[3] * b.element_size() for b in self.pool.buffers)
        return self.length * self.batch_size * slot

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        check_kept(self, keys, values)
        start, end = self.length, self.new_length(keys.shape[2])
        first, last = start // self.block_size, (end - 1) // self.block_size
        for row in self.block_table:
            row[first:] = [self.pool.copy_on_write(block) for block in row[first:]]
            row += [self.pool.take() for _ in range(last + 1 - len(row))]
        positions = torch.arange(start, end, device=self.device)
        if self._sent != self.block_table:  # sending it makes a GPU wait
            self._sent = [list(row) for row in self.block_table]
            self._table = torch.tensor(self._sent, device=self.device)  # (B, blocks)
        table = self._table
        blocks, offsets = table[:, positions // self.block_size], positions % self.block_size
        found = []
        for pool, new in zip(self.pool.buffers, (keys, values), strict=True):
            pool[blocks, offsets] = new.detach().transpose(1, 2)
            rows = pool.index_select(0, table.flatten()).view(len(table), -1, *pool.shape[2:])
            found.append(rows[:, :end].transpose(1, 2))  # (B, S, G, dim) -> (B, G, S, dim)
        self.length = end
        return found[0], found[1]

    def crop(self, length: int) -> None:
        check_crop([self], length)
        self.length, kept = length, -(-length // self.block_size)
        for row in self.block_table:
            self.pool.release(row[kept:])
            del row[kept:]

    def reset(self) -> None:
        self.crop(0)

    def fork(self) -> "PagedLayer":
        twin = copy.copy(self)
        twin.block_table = [self.pool.share(row) for row in self.block_table]
        return twin

    def reorder(self, rows: Tensor) -> None:
        old = self.block_table
        self.block_table = [
            self.pool.share(old[row]) for row in rows.tolist()
        ]  # tables lie on the CPU
        for row in old:
            self.pool.release(row)
        self.batch_size = len(rows)

    def __del__(self) -> None:
        for row in getattr(self, "block_table", ()):
            self.pool.release(row)
