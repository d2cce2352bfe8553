"""Graders of the page on latent attention: compression, an absorbed step, which form pays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.deeper.attention.mla import latent_attention_naive
from minillm.exercises import Unsolved, exercise


def _by_head(k_weight: Tensor, v_weight: Tensor, heads: int) -> Tensor:
    """Rows as in kv_b_proj: for each head its key, then its value."""
    per_head = (weight.unflatten(0, (heads, -1)) for weight in (k_weight, v_weight))
    return torch.cat(list(per_head), dim=1).flatten(0, 1)


@exercise(
    "04_latent_attention.1",
    "what does a singular value decomposition of all rows of keys and values give?",
    "one decomposition of all rows: a shared latent uses what keys and values have in common",
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
    U, values, Vt = torch.linalg.svd(both, full_matrices=False)
    for rank in (20, 6, 2):
        down, kv_weight = answer(k.clone(), v.clone(), heads, rank)
        shapes = tuple(down.shape), tuple(kv_weight.shape)
        if shapes != ((rank, width), (2 * heads * size, rank)):
            expected = (rank, width), (2 * heads * size, rank)
            return f"for R={rank} the shapes are {shapes}, not {expected}"
        best, product = values[rank:].norm(), kv_weight @ down

        def near(wanted: Tensor, product: Tensor = product) -> bool:
            return torch.allclose(product, wanted, atol=1e-8)

        lost = (both - product).norm()
        if lost <= best * 1.0001 + 1e-8:
            continue
        stacked = (torch.cat([k, v]) - product).norm()
        if stacked <= best * 1.0001 + 1e-8:
            return "the rows stand keys first, then values: each head's key and value stay together"
        for wanted in (_by_head(v, k, heads), torch.cat([v, k])):
            if (wanted - product).norm() <= best * 1.0001 + 1e-8:
                return "the rows have values before keys: each head's key comes first"
        left, right, kept = U[:, :rank], Vt[:rank], values[:rank]
        if near(left @ right):
            return f"for R={rank} the singular values are missing from the product"
        if near(left * kept**2 @ right):
            return f"for R={rank} the singular values stand in both factors: their roots, or one"
        if near(left * kept**0.5 @ right):
            return f"for R={rank} only one factor has the roots of the singular values"
        if near(left * kept @ Vt.T[:rank]):
            return f"for R={rank} `down` is made of rows of V: rows of its transpose are wanted"
        if rank < 20 and near(U[:, -rank:] * values[-rank:] @ Vt[-rank:]):
            return f"for R={rank} these are the smallest singular values: keep the largest"
        return (
            f"for R={rank} you lose {lost:.3f} of keys and values together, where {best:.3f} is "
            "possible, by one decomposition of all rows (not one for keys and one for values)"
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


def _slip(got: Tensor, parts: list[Tensor], *, R: int, P: int) -> str | None:
    """What a learner may have done who got this: another scale, or keys for values."""
    q, latent, k_pe, kv_weight = parts
    N = q.shape[-1] - P
    scale = (N + P) ** -0.5

    def same(*others: Tensor, scale: float = scale) -> bool:
        return torch.allclose(got, latent_attention_naive(*others, scale=scale), atol=1e-9)

    for name, size in {"R": R, "R + P": R + P, "N": N}.items():
        if size != N + P and same(*parts, scale=size**-0.5):
            return f"the scores are divided by sqrt({name}): their factor is `scale`"
    q_nope, q_pe = q.split([N, P], dim=-1)
    for nope, pe, name in ((1, scale, "rotated"), (scale, 1, "unrotated")):
        if same(torch.cat([q_nope / nope, q_pe / pe], dim=-1), latent, k_pe, kv_weight):
            return f"the {name} part of the scores lacks the factor `scale`"
    per_head = kv_weight.unflatten(0, (q.shape[1], -1))
    w_k, w_v = per_head[:, :N], per_head[:, N:]
    if w_k.shape == w_v.shape:
        for first, second, name in ((w_k, w_k, "keys"), (w_v, w_v, "values"), (w_v, w_k, "")):
            if same(q, latent, k_pe, torch.cat([first, second], dim=1).flatten(0, 1)):
                done = f"the rows for {name} are used twice" if name else "the rows are exchanged"
                return f"{done}: each head has N rows for its key, then V for its value"
    return None


@exercise(
    "04_latent_attention.2",
    "fold the query first; which tensor plays the key, and which the value?",
    "the latents are read as they are: only the query is folded and only the mixture expanded",
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
            slip = _slip(got, parts, R=R, P=P)
            return f"{case} {slip or f'you are off by {(got - right).abs().max():.3f}'}"
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


@exercise(
    "04_latent_attention.3",
    "write both counts for T queries and S keys; each is a constant plus something times S",
    "few queries: absorb almost at once; many: the price per key is higher than expanding it",
)
def absorb_from(answer: Callable[..., float]) -> str | None:
    deepseek, narrow = (512, 128, 64, 128), (16, 8, 4, 6)
    cases = [(T, deepseek) for T in (1, 8, 64, 170, 171, 200)]
    cases += [(T, narrow) for T in (1, 2, 5, 12, 40)] + [(5, (8, 16, 2, 16)), (60, (8, 8, 2, 8))]
    for T, (R, N, P, V) in cases:
        gain, price = R * (N + V), T * (2 * R - N - V)  # per key, naive less absorbed: the slope
        right: float = math.inf
        if gain > price:
            first = T * R * (N + V) // (gain - price) + 1  # strictly fewer
            right = max(T, first)
        try:
            got: float | None = answer(T, R, N, P, V)
        except Unsolved:
            if T == 1:
                raise  # the stub
            got = None  # other cases had a number
        if got == right:
            continue
        case = f"for T={T}, R={R}, N={N}, P={P}, V={V} you say {got!r}, it is {right!r}"
        if got is None:
            return f"{case}: return a number, or math.inf where there is no such S"
        if right == math.inf:
            return f"{case}: every further key costs the absorbed form more, there is no such S"
        slips = {
            "in both forms each query meets the P rotated numbers of a key": (P, -P),
            "absorbed, a query meets a latent twice, for its score and in the mixture": (-R, P - R),
        }
        for said, extra in slips.items():
            left = [gain - price - T * more for more in extra]
            if any(g > 0 and got == max(T, T * R * (N + V) // g + 1) for g in left):
                return f"{case}: {said}"
        if got == first and first < T:
            return f"{case}: S is never less than T"
        if got == right - 1:
            return f"{case}: there the two cost the same, or expanding is still cheaper"
        if isinstance(got, float) and got != math.inf and abs(got - right) <= 1:
            return f"{case}: S is a whole number"
        return case
    return None
