"""Graders of notebook 02: replace a pair, compression, merge by rank, stream."""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from minillm.exercises import exercise

if TYPE_CHECKING:
    from minillm.tokenizer.bpe import BPETokenizer


def _replaced(ids: Sequence[int], pair: tuple[int, int], new: int) -> list[int]:
    out: list[int] = []
    i = 0
    while i < len(ids):
        found = tuple(ids[i : i + 2]) == pair
        out.append(new if found else ids[i])
        i += 2 if found else 1
    return out


def _overlapping(ids: Sequence[int], pair: tuple[int, int], new: int) -> list[int]:
    found = [i for i in range(len(ids) - 1) if (ids[i], ids[i + 1]) == pair]
    gone = {i + 1 for i in found}
    return [new if i in found else ids[i] for i in range(len(ids)) if i in found or i not in gone]


@exercise(
    "02.1",
    "Write replace_pair(ids, pair, new): the list with each pair replaced, from left to right.",
)
def _replace_pair(answer: Callable[[list[int], tuple[int, int], int], list[int]]) -> str | None:
    rng = random.Random(2)
    texts = ["aaaa", "aaa", "ab", "abab", "xabyab", "ba", "", "a", "aabb", "abaabba"]
    texts += ["".join(rng.choices("abx", k=12)) for _ in range(50)]
    for text in texts:
        for spelled in ("aa", "ab"):
            ids, pair = [ord(c) for c in text], (ord(spelled[0]), ord(spelled[1]))
            given = list(ids)
            want, got = _replaced(ids, pair, 256), list(answer(given, pair, 256))
            if given != ids:
                return f"your function changes the list it was given ({text!r}): build a new one"
            if got == want:
                continue
            if got == _overlapping(ids, pair, 256):
                return f"your merge replaces overlapping pairs in {text!r}"
            if got == _replaced(ids[::-1], pair[::-1], 256)[::-1]:
                return f"your merge runs from the right in {text!r}: the first pair comes first"
            if got == ids:
                return f"your merge misses the pair {spelled!r} in {text!r}"
            return f"{spelled!r} in {text!r} should give {want}, not {got}"
    return None


@exercise(
    "02.2",
    "Write bytes_per_token(tokenizer, texts): the bytes of all texts over the number of tokens.",
)
def _bytes_per_token(answer: Callable[[BPETokenizer, list[str]], float]) -> str | None:
    from minillm.tokenizer.bpe import BPETokenizer

    tokenizer = BPETokenizer.train("the cat sat on the mat, 中文中文 " * 4, 290)
    texts = ["the cat", "a mat on the mat on the mat on the mat", "中文 and 𠀀"]
    counts = [len(tokenizer.encode(text)) for text in texts]
    sizes = [len(text.encode()) for text in texts]
    want, got = sum(sizes) / sum(counts), float(answer(tokenizer, texts))
    wrong = {
        sum(map(len, texts)) / sum(counts): "that counts characters: '中' is three bytes",
        sum(counts) / sum(sizes): "that is tokens per byte: turn it over",
        sum(s / n for s, n in zip(sizes, counts, strict=True)) / 3: (
            "that averages the ratio of each text, so short texts weigh too much: divide the totals"
        ),
    }
    for value, message in wrong.items():
        if abs(got - value) < 1e-9:
            return message
    return None if abs(got - want) < 1e-9 else f"I expected {want:.4f}, not {got:.4f}"


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


def _ranks() -> dict[bytes, int]:
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [
        b"bc",
        b"ab",
        b"abc",
        b"cd",
        b"aa",
        b"bcd",
        b"aaaa",
        b"abcdef",
        b"de",
        b"def",
        b"cdef",
    ]
    return {token: rank for rank, token in enumerate(tokens)}


@exercise(
    "02.3",
    "Write encode_word(word, ranks): the list of tokens (bytes), joining the lowest rank first.",
)
def _encode_word(answer: Callable[[bytes, dict[bytes, int]], list[bytes]]) -> str | None:
    rng, ranks = random.Random(3), _ranks()
    words = [b"abc", b"abcd", b"aaa", b"aaaaa", b"abcdef", b"a", b"xyz"]
    words += ["".join(rng.choices("aabcdef", k=10)).encode() for _ in range(100)]
    words.append(b"cdefaab")  # here the two usual mistakes differ
    for word in words:
        want, got = _merged(word, ranks), list(answer(word, dict(ranks)))
        if got == _longest_first(word, ranks) == _leftmost_first(word, ranks):
            continue  # another word will tell which mistake it is
        if got == want:
            continue
        if b"".join(part if isinstance(part, bytes) else b"" for part in got) != word:
            return f"the tokens of {word!r} should join to it again, not {got}"
        if got == [word[i : i + 1] for i in range(len(word))]:
            return f"nothing was joined in {word!r}: the answer is {want}"
        if got == _longest_first(word, ranks):
            return f"for {word!r} you take the longest token that fits: join the lowest rank first"
        if got == _leftmost_first(word, ranks):
            return f"for {word!r} you join the first pair that is known: take the lowest rank"
        return f"{word!r} should become {want}, not {got}"
    return None


@exercise(
    "02.4",
    "Write stream(tokens): for each token (bytes) the characters it completes, then what is left.",
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
        if "".join(got) == "".join(want):
            return f"{tokens}: all is there but not in time: show a character once it is whole"
        if got[:-1] == want[:-1]:
            return f"{tokens}: an unfinished character at the end should leave {want[-1]!r}"
        return f"{tokens} should give {want}, not {got}"
    return None
