"""Graders of 11: the balancing loss in four cases, a step of the bias, Mixtral's active size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from minillm.config import ModelConfig
from minillm.exercises import check_table, check_values, exercise
from minillm.model import CausalLM

LOSS_AT = {
    "8 experts, 2 chosen, load and probabilities even": 2.0,
    "16 experts, 1 chosen, load and probabilities even": 1.0,
    "4 experts, 1 chosen, one expert has all tokens with probability 1": 4.0,
    "5 experts, all 5 chosen, any probabilities": 5.0,
}
HINTS = {
    "8 experts, 2 chosen, load and probabilities even": "what do the shares f add up to?",
    "16 experts, 1 chosen, load and probabilities even": "write down f and P of one expert",
    "4 experts, 1 chosen, one expert has all tokens with probability 1": (
        "only one term of the sum is left; what stands before the sum?"
    ),
    "5 experts, all 5 chosen, any probabilities": "what share of the tokens chose each expert?",
}


@exercise(
    "11.1",
    "write f and P for each case, then E times the sum of their products",
    "an even load costs k and a collapsed one E; if all are chosen, there is nothing to balance",
)
def _loss_at(answer: Any) -> str | None:
    return check_table(answer, LOSS_AT, HINTS)


def _moved(
    bias: list[float],
    load: list[float],
    rate: float,
    *,
    sign: float = 1.0,
    proportional: bool = False,
    kept: bool = True,
    middle: str = "mean",
    at_mean: float = 0.0,
) -> list[float]:
    """The bias after a step, with a mistake."""
    centre = {"mean": sum(load) / len(load), "median": median(load), "largest": max(load)}[middle]
    found = []
    for old, n in zip(bias, load, strict=True):
        away = centre - n
        step = away if proportional else math.copysign(1.0, away) if away else at_mean
        found.append((old if kept else 0.0) + sign * rate * step)
    return found


# mistakes with a step of the bias, and what is said about each
_STEPS: dict[str, dict[str, Any]] = {
    "the wrong direction: the expert with most tokens gets still more": {"sign": -1.0},
    "the step should not grow with the difference, only its sign counts": {"proportional": True},
    "these are the steps; the old bias is missing": {"kept": False},
    "compare each load with the mean of all, not with the middle one, and move all that differ": {
        "middle": "median"
    },
    "compare each load with the mean of all, not with the largest": {"middle": "largest"},
    "an expert with exactly the mean load stays where it is, it does not go up": {"at_mean": 1.0},
    "an expert with exactly the mean load stays where it is, it does not go down": {
        "at_mean": -1.0
    },
}


@exercise(
    "11.2",
    "which experts should be chosen more often from now on, those with many tokens or with few?",
    "the bias moves against the load, by a fixed step: how far off the load is does not matter",
)
def _bias_step(answer: Callable[[list[float], list[float], float], Any]) -> str | None:
    cases: list[tuple[list[float], list[float], float]] = [
        ([0.0, 0.0, 0.0], [9.0, 3.0, 0.0], 0.5),
        ([0.25, -1.0, 0.5, 0.0], [2.0, 2.0, 2.0, 2.0], 0.25),
        ([0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 10.0], 0.01),
        ([0.0, 0.5, 0.5, 0.0], [3.0, 3.0, 2.0, 2.0], 0.5),  # a mean that is no integer
    ]
    for bias, load, rate in cases:
        given = list(bias)
        got = answer(given, list(load), rate)
        case = f"bias {bias}, load {load}, rate {rate}"
        if given != bias:
            return f"{case}: the old list was changed; return a new one"
        if not isinstance(got, Sequence) or len(got) != len(bias):
            return f"{case}: return a list of {len(bias)} numbers"
        wanted = _moved(bias, load, rate)
        off = [abs(float(a) - b) > 1e-6 for a, b in zip(got, wanted, strict=True)]
        e, mean = off.index(True) if any(off) else 0, sum(load) / len(load)
        few = "fewer" if load[e] < mean else "no fewer"
        said = f"expert {e} has {few} tokens than the mean, {mean:g}, and went to {got[e]}"
        slips = ((why, _moved(bias, load, rate, **slip)) for why, slip in _STEPS.items())
        if why := check_values(got, wanted, slips, otherwise=said):
            return f"{case}: {why}"
    return None


def _parameters(config: Any) -> int:
    """Of the whole model, with all experts."""
    with torch.device("meta"):
        return CausalLM(config).num_parameters()


def _expert(c: Any) -> int:
    return 3 * c.hidden_size * c.intermediate_size


def _active(c: Any) -> int:
    unused = c.num_experts - c.num_experts_per_tok
    return _parameters(c) - c.num_hidden_layers * unused * _expert(c)


# what may be miscounted in a model: how many parameters too many or too few, and what is said
_MISCOUNTED: dict[str, Callable[[Any], float]] = {
    "this is the whole model, with all experts": lambda c: _parameters(c) - _active(c),
    "attention, embedding and head are not shared out among experts": lambda c: (
        _parameters(c) * c.num_experts_per_tok / c.num_experts - _active(c)
    ),
    "an expert has a gate, an up and a down matrix": lambda c: (
        -c.num_hidden_layers * c.num_experts_per_tok * c.hidden_size * c.intermediate_size
    ),
    "each layer has a router too": lambda c: -c.num_hidden_layers * c.num_experts * c.hidden_size,
    "a router has a row for each expert, chosen or not": lambda c: (
        -c.num_hidden_layers * (c.num_experts - c.num_experts_per_tok) * c.hidden_size
    ),
    "a token uses `num_experts_per_tok` experts, not one": lambda c: (
        -c.num_hidden_layers * (c.num_experts_per_tok - 1) * _expert(c)
    ),
    "head and embedding are two matrices unless `tie_word_embeddings`": lambda c: (
        (1 if c.tie_word_embeddings else -1) * c.vocab_size * c.hidden_size
    ),
    "there are two norms in each layer and one at the end": lambda c: (
        -(2 * c.num_hidden_layers + 1) * c.hidden_size
    ),
    "each layer has two norms": lambda c: -2 * c.num_hidden_layers * c.hidden_size,
    "there is a norm after the last layer, too": lambda c: -c.hidden_size,
    "keys and values have `num_key_value_heads` heads, not `num_attention_heads`": lambda c: (
        2 * c.num_hidden_layers * c.hidden_size * c.head_dim
        * (c.num_attention_heads - c.num_key_value_heads)
    ),
    "heads are as wide as `head_dim` says, where it says it": lambda c: (
        (c.hidden_size // c.num_attention_heads - c.head_dim)
        * 2 * c.num_hidden_layers * c.hidden_size
        * (c.num_attention_heads + c.num_key_value_heads)
    ),
}  # fmt: skip


@exercise(
    "11.3",
    "how many matrices has one expert, of which shapes, and how many experts lie idle in a layer?",
    "8x7B is 47 billion in memory and 13 billion at work: only the experts are eight",
)
def _active_parameters(answer: Callable[[dict[str, Any]], Any]) -> str | None:
    sizes: dict[str, Any] = {"vocab_size": 101, "hidden_size": 24, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 40, "model_type": "mixtral"}
    changes: list[dict[str, Any]] = [
        {"num_experts": 6, "num_experts_per_tok": 2},
        {"num_experts": 5, "num_experts_per_tok": 1, "num_key_value_heads": 2, "head_dim": 10},
        {"num_experts": 4, "num_experts_per_tok": 4, "tie_word_embeddings": True},
    ]
    configs: list[Any] = [ModelConfig.preset("mixtral-8x7b", num_hidden_layers=2)]
    configs += [ModelConfig(**{**sizes, **change}) for change in changes]
    for c in configs:
        wanted, file = _active(c), c.to_dict()
        if c.head_dim * c.num_attention_heads == c.hidden_size:
            del file["head_dim"]  # as in the published files
        got = answer(file)
        case = f"C = {c.hidden_size}, {c.num_experts_per_tok} of {c.num_experts} experts"
        if isinstance(got, bool) or not isinstance(got, int | float):
            return f"{case}: return a number, not {got!r}"
        if got == wanted:
            continue
        for message, off in _MISCOUNTED.items():
            if off(c) and abs(got - wanted - off(c)) < 1:
                return f"{case}: {message}"
        each = f"{abs(got - wanted) / c.num_hidden_layers:,.0f} a layer"
        return f"{case}: {'more' if got > wanted else 'fewer'} than take part, by {each}"
    return None
