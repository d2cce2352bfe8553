"""Wrong answers of 02: exercise, answer, words that its message holds."""

import codecs
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

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


def _falling(pair: Pair) -> list[list[int]]:
    return [[*(-byte for byte in token), 1] for token in pair]


PIECES = {
    "henna": ["hen", "n", "a"],
    "lengthen": ["l", "e", "n", "g", "the", "n"],
    "wheel": ["w", "he", "e", "l"],
    "heath": ["he", "a", "t", "h"],
    "hehe": ["he", "he"],
    "The": ["T", "he"],
}


def unweighted(words, num_merges):
    return _learned(words, num_merges, weigh=False)


def first_met(words, num_merges):
    return _learned(words, num_merges, order=lambda pair: 0)


def least(words, num_merges):
    return _learned(words, num_merges, order=_falling)


def joined_bytes(words, num_merges):
    return _learned(words, num_merges, order=lambda pair: pair[0] + pair[1])


def longest(words, num_merges):
    return _learned(words, num_merges, order=lambda pair: (len(pair[0]) + len(pair[1]), pair))


def joined_once(words, num_merges):
    return _learned({"".join(words): 1}, num_merges)


def never_stops(words, num_merges):
    merges = _learned(words, num_merges)
    return merges if len(merges) == num_merges else max([])


def from_the_right(words, num_merges):
    return _learned(words, num_merges, replace=_from_the_right)


def overlapping(words, num_merges):
    return _learned(words, num_merges, replace=_overlapping)


def changes_the_words(words, num_merges):
    merges = _learned(words, num_merges)
    words.clear()
    return merges


def strings(words, num_merges):
    return [(a.decode("latin-1"), b.decode("latin-1")) for a, b in _learned(words, num_merges)]


def first_token_only(words, num_merges):
    return [left + right for left, right in _learned(words, num_merges)]


def goes_on(words, num_merges):
    merges = _learned(words, num_merges)
    return merges + merges[-1:] * (num_merges - len(merges))


def never_merges(words, num_merges):
    return _learned(words, 1) * num_merges


def counted_once(words, num_merges):
    counts = Counter()
    for word, count in words.items():
        for left, right in pairwise(word.encode()):
            counts[bytes([left]), bytes([right])] += count
    return sorted(counts, key=lambda pair: (counts[pair], pair), reverse=True)[:num_merges]


def stream(tokens):
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [*map(decoder.decode, tokens), decoder.decode(b"", final=True)]


def alone(tokens):
    return [*(token.decode("utf-8", "replace") for token in tokens), ""]


def all_at_the_end(tokens):
    return [*("" for _ in tokens), b"".join(tokens).decode("utf-8", "replace")]


def waits_for_ever(tokens):
    """Shows bytes only when all that waits is UTF-8."""
    shown, waiting = [], b""
    for token in tokens:
        waiting += token
        try:
            shown.append(waiting.decode())
            waiting = b""
        except UnicodeDecodeError as error:
            shown.append(waiting[: error.start].decode())
            waiting = waiting[error.start :]
    return [*shown, waiting.decode("utf-8", "replace")]


def unfinished(tokens):
    return [*stream(tokens)[:-1], ""]


# 02.3 asks for a counterexample and 02.5 for two texts since a vocabulary is looked at: before,
# both asked for a cell of the page again. 02.4 wants each string before the next token.
FOUND = {"word": "abc", "the function gives": ["ab", "c"], "right": ["a", "bc"]}
TEXTS = {
    "dear": "从前，芦苇丛中住着一只爱睡觉的松鼠，名叫青青。她做梦都想去看星星谷。",
    "cheap": " international organizations understand environmental responsibilities",
}

WRONG = [
    ("02.1", unweighted, "weigh its pairs"),
    ("02.1", first_met, "yours is the first that was met"),
    ("02.1", least, "not the least"),
    ("02.1", joined_bytes, "not their joined bytes"),
    ("02.1", never_stops, "no pair is left after 1: stop there"),
    ("02.1", longest, "a pair's length says nothing"),
    ("02.1", joined_once, "each word counts as often as it comes"),
    ("02.1", from_the_right, "runs from the right"),
    ("02.1", overlapping, "replaces overlapping pairs"),
    ("02.1", _joined, "no merge crosses"),
    ("02.1", changes_the_words, "changes the words it was given"),
    ("02.1", strings, "tokens are bytes"),
    ("02.1", first_token_only, "a pair of tokens"),
    ("02.1", goes_on, "possible: 1; yours: 5"),
    ("02.1", never_merges, "merge number 2 should be"),
    ("02.1", counted_once, "merge number 2 should be"),
    ("02.1", lambda words, n: {pair: 0 for pair in _learned(words, n)}, "as a list of pairs"),
    ("02.1", lambda words, n: [], "yours: 0"),
    (
        "02.2",
        PIECES | {"lengthen": ["l", "e", "n", "g", "t", "hen"]},
        "right so far: 5 of 6; look at 'lengthen'",
    ),
    ("02.2", PIECES | {"The": ["The"]}, "different bytes"),
    ("02.2", PIECES | {"heath": ["hea", "th"]}, "must stand right before he"),
    ("02.2", PIECES | {"henna": ["h", "en", "n", "a"]}, "first h e everywhere"),
    ("02.2", PIECES | {"wheel": ["wheels"]}, "should join to the word"),
    ("02.2", PIECES | {"wheel": "w he e l"}, "write a list of strings"),
    ("02.2", PIECES | {"hehe": ...}, "not filled in yet"),
    ("02.2", ["hen", "n", "a"], "a dictionary with the six words"),
    ("02.3", FOUND | {"word": "bca"}, "the function is right: both give"),
    ("02.3", FOUND | {"word": "abcd"}, "each a, b or c"),
    ("02.3", FOUND | {"word": ""}, "one to six letters"),
    ("02.3", FOUND | {"right": ...}, "not filled in yet"),
    ("02.3", FOUND | {"right": ["a", "b", "c"]}, "the one learned first goes first"),
    ("02.3", FOUND | {"the function gives": ["a", "b", "c"]}, "it joins the first pair"),
    ("02.3", FOUND | {"right": "a bc"}, "a list of pieces"),
    ("02.3", {**FOUND, "the function gives": ["a", "bc"], "right": ["ab", "c"]}, "wrong way round"),
    ("02.3", ["abc"], "a dictionary with the three keys"),
    ("02.4", alone, "decoded alone"),
    ("02.4", all_at_the_end, "not in time"),
    ("02.4", waits_for_ever, "can never become a character become � at once"),
    ("02.4", unfinished, "should leave '�'"),
    ("02.4", lambda tokens: stream(tokens)[:-1], "one string is missing"),
    ("02.4", lambda tokens: iter(stream(tokens)), "before you give string number 1"),
    ("02.5", TEXTS | {"dear": TEXTS["cheap"]}, "more ids than characters"),
    ("02.5", TEXTS | {"cheap": TEXTS["dear"]}, "six characters for each id"),
    ("02.5", TEXTS | {"cheap": "The fox met a bear and laughed at it."}, "six characters for each"),
    ("02.5", TEXTS | {"dear": "狐狸"}, "at least thirty"),
    ("02.5", TEXTS | {"cheap": "=" * 64}, "ten different ones"),
    ("02.5", TEXTS | {"cheap": ...}, "not filled in yet"),
    ("02.5", TEXTS | {"dear": 5}, "should be a text"),
    ("02.5", "狐狸", "with the keys dear and cheap"),
]
