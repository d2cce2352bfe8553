"""Wrong answers of 10_gguf: exercise, answer, words that its message holds."""

from typing import Any

import numpy as np

BYTES: dict[str, Any] = {
    "F32": 4_096_000,
    "F16": 2_048_000,
    "Q8_0": 1_088_000,
    "Q4_0": 576_000,
    "Q4_1": 640_000,
    "Q4_0, but rows of 1,000 numbers": "refused",
}


def by_hand(data, *, fifth=16, shift=16, order="little", swap=False, pairs=False, one=False):
    """Blocks of five bits; the options make mistakes."""
    numbers = []
    for at in range(0, len(data), 22):
        block = np.frombuffer(data[at : at + 22], np.uint8)
        scale = float(block[:2].view(np.float16)[0])
        if one:
            scale = float(np.frombuffer(data[:2], np.float16)[0])
        high = np.unpackbits(block[2:6], bitorder=order).astype(int)
        low = [*(block[6:] & 15).astype(int), *(block[6:] >> 4).astype(int)]
        if swap:
            low = low[16:] + low[:16]
        if pairs:
            low = [half for byte in block[6:].tolist() for half in (byte & 15, byte >> 4)]
        numbers += [scale * (a + fifth * b - shift) for a, b in zip(low, high, strict=True)]
    return np.array(numbers, np.float32)


ROWS = "Q4_0, but rows of 1,000 numbers"

WRONG = [
    ("10_gguf.1", {**BYTES, "Q8_0": 1_024_000}, "the levels alone"),
    ("10_gguf.1", {**BYTES, "Q4_0": 512_000}, "the levels alone"),
    ("10_gguf.1", {**BYTES, "Q4_1": 576_000}, "one number more"),
    ("10_gguf.1", {**BYTES, "F32": 32_768_000}, "these are bits"),
    ("10_gguf.1", {**BYTES, ROWS: 562_500}, "evenly"),
    ("10_gguf.1", {**BYTES, "F16": ...}, "not filled in"),
    ("10_gguf.1", {**BYTES, "F16": "many"}, "a number of bytes"),
    ("10_gguf.1", {**BYTES, "Q8_0": 5}, "count the blocks"),
    ("10_gguf.1", 4, "a dictionary"),
    ("10_gguf.2", lambda data: by_hand(data, shift=8), "a level of 0"),
    ("10_gguf.2", lambda data: by_hand(data, shift=0), "a level of 0"),
    ("10_gguf.2", lambda data: by_hand(data, swap=True), "the low four bits"),
    ("10_gguf.2", lambda data: by_hand(data, pairs=True), "the low four bits"),
    ("10_gguf.2", lambda data: by_hand(data, fifth=1), "worth 16"),
    ("10_gguf.2", lambda data: by_hand(data, order="big"), "only the first level"),
    ("10_gguf.2", lambda data: by_hand(data, fifth=0), "only the first level"),
    ("10_gguf.2", lambda data: by_hand(data[:22]), "not 32"),
    ("10_gguf.2", lambda data: by_hand(data, one=True), "a scale of its own"),
    ("10_gguf.2", lambda data: by_hand(data).astype(np.float16), "multiply in float32"),
    ("10_gguf.3", lambda n, size, at, length: (n * size) % 2**32 <= length - at, "no end"),
    ("10_gguf.3", lambda n, size, at, length: n * size < length - at, "if only just"),
    ("10_gguf.3", lambda n, size, at, length: n * size <= length, "are left"),
    ("10_gguf.3", lambda n, size, at, length: n <= length - at, "are left"),
    ("10_gguf.3", lambda *claim: True, "are left"),
    ("10_gguf.3", lambda *claim: 1, "True or False"),
]
