"""Graders of the language of stories: perplexity, Kneser-Ney's lowest order, a grammar."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from minillm.exercises import check_values, exercise
from minillm.stories.grammar import Chain, Choice, Copy
from minillm.stories.language import StoryLanguage

PAIRS = [*[("San", "Francisco")] * 3, ("a", "kite"), ("the", "kite"), ("a", "drum")]


@exercise(
    "01_story_language.1",
    "among how many equally likely tokens would one be as unsure as the model is on average?",
    "perplexity undoes the logarithm of an average: eight tokens of 1/8 each give 8",
)
def perplexity(answer: Callable[[list[float]], float]) -> str | None:
    for log_probs in (
        [math.log(1 / 8)] * 5,
        [math.log(0.5), math.log(0.125)],
        [-700.0, -800.0, 0.0],
    ):
        average = -sum(log_probs) / len(log_probs)
        try:
            value, wanted = answer(list(log_probs)), math.exp(average)
        except (OverflowError, ZeroDivisionError):
            return "a product of probabilities became 0: stay with logarithms until the average"
        total = average * len(log_probs)
        slips = {
            "you return the cross-entropy; perplexity is e to that power": average,
            "your sign is the wrong way round: a perplexity is never below 1": math.exp(-average),
            "you forgot to average over the tokens, so longer texts look worse": (
                math.exp(total) if total < 700 else math.inf
            ),
            "the log-probabilities are natural, so the base is e, not 2": 2**average,
            "average the logarithms, not the inverse probabilities": (
                sum(math.exp(-x) for x in log_probs if x > -600) / len(log_probs)
            ),
        }
        said = f"for log-probabilities {log_probs} you return {value:.6g}, not {wanted:.6g}"
        if why := check_values(value, wanted, slips, otherwise=said):
            return why
    return None


@exercise(
    "01_story_language.2",
    "does it matter here how often a pair occurred?",
    "a word that follows many different words is a good guess after a new one",
)
def continuation(answer: Callable[..., float]) -> str | None:
    different = set(PAIRS)
    for word in ("Francisco", "kite", "drum", "San"):
        value = answer(word, list(PAIRS))
        wanted = sum(second == word for _, second in different) / len(different)
        after = sum(second == word for _, second in different)
        said = sum(second == word for _, second in PAIRS)
        slips = {
            f"you count how often {word!r} occurs; count after how many different words": (
                said / len(PAIRS)
            ),
            "divide by the number of different pairs, not of all pairs": after / len(PAIRS),
            "a count; a share of all different pairs was asked": after,
        }
        otherwise = f"for {word!r} the share is {wanted:.4f}, you return {value:.4f}"
        if why := check_values(value, wanted, slips, otherwise=otherwise):
            return why
    return None


def _tied(chain: Chain) -> bool:
    """Whether every text of a chain mentions again, telling it apart, a card that was drawn."""
    return any(
        (type(node) is Copy and len(set(node.texts())) > 1)
        or (isinstance(node, Choice) and all(_tied(way) for _, way in node.ways))
        for node in chain.nodes
    )


@exercise(
    "01_story_language.3",
    "which pools and choices have 5 bits together? a second mention costs nothing",
    "bits are made by choices alone; ties make a text longer and cost nothing",
)
def grammar(answer: Any) -> str | None:
    source = answer() if callable(answer) else answer
    if not isinstance(source, str):
        return f"a grammar is a text in the notation of this page, not {type(source).__name__}"
    try:
        language = StoryLanguage(grammar=source)
    except ValueError as error:
        return f"the compiler refuses it: {error}"
    nats = language.entropy()
    bits = nats / math.log(2)
    if not math.isclose(bits, 5, abs_tol=1e-6):
        if math.isclose(nats, 5, abs_tol=0.1):
            return f"{nats:.3f} nats are {bits:.3f} bits"
        if math.isclose(bits, math.log2(5), abs_tol=1e-6):
            return "five equally likely texts have 2.322 bits; how many have 5?"
        return f"its entropy is {bits:.4f} bits, not 5"
    if not _tied(language.grammar.root):
        return (
            "some texts have no tie: in each, a card drawn once must be mentioned again, "
            "in a form that differs from card to card"
        )
    return None
