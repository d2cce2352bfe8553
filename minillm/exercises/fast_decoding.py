"""Graders of 10_fast_decoding: the bound by bandwidth, a norm folded in, how often one compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.exercises import check_table, check_values, exercise


def _numbers(c: ModelConfig, context: int) -> dict[str, int]:
    """What a token reads: numbers in the matrices and in the cache, and what slips would count."""
    C, H, G, D = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
    q_and_o, k_or_v, mlp = 2 * C * H * D, C * G * D, C * c.intermediate_size
    layers = c.num_hidden_layers * (q_and_o + 2 * k_or_v + 3 * mlp)
    head, cache = c.vocab_size * C, c.num_hidden_layers * context * G * D
    right = layers + head + 2 * cache
    return {
        "right": right,
        "the whole embedding is counted, but a token looks up one row of it": right + head,
        "the head is not counted: all of its rows are multiplied for each token": right - head,
        "the cache is left out: attention reads the keys and values of all tokens before": (
            layers + head
        ),
        "the cache holds keys *and* values": right - cache,
        "the cache holds G key heads, not H": right + 2 * cache * (H // G - 1),
        "each layer has a cache of its own": layers + head + 2 * cache // c.num_hidden_layers,
        "a gated feed-forward block has three matrices": right - c.num_hidden_layers * mlp,
        "each weight is read once, although it takes part in two operations": 2 * right,
        "all layers are read, not one": (right - head) // c.num_hidden_layers + head,
        "attention has a fourth matrix, after the heads": right - c.num_hidden_layers * C * H * D,
        "this config gives head_dim itself: it need not be C / H": (
            right - c.num_hidden_layers * (2 * H + 2 * G) * (C * D - C * (C // H))
            if D != C // H
            else -1
        ),
        "k and v are G heads wide, not H": (
            right + c.num_hidden_layers * 2 * C * D * (H - G) if H != G else -1
        ),
    }


@exercise(
    "10_fast_decoding.1",
    "first the bytes that one token makes the machine read, matrix by matrix, then the division",
    "one division says what no program can beat: bandwidth over bytes",
)
def _most_tokens(answer: Callable[[ModelConfig, float, int, int], float]) -> str | None:
    cases = [
        (ModelConfig(5000, 512, 8, 8, 1408, num_key_value_heads=4), 20e9, 4, 2000),
        (ModelConfig(5000, 512, 8, 8, 1408, num_key_value_heads=4, head_dim=128), 20e9, 4, 0),
        (ModelConfig.preset("llama-3.1-8b"), 3350e9, 2, 30000),
    ]
    for config, bandwidth, size, context in cases:
        got = float(answer(config, bandwidth, size, context))
        found = _numbers(config, context)
        want = bandwidth / (size * found.pop("right"))
        case = f"{config.num_hidden_layers} layers, C = {config.hidden_size}, context {context:,}"
        slips = {
            "these are seconds a token, asked are tokens a second": 1 / want,
            f"a number has {size} bytes, and bandwidth counts bytes": want * size,
            **{said: bandwidth / (size * n) for said, n in found.items() if n > 0},
        }
        said = f"{got:.4g} tokens a second, but {want:.4g} are possible"
        if why := check_values(got, want, slips, near=1e-3, otherwise=said):
            return f"{case}: {why}"
    return None


@exercise(
    "10_fast_decoding.2",
    "write RMSNorm(x) with |x|, see which factors depend on the column only, and where they can go",
    "what multiplies the columns of x can as well multiply the columns of the next matrix",
)
def _fold(answer: Callable[[Tensor, list[Tensor]], Tensor]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for size, outs in ((6, (4, 3)), (5, (5,)), (16, (3, 7, 2))):
        g = torch.rand(size, generator=generator) + 0.5
        matrices = [torch.randn(out, size, generator=generator) for out in outs]
        kept = [g.clone(), *[w.clone() for w in matrices]]
        got = answer(g, matrices)
        case = f"C = {size}, matrices of {', '.join(map(str, outs))} rows"
        if not all(torch.equal(*pair) for pair in zip(kept, [g, *matrices], strict=True)):
            return f"{case}: your function changes its arguments, and the model still needs them"
        whole = torch.cat(kept[1:])
        if not isinstance(got, Tensor) or got.shape != whole.shape:
            shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            return f"{case}: M should be {tuple(whole.shape)}, not {shape}"
        right = whole * g * size**0.5
        slips = {
            "the root mean square is |x| / sqrt(C): where did sqrt(C) go?": whole * g,
            "sqrt(C) is on the wrong side: dividing by |x| / sqrt(C) multiplies by it": (
                whole * g / size**0.5
            ),
            "the mean of the squares is |x|^2 / C, and its root has sqrt(C), not C": (
                whole * g * size
            ),
            "C counts the columns, not the rows of M": whole * g * len(whole) ** 0.5,
            "C counts the columns, not the rows of a matrix": torch.cat(
                [w * g * len(w) ** 0.5 for w in kept[1:]]
            ),
            "the norm's weight g is missing": whole * size**0.5,
            "the norm multiplies by g, it does not divide": whole / g * size**0.5,
            "the matrices are in another order than given": (
                torch.cat(kept[:0:-1]) * g * size**0.5
            ),
        }
        if outs == (size,):
            slips["g belongs to the columns, which x is multiplied with"] = (
                whole * g[:, None] * size**0.5
            )
        x = torch.randn(size, generator=generator)
        off = (x / x.norm() @ (got - right).float().T).abs().max().item()
        said = f"for a random x the products are off by up to {off:.2g}"
        if why := check_values(got, right, slips, near=1e-5, otherwise=said):
            return f"{case}: {why}"
    return None


COMPILATIONS = {
    "one call: prompt of 10, 50 new tokens": 1,
    "two calls: prompts of 10 and of 100, 50 new tokens each": 1,
    "two calls: prompts of 10 and of 250, 50 new tokens each": 2,
    "two calls: one row, then two rows, prompts of 10": 2,
    "one call with a growing cache instead: 5 single tokens": 5,
}
WHY = {
    "one call: prompt of 10, 50 new tokens": "which shape changes from step to step?",
    "two calls: prompts of 10 and of 100, 50 new tokens each": (
        "how long are the two caches, rounded up to a multiple of 256?"
    ),
    "two calls: prompts of 10 and of 250, 50 new tokens each": (
        "how long are the two caches, rounded up to a multiple of 256?"
    ),
    "two calls: one row, then two rows, prompts of 10": "which shape differs between the calls?",
    "one call with a growing cache instead: 5 single tokens": (
        "how long are keys and values at each of the five?"
    ),
}


@exercise(
    "10_fast_decoding.3",
    "for each case, list the shapes that the compiled step sees, and count the different ones",
    "one compilation for each set of shapes: keep the shapes, and it is compiled once",
)
def _compilations(answer: Any) -> str | None:
    return check_table(
        answer, COMPILATIONS, WHY, kind="a whole number", fits=lambda value: type(value) is int
    )
