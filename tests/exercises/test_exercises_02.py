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
    _overlapping,
    _replaced,
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


FOUND = {"word": "abc", "the function gives": ["ab", "c"], "right": ["a", "bc"]}
TEXTS = {
    "dear": "从前，芦苇丛中住着一只爱睡觉的松鼠，名叫青青。她做梦都想去看星星谷。",
    "cheap": " international organizations understand environmental responsibilities",
}


def one_by_one(tokens):
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield decoder.decode(token)
    yield decoder.decode(b"", final=True)


RIGHT = {
    "02.1": learn,
    "02.2": PIECES,
    "02.3": FOUND,
    "02.4": one_by_one,
    "02.5": TEXTS,
}

ALSO_RIGHT = [("02.1", learn_in_lists), ("02.2", lambda: PIECES), ("02.3", lambda: FOUND)]

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
        "right so far: 5 of 6; lengthen: not ['l',",
    ),
    ("02.2", PIECES | {"The": ["The"]}, "different bytes"),
    ("02.2", PIECES | {"heath": ["hea", "th"]}, "must stand right before he"),
    ("02.2", PIECES | {"henna": ["h", "en", "n", "a"]}, "first h e everywhere"),
    ("02.2", PIECES | {"wheel": ["wheels"]}, "should join to the word"),
    ("02.2", PIECES | {"wheel": "w he e l"}, "write a list of strings"),
    ("02.2", PIECES | {"hehe": ...}, "not filled in yet"),
    ("02.2", ["hen", "n", "a"], "a dictionary with the 6 questions"),
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
    ("02.4", unfinished, "should leave '\ufffd'"),
    ("02.4", lambda tokens: stream(tokens)[:-1], "one string is missing"),
    ("02.4", lambda tokens: iter(stream(tokens)), "before you give string number 1"),
    ("02.5", TEXTS | {"dear": TEXTS["cheap"]}, "more ids than characters"),
    ("02.5", TEXTS | {"cheap": TEXTS["dear"]}, "six characters for each id"),
    ("02.5", TEXTS | {"cheap": "The fox met a bear and laughed at it."}, "six characters for each"),
    ("02.5", TEXTS | {"dear": "狐狸"}, "at least thirty"),
    ("02.5", TEXTS | {"cheap": " responsibility" * 30}, "repeats itself"),
    ("02.5", TEXTS | {"cheap": "=" * 64}, "ten different ones"),
    ("02.5", TEXTS | {"cheap": ...}, "not filled in yet"),
    ("02.5", TEXTS | {"dear": 5}, "should be a text"),
    ("02.5", "狐狸", "with the keys dear and cheap"),
]


@pytest.mark.parametrize(("name", "answer"), ALSO_RIGHT)
def test_other_right_answers_are_accepted(name, answer):
    result = grade(name, answer)
    assert result.status == "correct", result.message
