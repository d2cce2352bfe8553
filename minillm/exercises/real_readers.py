"""Graders of two real readers: positions by hand, numbers, later positions, forbidden rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.attention import softmax
from minillm.deeper.pictures.qwen_vl import mrope_positions
from minillm.exercises import check_table, exercise

Layout = list[Any]  # numbers of words, and pairs: rows and columns of a picture's features


def _positions(layout: Layout) -> tuple[list[list[int]], int]:
    ids: list[int] = []
    for part in layout:
        ids += [0] * part if isinstance(part, int) else [1] * (part[0] * part[1])
    grids = [[1, *part] for part in layout if not isinstance(part, int)]
    table = torch.tensor(grids) if grids else None
    rows, delta = mrope_positions(torch.tensor([ids]), table, placeholder_ids=[1], merge_size=1)
    return rows[:, 0].tolist(), int(delta)


@exercise(
    "16_real_readers.1",
    "a word has three equal positions; where does a picture begin, and where does the text go on?",
    "three rows say where everything stands, and delta says it for all that is still to come",
)
def _by_hand(answer: Callable[[Layout], Any]) -> str | None:
    for layout in ([3], [2, (2, 3), 3], [(3, 1), 1], [1, (2, 2)], [1, (1, 5), 2, (4, 2), 3]):
        wanted, delta = _positions(layout)
        found = answer([tuple(p) if isinstance(p, tuple) else p for p in layout])
        if not isinstance(found, tuple) or len(found) not in (2, 4):
            return f"return the three rows and delta, not {found!r}"
        rows = list(found[0]) if len(found) == 2 else list(found[:3])
        if len(rows) != 3:
            return f"{layout}: there should be three rows, not {len(rows)}"
        rows = [[int(x) for x in row] for row in rows]
        for name, row, right in zip(("time", "height", "width"), rows, wanted, strict=True):
            if len(row) != len(right):
                return f"{layout}: {name} has {len(row)} positions for {len(right)} tokens"
            if row == right:
                continue
            if rows[1] == wanted[2] and rows[2] == wanted[1]:
                return f"{layout}: height and width are exchanged; a picture is (rows, columns)"
            i = next(i for i in range(len(row)) if row[i] != right[i])
            if row[i] == i:
                return (
                    f"{layout}: {name} of token {i} is {i}, its number: how far did the picture "
                    "move the text on?"
                )
            return f"{layout}: {name} of token {i} is {row[i]}, and should be {right[i]}"
        if int(found[-1]) != delta:
            hint = "the next position, less the number of tokens"
            return f"{layout}: delta is {int(found[-1])}, and should be {delta}: {hint}"
    return None


PREDICTED = {
    "placeholders of the picture": 256,
    "position of the first word after the picture": 26,
    "delta": -240,
    "position of the 5th word of the answer": 50,
    "pairs of a head of 128 that turn by width": 24,
    "pairs of a head of 80 in the tower that turn by column": 20,
}
PLACES, FIRST, DELTA, FIFTH, WIDE, COLUMN = PREDICTED
HINTS = {
    PLACES: "32 x 32 patches, and four of them become one feature",
    FIRST: "10 words, then the larger side of the picture, in features",
    DELTA: "the next position, less the number of tokens: all 286 of them",
    FIFTH: "4 words of the answer stand before it; so how many tokens, and what is delta?",
    WIDE: "three sections make 64 pairs; width has the last",
    COLUMN: "half of the pairs turn by row, half by column",
}


@exercise(
    "16_real_readers.2",
    "count features, not patches; a picture moves the text on by its larger side",
    "a picture costs tokens by its area and positions by its side",
)
def _predicted(answer: Any) -> str | None:
    return check_table(answer, PREDICTED, HINTS)


@exercise(
    "16_real_readers.3",
    "which tokens of a row count, and whose delta is added?",
    "positions count real tokens; each row has a delta of its own",
)
def _later(answer: Callable[[Tensor, Tensor, int], Any]) -> str | None:
    for rows, deltas, n in (
        ([[1, 1, 1, 1]], [-2], 3),
        ([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], [-2, -4], 2),
        ([[0, 1, 1], [1, 1, 1], [0, 0, 1]], [0, -1, 0], 4),
    ):
        mask, delta = torch.tensor(rows), torch.tensor(deltas)[:, None]
        steps = torch.arange(n)
        wanted = mask.sum(1, keepdim=True) + delta + steps
        got = answer(mask.clone(), delta.clone(), n)
        if not isinstance(got, Tensor) or got.shape != wanted.shape:
            shape = tuple(got.shape) if isinstance(got, Tensor) else repr(got)
            return f"return {tuple(wanted.shape)}, not {shape}"
        if torch.equal(got, wanted):
            continue
        case = f"mask {rows}, delta {deltas}"
        if torch.equal(got, mask.shape[1] + delta + steps):
            return f"{case}: padding is counted as if it were read"
        if torch.equal(got, wanted - delta):
            return f"{case}: delta is missing"
        if torch.equal(got - wanted, torch.full_like(got, int(got[0, 0] - wanted[0, 0]))):
            return f"{case}: all are off by {int(got[0, 0] - wanted[0, 0])}"
        return f"{case}: {got.tolist()} should be {wanted.tolist()}"
    return None


@exercise(
    "16_real_readers.4",
    "what is the softmax of a row in which every score is minus infinity?",
    "zero weights read nothing, and zero times a gate adds nothing: such a token passes unchanged",
)
def _rows(answer: Callable[[Tensor, Tensor], Any]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for T, S, around in ((3, 4, 0), (5, 2, 0), (2, 6, 200), (4, 3, -200)):
        scores = around + 3 * torch.randn(T, S, generator=generator)
        mask = torch.rand(T, S, generator=generator) < 0.6
        mask[0], mask[1:, 0] = False, True
        wanted = softmax(scores.masked_fill(~mask, -torch.inf), -1)
        got = answer(scores.clone(), mask.clone())
        if not isinstance(got, Tensor) or got.shape != wanted.shape:
            shape = tuple(got.shape) if isinstance(got, Tensor) else repr(got)
            return f"return {(T, S)}, not {shape}"
        if got[1:].isnan().any():
            return f"a row that may look gives NaN, with scores around {around}"
        if got.isnan().any():
            return "a forbidden row gives NaN: 0 / 0"
        if torch.allclose(got, wanted, atol=1e-6):
            continue
        if not torch.allclose(got[0], wanted[0], atol=1e-6):
            if torch.allclose(got[0].sum(), torch.tensor(1.0)):
                return "the forbidden row reads with weights that sum to 1: everything is allowed"
            return f"the forbidden row should be zeros, not {got[0].tolist()}"
        case = f", with scores around {around}" if around else ""
        return f"a row that may look is not the softmax of the scores that it may see{case}"
    return None
