"""Graders of notebook 01: perplexity, add-k, Kneser-Ney's unigram."""

from __future__ import annotations

import math
from collections.abc import Callable

from minillm.exercises import exercise

PAIRS = [*[("San", "Francisco")] * 3, ("a", "kite"), ("the", "kite"), ("a", "drum")]
WORDS = {"San", "Francisco", "a", "the", "kite", "drum"}


def _close(value: float, wanted: float) -> bool:
    return math.isclose(float(value), wanted, rel_tol=1e-9, abs_tol=1e-12)


@exercise("01.1", "return the perplexity, e to the average negative log-probability per token")
def perplexity(answer: Callable[[list[float]], float]) -> str | None:
    for log_probs in (
        [math.log(1 / 8)] * 5,
        [math.log(0.5), math.log(0.125)],
        [-700.0, -800.0, 0.0],
    ):
        average = -sum(log_probs) / len(log_probs)
        value, wanted = answer(list(log_probs)), math.exp(average)
        if _close(value, wanted):
            continue
        if _close(value, average):
            return "you return the cross-entropy; perplexity is e to that power"
        if _close(value, math.exp(-average)):
            return "your sign is the wrong way round: a perplexity is never below 1"
        if average < 300 and _close(value, math.exp(average * len(log_probs))):
            return "you forgot to average over the tokens, so longer texts look worse"
        if _close(value, 2**average):
            return "the log-probabilities are natural, so the base is e, not 2"
        return f"for log-probabilities {log_probs} you return {value:.6g}, not {wanted:.6g}"
    return None


@exercise("01.2", "return (N(context, token) + k) / (N(context) + k times the vocabulary's size)")
def add_k(answer: Callable[..., float]) -> str | None:
    for k in (1.0, 0.25):
        for context in ("a", "San", "never"):
            probs = {w: answer(w, context, list(PAIRS), set(WORDS), k) for w in sorted(WORDS)}
            total = sum(probs.values())
            if not _close(total, 1):
                return (
                    f"the probabilities after {context!r} with k = {k} sum to {total:.4g}, not to 1"
                )
            seen = sum(first == context for first, _ in PAIRS)
            for word, value in probs.items():
                wanted = (PAIRS.count((context, word)) + k) / (seen + k * len(WORDS))
                if not _close(value, wanted):
                    return (
                        f"p({word}|{context}) with k = {k} is {wanted:.4f}, you return {value:.4f}"
                    )
    return None


@exercise("01.3", "return the share of the different pairs that end in the token")
def continuation(answer: Callable[..., float]) -> str | None:
    different = set(PAIRS)
    for word in ("Francisco", "kite", "drum", "San"):
        value = answer(word, list(PAIRS))
        wanted = sum(second == word for _, second in different) / len(different)
        if _close(value, wanted):
            continue
        if _close(value, sum(second == word for _, second in PAIRS) / len(PAIRS)):
            return f"you count how often {word!r} occurs; count after how many different words"
        if _close(value, sum(second == word for _, second in different) / len(PAIRS)):
            return "divide by the number of different pairs, not of all pairs"
        return f"for {word!r} the share is {wanted:.4f}, you return {value:.4f}"
    return None
