"""Each grader of fast sampling accepts a right answer and says what is wrong with wrong ones."""

import torch

from minillm.exercises import grade


def best_first(probs, p, *, crossing=True):
    kept, mass = [], 0.0
    for i in sorted(range(len(probs)), key=lambda i: -probs[i]):
        if mass + probs[i] > p and not crossing:
            break
        kept.append(i)
        mass += probs[i]
        if mass >= p - 1e-9:
            break
    return kept


def crossed(masses, p, *, strict=False, own=False):
    above = 0.0
    for i, mass in enumerate(masses):
        if above + mass > p or (above + mass >= p and not strict):
            return i, above + mass * own
        above += mass
    return len(masses) - 1, above


RIGHT = {
    "09_fast_sampling.1": lambda probs, p: sorted(best_first(probs, p)),
    "09_fast_sampling.2": crossed,
}
WRONG = [
    ("09_fast_sampling.1", best_first, "return their indices in order"),
    (
        "09_fast_sampling.1",
        lambda probs, p: best_first(probs, p, crossing=False),
        "nothing is left",
    ),
    (
        "09_fast_sampling.1",
        lambda probs, p: sorted(best_first(probs, p, crossing=False) or best_first(probs, 0)),
        "the token that crosses p",
    ),
    (
        "09_fast_sampling.1",
        lambda probs, p: list(range(len(best_first(probs, p)))),
        "the first tokens of the list",
    ),
    (
        "09_fast_sampling.1",
        lambda probs, p: [probs[i] for i in best_first(probs, p)],
        "the indices of the tokens",
    ),
    ("09_fast_sampling.2", lambda m, p: crossed(m, p)[::-1], "the index comes first"),
    ("09_fast_sampling.2", lambda m, p: crossed(m, p, own=True), "only what is above"),
    ("09_fast_sampling.2", lambda m, p: crossed(m, p, strict=True), "one too far"),
    ("09_fast_sampling.2", lambda m, p: crossed(m, p)[0], "return two numbers"),
    ("09_fast_sampling.2", lambda m, p: (crossed(m, p)[0] - 1, 0.0), "one too early"),
]


def test_masses_of_float32_tensors_are_accepted():
    def crossed32(masses, p):
        total = torch.tensor(masses).cumsum(0)
        place = int((total < p).sum())
        return place, total[place] - masses[place]

    result = grade("09_fast_sampling.2", crossed32)
    assert result.status == "correct", result.message
