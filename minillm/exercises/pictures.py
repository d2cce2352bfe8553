"""Graders of 16: patches, what a picture costs, pixel shuffle, which picture a token may see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minillm.exercises import check_table, check_values, exercise


def _shape(x: Any) -> str:
    return f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else repr(x)


@exercise(
    "16.1",
    "which two of the numbers that count pixels say which patch, and which two say where in it?",
    "a patch is a row of numbers; cutting is an order of axes, and no number is computed",
)
def _patches(answer: Callable[[Tensor, int], Any]) -> str | None:
    for B, channels, height, width, p in ((1, 1, 4, 6, 2), (2, 5, 6, 4, 2), (1, 2, 6, 9, 3)):
        pixels = torch.arange(B * channels * height * width).float()
        pixels = pixels.view(B, channels, height, width)
        wanted = F.unfold(pixels, p, stride=p).mT
        got = answer(pixels.clone(), p)
        if not isinstance(got, Tensor) or got.shape != wanted.shape:
            return f"(B, N, channels p p) is {tuple(wanted.shape)} here, not {_shape(got)}"
        columns = width // p
        turned = wanted.unflatten(1, (-1, columns)).transpose(1, 2).flatten(1, 2)
        last = wanted.unflatten(2, (channels, -1)).transpose(2, 3).flatten(2)
        slips = {
            "a reshape alone cuts strips of rows, no squares: axes have to change places": (
                pixels.reshape(wanted.shape)
            ),
            "the patches go down the columns; they should go along the rows": turned,
            "in each patch all pixels of a channel come first, then the next channel": last,
        }
        case, found = f"{channels} channels of {height} x {width}, p = {p}", got[0, 0].tolist()
        said = f"{case}: the first patch is {found}, and should be {wanted[0, 0].tolist()}"
        if why := check_values(got, wanted, slips, otherwise=said):
            return why
    return None


COSTS = {
    "patches of a picture of 336 x 336, patches of 14": 576,
    "vectors that ViT-B/16 makes of 224 x 224 pixels, class token included": 197,
    "weights of the convolution of ViT-B/16 (3 channels to 768 numbers, with biases)": 590_592,
    "times as many patches if both sides of a picture are doubled": 4,
    "times as many scores in a layer of the tower then (without class token)": 16,
    "bytes of keys and values of 576 placeholders in a Llama 7B, in 16 bits": 301_989_888,
}
PATCHES, VECTORS, WEIGHTS, DOUBLED, SCORES, BYTES = COSTS


@exercise(
    "16.2",
    "336 / 14 patches along each side",
    "resolution is paid for twice: in patches, and in the square of patches inside the tower",
)
def _costs(answer: Any) -> str | None:
    hints = {
        PATCHES: "patches along one side, times those along the other",
        VECTORS: "patches, and one more",
        WEIGHTS: "each output number has a weight for each pixel of each channel, and a bias",
        DOUBLED: "twice as many rows of patches, and twice as many columns",
        SCORES: "each patch reads each patch",
        BYTES: "tokens x layers (32) x keys and values x numbers (4,096) x bytes of a number",
    }
    return check_table(answer, COSTS, hints)


def pixel_shuffle(features: Tensor, grid: tuple[int, int], r: int) -> Tensor:
    """Each r x r neighbours as one vector, row by row. (B, N, C) -> (B, N / r^2, C r^2)."""
    x = features.unflatten(1, grid).movedim(3, 1)  # (B, C, rows, columns)
    blocks = F.unfold(x, r, stride=r).unflatten(1, (x.shape[1], r * r))  # (B, C, r r, N / r^2)
    return blocks.permute(0, 3, 2, 1).flatten(2)


def _exchanged(features: Tensor, grid: tuple[int, int], r: int) -> Tensor:
    """Cut as if the grid were (columns, rows)."""
    return pixel_shuffle(features, (grid[1], grid[0]), r)


def _squares_down(features: Tensor, grid: tuple[int, int], r: int) -> Tensor:
    """The squares in the order of columns."""
    blocks = pixel_shuffle(features, grid, r)
    return blocks.unflatten(1, (grid[0] // r, grid[1] // r)).transpose(1, 2).flatten(1, 2)


def _patches_down(features: Tensor, grid: tuple[int, int], r: int) -> Tensor:
    """The patches of a square in the order of columns."""
    blocks = pixel_shuffle(features, grid, r).unflatten(2, (r, r, -1))
    return blocks.transpose(2, 3).flatten(2)


def _numbers_first(features: Tensor, grid: tuple[int, int], r: int) -> Tensor:
    """The first number of each patch, then the second of each."""
    blocks = pixel_shuffle(features, grid, r)
    return blocks.unflatten(2, (r * r, -1)).transpose(2, 3).flatten(2)


# mistakes with pixel shuffle, and what is said about each
_SHUFFLED: dict[str, Callable[[Tensor, tuple[int, int], int], Tensor]] = {
    "a reshape alone joins patches of one row, not a square of them": lambda x, grid, r: x.reshape(
        len(x), -1, x.shape[2] * r * r
    ),
    "keep the numbers of a patch together, one patch after the other": _numbers_first,
    "the right patches are joined; within a square go along the rows": _patches_down,
    "the squares go down the columns; they should go along the rows": _squares_down,
    "the grid is (rows, columns): you cut it as (columns, rows)": _exchanged,
}


@exercise(
    "16.3",
    "cut the grid as 16.1 cuts pixels: a vector is now what a pixel was",
    "fewer, longer vectors: r x r times fewer placeholders, and nothing is thrown away",
)
def _pixel_shuffle(answer: Callable[[Tensor, tuple[int, int], int], Any]) -> str | None:
    # the first grid tells all mistakes apart: in one of two rows, exchanged sides are a reshape
    for rows, columns, C, r in ((4, 6, 3, 2), (2, 4, 3, 2), (6, 12, 2, 3), (6, 4, 1, 2)):
        features = torch.arange(2 * rows * columns * C).float().view(2, rows * columns, C)
        wanted = pixel_shuffle(features, (rows, columns), r)
        got = answer(features.clone(), (rows, columns), r)
        case = f"a grid of {rows} x {columns}, r = {r}"
        twos = pixel_shuffle(features, (rows, columns), 2)
        if r > 2 and isinstance(got, Tensor) and torch.equal(got, twos):
            return f"{case}: you join squares of 2 x 2, whatever r is"
        if not isinstance(got, Tensor) or got.shape != wanted.shape:
            return f"{case}: the result is {tuple(wanted.shape)}, not {_shape(got)}"
        slips = {why: slip(features, (rows, columns), r) for why, slip in _SHUFFLED.items()}
        said = f"the first vector is {got[0, 0].tolist()}"
        if why := check_values(got, wanted, slips, otherwise=said):
            return f"{case}: {why}"
    return None


def picture_mask(ids: Tensor, mark: int, features: int) -> Tensor:
    """(B, T, P features): which features of which picture each token may read."""
    seen = (ids == mark).cumsum(1)  # (B, T): the number of the last picture, 0 before the first
    pictures = int(seen.max())
    which = torch.arange(1, pictures + 1, device=ids.device).repeat_interleave(features)
    return seen[..., None] == which


@exercise(
    "16.4",
    "how many marks has a token seen, itself included?",
    "a token sees one picture, earlier ones through the text that was written about them",
)
def _picture_mask(answer: Callable[[Tensor, int, int], Any]) -> str | None:
    for ids, mark, n in (
        (torch.tensor([[9, 1, 2, 9, 3], [4, 9, 5, 6, 9]]), 9, 2),
        (torch.tensor([[9, 1, 2], [9, 4, 9]]), 9, 2),  # not the first row has most
        (torch.tensor([[1, 2, 0, 3]]), 0, 3),
        (torch.tensor([[7, 7, 7, 1]]), 7, 1),
    ):
        wanted = picture_mask(ids, mark, n)
        got = answer(ids.clone(), mark, n)
        case = f"ids {ids.tolist()}, mark {mark}, {n} features"
        if not isinstance(got, Tensor) or got.dtype != torch.bool or got.shape != wanted.shape:
            return f"{case}: the mask should be bool {tuple(wanted.shape)}, not {_shape(got)}"
        seen = (ids == mark).cumsum(1)[..., None]
        earlier = seen - (ids == mark)[..., None].long()
        which = torch.arange(1, wanted.shape[2] // n + 1).repeat_interleave(n)
        mixed = which.view(-1, n).T.flatten()
        slips = {
            "turned round: True is where a token may read": ~wanted,
            "all features of the first picture come first, then the second's": seen == mixed,
            "a token sees the last picture before it, no earlier one": seen >= which,
            "the mark itself sees its picture already": earlier == which,
        }
        b, t = divmod(int((got != wanted).any(-1).int().argmax()), ids.shape[1])
        said = f"row {b}, token {t} is {got[b, t].int().tolist()}"
        if (got & (seen < which)).any():
            said = "a token reads a picture that comes after it"
        if why := check_values(got, wanted, slips, otherwise=said):
            return f"{case}: {why}"
    return None
