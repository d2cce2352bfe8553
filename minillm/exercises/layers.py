"""Graders of notebook 06: RMSNorm by hand, gated width, GELU's derivative, counting parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.exercises import exercise


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@exercise("06.1", "Write rms_norm(x, weight, eps): x over its root mean square, times the weight.")
def _rms_norm(answer: Callable[[Tensor, Tensor, float], Tensor]) -> str | None:
    cases = [
        (_draw(2, 3, 8), 1e-6),
        (1e-3 * _draw(4, 8, seed=1), 1e-5),
        (torch.tensor([[300.0, -300.0, 150.0, 0.0]]).half(), 1e-6),
        (torch.tensor([[60000.0, 1.0, -60000.0, 30000.0]]).half(), 1e-6),
        (_draw(4, 8, seed=2).bfloat16(), 1e-6),
    ]
    for x, eps in cases:
        size, what = x.shape[-1:], str(x.dtype).removeprefix("torch.")
        weight = (1 + 0.3 * _draw(*size, seed=5)).to(x.dtype)
        got = answer(x, weight, eps)
        want = weight * F.rms_norm(x.float(), size, None, eps).to(x.dtype)
        if got.dtype != x.dtype:
            return f"a {what} input should give a {what} output, yours is {got.dtype}"
        if got.shape != x.shape:
            return f"the shape {tuple(x.shape)} became {tuple(got.shape)}"
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6}.get(x.dtype, 2**-8)
        if torch.allclose(got, want, rtol=tolerance, atol=1e-6):
            continue
        if x.dtype == torch.float16:
            return f"float16 {x[0, 0]:.0f} squared is infinite: take the mean square in float32"
        root = x.float().pow(2).mean(-1, keepdim=True).sqrt()
        if torch.allclose(got.float(), weight.float() * x.float() / (root + eps), rtol=1e-4):
            return "eps belongs under the root, added to the mean square"
        centred = F.layer_norm(x.float(), size, weight.float(), None, eps)
        if torch.allclose(got.float(), centred, rtol=1e-3, atol=1e-4):
            return "you subtract the mean: that is LayerNorm, RMSNorm divides only"
        if torch.allclose(got * weight, want, rtol=tolerance, atol=1e-6):
            return "the weight is missing"
        return (
            f"a {what} vector comes out {got.flatten()[0]:.4f}..., not {want.flatten()[0]:.4f}..."
        )
    return None


@exercise("06.2", "Write gated_width(hidden_size, multiple_of): int(8/3 of it), rounded up.")
def _gated_width(answer: Callable[[int, int], int]) -> str | None:
    for hidden, multiple in ((4096, 256), (5120, 256), (48, 128), (96, 1), (100, 7)):
        got, exact = answer(hidden, multiple), 8 * hidden // 3
        want = -(-exact // multiple) * multiple
        if got == want and isinstance(got, int):
            continue
        case = f"hidden size {hidden}, multiples of {multiple}"
        if not isinstance(got, int):
            return f"{case}: a width is a whole number (int), got {got!r}"
        if got == exact // multiple * multiple:
            return f"{case}: {got} is rounded down, the rule rounds up"
        if got == want + multiple and exact == want:
            return f"{case}: {exact} is a multiple already, it should stay as it is"
        if got == -(-4 * hidden // multiple) * multiple:
            return f"{case}: {got} is the width of a plain block; three matrices want two thirds"
        return f"{case}: expected {want}, got {got}"
    return None


@exercise("06.3", "Write gelu_derivative(x): the slope of the exact GELU at every x, no autograd.")
def _gelu_derivative(answer: Callable[[Tensor], Tensor]) -> str | None:
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    got = answer(x)
    if got.shape != x.shape:
        return f"for {len(x)} inputs I expected as many slopes, got shape {tuple(got.shape)}"
    below = 0.5 * (1 + torch.erf(x / 2**0.5))
    density = torch.exp(-(x**2) / 2) / (2 * torch.pi) ** 0.5
    want = below + x * density
    if torch.allclose(got, want, atol=1e-7):
        return None
    if torch.allclose(got, below, atol=1e-6):
        return "that is only the first term: by the product rule x times the density is missing"
    if torch.allclose(got, below + density, atol=1e-6):
        return "the density is to be multiplied by x"
    if torch.allclose(got, below + x * torch.exp(-(x**2) / 2), atol=1e-6):
        return "the normal density has a factor 1 / sqrt(2 pi)"
    if torch.allclose(got, x * below, atol=1e-6):
        return "that is GELU itself, the question is its derivative"
    if torch.allclose(got, want, atol=2e-2):
        return "close, but this is the derivative of one of GELU's approximations"
    worst = int((got - want).abs().nan_to_num(torch.inf).argmax())
    return f"at x = {x[worst]:.1f} the slope is {want[worst]:.4f}, not {got[worst]:.4f}"


def _config(v: int, c: int, f: int, n: int, h: int, g: int, tied: bool, bias: bool) -> dict:
    return {
        "vocab_size": v,
        "hidden_size": c,
        "intermediate_size": f,
        "num_hidden_layers": n,
        "num_attention_heads": h,
        "num_key_value_heads": g,
        "tie_word_embeddings": tied,
        "attention_bias": bias,
    }


_PUBLISHED = {
    "Llama-3.1-8B": (_config(128256, 4096, 14336, 32, 32, 8, False, False), 8_030_261_248),
    "Llama-2-7B": (_config(32000, 4096, 11008, 32, 32, 32, False, False), 6_738_415_616),
    "Qwen2.5-0.5B": (_config(151936, 896, 4864, 24, 14, 2, True, True), 494_032_768),
}


@exercise("06.4", "Write count_parameters(config): all parameters of a Llama or Qwen2 model.")
def _count_parameters(answer: Callable[[dict[str, Any]], int]) -> str | None:
    for name, (config, want) in _PUBLISHED.items():
        missing = want - int(answer(dict(config)))
        if not missing:
            continue
        C, L, V = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
        H, G = config["num_attention_heads"], config["num_key_value_heads"]
        slips = {
            (2 * L + 1) * C: "the norms are missing: two a layer and one at the end",
            C: "one norm is missing: the stack ends with one of its own",
            V * C: "embedding and head are two matrices unless they are tied",
            -V * C: "embedding and head are tied here: count them once",
            -L * 2 * C * (H - G) * (C // H): "k and v have fewer heads than q here",
            L * C * config["intermediate_size"]: "a gated block has three matrices, not two",
            L * (C + 2 * G * (C // H)): "q, k and v have biases here",
        }
        if missing in slips:
            return f"{name}: {slips[missing]}"
        return f"{name} has {want:,} parameters, you count {want - missing:,}"
    return None
