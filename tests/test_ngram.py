"""n-gram models against values worked out by hand, NLTK, and brute force."""

import math
import random
import time
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.lm import MLE, KneserNeyInterpolated, Laplace
from nltk.lm.preprocessing import padded_everygram_pipeline
from nltk.util import everygrams

from minillm.ngram import (
    BEGIN,
    END,
    UNKNOWN,
    NGramModel,
    bits_per_byte,
    continuation_counts,
    count_ngrams,
    word_pieces,
)
from minillm.stories.discounts import estimate_discounts
from minillm.stories.language import StoryLanguage

SEQUENCES = [list(s) for s in ("AB", "ABC", "BAB", "CA")]
STORIES = StoryLanguage("en").corpus(60, seed=1)
SMOOTHINGS = ("add_k", "kneser_ney")


@given(st.text())
def test_pieces_are_lossless(text):
    assert "".join(word_pieces(text)) == text
    assert all(word_pieces(text))


def test_pieces():
    assert word_pieces("Oh, it's 12 o'clock.") == ["Oh", ",", " it's", " 12", " o'clock", "."]
    assert word_pieces("小鹿走。x_1\n  y") == [
        "小",
        "鹿",
        "走",
        "。",
        "x",
        "_",
        "1",
        "\n",
        "  ",
        "y",
    ]


def test_counts_by_hand():
    tables = count_ngrams(SEQUENCES, 3)
    assert tables[0] == {(): {"A": 4, "B": 4, "C": 2, END: 4}}
    assert tables[1]["A",] == {"B": 3, END: 1} and tables[1][BEGIN,] == {"A": 2, "B": 1, "C": 1}
    assert tables[2]["A", "B"] == {END: 2, "C": 1} and tables[2][BEGIN, "B"] == {"A": 1}


def test_maximum_likelihood_by_hand():
    model = NGramModel(2).fit(SEQUENCES)
    assert model.prob("B", ["A"]) == 3 / 4 and model.prob("A", [BEGIN]) == 2 / 4
    assert math.isclose(NGramModel(4).fit(SEQUENCES).log_prob(list("AB")), math.log(1 / 4))
    assert model.log_prob(list("AC")) == -math.inf
    assert sum(model.distribution(["never"]).values()) == 0


def test_add_k_by_hand():
    model = NGramModel(2, smoothing="add_k", k=0.5).fit(SEQUENCES)
    assert len(model.vocabulary) == 5  # A, B, C, END, UNKNOWN
    assert math.isclose(model.prob("C", ["A"]), 0.5 / (4 + 2.5))
    assert math.isclose(model.prob("B", ["A"]), 3.5 / (4 + 2.5))
    assert math.isclose(model.prob("B", ["never"]), 1 / 5)


def test_kneser_ney_by_hand():
    """Sentences AB, AB, AC; order 2, discount 1/2 everywhere.

    Different pairs: <s>A, AB, AC, B</s>, C</s>. So companies A 1, B 1, C 1, </s> 2, in all 5; the
    unigrams lose 4 x 1/2 = 2 of 5 to the uniform distribution over A, B, C, </s>, <unk>.
    """
    model = NGramModel(2, smoothing="kneser_ney", discount=0.5)
    model.fit([list("AB"), list("AB"), list("AC")])
    assert math.isclose(model.prob("B"), 0.5 / 5 + 2 / 5 * 1 / 5)  # 0.18
    assert math.isclose(model.prob(END), 1.5 / 5 + 2 / 5 * 1 / 5)  # 0.38
    assert math.isclose(model.prob(UNKNOWN), 2 / 5 * 1 / 5)
    assert math.isclose(model.prob("B", ["A"]), 1.5 / 3 + 1 / 3 * 0.18)  # A: B twice, C once
    assert math.isclose(model.prob("A", ["A"]), 1 / 3 * 0.18)
    assert math.isclose(model.prob("B", ["never"]), 0.18)
    factors = (2.5 / 3 + 0.5 / 3 * 0.18, 1.5 / 3 + 1 / 3 * 0.18, 1.5 / 2 + 0.5 / 2 * 0.38)
    assert math.isclose(model.log_prob(list("AB")), sum(map(math.log, factors)))


def test_kneser_ney_keeps_the_counts_of_what_opens_a_sentence():
    """Nothing comes before <s>: in a trigram model <s> A has its count of 3, not of companies."""
    model = NGramModel(3, smoothing="kneser_ney", discount=0.5)
    model.fit([list("AB"), list("AB"), list("AC")])
    assert math.isclose(model.prob("A"), 0.5 / 5 + 2 / 5 * 1 / 5)  # 0.18, as in the bigram model
    assert math.isclose(model.prob("A", [BEGIN]), 2.5 / 3 + 0.5 / 3 * 0.18)
    after_a = 0.5 / 2 + 1 / 2 * 0.18  # B and C, each after one different pair: 1 - 1/2 of 2
    assert math.isclose(model.prob("B", ["A"]), after_a)
    assert math.isclose(model.prob("B", [BEGIN, "A"]), 1.5 / 3 + 1 / 3 * after_a)


def test_continuation_counts_by_hand():
    tables = continuation_counts(
        count_ngrams(
            [s.split() for s in ("in San Francisco", "San Francisco is", "a kite", "the kite")], 2
        )
    )
    assert tables[0][()]["Francisco"] == 1 and tables[0][()]["kite"] == 2
    assert tables[0][()]["San"] == 2 and tables[1]["San",] == {"Francisco": 2}


def test_discounts_by_hand():
    """n1, n2, n3, n4 = 8, 4, 2, 1, so that Ney's discount is 8 / (8 + 2 x 4) = 1/2."""
    row = {f"t{i}": count for i, count in enumerate([1] * 8 + [2] * 4 + [3] * 2 + [4])}
    wanted = (1 - 2 * 0.5 * 4 / 8, 2 - 3 * 0.5 * 2 / 4, 3 - 4 * 0.5 * 1 / 2)
    assert estimate_discounts({(): row}) == wanted == (0.5, 1.25, 2.0)
    assert estimate_discounts({(): {"a": 1, "b": 1, "c": 2}}) == (0.5, 0.5, 0.5)  # 2 / (2 + 2 x 1)
    assert estimate_discounts({(): {"a": 7}}) == (0.5, 0.5, 0.5)


def nltk_contexts(n):
    """Contexts of n - 1 words inside the stories, none of which touches a sentence's beginning."""
    rng, contexts = random.Random(n), []
    while len(contexts) < 60:
        pieces = word_pieces(rng.choice(STORIES))
        i = rng.randrange(n + 2, len(pieces))
        contexts.append((pieces[i - n + 1 : i], pieces[i]))
    return contexts


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("ours, theirs", [("mle", MLE), ("add_k", Laplace)])
def test_counting_agrees_with_nltk(n, ours, theirs):
    sentences = [word_pieces(text) for text in STORIES]
    model, other = NGramModel(n, smoothing=ours).fit(sentences), theirs(n)
    other.fit(*padded_everygram_pipeline(n, sentences))
    # NLTK counts <s> among the words that may come next; we do not
    extra = 1 if ours == "add_k" else 0
    for context, word in nltk_contexts(n):
        for token in (word, " the", END):
            seen = sum(count for _, count in other.context_counts(tuple(context)).items())
            scale = (seen + len(other.vocab)) / (seen + len(other.vocab) - extra)
            assert math.isclose(model.prob(token, context), other.score(token, context) * scale)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_kneser_ney_agrees_with_nltk(n):
    """With its fixed discount and unsmoothed unigrams, on sentences with one begin and one end."""
    sentences = [word_pieces(text) for text in STORIES]
    model = NGramModel(n, smoothing="kneser_ney", discount=[0.0] + [0.4] * (n - 1)).fit(sentences)
    padded = [[BEGIN, *sentence, END] for sentence in sentences]
    other = KneserNeyInterpolated(n, discount=0.4)
    other.fit(
        [list(everygrams(p, max_len=n)) for p in padded], [word for p in padded for word in p]
    )
    for context, word in nltk_contexts(n):
        for token in (word, " the", " fox"):
            wanted = other.score(token, context)
            assert math.isclose(model.prob(token, context), wanted, rel_tol=1e-12)


tokens = st.lists(st.sampled_from("abcd"), max_size=6)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(tokens, min_size=1, max_size=8),
    st.integers(1, 5),
    st.sampled_from(SMOOTHINGS),
    st.lists(st.sampled_from(["a", "b", "c", "zz", BEGIN]), max_size=5),
)
def test_distributions_sum_to_one(sentences, n, smoothing, context):
    context = [t for i, t in enumerate(context) if t != BEGIN or i == 0]
    model = NGramModel(n, smoothing=smoothing).fit(sentences)
    probs = model.distribution(context)
    assert math.isclose(sum(probs.values()), 1, rel_tol=1e-9)
    assert all(p > 0 for p in probs.values()) and BEGIN not in probs


@pytest.mark.parametrize("n", [1, 2, 6])
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_distributions_sum_to_one_on_stories(n, smoothing):
    model = NGramModel(n, smoothing=smoothing, k=0.1).fit(STORIES)
    for context in (
        [],
        [BEGIN],
        [BEGIN, "Once", " upon"],
        ["never", "seen"],
        word_pieces(STORIES[0])[40:50],
    ):
        assert math.isclose(sum(model.distribution(context).values()), 1, rel_tol=1e-9)


def test_probabilities_of_all_sentences_sum_to_one():
    """The end token shares the probability among sentences of all lengths."""
    for smoothing in ("mle", *SMOOTHINGS):
        model = NGramModel(2, smoothing=smoothing).fit([list("a"), list("ab"), list("b"), []])
        total = sum(
            math.exp(model.log_prob(sentence))
            for length in range(9)
            for sentence in product(["a", "b", UNKNOWN], repeat=length)
        )
        assert 0.97 < total < 1 + 1e-9


def test_unknown_words_are_spelled():
    model = NGramModel(3, smoothing="kneser_ney").fit(STORIES)
    context = word_pieces(STORIES[0])[3:5]
    assert math.isclose(model.prob(" xyz", context), model.prob(UNKNOWN, context) * 257.0**-5)
    assert math.isfinite(model.log_prob("A text in words that no story has, 12 of them."))
    assert model.prob(BEGIN, context) == 0


def test_cross_entropy_and_bits_per_byte():
    model = NGramModel(2, smoothing="kneser_ney").fit(STORIES)
    nats = -sum(model.log_prob(text) for text in STORIES[:5])
    count = sum(len(word_pieces(text)) + 1 for text in STORIES[:5])
    assert math.isclose(model.cross_entropy(STORIES[:5]), nats / count)
    assert bits_per_byte(math.log(2) * 24, 8) == pytest.approx(3.0, rel=1e-12)


def test_one_megabyte_takes_no_hours():
    corpus = StoryLanguage("en").corpus(1500, seed=3)
    assert sum(len(text) for text in corpus) > 1_000_000
    model = NGramModel(6, smoothing="kneser_ney").fit(STORIES)
    started = time.process_time()
    model.cross_entropy(corpus)
    assert time.process_time() - started < 600  # against hanging: it takes one or two


def test_samples_follow_the_distribution():
    model = NGramModel(2, smoothing="kneser_ney").fit(SEQUENCES)
    rng = random.Random(0)
    drawn = [model.sample(rng) for _ in range(4000)]
    first = [s[0] if s else END for s in drawn]
    wanted = model.distribution([BEGIN])
    for token in ("A", "B", "C", END):
        p = wanted[token] / (1 - wanted[UNKNOWN])
        assert abs(first.count(token) / 4000 - p) < 5 * math.sqrt(p / 4000)
    assert NGramModel(4).fit(SEQUENCES).sample(random.Random(1)) in SEQUENCES


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": 0}, {"n": 2, "smoothing": "laplace"}, {"n": 2, "smoothing": "add_k", "k": 0},
        {"n": 2, "smoothing": "kneser_ney", "discount": 1.5}, {"n": 3, "discount": [0.5, 0.5]},
    ],
)  # fmt: skip
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=r"\d"):
        NGramModel(**arguments)


def test_unfitted_model():
    with pytest.raises(ValueError, match="fit the model"):
        NGramModel(2).prob("a", ["b"])


def test_cross_entropy_of_nothing():
    with pytest.raises(ValueError, match="no sentences"):
        NGramModel(2).fit(SEQUENCES).cross_entropy([])
