"""Graders of deeper/10_your_own_part: a step of the sampler, closed doors, a loss's slopes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.exercises import check_table, check_values, exercise

# Ids of the rows, n, and what is asked; the mistakes below name themselves on one of them.
_BLOCKED: tuple[tuple[list[list[int]], int], ...] = (
    ([[1, 2, 4, 2, 3, 1, 2]], 3),
    ([[1, 2, 3, 1, 2]], 3),
    ([[1, 2, 3, 1]], 2),
    ([[5, 5, 6]], 1),
    ([[1, 2], [2, 1]], 2),
    ([[1, 2, 1], [4, 3, 4]], 2),
    ([[-1, -1, 2, 3, 2]], 2),
    ([[-1, 4, -1]], 2),
    ([[3, 3, 3]], 2),
    ([[1]], 4),
    ([[1, 2, 3]], 4),
)


def _banned(ids: list[int], n: int) -> set[int]:
    """What would write n ids in a row that are there already, none of them padding."""
    runs = [ids[i : i + n] for i in range(len(ids) - n + 1)]
    last = ids[len(ids) - n + 1 :]
    return {r[-1] for r in runs if min(r) >= 0 and r[:-1] == last} if len(last) == n - 1 else set()


def _mistakes(rows: list[list[int]], n: int) -> dict[str, list[set[int]]]:
    """What is forbidden in each row if one thing is wrong."""
    return {
        "nothing is forbidden": [set() for _ in rows],
        "a token may come again; what may not is n in a row": [{*r} - {-1} for r in rows],
        "that is one too few in a row: n ids, the new one included": [
            _banned(r, n - 1) if n > 1 else set() for r in rows
        ],
        "each row has its own past": [_banned(rows[0], n)] * len(rows),
        "look at all places where the last n - 1 ids stood, not at one": [
            {next(iter(_banned(r, n)))} if _banned(r, n) else set() for r in rows
        ],
    }


@exercise(
    "10_your_own_part.1",
    "which n - 1 ids stand last, and what came after them each time before?",
    "a blocker looks for the last n - 1 ids in the past, and forbids what followed them",
)
def _no_repeats(answer: Callable[[Tensor, Tensor, int], Any]) -> str | None:
    for rows, n in _BLOCKED:
        logits = torch.linspace(-1, 1, 8).repeat(len(rows), 1)
        given = logits.clone()
        case = f"ids {rows}, n={n}"
        got = answer(given, torch.tensor(rows), n)
        if not isinstance(got, Tensor) or got.shape != logits.shape:
            what = tuple(got.shape) if isinstance(got, Tensor) else got
            return f"{case}: return scores {tuple(logits.shape)}, not {what!r:.60}"
        if not torch.equal(given, logits):
            return f"{case}: the scores that were given have changed; take a copy"
        found = [{i for i in range(8) if row[i] == -math.inf} for row in got]
        want = [_banned(r, n) for r in rows]
        rest = torch.where(got == -math.inf, logits, got)
        if not torch.equal(rest, logits):
            return f"{case}: a score that stays must not change, and a forbidden one is -inf"
        if found == want:
            continue
        if any(-1 in r for r in rows) and found != want:
            return f"{case}: padding is part of nothing; forbidden should be {want}, not {found}"
        for why, ids in _mistakes(rows, n).items():
            if found == ids:
                return f"{case}: {why}"
        return f"{case}: forbidden should be {want}, not {found}"
    return None


HAPPENS = {
    "layer.mlp = SquaredReLU(...) in each layer, then train": "works",
    "the same, then save_pretrained": "refused",
    "`Forgets` writes with a cache": "silent",
    "`Forgets` trains": "works",
    "save_pretrained of your family, from_pretrained in a program without it": "refused",
    "`Growing` as batches, and the run is resumed": "works",
    "packed() of a model with your attention": "refused",
    "a loss that counts targets of -100 as if they were token 0": "silent",
}
_WHY = (
    "a layer calls whatever stands there",
    "the config does not know the new part, so a reader would build another model",
    "its cache lacks half of the keys, and nobody but a test compares",
    "there is no cache in training, so nothing is lacking",
    "the name stands in config.json, and no other program has it in its table",
    "it says where it stands, with state_dict",
    "packed() computes the parts itself, and names the one that it does not know",
    "padding is learned as if it were text; nothing says so",
)


@exercise(
    "10_your_own_part.2",
    "who could know that something is wrong at that moment?",
    "a door that knows a part by name can refuse; what merely calls it cannot, so test the part",
)
def _happens(answer: Any) -> str | None:
    kinds = ("works", "refused", "silent")
    hints = dict(zip(HAPPENS, _WHY, strict=True))
    return check_table(
        answer, HAPPENS, hints, kind='"works", "refused" or "silent"', fits=lambda x: x in kinds
    )


def _slopes(logits: Tensor, targets: Tensor, weight: float) -> Tensor:
    counts = (targets != -100)[..., None]
    log_z = logits.logsumexp(-1, keepdim=True)
    return 2 * weight * log_z * logits.softmax(-1) * counts / counts.sum()


@exercise(
    "10_your_own_part.3",
    "how does log Z change with one score? and what is the slope of a square?",
    "the z-loss pulls at each score by its probability, the harder the larger log Z is",
)
def _z_slopes(answer: Callable[[Tensor, Tensor, float], Any]) -> str | None:
    generator = torch.Generator().manual_seed(3)
    logits = 3 + torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(7, (2, 5), generator=generator)
    for cut in (0, 3):
        targets = targets.clone()
        targets[1, 5 - cut :] = -100
        want, got = _slopes(logits, targets, 0.01), answer(logits.clone(), targets.clone(), 0.01)
        if not isinstance(got, Tensor) or got.shape != logits.shape:
            what = tuple(got.shape) if isinstance(got, Tensor) else got
            return f"a slope for each score, {tuple(logits.shape)}, not {what!r:.60}"
        counts = (targets != -100)[..., None]
        mistakes = {
            "the slope of log Z ** 2 is twice log Z times the slope of log Z": want / 2,
            "the slopes of a mean, not of a sum": want * counts.sum(),
            "the slope of log Z for one score is its probability, the softmax": (
                2 * 0.01 * logits.logsumexp(-1, keepdim=True) * counts / counts.sum()
            ).expand_as(want),
            "log Z is missing: the slope of a square is in proportion to what was squared": (
                2 * 0.01 * logits.softmax(-1) * counts / counts.sum()
            ),
            "positions with a target of -100 do not count, and get 0": (
                _slopes(logits, torch.zeros_like(targets), 0.01)
            ),
            "the divisor is right, but the slope of a target of -100 is 0": (
                _slopes(logits, torch.zeros_like(targets), 0.01) * targets.numel() / counts.sum()
            ),
            "the mean is over the positions that count": want * counts.sum() / targets.numel(),
            "the weight is missing": want / 0.01,
            "that is the slope of the cross-entropy: the targets are no part of log Z": (
                (logits.softmax(-1) - torch.eye(7, dtype=torch.float64)[targets.clamp(min=0)])
                * counts
                / counts.sum()
            ),
        }
        b, t, v = (int(i) for i in torch.unravel_index((got - want).abs().argmax(), want.shape))
        said = f"the slope of score [{b}, {t}, {v}] is {want[b, t, v]:.4g}, not {got[b, t, v]:.4g}"
        if why := check_values(got, want, mistakes, near=1e-5, otherwise=said):
            return why
    return None
