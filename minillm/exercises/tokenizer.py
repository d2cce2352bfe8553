"""Graders of notebook 02: the training loop, pieces, merge by rank, stream, compression."""

from __future__ import annotations

import codecs
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from minillm.exercises import as_given, exercise

if TYPE_CHECKING:
    from minillm.tokenizer.bpe import BPETokenizer

Pair = tuple[bytes, bytes]


def _replaced(ids: Sequence[Any], pair: tuple[Any, Any], new: Any) -> list[Any]:
    out: list[Any] = []
    i = 0
    while i < len(ids):
        found = tuple(ids[i : i + 2]) == pair
        out.append(new if found else ids[i])
        i += 2 if found else 1
    return out


def _from_the_right(ids: Sequence[Any], pair: tuple[Any, Any], new: Any) -> list[Any]:
    return _replaced(ids[::-1], pair[::-1], new)[::-1]


def _overlapping(ids: Sequence[Any], pair: tuple[Any, Any], new: Any) -> list[Any]:
    found = [i for i in range(len(ids) - 1) if (ids[i], ids[i + 1]) == pair]
    gone = {i + 1 for i in found}
    return [new if i in found else ids[i] for i in range(len(ids)) if i in found or i not in gone]


def _learned(
    words: Mapping[str, int],
    num_merges: int,
    *,
    weigh: bool = True,
    order: Callable[[Pair], Any] = lambda pair: pair,
    replace: Callable[[Sequence[Any], Pair, bytes], list[Any]] = _replaced,
) -> list[Pair]:
    """The merges of `words`; the options are the usual mistakes."""
    parts = [([bytes([byte]) for byte in word.encode()], count) for word, count in words.items()]
    merges: list[Pair] = []
    for _ in range(num_merges):
        counts: Counter[Pair] = Counter()
        for tokens, count in parts:
            for pair in pairwise(tokens):
                counts[pair] += count if weigh else 1
        if not counts:
            break
        greatest = max(counts.values())
        tied = [pair for pair in counts if counts[pair] == greatest]
        best = max(tied, key=order)
        merges.append(best)
        parts = [(replace(tokens, best, best[0] + best[1]), count) for tokens, count in parts]
    return merges


def _joined(words: Mapping[str, int], num_merges: int) -> list[Pair]:
    """Merges that cross from word to word."""
    return _learned({"".join(word * count for word, count in words.items()): 1}, num_merges)


MISTAKES: dict[str, Callable[[Mapping[str, int], int], list[Pair]]] = {
    "a word that occurs three times counts three times: weigh its pairs by `words[word]`": (
        lambda words, n: _learned(words, n, weigh=False)
    ),
    "among equally frequent pairs the greatest wins; yours is the first that was met": (
        lambda words, n: _learned(words, n, order=lambda pair: 0)
    ),
    "among equally frequent pairs the greatest wins, not the least": (
        lambda words, n: _learned(words, n, order=_falling)
    ),
    "at equal counts compare the pairs (left, right), not their joined bytes": (
        lambda words, n: _learned(words, n, order=lambda pair: pair[0] + pair[1])
    ),
    "your merge runs from the right: replace the first pair first": (
        lambda words, n: _learned(words, n, replace=_from_the_right)
    ),
    "your merge replaces overlapping pairs: after a replacement go on behind both halves": (
        lambda words, n: _learned(words, n, replace=_overlapping)
    ),
    "no merge crosses from one word to the next": _joined,
}


def _falling(pair: Pair) -> list[list[int]]:
    return [[*(-byte for byte in token), 1] for token in pair]


@exercise(
    "02.1",
    "Write learn(words, num_merges): count the pairs of all words, merge one pair, begin again.",
    "all that training does is count, pick, replace; the list of merges is the tokenizer",
)
def _learn(answer: Callable[[dict[str, int], int], Any]) -> str | None:
    rng = random.Random(2)
    cases: list[tuple[dict[str, int], int]] = [
        ({"hens": 2, " met": 1, " the": 4}, 4),
        ({"ab": 1, "cb": 1, "cd": 1}, 1),
        ({"xy": 3, "ab": 1, "cab": 1}, 1),
        ({"ab": 1}, 5),
        ({"aaab": 2, "aab": 1}, 3),
        ({"aaaac": 3, "aaac": 2, "ca": 1}, 3),
        ({"\u4e2d\u4e2d": 2, "\u6587": 1}, 3),
        ({"ab": 1, "ba": 1, "bab": 1}, 3),
    ]
    for _ in range(30):
        drawn = ["".join(rng.choices("abc", k=rng.randint(1, 6))) for _ in range(6)]
        cases.append(({word: rng.randint(1, 4) for word in drawn}, 5))
    last = ""
    for words, num_merges in cases:
        given = dict(words)
        where, want = f"learn({words}, {num_merges})", _learned(words, num_merges)
        try:
            got = answer(given, num_merges)
        except (ValueError, IndexError) as error:
            if len(want) < num_merges:  # max() of nothing
                return f"{where}: no pair is left after {len(want)}: stop there ({error})"
            raise
        if given != words:
            return f"{where}: your function changes the words it was given: copy them first"
        if isinstance(got, dict):
            return "return the merges as a list of pairs, in the order learned"
        got = [tuple(pair) if isinstance(pair, tuple | list) else pair for pair in got]
        if got == want:
            continue
        if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in got):
            return f"each merge is a pair of tokens (left, right), not {got[0]!r}"
        if any(not isinstance(token, bytes) for pair in got for token in pair):
            return f"tokens are bytes, such as b'he', not {got[0][0]!r}: begin with word.encode()"
        if got[: len(want)] == want:
            return f"{where}: merges asked for or possible: {len(want)}; yours: {len(got)}"
        found = [name for name, learned in MISTAKES.items() if got == learned(words, num_merges)]
        if len(found) > 1:
            last = f"{where}: {found[0]}"
            continue  # another case will tell which mistake it is
        if found:
            return f"{where}: {found[0]}"
        if len(got) < len(want) and got == want[: len(got)]:
            return f"{where}: merges possible: {len(want)}; yours: {len(got)}"
        first = next(i for i in range(len(want)) if got[i : i + 1] != want[i : i + 1])
        made = got[first] if first < len(got) else "nothing"
        return f"{where}: merge number {first + 1} should be {want[first]}, not {made}"
    return last or None


PIECES = {
    "henna": ["hen", "n", "a"],
    "lengthen": ["l", "e", "n", "g", "the", "n"],
    "wheel": ["w", "he", "e", "l"],
    "heath": ["he", "a", "t", "h"],
    "hehe": ["he", "he"],
    "The": ["T", "he"],
}
HINTS = {
    "henna": "first h e everywhere, and only then he n",
    "lengthen": "t he was learned before he n, so it goes first; what is left for he n?",
    "wheel": "w h e e l becomes w he e l; is another merge possible now?",
    "heath": "a merge joins neighbours: for `the` the t must stand right before he",
    "hehe": "no merge joins he with he",
    "The": "T and t are different bytes",
}


@exercise(
    "02.2",
    "Fill in the pieces of the six words: go through the merges in their order.",
    "merges apply in the order learned, to neighbours only, and to exactly these bytes",
)
def _pieces(answer: Any) -> str | None:
    if (answer := as_given(answer, PIECES)) is None:
        return "the answer is a dictionary with the six words as keys, as it was given"
    for word, value in answer.items():
        if value is ...:
            return f"{word!r} is not filled in yet"
        if not isinstance(value, list | tuple) or not all(isinstance(p, str) for p in value):
            return f'{word!r}: write a list of strings such as ["m", "e", "t"], not {value!r}'
        if "".join(value) != word:
            return f"{word!r}: the pieces should join to the word again, not {list(value)}"
    wrong = [word for word, pieces in PIECES.items() if list(answer[word]) != pieces]
    if not wrong:
        return None
    done = len(PIECES) - len(wrong)
    return f"right so far: {done} of 6; look at {wrong[0]!r} again: {HINTS[wrong[0]]}"


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


def _rightmost_of_equals(word: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    parts = [word[i : i + 1] for i in range(len(word))]
    while True:
        unions = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        known = [(ranks[union], -i) for i, union in enumerate(unions) if union in ranks]
        if not known:
            return parts
        i = -min(known)[1]
        parts[i : i + 2] = [unions[i]]


def _longest_first(word: bytes, tokens: Collection[bytes]) -> list[bytes]:
    parts, i = [], 0
    while i < len(word):
        end = next(e for e in range(len(word), i, -1) if e == i + 1 or word[i:e] in tokens)
        parts.append(word[i:end])
        i = end
    return parts


def _leftmost_first(word: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    parts = [word[i : i + 1] for i in range(len(word))]
    i = 0
    while i < len(parts) - 1:
        if parts[i] + parts[i + 1] in ranks:
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
            i = 0
        else:
            i += 1
    return parts


@cache
def _trained() -> tuple[bytes, ...]:
    """Tokens in the order learned, from words on which the usual mistakes differ."""
    words = {"bc": 5, "bb": 7, "ca": 5, "cabab": 5, "ba": 4, "bcab": 5}
    return tuple(left + right for left, right in _learned(words, 8))


SEPARATING = [b"bcaba", b"bcabba"]  # on these the two usual mistakes differ


def _ranks() -> dict[bytes, int]:
    tokens = [*(bytes([byte]) for byte in range(256)), *_trained()]
    return {token: rank for rank, token in enumerate(tokens)}


@exercise(
    "02.3",
    "Write encode_word(word, ranks): of all merges that are possible now, which was learned first?",
    "the lowest rank goes first wherever it stands; the place only decides between equals",
)
def _encode_word(answer: Callable[[bytes, dict[bytes, int]], list[bytes]]) -> str | None:
    rng, ranks = random.Random(3), _ranks()
    words = [b"bca", b"bcab", b"cabb", b"bbb", b"cabab", b"a", b"xyz", b""]
    words += ["".join(rng.choices("abcc", k=7)).encode() for _ in range(200)]
    words += SEPARATING
    last = ""
    for word in words:
        want, got = _merged(word, ranks), list(answer(word, dict(ranks)))
        if got == want:
            continue
        mistakes = {
            "you take the longest token that fits: join the lowest rank first": (
                _longest_first(word, ranks)
            ),
            "you join the first pair that is known: of all possible ones take the lowest rank": (
                _leftmost_first(word, ranks)
            ),
            "at equal ranks the leftmost pair goes first": _rightmost_of_equals(word, ranks),
            "you stop too early: join until no union of neighbours is a token": (
                _merged(word, ranks, steps=1)
            ),
            "you take the highest rank: the lowest was learned first": (
                _merged(word, ranks, sign=-1)
            ),
        }
        found = [message for message, tokens in mistakes.items() if got == tokens]
        if len(found) > 1:
            last = f"for {word!r} {found[0]}"
            continue  # another word will tell which mistake it is
        if b"".join(part if isinstance(part, bytes) else b"" for part in got) != word:
            return f"the tokens of {word!r} should join to it again, not {got}"
        if got == [word[i : i + 1] for i in range(len(word))]:
            return f"nothing was joined in {word!r}: the answer is {want}"
        if found:
            return f"for {word!r} {found[0]}"
        return f"{word!r} should become {want}, not {got}"
    return last or None


@exercise(
    "02.4",
    "Write stream(tokens): for each token (bytes) the characters it completes, then what is left.",
    "bytes of an unfinished character wait for the rest, so no reader ever sees half of one",
)
def _stream(answer: Callable[[list[bytes]], Iterable[str]]) -> str | None:
    rng = random.Random(4)
    texts = ["hello", "中文", "a🐈b", "né", "", "𠀀中é!"]
    cases = [[text.encode()[i : i + 1] for i in range(len(text.encode()))] for text in texts]
    cases += [[b"\xe4\xb8", b"\xad\xe6", b"\x96\x87"], [b"ok", b"\xe4\xb8"], [b"\xff", b"a"]]
    pieces = [b"a", b"\xe4", b"\xb8\xad", b"\xf0\x9f", b"\x90", b"\x88!", b"\x80", b" "]
    cases += [rng.choices(pieces, k=6) for _ in range(50)]
    for tokens in cases:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        want = [decoder.decode(token) for token in tokens] + [decoder.decode(b"", final=True)]
        got = list(answer(list(tokens)))
        if got == want:
            continue
        if len(got) == len(want) - 1:
            return f"{tokens}: one string is missing: give what is left at the end, even if empty"
        if got[:-1] == [token.decode("utf-8", "replace") for token in tokens]:
            return f"{tokens}: each token is decoded alone, so a character in two tokens is lost"
        if "".join(got) == "".join(want) and "".join(got[:-1]).count("�") < "".join(
            want[:-1]
        ).count("�"):
            return f"{tokens}: bytes that can never become a character become � at once"
        if "".join(got) == "".join(want):
            return f"{tokens}: all is there but not in time: show a character once it is whole"
        if got[:-1] == want[:-1]:
            return f"{tokens}: an unfinished character at the end should leave {want[-1]!r}"
        return f"{tokens} should give {want}, not {got}"
    return None


@exercise(
    "02.5",
    "Write bytes_per_token(tokenizer, texts): a share of two totals, each text encoded alone.",
    "divide totals: then each text counts as much as it is long",
)
def _bytes_per_token(answer: Callable[[BPETokenizer, list[str]], float]) -> str | None:
    from minillm.tokenizer.bpe import BPETokenizer

    tokenizer = BPETokenizer.train("the cat sat on the mat, a cathedral, 中文中文 " * 4, 300)
    texts = ["the cat", "hedral mat on the mat on the mat on the mat", "中文 and 𠀀"]
    counts = [len(tokenizer.encode(text)) for text in texts]
    sizes = [len(text.encode()) for text in texts]
    want, got = sum(sizes) / sum(counts), float(answer(tokenizer, list(texts)))
    if abs(got - want) < 1e-9:
        return None
    joined = "encode each text alone: joined, the end of one merges with the beginning of the next"
    wrong = {
        sum(map(len, texts)) / sum(counts): "that counts characters: '中' is three bytes",
        sum(counts) / sum(sizes): "that is tokens per byte: turn it over",
        sum(s / n for s, n in zip(sizes, counts, strict=True)) / 3: (
            "that averages the ratio of each text, so short texts weigh too much: divide the totals"
        ),
    }
    for between in ("", " ", "\n"):
        num_tokens = len(tokenizer.encode(between.join(texts)))
        wrong[sum(sizes) / num_tokens] = joined
        wrong[len(between.join(texts).encode()) / num_tokens] = joined
    for value, message in wrong.items():
        if abs(got - value) < 1e-9:
            return message
    return f"I expected {want:.4f}, not {got:.4f}"
