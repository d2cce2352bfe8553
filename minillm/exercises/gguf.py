"""Graders of 10_gguf: sizes of types, blocks of five bits, counts that a file may claim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minillm.exercises import check_table, exercise, is_number

BYTES: dict[str, Any] = {
    "F32": 4_096_000,
    "F16": 2_048_000,
    "Q8_0": 1_088_000,
    "Q4_0": 576_000,
    "Q4_1": 640_000,
    "Q4_0, but rows of 1,000 numbers": "refused",
}
_BITS = {"F32": 32, "F16": 16, "Q8_0": 8, "Q4_0": 4, "Q4_1": 4}


def _slip(kind: str, value: Any) -> str | None:
    wanted = BYTES[kind]
    if wanted == "refused":
        return "blocks of 32 do not fill such a row evenly"
    if value == wanted * 8:
        return "these are bits, and bytes are asked for"
    if kind.startswith("Q") and value == 1_024_000 * _BITS[kind] // 8:
        return "the levels alone take so much; what else does a block hold?"
    if kind == "Q4_1" and value == BYTES["Q4_0"]:
        return "a block of it holds one number more than one of Q4_0"
    return None


@exercise(
    "10_gguf.1",
    "how many blocks are there, and what does a block hold besides its levels?",
    "a block's scale counts too, and a row must be made of whole blocks",
)
def _bytes_of(answer: Any) -> str | None:
    hints = dict.fromkeys(BYTES, "count the blocks, then the bytes of one")
    kind = 'a number of bytes, or "refused"'
    return check_table(
        answer, BYTES, hints, _slip, kind=kind, fits=lambda x: is_number(x) or x == "refused"
    )


def _q5_0(data: bytes) -> np.ndarray:
    blocks = np.frombuffer(data, np.uint8).reshape(-1, 22)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    high = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    low = np.concatenate([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], axis=1)
    return (scale * ((low + 16 * high).astype(np.float32) - 16)).reshape(-1)


def _blocks() -> dict[str, bytes]:
    """Blocks by name, each of which tells one mistake from the others."""
    generator = np.random.default_rng(0)

    def block(scale: float, high: Any, low: Any) -> bytes:
        bits = np.packbits(np.array(high, np.uint8), bitorder="little").tobytes()
        levels = np.array(low, np.uint8)
        return np.float16(scale).tobytes() + bits + (levels[:16] | levels[16:] << 4).tobytes()

    count, zeros = [*range(16), *range(16)], [0] * 32
    random = [(generator.integers(0, 2, 32), generator.integers(0, 16, 32)) for _ in range(3)]
    return {
        "levels of 0": block(1.0, zeros, zeros),
        "low bits only": block(0.5, zeros, [*range(16), *reversed(range(16))]),
        "the fifth bit of the first number": block(1.0, [1, *zeros[1:]], count),
        "fifth bits of the second half": block(1.0, [0] * 16 + [1] * 16, count),
        "any block": block(-0.25, *random[0]),
        "three blocks": b"".join(block(0.1 * (n + 1), *pair) for n, pair in enumerate(random)),
    }


@exercise(
    "10_gguf.2",
    "the scale, the fifth bits, the low bits: take the block apart first, then put levels together",
    "a type of blocks is a few lines: cut it into fields, join the bits, shift and scale",
)
def _decode(answer: Callable[[bytes], Any]) -> str | None:
    for name, data in _blocks().items():
        want = _q5_0(data)
        got = np.asarray(answer(data), np.float64).reshape(-1)
        if got.shape != want.shape:
            return f"{name}: {want.size} numbers are in these {len(data)} bytes, not {got.size}"
        if np.allclose(got, want, rtol=1e-6, atol=0):
            continue
        if name == "levels of 0":
            return f"a level of 0 means scale × (0 - 16), not {got[0]:g}"
        if name == "low bits only":
            return "all fifth bits are 0 here: the low four bits of the bytes are the first half"
        if name.startswith("the fifth bit"):
            return "only the first level has its fifth bit set here, and that is worth 16"
        if name.startswith("fifth bits"):
            return "fifth bits count along all 32 levels: the last 16 belong to the second half"
        if name == "three blocks" and np.allclose(got[:32], want[:32], rtol=1e-6, atol=0):
            return "the first block is right; each block has a scale of its own"
        if np.allclose(got, want, rtol=2e-3, atol=0):
            return "nearly: multiply in float32, a float16 keeps only eleven bits of each product"
        first = int(np.flatnonzero(~np.isclose(got, want, rtol=1e-6, atol=0))[0])
        return f"{name}: number {first} is {want[first]:g}, not {got[first]:g}"
    return None


# count, size, at, length
_CLAIMS = {
    "fewer than there is room for": (10, 4, 24, 100),
    "exactly as many": (19, 4, 24, 100),
    "one too many": (20, 4, 24, 100),
    "more than the file holds after this place, but not than all of it": (24, 4, 24, 100),
    "2**30 numbers of 4 bytes": (2**30, 4, 24, 100),
    "10**12 strings of 8 bytes": (10**12, 8, 24, 100),
    "2**61 numbers of 8 bytes": (2**61, 8, 24, 100),
    "nothing, at the end of the file": (0, 4, 100, 100),
    "something, at the end of the file": (1, 1, 100, 100),
}


@exercise(
    "10_gguf.3",
    "how many bytes does it need, and how many are left behind the place?",
    "one comparison before each list keeps a reader from every false count",
)
def _may_follow(answer: Callable[[int, int, int, int], Any]) -> str | None:
    for name, claim in _CLAIMS.items():
        count, size, at, length = claim
        want, got = count * size <= length - at, answer(*claim)
        if not isinstance(got, bool | np.bool_):
            return f"{name}: return True or False, not {got!r}"
        if bool(got) == want:
            continue
        if "2**" in name or "10**" in name:
            return f"{name}: {count * size:,} bytes are needed; whole numbers of Python have no end"
        if "exactly" in name or "nothing" in name:
            return f"{name}: it fits, if only just"
        if "but not than all" in name or name == "one too many" or "something" in name:
            return f"{name}: bytes before the place are gone; {length - at} are left"
        return f"{name}: {count * size} bytes are needed and {length - at} are left"
    return None
