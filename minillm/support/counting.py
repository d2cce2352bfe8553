"""What a model costs, and how many targets a batch has. Written by hand."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def count_parameters(
    model: nn.Module, *, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Numbers in the weights of any model; a matrix that serves in two places counts once.

    `only_trainable` leaves out what is frozen, as LoRA freezes all but its adapters;
    `exclude_embeddings` the tables of tokens and positions, with a head that is one of them.
    """
    parts: list[Any] = [*model.modules()]
    tables = [part.weight for part in parts if isinstance(part, nn.Embedding)]
    tables += [part.rows for part in parts if hasattr(part, "looks_up")]
    left_out = set(tables) if exclude_embeddings else set()
    numbers = {p: p.numel() for p in model.parameters() if p.requires_grad or not only_trainable}
    if not only_trainable:  # matrices of few bits (deeper/10_four_bits)
        numbers |= {x.rows: x.stored_numbers for x in parts if hasattr(x, "stored_kind")}
    return sum(n for p, n in numbers.items() if p not in left_out)


def count_operations(model: Any, context_length: int = 0) -> int:
    """Operations of a `CausalLM`'s forward pass for one token that reads `context_length` keys.

    Two for each weight of a matrix product, two for each number of a key and of a value that is
    read; norms, activations and the embedding's look-up are left out. Training costs three times as
    much.
    """
    c, products = model.config, (nn.Linear, nn.Conv1d)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, products))
    parts: list[Any] = [*model.modules()]
    linear += sum(part.active_weights() for part in parts if hasattr(part, "active_weights"))
    read = 0
    for layer in model.model.layers:
        if hasattr(layer, "state_numbers"):  # each number of a state decays and is read
            linear += 2 * layer.state_numbers
        else:  # of each key and value; some attentions compare with more than they cache
            usual = 2 * c.head_dim * c.num_attention_heads
            read += getattr(layer.self_attn, "numbers_read", usual)
    return 2 * (linear + read * context_length)


def count_targets(targets: Tensor) -> int:
    """How many targets count: labels but -100, or probabilities that are not all 0."""
    counts = targets.sum(-1) != 0 if targets.is_floating_point() else targets != -100
    return int(counts.sum())


def named_numbers(found: Any) -> dict[str, float]:
    """What `validate` returned, one number or a dict of them, for a record."""
    found = found if isinstance(found, dict) else {"validation": found}
    return {name: float(number) for name, number in found.items()}
