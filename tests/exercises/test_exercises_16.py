"""The graders of 16 accept right answers and say what is wrong with wrong ones."""

import pytest
import torch

from minillm.beyond.pictures.vision import cut_patches
from minillm.exercises import grade
from minillm.exercises.pictures import COSTS, picture_mask, pixel_shuffle

PATCHES, VECTORS, WEIGHTS, DOUBLED, SCORES, BYTES = COSTS


def columns_first(pixels, p):
    grid = pixels.unflatten(3, (-1, p)).unflatten(2, (-1, p))
    return grid.permute(0, 4, 2, 1, 3, 5).flatten(3).flatten(1, 2)


def channels_last(pixels, p):
    grid = pixels.unflatten(3, (-1, p)).unflatten(2, (-1, p))
    return grid.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def transposed_inside(pixels, p):
    grid = pixels.unflatten(3, (-1, p)).unflatten(2, (-1, p))
    return grid.permute(0, 2, 4, 1, 5, 3).flatten(3).flatten(1, 2)


def by_hand(features, grid, r):
    x = features.unflatten(1, grid).unflatten(2, (-1, r)).unflatten(1, (-1, r))
    return x.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)


def by_columns(features, grid, r):
    x = features.unflatten(1, grid).unflatten(2, (-1, r)).unflatten(1, (-1, r))
    return x.permute(0, 1, 3, 4, 2, 5).flatten(3).flatten(1, 2)


def squares_by_columns(features, grid, r):
    x = features.unflatten(1, grid).unflatten(2, (-1, r)).unflatten(1, (-1, r))
    return x.permute(0, 3, 1, 2, 4, 5).flatten(3).flatten(1, 2)


def channels_together(features, grid, r):
    x = features.unflatten(1, grid).unflatten(2, (-1, r)).unflatten(1, (-1, r))
    return x.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2)


def exchanged(features, grid, r):
    return pixel_shuffle(features, (grid[1], grid[0]), r)


def strips(features, grid, r):
    return features.reshape(len(features), -1, r * r * features.shape[2])


def loop_mask(ids, mark, n):
    pictures = int((ids == mark).sum(1).max())
    mask = torch.zeros(*ids.shape, pictures * n, dtype=torch.bool)
    for b, row in enumerate(ids.tolist()):
        last = -1
        for t, token in enumerate(row):
            last += token == mark
            if last >= 0:
                mask[b, t, last * n : (last + 1) * n] = True
    return mask


def all_before(ids, mark, n):
    which = torch.arange(1, int((ids == mark).sum(1).max()) + 1).repeat_interleave(n)
    return (ids == mark).cumsum(1)[..., None] >= which


def after_the_mark(ids, mark, n):
    seen = (ids == mark).cumsum(1) - (ids == mark).long()
    return seen[..., None] == torch.arange(
        1, int((ids == mark).sum(1).max()) + 1
    ).repeat_interleave(n)


def of_the_first_row(ids, mark, n):
    which = torch.arange(1, int((ids == mark)[0].sum()) + 1).repeat_interleave(n)
    return (ids == mark).cumsum(1)[..., None] == which


RIGHT = {"16.1": cut_patches, "16.2": COSTS, "16.3": by_hand, "16.4": loop_mask}
WRONG = [
    ("16.1", lambda x, p: x.reshape(len(x), -1, x.shape[1] * p * p), "a reshape alone cuts strips"),
    ("16.1", columns_first, "go down the columns"),
    ("16.1", channels_last, "all pixels of a channel come first"),
    ("16.1", transposed_inside, "the first patch is"),
    ("16.1", lambda x, p: cut_patches(x[:, :3], p), "(2, 6, 20) here, not (2, 6, 12)"),
    ("16.1", lambda x, p: x, "(B, N, channels p p) is (1, 6, 4) here"),
    ("16.2", COSTS | {PATCHES: 24}, "patches along one side"),
    ("16.2", COSTS | {VECTORS: 196}, "patches, and one more"),
    ("16.2", COSTS | {WEIGHTS: 589_824}, "and a bias"),
    ("16.2", COSTS | {SCORES: 4}, "each patch reads each patch"),
    ("16.2", COSTS | {BYTES: 150_994_944}, "keys and values"),
    ("16.2", COSTS | {DOUBLED: ...}, "not filled in"),
    ("16.2", COSTS | {VECTORS: float("nan")}, "patches, and one more"),
    ("16.3", squares_by_columns, "the squares go down the columns"),
    ("16.3", strips, "a reshape alone joins patches of one row"),
    ("16.3", by_columns, "within a square go along the rows"),
    ("16.3", channels_together, "keep the numbers of a patch together"),
    ("16.3", lambda x, grid, r: x, "the result is (2, 6, 12)"),
    ("16.3", lambda x, grid, r: pixel_shuffle(x, grid, r).flip(1), "the first vector is"),
    ("16.3", exchanged, "you cut it as (columns, rows)"),
    ("16.4", all_before, "sees the last picture before it, no earlier one"),
    ("16.4", after_the_mark, "the mark itself sees its picture"),
    ("16.4", lambda *a: ~picture_mask(*a), "turned round"),
    ("16.4", of_the_first_row, "should be bool (2, 3, 4), not (2, 3, 2)"),
    ("16.4", lambda *a: picture_mask(*a).float(), "should be bool"),
    ("16.4", lambda *a: torch.ones_like(picture_mask(*a)), "a picture that comes after it"),
    ("16.4", lambda *a: torch.zeros_like(picture_mask(*a)), "row 0, token 0 is"),
]


@pytest.mark.parametrize(
    ("which", "answer"),
    [
        ("16.1", lambda x, p: torch.nn.functional.unfold(x, p, stride=p).transpose(1, 2)),
        ("16.3", pixel_shuffle),
        ("16.4", picture_mask),
    ],
)
def test_other_right_answers(which, answer):
    result = grade(which, answer)
    assert result.status == "correct", result.message
