"""Wrong answers of 09_speculative: exercise, answer, words that its message holds."""

PREDICTIONS: dict[str, tuple[float, str]] = {
    "chance that token 0, once guessed, stands": (
        1,
        "the large model likes it more than the draft",
    ),
    "chance that token 2, once guessed, stands": (0.25, "p over q: 0.1 over 0.4"),
    "chance that a guess stands": (0.7, "the overlap: the smaller of p and q, summed"),
    "chance that a replacement is token 0": (1, "where is p greater than q?"),
    "chance that token 1 comes out": (0.3, "what does the whole method promise?"),
    "tokens per pass with K = 1": (1.7, "one token always, one more if the guess stands"),
}


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
    ("09_speculative.1", lambda p, q: p, "counts tokens twice"),
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
