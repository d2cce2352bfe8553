"""Each grader of notebook 01 accepts a right answer and says what is wrong with wrong ones."""

import math


def perplexity(log_probs):
    return math.exp(-sum(log_probs) / len(log_probs))


def add_k_prob(token, context, pairs, vocabulary, k):
    seen = sum(first == context for first, _ in pairs)
    return (pairs.count((context, token)) + k) / (seen + k * len(vocabulary))


def continuation_prob(token, pairs):
    different = set(pairs)
    return sum(second == token for _, second in different) / len(different)


def segment_with_bigrams(text, probs):
    words = {word for _, word in probs}
    best = [
        {} for _ in range(len(text) + 1)
    ]  # place -> last word -> (log-probability, its word before)
    best[0] = {"<s>": (0.0, None)}
    for end in range(1, len(text) + 1):
        for word in words:
            start = end - len(word)
            if start < 0 or text[start:end] != word:
                continue
            ways = [
                (score + math.log(probs[last, word]), last)
                for last, (score, _) in best[start].items()
                if (last, word) in probs
            ]
            if ways:
                best[end][word] = max(ways)
    cut, end = [], len(text)
    word = max(best[end], key=best[end].get)
    while word != "<s>":
        cut.append(word)
        word, end = best[end][word][1], end - len(word)
    return cut[::-1]


RIGHT = {
    "01.1": perplexity,
    "01.2": add_k_prob,
    "01.3": continuation_prob,
    "01.4": segment_with_bigrams,
}


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


def unsmoothed(token, context, pairs, vocabulary, k):
    return pairs.count((context, token)) / sum(first == context for first, _ in pairs)


def k_added_once(token, context, pairs, vocabulary, k):
    return (pairs.count((context, token)) + k) / (sum(first == context for first, _ in pairs) + k)


def always_one(token, context, pairs, vocabulary, k):
    return add_k_prob(token, context, pairs, vocabulary, 1)


def occurrences(token, pairs):
    return sum(second == token for _, second in pairs) / len(pairs)


def half_different(token, pairs):
    return sum(second == token for _, second in set(pairs)) / len(pairs)


WRONG = [
    ("01.1", lambda x: -sum(x) / len(x), "e to that power"),
    ("01.1", lambda x: math.exp(min(-sum(x), 700)), "forgot to average"),
    ("01.1", lambda x: 2 ** (-sum(x) / len(x)), "the base is e"),
    ("01.1", lambda x: math.exp(sum(x) / len(x)), "never below 1"),
    ("01.2", unsmoothed, "p(Francisco|a) with k = 1.0 is 0.1250"),
    ("01.2", k_added_once, "not to 1"),
    ("01.2", always_one, "k = 0.25"),
    ("01.3", occurrences, "how often"),
    ("01.3", half_different, "different pairs, not of all"),
    ("01.3", lambda token, pairs: 0.3, "the share is"),
    ("01.4", lambda text, probs: [text], "not in the table"),
    ("01.4", lambda text, probs: [text[:-1]], "do not give back"),
    ("01.4", best_per_place, "for every last word"),
    ("01.4", lambda text, probs: list(text), "for every last word"),
]
