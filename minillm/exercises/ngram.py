"""Graders of notebook 01: entropy and floor, add-k, predictions, a repair, a longer memory."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from minillm.exercises import apart, check_table, check_values, exercise
from minillm.ngram import BEGIN, END, NGramModel, bits_per_byte, word_pieces
from minillm.stories.language import StoryLanguage

PAIRS = [*[("San", "Francisco")] * 3, ("a", "kite"), ("the", "kite"), ("a", "drum")]
WORDS = {"San", "Francisco", "a", "the", "kite", "drum"}


def _close(value: float, wanted: float) -> bool:
    return math.isclose(float(value), wanted, rel_tol=1e-9, abs_tol=1e-12)


@exercise(
    "01.1",
    "weigh each text by how often it is said; what is an average of bits, what one of bytes?",
    "entropy is the mean surprise; the floor divides mean bits by mean bytes",
)
def entropy_and_floor(answer: Callable[[dict[str, float]], Sequence[float]]) -> str | None:
    languages = [
        {"heads": 0.5, "tails": 0.5},
        {"yes": 0.75, "perhaps not": 0.25},
        {"小鹿走了。": 0.5, "The deer left.": 0.125, "It slept.": 0.25, "Nobody came.": 0.125},
        {"always": 1.0, "never": 0.0},
    ]
    for language in languages:
        try:
            found = answer(dict(language))
        except ValueError as error:
            if "domain" not in str(error):
                raise
            return "a text of probability 0 never comes: it adds nothing, and has no logarithm"
        if not isinstance(found, tuple | list) or len(found) != 2:
            return "return two numbers: bits a sentence and bits per byte"
        bits, floor = map(float, found)
        said = {text: p for text, p in language.items() if p}
        wanted = -sum(p * math.log2(p) for p in said.values())
        size = sum(p * len(text.encode()) for text, p in said.items())
        surprises = [-math.log2(p) for p in said.values()]
        slips = {
            "these are nats: the logarithm to base 2 gives bits": wanted * math.log(2),
            "the sign is the wrong way round: a surprise is never negative": -wanted,
            "each text counts as often as it is said, not once": sum(surprises) / len(said),
            "each text counts as often as it is said: weigh its surprise by p": sum(surprises),
        }
        otherwise = f"the entropy of {language} is {wanted:.4f} bits, you return {bits:.4f}"
        if why := check_values(bits, wanted, slips, near=1e-9, otherwise=otherwise):
            return why
        all_bytes = sum(len(text.encode()) for text in language)
        ends = "the end belongs to the bits, but it is no part of the text: it has no bytes"
        mistakes = [
            (
                "you divide by characters; in UTF-8 a Chinese character has three bytes",
                wanted / sum(p * len(text) for text, p in said.items()),
            ),
            (
                "a mean of ratios: take the mean bits and the mean bytes, then divide once",
                -sum(p * math.log2(p) / len(text.encode()) for text, p in said.items()),
            ),
            ("the bytes are an average too: weigh each text's bytes by p", wanted / all_bytes),
            (
                "the bytes are an average over what is said: weigh each text's bytes by p",
                wanted * len(language) / all_bytes,
            ),
            *((ends, wanted / (size + more)) for more in (1, len(END))),
        ]
        otherwise = f"the floor of {language} is {wanted / size:.4f}, you return {floor:.4f}"
        if why := check_values(floor, wanted / size, mistakes, near=1e-9, otherwise=otherwise):
            return why
    return None


@exercise(
    "01.2",
    "every count grows by k; what must the sum of a context's counts grow by?",
    "add-k is a share of counts that are all k larger, so an unseen context treats all alike",
)
def add_k(answer: Callable[..., float]) -> str | None:
    for k in (1.0, 0.25):
        for context in ("a", "San", "never"):
            if said := _wrong_shares(answer, context, PAIRS, WORDS, k):
                return said
    for context in ("on", BEGIN):  # words that stand on both sides, and a context that is no word
        pairs = [("on", "off"), ("off", "on"), ("on", "off"), (BEGIN, "on"), ("off", "off")]
        if said := _wrong_shares(answer, context, pairs, {"on", "off", "out"}, 0.5):
            return said
    return None


def _wrong_shares(
    answer: Callable[..., float], context: str, pairs: list[tuple], words: set[str], k: float
) -> str | None:
    case = f"after {context!r} with k = {k}"
    try:
        probs = {w: answer(w, context, list(pairs), set(words), k) for w in sorted(words)}
    except ZeroDivisionError:
        return f"after {context!r} nothing was counted: the k's are all there is to share"
    counts = {w: pairs.count((context, w)) for w in words}
    seen, V = sum(first == context for first, _ in pairs), len(words)
    either = sum(context in pair for pair in pairs)

    def shares(total: float, k: float = k) -> list[float]:
        return [(counts[w] + k) / (total + k * V) for w in probs]

    totals = {
        "divide by how often the context came, not by the number of all pairs": len(pairs),
        "a context is the *first* of a pair: count it only there": either,
        "V is the size of `vocabulary`: what may come next, contexts not counted": seen + k,
    }
    slips = {why: shares(total) for why, total in totals.items()}
    slips[f"{case} these are the plain shares: where is k?"] = shares(max(seen, 1), 0)
    got, wanted = [float(p) for p in probs.values()], shares(seen)
    i = max(range(V), key=lambda i: abs(got[i] - wanted[i]))
    said = f"p({[*probs][i]}|{context}) with k = {k} is {wanted[i]:.4f}, you return {got[i]:.4f}"
    if not _close(sum(got), 1):
        said = f"the probabilities {case} sum to {sum(got):.4g}, not to 1"
    return check_values(got, wanted, slips, near=1e-9, otherwise=said)


PREDICTIONS: dict[str, tuple[float, str]] = {
    "surprise of 'Tom lost his drum and cried', in bits": (
        4,
        "its probability is 1/16, and a surprise counts halvings",
    ),
    "probability of 'Mia found his kite' in the perfect bigram model": (
        1 / 16,
        "multiply along its path in the picture of the Markov chain",
    ),
    "surprise of 'Mia found her kite' in the perfect bigram model, in bits": (
        4,
        "one bit for each choice that the model believes to be open, her or his among them",
    ),
    "cross-entropy of the perfect 5-gram model, in bits a sentence": (
        3.25,
        "how many words back must one look in this language, and what is the floor?",
    ),
    "entropy with four children instead of two, all equally frequent, in bits": (
        4.25,
        "only the choice of who changes: from one among two to one among four",
    ),
    "perplexity of a model that gives each of 50 tokens probability 1/50": (
        50,
        "among how many equally likely tokens is it unsure?",
    ),
    "bits of a text with one pair never heard, maximum likelihood": (
        math.inf,
        "one factor is 0; what is the surprise of that?",
    ),
}


def _rounded(question: str, value: float) -> str | None:
    near = abs(value - PREDICTIONS[question][0]) < 0.005
    return "this is rounded: write it exactly, such as 1 / 3" if near else None


@exercise(
    "01.3",
    "fill in the seven numbers before you compute any of them",
    "what a model has forgotten it must guess, and each guess between two costs a bit",
)
def predictions(answer: Any) -> str | None:
    return check_table(answer, *apart(PREDICTIONS), _rounded)


def _counts(sentences: Sequence[str]) -> dict[str, Counter]:
    after: dict[str, Counter] = {}
    for sentence in sentences:
        for before, token in pairwise([BEGIN, *sentence.split(), END]):
            after.setdefault(before, Counter())[token] += 1
    return after


def _bigram(sentence: str, after: dict[str, Counter], *, end: bool = True) -> list[float]:
    tokens = [BEGIN, *sentence.split(), END][: None if end else -1]
    rows = [(after.get(a, Counter()), b) for a, b in pairwise(tokens)]
    return [row[b] / row.total() if row else 0.0 for row, b in rows]


@exercise(
    "01.4",
    "compare it with `Bigram` above: on a short sentence, on an unseen pair, on a long one",
    "the end is a token, a share is taken of its context, and logarithms are added",
)
def repaired(answer: Callable[[str, dict[str, Counter]], float]) -> str | None:
    sentences = ["Mia found her drum", "Tom lost his drum and cried", "Mia lost her kite"]
    after = _counts(sentences)

    def ask(sentence: str, counts: dict[str, Counter]) -> float:
        copied = {word: Counter(row) for word, row in counts.items()}
        value = float(answer(sentence, copied))
        if copied != counts:
            raise RuntimeError("it changed the counts")
        return value

    for sentence in sentences:
        found, factors = ask(sentence, after), _bigram(sentence, after)
        wanted = sum(map(math.log, factors))
        pairs = sum(row.total() for row in after.values())
        taken = list(pairwise([BEGIN, *sentence.split(), END]))
        of_pairs = [math.log(after[a][b] / pairs) for a, b in taken]
        by_all = "divide by how often the word before came, not by the number of all pairs"
        mistakes = [
            (
                "the end of the sentence is a token too, and it is missing",
                sum(map(math.log, _bigram(sentence, after, end=False))),
            ),
            ("this is the probability; its logarithm was asked", math.prod(factors)),
            ("this is in bits; the natural logarithm was asked", sum(map(math.log2, factors))),
            (
                "the first word is counted twice: its factor stands in the chain once",
                math.log(factors[0]) + wanted,
            ),
            (by_all, sum(of_pairs)),
            (by_all, sum(of_pairs[:-1])),
        ]
        said = f"log p({sentence}) is {wanted:.4f}, you return {found:.4f}"
        if why := check_values(found, wanted, mistakes, near=1e-9, otherwise=said):
            return why
    for sentence in ("Mia cried", "Mia lost her mind", "Ann lost her kite"):
        try:
            found = ask(sentence, after)
        except (KeyError, ValueError, ZeroDivisionError) as error:
            return (
                f"{sentence!r} has a pair that was never seen: return -inf "
                f"(yours raised {type(error).__name__})"
            )
        if found != -math.inf:
            return f"{sentence!r} has a pair that was never seen: -inf, not {found:.4f}"
    long = _counts([" ".join(["tick", "tock"] * 5), "tick tick", "tock tock"])
    text = " ".join(random.Random(0).choices(["tick", "tock"], k=3000))
    wanted = sum(map(math.log, _bigram(text, long)))
    try:
        found = ask(text, long)
    except ValueError:
        found = -math.inf
    if not _close(found, wanted):
        return (
            f"of a sentence of 3000 words log p is {wanted:.1f}, you return {found}: "
            "what becomes of a product of 3000 factors?"
        )
    return None


@cache
def _stories() -> tuple[NGramModel, list[list[str]], int]:
    """A 4-gram model of stories with other names, so that no story of one's own helps."""
    english = StoryLanguage("en")
    known = {card["is"]: "Zu" + card["is"].lower() for card in english.grammar.pools["names"]}
    renamed = [
        "".join(
            piece.replace(name, known[name]) if (name := piece.strip()) in known else piece
            for piece in word_pieces(text)
        )
        for text in [*english.corpus(100, seed=5), *english.corpus(8, seed=6)]
    ]
    model = NGramModel(4, smoothing="kneser_ney").fit(renamed[:100])
    held_out = renamed[100:]
    pieces = [[BEGIN, *word_pieces(text), END] for text in held_out]
    return model, pieces, sum(len(text.encode()) for text in held_out)


def _inside(model: NGramModel, pieces: list[list[str]]) -> list[tuple[int, int]]:
    """Places (story, index) whose token is in the vocabulary."""
    return [
        (s, i) for s, p in enumerate(pieces) for i in range(1, len(p)) if p[i] in model.vocabulary
    ]


@cache
def _plain() -> float:
    """The nats of the model alone in those places."""
    model, pieces, _ = _stories()
    return -sum(
        math.log(model.prob(pieces[s][i], pieces[s][:i])) for s, i in _inside(model, pieces)
    )


@exercise(
    "01.5",
    "which tokens cost most though the story has said them, and where does the model expect such?",
    "looking back at everything so far pays, even by a rule as simple as this",
)
def remembering(answer: Callable[[str, list[str], NGramModel], float]) -> str | None:
    model, pieces, num_bytes = _stories()
    for story, i in ((0, 1), (0, 40), (1, 75), (2, 120)):
        so_far = pieces[story][:i]
        probs = [float(answer(token, list(so_far), model)) for token in model.vocabulary]
        if min(probs) < 0:
            return f"a probability is negative: {min(probs):.4g}, after {i} tokens"
        if not math.isclose(total := sum(probs), 1, rel_tol=1e-6):
            return (
                f"after {i} tokens of a story your probabilities sum to {total:.4f} over the "
                "vocabulary, not to 1: what one token gains another must lose"
            )
    yours, plain = 0.0, _plain()
    for story, i in _inside(model, pieces):
        so_far, token = pieces[story][:i], pieces[story][i]
        p = float(answer(token, list(so_far), model))
        if not 0 < p <= 1 + 1e-9:
            return f"you give {token!r} after {so_far[-3:]} probability {p:.4g}"
        yours -= math.log(p)
    share = yours / plain
    both = [bits_per_byte(nats, num_bytes) for nats in (yours, plain)]
    numbers = f"{both[0]:.4f} bits per byte, the plain model has {both[1]:.4f}"
    if share > 1 + 1e-9:
        return f"worse than the model alone: {numbers}"
    if share > 0.98:
        return f"not yet 2% better: {numbers}"
    return None
