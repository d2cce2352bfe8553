"""Graders of 17: sums counted, a row-parallel layer, a key written in a program of fixed shapes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minillm.exercises import check_table, check_values, exercise

PREDICTED = {
    "all-reduces in a forward pass": 20,
    "all-reduces in a forward and a backward pass": 40,
    "bytes of the tensor that one all-reduce adds up": 2 * 100 * 512 * 4,
    "all-reduces of one decoding step": 20,
    "bytes of the tensor in a decoding step of 2 rows": 2 * 512 * 4,
}
HINTS = {
    "all-reduces in a forward pass": "how many blocks has a layer, and how many sums has a block?",
    "all-reduces in a forward and a backward pass": "which tensor's gradient comes from all heads?",
    "bytes of the tensor that one all-reduce adds up": (
        "a sum ends a block: what shape has a block's output, and how large is a float32?"
    ),
    "all-reduces of one decoding step": "a step is a forward pass; does its length matter?",
    "bytes of the tensor in a decoding step of 2 rows": "how many new tokens has each row?",
}


@exercise(
    "17.1",
    "count the blocks; then write down the shape of what a block gives back",
    "the number of sums is the model's, their size the batch's; weights are never sent",
)
def _predicted(answer: Any) -> str | None:
    return check_table(answer, PREDICTED, HINTS)


JOINING = {torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.column_stack}


class _Share(Tensor):
    """What one process holds; joining it with another's is noticed."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function in JOINING and any(type(x) is _Share for x in args[0]):
            raise _Joined
        made = super().__torch_function__(function, types, args, kwargs or {})
        return made.as_subclass(Tensor) if isinstance(made, Tensor) else made


class _Joined(Exception):  # noqa: N818 (it is no error)
    """The answer put the parts of several processes together before it computed."""


ROW_MISTAKES: dict[str, Callable[[Tensor, Tensor | float, int], Tensor]] = {
    "the bias is in it {size} times; whose is it?": lambda y, b, size: y + size * b,
    "the bias is missing": lambda y, b, size: y,
    "a mean was taken; each process has other inputs, not another estimate": (
        lambda y, b, size: y / size + b
    ),
    "the mean of the biased parts was taken": lambda y, b, size: (y + b) / size,
}


@exercise(
    "17.2",
    "what does each process compute from its own numbers, and what belongs to none of them?",
    "parts are added, and what is not a part is added once",
)
def _row_parallel(answer: Callable[[list[Tensor], list[Tensor], Tensor | None], Any]) -> str | None:
    for size, with_bias in ((2, False), (1, True), (2, True), (4, True)):
        draw = torch.Generator().manual_seed(size)
        layer = torch.randn(3, 8, generator=draw, dtype=torch.float64)
        x = torch.randn(5, 8, generator=draw, dtype=torch.float64)
        bias = torch.randn(3, generator=draw, dtype=torch.float64) if with_bias else None
        case = f"{size} process{'es' * (size > 1)}, {'a' if with_bias else 'no'} bias"
        parts: list[list[Tensor]] = [
            [p.as_subclass(_Share) for p in whole.chunk(size, 1)] for whole in (x, layer)
        ]
        product, added = x @ layer.T, 0.0 if bias is None else bias.clone()
        before = [t.clone() for t in (x, layer)]
        try:
            got = answer(parts[0], parts[1], bias)
        except _Joined:
            return f"{case}: the inputs were joined; no process has those of another"
        except IndexError as error:
            return f"{case}: a process was asked for that is not there ({error})"
        if not (torch.equal(before[0], x) and torch.equal(before[1], layer)):
            return f"{case}: the arguments were changed; return a new tensor"
        if bias is not None and not torch.equal(bias, torch.as_tensor(added)):
            return f"{case}: the bias was changed; return a new tensor"
        if not isinstance(got, Tensor) or got.shape != product.shape:
            return f"{case}: return one tensor (B, out) = (5, 3), as every process has it"
        slips = ((s.format(size=size), m(product, added, size)) for s, m in ROW_MISTAKES.items())
        said = "the numbers are others than those of x Wᵀ + bias"
        if why := check_values(
            got.as_subclass(Tensor), product + added, slips, near=1e-9, otherwise=said
        ):
            return f"{case}: {why}"
    return None


class _Call(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, keys: Tensor, new: Tensor, position: Tensor) -> Any:
        return self.function(keys, new, position)


def _at(keys: Tensor, new: Tensor, position: Tensor) -> Tensor:
    slots = torch.arange(keys.shape[2])
    return torch.where((slots == position)[:, None], new, keys)


WRITE_MISTAKES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "the slot of the exported call was written, not this one's": lambda k, n, p: _at(k, n, p * 0),
    "the slot after it was written": lambda k, n, p: _at(k, n, p + 1),
    "all slots were written": lambda k, n, p: n.expand_as(k),
    "nothing was written": lambda k, n, p: k,
    "what was there is added to the new key": lambda k, n, p: _at(k, n + k, p),
    "the other slots are empty now": lambda k, n, p: _at(torch.zeros_like(k), n, p),
}


@exercise(
    "17.3",
    "what must the position stay, so that one graph knows every slot?",
    "shapes are fixed, the arguments stay, and the position is a tensor to the end",
)
def _write_key(answer: Callable[[Tensor, Tensor, Tensor], Any]) -> str | None:
    draw = torch.Generator().manual_seed(0)
    keys, new = (torch.randn(2, 3, n, 4, generator=draw) for n in (5, 1))
    given, first = (keys.clone(), new.clone(), torch.tensor([0])), torch.tensor([0])
    got = answer(*given)
    if not isinstance(got, Tensor) or got.shape != keys.shape:
        return "return all keys, the new one among them: (B, G, S, D)"
    if not torch.equal(given[0], keys):
        return "the caller's keys were changed; return new ones"
    if not torch.equal(given[1], new) or given[2].item() != 0:
        return "the new key or the position was changed; return new keys"
    off = logging.root.manager.disable
    logging.disable()  # PyTorch describes at length what one sentence says below
    try:
        program = torch.export.export(_Call(answer), (keys, new, first)).module()
        found = {p: program(keys, new, torch.tensor([p])) for p in (0, 2, 4)}
    except Exception:  # PyTorch has many kinds for one finding
        return (
            "no program of it knows all positions: is the position a number of Python's anywhere, "
            "by int() or .item(), in a slice or in an if?"
        )
    finally:
        logging.disable(off)
    for position, got in found.items():
        place = torch.tensor([position])
        slips = ((said, mistake(keys, new, place)) for said, mistake in WRITE_MISTAKES.items())
        said = f"slot {position} should hold the new key, and the others what they held"
        if why := check_values(got, _at(keys, new, place), slips, near=0, otherwise=said):
            return f"position {position}, exported with position 0: {why}"
    return None
