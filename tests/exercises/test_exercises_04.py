"""Graders of notebook 04: right answers pass, planted mistakes are found and named."""

import math

import torch

from minillm.nn.mla import latent_attention_naive


def key_head_of(h, heads, groups):
    return h // (heads // groups)


def cache_bytes(config, size=2):
    heads = config["num_attention_heads"]
    if "kv_lora_rank" in config:
        values = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        values = 2 * config.get("num_key_value_heads", heads) * head_dim
    return values * config["num_hidden_layers"] * size


def pool(weight, heads, groups):
    return weight.unflatten(0, (groups, heads // groups, -1)).mean(1).flatten(0, 1)


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


RIGHT = {
    "04.1": key_head_of,
    "04.2": cache_bytes,
    "04.3": pool,
    "04.4": compress,
    "04.5": step,
}

WRONG = [
    ("04.1", lambda h, heads, groups: h % groups, "neighbours must share"),
    ("04.1", lambda h, heads, groups: h // groups, "a group holds H / G heads"),
    ("04.1", lambda h, heads, groups: 0, "h=1, H=8, G=8 your answer is 0, not 1"),
    ("04.2", lambda c, size=2: 2 * 1024 * 32 * 2 * c["num_hidden_layers"], "keys and values"),
    (
        "04.2",
        lambda c, size=2: cache_bytes({"num_key_value_heads": 8} | c, size),
        "every query head has its own keys",
    ),
    (
        "04.2",
        lambda c, size=2: cache_bytes({k: c[k] for k in c if k != "head_dim"}, size),
        "a head_dim in the config counts",
    ),
    (
        "04.2",
        lambda c, size=2: cache_bytes({k: c[k] for k in c if k != "kv_lora_rank"}, size),
        "the latent and the rotated key",
    ),
    ("04.2", lambda c, size=2: cache_bytes(c), "1 bytes a value"),
    ("04.2", lambda c, size=2: str(cache_bytes(c, size)), "you say '131072', it is 131072"),
    ("04.2", lambda c, size=4: cache_bytes(c, size), "2 where it is not given"),
    (
        "04.3",
        lambda w, heads, g: w.unflatten(0, (heads // g, g, -1)).mean(0).flatten(0, 1),
        "neighbours form a group",
    ),
    (
        "04.3",
        lambda w, heads, g: w.unflatten(0, (g, heads // g, -1))[:, 0].flatten(0, 1),
        "you keep the first head",
    ),
    (
        "04.3",
        lambda w, heads, g: w.unflatten(0, (g, heads // g, -1)).sum(1).flatten(0, 1),
        "divide by their number",
    ),
    ("04.3", lambda w, heads, g: w, r"the shape is (32, 24), not (8, 24)"),
    ("04.3", lambda w, heads, g: pool(w.mul_(1.0).add_(1.0), heads, g), "changes the weight"),
    ("04.3", lambda w, heads, g: pool(w, heads, g) + 1, "not the means"),
    ("04.4", compress_unordered, "keys first, then values"),
    ("04.4", compress_apart, "one decomposition of all rows"),
    ("04.4", lambda k, v, h, r: compress(k, v, h, r)[::-1], "the shapes are"),
    ("04.5", step_expanded, "keys or values of single heads"),
    ("04.5", step_broadcast, "a product that broadcasts copies the cache for each of 8 heads"),
    ("04.5", lambda *p: step(*p[:4], 1.0), "lack their factor"),
    ("04.5", lambda q, c, k, w, s: step(q, c, k * 0, w, s), "rotated part of the query is missing"),
    ("04.5", lambda *p: step(*p)[:, :, 0], "the shape is (1, 2, 4), not (1, 2, 1, 4)"),
    ("04.5", lambda *p: step(*p[:4], p[4] * math.sqrt(2)), "you are off by"),
]
