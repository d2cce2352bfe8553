"""Paging: keys and values in blocks anywhere in a pool, as an operating system keeps its memory.

Explained in notebooks/07_cache.ipynb; vLLM is the place where this is done for real.
"""

# Built from notebooks/07_cache.ipynb: edit there, then make build.

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.cache.base import CacheLayer

__all__ = ["BlockPool", "PagedLayer"]


def _enlarged(buffers: Sequence[Tensor], blocks: int) -> tuple[Tensor, ...]:
    """The buffers again, with room for `blocks` blocks."""
    with torch.inference_mode(False):
        fresh = tuple(b.new_zeros(blocks, *b.shape[1:]) for b in buffers)
    for larger, buffer in zip(fresh, buffers, strict=True):
        larger[: len(buffer)] = buffer
    return fresh


class BlockPool:
    """Blocks of `block_size` positions, how many hold each one, and which are free."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.buffers = tuple(buffers)  # (blocks, block_size, G, dim)
        self.holders: list[int] = []
        self.free: list[int] = []

    def take(self) -> int:
        """A free block, now held once; the pool doubles when there is none."""
        if not self.free:
            old, new = len(self.holders), max(16, 2 * len(self.holders))
            self.buffers = _enlarged(self.buffers, new)
            self.holders += [0] * (new - old)
            self.free = list(range(new - 1, old - 1, -1))
        block = self.free.pop()
        self.holders[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> list[int]:
        """The same blocks, for one more holder."""
        for block in blocks:
            self.holders[block] += 1
        return list(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer; a block that nobody holds is free."""
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free.append(block)

    def own(self, block: int) -> int:
        """The block itself if one holds it, otherwise a copy for the writer."""
        if self.holders[block] == 1:
            return block
        copied = self.take()
        for buffer in self.buffers:
            buffer[copied] = buffer[block]
        self.release([block])
        return copied


class _Pages(CacheLayer):
    """A pool, and for each row a table of the blocks in which its positions lie."""

    def __init__(self, *args: Any, block_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shape = (0, block_size, self.num_kv_heads)
        self.pool = BlockPool([self.zeros(*shape, dim) for dim in self.dims])
        self.block_size = block_size
        self.table: list[list[int]] = [[] for _ in range(self.batch_size)]

    @property
    def nbytes(self) -> int:
        slot = sum(b.shape[2] * b.shape[3] * b.element_size() for b in self.pool.buffers)
        return self.length * self.batch_size * slot

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.admit(keys, values)
        start, end = self.length, self.reach(keys.shape[2])
        first, last = start // self.block_size, (end - 1) // self.block_size
        for row in self.table:
            row[first:] = [self.pool.own(block) for block in row[first:]]
            row += [self.pool.take() for _ in range(last + 1 - len(row))]
        positions = torch.arange(start, end, device=self.device)
        table = torch.tensor(self.table, device=self.device)  # (B, blocks)
        blocks, offsets = table[:, positions // self.block_size], positions % self.block_size
        found = []
        for pool, new in zip(self.pool.buffers, (keys, values), strict=True):
            pool[blocks, offsets] = new.transpose(1, 2)
            rows = pool.index_select(0, table.flatten()).view(len(table), -1, *pool.shape[2:])
            found.append(rows[:, :end].transpose(1, 2))  # (B, S, G, dim) -> (B, G, S, dim)
        self.length = end
        return found[0], found[1]


class PagedLayer(_Pages):
    """Each row's positions lie in blocks of a pool; its table lists them.

    Forks share blocks, and who writes into a shared block copies that block alone. `update` gathers
    the blocks into one tensor; a server's kernel spares itself that and reads them where they lie.

    Source: Kwon et al. 2023, sections 4.1 to 4.4.
    """

    def crop(self, length: int) -> None:
        super().crop(length)
        for row in self.table:
            kept = -(-length // self.block_size)
            self.pool.release(row[kept:])
            del row[kept:]

    def reset(self) -> None:
        self.crop(0)

    def fork(self) -> "PagedLayer":
        twin = copy.copy(self)
        twin.table = [self.pool.share(row) for row in self.table]
        return twin

    def reorder(self, rows: Tensor) -> None:
        old = self.table
        self.table = [self.pool.share(old[row]) for row in rows.tolist()]
        for row in old:
            self.pool.release(row)
        self.batch_size = len(rows)

    def __del__(self) -> None:
        for row in getattr(self, "table", ()):
            self.pool.release(row)
