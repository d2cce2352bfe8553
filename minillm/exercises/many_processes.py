"""Graders of 07_many_processes: gradients put together, a ring the other way, bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.exercises import check_table, check_values, exercise


@exercise(
    "07_many_processes.1",
    "give the gradient of the mean loss over the targets of all processes",
    "a process counts as much as it has targets; with equal counts that is the plain mean",
)
def _combine(answer: Callable[[list[Tensor], list[int]], Tensor]) -> str | None:
    draw = torch.Generator().manual_seed(0)
    for counts in ([64, 8], [3, 5, 2], [4, 0], [7]):
        parts = [torch.randn(5, generator=draw, dtype=torch.float64) for _ in counts]
        if 0 in counts:
            parts[counts.index(0)].zero_()  # nothing to learn from there
        given, total = [part.clone() for part in parts], sum(counts)
        got = answer(given, list(counts))
        if not isinstance(got, Tensor) or got.shape != (5,):
            shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            return f"the result has the shape of one gradient, (5,), not {shape}"
        if any(not torch.equal(a, b) for a, b in zip(given, parts, strict=True)):
            return "your function changes the gradients that it was given"
        summed = torch.stack([n * part for n, part in zip(counts, parts, strict=True)]).sum(0)
        plain = torch.stack(parts).sum(0)

        few, many = min(counts), max(counts)
        slips = {
            f"a process with {few} targets weighs as much as one of {many}": plain / len(counts),
            "means were added up; each had been divided by its own count": plain,
            f"this is the gradient of the sum, {total} times the mean's": summed,
            "divide by the number of targets, not by that of processes": summed / len(counts),
            "divide by the targets of all processes, not by the most": summed / many,
            "each mean was already divided by its own count": plain / total,
        }
        otherwise = f"that is not the gradient of the mean over all {total} targets"
        if why := check_values(got, summed / total, slips, near=1e-9, otherwise=otherwise):
            return f"counts {counts}: {why}"
    return None


def _simulate(send: Callable[[int, int, int], int], size: int) -> str | None:
    """Run the first half of the ring to the left; what goes wrong, or None."""
    parts = [[Counter({r: 1}) for _ in range(size)] for r in range(size)]
    for step in range(size - 1):
        chosen = []
        for rank in range(size):
            c = send(rank, step, size)
            if isinstance(c, bool) or not isinstance(c, int) or not 0 <= c < size:
                return f"{size} processes: process {rank} sends chunk {c!r} of 0 to {size - 1}"
            chosen.append((rank, c, parts[rank][c].copy()))
        for rank, c, letter in chosen:
            parts[(rank - 1) % size][c] += letter
    for rank in range(size):
        for c in range(size):
            if most := [r for r, times in parts[rank][c].items() if times > 1]:
                return (
                    f"{size} processes: in the end chunk {c} of process {rank} holds the numbers "
                    f"of process {most[0]} {parts[rank][c][most[0]]} times: what is sent twice is "
                    "counted twice"
                )
    complete = [[c for c in range(size) if len(parts[r][c]) == size] for r in range(size)]
    for rank, found in enumerate(complete):
        if not found:
            best = max(len(counter) for counter in parts[rank])
            return (
                f"{size} processes: after {size - 1} rounds no chunk of process {rank} is "
                f"complete; the best holds {best} of {size} parts. What has just come in goes on"
            )
    if sorted(c for found in complete for c in found) != list(range(size)):
        return f"{size} processes: each chunk should be complete in one process, once"
    return None


@exercise(
    "07_many_processes.2",
    "in each round, send on the chunk that came in the round before, from the right",
    "a sum travels one place a round, and each process completes one chunk of its own",
)
def _chunk_to_send(answer: Callable[[int, int, int], int]) -> str | None:
    if not _simulate(answer, 3):
        return next((w for size in (2, 4, 5, 8) if (w := _simulate(answer, size))), None)

    def mirrored(rank: int, step: int, size: int) -> int:
        return answer((-rank) % size, step, size)

    to_the_right = _simulate(lambda r, s, n: (-mirrored(r, s, n)) % n, 3)
    found = _simulate(answer, 3)
    if to_the_right is None:
        return f"that is the ring of the page, to the right: {found}"
    return found


GIGABYTES: dict[str, float] = {
    "DDP, held by each": 128,
    "FSDP, held by each": 16,
    "DDP, sent": 56,
    "FSDP, sent": 84,
}
_HELD, _RING = "weight, gradient and two moments are four numbers a parameter", 7 / 8 * 32
_SLIPS: dict[str, dict[float, str]] = {
    "DDP, held by each": {
        16: "with DDP each process holds everything",
        32: _HELD,
        64: _HELD + " of 4 bytes each",
        96: "AdamW has two moments",
    },
    "FSDP, held by each": {
        128: "with FSDP each process holds a part",
        4: _HELD,
        44: "gradients and moments are sharded as well as weights",
        100: "weights and gradients are sharded as well",
    },
    "DDP, sent": {
        64: "a process sends (N - 1)/N of the tensor in each half of the ring",
        32: "a ring has two halves, and (N - 1)/N of the tensor is sent in each",
        28: "a ring has two halves",
        224: "in a ring nobody has to serve all the others",
        448: "in a ring nobody has to serve all the others",
    },
    "FSDP, sent": {
        56: "the weights are gathered twice, forward and backward",
        28: "weights are gathered too, not only gradients scattered",
        96: "a process sends (N - 1)/N of the tensor in each half of the ring",
        112: "gradients are only scattered: each process needs the sum of its own shard",
    },
}


def _slip(name: str, value: float) -> str | None:
    if math.isclose(value, GIGABYTES[name] * 1e9, rel_tol=0.01):
        return "in GB, not in bytes"
    return next((hint for v, hint in _SLIPS[name].items() if math.isclose(value, v)), None)


@exercise(
    "07_many_processes.3",
    "count the bytes of a parameter, then who holds or sends which part of them",
    "FSDP trades memory, divided by N, for half as much traffic again",
)
def _gigabytes(answer: Any) -> str | None:
    hints = dict.fromkeys(GIGABYTES, "what does one process hold, and what does it send?")
    return check_table(answer, GIGABYTES, hints, _slip, kind="a number of GB", share=0.01)
