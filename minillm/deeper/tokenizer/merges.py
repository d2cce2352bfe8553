"""Learning byte-pair merges: words are counted, and a merge touches only the places it changes.

Explained in notebooks/deeper/02_fast_bpe. A merge costs as much as it occurs in distinct words.
"""

# Built from notebooks/deeper/02_fast_bpe.ipynb: edit there, then make build.

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from minillm.bpe import GPT4_PATTERN, BPETokenizer, PreTokenizer, make_pre_tokenizer, well_formed
from minillm.deeper.tokenizer.bulk import blocks, chunks_of
from minillm.support.checks.texts import check_learning, check_texts, texts_of
from minillm.support.checks.words import quoted

__all__ = [
    "PORTION",
    "Ties",
    "byte_alphabet",
    "bytes_to_unicode",
    "count_words",
    "learn_merges",
    "train_tokenizer",
]

Ties = Literal["greatest", "lowest_ids"]

PORTION = 1 << 24  # characters after which chunks are split into words and forgotten


def count_words(
    texts: Iterable[str], pre_tokenizer: PreTokenizer, special_tokens: Collection[str] = ()
) -> Counter[str]:
    """How often each word occurs; memory grows with distinct words, not with text.

    Chunks are counted first and split into words once each; special tokens separate texts.
    """
    check_texts(texts)
    if special_tokens:
        spellings = sorted(map(re.escape, special_tokens), key=len, reverse=True)
        separators = re.compile("|".join(spellings))
        texts = (part for text in texts for part in separators.split(text))
    words: Counter[str] = Counter()
    chunks: Counter[str] = Counter()
    seen = 0
    for text in texts:
        for block in blocks(pre_tokenizer, [well_formed(text)]):
            head, *tail = chunks_of(pre_tokenizer, block)
            words.update(pre_tokenizer.words(head))
            chunks.update(tail)
            seen += len(block)
            if seen > PORTION:
                _add_words(words, chunks, pre_tokenizer)
                seen = 0
    _add_words(words, chunks, pre_tokenizer)
    return words


def _add_words(words: Counter[str], chunks: Counter[str], pre_tokenizer: PreTokenizer) -> None:
    """Split the chunks into words, all chunks of one count at once, and forget them."""
    by_count = defaultdict(list)
    for chunk, count in chunks.items():
        by_count[count].append(chunk)
    chunks.clear()
    for count, group in by_count.items():
        for word, times in Counter(pre_tokenizer.words(" " + " ".join(group))).items():
            words[word] += count * times


_INSIDE = -1


class _Row:
    """All distinct words in one row, a place for each byte, and where each pair of tokens begins.

    A token writes its id on its first and on its last place; places inside it hold `_INSIDE`.
    A pair is one number, left * size + right.
    """

    def __init__(self, words: Mapping[str, int], alphabet: list[int], size: int) -> None:
        self.size, self.border = size, size - 1  # the border's id stands between words
        self.lengths = [1] * 256  # of tokens, in bytes
        id_of = bytes(alphabet.index(byte) for byte in range(256))
        self.ids, self.weights = [self.border], [0]
        for word, count in words.items():
            ids = word.encode().translate(id_of)
            self.ids += ids
            self.ids.append(self.border)
            self.weights += [count] * len(ids)
            self.weights.append(0)
        self.places: dict[int, list[int]] = defaultdict(list)
        for i, (left, right) in enumerate(pairwise(self.ids)):
            self.places[left * size + right].append(i)
        for pair in list(self.places):
            if self.border in divmod(pair, size):
                del self.places[pair]
        self.counts = {pair: self._weight(at) for pair, at in self.places.items()}

    def _weight(self, places: list[int]) -> int:
        return sum(map(self.weights.__getitem__, places))

    def _replace(
        self, places: list[int], left: int, right: int, new: int
    ) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Write `new`; returns its neighbours before and after, each with the places of `new`."""
        ids, step = self.ids, self.lengths[left]
        length = step + self.lengths[right]
        self.lengths.append(length)
        before, after = defaultdict(list), defaultdict(list)
        if left == right:
            places.sort()  # "aaa" is merged from the left
        for i in places:
            if ids[i] == left and ids[i + step] == right:  # else an earlier merge took a half
                end = i + length
                ids[i + step - 1] = ids[i + step] = _INSIDE
                ids[i] = ids[end - 1] = new
                before[ids[i - 1]].append(i)
                after[ids[end]].append(i)
        before.pop(self.border, None)
        after.pop(self.border, None)
        return before, after

    def merge(self, pair: int, new: int) -> list[int]:
        """Replace `pair` by `new` wherever it stands; returns the pairs that came to be."""
        counts, places, size = self.counts, self.places, self.size
        left, right = divmod(pair, size)
        before, after = self._replace(places.pop(pair), left, right, new)
        fresh = []
        for neighbour, at in after.items():
            weight = self._weight(at)
            counts[right * size + neighbour] -= weight
            fresh.append(key := new * size + neighbour)
            counts[key], places[key] = weight, at
        for neighbour, at in before.items():
            weight = self._weight(at)
            counts[neighbour * size + left] -= weight
            fresh.append(key := neighbour * size + new)
            counts[key] = counts.get(key, 0) + weight
            back = self.lengths[neighbour]
            places[key] += [i - back for i in at]
        del counts[pair]
        return fresh


class _Queue:
    """Pairs by count, the greatest first. Counts only fall: a pair is moved when it is met."""

    def __init__(self, counts: dict[int, int], order: Callable[[int], str | int]) -> None:
        self.counts, self.order = counts, order  # the least by `order` wins a tie
        self.waiting: dict[int, list[int]] = {}  # count -> pairs
        self.levels: list[int] = []  # a heap of minus the counts
        self.level = 0
        self.heap: list[tuple[str | int, int]] = []  # pairs whose count is `level`, by `order`
        self.push(counts)

    def push(self, pairs: Iterable[int]) -> None:
        """Put each pair on the list of its count."""
        for pair in pairs:
            count = self.counts[pair]
            if count == self.level:
                heapq.heappush(self.heap, (self.order(pair), pair))
            elif count in self.waiting:
                self.waiting[count].append(pair)
            elif count > 0:
                self.waiting[count] = [pair]
                heapq.heappush(self.levels, -count)

    def pop(self) -> int | None:
        """The first pair by count, then by the rule for ties; None if there is none left."""
        while True:
            while self.heap:
                pair = heapq.heappop(self.heap)[1]
                if self.counts[pair] == self.level:
                    return pair
                self.push([pair])
            if not self.levels:
                return None
            self.level = -heapq.heappop(self.levels)
            self.push(self.waiting.pop(self.level))


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte, in the order of its ids.

    Printable bytes come first and stand for themselves; the others are letters from U+0100 on.
    Source: GPT-2's `encoder.py`.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    stand_ins = [*map(chr, printable), *(chr(256 + i) for i in range(len(rest)))]
    return dict(zip(printable + rest, stand_ins, strict=True))


def byte_alphabet(ties: Ties) -> list[int]:
    """The bytes in the order of their ids: by value, or as in GPT-2's table of stand-ins.

    Raises: ValueError if `ties` is neither "greatest" nor "lowest_ids".
    """
    if ties not in ("greatest", "lowest_ids"):
        raise ValueError(f"ties must be 'greatest' or 'lowest_ids', not {quoted(ties)}")
    return list(range(256)) if ties == "greatest" else list(bytes_to_unicode())


_COMPLEMENT = bytes(range(255, -1, -1))


def _falling(token: bytes) -> str:
    """A string that sorts the other way round: the greatest token first, "abc" before "ab"."""
    return token.translate(_COMPLEMENT).decode("latin-1") + "\u0100"


def learn_merges(
    words: Mapping[str, int], num_merges: int, *, ties: Ties = "greatest", progress: bool = False
) -> list[tuple[bytes, bytes]]:
    """The merges in the order they are learned; fewer if the words run out of pairs.

    Raises: ValueError if `ties` is not one of the two rules.
    """
    alphabet = byte_alphabet(ties)
    tokens = [bytes([byte]) for byte in alphabet]
    size = len(tokens) + num_merges + 1
    falling = [_falling(token) for token in tokens] if ties == "greatest" else None
    row = _Row(words, alphabet, size)
    queue = _Queue(row.counts, lambda p: falling[p // size] + falling[p % size] if falling else p)
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
        if falling:
            falling.append(_falling(left + right))
        queue.push(row.merge(pair, len(tokens) - 1))
    return merges


def train_tokenizer(
    kind: type[BPETokenizer],
    texts: str | Iterable[str],
    vocab_size: int,
    *,
    pattern: str | Sequence[str] = GPT4_PATTERN,
    special_tokens: Collection[str] = (),
    add_bos: bool = False,
    ties: Ties = "greatest",
    progress: bool = False,
) -> BPETokenizer:
    """Learn `vocab_size` ids: bytes, merges (fewer if the texts run out), special tokens.

    `add_bos` is for a model that learns rows which begin with the begin token: so will prompts.
    Raises: ValueError if there is no room, for names that are not different, a file's name.
    """
    check_learning(texts, vocab_size, special_tokens, add_bos)
    words = count_words(texts_of(texts), make_pre_tokenizer(pattern), special_tokens)
    room = vocab_size - 256 - len(special_tokens)
    merges = learn_merges(words, room, ties=ties, progress=progress)
    tokens = [bytes([byte]) for byte in byte_alphabet(ties)] + [a + b for a, b in merges]
    special = {name: len(tokens) + i for i, name in enumerate(special_tokens)}
    return kind({t: i for i, t in enumerate(tokens)}, pattern, special, add_bos=add_bos)
