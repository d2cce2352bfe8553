"""Learning byte-pair merges: words are counted, and a merge touches only the places it changes.

Explained in notebook 02. A merge costs as much as it occurs in distinct words.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

from minillm.pretokenizer import PreTokenizer, well_formed

__all__ = ["Ties", "byte_alphabet", "count_words", "learn_merges"]

Ties = Literal["greatest", "lowest_ids"]


def count_words(
    texts: Iterable[str], pre_tokenizer: PreTokenizer, special_tokens: Collection[str] = ()
) -> Counter[str]:
    """How often each word occurs; memory grows with distinct words, not with text."""
    if special_tokens:
        borders = re.compile(
            "|".join(sorted(map(re.escape, special_tokens), key=len, reverse=True))
        )
        texts = (part for text in texts for part in borders.split(text))
    words: Counter[str] = Counter()
    heads: Counter[str] = Counter()  # chunks that begin a text
    tails: Counter[str] = Counter()  # chunks that follow a space
    seen = 0
    for text in texts:
        for block in pre_tokenizer.blocks([well_formed(text)]):
            head, *tail = pre_tokenizer.chunks(block)
            heads[head] += 1
            tails.update(tail)
            seen += len(block)
            if seen > 1 << 24:
                _add_words(words, heads, tails, pre_tokenizer)
                seen = 0
    _add_words(words, heads, tails, pre_tokenizer)
    return words


def _add_words(words: Counter, heads: Counter, tails: Counter, pre_tokenizer: PreTokenizer) -> None:
    for space, chunks in (("", heads), (" ", tails)):
        for chunk, count in chunks.items():
            for word in pre_tokenizer.words(space + chunk):
                words[word] += count
        chunks.clear()


def byte_alphabet(ties: Ties) -> list[int]:
    """The bytes in the order of their ids: by value, or as in GPT-2's table of stand-ins."""
    if ties == "greatest":
        return list(range(256))
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printable + [byte for byte in range(256) if byte not in printable]


class _Symbols:
    """All distinct words in one row of symbols, with the places of each pair of neighbours."""

    def __init__(self, words: Mapping[str, int], alphabet: list[int], size: int) -> None:
        id_of = bytes(alphabet.index(byte) for byte in range(256))
        self.symbols, self.weights = [-1], [0]  # -1 stands between words
        for word, count in words.items():
            ids = word.encode().translate(id_of)
            self.symbols += [*ids, -1]
            self.weights += [count] * len(ids) + [0]
        self.size = size
        self.after = list(range(1, len(self.symbols) + 1))
        self.before = list(range(-1, len(self.symbols) - 1))
        self.counts: dict[int, int] = defaultdict(int)
        self.places: dict[int, list[int]] = defaultdict(list)
        for i, (left, right) in enumerate(zip(self.symbols, self.symbols[1:], strict=False)):
            if left >= 0 and right >= 0:
                self.counts[left * size + right] += self.weights[i]
                self.places[left * size + right].append(i)

    def merge(self, pair: int, new: int) -> set[int]:
        """Replace `pair` by `new` wherever it stands; returns the pairs that came to be."""
        symbols, weights, after, before = self.symbols, self.weights, self.after, self.before
        counts, places, size = self.counts, self.places, self.size
        left, right = divmod(pair, size)
        found = places.pop(pair)
        if left == right:
            found.sort()  # "aaa" is merged from the left
        fresh = set()
        for i in found:
            j = after[i]
            if symbols[i] != left or symbols[j] != right:
                continue  # an earlier merge took one of the two
            weight, previous, following = weights[i], before[i], after[j]
            symbols[i], symbols[j] = new, -2
            after[i], before[following] = following, i
            neighbour = symbols[previous]
            if neighbour >= 0:
                counts[neighbour * size + left] -= weight
                key = neighbour * size + new
                counts[key] += weight
                places[key].append(previous)
                fresh.add(key)
            neighbour = symbols[following]
            if neighbour >= 0:
                counts[right * size + neighbour] -= weight
                key = new * size + neighbour
                counts[key] += weight
                places[key].append(i)
                fresh.add(key)
        counts.pop(pair)
        return fresh


def learn_merges(
    words: Mapping[str, int], num_merges: int, *, ties: Ties = "greatest", progress: bool = False
) -> list[tuple[bytes, bytes]]:
    """The merges in the order they are learnt; fewer if the words run out of pairs.

    Raises: ValueError if `ties` is not one of the two rules.
    """
    if ties not in ("greatest", "lowest_ids"):
        raise ValueError(f"ties must be 'greatest' or 'lowest_ids', not {ties!r}")
    tokens = [bytes([byte]) for byte in byte_alphabet(ties)]
    size = len(tokens) + num_merges
    row = _Symbols(words, byte_alphabet(ties), size)
    order = [_reversed(token) for token in tokens] if ties == "greatest" else None
    queue = _Queue(
        row.counts, lambda pair: order[pair // size] + order[pair % size] if order else pair
    )
    merges: list[tuple[bytes, bytes]] = []
    steps: Iterable[int] = range(num_merges)
    if progress:
        from tqdm import tqdm

        steps = tqdm(steps, desc="merges")
    for _ in steps:
        pair = queue.pop()
        if pair is None:
            break
        left, right = tokens[pair // size], tokens[pair % size]
        merges.append((left, right))
        tokens.append(left + right)
        if order:
            order.append(_reversed(left + right))
        queue.push(row.merge(pair, len(tokens) - 1))
    return merges


def _reversed(token: bytes) -> str:
    """A string that sorts the other way round: the greatest token first, and "ab" after "abc"."""
    return token.translate(_COMPLEMENT).decode("latin-1") + "\u0100"


_COMPLEMENT = bytes(range(255, -1, -1))


class _Queue:
    """Pairs by count, the greatest first. Counts only fall: a pair is moved when it is met."""

    def __init__(self, counts: dict[int, int], order: Callable[[int], str | int]) -> None:
        self.counts, self.order = counts, order
        self.waiting: dict[int, list[int]] = {}
        self.levels: list[int] = []
        self.level = -1
        self.heap: list[tuple[str | int, int]] = []
        self.push(counts)

    def push(self, pairs: Iterable[int]) -> None:
        """Put pairs on the list of their count."""
        for pair in pairs:
            count = self.counts[pair]
            if count in self.waiting:
                self.waiting[count].append(pair)
            elif count > 0:
                self.waiting[count] = [pair]
                heapq.heappush(self.levels, -count)

    def pop(self) -> int | None:
        """The first pair by count, then by the rule for ties; None if there is none left."""
        while True:
            if self.waiting.get(self.level):  # pairs that came to be with the count at hand
                for pair in self.waiting[self.level]:
                    heapq.heappush(self.heap, (self.order(pair), pair))
                self.waiting[self.level].clear()
            while self.heap:
                pair = heapq.heappop(self.heap)[1]
                if self.counts[pair] == self.level:
                    return pair
                self.push([pair])
            if not self.levels:
                return None
            self.waiting.pop(self.level, None)
            self.level = -heapq.heappop(self.levels)
