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


RIGHT = {
    "01.1": perplexity,
    "01.2": add_k_prob,
    "01.3": continuation_prob,
}


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
]
