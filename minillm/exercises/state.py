"""Graders of 12: the matrix by hand, bytes of a memory, a wire that halves, what is in reach."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch

from minillm.config import ModelConfig
from minillm.exercises import check_table, check_values, exercise
from minillm.model import CausalLM

Rows = list[list[float]]


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
            step = {"input": dt[s], "output": dt[t], "none": 1.0}[steps]
            left = 1.0 if fades_from is None else math.exp(sum(a[s + fades_from : t + 1]))
            row.append(fits * left * step if future or s <= t else 0.0)
        rows.append(row)
    return rows


# mistakes with the weights, and what is said about each
_MISTAKES: dict[str, dict[str, Any]] = {
    "output t reads inputs after t: those weights are 0": {"future": True},
    "each input enters with the weight of its own step": {"steps": "none"},
    "the step is the input's, not the output's": {"steps": "output"},
    "an input fades on its way to the output: that factor is missing": {"fades_from": None},
    "an input does not fade at its own position, only after it": {"fades_from": 0},
    "who asks is the output: its C meets the input's B": {"turned": True},
}


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
        slips = ((said, _weights(dt, a, B, C, **slip)) for said, slip in _MISTAKES.items())
        said = f"row {T - 1} is {list(got[T - 1])}, and the recurrence says otherwise"
        if why := check_values(got, _weights(dt, a, B, C), slips, otherwise=said):
            return f"{case}: {why}"
    # one large step far back: too large for a quotient, and for a difference of two long sums
    for large, said in (
        (-400.0, "exp(-800) is 0, and no quotient brings back what was after it"),
        (-1e17, "the difference of two long sums has lost what the short one between them holds"),
    ):
        dt, a, B = [1.0] * 4, [large, large, -0.5, -0.5], [[1.0]] * 4
        try:
            fits = _same(answer(list(dt), list(a), list(B), list(B)), _weights(dt, a, B, B))
        except (ZeroDivisionError, OverflowError):
            fits = False
        if not fits:
            return f"a = {a}: {said}"
    return None


def _memory(config: Any, length: int) -> int:
    model = CausalLM(config).eval()
    cache = model.make_cache(batch_size=1)
    with torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long), cache=cache)
    return cache.nbytes


def _count(
    c: Any,
    length: int,
    *,
    window: int = -1,
    channels: str = "all",
    states: bool = True,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    kinds: int = 2,
    each: int = 4,
    attending: bool = True,
) -> int:
    """Bytes of a cache, with a mistake."""
    s, total = c.state, 0
    E, N = s.expand * c.hidden_size, s.state_size
    width = E + {"all": 2 * s.n_groups * N, "one group": 2 * N, "x": 0}[channels]
    for i in range(c.num_hidden_layers):
        if c.has_state(i):
            total += (s.conv_kernel + window) * width + (E * N if states else 0)
        elif attending:
            D, G = head_dim or c.head_dim, kv_heads or c.num_key_value_heads
            total += kinds * G * D * length
    return each * total


# mistakes with the bytes, and what is said about each
_MISCOUNTED: dict[str, Callable[[Any, int], int]] = {
    "these are numbers, each of which takes 4 bytes": lambda c, n: _count(c, n, each=1),
    "each number takes 4 bytes in float32, not 2": lambda c, n: _count(c, n, each=2),
    "the newest input is in the state already: W - 1 are kept": lambda c, n: _count(c, n, window=0),
    "the convolution's window is missing": lambda c, n: _count(c, n, window=-c.state.conv_kernel),
    "B and C go through the convolution too": lambda c, n: _count(c, n, channels="x"),
    "the window is counted, the state is missing": lambda c, n: _count(c, n, states=False),
    "each of the groups has a B and a C of its own": lambda c, n: _count(
        c, n, channels="one group"
    ),
    "a layer that attends keeps keys and values, too": lambda c, n: _count(c, n, attending=False),
    "keys are counted, values not": lambda c, n: _count(c, n, kinds=1),
    "keys grow with each token: their length is missing": lambda c, n: _count(c, 1),
    "heads of attention are as wide as `config.head_dim` says": lambda c, n: _count(
        c, n, head_dim=c.num_attention_heads and c.hidden_size // c.num_attention_heads
    ),
    "query heads share keys: count `num_key_value_heads`": lambda c, n: _count(
        c, n, kv_heads=c.num_attention_heads
    ),
}


@exercise(
    "12.2",
    "what does the convolution look back on, how large is a head's state, what grows by token?",
    "a state costs the same at any length, keys and values more with each token",
)
def _memory_bytes(answer: Callable[[ModelConfig, int], Any]) -> str | None:
    sizes: dict[str, Any] = {"vocab_size": 11, "hidden_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    grouped = {"num_heads": 2, "n_groups": 2, "state_size": 5, "conv_kernel": 3}
    mamba: dict[str, Any] = {"model_type": "mamba2"}
    bamba: dict[str, Any] = {"model_type": "bamba", **heads}
    kinds: list[dict[str, Any]] = [
        {**mamba, "num_hidden_layers": 1, "state": {"num_heads": 4}},
        {**mamba, "num_hidden_layers": 3, "state": grouped},
        {
            **bamba,
            "num_hidden_layers": 3,
            "attn_layer_indices": (1,),
            "state": {"num_heads": 3, "expand": 3, "state_size": 7},
        },
        {
            **bamba,
            "num_hidden_layers": 2,
            "attn_layer_indices": (0, 1),
            "head_dim": 6,
            "state": {"num_heads": 2},
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
            slips = ((why, slip(config, length)) for why, slip in _MISCOUNTED.items())
            more = "more" if float(got) > wanted else "fewer"
            said = f"{got:,} bytes, {abs(got - wanted):,} {more} than the cache holds"
            if why := check_values(float(got), wanted, slips, near=0, otherwise=said):
                return f"{case}: {why}"
    return None


@exercise(
    "12.3",
    "how much of an input does a very small step let in, and what must A be for it to halve?",
    "a small step at a large rate fades and writes nothing: what fades and what enters are apart",
)
def _halver(answer: Callable[[list[int]], Any]) -> str | None:
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
        # random inputs, then those that leak the most: all as large as allowed
        for draw in (lambda: rng.uniform(-10, 10), lambda: 10.0, lambda: -10.0):
            h = kept = let_in = 0.0
            for t, (mark, step) in enumerate(zip(marks, steps, strict=True)):
                x, left = draw(), math.exp(float(step) * float(A))
                h = left * h + float(step) * x
                kept = x if mark else kept / 2
                let_in = 0.0 if mark else left * let_in + float(step) * x
                if abs(h - kept) <= 1e-2:
                    continue
                if mark and abs(step - 1) > 5e-4:
                    return f"{case}: position {t} enters with the weight {step}, not with 1"
                if mark:
                    return f"{case}: at position {t} the older input is still there: h = {h:.3f}"
                if step > 1e-1:
                    return f"{case}: position {t} is not marked, and its input came in"
                if abs(let_in) > abs(h - kept) / 2:
                    return (
                        f"{case}: by position {t} unmarked inputs of {x:g} have let in "
                        f"{abs(let_in):.4f} in all: make the small step smaller, the rate larger"
                    )
                return f"{case}: at position {t} a share of {left:.3f} is left of before, not 0.5"
    return None


REACH = {
    "one layer, convolution over 4, state removed": 4,
    "three such layers": 10,
    "three layers, convolution over 1, state removed": 1,
    "64 layers, convolution over 4, state removed": 193,
    "one layer with its state, no convolution, at the 100th token": 100,
}
REACH_HINTS = {
    "one layer, convolution over 4, state removed": "count the position itself too",
    "three such layers": "what a layer reads has itself read further back: how much further?",
    "three layers, convolution over 1, state removed": "nothing brings anything from elsewhere",
    "64 layers, convolution over 4, state removed": "each layer adds as many as the one before",
    "one layer with its state, no convolution, at the 100th token": "what does the state sum up?",
}


@exercise(
    "12.4",
    "from how many tokens, its own included, can an output of the last layer know anything?",
    "layers of short convolutions reach back by steps; a state reaches the beginning at once",
)
def _reach(answer: Any) -> str | None:
    return check_table(answer, REACH, REACH_HINTS)
