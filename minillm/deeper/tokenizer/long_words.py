"""One very long word, merged in O(n log n): a million letters without a space take seconds.

Explained in notebooks/deeper/02_fast_bpe. What `minillm.bpe.merge_word` says, it says.
"""

# Built from notebooks/deeper/02_fast_bpe.ipynb: edit there, then make build.

import heapq
from collections.abc import Mapping

__all__ = ["merge_long_word"]


class _Places:
    """Where neighbours may be merged, by the rank of their union; `lowest`: the lowest yet."""

    def __init__(self, word: bytes, ranks: Mapping[bytes, int]) -> None:
        self.by_rank: dict[int, list[int]] = {}
        self.queue: list[tuple[int, int]] = []  # a heap of (rank, length of the union)
        self.lowest = 0
        for i in range(len(word) - 1):
            if (rank := ranks.get(word[i : i + 2])) is not None:
                self.add(rank, i, i + 2)

    def add(self, rank: int, start: int, stop: int) -> None:
        if rank in self.by_rank:
            self.by_rank[rank].append(start)
        else:
            self.by_rank[rank] = [start]
            heapq.heappush(self.queue, (rank, stop - start))
            self.lowest = min(self.lowest, rank)


def merge_long_word(word: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """What `merge_word` does, in O(n log n): places grouped by rank, neighbours linked."""
    size, get = len(word), ranks.get
    after = list(range(1, size + 1))  # where the part that begins here ends, -1 inside a part
    before = list(range(-1, size))  # where the part that ends here begins
    places = _Places(word, ranks)
    while places.queue:
        rank, length = heapq.heappop(places.queue)
        places.lowest = rank
        found = sorted(places.by_rank.pop(rank))
        for k, i in enumerate(found):
            middle, end = after[i], i + length
            if not i < middle < end or after[middle] != end:
                continue  # an earlier merge took one of the two
            after[i], before[end], after[middle] = end, i, -1
            if i and (new := get(word[before[i] : end])) is not None:
                places.add(new, before[i], end)
            if end < size and (new := get(word[i : after[end]])) is not None:
                places.add(new, i, after[end])
            if places.lowest < rank:  # no training makes such ranks; the rest has to wait
                for later in found[k + 1 :]:
                    places.add(rank, later, later + length)
                break
    starts = [0]
    while after[starts[-1]] < size:
        starts.append(after[starts[-1]])
    return [word[i : after[i]] for i in starts]
