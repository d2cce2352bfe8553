"""Graders of notebook 04: sharing heads, sizes of caches, compression into a latent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.exercises import exercise
from minillm.nn.mla import latent_attention_naive


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


def _by_head(k_weight: Tensor, v_weight: Tensor, heads: int) -> Tensor:
    """Rows as in kv_b_proj: for each head its key, then its value."""
    per_head = (weight.unflatten(0, (heads, -1)) for weight in (k_weight, v_weight))
    return torch.cat(list(per_head), dim=1).flatten(0, 1)


@exercise(
    "04.4",
    "Write compress(k_weight, v_weight, num_heads, rank): down (R, C) and kv_weight (2 * H * D, R) "
    "that lose least of keys and values.",
)
def compress(answer: Callable[..., tuple[Tensor, Tensor]]) -> str | None:
    generator = torch.Generator().manual_seed(4)
    heads, size, width = 4, 3, 20
    common = torch.randn(6, width, generator=generator, dtype=torch.float64)
    k, v = (
        torch.randn(heads * size, 6, generator=generator, dtype=torch.float64) @ common
        + 0.1 * torch.randn(heads * size, width, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    v = v * 3  # not equally large: errors of the values weigh more
    both = _by_head(k, v, heads)
    values = torch.linalg.svdvals(both)
    for rank in (20, 6, 2):
        down, kv_weight = answer(k.clone(), v.clone(), heads, rank)
        shapes = tuple(down.shape), tuple(kv_weight.shape)
        if shapes != ((rank, width), (2 * heads * size, rank)):
            expected = (rank, width), (2 * heads * size, rank)
            return f"for R={rank} the shapes are {shapes}, not {expected}"
        best, product = values[rank:].norm(), kv_weight @ down
        lost = (both - product).norm()
        if lost <= best * 1.0001 + 1e-8:
            continue
        stacked = (torch.cat([k, v]) - product).norm()
        if stacked <= best * 1.0001 + 1e-8:
            return "the rows stand keys first, then values: each head's key and value stay together"
        return (
            f"for R={rank} you lose {lost:.3f} of keys and values together, where {best:.3f} is "
            "possible: one decomposition of all rows, not one for keys and one for values"
        )
    return None


class _Spy(TorchDispatchMode):
    """The most numbers that any tensor made inside holds for a key position."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.keys, self.most = keys, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor) and tensor.numel() % self.keys == 0:
                self.most = max(self.most, tensor.numel() // self.keys)
        return made


@exercise(
    "04.5",
    "Write absorbed_step(q, latent, k_pe, kv_weight, scale): attention of one query over a latent "
    "cache, without expanding it.",
)
def absorbed_step(answer: Callable[..., Tensor]) -> str | None:
    for B, H, S, R, N, P, V in ((1, 2, 7, 6, 4, 2, 4), (2, 8, 101, 12, 6, 4, 5)):
        generator = torch.Generator().manual_seed(S)
        shapes = (B, H, 1, N + P), (B, 1, S, R), (B, 1, S, P), (H * (N + V), R)
        parts = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        scale = (N + P) ** -0.5
        right = latent_attention_naive(*parts, scale=scale)
        with _Spy(S) as spy:
            got = answer(*(part.clone() for part in parts), scale)
        case = f"with B={B}, H={H}, S={S}, R={R}, N={N}, P={P}, V={V}"
        if tuple(got.shape) != tuple(right.shape):
            return f"{case} the shape is {tuple(got.shape)}, not {tuple(right.shape)}"
        if not torch.allclose(got, right, atol=1e-9):
            unscaled = latent_attention_naive(*parts, scale=1.0)
            if torch.allclose(got, unscaled, atol=1e-9):
                return f"{case} the scores lack their factor `scale`"
            no_pe = latent_attention_naive(parts[0], parts[1], parts[2] * 0, parts[3], scale=scale)
            if torch.allclose(got, no_pe, atol=1e-9):
                return f"{case} the rotated part of the query is missing from the scores"
            return f"{case} you are off by {(got - right).abs().max():.3f}"
        allowed = B * max(R + P, H)  # the latent with its rotated key, or the scores
        if spy.most > allowed and S > 100:
            said = f"right, but a tensor with {spy.most // B} numbers for each of {S} keys was made"
            if spy.most in (B * H * R, B * H * P):
                return f"{said}: a product that broadcasts copies the cache for each of {H} heads"
            return (
                f"{said}: keys or values of single heads; fold the query first "
                f"({max(R + P, H)} are enough)"
            )
    return None
