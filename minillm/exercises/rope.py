"""Graders of notebook 05: rotating by hand, distances, reading on, conversion, looking back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from minillm.attention import attention
from minillm.deeper.attention.rope_layouts import half_to_interleaved, interleaved_to_half
from minillm.deeper.attention.rope_scaling import RotaryEmbedding, rope_frequencies
from minillm.exercises import check_table, check_values, exercise
from minillm.heads import MultiHeadAttention
from minillm.rope import Rotation


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def _turned_wrongly(x: Tensor, positions: Tensor, base: float) -> Iterator[tuple[str, Tensor]]:
    at, half = positions[None], RotaryEmbedding(6, base=base)
    yield (
        "you turned the pairs (0, 1), (2, 3), ...: half-split pairs are (i, i + D/2)",
        RotaryEmbedding(6, base=base, interleaved=True)(at)(x),
    )
    yield (
        "each number is right, but they are joined alternately: one half after the other",
        torch.stack(half(at)(x).chunk(2, -1), -1).flatten(-2),
    )
    yield (
        "you turned the other way round: (a, b) becomes (a cos - b sin, b cos + a sin)",
        half(-at)(x),
    )
    yield (
        f"for positions {positions.tolist()} you turned by 0, 1, 2, 3: use the positions",
        half(torch.arange(4)[None])(x),
    )
    yield (
        "you turned by the frequencies of base 10,000: use those that were given",
        RotaryEmbedding(6)(at)(x),
    )
    frequencies, _ = rope_frequencies(6, base=base)
    angles = torch.cat((positions[:, None] / frequencies,) * 2, -1)[None]
    yield (
        "the angle is the position times the frequency, not divided by it",
        Rotation(angles.cos(), angles.sin())(x),
    )


@exercise(
    "05.1",
    "cut the head into its two halves; the angles have the shape (T, D/2)",
    "each pair turns by position times frequency: two products, whatever the layout",
)
def _rotate(answer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> str | None:
    cases = ((torch.arange(4), 10000.0), (torch.tensor([7, 8, 30, 2]), 50.0))
    for seed, (positions, base) in enumerate(cases):
        x, (frequencies, _) = _draw(2, 3, 4, 6, seed=seed), rope_frequencies(6, base=base)
        kept = x.clone()
        got = answer(x, positions, frequencies)
        if not torch.equal(x, kept):
            return "x itself has changed: return a new tensor and leave the input alone"
        want = RotaryEmbedding(6, base=base)(positions[None])(x)
        slips = _turned_wrongly(x, positions, base)
        otherwise = f"positions {positions.tolist()} are not turned by position times frequency"
        if why := check_values(got, want, slips, near=1e-4, otherwise=otherwise):
            if got.shape == x.shape and not _close(got.norm(dim=-1), x.norm(dim=-1), 1e-3):
                return "the length of a vector changed: a rotation keeps a^2 + b^2 of every pair"
            return why
    return None


SAME = {
    "query at 17, key at 10": True,
    "query at 3, key at 10": False,
    "query at 107, key at 100": True,
    "query at 10, key at 4": False,
    "query at 20, key at 5": True,
    "query at 5, key at 6": True,
}
WHY = {
    "query at 17, key at 10": "both have moved by 7, what has become of their distance?",
    "query at 3, key at 10": "the distance is 7 here and -7 there: is that the same angle?",
    "query at 107, key at 100": "a large position is not a large distance",
    "query at 10, key at 4": "another distance turns the pair by another angle",
    "query at 20, key at 5": "the distance is 15: where does a pair stand that turns once in 8?",
    "query at 5, key at 6": "the distance is -1: how far is it from there to 7?",
}


@exercise(
    "05.2",
    "for each placement, at which angle to each other do query and key stand?",
    "only the distance counts, with its sign; and one pair alone cannot tell 7 from 15 or -1",
)
def _same_score(answer: Any) -> str | None:
    return check_table(
        answer, SAME, WHY, kind="True or False", fits=lambda value: isinstance(value, bool)
    )


@exercise(
    "05.3",
    "give it two new words, and compare each line with what reading the whole text would do",
    "new words take the next positions, turned keys stay, and a mask guards the words among them",
)
def _read_on(answer: Callable[..., Tensor]) -> str | None:
    for S, T in ((5, 1), (4, 3), (0, 4)):
        q, k, v = _draw(3, 2, 2, S + T, 8, seed=S)
        rope = RotaryEmbedding(8)
        places = torch.arange(S + T)
        full = rope(places[None])
        want = attention(full(q), full(k), v, is_causal=True)[:, :, S:]
        old_k, old_v = full(k)[:, :, :S], v[:, :, :S]
        copies = [x.clone() for x in (q[:, :, S:], k[:, :, S:], v[:, :, S:], old_k, old_v)]
        got = answer(*copies, rope)
        case = f"with {S} kept and {T} new words"
        if got.shape != want.shape:
            return f"{case}: expected (B, H, T, D) = {tuple(want.shape)}, got {tuple(got.shape)}"
        if _close(got, want):
            continue

        def read(
            q_at: Tensor = places[S:],
            k_at: Tensor = places[S:],
            causal: bool = True,
            twice: bool = False,
            S: int = S,
            old: tuple[Tensor, Tensor] = (old_k, old_v),
            new: tuple[Tensor, ...] = tuple(x[:, :, S:] for x in (q, k, v)),
            rope: RotaryEmbedding = rope,
        ) -> Tensor:
            kept = rope(torch.arange(S)[None])(old[0]) if twice and S else old[0]
            keys = torch.cat((kept, rope(k_at[None])(new[1])), dim=2)
            values = torch.cat((old[1], new[2]), dim=2)
            return attention(rope(q_at[None])(new[0]), keys, values, is_causal=causal)

        zero = torch.arange(T)
        for mask in (True, False):
            more = "" if mask or T == 1 else " (and each new word reads later ones)"
            if S and _close(got, read(zero, zero, mask)):
                return f"{case}: the new words begin at position 0 again{more}"
            if S and _close(got, read(k_at=zero, causal=mask)):
                return f"{case}: the queries stand right, the new keys begin at position 0{more}"
            if S and _close(got, read(q_at=zero, causal=mask)):
                return f"{case}: the new keys stand right, the queries begin at position 0{more}"
            if S and _close(got, read(places[S:] + 1, places[S:] + 1, mask)):
                return f"{case}: the first new word stands at position {S}, not at {S + 1}{more}"
            if _close(got, read(twice=True, causal=mask)):
                return f"{case}: kept keys were turned when they came in, you turn them again{more}"
        if _close(got, read(causal=False)):
            return f"{case}: positions are right, but a new word reads the new words after it"
        for old, new in ((v[:, :, :S], full(v)[:, :, S:]), (full(v)[:, :, :S], full(v)[:, :, S:])):
            values = torch.cat((old, new), dim=2)
            if _close(got, attention(full(q)[:, :, S:], full(k), values, is_causal=True)):
                return f"{case}: values are turned too, and only q and k should be"
        late = attention(
            full(q)[:, :, S:], full(k), v, mask=torch.ones(T, S + T, dtype=torch.bool).tril()
        )
        if _close(got, late):
            return f"{case}: the mask is aligned with the first keys, it belongs to the last ones"
        return f"{case} the result differs from reading the whole text at once"
    return None


def _attend(weights: dict[str, Tensor], H: int, G: int, x: Tensor, *, interleaved: bool) -> Tensor:
    module = MultiHeadAttention(24, H, num_kv_heads=G, head_dim=8, bias="q_proj.bias" in weights)
    module.load_state_dict(weights)
    rope = RotaryEmbedding(8, interleaved=interleaved)
    with torch.no_grad():
        return module(x, rope=rope(torch.arange(x.shape[1])[None]), is_causal=True)


@exercise(
    "05.4",
    "which matrices make what is turned, and into how many heads is each of them cut?",
    "a layout is an order of rows in q_proj and k_proj, head by head, biases included",
)
def _convert(answer: Callable[[dict[str, Tensor], int, int], dict[str, Tensor]]) -> str | None:
    for H, G, bias in ((3, 3, False), (4, 2, False), (6, 3, True)):
        module = MultiHeadAttention(24, H, num_kv_heads=G, head_dim=8, bias=bias)
        shapes = {name: p.shape for name, p in module.state_dict().items()}
        weights = {n: _draw(*s, seed=i) * 0.5 for i, (n, s) in enumerate(shapes.items())}
        x = _draw(2, 5, 24, seed=99)
        want = _attend(weights, H, G, x, interleaved=True)
        given = {name: w.clone() for name, w in weights.items()}
        got = dict(answer(given, H, G))
        if got.keys() != weights.keys():
            odd = ", ".join(sorted(got.keys() ^ weights.keys()))
            return f"the result should hold the names that came in; look at {odd}"
        if any(not torch.equal(given[n], w) for n, w in weights.items()):
            return "the dictionary that came in has changed: return a new one with new tensors"
        if any(got[n].shape != s for n, s in shapes.items()):
            return "a weight changed its shape: conversion only reorders rows"
        for name in weights:
            if name[:6] in ("v_proj", "o_proj") and not torch.equal(got[name], weights[name]):
                return f"{name} is reordered, but values are never rotated: leave it alone"
        if _close(_attend(got, H, G, x, interleaved=False), want, 1e-3):
            continue
        case = f"with {H} query and {G} key heads"
        for name in (n for n in weights if n[:6] in ("q_proj", "k_proj")):
            heads, others = (H, G) if name[0] == "q" else (G, H)
            w, mine = weights[name], got[name]
            if torch.equal(mine, interleaved_to_half(w, heads)):
                continue
            if torch.equal(mine, w):
                return f"{case}: {name} is as it came, but what it makes is turned too"
            if torch.equal(mine, half_to_interleaved(w, heads)):
                return f"{case}: {name} went the other way, from half-split to interleaved"
            if torch.equal(mine, interleaved_to_half(w, 1)):
                return f"{case}: {name} is reordered as one large head: go head by head"
            if len(w) % (2 * others) == 0 and torch.equal(mine, interleaved_to_half(w, others)):
                return f"{case}: {name} has {heads} heads, not {others}: reorder within its own"
            return f"{case}: the rows of {name} are in an order that is neither layout's"
    return None


@exercise(
    "05.5",
    "when do a turned query and a turned key point the same way in every pair at once?",
    "turn one of the two in advance, and the head looks back by just that distance",
)
def _look_back(answer: Callable[[int, int], tuple[Tensor, Tensor]]) -> str | None:
    for D in (64, 16, 128):
        for distance in (50, 3, 0, 1, 200):
            found = answer(D, distance)
            if not isinstance(found, tuple | list | Tensor) or len(found) != 2:
                return "return two vectors, a query and a key"
            q, k = (torch.as_tensor(x).float().detach() for x in found)
            case = f"head of {D}, {distance} back"
            if q.shape != (D,) or k.shape != (D,):
                return (
                    f"{case}: expected (D,) = ({D},) twice, got {tuple(q.shape)}, {tuple(k.shape)}"
                )
            if not (q.isfinite().all() and k.isfinite().all()):
                return f"{case}: there are numbers that are not finite"
            scores = _scores(q, k, interleaved=False)
            past = scores[:301]
            if past.max() - past.min() < 1e-4 * q.norm() * k.norm() + 1e-12:
                return f"{case}: all keys get the same score"
            if int(past.argmax()) == 300 - distance:
                continue
            if distance and int(scores.argmax()) == 300 + distance:
                return f"{case}: the head looks {distance} words ahead; turn the other way round"
            if distance and int(past.argmax()) == 300:
                return f"{case}: the word itself scores highest; nothing in q and k says how far"
            if int(_scores(q, k, interleaved=True)[:301].argmax()) == 300 - distance:
                return f"{case}: it would work with neighbours as pairs; half-split: (i, i + D/2)"
            return f"{case}: the highest score is {300 - int(past.argmax())} words back"
    return None


def _scores(q: Tensor, k: Tensor, *, interleaved: bool) -> Tensor:
    """The score of a query at 300 with keys at 0 to 600, (601,)."""
    rope = RotaryEmbedding(len(q), interleaved=interleaved)
    keys = rope(torch.arange(601)[None])(k.expand(1, 1, 601, -1))[0, 0]
    return keys @ rope(torch.tensor([[300]]))(q[None, None, None])[0, 0, 0]
