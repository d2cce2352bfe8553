"""Graders of the page on latent attention: right answers pass, planted mistakes are named."""

import math

import torch

from minillm.deeper.attention.mla import latent_attention_naive


def compress(k, v, heads, rank):
    rows = torch.cat([w.unflatten(0, (heads, -1)) for w in (k, v)], dim=1).flatten(0, 1)
    U, sizes, Vt = torch.linalg.svd(rows, full_matrices=False)
    return Vt[:rank], U[:, :rank] * sizes[:rank]


def compress_unordered(k, v, heads, rank):
    U, sizes, Vt = torch.linalg.svd(torch.cat([k, v]), full_matrices=False)
    return Vt[:rank], U[:, :rank] * sizes[:rank]


def compress_apart(k, v, heads, rank):
    """Half the rank for keys, half for values."""
    half = rank // 2
    parts = [torch.linalg.svd(w, full_matrices=False) for w in (k, v)]
    ups = [(U[:, :half] * s[:half]).unflatten(0, (heads, -1)) for U, s, _ in parts]
    zeros = torch.zeros_like(ups[0])
    keys, values = torch.cat([ups[0], zeros], -1), torch.cat([zeros, ups[1]], -1)
    return torch.cat([Vt[:half] for *_, Vt in parts]), torch.cat([keys, values], 1).flatten(0, 1)


def step(q, latent, k_pe, kv_weight, scale):
    heads, rotated = q.shape[1], k_pe.shape[-1]
    q_nope, q_pe = q[:, :, 0, :-rotated], q[:, :, 0, -rotated:]
    per_head = kv_weight.unflatten(0, (heads, -1))
    w_k, w_v = per_head[:, : q_nope.shape[-1]], per_head[:, q_nope.shape[-1] :]
    folded = torch.einsum("bhn,hnr->bhr", q_nope, w_k)
    scores = folded @ latent[:, 0].mT + q_pe @ k_pe[:, 0].mT
    mixture = (scores * scale).softmax(-1) @ latent[:, 0]
    return torch.einsum("bhr,hvr->bhv", mixture, w_v)[:, :, None]


def step_expanded(*parts):
    return latent_attention_naive(*parts[:4], scale=parts[4])


def step_broadcast(q, latent, k_pe, kv_weight, scale):
    """Folded, but matmul then copies the latent for every head to multiply batches."""
    heads, rotated = q.shape[1], k_pe.shape[-1]
    q_nope, q_pe = q[..., :-rotated], q[..., -rotated:]
    per_head = kv_weight.unflatten(0, (heads, -1))
    w_k, w_v = per_head[:, : q_nope.shape[-1]], per_head[:, q_nope.shape[-1] :]
    scores = (q_nope @ w_k) @ latent.mT + q_pe @ k_pe.mT
    return ((scores * scale).softmax(-1) @ latent) @ w_v.mT


def compress_with(power, order=slice(None)):
    """The decomposition with the singular values to some power, or from the wrong end."""

    def answer(k, v, heads, rank):
        rows = torch.cat([w.unflatten(0, (heads, -1)) for w in (k, v)], dim=1).flatten(0, 1)
        U, sizes, Vt = torch.linalg.svd(rows, full_matrices=False)
        if order != slice(None):
            U, sizes, Vt = U.flip(1), sizes.flip(0), Vt.flip(0)
        return Vt[:rank], U[:, :rank] * sizes[:rank] ** power

    return answer


def absorb_from(num_queries, rank, nope_dim, rope_dim, value_dim):
    T, R, N, P, V = num_queries, rank, nope_dim, rope_dim, value_dim
    for S in range(T, 200_000):
        if T * R * (N + V) + T * S * (2 * R + P) < S * R * (N + V) + T * S * (N + P + V):
            return S
    return math.inf


def crossing(num_queries, rank, nope_dim, rope_dim, value_dim):
    expand = rank * (nope_dim + value_dim)
    return num_queries * expand / (expand - num_queries * (2 * rank - nope_dim - value_dim))


def without_bound(*sizes):
    at = crossing(*sizes)
    return math.floor(at) + 1 if at > 0 else math.inf


def compress_values_first(k, v, heads, rank):
    rows = torch.cat([w.unflatten(0, (heads, -1)) for w in (v, k)], dim=1).flatten(0, 1)
    U, sizes, Vt = torch.linalg.svd(rows, full_matrices=False)
    return Vt[:rank], U[:, :rank] * sizes[:rank]


def compress_untransposed(k, v, heads, rank):
    rows = torch.cat([w.unflatten(0, (heads, -1)) for w in (k, v)], dim=1).flatten(0, 1)
    U, sizes, V = torch.svd(rows)
    return V[:rank], U[:, :rank] * sizes[:rank]


def step_of(scale_nope=1.0, scale_pe=1.0, order=("k", "v")):
    """A step with other factors on the two kinds of scores, or with other rows."""

    def answer(q, latent, k_pe, kv_weight, scale):
        heads, rotated = q.shape[1], k_pe.shape[-1]
        nope = q.shape[-1] - rotated
        per_head = kv_weight.unflatten(0, (heads, -1))
        rows = {"k": per_head[:, :nope], "v": per_head[:, nope:]}
        folded = torch.cat([rows[name] for name in order], dim=1).flatten(0, 1)
        factors = [f(scale) if callable(f) else f for f in (scale_nope, scale_pe)]
        parts = q.split([nope, rotated], dim=-1)
        new = torch.cat([part * f for part, f in zip(parts, factors, strict=True)], dim=-1)
        return step(new, latent, k_pe, folded, scale)

    return answer


def step_divided_by_rank(q, latent, k_pe, kv_weight, scale):
    return step(q, latent, k_pe, kv_weight, latent.shape[-1] ** -0.5)


def none_for_never(*sizes):
    found = absorb_from(*sizes)
    return None if found == math.inf else found


def with_price(price):
    """The formula with another price of a key for a query."""

    def answer(T, R, N, P, V):
        gain = R * (N + V) - T * price(R, N, P, V)
        return max(T, T * R * (N + V) // gain + 1) if gain > 0 else math.inf

    return answer


RIGHT = {
    "04_latent_attention.1": compress,
    "04_latent_attention.2": step,
    "04_latent_attention.3": absorb_from,
}

WRONG = [
    ("04_latent_attention.1", compress_unordered, "keys first, then values"),
    ("04_latent_attention.1", compress_apart, "one decomposition of all rows"),
    ("04_latent_attention.1", lambda k, v, h, r: compress(k, v, h, r)[::-1], "the shapes are"),
    ("04_latent_attention.2", step_expanded, "keys or values of single heads"),
    (
        "04_latent_attention.2",
        step_broadcast,
        "a product that broadcasts copies the cache for each of 8 heads",
    ),
    ("04_latent_attention.2", lambda *p: step(*p[:4], 1.0), "lack their factor"),
    (
        "04_latent_attention.2",
        lambda q, c, k, w, s: step(q, c, k * 0, w, s),
        "rotated part of the query is missing",
    ),
    (
        "04_latent_attention.2",
        lambda *p: step(*p)[:, :, 0],
        "the shape is (1, 2, 4), not (1, 2, 1, 4)",
    ),
    ("04_latent_attention.2", lambda *p: step(*p[:4], p[4] * math.sqrt(2)), "you are off by"),
    ("04_latent_attention.1", compress_with(0), "the singular values are missing"),
    ("04_latent_attention.1", compress_with(2), "stand in both factors"),
    ("04_latent_attention.1", compress_with(0.5), "only one factor has the roots"),
    ("04_latent_attention.1", compress_with(1, "last"), "these are the smallest"),
    ("04_latent_attention.3", crossing, "S is a whole number"),
    ("04_latent_attention.3", lambda *s: math.floor(abs(crossing(*s))) + 1, "no such S"),
    ("04_latent_attention.3", lambda *s: absorb_from(*s) - 1, "the two cost the same"),
    ("04_latent_attention.3", without_bound, "S is never less than T"),
    ("04_latent_attention.3", lambda *s: 100, "you say 100"),
    ("04_latent_attention.1", compress_values_first, "values before keys"),
    ("04_latent_attention.1", compress_untransposed, "rows of its transpose"),
    ("04_latent_attention.2", step_divided_by_rank, "divided by sqrt(R)"),
    ("04_latent_attention.2", step_of(scale_pe=lambda s: 1 / s), "the rotated part of the scores"),
    ("04_latent_attention.2", step_of(scale_nope=lambda s: 1 / s), "the unrotated part of"),
    ("04_latent_attention.2", step_of(order="kk"), "the rows for keys are used twice"),
    ("04_latent_attention.2", step_of(order="vk"), "the rows are exchanged"),
    ("04_latent_attention.3", none_for_never, "you say None, it is inf"),
    ("04_latent_attention.3", with_price(lambda R, N, P, V: 2 * R + P - N - V), "P rotated"),
    ("04_latent_attention.3", with_price(lambda R, N, P, V: R - N - V), "meets a latent twice"),
]
