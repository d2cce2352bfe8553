"""Attention maps: who reads whom, in every layer and head. Explained in deeper/10_your_own_part."""

# Built from notebooks/deeper/10_your_own_part.ipynb: edit there, then make build.

from typing import Any

import torch
from torch import Tensor, nn

from minillm.attention import attention_weights
from minillm.heads import MultiHeadAttention, split_heads
from minillm.support.modes import EvalMode

__all__ = ["attention_maps"]


def attention_maps(
    model: nn.Module, input_ids: Tensor, *, attention_mask: Tensor | None = None
) -> list[Tensor]:
    """How much each position reads from each, a map for every layer: `maps[layer][row, head]`.

    Without dropout, and without touching the model. `attention_mask` is 1 for tokens, 0 for padding
    on the left; rows of padding mean nothing.

        maps = attention_maps(model, torch.tensor([tokenizer.encode("A quiet mouse")]))

    Shape: (B, T) ids -> a list of (B, H, T, T); each row of a map sums to 1.
    Raises: ValueError, with its name, for an attention that is no `MultiHeadAttention`, such as one
        of your own or latent attention.
    """
    maps = []

    def note(part: Any, inputs: tuple[Any, ...], given: dict[str, Any], out: Any) -> None:
        q = split_heads(part.q_proj(inputs[0]), part.num_heads)
        k = split_heads(part.k_proj(inputs[0]), part.num_kv_heads)
        if part.q_norm is not None:
            q, k = part.q_norm(q).to(q.dtype), part.k_norm(k).to(k.dtype)
        if (rope := given.get("rope")) is not None:
            q, k = rope(q), rope(k)
        how = {name: given[name] for name in ("mask", "is_causal") if name in given}
        maps.append(attention_weights(q, k, scale=part.scale, **how))

    parts = {name: p for name, p in model.named_modules() if name.endswith(".self_attn")}
    foreign = [
        f"{n} is {type(p).__name__}" for n, p in parts.items() if type(p) is not MultiHeadAttention
    ]
    if foreign or not parts:
        found = foreign[0] if foreign else f"{type(model).__name__} has none"
        raise ValueError(f"maps are those of MultiHeadAttention, but {found}")
    hooks = [part.register_forward_hook(note, with_kwargs=True) for part in parts.values()]
    try:
        with EvalMode(model), torch.no_grad():
            model(input_ids, attention_mask=attention_mask)
    finally:
        for hook in hooks:
            hook.remove()
    return maps
