"""Planted wrong answers of the page 02_fast_bpe, each with the sentence that it must earn."""

import heapq
from collections import Counter
from itertools import pairwise

import pytest

from minillm.exercises import grade
from minillm.exercises.fast_bpe import _changes, _longest_first, _merged, _popped, _ranks
from minillm.exercises.tokenizer import _replaced


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


def pop_anything(heap, counts):
    return heapq.heappop(heap)[1]


def pop_above_zero(heap, counts):
    while True:
        _, pair = heapq.heappop(heap)
        if counts[pair] > 0:
            return pair


def pop_and_keep(heap, counts):
    return min(entry for entry in heap if -entry[0] == counts[entry[1]])[1]


def pop_the_greatest(heap, counts):
    return max(counts, key=lambda pair: (counts[pair], pair))


class PopForgets:
    """Takes the first entry that was ever right, again and again."""

    def __call__(self, heap, counts):
        if getattr(self, "heap", None) is not heap:
            self.heap, self.pair = heap, pop_by_search(heap, counts)
        return self.pair


def pop_by_search(heap, counts):
    """The right pairs, found without the heap."""
    return min(counts, key=lambda pair: (-counts[pair], pair))


def pop_and_push_back(heap, counts):
    """Another right answer: an outdated entry returns with its new count."""
    while True:
        minus, pair = heapq.heappop(heap)
        if -minus == counts[pair]:
            return pair
        heapq.heappush(heap, (-counts[pair], pair))


def pop_after_a_look(heap, counts):
    """Another right answer: look at the first entry, throw it away if it is outdated."""
    while -heap[0][0] != counts[heap[0][1]]:
        heapq.heappop(heap)
    return heapq.heappop(heap)[1]


def pop_first_of_equals(heap, counts):
    return max(counts, key=counts.get)


RIGHT = {"02_fast_bpe.1": fewest, "02_fast_bpe.2": _changes, "02_fast_bpe.3": _popped}

ALSO_RIGHT = [("02_fast_bpe.3", pop_and_push_back), ("02_fast_bpe.3", pop_after_a_look)]

WRONG = [
    ("02_fast_bpe.1", _longest_first, "may cost more later"),
    ("02_fast_bpe.1", ranked, "what merging by rank finds"),
    ("02_fast_bpe.1", one_by_one, "takes 2 tokens"),
    ("02_fast_bpe.1", lambda word, tokens: [word], "is no token"),
    ("02_fast_bpe.2", all_counts, "stays the same"),
    ("02_fast_bpe.2", only_new, "which old ones are gone"),
    ("02_fast_bpe.2", upside_down, "what is lost is negative"),
    ("02_fast_bpe.2", only_the_pair, "the changes are"),
    ("02_fast_bpe.3", pop_anything, "the entry that came out was outdated"),
    ("02_fast_bpe.3", pop_above_zero, "the entry that came out was outdated"),
    ("02_fast_bpe.3", pop_the_greatest, "the least goes first"),
    ("02_fast_bpe.3", lambda heap, counts: min(counts, key=counts.get), "fallen to 0"),
    ("02_fast_bpe.3", lambda heap, counts: max(counts), "outdated"),
    ("02_fast_bpe.3", pop_by_search, "pop goes through all of them"),
    ("02_fast_bpe.3", pop_and_keep, "pop goes through all of them"),
    ("02_fast_bpe.3", pop_first_of_equals, "the least goes first"),
    ("02_fast_bpe.3", PopForgets(), "returned again"),
]


@pytest.mark.parametrize(("name", "answer"), ALSO_RIGHT)
def test_other_right_answers_are_accepted(name, answer):
    result = grade(name, answer)
    assert result.status == "correct", result.message
