"""n-gram models over lossless word pieces: maximum likelihood, add-k, interpolated Kneser-Ney.

Over the vocabulary the probabilities of a context sum to one. A word outside it is spelled in bytes
and shares what `<unk>` has, so bits per byte compare with any other model's. Notebook 01.
"""

# Built from notebooks/01_ngrams.ipynb: edit there, then make build.

import math
import random
import re
from collections.abc import Iterable, Sequence
from typing import Self

from minillm.support.checks.texts import check_ngram_model, check_texts

__all__ = [
    "BEGIN",
    "END",
    "UNKNOWN",
    "NGramModel",
    "Table",
    "bits_per_byte",
    "continuation_counts",
    "count_ngrams",
    "discounted",
    "word_pieces",
]

BEGIN = "<s>"

END = "</s>"

UNKNOWN = "<unk>"

Table = dict[tuple[str, ...], dict[str, float]]  # context -> token -> count (or share)

_Discount = float | Sequence[float] | None

_PIECE = re.compile(
    r" ?(?:[^\W\d_\u2e80-\u9fff]+(?:['’][^\W\d_]+)?|\d+|[^\w\s])|[ ]{2,}|.", re.DOTALL
)


def word_pieces(text: str) -> list[str]:
    """Words with the space before them, numbers, marks, Chinese characters: nothing is lost."""
    return _PIECE.findall(text)


def count_ngrams(sentences: Iterable[str | Sequence[str]], n: int) -> list[Table]:
    """How often each token follows each context of 0, 1, ... n-1 tokens, a table for each length.

    A sentence has one BEGIN and one END; its first contexts are as long as the text before them.
    """
    check_texts(sentences, "sentences")
    tables: list[Table] = [{} for _ in range(n)]
    for sentence in sentences:
        tokens = [BEGIN, *_as_tokens(sentence), END]
        for i in range(1, len(tokens)):
            context = tuple(tokens[max(0, i - n + 1) : i])
            row = tables[len(context)].setdefault(context, {})
            row[tokens[i]] = row.get(tokens[i], 0) + 1
    for longer, shorter in zip(tables[:0:-1], tables[-2::-1], strict=True):
        for context, row in longer.items():
            target = shorter.setdefault(context[1:], {})
            for token, count in row.items():
                target[token] = target.get(token, 0) + count
    return tables


def _as_tokens(sentence: str | Sequence[str]) -> Sequence[str]:
    return word_pieces(sentence) if isinstance(sentence, str) else sentence


def discounted(table: Table, taken: Sequence[float], added: float) -> dict:
    """Per context the seen tokens' shares, and the share left over for a simpler distribution.

    `taken` is what a count of 1, 2 and more loses; `added` counts are given to the simpler one.
    """
    rows = {}
    for context, row in table.items():
        total = sum(row.values()) + added
        shares = {t: (count - taken[min(int(count), 3) - 1]) / total for t, count in row.items()}
        left = added + sum(taken[min(int(count), 3) - 1] for count in row.values())
        rows[context] = shares, left / total
    return rows


def continuation_counts(tables: Sequence[Table]) -> list[Table]:
    """Kneser-Ney's counts: below the highest order, how many different tokens precede an n-gram.

    n-grams that open a sentence have nothing before them and keep their counts.
    """
    result: list[Table] = [*({} for _ in tables[:-1]), tables[-1]]
    for order in range(len(tables) - 1):
        table = result[order]
        for context, row in tables[order].items():
            if context[:1] == (BEGIN,):
                table[context] = dict(row)
        for context, row in tables[order + 1].items():
            target = table.setdefault(context[1:], {})
            for token in row:
                target[token] = target.get(token, 0) + 1
    return result


class NGramModel:
    """An n-gram model: `fit` it on sentences, then ask for probabilities or sentences.

    `smoothing` is "mle", "add_k" (adds `k` to every count) or "kneser_ney" (interpolated;
    `discount` is one number, one an order, or None: estimated). In an unseen context "mle" gives
    every token 0; the others always sum to 1.
    Raises: ValueError for n < 1, an unknown smoothing, k <= 0, or a discount outside [0, 1].
    """

    def __init__(
        self, n: int, *, smoothing: str = "mle", k: float = 1.0, discount: _Discount = None
    ) -> None:
        each = [discount] * n if isinstance(discount, int | float) else discount
        check_ngram_model(n, smoothing, k, each, discount)
        self.n, self.smoothing, self.k, self.discounts = n, smoothing, k, each
        self.vocabulary: dict[str, None] = {}  # an ordered set
        self._rows: list[dict] = []

    def fit(self, sentences: Iterable[str | Sequence[str]]) -> Self:
        """Count the n-grams of `sentences` (texts, or lists of tokens) and forget earlier ones."""
        tables = count_ngrams(sentences, self.n)
        self.vocabulary = dict.fromkeys(sorted({END, UNKNOWN, *tables[0].get((), ())}))
        added = self.k * len(self.vocabulary) if self.smoothing == "add_k" else 0.0
        taken = [(0.0, 0.0, 0.0)] * self.n
        if self.smoothing == "kneser_ney":
            tables = continuation_counts(tables)
            if self.discounts is None:
                from minillm.stories.discounts import estimate_discounts

                taken = [estimate_discounts(table) for table in tables]
            else:
                taken = [(d, d, d) for d in self.discounts]
        self._rows = [discounted(t, d, added) for t, d in zip(tables, taken, strict=True)]
        return self

    def _levels(self, context: Sequence[str]) -> list[tuple[dict[str, float], float]]:
        """The rows that speak about a context, from the most general to the most special."""
        if not self._rows:
            raise ValueError("fit the model before asking it")
        context = tuple(context[-(self.n - 1) :]) if self.n > 1 else ()
        if self.smoothing != "kneser_ney":  # the whole context, or nothing
            unseen: tuple[dict[str, float], float] = {}, float(self.smoothing == "add_k")
            return [self._rows[len(context)].get(context, unseen)]
        shorter = (context[len(context) - order :] for order in range(len(context) + 1))
        rows = [self._rows[order].get(part) for order, part in enumerate(shorter)]
        return [row for row in rows if row is not None]

    def prob(self, token: str, context: Sequence[str] = ()) -> float:
        """p(token | the last n - 1 tokens of context); a sentence's first context is [BEGIN].

        A token outside the vocabulary gets UNKNOWN's times 1/257 for each byte and for its end.
        """
        levels = self._levels(context)
        p = 0.0 if token == BEGIN else 1 / len(self.vocabulary)
        if token not in self.vocabulary:
            p *= 257.0 ** -(len(token.encode()) + 1)
        for shares, left in levels:
            p = shares.get(token, 0.0) + left * p
        return p

    def log_prob(self, sentence: str | Sequence[str]) -> float:
        """Natural log-probability of a sentence, its end included; -inf where a factor is 0."""
        tokens, total = [BEGIN, *_as_tokens(sentence), END], 0.0
        for i in range(1, len(tokens)):
            p = self.prob(tokens[i], tokens[max(0, i - self.n + 1) : i])
            if p <= 0:
                return -math.inf
            total += math.log(p)
        return total

    def distribution(self, context: Sequence[str] = ()) -> dict[str, float]:
        """p(token | context) for every token of the vocabulary, END and UNKNOWN included."""
        return {token: self.prob(token, context) for token in self.vocabulary}

    def cross_entropy(self, sentences: Iterable[str | Sequence[str]]) -> float:
        """Average nats per token, ends included."""
        check_texts(sentences, "sentences")
        tokens = [_as_tokens(sentence) for sentence in sentences]
        if not tokens:
            raise ValueError("no sentences, so no average")
        return -sum(map(self.log_prob, tokens)) / sum(len(sentence) + 1 for sentence in tokens)

    def sample(self, rng: random.Random) -> list[str]:
        """A sentence: each token is one seen in its context, or comes from a shorter context."""
        tokens = [BEGIN]
        while tokens[-1] != END:
            token = self._draw(self._levels(tokens)[::-1], rng)
            tokens += [token] if token != UNKNOWN else []
        return tokens[1:-1]

    def _draw(self, levels: Sequence[tuple[dict[str, float], float]], rng: random.Random) -> str:
        for shares, left in levels:
            if shares and rng.random() >= left:
                return rng.choices(list(shares), list(shares.values()))[0]
        return rng.choice(list(self.vocabulary))


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """A text's nats in bits, shared among its UTF-8 bytes: comparable across tokenizations."""
    return nats / math.log(2) / num_bytes
