"""Graders of deeper/07_gradients: the scores of attention, an RMS norm, accumulation."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.exercises import Unsolved, check_values, exercise

__all__: list[str] = []


@exercise(
    "07_gradients.1",
    "which row or column of d_scores does query t see, and which does key s see?",
    "a product's gradient goes to each factor through the other one; key s collects a column",
)
def _score_gradients(answer: Callable[..., tuple[Tensor, Tensor]]) -> str | None:
    generator = torch.Generator().manual_seed(4)
    for T, S, D in ((4, 4, 9), (3, 5, 4)):
        q, k, d = (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((T, D), (S, D), (T, S))
        )
        found = _by_hand(answer, q, k, d)
        if isinstance(found, str):
            return found
        (dq, dk), scale = found, math.sqrt(D)
        if dq.shape != q.shape or dk.shape != k.shape:
            return (
                f"a gradient has its tensor's shape: for q {(T, D)} and k {(S, D)} yours have"
                f" {tuple(dq.shape)} and {tuple(dk.shape)}"
            )
        p = (q @ k.T / scale).softmax(-1)
        twice = p * (d - (p * d).sum(-1, keepdim=True))
        root = "the scores were divided by sqrt(D), so their gradients must be as well"
        for got, weights, rows, said in (
            (dq, d, k, "dq is wrong: row t of it is the sum of all keys, weighted with row t of"),
            (dk, d.T, q, "dk is wrong: row s is the sum of all queries, weighted with column s of"),
        ):
            slips = {root: weights @ rows, "divide by sqrt(D), not by D": weights @ rows / D}
            if got is dq:
                again = "d_scores lies behind softmax already; going through it again is too often"
                slips[again] = twice @ k / scale
            elif T == S:
                column = "dk lacks the transpose: key s collects column s of the scores' gradient"
                slips[column] = d @ q / scale
            wanted = weights @ rows / scale
            if why := check_values(got, wanted, slips, near=1e-9, otherwise=f"{said} d_scores"):
                return why
    return None


@exercise(
    "07_gradients.2",
    "each number of x goes into y twice: directly, and through r",
    "a norm's gradient has nothing along x itself: making x longer changes (almost) nothing",
)
def _norm_gradients(answer: Callable[..., tuple[Tensor, Tensor]]) -> str | None:
    generator = torch.Generator().manual_seed(5)
    for N, C, eps in ((3, 6, 0.0), (5, 4, 0.5)):
        x, dy = torch.randn(2, N, C, generator=generator, dtype=torch.float64)
        gain = 1 + torch.rand(C, generator=generator, dtype=torch.float64)
        found = _by_hand(answer, x, gain, dy, eps)
        if isinstance(found, str):
            return found
        dx, d_gain = found
        r = (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        n, dn = x / r, dy * gain
        along = (dn * n).mean(-1, keepdim=True)
        if dx.shape != x.shape or d_gain.shape != gain.shape:
            return (
                f"dx has the shape {(N, C)} and d_gain {(C,)}; yours have {tuple(dx.shape)}"
                f" and {tuple(d_gain.shape)}"
            )
        slips = {
            "d_gain is a sum over the rows, not a mean: the gain is used in each of them": (
                (dy * n).mean(0)
            ),
            "the gain is multiplied with x / r, not with x": (dy * x).sum(0),
            "eps is missing: it stands under the root of r": (
                (dy * x / x.pow(2).mean(-1, keepdim=True).sqrt()).sum(0)
            ),
        }
        said = "d_gain is wrong: y is gain times x / r, in every row"
        if why := check_values(d_gain, (dy * n).sum(0), slips, near=1e-9, otherwise=said):
            return why
        slips = {
            "r depends on x as well: a part of the gradient goes through it": dn / r,
            "the gain is missing in dx: what reaches x / r is dy times the gain": (
                (dy - n * (dy * n).mean(-1, keepdim=True)) / r
            ),
            "the part through r is C times too large: r has a mean under its root, not a sum": (
                (dn - n * along * C) / r
            ),
            "the part through r has the wrong sign: a larger r makes y smaller": (
                (dn + n * along) / r
            ),
            "the part through r has one r too few below it: both x in it stand over r": (
                dn / r - x * (dn * x).mean(-1, keepdim=True) / r**2
            ),
        }
        said = "dx is wrong: the direct part is dy * gain / r; which part comes through r?"
        if why := check_values(dx, (dn - n * along) / r, slips, near=1e-9, otherwise=said):
            return why
    return None


@exercise(
    "07_gradients.3",
    "what must be known before the first backward pass, if each is to be divided by it?",
    "sums add up over batches, means do not; and one graph at a time is in memory",
)
def _accumulate(answer: Callable[[nn.Module, list[tuple[Tensor, Tensor]]], float]) -> str | None:
    function = getattr(answer, "function", answer)  # its None is told apart below
    generator = torch.Generator().manual_seed(5)
    table = nn.Embedding(11, 11, dtype=torch.float64)
    events: list[str] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, ids: Tensor) -> Tensor:
            logits = self.table(ids)
            events.append("forward")
            if logits.requires_grad:
                logits.register_hook(lambda _: events.append("backward"))
            return logits

    batches = []
    for kept in (1, 12, 5):
        ids = torch.randint(11, (2, 7), generator=generator)
        targets = ids[:, 1:].clone()
        targets.view(-1)[kept:] = -100
        batches.append((ids[:, :-1], targets))

    def mean(rows: list[tuple[Tensor, Tensor]]) -> Tensor:
        parts = [
            F.cross_entropy(table(x).flatten(0, 1), y.flatten(), reduction="sum") for x, y in rows
        ]
        return torch.stack(parts).sum() / sum(int((y != -100).sum()) for _, y in rows)

    expected = torch.autograd.grad(mean(batches), table.weight)[0]
    each = [torch.autograd.grad(mean([b]), table.weight)[0] for b in batches]
    model = Model()
    loss = function(model, batches)
    if table.weight.grad is None and (loss is None or loss is ...):
        raise Unsolved
    if table.weight.grad is None:
        return "after your function the parameters have no gradient: call backward for each batch"
    found = table.weight.grad.clone()
    if (calls := events.count("forward")) != 3:
        return f"the model should see each batch once, one by one; it was called {calls} times"
    positions = "you divide by all positions: those with the label -100 do not count"
    mistakes = [
        (
            "you average the batches' means: a batch with 1 target weighs as much as one with 12",
            torch.stack(each).mean(0),
        ),
        (
            "you add up means: divide the sum of all losses by the count of all targets, 18",
            torch.stack(each).sum(0),
        ),
        (positions, expected * 18 / 36),
        (positions, expected * 18 / 12),
        ("you forgot to divide by the number of targets", expected * 18),
    ]
    said = "the gradient differs from that of one large batch with all the targets"
    if why := check_values(found, expected, mistakes, near=1e-9, otherwise=said):
        return why
    if events != ["forward", "backward"] * 3:
        return "the gradient is right, but all graphs wait for the end: backward after each batch"
    wanted = mean(batches).item()
    if loss is None or loss is ...:
        return "the gradients are right; now return the mean loss as well"
    value = float(loss.detach() if isinstance(loss, Tensor) else loss)
    if abs(value - wanted) > 1e-5:  # a count that is a tensor makes it float32
        return f"the mean loss over all 18 targets is {wanted:.4f}, you return {value:.4f}"
    function(model, batches)
    if not _close(table.weight.grad, expected):
        return "called again, your function adds to the old gradients: set them to None first"
    return None


def _by_hand(answer: Callable[..., Any], *given: Any) -> tuple[Tensor, Tensor] | str:
    """The two gradients that the answer finds while nothing is recorded, or what is wrong."""
    try:
        with torch.inference_mode():
            found = answer(*(x.clone() if isinstance(x, Tensor) else x for x in given))
    except NotImplementedError:  # a RuntimeError, and a stub
        raise
    except RuntimeError as error:
        if "grad" in str(error) or "nference" in str(error):
            return "autograd is switched off here: write the gradients as formulas"
        raise
    if not isinstance(found, tuple | list) or [type(x) for x in found] != [Tensor, Tensor]:
        return "return two tensors, in the order of the task"
    first, second = found
    return first, second


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12)
