"""Planted wrong answers of the page 02_fast_bpe, each with the sentence that it must earn."""

from collections import Counter
from itertools import pairwise

from minillm.exercises.fast_bpe import _changes, _ranks
from minillm.exercises.tokenizer import _longest_first, _merged, _replaced


def fewest(word, tokens):
    best = [[]]
    for end in range(1, len(word) + 1):
        starts = [s for s in range(end) if word[s:end] in tokens]
        start = min(starts, key=lambda s: len(best[s]))
        best.append([*best[start], word[start:end]])
    return best[-1]


def one_by_one(word, _):
    return [word[i : i + 1] for i in range(len(word))]


def ranked(word, _):
    return _merged(word, _ranks())


def all_counts(tokens, pair, new):
    after, before = Counter(pairwise(_replaced(tokens, pair, new))), Counter(pairwise(tokens))
    after.subtract(before)
    return dict(after)


def only_new(tokens, pair, new):
    return {p: change for p, change in _changes(tokens, pair, new).items() if new in p}


def upside_down(tokens, pair, new):
    return {p: -change for p, change in _changes(tokens, pair, new).items()}


def only_the_pair(tokens, pair, new):
    return {p: change for p, change in _changes(tokens, pair, new).items() if p == pair}


RIGHT = {"02_fast_bpe.1": fewest, "02_fast_bpe.2": _changes}

WRONG = [
    ("02_fast_bpe.1", _longest_first, "may cost more later"),
    ("02_fast_bpe.1", ranked, "what merging by rank finds"),
    ("02_fast_bpe.1", one_by_one, "takes 2 tokens"),
    ("02_fast_bpe.1", lambda word, tokens: [word], "is no token"),
    ("02_fast_bpe.2", all_counts, "stays the same"),
    ("02_fast_bpe.2", only_new, "which old ones are gone"),
    ("02_fast_bpe.2", upside_down, "what is lost is negative"),
    ("02_fast_bpe.2", only_the_pair, "the changes are"),
]
