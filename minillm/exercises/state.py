"""Graders of 12: the matrix form by hand, bytes of a memory, a copier, a step that forgets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch

from minillm.config import ModelConfig
from minillm.exercises import exercise
from minillm.model import CausalLM

Rows = list[list[float]]


# mistakes with the weights, and what is said about each
_MISTAKES: dict[str, dict[str, Any]] = {
    "output t reads inputs after t: those weights are 0": {"future": True},
    "each input enters with the weight of its own step": {"steps": "none"},
    "the step is the input's, not the output's": {"steps": "output"},
    "an input fades on its way to the output: that factor is missing": {"fades_from": None},
    "an input does not fade at its own position, only after it": {"fades_from": 0},
    "who asks is the output: its C meets the input's B": {"turned": True},
}


def _weights(
    dt: list[float],
    a: list[float],
    B: Rows,
    C: Rows,
    *,
    future: bool = False,
    steps: str = "input",
    fades_from: int | None = 1,
    turned: bool = False,
) -> Rows:
    rows = []
    for t in range(len(dt)):
        row = []
        for s in range(len(dt)):
            c, b = (C[s], B[t]) if turned else (C[t], B[s])
            fits = sum(x * y for x, y in zip(c, b, strict=True))
            left = 1.0 if fades_from is None else math.exp(sum(a[s + fades_from : t + 1]))
            step = {"input": dt[s], "output": dt[t], "none": 1.0}[steps]
            row.append(fits * left * step if future or s <= t else 0.0)
        rows.append(row)
    return rows


def _is_sized(x: Any, size: int) -> bool:
    return hasattr(x, "__len__") and len(x) == size


def _same(got: Any, wanted: Rows) -> bool:
    pairs = zip(got, wanted, strict=True)
    return all(abs(float(x) - y) < 1e-6 for g, w in pairs for x, y in zip(g, w, strict=True))


@exercise(
    "12.1",
    "three factors for each pair s <= t: do B and C fit, what is left of s at t, the step of s",
    "attention without a softmax, under a mask that fades: the same numbers as the recurrence",
)
def _weights_of(answer: Callable[[list[float], list[float], Rows, Rows], Any]) -> str | None:
    rng = random.Random(0)
    for T, N in ((1, 1), (2, 1), (5, 3), (7, 2)):
        dt = [rng.random() for _ in range(T)]
        a = [-2 * rng.random() * step for step in dt]
        B, C = ([[rng.gauss(0, 1) for _ in range(N)] for _ in range(T)] for _ in "BC")
        got = answer(list(dt), list(a), [list(b) for b in B], [list(c) for c in C])
        case = f"T = {T}, N = {N}"
        if not _is_sized(got, T) or not all(_is_sized(row, T) for row in got):
            return f"{case}: return {T} rows of {T} numbers"
        if _same(got, _weights(dt, a, B, C)):
            continue
        for message, mistake in _MISTAKES.items():
            if _same(got, _weights(dt, a, B, C, **mistake)):
                return f"{case}: {message}"
        return f"{case}: row {T - 1} is {list(got[T - 1])}, and the recurrence says otherwise"
    dt, a, B = [1.0] * 4, [-400.0, -400.0, -0.5, -0.5], [[1.0]] * 4
    try:
        fits = _same(answer(list(dt), list(a), list(B), list(B)), _weights(dt, a, B, B))
    except (ZeroDivisionError, OverflowError):
        fits = False
    if not fits:
        return f"a = {a}: exp({sum(a):.0f}) is 0, and no quotient brings back what was after it"
    return None


def _memory(config: Any, length: int) -> int:
    model = CausalLM(config).eval()
    cache = model.make_cache(batch_size=1)
    with torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long), cache=cache)
    return cache.nbytes


@exercise(
    "12.2",
    "what does the convolution look back on, how large is a head's state, what grows by token?",
    "a state costs the same at any length, keys and values more with each token",
)
def _memory_bytes(answer: Callable[[ModelConfig, int], Any]) -> str | None:
    sizes: dict[str, Any] = {"vocab_size": 11, "hidden_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    kinds: list[dict[str, Any]] = [
        {"model_type": "mamba2", "num_hidden_layers": 1, "state": {"num_heads": 4}},
        {
            "model_type": "mamba2",
            "num_hidden_layers": 3,
            "state": {"num_heads": 2, "n_groups": 2, "state_size": 5, "conv_kernel": 3},
        },
        {
            "model_type": "bamba",
            "num_hidden_layers": 3,
            "attn_layer_indices": (1,),
            "state": {"num_heads": 3, "expand": 3, "state_size": 7},
            **heads,
        },
        {
            "model_type": "bamba",
            "num_hidden_layers": 2,
            "attn_layer_indices": (0, 1),
            "state": {"num_heads": 2},
            **heads,
        },
    ]
    for kind in kinds:
        config: Any = ModelConfig(**sizes, **kind)
        for length in (1, 9):
            got, wanted = answer(config, length), _memory(config, length)
            layers = f"{config.num_hidden_layers} layers"
            case = f"{config.model_type}, {layers}, state {kind['state']}, {length} tokens"
            if not hasattr(got, "__float__"):
                return f"{case}: return a number, not {got!r}"
            got = float(got)
            if got == wanted:
                continue
            s = config.state
            width = s.expand * config.hidden_size + 2 * s.n_groups * s.state_size
            count = sum(map(config.has_state, range(config.num_hidden_layers)))
            if got * 4 == wanted:
                return f"{case}: these are numbers, each of which takes 4 bytes"
            if got - wanted == 4 * count * width:
                return f"{case}: the newest input is in the state already: W - 1 are kept"
            if wanted - got == 4 * count * (s.conv_kernel - 1) * width:
                return f"{case}: the convolution's window is missing"
            if wanted - got == 4 * count * (s.conv_kernel - 1) * 2 * s.n_groups * s.state_size:
                return f"{case}: B and C go through the convolution too"
            if wanted - got == 4 * count * s.expand * config.hidden_size * s.state_size:
                return f"{case}: the window is counted, the state is missing"
            others = (s.n_groups - 1) * s.state_size
            if wanted - got == 4 * count * (s.conv_kernel - 1) * 2 * others:
                return f"{case}: each of the groups has a B and a C of its own"
            return f"{case}: {got:,.0f} is not {wanted:,}"
    return None


@exercise(
    "12.3",
    "which step leaves the state alone, and how far must the old input fade in one marked step?",
    "with steps from the input a state can choose what it keeps, and for how long",
)
def _copier(answer: Callable[[list[int]], Any]) -> str | None:
    rng = random.Random(0)
    rows = [[1, 0, 0, 1, 0], [0, 0, 1, 0], [1, 1, 1], [0, 0], [1, *[0] * 60, 1]]
    rows.append([int(rng.random() < 0.3) for _ in range(40)])
    for marks in rows:
        got = answer(list(marks))
        case = f"marks {marks if len(marks) < 9 else str(marks[:8])[:-1] + ', ...]'}"
        if not isinstance(got, tuple | list) or len(got) != 2:
            return f"{case}: return two things, the list dt and the number A"
        steps, A = got
        if not hasattr(A, "__float__") or not -math.inf < float(A) < 0:
            return f"{case}: A is a negative number, not {A!r}"
        if not _is_sized(steps, len(marks)):
            return f"{case}: dt has a step for each of {len(marks)} positions"
        if any(not 0 <= float(step) < math.inf for step in steps):
            return f"{case}: a step is a number from 0"
        h = kept = 0.0
        for t, (mark, step) in enumerate(zip(marks, steps, strict=True)):
            x = rng.uniform(-10, 10)
            h = math.exp(float(step) * float(A)) * h + float(step) * x
            kept = x if mark else kept
            if abs(h - kept) > 1e-3:
                if not mark and step > 0:
                    return f"{case}: position {t} is not marked, and its input came in"
                if mark and abs(step - 1) > 1e-4:
                    return f"{case}: position {t} enters with the weight {step}, not with 1"
                return f"{case}: at position {t} the older input is still there: h = {h:.3f}"
    return None


@exercise(
    "12.4",
    "which line throws something away that the next step needs?",
    "the memory has two parts, and a step hands on both",
)
def _forgetful_line(answer: Any) -> str | None:
    answer = answer() if callable(answer) else answer
    if isinstance(answer, bool) or not isinstance(answer, int) or not 1 <= answer <= 5:
        return f"answer with the number of a line, 1 to 5, not {answer!r}"
    if answer == 3:
        return None
    if answer == 5:
        return "line 5 keeps what it is given; what is it given as the window?"
    return f"line {answer} is as it should be: follow what becomes of the window"
