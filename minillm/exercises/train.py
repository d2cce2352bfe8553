"""Graders of notebook 09: targets, gradients of attention, accumulation, a source that resumes."""

import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.exercises import exercise

__all__: list[str] = []


@exercise(
    "09.1",
    "give inputs and targets, shifted by one, with -100 where the target is padding",
)
def _inputs_and_targets(answer: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> str | None:
    rows = torch.tensor([[5, 7, 9, 4, 8], [6, 3, 2, 2, 2], [2, 2, 2, 2, 2]])
    given = rows.clone()
    inputs, targets = answer(rows, 2)
    if not torch.equal(rows, given):
        return "your function changes the rows it was given; mask a copy (the targets are a view)"
    if inputs.shape != (3, 4) or targets.shape != (3, 4):
        return (
            f"rows of 5 ids give 4 inputs and 4 targets, not shapes {tuple(inputs.shape)}"
            f" and {tuple(targets.shape)}"
        )
    if torch.equal(targets[0], given[0, :-1]):
        return "your targets are the inputs themselves: the model would learn to copy"
    if targets[0].tolist() != [7, 9, 4, 8]:
        return f"after [5, 7, 9, 4] comes [7, 9, 4, 8], your targets are {targets[0].tolist()}"
    if (targets == 2).any():
        return "a target that is padding must be -100, or the model learns to predict padding"
    if (inputs == -100).any():
        return "-100 is a label, not a token: the embedding of the inputs would fail on it"
    if targets[1].tolist() != [3, -100, -100, -100]:
        return f"[6, 3, pad, pad, pad] has one target, 3; yours are {targets[1].tolist()}"
    if not torch.equal(inputs, given[:, :-1]):
        return "the inputs are the rows without their last column, padding included"
    other = torch.tensor([[1, 0, 0]])
    if answer(other, 0)[1].tolist() != [[-100, -100]]:
        return "your function does not use the id of the padding that it is given"
    return None


@exercise("09.2", "give dq and dk from the gradient of the scaled scores q k^T / sqrt(D)")
def _score_gradients(answer: Callable[..., tuple[Tensor, Tensor]]) -> str | None:
    generator = torch.Generator().manual_seed(4)
    for T, S, D in ((4, 4, 9), (3, 5, 4)):
        q, k, d = (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((T, D), (S, D), (T, S))
        )
        dq, dk = answer(q, k, d)
        scale = math.sqrt(D)
        if dq.shape != q.shape or dk.shape != k.shape:
            return (
                f"a gradient has its tensor's shape: for q {(T, D)} and k {(S, D)} yours have"
                f" {tuple(dq.shape)} and {tuple(dk.shape)}"
            )
        if _close(dk, d @ q / scale) if T == S else False:
            return "dk lacks the transpose: key s collects column s of the scores' gradient"
        if _close(dq, d @ k) or _close(dk, d.T @ q):
            return "the scores were divided by sqrt(D), so their gradients must be as well"
        if _close(dq, d @ k / D) or _close(dk, d.T @ q / D):
            return "divide by sqrt(D), not by D"
        if not _close(dq, d @ k / scale):
            return (
                "dq is wrong: row t of it is the sum of all keys, weighted with row t of d_scores"
            )
        if not _close(dk, d.T @ q / scale):
            return (
                "dk is wrong: row s is the sum of all queries, weighted with column s of d_scores"
            )
    return None


@exercise("09.3", "leave the gradient of the mean over all targets of all batches, batch by batch")
def _accumulate(answer: Callable[[nn.Module, list[tuple[Tensor, Tensor]]], float]) -> str | None:
    generator = torch.Generator().manual_seed(5)
    table = nn.Embedding(11, 11, dtype=torch.float64)
    calls: list[int] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, ids: Tensor) -> Tensor:
            calls.append(ids.shape[0])
            return self.table(ids)

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
    loss = float(answer(model, batches))
    if table.weight.grad is None:
        return "after your function the parameters have no gradient: call backward for each batch"
    found = table.weight.grad.clone()
    if len(calls) != 3:
        return f"the model should see each batch once, one by one; it was called {len(calls)} times"
    if _close(found, torch.stack(each).mean(0)):
        return "you average the batches' means: a batch with 1 target weighs as much as one with 12"
    if _close(found, torch.stack(each).sum(0)):
        return "you add up means: divide the sum of all losses by the count of all targets, 18"
    if _close(found, expected * 18 / 36) or _close(found, expected * 18 / 12):
        return "you divide by all positions: those with the label -100 do not count"
    if _close(found, expected * 18):
        return "you forgot to divide by the number of targets"
    if not _close(found, expected):
        return "the gradient differs from that of one large batch with all the targets"
    wanted = mean(batches).item()
    if abs(loss - wanted) > 1e-9:
        return f"the mean loss over all 18 targets is {wanted:.4f}, you return {loss:.4f}"
    answer(model, batches)
    if not _close(table.weight.grad, expected):
        return "called again, your function adds to the old gradients: set them to None first"
    return None


@exercise(
    "09.4", "write a source of batches that gives each window once an epoch and resumes anywhere"
)
def _epoch_batches(answer: Any) -> str | None:
    tokens = torch.arange(1, 102)  # 10 windows of 10 + 1
    make = lambda seed=0, size=3: answer(tokens, size, 10, seed)  # noqa: E731
    source, seen = make(), []
    for _ in range(10):  # 30 windows of batches of 3: three epochs
        x, y = next(source)
        if x.shape != (3, 10) or y.shape != (3, 10):
            return f"a batch has shapes (3, 10) and (3, 10), not {tuple(x.shape)}, {tuple(y.shape)}"
        if not torch.equal(y, x + 1):
            return "the targets are not the tokens that follow the inputs"
        seen += x[:, 0].tolist()
    epochs = [seen[i : i + 10] for i in (0, 10, 20)]
    for number, epoch in enumerate(epochs):
        if sorted(epoch) != list(range(1, 101, 10)):
            return f"epoch {number} begins windows at {sorted(epoch)}: each should come once"
    if epochs[0] == sorted(epochs[0]):
        return "the windows come in the order of the text: shuffle them"
    if epochs[0] == epochs[1]:
        return "every epoch has the same order: let the order depend on the epoch as well"
    if next(make(seed=1))[0].tolist() == next(make())[0].tolist():
        return "another seed gives the same order"
    if next(make())[0].tolist() != next(make())[0].tolist():
        return "the same seed gives another order: draw from a generator of your own"
    return _resumes(make)


def _resumes(make: Callable[[], Any]) -> str | None:
    """Does a source continue from its state after any number of batches?"""
    for taken in range(9):
        source, other = make(), make()
        for _ in range(taken):
            next(source)
        try:
            state = json.loads(json.dumps(source.state_dict()))
        except TypeError as error:
            return f"your state is not plain data: {error}"
        expected = [next(source)[0].tolist() for _ in range(5)]
        next(other)
        other.load_state_dict(state)
        if [next(other)[0].tolist() for _ in range(5)] != expected:
            return (
                f"after {taken} batches, a source that loads the state goes on with other windows"
            )
    return None


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12)
