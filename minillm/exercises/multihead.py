"""Graders of notebook 04: sharing heads, sizes of caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.exercises import exercise


@exercise(
    "04.1",
    "Write key_head_of(h, num_heads, num_kv_heads): the number of the key head that query head h "
    "reads.",
)
def key_head_of(answer: Callable[[int, int, int], int]) -> str | None:
    for heads, groups in ((8, 8), (8, 1), (8, 2), (12, 4), (28, 4), (71, 1)):
        for h in range(heads):
            got, right = answer(h, heads, groups), h // (heads // groups)
            if got == right:
                continue
            where = f"for h={h}, H={heads}, G={groups} your answer is {got}, not {right}"
            if got == h % groups:
                return f"{where}: h % G deals the heads out in turn; neighbours must share"
            if got == h // groups:
                return f"{where}: a group holds H / G heads, not G"
            return where
    return None


_GQA: dict[str, Any] = dict(
    hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32
)
_MHA = dict(hidden_size=768, num_attention_heads=12, num_hidden_layers=12)
_WIDE = _GQA | dict(hidden_size=5120, num_attention_heads=64, head_dim=128, num_hidden_layers=64)
_NULL = _GQA | dict(head_dim=None)
_MLA = dict(
    hidden_size=7168, num_attention_heads=128, num_key_value_heads=128, num_hidden_layers=61,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip


@exercise(
    "04.2",
    "Write cache_bytes_per_token(config, bytes_per_value): the bytes of cache that one position "
    "costs over all layers.",
)
def cache_bytes_per_token(answer: Callable[..., int]) -> str | None:
    values = {
        "gqa": 2048,
        "heads": 1536,
        "head_dim": 2048,
        "null": 2048,
        "mla": 576,
    }
    configs = dict(zip(values, (_GQA, _MHA, _WIDE, _NULL, _MLA), strict=True))
    hints = {
        "gqa": "keys and values, of G heads, in every layer",
        "heads": "without num_key_value_heads every query head has its own keys",
        "head_dim": "a head_dim in the config counts, not hidden_size / num_attention_heads",
        "null": "head_dim may be there and be None: then it is hidden_size / num_attention_heads",
        "mla": "with a kv_lora_rank the cache holds the latent and the rotated key, no heads",
    }
    for name, config in configs.items():
        for size in (2, 1, 4):
            right = values[name] * config["num_hidden_layers"] * size
            got = answer(dict(config), size)
            if got != right:
                said = f"for {config} and {size} bytes a value you say {got!r}, it is {right}"
                return f"{said}: {hints[name]}"
    if answer(dict(_GQA)) != 2 * values["gqa"] * 32:
        return "bytes_per_value must be 2 where it is not given"
    return None


@exercise(
    "04.3",
    "Write pool_heads(weight, num_heads, num_kv_heads): the mean of each group's heads, (H * D, C) "
    "-> (G * D, C).",
)
def pool_heads(answer: Callable[[Tensor, int, int], Tensor]) -> str | None:
    for seed, (heads, groups, size, width) in enumerate(
        ((8, 2, 4, 24), (6, 3, 5, 7), (4, 1, 2, 8))
    ):
        weight = torch.randn(heads * size, width, generator=torch.Generator().manual_seed(seed))
        before = weight.clone()
        got = answer(weight, heads, groups)
        grouped = weight.view(groups, heads // groups, size, width)
        case = f"with H={heads}, G={groups}, D={size}, C={width}"
        if not torch.equal(weight, before):
            return f"{case} your function changes the weight it is given: return a new one"
        if tuple(got.shape) != (groups * size, width):
            return f"{case} the shape is {tuple(got.shape)}, not {(groups * size, width)}"
        if torch.allclose(got, grouped.mean(1).flatten(0, 1), atol=1e-6):
            continue
        dealt = weight.view(heads // groups, groups, size, width).mean(0).flatten(0, 1)
        if torch.allclose(got, dealt, atol=1e-6):
            return f"{case} you average heads that are G apart: neighbours form a group"
        if torch.allclose(got, grouped[:, 0].flatten(0, 1), atol=1e-6):
            return f"{case} you keep the first head of each group: average all of them"
        if torch.allclose(got, grouped.sum(1).flatten(0, 1), atol=1e-6):
            return f"{case} you add the heads of a group: divide by their number"
        return f"{case} the numbers are not the means of the groups' heads"
    return None
