"""Graders of notebook 09: a token by hand, predictions, a batch, stop strings, typical sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.exercises import apart, check_table, check_values, exercise
from minillm.sampling import Sampler

CASES = (
    [0.5, 0.3, 0.16, 0.02, 0.02],
    [0.2, 0.5, 0.05, 0.25],
    [0.01, 0.02, 0.07, 0.9],
    [0.0, 0.6, 0.4],  # something was cut before
)


def _powers(probs: Sequence[float], exponent: float) -> list[float]:
    powers = [p**exponent for p in probs]
    return [x / sum(powers) for x in powers]


def _nucleus(probs: Sequence[float], p: float, *, crossing: bool = True) -> list[int]:
    kept: list[int] = []
    for i in sorted(range(len(probs)), key=lambda i: -probs[i]):
        if sum(probs[j] for j in kept) >= p - 1e-9:
            break
        kept.append(i)
    return sorted(kept if crossing else kept[:-1])


def _walk(probs: Sequence[float], kept: Sequence[int], u: float, *, scale: bool = True) -> int:
    """The token of `kept`, in its order, on whose piece of the line u falls."""
    total, reached = sum(probs[i] for i in kept) if scale else 1.0, 0.0
    for i in kept:
        reached += probs[i]
        if reached > u * total:
            return i
    return kept[-1] if kept else -1


@exercise(
    "09.1",
    "three steps: shape all probabilities, leave out the improbable, walk along what is left",
    "temperature is a power, the token that crosses p is kept, and what is left is rescaled",
)
def next_token(answer: Callable[[list[float], float, float, float], int]) -> str | None:
    numbers = [0.0, *(0.003 + i / 40 for i in range(40))]
    for t, p in ((1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.6), (1.0, 0.45), (3.0, 0.8)):
        for probs in CASES:
            found = [answer(list(probs), t, p, u) for u in numbers]
            if any(isinstance(i, bool) or not hasattr(i, "__index__") for i in found):
                return f"return the index of a token, a whole number, not {found[0]!r}"
            got = [int(i) for i in found]
            shaped = _powers(probs, 1 / t)
            kept = _nucleus(shaped, p)
            case = f"probs {probs}, t = {t}, p = {p}"
            if beyond := [i for i in got if i not in range(len(probs))]:
                return f"{case}: there is no token {beyond[0]}"

            def walks(shares: Sequence[float], kept: Sequence[int]) -> list[int]:
                return [_walk(shares, kept, u) for u in numbers]

            upside, soft = _powers(probs, t), _powers([math.exp(q / t) for q in probs], 1)
            turned, first, melted = (_nucleus(x, p) for x in (upside, probs, soft))
            late = _powers([q if i in first else 0.0 for i, q in enumerate(probs)], 1 / t)
            equal = [i for i, q in enumerate(shaped) if q >= min(shaped[j] for j in kept)]
            short = _nucleus(shaped, p, crossing=False) or _nucleus(shaped, 1e-9)
            order = sorted(kept, key=lambda i: -shaped[i])
            early = [i for i in range(len(probs)) if sum(shaped[:i]) < p - 1e-9]
            ways = {
                "your temperature acts the wrong way round: above 1 it flattens": (upside, turned),
                "the temperature changes nothing; dividing by t cancels out again": (probs, first),
                "softmax takes logits, the logarithms of probabilities": (soft, melted),
                "you cut before you heat; the temperature comes first": (late, first),
                "two tokens tie at the border; keep only as many as reach p": (shaped, equal),
                "nothing is cut, improbable tokens are still drawn": (shaped, [*range(len(probs))]),
                "the token with which the sum reaches p belongs to what is kept": (shaped, short),
                "right shares, but walk in the order of the list, not best first": (shaped, order),
                "cut by probability, best first, not in the order of the list": (shaped, early),
            }
            slips, wanted = {why: walks(*way) for why, way in ways.items()}, walks(shaped, kept)
            total = sum(shaped[i] for i in kept)
            within = [(i, u) for i, u in zip(got, numbers, strict=True) if u < total]
            place = next((i for i, found in enumerate(got) if found != wanted[i]), 0)
            said = f"for u = {numbers[place]:.3f} I expected {wanted[place]}, not {got[place]}"
            if got[1:] == wanted[1:]:
                said = f"for u = 0: token {got[0]} has been cut; the sum has to exceed u"
            if all(i == _walk(shaped, kept, u, scale=False) for i, u in within):
                said = "what is left sums to less than 1, and u may lie beyond: rescale it"
            if why := check_values(got, wanted, slips, otherwise=said):
                return f"{case}: {why}"
    return None


PREDICTIONS: dict[str, tuple[float, str]] = {
    "tokens left by top_p = 0.75": (2, "what do the first two have together?"),
    "tokens left by top_p = 0.76": (3, "the token with which the sum reaches p is kept"),
    "tokens left by top_k = 3": (3, "exactly k are kept, ties or not"),
    "tokens left by min_p = 0.3": (2, "compare each with 0.3 times the best one"),
    "tokens left by min_p = 0.3 after temperature 2": (
        4,
        "at temperature 2 the ratio of two probabilities becomes its square root",
    ),
    "probability of the first after top_k = 2": (2 / 3, "what is left must sum to 1"),
    "probability of the first after temperature 0.5": (
        8 / 11,
        "square all four, then divide by their sum",
    ),
    "probability of the first at a very high temperature": (0.25, "heat makes all tokens alike"),
}


@exercise(
    "09.2",
    "fill in the eight numbers before you compute any of them",
    "cuts look at sums, ranks or ratios; heat shrinks ratios, so it lets more tokens through",
)
def predictions(answer: Any) -> str | None:
    return check_table(answer, *apart(PREDICTIONS), near=0.006)


def _toy(ids: list[int]) -> Tensor:
    """Logits (5,) that depend on the last two ids; token 4 is the end."""
    generator = torch.Generator().manual_seed(sum((i + 2) * 7**k for k, i in enumerate(ids[-2:])))
    return torch.randn(5, generator=generator) * 1.5


def _endless(ids: list[int]) -> Tensor:
    """Logits (5,) that never give the end."""
    return _toy(ids).index_fill(0, torch.tensor(4), -math.inf)


def _batch(
    logits_after: Callable[[list[int]], Tensor],
    seed: int,
    count: int,
    max_new: int,
    end: int,
    *,
    named: bool,
    remove: bool,
) -> list[list[int]]:
    """The rows of a batch; not `named` or with `remove`, one of the two planted mistakes."""
    sampler, live = Sampler(seed=seed), list(range(count))
    rows: list[list[int]] = [[] for _ in range(count)]
    for _ in range(max_new):
        if not live:
            break
        logits = torch.stack([logits_after(rows[row]) for row in live])
        ids = sampler(logits, rows=list(live) if named else None).tolist()
        for row, token in zip(live, ids, strict=False):
            rows[row].append(token)
            if remove and token == end:
                live.remove(row)
        if not remove:
            live = [row for row in live if rows[row][-1] != end]
    return rows


@exercise(
    "09.3",
    "let rows end at different times, and compare each with the same row written alone",
    "a row keeps its number, its ids and its stream, whoever else is still in the batch",
)
def write_batch(answer: Callable[..., list[list[int]]]) -> str | None:
    end = 4
    for logits_after, count, max_new, seed in (
        (_toy, 1, 6, 0),
        (_toy, 6, 12, 40),
        (_toy, 9, 30, 7),
        (_endless, 2, 1, 0),
        (_endless, 2, 5, 0),
    ):
        try:
            found = answer(logits_after, Sampler(seed=seed), count, end, max_new)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError):
                raise
            if "non-empty" in str(error):
                return "when all rows have ended there is nothing left to stack: stop there"
            raise
        except ValueError as error:
            return f"the sampler or a loop refuses what you gave it: {error}"
        rows = [[int(i) for i in row] for row in found]
        if len(rows) != count:
            return f"{count} rows were asked for, you return {len(rows)}"
        case = logits_after, seed, count, max_new, end
        wanted = _batch(*case, named=True, remove=False)
        if rows == wanted:
            continue
        if rows == _batch(*case, named=False, remove=False):
            return "a row gets other random numbers when others have ended: which row is it?"
        if rows == _batch(*case, named=True, remove=True):
            return "`live` changes while a loop runs over it, and ids go to the wrong rows"
        if rows == _batch(*case, named=False, remove=True):
            return "two mistakes are left; look at what happens to `live` inside the inner loop"
        row = next(i for i in range(count) if rows[i] != wanted[i])
        if end in rows[row][:-1]:
            return f"row {row} of {count} goes on after its end token: {rows[row]}"
        if len(rows[row]) > max_new or (logits_after is _endless and len(rows[row]) < max_new):
            return f"row {row} of {count} has {len(rows[row])} ids, max_new is {max_new}"
        return f"row {row} of {count} is {rows[row]}, written alone it is {wanted[row]}"
    return None


@exercise(
    "09.4",
    "where one piece ends and the next begins must not matter",
    "tokens do not respect the borders of strings: search the joined text",
)
def until(answer: Callable[[list[str], str], str]) -> str | None:
    cases = [
        (["The", " end", ".", " And more"], " end."),
        (["a", "b", "c", "abd", "x"], "cab"),
        (["no", " stop", " here"], "END"),
        (["STOP at once"], "STOP"),
        (["one END two", " END three"], "END"),
        (["aa", "ab", "z"], "aab"),
        (["The", " e", "nd", ".", " And"], "end."),
        (["x", "E", "N", "D", "y"], "END"),
        (["a EN", "D b END c"], "END"),
    ]
    for pieces, stop in cases:
        text = "".join(pieces)
        want = text.partition(stop)[0]
        got = answer(list(pieces), stop)
        if not isinstance(got, str):
            return f"return a text, not {got!r}"
        if got == want:
            continue
        if got == text:
            across = not any(stop in piece for piece in pieces)
            why = "it lies across two pieces or more" if across else "it lies within one piece"
            return f"for {pieces} you ran past {stop!r}: {why}"
        if got == want + stop:
            return f"for {pieces} the stop string {stop!r} is still there: only what is before it"
        if got == text.rpartition(stop)[0]:
            return f"for {pieces} you stopped at the last {stop!r} instead of the first"
        if want.startswith(got) or got.startswith(want):
            return f"for {pieces} and {stop!r} the text before it is {want!r}, you return {got!r}"
        return f"for {pieces} and {stop!r} I expected {want!r}, not {got!r}"
    return None


def _typical_set(probs: Sequence[float], mass: float) -> list[int]:
    entropy = -sum(p * math.log(p) for p in probs if p)
    possible = [i for i, p in enumerate(probs) if p]
    order = sorted(possible, key=lambda i: abs(-math.log(probs[i]) - entropy))
    kept: list[int] = []
    while sum(probs[i] for i in kept) < mass - 1e-9:
        kept.append(order[len(kept)])
    return sorted(kept)


@exercise(
    "09.5",
    "how surprising is each token, and how surprising are they on average? then proceed as top-p "
    "does, in another order",
    "the best token may fall out: a typical token surprises as much as tokens do on average",
)
def typical(answer: Callable[[list[float], float], list[int]]) -> str | None:
    rows = [[0.4, 0.3, 0.15, 0.1, 0.05], [0.07, 0.7, 0.1, 0.05, 0.08], [0.97, 0.02, 0.01]]
    rows.append([0.5, 0, 0.5])  # something was cut before
    for probs in rows:
        for mass in (0.2, 0.5, 0.9):
            want = _typical_set(probs, mass)
            case, found = f"for {probs} and mass {mass}", answer(list(probs), mass)
            if isinstance(found, set | frozenset):
                return f"{case} you return a set, which has no order: return a list"
            got = [int(i) for i in found]
            if got == want:
                continue
            if not got:
                return f"{case} you kept no token: one at least must stay"
            if sorted(got) == want:
                return f"{case} these are the right tokens; return their indices in order, {want}"
            order = sorted(range(len(probs)), key=lambda i: -probs[i])
            if sorted(got) in (sorted(order[: len(got)]), _nucleus(probs, mass)):
                return (
                    f"{case} you kept the most probable tokens: typical ones are those whose "
                    f"-log p is near the entropy, here {want}"
                )
            if set(got) < set(want):
                return f"{case} your tokens do not reach the mass: the one that crosses it is kept"
            return f"{case} I expected {want}, not {sorted(got)}"
    return None
