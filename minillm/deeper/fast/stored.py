"""Modules that keep a GGUF file's few bits, and whether they can be used here. Written by hand.

What they compute is deeper/10_four_bits.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.deeper.fast.four_bits import (
    FEW,
    decoded_product,
    level_product,
    numbers,
    pack,
    quantize,
    sixteen_bits,
)

__all__ = [
    "FourBitMatrix",
    "StoredEmbedding",
    "StoredLinear",
    "StoredRows",
    "four_bit_products",
    "take_rows",
]


class StoredRows(nn.Module):
    """A matrix as the bytes of its rows. `weight` tells how many, dtype and device: no numbers.

    Raises: ValueError if it is moved to another device or dtype.
    """

    rows: Tensor  # (N, bytes) uint8
    weight: Tensor  # (N, 0)

    def __init__(self, rows: Tensor, kind: str) -> None:
        super().__init__()
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("weight", torch.empty(len(rows), 0), persistent=False)
        self.stored_kind = kind

    @property
    def stored_numbers(self) -> int:
        """How many numbers the matrix has."""
        return len(self.rows) * numbers(self.rows[:1], self.stored_kind).numel()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        probe = torch.zeros((), dtype=torch.float32)
        if (moved := fn(probe)).dtype != probe.dtype or moved.device != probe.device:
            what = f"not in {moved.dtype} on {moved.device}"
            raise ValueError(f"weights as stored are multiplied in float32 on the CPU, {what}")
        return self

    def extra_repr(self) -> str:
        return f"{len(self.rows):,} rows, {self.stored_kind}"


class StoredEmbedding(StoredRows):
    """A table of which a row is decoded when an id asks for it. Shape: (...) -> (..., C)."""

    looks_up = True

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids.flatten(), self.rows)
        return numbers(rows, self.stored_kind).view(*ids.shape, -1)


class FourBitMatrix(nn.Module):
    """Matrices of a file, one above the other, by torch's product of four bits: a few rows of x.

    x is rounded to bfloat16, as is the result. `columns`, the weight of a norm, multiplies x.
    Matrices of kind "BF16" are multiplied where they lie; four rows and more by decoded numbers.
    Shape: x (T, in), plus (T, out) or (out,) -> (T, out).
    """

    columns: Tensor | None

    def __init__(self, linears: Sequence[Any], columns: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("columns", columns, persistent=False)
        self.parts: list[tuple[Tensor, Tensor | None, bool, int]] = []
        for kind, same in groupby(linears, lambda linear: linear.stored_kind):
            found = [linear.rows for linear in same]
            if kind == "BF16":
                self.parts += [(rows, None, False, len(rows)) for rows in found]
                continue
            rows = found[0] if len(found) == 1 else torch.cat(found)
            self.parts.append((*pack(rows, kind), kind == "Q8_0", len(rows)))

    def takes_panels(self, x: Tensor) -> bool:
        """A compiler gets this product as it is."""
        return False

    def reads(self, x: Tensor) -> bool:
        """Whether a prompt of such rows x (T, in) goes by it."""
        return len(x) <= FEW

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        x = x if self.columns is None else x * self.columns
        short, found = x.to(torch.bfloat16), []
        for packed, scales, twice, size in self.parts:
            if scales is not None:
                y = level_product(short.repeat(1, 2) if twice else short, packed, scales)
            elif len(x) < 4:
                y = F.linear(short, packed.view(torch.bfloat16))
            else:
                y = decoded_product(x, packed, "BF16")
            found.append(y if y.shape[1] == size else y[:, :size])
        y = found[0] if len(found) == 1 else torch.cat(found, -1)
        return y.float() if plus is None else plus + y


class StoredLinear(StoredRows):
    """`decoded_product` and a bias: on any processor, and for long prompts.

    Shape: (..., in) -> (..., out).
    """

    bias: nn.Parameter | None

    def __init__(self, rows: Tensor, kind: str, bias: nn.Parameter | None = None) -> None:
        super().__init__(rows, kind)
        self.register_parameter("bias", bias)

    def active_weights(self) -> int:
        """All of them multiply. See `minillm.support.counting`."""
        return self.stored_numbers

    def forward(self, x: Tensor) -> Tensor:
        y = decoded_product(x, self.rows, self.stored_kind)
        return y if self.bias is None else y + self.bias

    @staticmethod
    def glue(linears: Sequence[Any], columns: Tensor | None) -> FourBitMatrix:
        """Some of them, one above the other, for a packed model."""
        return FourBitMatrix(linears, columns)


def take_rows(model: Any, found: Iterable[tuple[str, Tensor, str]]) -> Any:
    """Put stored matrices, as the names of weights, bytes and kinds, in the place of a model's own.

    A head that is the embedding shares its rows. Those of eight bits become bfloat16 where a row is
    multiplied by that more quickly: as many bytes as two copies of eight bits, of which one is laid
    out for the product.
    """
    for name, rows, kind in found:
        if kind == "Q8_0" and sixteen_bits_are_quicker():
            rows, kind = sixteen_bits(rows, kind), "BF16"
        place = name.removesuffix(".weight")
        part = model.get_submodule(place)
        table = isinstance(part, nn.Embedding)
        made = StoredEmbedding(rows, kind) if table else StoredLinear(rows, kind, part.bias)
        model.set_submodule(place, made)
    if model.config.tie_word_embeddings:
        table = model.model.embed_tokens
        model.lm_head = StoredLinear(table.rows, table.stored_kind)
    return model


@cache
def sixteen_bits_are_quicker() -> bool:
    """Whether one row is multiplied more quickly by bfloat16 than by twice four bits.

    By the clock, once a process.
    """
    rows = torch.zeros(1072, 1088, dtype=torch.uint8)
    pairs = (rows, "Q8_0"), (sixteen_bits(rows, "Q8_0"), "BF16")
    made = {kind: FourBitMatrix([StoredLinear(data, kind)]) for data, kind in pairs}
    x = torch.ones(1, 1024)
    eight, sixteen = shortest(lambda: made["Q8_0"](x), lambda: made["BF16"](x))
    return sixteen < eight


def shortest(*ways: Callable[[], object]) -> list[float]:
    """The seconds that each of some ways takes: the least of twenty turns, for busy machines."""
    best = [float("inf")] * len(ways)
    for _ in range(20):
        for i, way in enumerate(ways):
            start = time.perf_counter()
            way()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


@cache
def four_bit_products() -> str | None:
    """Why torch's product of four bits is of no use here, None if it is. Asked once a process.

    It is not there, or gives other sums than decoded numbers do, or takes more than ten times as
    long as a product in float32 of a matrix that lies in the processor's cache: about twice as long
    where it is written for the processor, forty times and more where it is not.
    """
    generator = torch.Generator().manual_seed(0)
    rows = quantize(torch.randn(1072, 1024, generator=generator), "Q4_1")
    w, x = numbers(rows, "Q4_1"), torch.randn(1, 1024, generator=generator)
    try:
        packed, scales = pack(rows, "Q4_1")
        off = level_product(x.bfloat16(), packed, scales).float() - x @ w.T
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return f"this torch has no product of four-bit matrices ({str(error).splitlines()[0]:.80})"
    if not off.norm() < 0.02 * (x @ w.T).norm():
        return "torch's product of four-bit matrices gives wrong sums on this processor"
    short = x.bfloat16()
    four, float32 = shortest(lambda: level_product(short, packed, scales), lambda: F.linear(x, w))
    if four > 10 * float32:
        return "torch's product of four-bit matrices is slow on this processor"
    return None
