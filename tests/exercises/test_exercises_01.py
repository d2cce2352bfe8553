"""Each grader of notebook 01 accepts a right answer and says what is wrong with wrong ones."""

import math
from functools import cache
from itertools import pairwise

from minillm.ngram import NGramModel
from minillm.stories.language import StoryLanguage


def entropy_and_floor(language):
    bits = -sum(p * math.log2(p) for p in language.values() if p > 0)
    return bits, bits / sum(p * len(text.encode()) for text, p in language.items())


def by_characters(language):
    return entropy_and_floor(language)[0], -sum(
        p * math.log2(p) for p in language.values() if p > 0
    ) / sum(p * len(text) for text, p in language.items())


def mean_of_ratios(language):
    said = {text: p for text, p in language.items() if p}
    ratios = (p * math.log2(1 / p) / len(text.encode()) for text, p in said.items())
    return entropy_and_floor(language)[0], sum(ratios)


def unweighted(language):
    surprises = [-math.log2(p) for p in language.values() if p]
    bits = sum(surprises) / len(surprises)
    return bits, bits / sum(p * len(text.encode()) for text, p in language.items())


def all_bytes(language):
    bits, _ = entropy_and_floor(language)
    return bits, bits / sum(len(text.encode()) for text in language)


def mean_bytes(language):
    bits, _ = entropy_and_floor(language)
    return bits, bits / (sum(len(text.encode()) for text in language) / len(language))


def with_end(language):
    bits, floor = entropy_and_floor(language)
    return bits, bits / (bits / floor + 1) if floor else 0.0


def no_zero(language):
    return -sum(p * math.log2(p) for p in language.values()), entropy_and_floor(language)[1]


def in_nats(language):
    return tuple(x * math.log(2) for x in entropy_and_floor(language))


def add_k_prob(token, context, pairs, vocabulary, k):
    seen = sum(first == context for first, _ in pairs)
    return (pairs.count((context, token)) + k) / (seen + k * len(vocabulary))


def unsmoothed(token, context, pairs, vocabulary, k):
    return pairs.count((context, token)) / sum(first == context for first, _ in pairs)


def without_k(token, context, pairs, vocabulary, k):
    total = sum(first == context for first, _ in pairs)
    return pairs.count((context, token)) / total if total else 0.0


def only_the_seen(token, context, pairs, vocabulary, k):
    total = sum(first == context for first, _ in pairs)
    return pairs.count((context, token)) / total if total else 1 / len(vocabulary)


def k_added_once(token, context, pairs, vocabulary, k):
    return (pairs.count((context, token)) + k) / (sum(first == context for first, _ in pairs) + k)


def always_one(token, context, pairs, vocabulary, k):
    return add_k_prob(token, context, pairs, vocabulary, 1)


def anywhere_in_a_pair(token, context, pairs, vocabulary, k):
    seen = sum(context in pair for pair in pairs)
    return (pairs.count((context, token)) + k) / (seen + k * len(vocabulary))


def contexts_in_the_vocabulary(token, context, pairs, vocabulary, k):
    return add_k_prob(token, context, pairs, vocabulary | {first for first, _ in pairs}, k)


def of_all_pairs(token, context, pairs, vocabulary, k):
    return (pairs.count((context, token)) + k) / (len(pairs) + k * len(vocabulary))


PREDICTIONS = {
    "surprise of 'Tom lost his drum and cried', in bits": 4,
    "probability of 'Mia found his kite' in the perfect bigram model": 0.0625,
    "surprise of 'Mia found her kite' in the perfect bigram model, in bits": 4,
    "cross-entropy of the perfect 5-gram model, in bits a sentence": 3.25,
    "entropy with four children instead of two, all equally frequent, in bits": 4.25,
    "perplexity of a model that gives each of 50 tokens probability 1/50": 50,
    "bits of a text with one pair never heard, maximum likelihood": math.inf,
}
QUESTIONS = list(PREDICTIONS)


def log_prob(sentence, after, *, end="</s>", unseen=-math.inf):
    total = 0.0
    for before, token in pairwise(["<s>", *sentence.split(), *([end] if end else [])]):
        row = after.get(before, {})
        total += math.log(row[token] / sum(row.values())) if row.get(token) else unseen
    return total


def first_twice(sentence, after):
    row = after["<s>"]
    again = row.get(sentence.split()[0], 0) / sum(row.values())
    return log_prob(sentence, after) + (math.log(again) if again else -math.inf)


def multiplied(sentence, after):
    p = 1.0
    for before, token in pairwise(["<s>", *sentence.split(), "</s>"]):
        row = after.get(before, {})
        p *= row.get(token, 0) / max(sum(row.values()), 1)
    return math.log(p) if p > 0 else -math.inf


def crashes(sentence, after):
    pairs = pairwise(["<s>", *sentence.split(), "</s>"])
    return sum(math.log(after[a][b] / after[a].total()) for a, b in pairs)


def wrong_total(sentence, after):
    pairs = pairwise(["<s>", *sentence.split(), "</s>"])
    total = sum(row.total() for row in after.values())
    return sum(math.log(after[a][b] / total) for a, b in pairs)


def skips_the_unseen(sentence, after):
    return log_prob(sentence, after, unseen=0.0)


def remembering(token, so_far, model, weight=0.3):
    """A share of what capitals get goes to those that the story has said before."""
    p = model.prob(token, so_far)
    capitals = [t for t in model.vocabulary if t.strip()[:1].isupper()]
    said = [t for t in capitals if t in so_far]
    if token not in capitals or not said:
        return p
    among = model.prob(token, so_far) / sum(model.prob(t, so_far) for t in said)
    mass = sum(model.prob(t, so_far) for t in capitals)
    return (1 - weight) * p + (weight * mass * among if token in said else 0.0)


@cache
def six_gram():
    return NGramModel(6, smoothing="kneser_ney").fit(StoryLanguage("en").corpus(400, seed=9))


def counted_elsewhere(token, so_far, model):
    """A longer model of stories of one's own, over the vocabulary that was handed in."""
    mass = sum(six_gram().prob(t, so_far) for t in model.vocabulary)
    return six_gram().prob(token, so_far) / mass


def twice_if_said(token, so_far, model):
    return model.prob(token, so_far) * (1 + (token in so_far))


def cached(token, so_far, model):
    p = model.prob(token, so_far)
    return 0.8 * p + 0.2 * so_far[1:].count(token) / len(so_far[1:]) if so_far[1:] else p


RIGHT = {
    "01.1": entropy_and_floor,
    "01.2": add_k_prob,
    "01.3": PREDICTIONS,
    "01.4": log_prob,
    "01.5": remembering,
}
WRONG = [
    ("01.1", by_characters, "a Chinese character has three bytes"),
    ("01.1", mean_of_ratios, "a mean of ratios"),
    ("01.1", unweighted, "as often as it is said"),
    ("01.1", in_nats, "these are nats"),
    ("01.1", all_bytes, "weigh each text's bytes"),
    ("01.1", mean_bytes, "weigh each text's bytes"),
    ("01.1", with_end, "it has no bytes"),
    ("01.1", no_zero, "has no logarithm"),
    ("01.1", lambda language: entropy_and_floor(language)[0], "two numbers"),
    ("01.1", lambda language: tuple(-x for x in entropy_and_floor(language)), "never negative"),
    ("01.2", unsmoothed, "where is k?"),
    ("01.2", without_k, "where is k?"),
    ("01.2", only_the_seen, "where is k?"),
    ("01.2", k_added_once, "not to 1"),
    ("01.2", always_one, "k = 0.25"),
    ("01.2", anywhere_in_a_pair, "the *first* of a pair"),
    ("01.2", contexts_in_the_vocabulary, "contexts not counted"),
    ("01.2", of_all_pairs, "not by the number of all pairs"),
    ("01.3", {**PREDICTIONS, QUESTIONS[0]: 1 / 16}, "counts halvings"),
    ("01.3", {**PREDICTIONS, QUESTIONS[1]: 0}, "along its path"),
    ("01.3", {**PREDICTIONS, QUESTIONS[1]: 0.06}, "exactly, such as"),
    ("01.3", {**PREDICTIONS, QUESTIONS[2]: 3}, "believes to be open"),
    ("01.3", {**PREDICTIONS, QUESTIONS[3]: 4.4056}, "what is the floor"),
    ("01.3", {**PREDICTIONS, QUESTIONS[4]: 6.5}, "only the choice of who"),
    ("01.3", {**PREDICTIONS, QUESTIONS[6]: 1000}, "right so far: 6 of 7"),
    ("01.3", {**PREDICTIONS, QUESTIONS[5]: ...}, "not filled in"),
    ("01.3", {**PREDICTIONS, QUESTIONS[5]: "50"}, "write a number"),
    ("01.3", [4, 1 / 16], "a dictionary"),
    ("01.4", lambda sentence, after: log_prob(sentence, after, end=""), "it is missing"),
    ("01.4", first_twice, "counted twice"),
    ("01.4", multiplied, "a product of 3000 factors"),
    ("01.4", crashes, "return -inf"),
    ("01.4", wrong_total, "the word before came"),
    ("01.4", skips_the_unseen, "-inf, not"),
    ("01.4", lambda sentence, after: log_prob(sentence, after) / math.log(2), "in bits"),
    ("01.4", lambda sentence, after: math.exp(log_prob(sentence, after)), "its logarithm"),
    ("01.5", counted_elsewhere, "worse than the model alone"),
    ("01.5", twice_if_said, "sum to"),
    ("01.5", cached, "worse than the model alone"),
    ("01.5", lambda token, so_far, model: model.prob(token, so_far), "not yet 2% better"),
    ("01.5", lambda *a: remembering(*a, weight=0.03), "not yet 2% better"),
]
