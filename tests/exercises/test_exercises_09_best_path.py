"""Each grader of the best path accepts a right answer and says what is wrong with wrong ones."""

import functools
import math


def segment_with_bigrams(text, probs, *, step=lambda score, p: score + math.log(p), one=0.0):
    words = {word for _, word in probs}
    best = [{} for _ in range(len(text) + 1)]  # place -> last word -> (score, its word before)
    best[0] = {"<s>": (one, None)}
    for end in range(1, len(text) + 1):
        for word in sorted(words):
            start = end - len(word)
            if start < 0 or text[start:end] != word:
                continue
            ways = [
                (step(score, probs[last, word]), last)
                for last, (score, _) in best[start].items()
                if (last, word) in probs
            ]
            if ways:
                best[end][word] = max(ways)
    cut, end = [], len(text)
    word = max(best[end], key=lambda last: best[end][last][0])
    while word != "<s>":
        cut.append(word)
        word, end = best[end][word][1], end - len(word)
    return cut[::-1]


def products(text, probs):
    return segment_with_bigrams(text, probs, step=lambda score, p: score * p, one=1.0)


def longest_first(text, probs):
    words, cut = {word for _, word in probs}, []
    while text:
        cut.append(max((w for w in words if text.startswith(w)), key=len))
        text = text[len(cut[-1]) :]
    return cut


def best_per_place(text, probs):
    """Viterbi that keeps one path a place, as if the last word did not matter."""
    best = [(0.0, [])] + [(-math.inf, [])] * len(text)
    for end in range(1, len(text) + 1):
        for word in {word for _, word in probs}:
            start = end - len(word)
            if start >= 0 and text[start:end] == word:
                score, cut = best[start]
                p = probs.get(((["<s>", *cut])[-1], word), 0)
                if p and score + math.log(p) > best[end][0]:
                    best[end] = score + math.log(p), [*cut, word]
    return best[-1][1]


def count_cuts(text, words, *, start=1):
    ways = [start] + [0] * len(text)
    for end in range(1, len(text) + 1):
        for word in words:
            if end >= len(word) and text[end - len(word) : end] == word:
                ways[end] += ways[end - len(word)]
    return ways[-1]


def by_recursion(text, words):
    fits = [word for word in words if text.startswith(word)]
    return sum(by_recursion(text[len(word) :], words) for word in fits) if text else 1


def empty_has_none(text, words):
    return count_cuts(text, words) if text else 0


def can_be_cut(text, words):
    return min(count_cuts(text, words), 1)


def deep(text, probs):
    """Right on short texts: a recursion with a memo."""

    @functools.cache
    def best_from(start, previous):
        if start == len(text):
            return 0.0, []
        ends = range(start + 1, len(text) + 1)
        pairs = [(probs.get((previous, text[start:end])), end) for end in ends]
        found = [(p, end, *best_from(end, text[start:end])) for p, end in pairs if p]
        options = [(math.log(p) + v, [text[start:e], *w]) for p, e, v, w in found]
        return max(options, default=(-math.inf, []))

    return best_from(0, "<s>")[1]


RIGHT = {
    "09_best_path.1": segment_with_bigrams,
    "09_best_path.2": count_cuts,
}
WRONG = [
    ("09_best_path.1", lambda text, probs: [text], "not in the table"),
    ("09_best_path.1", lambda text, probs: [text[:-1]], "do not give back"),
    ("09_best_path.1", best_per_place, "for every last word"),
    ("09_best_path.1", lambda text, probs: list(text), "for every last word"),
    ("09_best_path.1", longest_first, "is less probable than"),
    ("09_best_path.1", products, "a product of 2000 probabilities"),
    ("09_best_path.1", deep, "too deep for a recursion"),
    ("09_best_path.1", lambda text, probs: " ".join(text), "a list of words"),
    ("09_best_path.2", by_recursion, "from left to right"),
    ("09_best_path.2", empty_has_none, "no words at all"),
    ("09_best_path.2", can_be_cut, "has 5 cuts, you return 1"),
    ("09_best_path.2", lambda text, words: float(count_cuts(text, words) % 10**300), "digits"),
]
