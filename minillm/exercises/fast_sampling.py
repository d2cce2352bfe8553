"""Graders of 09_fast_sampling: the nucleus by hand, the bucket in which p is crossed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minillm.exercises import exercise

ROWS = ([0.5, 0.3, 0.16, 0.02, 0.02], [0.01, 0.02, 0.07, 0.9], [0.2, 0.5, 0.05, 0.25])


@exercise(
    "09_fast_sampling.1",
    "take the best tokens first; when may you stop?",
    "the token with which the sum reaches p is part of the nucleus, so it is never empty",
)
def nucleus(answer: Callable[[list[float], float], Sequence[int]]) -> str | None:
    for probs in ROWS:
        for p in (1e-6, 0.45, 0.6, 0.95, 0.985):
            order = sorted(range(len(probs)), key=lambda i: -probs[i])
            kept: list[int] = []
            while sum(probs[i] for i in kept) < p - 1e-9:
                kept.append(order[len(kept)])
            found, case = list(answer(list(probs), p)), f"for {probs} and p = {p}"
            got = [int(i) for i in found]
            if got != found:
                return f"{case} return the indices of the tokens, not {found}"
            if got == sorted(kept):
                continue
            if not got:
                return f"{case} nothing is left: keep at least the best token"
            if sorted(got) == sorted(kept):
                return f"{case} these are the right tokens; return their indices in order"
            if sorted(got) == sorted(kept[:-1]):
                return f"{case} the token that crosses p was dropped: keep it"
            if sorted(got) == list(range(len(kept))):
                return f"{case} you took the first tokens of the list, not the most probable"
            return f"{case} I expected {sorted(kept)}, not {got}"
    return None


@exercise(
    "09_fast_sampling.2",
    "add up from the best bucket; which one makes the sum reach p?",
    "one pass over the sums says which bucket alone has to be sorted",
)
def crossed_bucket(answer: Callable[[list[float], float], Sequence[float]]) -> str | None:
    for masses, p in (
        ([0.5, 0.3, 0.2], 0.6),
        ([0.5, 0.0, 0.3, 0.2], 0.9),
        ([0.7, 0.2, 0.1], 0.05),
        ([0.25, 0.25, 0.5], 0.5),
    ):
        place = next(i for i in range(len(masses)) if sum(masses[: i + 1]) >= p)
        above, case = sum(masses[:place]), f"for {masses} and p = {p}"
        found = answer(list(masses), p)
        if not hasattr(found, "__len__") or len(found) != 2:
            return "return two numbers: the index, and the mass above it"
        index, mass = int(found[0]), float(found[1])
        if index == place and abs(mass - above) < 1e-6:
            continue
        if 0 < float(found[0]) < 1:
            return f"{case} the index comes first, then the mass above it"
        if index == place and abs(mass - above - masses[place]) < 1e-6:
            return f"{case} your mass includes the bucket itself; only what is above it counts"
        if index == place + 1:
            return f"{case} bucket {place} already reaches p, yours is one too far"
        if index == place - 1:
            return f"{case} bucket {index} does not reach p yet, yours is one too early"
        return f"{case} I expected bucket {place} with {above:g} above it, not {found}"
    return None
