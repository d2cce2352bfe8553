"""Graders of notebook 07: targets, numbers to expect, a loop, a source of batches."""

import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.exercises import Unsolved, as_given, check_table, check_values, exercise

__all__: list[str] = []

Batches = list[tuple[Tensor, Tensor]]


@exercise(
    "07.1",
    "which column has nothing after it, and which column does nobody predict?",
    "the shift and the label -100 are all that makes a batch out of rows",
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


EXPECTED = {
    "first loss, all logits near 0 (nats)": math.log(2000),
    "loss of a model that is always torn between two tokens, both equally likely (nats)": math.log(
        2
    ),
    "slope for the target's logit, when its probability is 0.25 (one token)": -0.75,
    "sum of the slopes for all 2,000 logits of a token": 0.0,
    "FLOPs to train on 1,000 tokens, without attention's reading": 6e9,
    "AdamW's first step at rate 0.001 for a slope of 50, no decay (its size)": 0.001,
    "joint length 5 clipped to 1: what becomes of a slope of 2": 0.4,
}
HINTS = dict(
    zip(
        EXPECTED,
        (
            "the model guesses: every token has the probability 1/2,000",
            "the right token always has the probability 1/2; natural logarithm",
            "prediction minus truth, and the truth at the target is 1",
            "the probabilities sum to 1, and so does the truth",
            "2 for each number forward, and twice that backward, for each token",
            "m and the root of v are the same number in the first step, up to the sign",
            "all slopes are scaled by the same factor",
        ),
        strict=True,
    )
)


def _sign_or_unit(question: str, value: float) -> str | None:
    wanted = EXPECTED[question]
    if wanted and math.isclose(value, -wanted, rel_tol=0.02):
        return "the size is right, the sign is not"
    if "nats" in question and math.isclose(value * math.log(2), wanted, rel_tol=0.02):
        return "this is in bits; one bit is ln 2 nats"
    return None


@exercise(
    "07.2",
    "each number follows from one line of the page; none needs a run",
    "compare a real training with such numbers first: its first loss, its steps, its cost",
)
def _expected(answer: Any) -> str | None:
    if (given := as_given(answer, EXPECTED)) is not None:
        answer = {key: x.item() if isinstance(x, Tensor) else x for key, x in given.items()}
    return check_table(answer, EXPECTED, HINTS, _sign_or_unit, share=0.02)


MISTAKES = {
    "softmax": "F.cross_entropy wants logits: softmax is still taken twice",
    "shift": "the targets are shifted already, and your loop shifts them once more",
    "clear": "the gradients of earlier steps are still there when backward() adds to them",
    "clip": "clipping must come between backward() and step(), and with a length of 1",
}


def _loop(
    model: nn.Module, optimizer: Any, batches: Batches, mistakes: tuple[str, ...] = ()
) -> float:
    loss = torch.zeros(())
    for inputs, targets in batches:
        logits = model(inputs)
        logits = logits.softmax(-1) if "softmax" in mistakes else logits
        if "shift" in mistakes:
            logits, targets = logits[:, :-1], targets[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if "clear" not in mistakes:
            optimizer.zero_grad()
        loss.backward()
        if "clip" not in mistakes:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if "clip" in mistakes:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.item()


@exercise(
    "07.3",
    "read it line by line: what goes into the loss, and in which order are gradients used?",
    "logits, loss, clear, backward, clip, step: another order trains something else",
)
def _find_the_mistakes(answer: Callable[[nn.Module, Any, Batches], float]) -> str | None:
    function = getattr(answer, "function", answer)
    generator = torch.Generator().manual_seed(6)
    batches = []
    for kept in (12, 5, 9):
        ids = torch.randint(7, (2, 7), generator=generator)
        targets = ids[:, 1:].clone()
        targets.view(-1)[kept:] = -100
        batches.append((ids[:, :-1], targets))
    start = torch.randn(7, 7, generator=generator, dtype=torch.float64)

    def run(train: Callable[..., Any]) -> tuple[Tensor, Any]:
        table = nn.Embedding.from_pretrained(start.clone(), freeze=False)
        model = nn.Sequential(table, nn.Linear(7, 7, bias=False, dtype=torch.float64))
        model[1].weight.data = 8 * torch.eye(7, dtype=torch.float64)  # so that clipping matters
        result = train(model, torch.optim.SGD(model.parameters(), lr=0.5), batches)
        return torch.cat([p.detach() for p in model.parameters()]), result

    found, loss = run(function)
    if torch.equal(found[:7], start):
        if loss is None or loss is ...:
            raise Unsolved
        return "no parameter has moved: is there a gradient when optimizer.step() is called?"
    weights, wanted = run(_loop)
    slips = (
        (
            MISTAKES[kinds[0]] + (f" (at least {count} mistakes are left)" if count > 1 else ""),
            run(partial(_loop, mistakes=kinds))[0],
        )
        for count in range(1, len(MISTAKES) + 1)
        for kinds in itertools.combinations(MISTAKES, count)
    )
    said = (
        "the parameters end elsewhere than those of a right loop; is each step taken once, and are"
        " all gradients scaled by one factor, that of their joint length?"
    )
    if why := check_values(found, weights, slips, near=1e-9, otherwise=said):
        return why
    if loss is None or loss is ...:
        return "the training is right; now return the last loss"
    value = float(loss.detach() if isinstance(loss, Tensor) else loss)
    if abs(value - wanted) > 1e-5:
        return f"the last loss is {wanted:.4f}, you return {value:.4f}"
    return None


@exercise(
    "07.4",
    "if an epoch's order depends on the seed and the epoch alone, what is left to remember?",
    "an order that can be made again needs no memory: one count says where the source stands",
)
def _epoch_batches(answer: Any) -> str | None:
    for length in (101, 100, 109):  # 10 windows of 10 + 1; 9 and a rest; 10 and a rest
        if finding := _epochs(answer, length):
            return finding
    return None


def _epochs(answer: Any, length: int) -> str | None:
    """Three epochs of batches of 3 windows, from a text of tokens whose values are no places."""
    tokens = (torch.arange(length) * 37 + 5) % 997
    place = {token: i for i, token in enumerate(tokens.tolist())}
    windows = (length - 1) // 10
    make = lambda seed=0: answer(tokens, 3, 10, seed)  # noqa: E731
    source = make()
    seen: list[Any] = []
    while len(seen) < 3 * windows:
        try:
            batch = next(source)
        except NotImplementedError:  # a RuntimeError, and a stub
            raise
        except (IndexError, RuntimeError, ValueError) as error:
            return (
                f"with {length} tokens your source raises {type(error).__name__} ({error}):"
                " how many whole windows of 10 + 1 tokens are there?"
            )
        if batch is None or batch is ...:
            raise Unsolved
        x, y = batch
        if x.shape != (3, 10) or y.shape != (3, 10):
            shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
            return f"batch {len(seen) // 3 + 1} has the shapes {shapes}, expected (3, 10) twice"
        if not {*x.flatten().tolist(), *y.flatten().tolist()} <= place.keys():
            return "a batch holds ids that are not in the text: give its tokens, not their places"
        starts = [place[token] for token in x[:, 0].tolist()]
        whole = [tokens[start : start + 11] for start in starts]
        if any(len(row) < 11 for row in whole):
            return f"of {length} tokens, the last window has no target for its last token: leave it"
        if not torch.equal(x, torch.stack(whole)[:, :-1]):
            return "the inputs are not a stretch of the text"
        if not torch.equal(y, torch.stack(whole)[:, 1:]):
            return "the targets are not the tokens that follow the inputs"
        seen += starts
    epochs = [seen[i : i + windows] for i in (0, windows, 2 * windows)]
    for number, epoch in enumerate(epochs):
        if sorted(epoch) != list(range(0, 10 * windows, 10)):
            return (
                f"epoch {number} of {length} tokens begins windows at the places {sorted(epoch)}:"
                f" each of 0, 10, ... {10 * windows - 10} should come once"
            )
    if epochs[0] == sorted(epochs[0]):
        return "the windows come in the order of the text: shuffle them"
    if epochs[0] == epochs[1]:
        return "every epoch has the same order: let the order depend on the epoch as well"
    other = make(seed=1)
    rows = torch.cat([next(other)[0] for _ in range(windows)])[:windows]
    if (order := [place[token] for token in rows[:, 0].tolist()]) == epochs[0]:
        return "another seed gives the same order"
    if order == epochs[1]:
        return (
            "epoch 0 of seed 1 has the order of epoch 1 of seed 0: two runs would share orders;"
            " mix seed and epoch so that their sum says nothing"
        )
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
            return f"after batch {taken}, a source that loads the state goes on with other windows"
    return None
