"""Graders of the best path: segmentation with bigrams, and counting the paths of a lattice."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from minillm.exercises import exercise

Pairs = dict[tuple[str, str], float]


def _cuts(text: str, previous: str, table: Pairs) -> Iterator[list[str]]:
    if not text:
        yield []
    for size in range(1, len(text) + 1):
        if (previous, text[:size]) in table:
            for rest in _cuts(text[size:], text[:size], table):
                yield [text[:size], *rest]


def _log_prob(words: list[str], table: Pairs) -> float:
    return sum(math.log(table[pair]) for pair in zip(["<s>", *words], words, strict=False))


def _long_text() -> tuple[str, Pairs, float]:
    """2,000 letters, so that products are 0, and the log-probability of the best cut."""
    rng = random.Random(7)
    words = ["a", "b", "ab", "ba"]
    table = {(x, y): rng.uniform(0.05, 0.6) for x in ["<s>", *words] for y in words}
    text = "".join(rng.choice("ab") for _ in range(2000))
    best: list[dict[str, float]] = [{"<s>": 0.0}]
    for end in range(1, len(text) + 1):
        ending = [w for w in words if text[max(0, end - len(w)) : end] == w]
        best.append(
            {
                w: max(s + math.log(table[last, w]) for last, s in best[end - len(w)].items())
                for w in ending
                if best[end - len(w)]
            }
        )
    return text, table, max(best[-1].values())


@exercise(
    "09_best_path.1",
    "what must you know about a path to a place, besides its probability, to continue it?",
    "what the future asks about belongs in the state: here the place and the last word",
)
def segment(answer: Callable[[str, Pairs], list[str]]) -> str | None:
    rng = random.Random(4)
    words = ["a", "b", "ab", "ba", "aab", "bb"]
    for _ in range(40):
        table = {(x, y): rng.uniform(0.01, 1) for x in ["<s>", *words] for y in words}
        table = {
            pair: p for pair, p in table.items() if rng.random() < 0.9 or pair[1] in ("a", "b")
        }
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 8)))
        best = max(_cuts(text, "<s>", table), key=lambda cut: _log_prob(cut, table))
        found = answer(text, dict(table))
        if isinstance(found, str):
            return f"return a list of words, not the text {found!r}"
        found = list(found)
        if "".join(found) != text:
            return f"your words {found} do not give back {text!r}"
        if not all(pair in table for pair in zip(["<s>", *found], found, strict=False)):
            return f"your cut {found} of {text!r} uses a pair that is not in the table"
        if not math.isclose(_log_prob(found, table), _log_prob(best, table), abs_tol=1e-9):
            return (
                f"your cut {found} of {text!r} is less probable than {best}: "
                "keep the best path for every last word, not only for every place"
            )
    text, table, wanted = _long_text()
    try:
        found = list(answer(text, dict(table)))
    except RecursionError:
        return "a text of 2000 letters is too deep for a recursion: go from left to right"
    if "".join(found) != text or not all(
        pair in table for pair in zip(["<s>", *found], found, strict=False)
    ):
        return "on a text of 2000 letters your words do not give it back, or use a forbidden pair"
    if not math.isclose(value := _log_prob(found, table), wanted, abs_tol=1e-6):
        return (
            f"short texts are right; on one of 2000 letters your cut has log-probability "
            f"{value:.1f}, the best {wanted:.1f}: what becomes of a product of 2000 probabilities?"
        )
    ones = {(x, y): 0.5 for x in ("<s>", "a", "aa") for y in ("a", "aa")}
    if len(answer("a" * 3000, ones)) != 1500:
        return "a text of 3000 letters a, all pairs 1/2, should give 1500 words 'aa'"
    return None


@exercise(
    "09_best_path.2",
    "how many cuts reach a place, if you know how many reach each place before it?",
    "with sums instead of maxima the same loop counts paths, or adds their probabilities",
)
def count_cuts(answer: Callable[[str, set[str]], int]) -> str | None:
    cases = [
        ("aaaa", {"a", "aa"}, 5),
        ("ab", {"a"}, 0),
        ("", {"a"}, 1),
        ("theyouthevent", {"the", "they", "you", "youth", "out", "he", "event", "vent"}, 3),
        ("abab", {"ab", "a", "b", "aba", "bab"}, 6),
    ]
    for text, words, wanted in cases:
        try:
            found = answer(text, set(words))
        except RecursionError:
            return f"your answer never ends on {text!r} with the words {sorted(words)}"
        if found != wanted:
            if not text:
                return "the empty text has one cut: no words at all"
            return f"{text!r} with the words {sorted(words)} has {wanted} cuts, you return {found}"
    try:
        found = answer("a" * 3000, {"a", "aa"})
    except RecursionError:
        return "a text of 3000 letters is too deep for a recursion: go from left to right"
    before, now = 1, 1
    for _ in range(2999):
        before, now = now, before + now
    if isinstance(found, float) or found != now:
        return "of 3000 letters the count is wrong: it has 627 digits, use whole numbers only"
    return None
