"""Graders of notebook 04: right answers pass, planted mistakes are found and named."""


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


RIGHT = {
    "04.1": key_head_of,
    "04.2": cache_bytes,
    "04.3": pool,
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
]
