"""Graders of notebook 02: the training loop, pieces, a counterexample, stream, dear and cheap."""

from __future__ import annotations

import codecs
import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.exercises import as_given, check_table, exercise

if TYPE_CHECKING:
    from minillm.bpe import BPETokenizer

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


def _counted(words: Mapping[str, int], merges: Sequence[Pair]) -> Counter[Pair]:
    """How often each pair occurs after `merges`."""
    counts: Counter[Pair] = Counter()
    for word, count in words.items():
        tokens = [bytes([byte]) for byte in word.encode()]
        for left, right in merges:
            tokens = _replaced(tokens, (left, right), left + right)
        for pair in pairwise(tokens):
            counts[pair] += count
    return counts


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
    "at equal counts a pair's length says nothing: compare the pairs (left, right)": (
        lambda words, n: _learned(words, n, order=lambda pair: (len(pair[0] + pair[1]), pair))
    ),
    "your merge runs from the right: replace the first pair first": (
        lambda words, n: _learned(words, n, replace=_from_the_right)
    ),
    "your merge replaces overlapping pairs: after a replacement go on behind both halves": (
        lambda words, n: _learned(words, n, replace=_overlapping)
    ),
    "no merge crosses from one word to the next": _joined,
    "no merge crosses from one word to another, and each word counts as often as it comes": (
        lambda words, n: _learned({"".join(words): 1}, n)
    ),
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
        counts = _counted(words, want[:first])
        made = f"{got[first]} ({counts[got[first]]} times)" if first < len(got) else "nothing"
        named = f"{want[first]} ({counts[want[first]]} times)"
        return f"{where}: merge number {first + 1} should be {named}, not {made}"
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


def _is_pieces(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(piece, str) for piece in value)


def _other_word(word: str, pieces: list[str]) -> str | None:
    return None if "".join(pieces) == word else "the pieces should join to the word again"


@exercise(
    "02.2",
    "Fill in the pieces of the six words: go through the merges in their order.",
    "merges apply in the order learned, to neighbours only, and to exactly these bytes",
)
def _pieces(answer: Any) -> str | None:
    if (given := as_given(answer, PIECES)) is not None:
        answer = {word: list(x) if isinstance(x, tuple) else x for word, x in given.items()}
    kind = 'a list of strings such as ["m", "e", "t"]'
    return check_table(answer, PIECES, HINTS, _other_word, kind=kind, fits=_is_pieces)


LEARNED = {"bc": 0, "ab": 1, "ca": 2}  # the merges of 02.3 and their order


def _by_rank(word: str) -> list[str]:
    parts = [*word]
    while True:
        known = [
            (LEARNED[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in LEARNED
        ]
        if not known:
            return parts
        i = min(known)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def _leftmost_first(word: str) -> list[str]:
    """What the function of 02.3 gives."""
    parts, i = [*word], 0
    while i < len(parts) - 1:
        if parts[i] + parts[i + 1] in LEARNED:
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
            i = 0
        else:
            i += 1
    return parts


FOUND = {"word": None, "the function gives": _leftmost_first, "right": _by_rank}
WHY = {
    "the function gives": "it joins the first pair that it knows, and begins again at the left",
    "right": "of all merges that are possible, the one learned first goes first",
}


@exercise(
    "02.3",
    "Find a word in which the first pair from the left is not the one that was learned first.",
    "the lowest rank goes first wherever it stands; one word is enough to show a mistake",
)
def _counterexample(answer: Any) -> str | None:
    if (answer := as_given(answer, FOUND)) is None:
        return "the answer is a dictionary with the three keys, as it was given"
    if missing := [key for key, value in answer.items() if value is ...]:
        return f"{missing[0]!r} is not filled in yet"
    word = answer["word"]
    if not isinstance(word, str) or not 1 <= len(word) <= 6 or {*word} - {*"abc"}:
        return f"the word has one to six letters, each a, b or c: not {word!r}"
    if _leftmost_first(word) == _by_rank(word):
        return f"for {word!r} the function is right: both give {_by_rank(word)}"
    given = {key: answer[key] for key in WHY}
    for key, value in given.items():
        if not isinstance(value, list | tuple) or "".join(map(str, value)) != word:
            return f"{key!r}: write a list of pieces that join to {word!r}, not {value!r}"
    wanted = {"the function gives": _leftmost_first(word), "right": _by_rank(word)}
    if [*map(list, given.values())] == [*wanted.values()][::-1]:
        return f"for {word!r} you have the two the wrong way round"
    wrong = [key for key in WHY if list(given[key]) != wanted[key]]
    return f"{word!r}, {wrong[0]}: {WHY[wrong[0]]}" if wrong else None


@exercise(
    "02.4",
    "Write stream(tokens): for each token (bytes) the characters it completes, then what is left.",
    "bytes of an unfinished character wait for the rest, so no reader ever sees half of one",
)
def _stream(answer: Callable[[Iterable[bytes]], Iterable[str]]) -> str | None:
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
    asked: list[bytes] = []

    def arriving() -> Iterator[bytes]:
        for token in (b"a", b"\xe4", b"\xb8\xad", b"b"):
            asked.append(token)
            yield token

    for given, _ in enumerate(answer(arriving()), 1):
        if len(asked) > given:
            return (
                f"you ask for {len(asked)} tokens before you give string number {given}: "
                "a reader waits, so yield each string before the next token"
            )
    return None


@cache
def gpt2_tokens() -> tuple[bytes, ...]:
    """The tokens of GPT-2 in the order of their ids, from the merges in `assets/gpt2`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [bytes([i]) for i in printable + [i for i in range(256) if i not in printable]]
    path = Path(__file__).parents[2] / "assets/gpt2/merges.zlib"
    for left, right in struct.iter_unpack("<HH", zlib.decompress(path.read_bytes())):
        tokens.append(tokens[left] + tokens[right])
    return tuple(tokens)


@cache
def _gpt2() -> BPETokenizer:
    from minillm.bpe import GPT2_PATTERN, BPETokenizer

    return BPETokenizer({token: i for i, token in enumerate(gpt2_tokens())}, GPT2_PATTERN)


# what must hold of the characters and the ids of each text, and the hint if it does not
PRICES: dict[str, tuple[Callable[[int, int], bool], str]] = {
    "dear": (
        lambda characters, ids: ids > characters,
        "it should have more ids than characters: which scripts or signs were seldom read?",
    ),
    "cheap": (
        lambda characters, ids: characters >= 6 * ids,
        "it should have six characters for each id: which long words are one token?",
    ),
}


@exercise(
    "02.5",
    "Write the two texts: which words are one token each, and what is spelled in bytes?",
    "what was frequent where the vocabulary was learned is cheap, and what was not is dear",
)
def _dear_and_cheap(answer: Any) -> str | None:
    if (answer := as_given(answer, PRICES)) is None:
        return "the answer is a dictionary with the keys dear and cheap, as it was given"
    for name, (holds, hint) in PRICES.items():
        text = answer[name]
        if text is ...:
            return f"{name!r} is not filled in yet"
        if not isinstance(text, str):
            return f"{name!r} should be a text, not {type(text).__name__}"
        if len(text) < 30 or len({*text}) < 10:
            found = f"{len(text)} characters, {len({*text})} different ones"
            return f"{name!r} has {found}: at least thirty, and ten different ones"
        ids = len(_gpt2().encode(text))
        if not holds(len(text), ids):
            return f"{name!r} has {len(text)} characters and {ids} ids: {hint}"
        if name == "cheap" and len(set(text.split())) < 5:
            return f"{name!r} repeats itself: at least five different words"
        if name == "cheap" and sum(c.isalpha() or c == " " for c in text) < 6 * ids:
            return f"{name!r} is cheap by its repeated signs: six letters or spaces for each id"
    return None
