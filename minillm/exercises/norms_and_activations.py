"""Graders of 06_norms_and_activations: what the final norm divides by, bytes that are moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.exercises import check_table, check_values, exercise

__all__: list[str] = []

Branches = list[Callable[[Tensor], Tensor]]


def _size(x: Tensor) -> Tensor:
    return x.pow(2).mean().sqrt()


def _through(x: Tensor, branches: Branches, *, pre: bool = True, add: bool = True) -> Tensor:
    for branch in branches:
        y = branch(x / _size(x) if pre else x)
        x = x + y if add else y
    return x


def _post(x: Tensor, branches: Branches) -> Tensor:
    for branch in branches:
        x = x + branch(x)
        x = x / _size(x)
    return x


MISTAKES: dict[str, Callable[[Tensor, Branches], Tensor]] = {
    "the branches' results are added to the stream, they do not replace it": lambda x, b: _size(
        _through(x, b, add=False)
    ),
    "each branch is to be given the normed stream": lambda x, b: _size(_through(x, b, pre=False)),
    "in pre-norm nothing divides the stream itself": lambda x, b: _size(_post(x, b)),
    "this is the size of x before the branches": lambda x, b: _size(x),
    "this is the mean square: the norm divides by its root": lambda x, b: (
        _size(_through(x, b)) ** 2
    ),
    "average the squares, do not add them up": lambda x, b: _through(x, b).norm(),
    "subtract no mean: it is an RMS norm": lambda x, b: _through(x, b).std(correction=0),
    "this is what is left of the road: 1 divided by what is asked for": lambda x, b: (
        1 / _size(_through(x, b))
    ),
}


@exercise(
    "06_norms_and_activations.1",
    "what does each branch read, what is its result added to, and how large is the sum at the end?",
    "in pre-norm the road is divided once, by the size that the stream has reached",
)
def _divisor(answer: Callable[[Tensor, Branches], Any]) -> str | None:
    generator = torch.Generator().manual_seed(6)
    for C, depth in ((8, 1), (6, 4)):
        x = 3 * torch.randn(C, generator=generator, dtype=torch.float64) + 1
        matrices = torch.randn(depth, C, C, generator=generator, dtype=torch.float64)
        branches: Branches = [lambda y, m=m: (y @ m).relu() for m in matrices]  # type: ignore[misc]
        got = torch.as_tensor(answer(x.clone(), branches))
        if got.numel() != 1:
            return f"return one number, not {tuple(got.shape)}"
        want = _size(_through(x, branches))
        slips = ((why, mistake(x, branches)) for why, mistake in MISTAKES.items())
        said = f"for {depth} branches I expected {want:.4f}, not {float(got):.4f}"
        if why := check_values(got.reshape(()), want, slips, near=1e-5, otherwise=said):
            return why
    return None


MOVED = {
    "x + branch": 6,
    "x.float()": 6,
    "wide.pow(2), in float32": 8,
    "sum and norm in one kernel: read x and branch, write both results": 8,
}
HINTS = dict(
    zip(
        MOVED,
        (
            "two are read and one is written, two bytes each",
            "two bytes are read; how many are written?",
            "what is read has four bytes a number now",
            "two numbers in, two numbers out, in 16 bits",
        ),
        strict=True,
    )
)


@exercise(
    "06_norms_and_activations.2",
    "for each operation: what is read, what is written, and how many bytes has a number of each?",
    "one by one 20 bytes a number are moved before the norm has even divided; in one kernel 8",
)
def _moved(answer: Any) -> str | None:
    return check_table(answer, MOVED, HINTS)
