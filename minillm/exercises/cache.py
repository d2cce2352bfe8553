"""Graders of notebook 07: bytes of a cache, a ring's slots, ends in a batch, attention sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.exercises import Unsolved, exercise

# layers, key/value heads, key size, value size, length, window, bytes a number
SHAPES = (
    (61, 1, 512, 64, 1000, None, 2),
    (32, 8, 128, 128, 4000, None, 2),
    (2, 3, 4, 6, 7, None, 4),
    (32, 8, 128, 128, 9000, 4096, 2),
    (32, 8, 128, 128, 100, 4096, 2),
)


@exercise("07.1", "Write cache_bytes: how many bytes the keys and values of one text take.")
def _cache_bytes(answer: Callable[..., int]) -> str | None:
    for layers, heads, key_dim, value_dim, length, window, size in SHAPES:
        kept = length if window is None else min(length, window)
        want = layers * heads * (key_dim + value_dim) * kept * size
        shape = (layers, heads, key_dim, value_dim, length)
        got = answer(*shape, window=window, bytes_per_number=size)
        if got == want:
            continue
        case = f"{shape} with window={window}"
        if got * layers == want:
            return f"{case}: that is one layer of {layers}, each has keys and values of its own"
        if got * size == want:
            return f"{case}: you count numbers, of {size} bytes each"
        if got == layers * heads * key_dim * kept * size:
            return f"{case}: you count the keys only, values are kept as well"
        if key_dim != value_dim and got == 2 * layers * heads * key_dim * kept * size:
            return f"{case}: values have {value_dim} numbers here, not as many as keys"
        if window is not None and got * kept == want * length:
            return f"{case}: a window of {window} keeps no more than {window} positions"
        if window is not None and got * kept == want * window:
            return f"{case}: only {length} positions are there to be kept"
        return f"{case}: {want} bytes, not {got}"
    return None


@exercise("07.2", "Write ring_positions: the position in each slot of a ring, -1 where none is.")
def _ring_positions(answer: Callable[[int, int], Any]) -> str | None:
    for window in (4, 1, 5):
        for length in (*range(2 * window + 2), 1000):
            want = [-1] * window
            for position in range(max(0, length - window), length):
                want[position % window] = position
            got = [int(p) for p in answer(length, window)]
            if got == want:
                continue
            case = f"after {length} tokens in a ring of {window}"
            if len(got) != window:
                return f"{case} there are {window} slots, you give {len(got)}"
            if sorted(got) == sorted(want):
                return f"{case} the positions are right, but position p lies in slot p % {window}"
            if length in got and length > 0:
                return f"{case} the newest position is {length - 1}, counting from 0"
            if length < window and -1 not in got:
                return f"{case} slots {length} and up are still empty: -1"
            return f"{case} the slots hold {want}, not {got}"
    return None


BATCHES = (
    [[3, 9, 4, 4, 1], [2, 2, 2, 9, 5], [1, 2, 3, 4, 5], [9, 9, 1, 1, 9]],
    [[9, 1], [1, 9], [1, 1]],
    [[4, 4, 4]],
)


@exercise("07.3", "Write finish: pad what follows each row's first end, and give the lengths.")
def _finish(answer: Callable[[Tensor, int, int], tuple[Tensor, Tensor]]) -> str | None:
    for rows in BATCHES:
        wanted, lengths = [], []
        for row in rows:
            length = row.index(9) + 1 if 9 in row else len(row)
            wanted.append(row[:length] + [0] * (len(row) - length))
            lengths.append(length)
        ids = torch.tensor(rows)
        got, got_lengths = (x.tolist() for x in answer(ids, 9, 0))
        if ids.tolist() != rows:
            return "you changed the ids that you were given: work on a copy"
        message = _wrong_row(rows, wanted, got)
        if message:
            return message
        for row, want, found in zip(rows, lengths, got_lengths, strict=True):
            if found != want:
                hint = "the end counts" if found == want - 1 else "a row without end is whole"
                return f"the length of {row} with end 9 is {want}, not {found}: {hint}"
    return None


def _wrong_row(rows: list[list[int]], wanted: list[list[int]], got: list[list[int]]) -> str | None:
    ids = torch.tensor(rows)
    if got != wanted and got == ids.masked_fill((ids == 9).cumsum(0) > 0, 0).tolist():
        return "a row is erased by its neighbour's end: time runs along dimension 1, not 0"
    for row, want, found in zip(rows, wanted, got, strict=True):
        if found == want:
            continue
        if 9 in row and found[: row.index(9) + 1] == [*want[: row.index(9)], 0]:
            return f"in {row} the end 9 itself is gone: it belongs to the text"
        if found == row:
            return f"in {row} everything after the first 9 should be 0"
        return f"{row} with end 9 and pad 0 should become {want}, not {found}"
    return None


@exercise("07.4", "Write SinkLayer: keep the first `sinks` positions and the last `window` ones.")
def _sink_layer(answer: Callable[[int, int], Any]) -> str | None:
    for sinks, window in ((2, 3), (1, 4), (4, 1), (0, 3)):
        for chunks in ([1] * 12, [9, 1, 1], [2, 3, 1, 4, 1], [1, 12, 1]):
            message = _run_sinks(answer(sinks, window), sinks, window, chunks)
            if message:
                return f"with sinks={sinks}, window={window}, chunks of {chunks}: {message}"
    return None


def _run_sinks(layer: Any, sinks: int, window: int, chunks: list[int]) -> str | None:
    start, everything = 0, torch.arange(sum(chunks), dtype=torch.float32)
    for T in chunks:
        held = [p for p in range(start) if p < sinks or p >= start - window]
        want = held + list(range(start, start + T))
        keys = everything[start : start + T].view(1, 1, T, 1).expand(2, 3, T, 4)
        given = layer.key_positions(T)
        if given is None:
            raise Unsolved
        told = torch.as_tensor(given).tolist()
        k, v = layer.update(keys, -keys[..., :2])
        case = f"{T} new after {start}"
        if told != want:
            return f"{case}: key_positions says {told} where {want} is due{_hint(told, want)}"
        if k.shape != (2, 3, len(want), 4) or v.shape != (2, 3, len(want), 2):
            shapes = f"{tuple(k.shape)} and {tuple(v.shape)}"
            return f"{case}: update returns {shapes}, not {len(want)} positions"
        read = k[1, 2, :, 3].tolist()
        if read != want:
            return f"{case}: update returns keys of {[int(p) for p in read]}, it should be {want}"
        if (v[..., 0] != -k[..., 0]).any():
            return f"{case}: the values do not belong to their keys"
        start += T
    return None


def _hint(told: list[int], want: list[int]) -> str:
    if len(set(told)) < len(told):
        return "; a position is there twice"
    missing = sorted(set(want) - set(told))
    return f"; {missing} should be there" if missing else "; some should have been dropped"
