"""Graders of notebook 04: heads by hand, shapes foreseen, shared heads, caches, from MHA to GQA."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minillm.attention import attention, causal_mask, repeat_kv
from minillm.exercises import as_given, check_table, check_values, exercise
from minillm.exercises.attention import NoShortCut, ShortCutError
from minillm.heads import MultiHeadAttention, merge_heads, split_heads


def _wrong_heads(x: Tensor, ws: list[Tensor], w_o: Tensor, H: int) -> Iterator[tuple[str, Tensor]]:
    (B, T, C), D = x.shape, len(ws[0]) // H
    q, k, v = (split_heads(x @ w.T, H) for w in ws)
    heads = attention(q, k, v, is_causal=True)
    joined, mask = merge_heads(heads), causal_mask(T, T)

    def out(heads: Tensor) -> Tensor:
        return merge_heads(heads) @ w_o.T

    yield "the heads lie side by side, but w_o has not mixed them yet", joined
    back = "each head is right; swap heads and positions back before you join them"
    yield back, heads.reshape(B, T, H * D) @ w_o.T
    yield "positions read the future: the mask is missing", out(attention(q, k, v))
    undivided = attention(q, k, v, is_causal=True, scale=1.0)
    yield "the scores are not divided: a head has D numbers, divide by sqrt(D)", out(undivided)
    for divisor, name in ((C**0.5, "sqrt(C)"), (D, "D"), ((C // H) ** 0.5, "sqrt(C // H)")):
        by_another = attention(q, k, v, is_causal=True, scale=1 / divisor)
        yield f"you divide the scores by {name}; a head has D numbers", out(by_another)
    mixed = attention(*((x @ w.T).reshape(B, H, T, D) for w in ws), is_causal=True)
    cut = "a reshape to (B, H, T, D) mixes heads and positions: cut first, then swap"
    yield cut, out(mixed)
    yield cut, mixed.reshape(B, T, H * D) @ w_o.T
    if C == H * D:
        yield "w_o is stored output first too: multiply with its transpose", joined @ w_o
    linear = "a matrix of nn.Linear is stored output first: multiply with its transpose"
    yield linear, _untransposed(x, ws, w_o, H)
    yield linear, _untransposed(x, ws, w_o.T, H)
    turned = [(x @ w.T).unflatten(-1, (D, H)).permute(0, 3, 1, 2) for w in ws]  # (B, H, T, D)
    mixed = attention(*turned, is_causal=True)
    neighbours = "the D numbers of a head are neighbours: cut into (H, D), not (D, H)"
    yield neighbours, out(mixed)
    yield neighbours, mixed.permute(0, 2, 3, 1).flatten(2) @ w_o.T
    other_way = "the mask is the wrong way round: True is where a query may read"
    yield other_way, out(attention(q, k, v, mask=mask.mT))
    scores = q @ k.mT / math.sqrt(D)
    late = "the mask comes after softmax: then the weights of a row do not sum to 1"
    yield late, out(scores.softmax(dim=-1) * mask @ v)
    by_keys = "the weights of a *query* must sum to 1: softmax over the keys, dim=-1"
    yield by_keys, out(scores.masked_fill(~mask, -torch.inf).softmax(dim=-2) @ v)


@exercise(
    "04.1",
    "what is the shape after each line, and which dimensions must be the last two for attention?",
    "one product makes all heads: cut and swap before attention, swap and join after it",
)
def multi_head(answer: Callable[..., Tensor]) -> str | None:
    for B, T, C, H, D in ((2, 5, 12, 3, 4), (1, 4, 10, 2, 3)):
        generator = torch.Generator().manual_seed(C)
        shapes = (B, T, C), (H * D, C), (H * D, C), (H * D, C), (C, H * D)
        x, *ws, w_o = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        case = f"with B={B}, T={T}, C={C}, H={H}, D={D}"
        try:
            got = answer(x.clone(), *(w.clone() for w in ws), w_o.clone(), H)
        except NotImplementedError:  # a RuntimeError, and a stub
            raise
        except RuntimeError as error:
            if "dtype" in str(error) or "scalar type" in str(error):
                return f"{case} your answer raised {error} (x and all w are float64 here)"
            return f"{case} your answer raised {error} (H * D need not be C, and w is (H * D, C))"
        if got.isnan().any():
            return f"{case} some outputs are NaN: must not every position read itself?"
        heads = attention(*(split_heads(x @ w.T, H) for w in ws), is_causal=True)
        want = merge_heads(heads) @ w_o.T
        if why := check_values(got, want, _wrong_heads(x, ws, w_o, H), near=1e-9):
            return f"{case} {why}"
    return None


def _untransposed(x: Tensor, ws: list[Tensor], w_o: Tensor, heads: int) -> Tensor:
    """The likely slip `x @ w`, which runs where the matrices are square."""
    if x.shape[-1] != w_o.shape[1] or x.shape[-1] != ws[0].shape[0]:
        return torch.empty(0)
    q, k, v = (split_heads(x @ w, heads) for w in ws)
    return merge_heads(attention(q, k, v, is_causal=True)) @ w_o


PREDICTIONS: dict[str, tuple[int, ...] | int | str] = {
    "layer.q_proj.weight.shape": (96, 48),
    "layer.k_proj.weight.shape": (32, 48),
    "layer.o_proj.weight.shape": (48, 96),
    "split_heads(layer.q_proj(x), 12).shape": (2, 12, 5, 8),
    "split_heads(layer.v_proj(x), 4).shape": (2, 4, 5, 8),
    "layer(x).shape": (2, 5, 48),
    "numbers kept per position": 64,
    "key head of query head 7 (from 0)": 2,
    "MultiHeadAttention(48, 12, num_kv_heads=5)": "error",
}
HINTS = {
    "layer.q_proj.weight.shape": "output first: 12 heads of head_dim=8, from 48 numbers",
    "layer.k_proj.weight.shape": "only the key heads have rows here",
    "layer.o_proj.weight.shape": "it takes the results of all query heads back to 48 numbers",
    "split_heads(layer.q_proj(x), 12).shape": "texts, heads, positions, numbers in a head",
    "split_heads(layer.v_proj(x), 4).shape": "texts, heads, positions, numbers in a head",
    "layer(x).shape": "what goes in comes out, in shape",
    "numbers kept per position": "a key and a value, for each key head, of 8 numbers",
    "key head of query head 7 (from 0)": "each key head serves three neighbours, counted from 0",
    "MultiHeadAttention(48, 12, num_kv_heads=5)": "can 12 heads share 5 equally?",
}


@exercise(
    "04.2",
    "write down H, G and D first; then each line is a product of two or three of them",
    "q_proj and o_proj know H, k_proj and v_proj know G, and only G and D count for what is kept",
)
def predictions(answer: Any) -> str | None:
    answer = as_given(answer, PREDICTIONS)
    if answer is not None:
        answer = {key: _plain(value) for key, value in answer.items()}
    return check_table(answer, PREDICTIONS, HINTS, fits=lambda value: True)


def _plain(value: Any) -> Any:
    if isinstance(value, str) and "error" in value.lower():  # also "ValueError"
        return "error"
    return tuple(value) if isinstance(value, list | torch.Size) else value


def tiled(t: Tensor, n: int) -> Tensor:
    return t.repeat(1, n, 1, 1)


def positions_repeated(t: Tensor, n: int) -> Tensor:
    return tiled(t.repeat_interleave(n, dim=2)[:, :, : t.shape[2]], n)


def texts_mixed(t: Tensor, n: int) -> Tensor:
    return t.flatten(0, 1).repeat(n, 1, 1).view(t.shape[0], -1, *t.shape[2:])


ONE_OF_TWO = "keys or values still come in the other order: repeat both alike"
WAYS_TO_SHARE = (
    (tiled, tiled, "query head h still reads key head h % G: neighbours must share"),
    (tiled, repeat_kv, ONE_OF_TWO),
    (repeat_kv, tiled, ONE_OF_TWO),
    (positions_repeated, positions_repeated, "you repeat positions: the heads are dimension 1"),
    (texts_mixed, texts_mixed, "texts of the batch have been mixed: repeat within each text"),
)


causal = partial(attention, is_causal=True)


@exercise(
    "04.3",
    "try a number of key heads between 1 and H, and compare every head, not only the first",
    "neighbours share a key head; with G = 1 or G = H the other order gives the same numbers",
)
def shared_attention(answer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> str | None:
    for B, H, G, T, D in ((2, 4, 4, 5, 8), (1, 4, 1, 3, 2), (2, 4, 2, 5, 8), (3, 12, 3, 4, 2)):
        generator = torch.Generator().manual_seed(G)
        shapes = (B, H, T, D), (B, G, T, D), (B, G, T, D)
        q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        case = f"with B={B}, H={H}, G={G}, T={T}, D={D}"
        try:
            with NoShortCut():
                got = answer(q.clone(), k.clone(), v.clone())
        except ShortCutError as whose:
            return f"{whose} attention does it for you: write it without"
        except NotImplementedError:
            raise
        except RuntimeError as error:
            return f"{case} your answer raised {error}"
        if tuple(got.shape) != (B, H, T, D):
            return f"{case} the shape is {tuple(got.shape)}, not {(B, H, T, D)}"
        right = causal(q, k, v)
        slips = [
            ("positions read the future: the mask is missing", attention(q, k, v)),
            ("the scores are not divided by sqrt(D)", causal(q, k, v, scale=1.0)),
        ]
        slips += [(why, causal(q, a(k, H // G), b(v, H // G))) for a, b, why in WAYS_TO_SHARE]
        off = (got - right).abs().amax((0, 2, 3)) > 1e-9
        said = f"head {int(off.int().argmax())} is the first that is wrong"
        if why := check_values(got, right, slips, near=1e-9, otherwise=said):
            return f"{case} {why}"
    return None


_GQA: dict[str, Any] = dict(
    hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32
)
_MHA = dict(hidden_size=768, num_attention_heads=12, num_hidden_layers=12)
_WIDE = _GQA | dict(hidden_size=5120, num_attention_heads=64, head_dim=128, num_hidden_layers=64)
_MLA = dict(
    hidden_size=7168, num_attention_heads=128, num_key_value_heads=128, num_hidden_layers=61,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip
_CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "keys and values, of G heads, in every layer": (_GQA, 2048),
    "without num_key_value_heads every query head has its own keys": (_MHA, 1536),
    "a head_dim in the config counts, not hidden_size / num_attention_heads": (_WIDE, 2048),
    "head_dim may be there and be None: then it is hidden_size / num_attention_heads": (
        _GQA | dict(head_dim=None), 2048,
    ),
    "num_key_value_heads may be there and be None: then it is num_attention_heads": (
        _MHA | dict(num_key_value_heads=None), 1536,
    ),
    "with a kv_lora_rank a layer keeps the latent and the small shared key, no heads": (_MLA, 576),
    "a kv_lora_rank of None is none": (_GQA | dict(kv_lora_rank=None), 2048),
}  # fmt: skip


@exercise(
    "04.4",
    "what does one position leave in one layer, and what stands for a key that is missing or None?",
    "G and D decide, not H and C; `config.get(key) or default` covers both missing and None",
)
def cache_bytes_per_token(answer: Callable[..., int]) -> str | None:
    for hint, (config, numbers) in _CONFIGS.items():
        for size in (2, 1, 4):
            right = numbers * config["num_hidden_layers"] * size
            try:
                got = answer(dict(config), size)
            except (KeyError, TypeError) as error:
                return f"for {config} your answer raised {type(error).__name__}: {error}: {hint}"
            if got != right:
                if got == numbers * config["num_hidden_layers"] * 2:
                    hint = "you count 2 bytes a number, whatever bytes_per_value says"
                said = f"for {config} and {size} bytes a number you say {got!r}, it is {right}"
                return f"{said}: {hint}"
    if answer(dict(_GQA)) != 2 * 2048 * 32:
        return "bytes_per_value must be 2 where it is not given"
    return None


def _families(order: list[int], width: int, size: int, seed: int) -> MultiHeadAttention:
    """MHA whose head h has nearly the keys and values of all heads of its family order[h]."""
    generator = torch.Generator().manual_seed(seed)
    layer = MultiHeadAttention(width, len(order), head_dim=size)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5)
        for weight in (layer.k_proj.weight, layer.v_proj.weight):
            heads = weight.unflatten(0, (len(order), size))
            weight.copy_((heads[order] + 0.1 * heads.flip(0)).flatten(0, 1))
    return layer


def _pooled(layer: MultiHeadAttention, groups: int, order: list[int]) -> dict[str, Tensor]:
    """The layer's weights with key and value heads averaged by groups of `order`."""
    state = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for name in ("k_proj.weight", "v_proj.weight"):
        heads = state[name].unflatten(0, (layer.num_heads, -1))[order]
        state[name] = heads.unflatten(0, (groups, -1)).mean(1).flatten(0, 1)
    return state


@exercise(
    "04.5",
    "begin with `pool_heads`, look at how far it is off, and ask which heads should share",
    "heads have no order of their own: put those that can share next to each other, queries, "
    "keys, values and the columns of o_proj alike",
)
def to_gqa(answer: Callable[..., MultiHeadAttention]) -> str | None:
    cases = (([0, 1, 1, 0, 1, 0, 0, 1], 2, 32, 8), ([0, 1, 2, 2, 0, 1], 3, 20, 5))
    for seed, (order, groups, width, size) in enumerate(cases):
        layer = _families(order, width, size, seed)
        generator = torch.Generator().manual_seed(9)
        x, fresh = torch.randn(2, 64, 32, width, generator=generator)
        given = copy.deepcopy(layer.state_dict())
        got = answer(layer, groups, x.clone())
        case = f"with H={len(order)}, G={groups}, D={size}, C={width}"
        if any(not torch.equal(given[name], p) for name, p in layer.state_dict().items()):
            return f"{case} your function changes the layer it is given: return a new one"
        if not isinstance(got, MultiHeadAttention) or got.num_kv_heads != groups:
            return f"{case} return a MultiHeadAttention with num_kv_heads={groups}"
        sizes = (got.hidden_size, got.num_heads, got.head_dim)
        if sizes != (width, len(order), size):
            return f"{case} hidden_size, num_heads and head_dim must stay, yours are {sizes}"
        with torch.no_grad():
            wanted = layer(fresh, is_causal=True)
            off = ((got(fresh, is_causal=True) - wanted).norm() / wanted.norm()).item()
            seen = layer(x, is_causal=True)
            there = ((got(x, is_causal=True) - seen).norm() / seen.norm()).item()
        if off <= 0.2:
            continue
        said = f"{case} the output on fresh inputs is off by {100 * off:.1f}%, 20% are allowed"
        state = got.state_dict()
        neighbours = _pooled(layer, groups, list(range(len(order))))
        if all(torch.allclose(state[n], p, atol=1e-5) for n, p in neighbours.items()):
            return f"{said}: these are the means of neighbours, which do not resemble each other"
        by_family = sorted(range(len(order)), key=lambda h: order[h])
        regrouped = _pooled(layer, groups, by_family)
        if torch.allclose(state["k_proj.weight"], regrouped["k_proj.weight"], atol=1e-5):
            if torch.allclose(state["q_proj.weight"], layer.q_proj.weight):
                return f"{said}: the key heads are grouped well, but their query heads did not move"
            if torch.allclose(state["o_proj.weight"], layer.o_proj.weight):
                return f"{said}: the heads have moved, but not their columns of o_proj"
        if there <= 0.2:
            return f"{said}; on the x that you got it is {100 * there:.1f}%: learned by heart"
        return (
            f"{said}, on the x that you got {100 * there:.1f}%: if you train, begin with the heads "
            "that resemble each other in one group, which needs hardly any training"
        )
    return None
