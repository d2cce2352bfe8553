"""Graders of 08_serving_caches: bytes of a cache, a ring's slots, attention sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minillm.exercises import Unsolved, check_values, exercise

# layers, key/value heads, key size, value size, length, window, bytes a number
SHAPES = (
    (61, 1, 512, 64, 1000, None, 2),
    (32, 8, 128, 128, 4000, None, 2),
    (2, 3, 4, 6, 7, None, 4),
    (32, 8, 128, 128, 9000, 4096, 2),
    (32, 8, 128, 128, 100, 4096, 2),
)


@exercise(
    "08_serving_caches.1",
    "what does one position leave behind in one layer, and how many positions are kept?",
    "keys and values of every layer and key head count, and a window caps the positions",
)
def _cache_bytes(answer: Callable[..., int]) -> str | None:
    for layers, heads, key_dim, value_dim, length, window, size in SHAPES:
        kept = length if window is None else min(length, window)
        want = layers * heads * (key_dim + value_dim) * kept * size
        shape = (layers, heads, key_dim, value_dim, length)
        got = answer(*shape, window=window, bytes_per_number=size)
        slips = {
            f"a number has {size} bytes here (bytes_per_number), not 2": 2 * want / size,
            f"that is one layer of {layers}, each has keys and values of its own": want / layers,
            f"you count numbers, of {size} bytes each": want / size,
            "you count the keys only, values are kept as well": (
                layers * heads * key_dim * kept * size
            ),
            f"values have {value_dim} numbers here, not as many as keys": (
                2 * layers * heads * key_dim * kept * size
            ),
            f"a window of {window} keeps no more than {window} positions": want * length / kept,
            f"only {length} positions are there to be kept": want * (window or kept) / kept,
        }
        said = f"{want} bytes, not {got}"
        if why := check_values(got, want, slips, near=0, otherwise=said):
            return f"{shape} with window={window}: {why}"
    return None


@exercise(
    "08_serving_caches.2",
    "which positions are still there, and in which slot does each of them lie?",
    "a slot's position follows from the newest one alone, so a ring needs no table",
)
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


@exercise(
    "08_serving_caches.3",
    "which positions may be forgotten once the new ones are stored, and which must `update` still "
    "return?",
    "a layer that says which positions it holds can keep any set of them: the mask does the rest",
)
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
