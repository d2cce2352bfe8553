"""Graders of 14: a forward pass with an adapter, its size, a merge that can be undone, packing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm.beyond.lora.adapters import linear_layers
from minillm.config import ModelConfig
from minillm.exercises import check_values, exercise
from minillm.model import CausalLM


def _same(got: Any, wanted: Tensor) -> bool:
    shapes = isinstance(got, Tensor) and got.shape == wanted.shape
    return shapes and bool(torch.allclose(got, wanted, atol=1e-4, rtol=1e-4))


class _Made(TorchDispatchMode):
    """The largest tensor that was made inside; views of what was given are not made."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given, self.largest = {x.untyped_storage().data_ptr() for x in given}, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.given:
                self.largest = max(self.largest, x.numel())
        return made


@exercise(
    "14.1",
    "first take x down to r numbers a row, then up to the outputs; what stands before the sum?",
    "with B = 0 it is W alone, and no matrix of the size of W was made on the way",
)
def _adapted_product(answer: Callable[..., Any]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    cases = [(6, 4, 2, 5.0), (4, 6, 3, 3.0), (5, 5, 1, 2.0), (3, 7, 2, 0.5)]
    for rows, columns, rank, alpha in cases:
        x, W, A, B = (
            torch.randn(*shape, generator=generator)
            for shape in ((3, columns), (rows, columns), (rank, columns), (rows, rank))
        )
        case = f"W {rows} x {columns}, r = {rank}, alpha = {alpha:g}"
        plain, low = x @ W.T, x @ A.T @ B.T
        before, started = W.clone(), answer(x, W, A, torch.zeros_like(B), alpha)
        if not isinstance(started, Tensor):
            return f"{case}: return a tensor, not a {type(started).__name__}"
        if not _same(started, plain):
            return f"{case}: with B = 0 the result is not x @ W.T"
        got = answer(x, W, A, B, alpha)
        if not torch.equal(W, before):
            return f"{case}: W itself was changed, and it is frozen"
        slips = {
            "the adapter is missing": plain,
            "alpha is taken whole; what should it be divided by?": plain + alpha * low,
            f"alpha / r is {alpha / rank:g}, not {alpha // rank:g}": plain + alpha // rank * low,
            "alpha has no effect": plain + low,
            "this is rsLoRA's scale; the page's first one is asked for": (
                plain + alpha / rank**0.5 * low
            ),
        }
        if rows == columns:
            slips["a transpose is missing; only on a square matrix this gives no error"] = (
                plain + alpha / rank * x @ (B @ A)
            )
        said = "not x @ W.T plus the scaled way through A and B"
        wanted = plain + alpha / rank * low
        if why := check_values(got, wanted, slips, near=1e-4, otherwise=said):
            return f"{case}: {why}"
    shapes = ((3, 300), (200, 300), (2, 300), (200, 2))
    x, W, A, B = (torch.randn(*shape, generator=generator) for shape in shapes)
    with _Made(x, W, A, B) as made:
        answer(x, W, A, B, 2.0)
    if made.largest >= W.numel():
        return (
            f"the numbers are right, but beside a W of {W.numel():,} numbers you make a tensor of "
            f"{made.largest:,}: which product is built first?"
        )
    return None


@exercise(
    "14.2",
    "an adapter of a matrix (out, in) has r (in + out) numbers; which seven matrices has a layer?",
    "the adapter grows with the sides of the matrices, the model with their areas",
)
def _adapter_size(answer: Callable[[ModelConfig, int], Any]) -> str | None:
    sizes: dict[str, Any] = {"vocab_size": 91, "hidden_size": 24, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 40}
    shipped: dict[str, Any] = {"vocab_size": 1456, "hidden_size": 224, "intermediate_size": 608}
    shipped |= {"num_attention_heads": 7, "num_hidden_layers": 3, "num_key_value_heads": 7}
    cases = [
        (ModelConfig(**shipped), 8),
        (ModelConfig(**sizes, num_key_value_heads=2), 3),
        (ModelConfig(**sizes, num_key_value_heads=1, head_dim=10), 5),
        (ModelConfig.preset("llama-3.1-8b"), 16),
    ]
    for config, rank in cases:
        with torch.device("meta"):
            model = CausalLM(config)
        shapes = {n: tuple(model.get_parameter(f"{n}.weight").shape) for n in linear_layers(model)}
        head = shapes.pop("lm_head")
        wanted = rank * sum(map(sum, shapes.values()))
        got = answer(config, rank)
        c, H, G = config, config.num_attention_heads, config.num_key_value_heads
        case = f"C = {c.hidden_size}, {H} heads, {G} of keys, r = {rank}"
        if isinstance(got, bool) or not isinstance(got, int | float):
            return f"{case}: return a number, not {got!r}"
        each, plain = 2 * rank * c.num_hidden_layers, sum(map(math.prod, shapes.values()))
        full, wider = (H - G) * c.head_dim, (H + G) * (c.head_dim - c.hidden_size // H)
        slips = {
            "the head gets no adapter here, and you count one": wanted + rank * sum(head),
            "these are the matrices themselves, not their adapters": plain,
            f"this is one layer of {c.num_hidden_layers}": wanted / c.num_hidden_layers,
            "this is A alone": rank * sum(columns for _, columns in shapes.values()),
            "this is B alone": rank * sum(rows for rows, _ in shapes.values()),
            f"keys and values have {G} heads, not {H}": wanted + each * full,
            f"a head has head_dim = {c.head_dim} numbers, not C / heads": wanted - each * wider,
        }
        said = f"{got:,} is not {wanted:,}, off by {got - wanted:,}"
        if why := check_values(got, wanted, slips, near=0, otherwise=said):
            return f"{case}: {why}"
    return None


@exercise(
    "14.3",
    "which line writes into a tensor that somebody else still needs?",
    "a merge that makes new tensors can be undone, and leaves a shared matrix to the other name",
)
def _merged_weights(answer: Callable[..., Any]) -> str | None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shared, other, third = draw(7, 4), draw(5, 4), draw(4, 4)
    weights = {"embed": shared, "head": shared, "up": other, "out": third}
    adapters = {
        "head": (draw(2, 4), draw(7, 2), 0.3),
        "up": (draw(3, 4), draw(5, 3), 2.0),
    }
    before = {name: tensor.clone() for name, tensor in weights.items()}
    wanted = dict(before)
    for name, (A, B, scale) in adapters.items():
        wanted[name] = before[name] + scale * B @ A
    given, trained = dict(weights), {n: (A.clone(), B.clone()) for n, (A, B, _) in adapters.items()}
    got = answer(given, dict(adapters))
    if given.keys() != before.keys() or any(given[name] is not weights[name] for name in weights):
        return "the old dictionary was changed"
    changed = [name for name in before if not torch.equal(weights[name], before[name])]
    if changed:
        return f"the old tensor of {changed[0]!r} was changed: nobody can take the change out"
    for name, kept in trained.items():
        for letter, old, now in zip("AB", kept, adapters[name][:2], strict=True):
            if not torch.equal(old, now):
                return f"{letter} of {name!r} was changed: the adapter is wrong the next time"
    if not isinstance(got, dict) or got.keys() != before.keys():
        return f"return a dictionary with the names {', '.join(before)}"
    for name, tensor in wanted.items():
        if _same(got[name], tensor):
            continue
        if name == "embed":
            return "the embedding was changed: its tensor was the head's, its adapter is not"
        if name not in adapters:
            return f"{name!r} has no adapter and was changed"
        A, B, scale = adapters[name]
        if _same(got[name], before[name] + 2 * scale * B @ A):
            return f"the change of {name!r} was added twice"
        if _same(got[name], before[name] + B @ A):
            return f"{name!r}: the scale is missing"
        if _same(got[name], before[name]):
            return f"{name!r} was not changed"
        return f"{name!r} is not W + scale B A"
    if answer(given, {}) is given:
        return "with no adapters the old dictionary itself comes back: return a new one"
    return None


@exercise(
    "14.4",
    "the upper half of a byte counts 16 times as much as the lower",
    "two codes a byte: 4 bits a number, and who unpacks must know the order and the true length",
)
def _pack_codes(answer: Callable[[list[int]], Any]) -> str | None:
    for codes in ([1, 2], [15, 0, 0, 15], [3, 8, 14], [9], [], [7, 7, 12, 5, 0]):
        padded = codes + [7] * (len(codes) % 2)
        pairs = list(zip(padded[0::2], padded[1::2], strict=True))
        wanted = [16 * first + second for first, second in pairs]
        given = list(codes)
        got = answer(given)
        if given != codes:
            return f"{codes}: the list of codes was changed; make a new one"
        if isinstance(got, Tensor):
            got = got.tolist()
        if not isinstance(got, list | tuple | bytes | bytearray):
            return f"{codes}: return a list of bytes"
        got = list(got)
        if got == wanted:
            continue
        if got == [16 * second + first for first, second in pairs]:
            return f"{codes}: the first code belongs in the upper half"
        if len(got) == len(codes) and codes:
            return f"{codes}: {len(codes)} codes need {len(wanted)} bytes, not {len(got)}"
        if len(codes) % 2 and got == wanted[:-1]:
            return f"{codes}: the last code is missing"
        if len(codes) % 2 and got[:-1] == wanted[:-1]:
            return f"{codes}: the last byte's lower half should stand for zero, code 7"
        return f"{codes}: got {got}, not {wanted}"
    return None
