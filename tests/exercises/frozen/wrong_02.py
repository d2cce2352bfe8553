"""Wrong answers of 02: exercise, answer, words that its message holds."""

import codecs
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
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


def unweighted(words, num_merges):
    return _learned(words, num_merges, weigh=False)


def first_met(words, num_merges):
    return _learned(words, num_merges, order=lambda pair: 0)


def least(words, num_merges):
    return _learned(words, num_merges, order=_falling)


def joined_bytes(words, num_merges):
    return _learned(words, num_merges, order=lambda pair: pair[0] + pair[1])


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


def compression(tokenizer, texts):
    return sum(len(t.encode()) for t in texts) / sum(len(tokenizer.encode(t)) for t in texts)


def ratios(tokenizer, texts):
    return sum(compression(tokenizer, [text]) for text in texts) / len(texts)


def characters(tokenizer, texts):
    return sum(map(len, texts)) / sum(len(tokenizer.encode(t)) for t in texts)


def upside_down(tokenizer, texts):
    return 1 / compression(tokenizer, texts)


def joined_by(between):
    return lambda tokenizer, texts: compression(tokenizer, [between.join(texts)])


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


def one_by_one(word, _):
    return [word[i : i + 1] for i in range(len(word))]


WRONG = [
    ("02.1", unweighted, "weigh its pairs"),
    ("02.1", first_met, "yours is the first that was met"),
    ("02.1", least, "not the least"),
    ("02.1", joined_bytes, "not their joined bytes"),
    ("02.1", never_stops, "no pair is left after 1: stop there"),
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
    ("02.3", _longest_first, "the longest token that fits"),
    ("02.3", _leftmost_first, "the first pair that is known"),
    ("02.3", _rightmost_of_equals, "at equal ranks the leftmost"),
    ("02.3", lambda word, ranks: _merged(word, ranks, steps=1), "you stop too early"),
    ("02.3", lambda word, ranks: _merged(word, ranks, sign=-1), "you take the highest rank"),
    ("02.3", one_by_one, "nothing was joined in b'bca'"),
    ("02.3", lambda word, ranks: [word[1:]], "should join to it again"),
    ("02.3", lambda word, ranks: [word], "should become"),
    ("02.4", alone, "decoded alone"),
    ("02.4", all_at_the_end, "not in time"),
    ("02.4", waits_for_ever, "can never become a character become � at once"),
    ("02.4", unfinished, "should leave '�'"),
    ("02.4", lambda tokens: stream(tokens)[:-1], "one string is missing"),
    ("02.5", characters, "'中' is three bytes"),
    ("02.5", upside_down, "turn it over"),
    ("02.5", ratios, "divide the totals"),
    ("02.5", joined_by(""), "encode each text alone"),
    ("02.5", joined_by(" "), "encode each text alone"),
    ("02.5", joined_by("\n"), "encode each text alone"),
    ("02.5", lambda tokenizer, texts: 3.0, "not 3.0000"),
]
