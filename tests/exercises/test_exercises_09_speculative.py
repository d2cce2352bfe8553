"""Each grader of speculation accepts right answers and says what is wrong with wrong ones."""

from fractions import Fraction

from minillm.exercises import grade
from minillm.exercises.speculative import PREDICTIONS


def residual(p, q):
    rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    total = sum(rest)
    return [x / total for x in rest] if total else list(p)


def dividing_by_zero(p, q):
    rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return [x / sum(rest) for x in rest]


def overlap(p, q):
    shared = [min(a, b) for a, b in zip(p, q, strict=True)]
    return [x / sum(shared) for x in shared]


def changed(**changes):
    short = dict(zip(["zero", "two", "stands", "new", "one", "pass"], PREDICTIONS, strict=True))
    right = {key: value for key, (value, _) in PREDICTIONS.items()}
    return {**right, **{short[key]: value for key, value in changes.items()}}


def speed(a, K, c):
    return sum(a**j for j in range(K + 1)) / (1 + K * c)


def best(a, c, *, least=0, most=50, value=speed):
    return max(range(least, most + 1), key=lambda K: value(a, K, c))


def by_the_formula(a, c):
    return best(a, c, value=lambda a, K, c: (1 - a ** (K + 1)) / (1 - a) / (1 + K * c))


RIGHT = {
    "09_speculative.1": residual,
    "09_speculative.2": changed(),
    "09_speculative.3": best,
}
WRONG = [
    ("09_speculative.1", lambda p, q: residual(q, p), "have changed places"),
    ("09_speculative.1", dividing_by_zero, "you divide by zero"),
    (
        "09_speculative.1",
        lambda p, q: [a - b for a, b in zip(p, q, strict=True)],
        "only the positive part",
    ),
    (
        "09_speculative.1",
        lambda p, q: [max(a - b, 0) for a, b in zip(p, q, strict=True)],
        "divide by its sum",
    ),
    ("09_speculative.1", lambda p, q: p, "already count twice"),
    ("09_speculative.1", overlap, "which is accepted"),
    ("09_speculative.1", lambda p, q: residual(p, q)[:-1], "return 5 probabilities"),
    ("09_speculative.2", changed(zero=2), "likes it more"),
    ("09_speculative.2", changed(two=4), "right so far: 5 of 6"),
    ("09_speculative.2", changed(stands=0.31), "the overlap"),
    ("09_speculative.2", changed(new=0.6), "where is p greater"),
    ("09_speculative.2", changed(one=...), "not filled in yet"),
    ("09_speculative.3", lambda a, c: best(a, c, least=1), "slower than without"),
    ("09_speculative.3", lambda a, c: 50, "guesses cost time"),
    ("09_speculative.3", by_the_formula, "you divide by 1 - a"),
    ("09_speculative.3", lambda a, c: best(a, c, most=4), "another gives"),
    ("09_speculative.3", lambda a, c: float(best(a, c)), "a whole number"),
]


def test_predictions_may_be_fractions():
    exact = {key: Fraction(value).limit_denominator(100) for key, value in changed().items()}
    result = grade("09_speculative.2", exact)
    assert result.status == "correct", result.message


def test_of_equally_fast_numbers_any_will_do():
    def by_the_pages_formula(a, c):
        def speed(K):
            return (K + 1) / (1 + K * c) if a == 1 else (1 - a ** (K + 1)) / ((1 - a) * (1 + K * c))

        return max(range(51), key=speed)

    assert by_the_pages_formula(0.3, 0.3) == 1  # rounding: without a guess it is as fast
    for answer in (by_the_pages_formula, best):
        assert grade("09_speculative.3", answer).status == "correct"
