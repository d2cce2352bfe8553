"""Graders of 10_real_model: the logit lens, a model's bytes, induction scores, 4-bit blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.exercises import check_table, check_values, exercise


def _places(states: Tensor, g: Tensor, embedding: Tensor, token: int) -> list[int]:
    scores = states / states.square().mean(-1, keepdim=True).sqrt() * g @ embedding.T
    return (scores > scores[:, token, None]).sum(-1).tolist()


@exercise(
    "10_real_model.1",
    "what does the model do with the stream after its last layer? Do it with each row, then count "
    "the tokens with a higher score",
    "any layer can be read with the last one's tools; dividing by the length changes no place, but "
    "the norm's weight does",
)
def _lens(answer: Callable[[Tensor, Tensor, Tensor, int], Any]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for layers, size, vocabulary, token in ((4, 8, 20, 3), (1, 16, 50, 0), (6, 5, 30, 29)):
        states = torch.randn(layers + 1, size, generator=generator)
        states[:, 0] *= 4
        g = torch.rand(size, generator=generator) * 3 + 0.05
        embedding = torch.randn(vocabulary, size, generator=generator)
        got = answer(states.clone(), g.clone(), embedding.clone(), token)
        got = [float(place) for place in got]
        right = _places(states, g, embedding, token)
        case = f"{layers} layers, C = {size}, V = {vocabulary}"
        if len(got) != layers + 1:
            return f"{case}: {len(got)} places, but there are {layers + 1} streams to read"
        ones = torch.ones_like(g)
        slips = {
            "the first has place 0, not 1": [place + 1 for place in right],
            "the best has the highest score, not the lowest": [
                vocabulary - 1 - place for place in right
            ],
            "the last norm's weight g is missing": _places(states, ones, embedding, token),
            "a norm multiplies by g, it does not divide": _places(states, 1 / g, embedding, token),
        }
        if why := check_values(got, right, slips, otherwise=f"{got} should be {right}"):
            return f"{case}: {why}"
    return None


SIZES = {
    "bytes in the cache for one token, float32": 81_920,
    "the same with a key head for each query head": 245_760,
    "bytes in the cache for one token, bfloat16": 40_960,
    "bytes of the layers' matrices in Q4_1": 196_608_000,
    "tokens at which a bfloat16 cache has as many bytes as these matrices": 4_800,
}
_CACHE = "a key and a value of G x D numbers in each layer: which factor is missing, or too much?"
_WHY = {
    "bytes in the cache for one token, float32": _CACHE,
    "the same with a key head for each query head": "how many times as many key heads are that?",
    "bytes in the cache for one token, bfloat16": "how many bytes has a number in bfloat16?",
    "bytes of the layers' matrices in Q4_1": (
        "q and o are C x HD, k and v C x GD, three matrices C x F; and 32 numbers take 32 times 4 "
        "bits and two numbers of 16 bits"
    ),
    "tokens at which a bfloat16 cache has as many bytes as these matrices": (
        "divide the one by the other"
    ),
}


@exercise(
    "10_real_model.2",
    "count the numbers first (the cache: keys and values; a layer: q, k, v, o and three of the "
    "feed-forward block), then the bytes of each",
    "with weights in 4 bits, a cache of a few thousand tokens is as large as the model",
)
def _sizes(answer: Any) -> str | None:
    return check_table(
        answer, SIZES, _WHY, kind="a whole number", fits=lambda value: type(value) is int
    )


def _scores(weights: Tensor, n: int, back: int, first: int) -> Tensor:
    """Mean weight on the key `back` places before, of the queries from `first` on."""
    t = torch.arange(max(first, back), weights.shape[-1])
    return weights[..., t, t - back].mean(-1)


@exercise(
    "10_real_model.3",
    "write down for n = 3, a b c a b c, which key the second a should look at, and with which "
    "query this begins",
    "one place off, and one finds the heads that look at the same token, not at what followed it",
)
def _induction(answer: Callable[[Tensor, int], Tensor]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for layers, heads, n in ((2, 3, 4), (1, 1, 2), (3, 2, 10)):
        raw = torch.randn(layers, heads, 2 * n, 2 * n, generator=generator) * 2
        future = torch.ones(2 * n, 2 * n, dtype=torch.bool).triu(1)
        weights = raw.masked_fill(future, -torch.inf).softmax(-1)
        got = answer(weights.clone(), n)
        case = f"{layers} layers of {heads} heads, n = {n}"
        if not isinstance(got, Tensor) or got.shape != (layers, heads):
            shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            return f"{case}: the scores should be {(layers, heads)}, not {shape}"
        right = _scores(weights, n, n - 1, n)
        slips = {
            "these heads look at the same token, n places back; what followed it is nearer": (
                _scores(weights, n, n, n)
            ),
            "one place too far back: at what came before the token": (
                _scores(weights, n, n + 1, n)
            ),
            "the last query of the first half is among them: it finds the first token, the sink": (
                _scores(weights, n, n - 1, n - 1)
            ),
            "this is the sum over the queries, asked is the mean": right * n,
        }
        if why := check_values(got, right, slips, near=1e-5):
            return f"{case}: {why}"
    return None


def _q4_0(
    weight: Tensor, block: int, *, largest: int = 7, signed: bool = True, steps: int = 8
) -> Tensor:
    blocks = weight.unflatten(-1, (-1, block))
    place = blocks.abs().argmax(-1, keepdim=True)
    top = blocks.gather(-1, place) if signed else -blocks.gather(-1, place).abs()
    step = top / -steps
    counts = (blocks / torch.where(step == 0, 1.0, step)).round().clamp(-8, largest)
    return (counts * step).flatten(-2)


@exercise(
    "10_real_model.4",
    "cut each row into blocks with unflatten, find in each the number of largest size with its "
    "sign, and round how many steps each number is",
    "the sign of the step spends the sixteenth level on the side where the largest number is",
)
def _four_bits(answer: Callable[[Tensor, int], Tensor]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns, block in ((3, 8, 8), (4, 64, 32), (8, 8, 4)):
        weight = torch.randn(rows, columns, generator=generator)
        weight[0, 1] = -weight[0, 0].sign() * 2.9  # a number nearly as far on the other side
        weight[0, 0] = weight[0, 0].sign() * 3
        weight[1, :block] = 0
        given = weight.clone()
        got = answer(given, block)
        case = f"weight {rows} x {columns}, blocks of {block}"
        if not torch.equal(given, weight):
            return f"{case}: your function changes the weight, and it should give a copy"
        if not isinstance(got, Tensor) or got.shape != weight.shape:
            shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            return f"{case}: the result should be {(rows, columns)}, not {shape}"
        if got.isnan().any():
            return f"{case}: NaN, where a block is all zeros: its step is 0"
        right, got = _q4_0(weight, block), got.float()
        slips = {
            "8 is a seventeenth level: after rounding, no number beyond 7": (
                _q4_0(weight, block, largest=8)
            ),
            "the step has a sign: the number of largest size should come out at -8, exactly": (
                _q4_0(weight, block, signed=False)
            ),
            "the number of largest size is -8 steps, not -7": _q4_0(weight, block, steps=7),
        }
        if block < columns:
            slips["one step serves the whole row: each block has its own"] = _q4_0(weight, columns)
        if rows % block == 0:
            slips["these blocks run down the columns; they should lie in the rows"] = _q4_0(
                weight.T, block
            ).T
        if why := check_values(got, right, slips, near=1e-5):
            return f"{case}: {why}"
    return None
