"""Applying byte-pair merges to one word: lowest rank first, leftmost first, however long the word.

Explained in notebook 02. Ranks map the bytes of each token to its rank, which is also its id.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

__all__ = ["LONG_WORD", "Memory", "find_merges", "merge_long_word", "merge_word", "with_parts"]

LONG_WORD = 72  # bytes from which the method with places by rank is the faster one


def merge_word(word: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Merge the neighbours whose union has the lowest rank, leftmost first, while there are any."""
    if len(word) > LONG_WORD:
        return merge_long_word(word, ranks)
    never = 1 << 62
    parts = [word[i : i + 1] for i in range(len(word))]
    pairs = [ranks.get(word[i : i + 2], never) for i in range(len(word) - 1)]
    while pairs and (lowest := min(pairs)) < never:
        i = pairs.index(lowest)
        parts[i] += parts.pop(i + 1)
        del pairs[i]
        if i < len(pairs):
            pairs[i] = ranks.get(parts[i] + parts[i + 1], never)
        if i:
            pairs[i - 1] = ranks.get(parts[i - 1] + parts[i], never)
    return parts


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


class Memory(dict):
    """What a function of a string returned; forgets all when full, never keeps a long string."""

    def __init__(
        self, function: Callable[[str], Any], *, size: int = 1 << 17, longest: int = 64
    ) -> None:
        super().__init__()
        self.function, self.size, self.longest = function, size, longest

    def __missing__(self, text: str) -> Any:
        value = self.function(text)
        if len(text) <= self.longest:
            if len(self) >= self.size:
                self.clear()
            self[text] = value
        return value


def find_merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, list[bytes]]]:
    """Each token of two bytes or more, in order, with the parts that lower ranks make of it.

    Two parts are the merge that makes the token; more mean that no merge of two tokens does.
    """
    lower: dict[bytes, int] = {}
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            yield token, merge_word(token, lower)
        lower[token] = ranks[token]


def with_parts(ids: Iterable[int], ranks: Mapping[bytes, int]) -> set[int]:
    """`ids`, the ids of all tokens they are merged from, and those of the 256 bytes."""
    keep = {*ids}
    for token, parts in reversed([*find_merges(ranks)]):
        if ranks[token] in keep:
            keep.update(ranks[part] for part in parts)
    return keep | {ranks[bytes([byte])] for byte in range(256)}
