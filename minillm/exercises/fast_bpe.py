"""Graders of the page 02_fast_bpe: the fewest tokens, what a merge changes, a lazy heap."""

from __future__ import annotations

import heapq
import random
from collections import Counter, UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from itertools import pairwise

from minillm.exercises import exercise
from minillm.exercises.tokenizer import _replaced

TOKENS = b"bc ab abc cd aa bcd aaaa abcdef de def cdef".split()


def _merged(word: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    parts = [word[i : i + 1] for i in range(len(word))]
    while True:
        unions = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        known = [(ranks[union], i) for i, union in enumerate(unions) if union in ranks]
        if not known:
            return parts
        i = min(known)[1]
        parts[i : i + 2] = [unions[i]]


def _longest_first(word: bytes, tokens: Collection[bytes]) -> list[bytes]:
    parts, i = [], 0
    while i < len(word):
        end = next(e for e in range(len(word), i, -1) if e == i + 1 or word[i:e] in tokens)
        parts.append(word[i:end])
        i = end
    return parts


def _ranks() -> dict[bytes, int]:
    tokens = [*(bytes([byte]) for byte in range(256)), *TOKENS]
    return {token: rank for rank, token in enumerate(tokens)}


def _fewest(word: bytes, tokens: Collection[bytes]) -> int:
    best = [0] + [len(word)] * len(word)
    for end in range(1, len(word) + 1):
        best[end] = min(best[s] + 1 for s in range(end) if word[s:end] in tokens)
    return best[-1]


@exercise(
    "02_fast_bpe.1",
    "Write fewest_tokens(word, vocabulary): a shortest list of tokens (bytes) that joins to word.",
    "a shortest list ends in some token, and before it stands a shortest list of fewer bytes",
)
def _fewest_tokens(answer: Callable[[bytes, set[bytes]], list[bytes]]) -> str | None:
    rng, ranks = random.Random(5), _ranks()
    words = [b"abcd", b"abcdef", b"bcdef", b"aaaaaa", b"", b"x"]
    words += ["".join(rng.choices("aabcdef", k=14)).encode() for _ in range(100)]
    words.append(b"aabcdef")
    for word in words:
        want, got = _fewest(word, ranks), list(answer(word, set(ranks)))
        if b"".join(got) != word:
            return f"the tokens of {word!r} should join to it again, not {got}"
        if not set(got) <= set(ranks):
            return f"{sorted(set(got) - set(ranks))[0]!r} in your answer for {word!r} is no token"
        if len(got) == want or got == _longest_first(word, ranks) == _merged(word, ranks):
            continue  # if it is one of the two usual mistakes, the last word will tell which
        if got == _longest_first(word, ranks):
            return f"{word!r} takes {want} tokens: the longest first ({got}) may cost more later"
        if got == _merged(word, ranks):
            return f"{word!r} takes {want} tokens: {got} is what merging by rank finds"
        return f"{word!r} takes {want} tokens, your list {got} has {len(got)}"
    return None


def _changes(tokens: Sequence[int], pair: tuple[int, int], new: int) -> dict[tuple[int, int], int]:
    after, before = Counter(pairwise(_replaced(tokens, pair, new))), Counter(pairwise(tokens))
    after.subtract(before)
    return {pair: change for pair, change in after.items() if change}


@exercise(
    "02_fast_bpe.2",
    "Write changes(tokens, pair, new): each pair whose count a merge changes, and by how much.",
    "only pairs that touch the merged places change, so a trainer need not count again",
)
def _pair_changes(
    answer: Callable[[list[int], tuple[int, int], int], Mapping[tuple[int, int], int]],
) -> str | None:
    rng = random.Random(6)
    texts = ["xaby", "abab", "aaaa", "aaa", "xaaab", "xyz", "", "ab", "ababab", "xabxab"]
    texts += ["".join(rng.choices("abx", k=10)) for _ in range(60)]
    for text in texts:
        for pair in ((97, 98), (97, 97)):
            tokens = [ord(c) for c in text]
            want, got = _changes(tokens, pair, 256), dict(answer(list(tokens), pair, 256))
            if got == want:
                continue
            spelled = f"{text!r}, merging {chr(pair[0]) + chr(pair[1])!r}"
            if {p: change for p, change in got.items() if change} == want:
                return f"{spelled}: leave out the pairs whose count stays the same"
            if got == {p: change for p, change in want.items() if 256 in p}:
                return f"{spelled}: the new pairs are right; which old ones are gone?"
            if got == {p: -change for p, change in want.items()}:
                return f"{spelled}: the signs are the wrong way round: what is lost is negative"
            return f"{spelled}: the changes are {want}, not {got}"
    return None


Entry = tuple[int, str]


class _Counts(UserDict[str, int]):
    """Counts that notice when somebody goes through all of them."""

    searched = False

    def __iter__(self) -> Iterator[str]:
        self.searched = True
        return super().__iter__()


class _Heap(list[Entry]):
    """A heap that notices when somebody goes through all of it."""

    searched = False

    def __iter__(self) -> Iterator[Entry]:
        self.searched = True
        return super().__iter__()


def _popped(heap: list[Entry], counts: Mapping[str, int]) -> str:
    while True:
        minus, pair = heapq.heappop(heap)
        if -minus == counts.get(pair, 0) > 0:
            return pair


@exercise(
    "02_fast_bpe.3",
    "Write pop(heap, counts): how can you see that an entry of the heap is outdated?",
    "outdated entries may stay in a heap, if each is compared with the count when it comes out",
)
def _pop(answer: Callable[[list[Entry], MutableMapping[str, int]], str]) -> str | None:
    rng, searched = random.Random(7), False
    for _ in range(30):
        counts = {pair: rng.randint(1, 6) for pair in ("ab", "bc", "cd", "de")}
        counts = dict(reversed(counts.items()))  # so that the least of equals does not come first
        heap = [(-count, pair) for pair, count in counts.items()]
        for _ in range(6):
            pair = rng.choice(sorted(counts))
            counts[pair] = max(0, counts[pair] - rng.randint(0, 3))
            heap.append((-counts[pair], pair))
        heapq.heapify(heap)
        theirs, ours = _Heap(heap), list(heap)
        merged: set[str] = set()
        left = {pair: count for pair, count in counts.items() if count > 0}
        for _ in range(len(left)):
            given = _Counts(counts)
            want, got = _popped(ours, left), answer(theirs, given)
            searched |= given.searched
            if counts.get(got) == 0 and got not in merged:
                return f"{got!r} is returned, although its count has fallen to 0"
            if got != want:
                if got not in left:
                    return f"{got!r} is returned again: it has been merged, its count is 0"
                if left[got] == left[want]:
                    return f"{got!r} and {want!r} have the same count: the least goes first"
                return (
                    f"{got!r} is returned, which has the count {left[got]}; {want!r} has "
                    f"{left[want]}: the entry that came out was outdated"
                )
            del left[got]
            merged.add(got)
            counts[got] = 0
        searched |= theirs.searched
    if searched:
        return "the pairs are right, but pop goes through all of them, which a heap makes needless"
    return None
