"""Matrices at the few bits a number at which a GGUF file stores them: for generation.

Explained in deeper/10_four_bits.
"""

# Built from notebooks/deeper/10_four_bits.ipynb: edit there, then make build.

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "FEW",
    "GROUP",
    "SIZES",
    "blocks",
    "decoded_product",
    "level_product",
    "numbers",
    "pack",
    "quantize",
    "sixteen_bits",
]

GROUP = 32  # neighbours in a row that share a scale

SIZES = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q8_0": (32, 34)}  # numbers, bytes


def quantize(weight: Tensor, kind: str) -> Tensor:
    """A matrix as the bytes of "Q4_0" or "Q4_1", each row cut into blocks of 32.

    Shape: (N, K) -> (N, bytes of a row) uint8.
    Raises: ValueError for another kind, and rows that are no multiple of 32.
    Source: the reference quantisers of ggml-quants.c (llama.cpp).
    """
    if kind not in ("Q4_0", "Q4_1") or weight.ndim != 2 or weight.shape[1] % GROUP:
        shape = tuple(weight.shape)
        raise ValueError(f"{kind!r:.40} of {shape}: Q4_0 and Q4_1 have rows of a multiple of 32")
    x = weight.detach().float().unflatten(1, (-1, GROUP))
    if kind == "Q4_0":  # the number of the largest size becomes level 0, which is -8 steps
        least = x.gather(-1, x.abs().argmax(-1, keepdim=True))
        scale, more = least / -8, []
    else:
        least = x.amin(-1, keepdim=True)
        scale, more = (x.amax(-1, keepdim=True) - least) / 15, [least]
    steps = (1 / scale).where(scale != 0, 0)
    # the same operations as there, in the same order: the last bit decides some levels
    levels = x * steps + 8.5 if kind == "Q4_0" else (x - least) * steps + 0.5
    levels = levels.to(torch.uint8).clamp(max=15)
    halves = torch.cat([scale, *more], -1).half().view(torch.uint8)
    return torch.cat([halves, levels[..., :16] | levels[..., 16:] << 4], -1).flatten(1)


def _nibbles(b: Tensor) -> Tensor:
    b = b.contiguous()  # a fourth quicker than bytes that lie between others
    return torch.cat([b & 15, b >> 4], -1)


def _half(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.float16).float()


def blocks(rows: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """What the bytes of some rows say: each number is scale * level + least.

    Shape: (N, bytes) uint8 -> levels (N, K/32, 32) uint8, scale and least (N, K/32) float32.
    """
    b = rows.unflatten(1, (-1, SIZES[kind][1]))
    if kind == "Q4_1":
        scale, least = _half(b[..., :4]).unbind(-1)
        return _nibbles(b[..., 4:]), scale, least
    scale = _half(b[..., :2])[..., 0]
    if kind == "Q4_0":
        return _nibbles(b[..., 2:]), scale, -8 * scale
    if kind == "Q8_0":  # -128 to 127 becomes 0 to 255
        return b[..., 2:].contiguous() ^ 128, scale, -128 * scale
    # Q4_K: two float16, 8 scales and 8 minima of 6 bits in 12 bytes, levels of 4 x 64 numbers
    low, high, both = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat([low & 63, (both & 15) | (low >> 6) << 4], -1)
    minima = torch.cat([high & 63, (both >> 4) | (high >> 6) << 4], -1)
    levels = _nibbles(b[..., 16:].unflatten(-1, (4, 32))).flatten(1).unflatten(1, (-1, GROUP))
    least = -_half(b[..., 2:4]) * minima
    return levels, (scale[..., None] * scales).flatten(1), least.flatten(1)


def numbers(rows: Tensor, kind: str) -> Tensor:
    """The numbers of some rows. Shape: (N, bytes) uint8 -> (N, K) float32."""
    if kind == "BF16":
        return rows.view(torch.bfloat16).float()
    levels, scale, least = blocks(rows, kind)
    # in place, a number of one tensor at a time: `addcmul` of three takes three times as long
    return levels.float().mul_(scale[..., None]).add_(least[..., None]).flatten(1)


def level_product(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """The sum over x * (scale * (level - 8) + zero), a scale and a zero for 32 levels of a row.

    Shape: x (T, in) bfloat16, of `pack` (out, in / 2) and (in / 32, out, 2) -> (T, out) bfloat16.
    """
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)


def pack(rows: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Levels of four bits in the order that torch's product wants, and what each 32 mean.

    A level of eight bits is 16 * high + low: two matrices of four bits, side by side. To the rows
    are added some of zeros, up to a multiple of 16.
    Shape: (N, bytes) uint8 -> (N', K') levels, two in a byte, and (K'/32, N', 2) bfloat16.
    """
    count, size = SIZES[kind]
    twice, N, K = 2 if kind == "Q8_0" else 1, len(rows) + -len(rows) % 16, rows.shape[1] // size
    K *= count * twice
    packed = torch.empty(N, K // 2, dtype=torch.uint8)
    scales = torch.zeros(K // GROUP, N, 2, dtype=torch.bfloat16)
    for i in range(0, N, 1024):  # the product's order wants whole numbers of four bytes
        levels, scale, least = blocks(rows[i : i + 1024], kind)
        levels, pairs = levels.flatten(1).int(), [(scale, least + 8 * scale)]
        if twice == 2:
            levels = torch.cat([levels >> 4, levels & 15], 1)
            pairs = [(16 * scale, 0 * scale), (scale, least + 136 * scale)]
        meanings = torch.cat([torch.stack(pair, -1) for pair in pairs], 1)  # (N, K'/32, 2)
        scales[:, i : i + len(meanings)] = meanings.transpose(0, 1)
        levels = F.pad(levels, (0, 0, 0, -len(levels) % 16))
        packed[i : i + 1024] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    return packed, scales


def sixteen_bits(rows: Tensor, kind: str) -> Tensor:
    """Rows of another kind as "BF16". Shape: (N, bytes) uint8 -> (N, 2 K) uint8."""
    pieces = (numbers(some, kind).bfloat16() for some in rows.split(1024))
    return torch.cat([piece.view(torch.uint8) for piece in pieces])


FEW = 64  # up to so many rows by the product of four bits, more by decoded numbers


def decoded_product(x: Tensor, rows: Tensor, kind: str) -> Tensor:
    """`x @ W.T`, some rows of W at a time: decoded, multiplied, thrown away.

    Shape: x (..., in), rows (out, bytes) -> (..., out).
    """
    some = max(64, 2**19 // x.shape[-1] // 64 * 64)  # other than multiples of 64 are slower
    return torch.cat([F.linear(x, numbers(r, kind)) for r in rows.split(some)], -1)
