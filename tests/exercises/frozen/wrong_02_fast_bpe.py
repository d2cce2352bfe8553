"""Wrong answers of 02_fast_bpe: exercise, answer, words that its message holds."""

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

TOKENS = b"bc ab abc cd aa bcd aaaa abcdef de def cdef".split()


def _ranks() -> dict[bytes, int]:
    tokens = [*(bytes([byte]) for byte in range(256)), *TOKENS]
    return {token: rank for rank, token in enumerate(tokens)}


def _changes(tokens: Sequence[int], pair: tuple[int, int], new: int) -> dict[tuple[int, int], int]:
    after, before = Counter(pairwise(_replaced(tokens, pair, new))), Counter(pairwise(tokens))
    after.subtract(before)
    return {pair: change for pair, change in after.items() if change}


def _replaced(ids: Sequence[Any], pair: tuple[Any, Any], new: Any) -> list[Any]:
    out: list[Any] = []
    i = 0
    while i < len(ids):
        found = tuple(ids[i : i + 2]) == pair
        out.append(new if found else ids[i])
        i += 2 if found else 1
    return out


def _merged(
    word: bytes, ranks: Mapping[bytes, int], *, steps: int | None = None, sign: int = 1
) -> list[bytes]:
    parts = [word[i : i + 1] for i in range(len(word))]
    while steps is None or steps > 0:
        unions = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        known = [(sign * ranks[union], i) for i, union in enumerate(unions) if union in ranks]
        if not known:
            return parts
        i = min(known)[1]
        parts[i : i + 2] = [unions[i]]
        steps = None if steps is None else steps - 1
    return parts


def _longest_first(word: bytes, tokens: Collection[bytes]) -> list[bytes]:
    parts, i = [], 0
    while i < len(word):
        end = next(e for e in range(len(word), i, -1) if e == i + 1 or word[i:e] in tokens)
        parts.append(word[i:end])
        i = end
    return parts


def one_by_one(word, _):
    return [word[i : i + 1] for i in range(len(word))]


def ranked(word, _):
    return _merged(word, _ranks())


def all_counts(tokens, pair, new):
    after, before = Counter(pairwise(_replaced(tokens, pair, new))), Counter(pairwise(tokens))
    after.subtract(before)
    return dict(after)


def only_new(tokens, pair, new):
    return {p: change for p, change in _changes(tokens, pair, new).items() if new in p}


def upside_down(tokens, pair, new):
    return {p: -change for p, change in _changes(tokens, pair, new).items()}


def only_the_pair(tokens, pair, new):
    return {p: change for p, change in _changes(tokens, pair, new).items() if p == pair}


def pop_anything(heap, counts):
    return heapq.heappop(heap)[1]


def pop_above_zero(heap, counts):
    while True:
        _, pair = heapq.heappop(heap)
        if counts[pair] > 0:
            return pair


def pop_and_keep(heap, counts):
    return min(entry for entry in heap if -entry[0] == counts[entry[1]])[1]


def pop_the_greatest(heap, counts):
    return max(counts, key=lambda pair: (counts[pair], pair))


class PopForgets:
    """Takes the first entry that was ever right, again and again."""

    def __call__(self, heap, counts):
        if getattr(self, "heap", None) is not heap:
            self.heap, self.pair = heap, pop_by_search(heap, counts)
        return self.pair


def pop_by_search(heap, counts):
    """The right pairs, found without the heap."""
    return min(counts, key=lambda pair: (-counts[pair], pair))


def pop_first_of_equals(heap, counts):
    return max(counts, key=counts.get)


WRONG = [
    ("02_fast_bpe.1", _longest_first, "may cost more later"),
    ("02_fast_bpe.1", ranked, "what merging by rank finds"),
    ("02_fast_bpe.1", one_by_one, "takes 2 tokens"),
    ("02_fast_bpe.1", lambda word, tokens: [word], "is no token"),
    ("02_fast_bpe.2", all_counts, "stays the same"),
    ("02_fast_bpe.2", only_new, "which old ones are gone"),
    ("02_fast_bpe.2", upside_down, "what is lost is negative"),
    ("02_fast_bpe.2", only_the_pair, "the changes are"),
    ("02_fast_bpe.3", pop_anything, "the entry that came out was outdated"),
    ("02_fast_bpe.3", pop_above_zero, "the entry that came out was outdated"),
    ("02_fast_bpe.3", pop_the_greatest, "the least goes first"),
    ("02_fast_bpe.3", lambda heap, counts: min(counts, key=counts.get), "fallen to 0"),
    ("02_fast_bpe.3", lambda heap, counts: max(counts), "outdated"),
    ("02_fast_bpe.3", pop_by_search, "pop goes through all of them"),
    ("02_fast_bpe.3", pop_and_keep, "pop goes through all of them"),
    ("02_fast_bpe.3", pop_first_of_equals, "the least goes first"),
    ("02_fast_bpe.3", PopForgets(), "returned again"),
]
