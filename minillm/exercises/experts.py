"""Graders of 11: the balancing loss in four cases, a step of the bias, Mixtral's active size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minillm.config import ModelConfig
from minillm.exercises import check_numbers, exercise
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
    return check_numbers(answer, LOSS_AT, HINTS)


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
    ]
    for bias, load, rate in cases:
        mean = sum(load) / len(load)
        steps = [math.copysign(rate, mean - n) if n != mean else 0.0 for n in load]
        wanted = [b + s for b, s in zip(bias, steps, strict=True)]
        given = list(bias)
        got = answer(given, list(load), rate)
        case = f"bias {bias}, load {load}, rate {rate}"
        if given != bias:
            return f"{case}: the old list was changed; return a new one"
        if not isinstance(got, Sequence) or len(got) != len(bias):
            return f"{case}: return a list of {len(bias)} numbers"
        if _close(got, wanted):
            continue
        if _close(got, [b - s for b, s in zip(bias, steps, strict=True)]):
            return f"{case}: the wrong direction: the expert with most tokens gets still more"
        if _close(got, [b + rate * (mean - n) for b, n in zip(bias, load, strict=True)]):
            return f"{case}: the step should not grow with the difference, only its sign counts"
        if _close(got, steps):
            return f"{case}: these are the steps; the old bias is missing"
        return f"{case}: got {list(got)}, not {wanted}"
    return None


def _close(got: Sequence[Any], wanted: Sequence[float]) -> bool:
    return all(abs(float(a) - b) < 1e-9 for a, b in zip(got, wanted, strict=True))


def _active(config: Any) -> int:
    with torch.device("meta"):
        total = CausalLM(config).num_parameters()
    unused = config.num_experts - config.num_experts_per_tok
    return total - config.num_hidden_layers * unused * 3 * config.hidden_size * (
        config.intermediate_size
    )


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
    configs: list[Any] = [ModelConfig.preset("mixtral-8x7b")]
    configs += [ModelConfig(**{**sizes, **change}) for change in changes]
    for config in configs:
        c, wanted = config, _active(config)
        file = config.to_dict()
        if config.head_dim * config.num_attention_heads == config.hidden_size:
            del file["head_dim"]  # as in the published files
        got = answer(file)
        case = f"C = {c.hidden_size}, {c.num_experts_per_tok} of {c.num_experts} experts"
        if isinstance(got, bool) or not isinstance(got, int | float):
            return f"{case}: return a number, not {got!r}"
        if got == wanted:
            continue
        with torch.device("meta"):
            total = CausalLM(config).num_parameters()
        C, F, L = c.hidden_size, c.intermediate_size, c.num_hidden_layers
        share = c.num_experts_per_tok / c.num_experts
        if got == total and got != wanted:
            return f"{case}: this is the whole model, with all experts"
        if abs(got - total * share) < 1:
            return f"{case}: attention, embedding and head are not shared out among experts"
        if abs(got - wanted) == L * c.num_experts_per_tok * C * F:
            return f"{case}: an expert has a gate, an up and a down matrix"
        if abs(got - wanted) == L * c.num_experts * C:
            return f"{case}: each layer has a router too"
        return f"{case}: {got:,} is not {wanted:,}, off by {got - wanted:,}"
    return None
