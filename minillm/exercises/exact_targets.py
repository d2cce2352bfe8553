"""Graders of 10_exact_targets: what ignorance costs, the targets of a draw, their loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from minillm.exercises import check_values, exercise
from minillm.training import cross_entropy


@exercise(
    "10_exact_targets.1",
    "for each of the draws, write down what the model says of a card that is left, and the truth",
    "a rule about what must not be said is worth little, and less the more cards there are",
)
def _ignorance(answer: Callable[[int, int], float]) -> str | None:
    for cards, drawn in ((16, 2), (4, 2), (12, 4), (24, 1), (5, 5)):
        got = float(answer(cards, drawn))
        want = math.fsum(math.log(cards / (cards - k)) for k in range(drawn))
        case = f"{cards} cards, {drawn} drawn"
        later = drawn - 1
        slips = {
            "these are bits, asked are nats": want / math.log(2),
            "the model pays too much: the number is positive": -want,
            "the third card has two that are gone before it, not one": (
                later * math.log(cards / (cards - 1)) if cards > 1 else math.nan
            ),
            "that is what the story pays in all; asked is what it pays too much": (
                drawn * math.log(cards)
            ),
            "that is what a perfect model pays": math.fsum(
                math.log(cards - k) for k in range(drawn)
            ),
            "that is the last draw alone": math.log(cards / (cards - later)),
            "at the first draw nothing is gone": math.fsum(
                math.log(cards / (cards - k)) for k in range(1, min(drawn + 1, cards))
            ),
        }
        said = f"{got:.4g} nats, and it is {want:.4g}"
        if why := check_values(got, want, slips, otherwise=said):
            return f"{case}: {why}"
    return None


LEFT: list[tuple[list[tuple[str, ...]], tuple[str, ...]]] = [
    ([("fox",), ("owl",), ("ox",)], ("owl",)),
    ([("a", "fox"), ("an", "owl"), ("an", "ox"), ("a", "red", "panda")], ("an", "ox")),
    ([("a", "fox"), ("an", "owl"), ("an", "ox"), ("a", "red", "panda")], ("a", "red", "panda")),
    (
        [("a", "red", "panda"), ("a", "red", "fox"), ("a", "hen"), ("an", "owl")],
        ("a", "red", "fox"),
    ),
    (  # the whole beginning counts, not the token before
        [("a", "red", "hen"), ("one", "red", "fox"), ("one", "red", "ant"), ("one", "owl")],
        ("one", "red", "fox"),
    ),
]


def _truth(
    left: Sequence[tuple[str, ...]], drawn: tuple[str, ...], *, same_from: Callable[[int], int]
) -> list[dict[str, float]]:
    """Counts at each place k, among the cards that are as drawn from same_from(k) up to k."""
    found = []
    for k in range(len(drawn)):
        begin = slice(same_from(k), k)
        there = [card[k] for card in left if len(card) > k and card[begin] == drawn[begin]]
        found.append({t: there.count(t) / len(there) for t in there})
    return found


def _equal(a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]]) -> bool:
    return all(
        x.keys() == y.keys() and all(math.isclose(x[t], y[t], abs_tol=1e-6) for t in x)
        for x, y in zip(a, b, strict=True)
    )


@exercise(
    "10_exact_targets.2",
    "at each token, which cards can it still be, and what comes next in each of them?",
    "an exact target is counting among what is still possible, one token at a time",
)
def _draw_targets(
    answer: Callable[[list[tuple[str, ...]], tuple[str, ...]], list[dict[str, float]]],
) -> str | None:
    for left, drawn in LEFT:
        got, want = answer(list(left), drawn), _truth(left, drawn, same_from=lambda k: 0)
        case = f"{' '.join(drawn)!r} among {', '.join(' '.join(card) for card in left)}"
        if not isinstance(got, list | tuple) or len(got) != len(drawn):
            return f"{case}: return a list of {len(drawn)} dictionaries, one for each token"
        if not all(isinstance(row, Mapping) for row in got):
            return f"{case}: each entry is a dictionary, token -> probability"
        got = [{t: float(p) for t, p in row.items() if p} for row in got]
        if _equal(got, want):
            continue
        if _equal(got, [{token: 1.0} for token in drawn]):
            return f"{case}: that is the sample, what came has probability 1"
        if _equal(got, _truth(left, drawn, same_from=lambda k: k)):
            return f"{case}: after the first token only cards that begin with it are possible"
        if _equal(got, _truth(left, drawn, same_from=lambda k: max(k - 1, 0))):
            return f"{case}: all tokens so far must be the drawn card's, not only the last one"
        if _equal(got, [dict.fromkeys(row, 1 / len(row)) for row in want]):
            return f"{case}: the *cards* are equally likely, not the tokens: count them"
        if any(not math.isclose(sum(row.values()), 1, abs_tol=1e-6) for row in got):
            sums = ", ".join(f"{sum(row.values()):.3g}" for row in got)
            return f"{case}: the probabilities at each token sum to 1, yours to {sums}"
        k = next(k for k, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1])
        return f"{case}: token {k + 1} is not right yet: {got[k]}"
    return None


@exercise(
    "10_exact_targets.3",
    "how many numbers does mean() divide by, and how many targets are there?",
    "divide by the targets that count: not by the vocabulary, not by the padding",
)
def _expected_loss(answer: Callable[[Tensor, Tensor], Tensor]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for rows, length, size, padded in ((2, 5, 7, 0), (3, 6, 5, 2), (4, 3, 9, 1)):
        logits = 2 * torch.randn(rows, length, size, generator=generator)
        targets = torch.rand(rows, length, size, generator=generator).square()
        targets[0, 0] = torch.eye(size)[1]  # a sample among them
        targets /= targets.sum(-1, keepdim=True)
        if padded:
            targets[1:, -padded:] = 0
        want = float(cross_entropy(logits, targets))
        got = torch.as_tensor(answer(logits.clone(), targets.clone()))
        case = f"logits ({rows}, {length}, {size}), {padded} padded in all rows but the first"
        if got.numel() != 1:
            return f"{case}: the loss is one number, yours has the shape {tuple(got.shape)}"
        counted = targets.sum(-1) > 0
        total = want * int(counted.sum())
        nonzero = targets[targets > 0]
        entropy = float(-(nonzero * nonzero.log()).sum()) / int(counted.sum())
        slips = {
            "mean() divides by the size of the vocabulary as well": total / logits.numel(),
            "padding is no target: divide by the targets that count": total / (rows * length),
            "this is the sum of all targets, asked is the loss of one": total,
            "the sign: a loss is positive": -want,
            "this is the divergence from the target, without the target's own entropy": (
                want - entropy
            ),
            "the softmax is missing: logits are no log-probabilities": float(
                -(targets * logits).sum() / counted.sum()
            ),
            "only the likeliest token of each target counts here": float(
                -logits.log_softmax(-1)
                .gather(-1, targets.argmax(-1, keepdim=True))[..., 0][counted]
                .mean()
            ),
        }
        said = f"{float(got):.4f} nats, and it is {want:.4f}"
        if why := check_values(float(got), want, slips, near=1e-4, otherwise=said):
            return f"{case}: {why}"
    return None
