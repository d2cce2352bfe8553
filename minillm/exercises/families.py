"""Graders of 10_families: loud and silent mistakes, Falcon's fused matrix, a ninth family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.exercises import check_table, exercise
from minillm.model import CausalLM

FOLLOWS = {
    "GPT-2: attn.c_attn (32, 96) is not turned": "loud",
    "GPT-2: attn.c_proj (32, 32) is not turned": "silent",
    "Llama: up_proj and gate_proj are swapped": "silent",
    "Qwen3 is taken for Llama": "loud",
    "Mistral is taken for Llama": "silent",
    "Llama with 2 key heads: the config's num_key_value_heads is not read": "loud",
    "Llama 3: rope_scaling is not read": "silent",
}
WHY = {
    "GPT-2: attn.c_attn (32, 96) is not turned": "does it cut into three of our (32, 32)?",
    "GPT-2: attn.c_proj (32, 32) is not turned": "what shape has a square matrix once turned?",
    "Llama: up_proj and gate_proj are swapped": "which shapes do the two have?",
    "Qwen3 is taken for Llama": "which weights has Qwen3 that Llama lacks?",
    "Mistral is taken for Llama": "has a window a weight of its own?",
    "Llama with 2 key heads: the config's num_key_value_heads is not read": (
        "how many rows has k_proj, and how many would be expected?"
    ),
    "Llama 3: rope_scaling is not read": "has a rotation a weight of its own?",
}


@exercise(
    "10_families.1",
    "for each mistake, ask whether a weight is missing, left over or of another shape",
    "only names and shapes are checked by loading; arithmetic is checked by comparing logits",
)
def _follows(answer: Any) -> str | None:
    kinds = ("loud", "silent")
    return check_table(
        answer, FOLLOWS, WHY, kind='"loud" or "silent"', fits=lambda value: value in kinds
    )


@exercise(
    "10_families.2",
    "draw the rows for two groups, then name the dimensions (group, row in the group, D, C)",
    "a fused matrix is read by naming its dimensions, and only its writer knows their order",
)
def _split(answer: Callable[[Tensor, int, int, int], Any]) -> str | None:
    for heads, groups, dim, size in ((4, 2, 3, 5), (6, 3, 2, 4), (5, 1, 2, 3), (3, 3, 2, 3)):
        rows = torch.arange((heads + 2 * groups) * dim, dtype=torch.float32)
        fused = rows[:, None].expand(-1, size) + torch.arange(size) / 10
        by_group = fused.view(groups, heads // groups + 2, dim, size)
        parts = (by_group[:, :-2], by_group[:, -2], by_group[:, -1])
        wanted = [part.reshape(-1, size) for part in parts]
        case = f"H = {heads}, G = {groups}, D = {dim}"
        got = answer(fused.clone(), heads, groups, dim)
        if not isinstance(got, tuple | list) or len(got) != 3:
            return f"{case}: return three tensors, q, k and v"
        for name, mine, right in zip("qkv", got, wanted, strict=True):
            if not isinstance(mine, Tensor) or mine.shape != right.shape:
                shape = tuple(mine.shape) if isinstance(mine, Tensor) else type(mine).__name__
                return f"{case}: {name} should be {tuple(right.shape)}, not {shape}"
        if all(torch.equal(*pair) for pair in zip(got, wanted, strict=True)):
            continue
        blocks = fused.split([heads * dim, groups * dim, groups * dim])
        if all(torch.equal(*pair) for pair in zip(got, blocks, strict=True)):
            return f"{case}: this is GPT-2's order still: all q, all k, all v"
        if torch.equal(got[1], wanted[2]) and torch.equal(got[2], wanted[1]):
            return f"{case}: k and v are swapped: in a group the key comes before the value"
        for name, mine, right in zip("qkv", got, wanted, strict=True):
            if not torch.equal(mine, right):
                rows_of = [int(row) for row in mine[:, 0].tolist()]
                rows_wanted = [int(row) for row in right[:, 0].tolist()]
                return f"{case}: {name} takes rows {rows_of}, they should be {rows_wanted}"
    return None


def _fuse(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Llama's weights as a Phi-3 keeps them."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if "q_proj" in name:
            parts = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in name:
            both = torch.cat([tensor, state[name.replace("gate_proj", "up_proj")]])
            found[name.replace("gate_proj", "gate_up_proj")] = both
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            found[name] = tensor
    return found


@exercise(
    "10_families.3",
    "how many rows has each of the three pieces, and from which keys of the config do they follow?",
    "a new family is often an old one with other names and other seams",
)
def _phi3(answer: Callable[[dict[str, Tensor], ModelConfig], dict[str, Tensor]]) -> str | None:
    for kv_heads, head_dim in ((4, 8), (2, 8), (2, 16)):
        config = ModelConfig(
            97, 32, 2, 4, 48, num_key_value_heads=kv_heads, head_dim=head_dim, rope_theta=1e4
        )
        wanted = CausalLM(config).state_dict()
        got = answer(_fuse(wanted), config)
        case = f"{kv_heads} key heads of {head_dim} numbers"
        if not isinstance(got, Mapping):
            return f"return a dictionary, name -> tensor, not a {type(got).__name__}"
        if fused := [name for name in got if "qkv_proj" in name or "gate_up_proj" in name]:
            return f"{case}: {fused[0]} is still there, and our model has no such weight"
        if absent := sorted(wanted.keys() - got.keys()):
            return f"{case}: {len(absent)} weights are missing, {absent[0]} among them"
        if extra := sorted(got.keys() - wanted.keys()):
            return f"{case}: our model has no weight {extra[0]}"
        for name, right in wanted.items():
            if got[name].shape != right.shape:
                shapes = f"{tuple(got[name].shape)}, and our model wants {tuple(right.shape)}"
                return f"{case}: {name} has the shape {shapes}"
        layer = "model.layers.0.mlp."
        gate, up = (wanted[f"{layer}{part}_proj.weight"] for part in ("gate", "up"))
        if torch.equal(got[f"{layer}gate_proj.weight"], up) and torch.equal(
            got[f"{layer}up_proj.weight"], gate
        ):
            return f"{case}: gate and up are swapped: the gate comes first"
        for name, right in wanted.items():
            if not torch.equal(got[name], right):
                return f"{case}: {name} has the right shape and other numbers"
    return None
