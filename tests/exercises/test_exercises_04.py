"""Graders of notebook 04: right answers pass, planted mistakes are found and named."""

import math

import torch

from minillm.attention import attention, causal_mask
from minillm.heads import MultiHeadAttention


def multi_head(x, w_q, w_k, w_v, w_o, heads, *, scale=None, causal=True, dim=-1, diagonal=0):
    B, T, _ = x.shape
    q, k, v = ((x @ w.T).reshape(B, T, heads, -1).transpose(1, 2) for w in (w_q, w_k, w_v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(~causal_mask(T, T).tril(diagonal), -math.inf)
    return (scores.softmax(dim) @ v).transpose(1, 2).reshape(B, T, -1) @ w_o.T


def by_einsum(x, w_q, w_k, w_v, w_o, heads):
    q, k, v = (
        torch.einsum("btc,hdc->bhtd", x, w.unflatten(0, (heads, -1))) for w in (w_q, w_k, w_v)
    )
    y = attention(q, k, v, is_causal=True)
    return torch.einsum("bhtd,chd->btc", y, w_o.unflatten(1, (heads, -1)))


def viewed(x, w_q, w_k, w_v, w_o, heads):
    B, T, _ = x.shape
    q, k, v = ((x @ w.T).view(B, heads, T, -1) for w in (w_q, w_k, w_v))
    return attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ w_o.T


def viewed_twice(x, w_q, w_k, w_v, w_o, heads):
    B, T, _ = x.shape
    q, k, v = ((x @ w.T).view(B, heads, T, -1) for w in (w_q, w_k, w_v))
    return attention(q, k, v, is_causal=True).reshape(B, T, -1) @ w_o.T


def not_swapped_back(x, w_q, w_k, w_v, w_o, heads):
    B, T, _ = x.shape
    q, k, v = ((x @ w.T).unflatten(-1, (heads, -1)).transpose(1, 2) for w in (w_q, w_k, w_v))
    return attention(q, k, v, is_causal=True).reshape(B, T, -1) @ w_o.T


def output_untransposed(x, w_q, w_k, w_v, w_o, heads):
    return multi_head(x, w_q, w_k, w_v, w_o.T, heads)


def cut_the_other_way(x, w_q, w_k, w_v, w_o, heads):
    q, k, v = ((x @ w.T).unflatten(-1, (-1, heads)).permute(0, 3, 1, 2) for w in (w_q, w_k, w_v))
    return attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ w_o.T


def masked_late(x, w_q, w_k, w_v, w_o, heads):
    T = x.shape[1]
    q, k, v = ((x @ w.T).unflatten(-1, (heads, -1)).transpose(1, 2) for w in (w_q, w_k, w_v))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) * causal_mask(T, T)
    return (weights @ v).transpose(1, 2).flatten(2) @ w_o.T


def unmixed(x, w_q, w_k, w_v, w_o, heads):
    return multi_head(x, w_q, w_k, w_v, torch.eye(w_q.shape[0], dtype=x.dtype), heads)


def untransposed(x, w_q, w_k, w_v, w_o, heads):
    return multi_head(x, w_q.T, w_k.T, w_v.T, w_o.T, heads)


def mask_turned(x, w_q, w_k, w_v, w_o, heads):
    q, k, v = ((x @ w.T).unflatten(-1, (heads, -1)).transpose(1, 2) for w in (w_q, w_k, w_v))
    y = attention(q, k, v, mask=causal_mask(x.shape[1], x.shape[1]).mT)
    return y.transpose(1, 2).flatten(2) @ w_o.T


PREDICTIONS = {
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


def shared(q, k, v, *, share=lambda t, n: t.repeat_interleave(n, dim=1), scale=None, causal=True):
    heads, T, D = q.shape[1:]
    k, v = (share(t, heads // t.shape[1]) for t in (k, v))
    scores = q @ k.mT * (D**-0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(~causal_mask(T, T), -math.inf)
    return scores.softmax(-1) @ v


def tile(t, n):
    return t.repeat(1, n, 1, 1)


def positions(t, n):
    return t.repeat_interleave(n, dim=2)[:, :, : t.shape[2]].repeat(1, n, 1, 1)


def batches(t, n):
    B, G, T, D = t.shape
    return t.flatten(0, 1).repeat(n, 1, 1).view(B, G * n, T, D)


def keys_only(q, k, v):
    repeats = q.shape[1] // k.shape[1]
    return shared(q, k.repeat_interleave(repeats, 1), tile(v, repeats))


def cache_bytes(config, size=2):
    heads = config["num_attention_heads"]
    if config.get("kv_lora_rank"):
        values = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        values = 2 * (config.get("num_key_value_heads") or heads) * head_dim
    return values * config["num_hidden_layers"] * size


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def null_head_dim(config, size=2):
    heads = config["num_attention_heads"]
    if "kv_lora_rank" not in config:
        head_dim = config.get("head_dim", config["hidden_size"] // heads)
        values = 2 * config.get("num_key_value_heads", heads) * head_dim
        return values * config["num_hidden_layers"] * size
    return cache_bytes(config, size)


def null_groups(config, size=2):
    if "num_key_value_heads" in config and "kv_lora_rank" not in config:
        assert config["num_attention_heads"] % (config["num_key_value_heads"] + 0) == 0
    return cache_bytes(config, size)


def groups_of(layer, groups):
    """Heads in an order in which those with like keys are neighbours."""
    heads = layer.k_proj.weight.detach().unflatten(0, (layer.num_heads, -1)).flatten(1)
    left, order = list(range(layer.num_heads)), []
    while left:
        nearest = sorted(left, key=lambda h: (heads[h] - heads[left[0]]).norm())
        order += nearest[: layer.num_heads // groups]
        left = [h for h in left if h not in order]
    return order


def convert(layer, groups, x, *, order=None, move_queries=True, move_output=True):
    order = groups_of(layer, groups) if order is None else order
    new = MultiHeadAttention(
        layer.hidden_size, layer.num_heads, num_kv_heads=groups, head_dim=layer.head_dim
    )
    size = (layer.num_heads, layer.head_dim)
    with torch.no_grad():
        for name in ("k_proj", "v_proj"):
            heads = getattr(layer, name).weight.unflatten(0, size)[order]
            mean = heads.unflatten(0, (groups, -1)).mean(1).flatten(0, 1)
            getattr(new, name).weight.copy_(mean)
        queries = layer.q_proj.weight.unflatten(0, size)
        output = layer.o_proj.weight.unflatten(1, size)
        new.q_proj.weight.copy_((queries[order] if move_queries else queries).flatten(0, 1))
        new.o_proj.weight.copy_((output[:, order] if move_output else output).flatten(1))
    return new


def neighbours(layer, groups, x):
    return convert(layer, groups, x, order=list(range(layer.num_heads)))


def in_place(layer, groups, x):
    with torch.no_grad():
        layer.k_proj.weight.mul_(0.5)
    return convert(layer, groups, x)


def trained(layer, groups, x, *, steps=30, rate=1e-3):
    """The means of neighbours, trained a little to do what the layer does."""
    new = neighbours(layer, groups, x)
    optimizer = torch.optim.Adam(new.parameters(), lr=rate)
    wanted = layer(x, is_causal=True).detach()
    for _ in range(steps):
        loss = (new(x, is_causal=True) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return new


def by_heart(layer, groups, x):
    """Right for the inputs that it was given, and for no others."""

    class Recalls(MultiHeadAttention):
        def forward(self, y, **options):
            known = y.shape == x.shape and torch.equal(y, x)
            return layer(y, **options) if known else super().forward(y, **options)

    return Recalls(layer.hidden_size, layer.num_heads, num_kv_heads=groups, head_dim=layer.head_dim)


RIGHT = {
    "04.1": multi_head,
    "04.2": PREDICTIONS,
    "04.3": shared,
    "04.4": cache_bytes,
    "04.5": convert,
}

WRONG = [
    ("04.1", viewed, "mixes heads and positions"),
    ("04.1", viewed_twice, "mixes heads and positions"),
    ("04.1", not_swapped_back, "swap heads and positions back"),
    ("04.1", unmixed, "w_o has not mixed them"),
    ("04.1", untransposed, "multiply with its transpose"),
    (
        "04.1",
        lambda x, q, k, v, *rest: multi_head(x, q.T, k.T, v.T, *rest),
        "a matrix of nn.Linear is stored output first",
    ),
    ("04.1", mask_turned, "the mask is the wrong way round"),
    (
        "04.1",
        lambda *a: multi_head(*a[:4], torch.eye(12), a[5]),
        "x and all w are float64 here",
    ),
    ("04.1", lambda *a: multi_head(*a, causal=False), "the mask is missing"),
    ("04.1", lambda *a: multi_head(*a, scale=1.0), "the scores are not divided"),
    ("04.1", lambda *a: multi_head(*a, scale=(a[0].shape[-1] // a[-1]) ** -0.5), "sqrt(C // H)"),
    ("04.1", lambda *a: multi_head(*a, scale=a[0].shape[-1] ** -0.5), "scores by sqrt(C)"),
    ("04.1", lambda *a: multi_head(*a, scale=a[-1] / a[1].shape[0]), "scores by D"),
    ("04.1", lambda *a: multi_head(*a, dim=-2), "must sum to 1"),
    ("04.1", lambda *a: multi_head(*a)[0], "the shape is (5, 12), not (2, 5, 12)"),
    ("04.1", lambda *a: multi_head(*a) + 1, "off by up to 1"),
    (
        "04.1",
        lambda x, *w: multi_head(x, *w) if x.shape[-1] == 12 else x.view(x.shape[0], -1, 4, 3),
        "H * D need not be C",
    ),
    ("04.1", output_untransposed, "w_o is stored output first too"),
    ("04.1", cut_the_other_way, "not (D, H)"),
    ("04.1", masked_late, "the mask comes after softmax"),
    ("04.1", lambda *a: multi_head(*a, diagonal=-1), "must not every position read itself"),
    ("04.2", PREDICTIONS | {"layer.k_proj.weight.shape": (96, 48)}, "only the key heads"),
    ("04.2", PREDICTIONS | {"layer.o_proj.weight.shape": (96, 48)}, "back to 48 numbers"),
    ("04.2", PREDICTIONS | {"key head of query head 7 (from 0)": 3}, "serves three neighbours"),
    ("04.2", PREDICTIONS | {"numbers kept per position": 32}, "right so far: 8 of 9"),
    ("04.2", PREDICTIONS | {"numbers kept per position": 192}, "a key and a value"),
    ("04.2", PREDICTIONS | {"layer(x).shape": ...}, "not filled in"),
    ("04.2", PREDICTIONS | {"layer(x).shape": "error"}, "what goes in comes out"),
    ("04.2", [(96, 48)], "a dictionary"),
    ("04.3", lambda q, k, v: shared(q, k, v, share=tile), "h % G: neighbours must share"),
    ("04.3", lambda q, k, v: shared(q, k, v, share=positions), "you repeat positions"),
    ("04.3", lambda q, k, v: shared(q, k, v, share=batches), "texts of the batch"),
    ("04.3", keys_only, "repeat both alike"),
    ("04.3", lambda q, k, v: shared(q, k, v, causal=False), "the mask is missing"),
    ("04.3", lambda q, k, v: shared(q, k, v, scale=1.0), "not divided by sqrt(D)"),
    ("04.3", lambda q, k, v: shared(q, k, v)[:, :1], "the shape is (2, 1, 5, 8)"),
    ("04.3", lambda q, k, v: shared(q, k, v, share=lambda t, n: t), "your answer raised"),
    ("04.3", lambda q, k, v: shared(q, k.flip(1), v), "head 0 is the first that is wrong"),
    ("04.3", lambda q, k, v: attention(q, k, v, is_causal=True), "the package's attention"),
    ("04.4", lambda c, size=2: 2 * 1024 * 32 * 2 * c["num_hidden_layers"], "keys and values"),
    (
        "04.4",
        lambda c, size=2: cache_bytes({"num_key_value_heads": 8} | c, size),
        "every query head has its own keys",
    ),
    (
        "04.4",
        lambda c, size=2: cache_bytes(c | {"num_key_value_heads": c["num_key_value_heads"]}, size),
        "raised KeyError: 'num_key_value_heads': without num_key_value_heads every query head",
    ),
    ("04.4", lambda c, size=2: cache_bytes(without(c, "head_dim"), size), "a head_dim in the"),
    ("04.4", null_head_dim, "head_dim may be there and be None"),
    ("04.4", null_groups, "num_key_value_heads may be there and be None"),
    (
        "04.4",
        lambda c, size=2: cache_bytes(without(c, "kv_lora_rank"), size),
        "the latent and the small shared key",
    ),
    (
        "04.4",
        lambda c, size=2: cache_bytes(c, size) if "kv_lora_rank" not in c
        else (c["kv_lora_rank"] + 64) * c["num_hidden_layers"] * size,
        "a kv_lora_rank of None is none",
    ),
    ("04.4", lambda c, size=2: cache_bytes(c), "1 bytes a number"),
    ("04.4", lambda c, size=2: cache_bytes(c), "whatever bytes_per_value says"),
    ("04.4", lambda c, size=2: str(cache_bytes(c, size)), "you say '131072', it is 131072"),
    ("04.4", lambda c, size=4: cache_bytes(c, size), "2 where it is not given"),
    ("04.5", neighbours, "means of neighbours, which do not resemble each other"),
    ("04.5", lambda *a: convert(*a, move_queries=False), "their query heads did not move"),
    ("04.5", lambda *a: convert(*a, move_output=False), "not their columns of o_proj"),
    ("04.5", lambda layer, groups, x: layer, "with num_kv_heads=2"),
    ("04.5", in_place, "changes the layer it is given"),
    ("04.5", lambda layer, g, x: MultiHeadAttention(32, 8, num_kv_heads=g, head_dim=8), "20% are"),
    ("04.5", trained, "if you train, begin with the heads that resemble each other"),
    ("04.5", by_heart, "learned by heart"),
    (
        "04.5",
        lambda layer, g, x: MultiHeadAttention(32, 4, num_kv_heads=g),
        "hidden_size, num_heads and head_dim must stay",
    ),
]  # fmt: skip
