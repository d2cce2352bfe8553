"""Graders of notebook 03: attention by hand, predictions, masks, mistakes, one position back."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minillm.exercises import apart, check_table, check_values, exercise


def close(ours: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(ours, expected.to(ours.dtype), atol=tolerance, rtol=tolerance)


def wrong_form(answer: Any, shape: tuple[int, ...], name: str, dtype: torch.dtype) -> str | None:
    """A sentence if `answer` is no tensor of this shape and kind."""
    if not isinstance(answer, Tensor):
        return f"{name} should be a tensor, but is a {type(answer).__name__}"
    if tuple(answer.shape) != tuple(shape):
        return f"{name} should have shape {tuple(shape)}, but has {tuple(answer.shape)}"
    if answer.dtype != dtype:
        return f"{name} should be of type {dtype}, but is {answer.dtype}"
    return None


def _softmax(scores: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(scores, dim).nan_to_num(0.0)


class ShortCutError(Exception):
    """Whose attention was called."""


class NoShortCut(TorchFunctionMode):
    """Refuses the package's attention and PyTorch's own; the package's masks are no attention."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        frame: FrameType | None = sys._getframe(1)  # who asked for this operation
        while frame is not None and frame.f_globals.get("__name__") != __name__:
            package = frame.f_globals.get("__name__") == "minillm.attention"
            if package and frame.f_code.co_name in ("attention", "attention_weights"):
                raise ShortCutError("the package's")
            frame = frame.f_back
        if "attention" in getattr(function, "__name__", ""):
            raise ShortCutError("PyTorch's")
        return function(*args, **(kwargs or {}))


@exercise(
    "03.1",
    "scores first; then what a query may not read; then softmax along the keys",
    "scores, scale, mask, softmax, sum of values: the rest of this chapter only makes it safe",
)
def _attend_causally(answer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> str | None:
    generator = torch.Generator().manual_seed(4)
    for T, S, D, size in (
        (5, 5, 4, 1),
        (5, 5, 16, 1),
        (2, 7, 4, 1),
        (1, 4, 9, 1),
        (4, 6, 4, 60),
        (5, 5, 4, -9),
    ):
        q, k = (torch.randn(n, D, generator=generator) * size for n in (T, S))
        if size < 0:  # all scores far below 0
            q, k = q.abs(), -k.abs()
        v = torch.randn(S, 3, generator=generator)
        try:
            with NoShortCut():
                out = answer(q.clone(), k.clone(), v.clone())
        except ShortCutError as whose:
            return f"{whose} attention does it for you: write it with basic operations"
        except NotImplementedError:  # a RuntimeError, and a stub
            raise
        except (RuntimeError, IndexError) as error:
            return f"for {T} queries and {S} keys of size {D} it raised: {error}"
        call = f"for {T} queries and {S} keys of size {D}, the result"
        if finding := wrong_form(out, (T, 3), call, torch.float32):
            return finding
        raw = q @ k.T
        late = torch.arange(S) > torch.arange(T)[:, None] + S - T  # the future
        corner = torch.arange(S) > torch.arange(T)[:, None]

        def result(scores: Tensor, forbidden: Tensor, v: Tensor = v) -> Tensor:
            return _softmax(scores.masked_fill(forbidden, -torch.inf)) @ v

        if size > 1 and not out.isfinite().all():
            return (
                "when scores are large the result is not finite: exp without subtracting the "
                "maximum, or a mask after softmax, which can leave 0 / 0?"
            )
        probs = torch.softmax(raw / D**0.5, -1)
        shifted = torch.arange(S) >= torch.arange(T)[:, None] + S - T
        further = torch.arange(S) > torch.arange(T)[:, None] + S - T + 1
        columns = torch.softmax((raw / D**0.5).masked_fill(late, -torch.inf), 0).nan_to_num(0.0)
        slips = {
            f"a forbidden score of {low} is not forbidden if the allowed ones are lower": (
                _softmax((raw / D**0.5).masked_fill(late, low)) @ v
            )
            for low in (-10, -20, -50, -100, -1000)
        } | {
            "the mask is aligned with the first key, not the last": result(raw / D**0.5, corner),
            "nothing is masked: queries read the future": result(raw / D**0.5, late & False),
            "the mask is upside down: only the future is read": result(raw / D**0.5, ~late),
            "each query should read itself, too": result(raw / D**0.5, shifted),
            "each query reads one key too many, the next word's": result(raw / D**0.5, further),
            "the scores are not divided by the square root of D": result(raw, late),
            "the scores are divided by D, not by its square root": result(raw / D, late),
            "divide by the root of D, the size of a query, not of S": result(raw / S**0.5, late),
            "divide by the root of D, the size of a query, not of T": result(raw / T**0.5, late),
            "divide by the root of D, the size of a query, not of E": result(raw / 3**0.5, late),
            "the mask comes after softmax: the weights do not sum to 1": (probs * ~late) @ v,
            "softmax runs along the queries: each row of weights should sum to 1": columns @ v,
            "softmax is missing": (raw / D**0.5).masked_fill(late, 0) @ v,
            "a forbidden score of 0 is not forbidden: exp(0) is 1": (
                torch.softmax((raw / D**0.5).masked_fill(late, 0), -1) @ v
            ),
        }
        wanted = result(raw / D**0.5, late)
        t = int(((out - wanted).abs().amax(1) > 1e-5).int().argmax())
        said = f"the result is wrong from query {t} on"
        if why := check_values(out.nan_to_num(), wanted, slips, near=1e-5, otherwise=said):
            return f"{why} ({T} queries, {S} keys of size {D})"
    return None


PREDICTIONS: dict[str, tuple[int, str]] = {
    "score of query 1 with key 2": (22, "a score is the dot product of the two rows"),
    "score of query 2 with key 3": (18, "a score is the dot product of the two rows"),
    "first number of the output of query 2, rounded": (
        15,
        "softmax sees differences of scores: what does exp make of a difference of 9? Then round",
    ),
    "True entries of causal_mask(2, 5)": (9, "the last query reads everything, the one before?"),
    "weight of the first word on itself, causal": (1, "what else may it read?"),
    "outputs that change if word 4 of 5 changes, causal": (2, "who may read word 4? Itself, and?"),
    "how many times the scores, if a text is 3 times as long": (9, "every query meets every key"),
}


def _neighbour(question: str, value: float) -> str | None:
    if question == "score of query 1 with key 2" and value == 18:
        return "queries and keys are counted from 1: 18 is query 2 with key 3"
    return None


@exercise(
    "03.2",
    "a score is a dot product; softmax sees differences only; draw the mask",
    "a difference of 9 in scores is a factor of 8,000 in weights: softmax picks a winner",
)
def _predictions(answer: Any) -> str | None:
    return check_table(answer, *apart(PREDICTIONS), _neighbour)


@exercise(
    "03.3",
    "at which position does query t stand, and which keys may it read there?",
    "rules about positions are joined with & and |, whatever T and S are",
)
def _prefix_mask(answer: Callable[[int, int, int], Tensor]) -> str | None:
    for P, T, S in [(2, 5, 5), (0, 4, 4), (5, 5, 5), (2, 3, 7), (4, 6, 7), (3, 1, 6)]:
        mask, call = answer(P, T, S), f"prefix_mask({P}, {T}, {S})"
        if finding := wrong_form(mask, (T, S), call, torch.bool):
            return finding
        queries, keys = torch.arange(T)[:, None], torch.arange(S)
        causal, prefix = keys <= queries + S - T, keys < P
        if torch.equal(mask, causal | prefix):
            continue
        if torch.equal(mask, (keys <= queries) | prefix):
            return f"{call} is aligned top-left: query t stands at position t + (S - T)"
        if torch.equal(mask, causal):
            return f"{call} is only causal: queries inside the prefix should read all of it"
        if torch.equal(mask, ~(causal | prefix)):
            return f"{call} is upside down: True should mean that a query may read"
        t, s = ((mask != (causal | prefix)).nonzero()[0]).tolist()
        may = "should be allowed to" if (causal | prefix)[t, s] else "must not"
        return f"{call}: query {t} (position {t + S - T}) {may} read key {s}"
    return None


@exercise(
    "03.4",
    "compute one query with a loop over the keys, and compare line by line",
    "three silent mistakes: shapes fit, nothing complains, so compare with a loop or an oracle",
)
def _mended(answer: Callable[..., Tensor]) -> str | None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 3, 6, 4, generator=generator)
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [0] * 6]).bool()
    out = answer(q.clone(), k.clone(), v.clone(), real.clone())
    if finding := wrong_form(out, (3, 6, 4), "the result", torch.float32):
        return finding

    def result(
        divisor: float = 2, dim: int = -1, late: bool = False, rule: Tensor = real[:, None, :]
    ) -> Tensor:
        scores = q @ k.mT / divisor
        if late:
            return (torch.softmax(scores, dim) * rule) @ v
        return _softmax(scores.masked_fill(~rule, -torch.inf), dim) @ v

    def same(wanted: Tensor, rows: Tensor) -> bool:
        return close(out[rows].nan_to_num(), wanted[rows].nan_to_num())

    if close(out[real], result()[real]):
        if out[2].isnan().any():
            return "a text without any word should give zeros, but gives NaN"
        if not close(out[2], torch.zeros(6, 4)):
            return "a text without any word should give zeros, but it reads the padding"
        k[0, 0] = 1000 * q[0].sign().sum(0)  # a padding place that scores by far the most
        loud = answer(q.clone(), k.clone(), v.clone(), real.clone())
        if not close(loud[real], result()[real]):
            return "where padding has by far the largest score, too little is left to divide by"
        return None
    lines = ("the divisor", "the dimension of softmax", "masking after softmax")
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    mistakes = [
        (
            result(6**0.5 if divisor else 2, 1 if dim else -1, late),
            real,
            f"mistakes that are still there: {', '.join(itertools.compress(lines, there))}",
        )
        for there in itertools.product((False, True), repeat=3)
        for divisor, dim, late in [there]
    ]
    whole = real & real.all(1, keepdim=True)  # the text without padding
    mistakes += [
        (
            result(rule=real[:, None, :] & causal),
            whole,
            "a causal mask was not asked for: every word may read every other",
        ),
        (
            result(),
            whole,
            "right without padding, wrong with it: which *keys* are padding, in which text?",
        ),
    ]
    for wrong, rows, message in mistakes:
        if same(wrong, rows):
            return message
    return "wrong even for a text without padding: compute one query with a loop and compare"


@exercise(
    "03.5",
    "which vectors have their largest dot product when one position is just behind the other?",
    "queries and keys made from positions can fetch the word before: such heads exist",
)
def _previous_position(answer: Callable[[int], tuple[Tensor, Tensor]]) -> str | None:
    for T in (2, 3, 9, 64):
        found = answer(T)
        if not isinstance(found, tuple | list) or len(found) != 2:
            return "return two tensors, (q, k)"
        q, k = found
        if not (isinstance(q, Tensor) and isinstance(k, Tensor)):
            return "return two tensors, (q, k)"
        if q.ndim != 2 or q.shape != k.shape or q.shape[0] != T:
            return (
                f"for T = {T} both should be (T, D), yours are {tuple(q.shape)}, {tuple(k.shape)}"
            )
        if q.shape[1] > 8:
            return f"for T = {T} D should be at most 8, but is {q.shape[1]}: fewer than positions"
        scores = q.double() @ k.double().T / q.shape[1] ** 0.5
        if not scores.isfinite().all():
            return f"for T = {T} a score is not finite"
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(future, -torch.inf), -1)
        hit = weights.diagonal(-1)  # of position t on t - 1
        if (hit >= 0.9).all():
            continue
        t = int((hit < 0.9).nonzero()[0]) + 1
        most = int(weights[t].argmax())
        if most == t:
            return f"for T = {T} position {t} reads itself most ({weights[t, t]:.2f}), not {t - 1}"
        if most == t - 1:
            return (
                f"for T = {T} position {t} reads {t - 1} most, but only {hit[t - 1]:.2f}: "
                "longer vectors make softmax more decided"
            )
        return f"for T = {T} position {t} reads position {most} most, not {t - 1}"
    return None
