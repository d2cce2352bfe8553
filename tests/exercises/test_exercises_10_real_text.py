"""The graders of 10_real_text accept right answers and say what is wrong with wrong ones."""

from fractions import Fraction

import pytest

from minillm.exercises import grade
from minillm.exercises.real_text import FILES

COIN, BYTES, LETTERS, TEXT = FILES


def interval(text, chances):
    low, width = Fraction(0), Fraction(1)
    for letter in text:
        names = list(chances)
        low += width * sum((chances[x] for x in names[: names.index(letter)]), Fraction(0))
        width *= chances[letter]
    return low, width


def from_the_end(text, chances):
    """Another right way: the last letter first."""
    low, width = Fraction(0), Fraction(1)
    for letter in reversed(text):
        before = Fraction(0)
        for other, p in chances.items():
            if other == letter:
                break
            before += p
        low, width = before + chances[letter] * low, width * chances[letter]
    return [low, width]


def ends(text, chances):
    low, width = interval(text, chances)
    return low, low + width


def of_the_whole(text, chances):
    low, width = Fraction(0), Fraction(1)
    for letter in text:
        low += interval(letter, chances)[0]
        width *= chances[letter]
    return low, width


def mixed(row, shorter):
    n, d = sum(row.values()), len(row)
    return {x: (row.get(x, 0) + d * p) / (n + d) if n else p for x, p in shorter.items()}


def counts_alone(row, shorter):
    n = sum(row.values())
    return {x: row.get(x, 0) / n if n else p for x, p in shorter.items()}


def too_much(row, shorter):
    n, d = sum(row.values()), len(row)
    return {x: row.get(x, 0) / n + d / (n + d) * p if n else p for x, p in shorter.items()}


def one_more(row, shorter):
    n = sum(row.values())
    return {x: (row.get(x, 0) + p) / (n + 1) for x, p in shorter.items()}


def flat(row, shorter):
    return dict.fromkeys(shorter, 1 / len(shorter)) if row else dict(shorter)


RIGHT = {"10_real_text.1": interval, "10_real_text.2": FILES, "10_real_text.3": mixed}
WRONG = [
    ("10_real_text.1", ends, "the ends of the interval"),
    ("10_real_text.1", lambda t, c: interval(t, dict(sorted(c.items()))), "dictionary's order"),
    ("10_real_text.1", of_the_whole, "of the interval that is left"),
    ("10_real_text.1", lambda t, c: interval(t[::-1], c), "first letter must narrow"),
    ("10_real_text.1", lambda t, c: tuple(map(float, interval(t, c))), "a float holds 53 bits"),
    ("10_real_text.1", lambda t, c: (Fraction(0), interval(t, c)[1]), "the width is right"),
    ("10_real_text.1", lambda t, c: interval(t, c)[1], "(low, width)"),
    ("10_real_text.1", lambda t, c: (Fraction(0), Fraction(1)), "it is low"),
    ("10_real_text.2", {**FILES, COIN: 1000}, "these are bits"),
    ("10_real_text.2", {**FILES, TEXT: 19_062}, "those would be nats"),
    ("10_real_text.2", {**FILES, BYTES: 800}, "-log2(1/256)"),
    ("10_real_text.2", {**FILES, LETTERS: 300}, "eight to a byte"),
    ("10_real_text.2", {**FILES, LETTERS: "375"}, "a whole number of bytes"),
    ("10_real_text.2", [125], "a dictionary"),
    ("10_real_text.3", too_much, "sum to"),
    ("10_real_text.3", counts_alone, "the counts alone"),
    ("10_real_text.3", one_more, "not 1 / (n + 1)"),
    ("10_real_text.3", flat, "has"),
    ("10_real_text.3", lambda r, s: {x: 1 / len(s) for x in s}, "'e' has 0.6667"),
    ("10_real_text.3", lambda r, s: {x: p for x, p in mixed(r, s).items() if x in r}, "all of"),
    ("10_real_text.3", lambda r, s: mixed(r, s) if r else dict.fromkeys(s, 0.0), "says it alone"),
]


@pytest.mark.parametrize(
    ("name", "answer"), [("10_real_text.1", from_the_end), ("10_real_text.2", dict(FILES))]
)
def test_other_right_answers(name, answer):
    assert grade(name, answer).status == "correct", grade(name, answer).message
