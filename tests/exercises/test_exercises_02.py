"""Planted wrong answers of notebook 02, each with the sentence that it must earn."""

import codecs

from minillm.exercises.tokenizer import (
    _leftmost_first,
    _longest_first,
    _merged,
    _overlapping,
    _replaced,
)


def in_place(ids, pair, new):
    ids[:] = _replaced(ids, pair, new)
    return ids


def from_the_right(ids, pair, new):
    return _replaced(ids[::-1], pair[::-1], new)[::-1]


def first_only(ids, pair, new):
    for i in range(len(ids) - 1):
        if (ids[i], ids[i + 1]) == pair:
            return [*ids[:i], new, *ids[i + 2 :]]
    return ids[:]


def compression(tokenizer, texts):
    return sum(len(t.encode()) for t in texts) / sum(len(tokenizer.encode(t)) for t in texts)


def ratios(tokenizer, texts):
    return sum(compression(tokenizer, [text]) for text in texts) / len(texts)


def characters(tokenizer, texts):
    return sum(map(len, texts)) / sum(len(tokenizer.encode(t)) for t in texts)


def upside_down(tokenizer, texts):
    return 1 / compression(tokenizer, texts)


def stream(tokens):
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [*map(decoder.decode, tokens), decoder.decode(b"", final=True)]


def alone(tokens):
    return [*(token.decode("utf-8", "replace") for token in tokens), ""]


def all_at_the_end(tokens):
    return [*("" for _ in tokens), b"".join(tokens).decode("utf-8", "replace")]


def unfinished(tokens):
    return [*stream(tokens)[:-1], ""]


def one_by_one(word, _):
    return [word[i : i + 1] for i in range(len(word))]


RIGHT = {
    "02.1": _replaced,
    "02.2": compression,
    "02.3": _merged,
    "02.4": stream,
}

WRONG = [
    ("02.1", _overlapping, "replaces overlapping pairs in 'aaaa'"),
    ("02.1", from_the_right, "runs from the right in 'aaa'"),
    ("02.1", in_place, "changes the list it was given"),
    ("02.1", lambda ids, pair, new: list(ids), "misses the pair 'aa' in 'aaaa'"),
    ("02.1", first_only, "should give [256, 256]"),
    ("02.2", characters, "'中' is three bytes"),
    ("02.2", upside_down, "turn it over"),
    ("02.2", ratios, "divide the totals"),
    ("02.2", lambda tokenizer, texts: 3.0, "not 3.0000"),
    ("02.3", _longest_first, "the longest token that fits"),
    ("02.3", _leftmost_first, "the first pair that is known"),
    ("02.3", one_by_one, "nothing was joined in b'abc'"),
    ("02.3", lambda word, ranks: [word[1:]], "should join to it again"),
    ("02.3", lambda word, ranks: [word], "should become"),
    ("02.4", alone, "decoded alone"),
    ("02.4", all_at_the_end, "not in time"),
    ("02.4", unfinished, "should leave '\ufffd'"),
    ("02.4", lambda tokens: stream(tokens)[:-1], "one string is missing"),
]
