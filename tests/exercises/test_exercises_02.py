"""Planted wrong answers of notebook 02, each with the sentence that it must earn."""

import codecs
import heapq
from collections import Counter
from itertools import pairwise

import pytest

from minillm.exercises import grade
from minillm.exercises.tokenizer import (
    PIECES,
    _falling,
    _from_the_right,
    _joined,
    _learned,
    _leftmost_first,
    _longest_first,
    _merged,
    _overlapping,
    _replaced,
    _rightmost_of_equals,
)


def learn(words, num_merges):
    return _learned(words, num_merges)


def learn_in_lists(words, num_merges):
    """Another right answer: with a heap, and pairs as lists."""
    parts, merges = {w: [bytes([b]) for b in w.encode()] for w in words}, []
    while len(merges) < num_merges:
        counts = Counter()
        for word in words:
            for pair in pairwise(parts[word]):
                counts[pair] += words[word]
        if not counts:
            return merges
        ((_, pair),) = heapq.nlargest(1, [(count, pair) for pair, count in counts.items()])
        merges.append([*pair])
        parts = {w: _replaced(tokens, pair, b"".join(pair)) for w, tokens in parts.items()}
    return merges


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


def in_order(word, ranks):
    """Another right answer: each merge in turn, everywhere."""
    parts = one_by_one(word, ranks)
    for token in sorted(ranks, key=ranks.get):
        for i in range(1, len(token)):
            parts = _replaced(parts, (token[:i], token[i:]), token)
    return parts


RIGHT = {
    "02.1": learn,
    "02.2": PIECES,
    "02.3": _merged,
    "02.4": stream,
    "02.5": compression,
}

ALSO_RIGHT = [("02.1", learn_in_lists), ("02.2", lambda: PIECES), ("02.3", in_order)]

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
    ("02.4", unfinished, "should leave '\ufffd'"),
    ("02.4", lambda tokens: stream(tokens)[:-1], "one string is missing"),
    ("02.5", characters, "'中' is three bytes"),
    ("02.5", upside_down, "turn it over"),
    ("02.5", ratios, "divide the totals"),
    ("02.5", joined_by(""), "encode each text alone"),
    ("02.5", joined_by(" "), "encode each text alone"),
    ("02.5", joined_by("\n"), "encode each text alone"),
    ("02.5", lambda tokenizer, texts: 3.0, "not 3.0000"),
]


@pytest.mark.parametrize(("name", "answer"), ALSO_RIGHT)
def test_other_right_answers_are_accepted(name, answer):
    result = grade(name, answer)
    assert result.status == "correct", result.message
