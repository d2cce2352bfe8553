"""Wrong answers of 10_families: exercise, answer, words that its message holds."""

FOLLOWS = {
    "GPT-2: attn.c_attn (32, 96) is not turned": "loud",
    "GPT-2: attn.c_proj (32, 32) is not turned": "silent",
    "Llama: up_proj and gate_proj are swapped": "silent",
    "Qwen3 is taken for Llama": "loud",
    "Mistral is taken for Llama": "silent",
    "Llama with 2 key heads: the config's num_key_value_heads is not read": "loud",
    "Llama 3: rope_scaling is not read": "silent",
}


def split(fused, heads, groups, dim):
    x = fused.unflatten(0, (groups, heads // groups + 2, dim))
    return x[:, :-2].flatten(0, 2), x[:, -2].flatten(0, 1), x[:, -1].flatten(0, 1)


def gpt2_order(fused, heads, groups, dim):
    return fused.split([heads * dim, groups * dim, groups * dim])


def swapped(fused, heads, groups, dim):
    q, k, v = split(fused, heads, groups, dim)
    return q, v, k


def key_first(fused, heads, groups, dim):
    x = fused.unflatten(0, (groups, heads // groups + 2, dim))
    return x[:, 2:].flatten(0, 2), x[:, 0].flatten(0, 1), x[:, 1].flatten(0, 1)


def unflattened(fused, heads, groups, dim):
    x = fused.unflatten(0, (groups, heads // groups + 2, dim))
    return x[:, :-2], x[:, -2], x[:, -1]


def read(tensors, config, *, rows=None, gate_first=True, rest=True):
    found = {}
    D = config.head_dim
    rows = rows or [n * D for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    for name, tensor in tensors.items():
        if "qkv_proj" in name:
            pieces = tensor.chunk(3) if rows == "thirds" else tensor.split(rows)
            for part, piece in zip("qkv", pieces, strict=True):
                found[name.replace("qkv", part)] = piece
        elif "gate_up_proj" in name:
            parts = ("gate", "up") if gate_first else ("up", "gate")
            for part, piece in zip(parts, tensor.chunk(2), strict=True):
                found[name.replace("gate_up", part)] = piece
        elif rest:
            found[name] = tensor
    return found


def by_hidden_size(tensors, config):
    D = config.hidden_size // config.num_attention_heads
    rest = next(len(t) for name, t in tensors.items() if "qkv_proj" in name)
    rows = [config.num_attention_heads * D, config.num_key_value_heads * D]
    return read(tensors, config, rows=[*rows, rest - sum(rows)])


WRONG = [
    ("10_families.1", {**FOLLOWS, "Qwen3 is taken for Llama": "silent"}, "that Llama lacks"),
    ("10_families.1", {**FOLLOWS, "Mistral is taken for Llama": "loud"}, "has a window a weight"),
    ("10_families.1", {**FOLLOWS, "Llama 3: rope_scaling is not read": "loud"}, "has a rotation"),
    (
        "10_families.1",
        {**FOLLOWS, "GPT-2: attn.c_proj (32, 32) is not turned": "loud"},
        "a square matrix",
    ),
    ("10_families.1", {**FOLLOWS, "Qwen3 is taken for Llama": True}, 'write "loud"'),
    ("10_families.1", {**FOLLOWS, "Qwen3 is taken for Llama": ...}, "not filled in"),
    ("10_families.1", ["loud"] * 7, "a dictionary"),
    ("10_families.2", gpt2_order, "GPT-2's order still"),
    ("10_families.2", swapped, "k and v are swapped"),
    ("10_families.2", key_first, "takes rows"),
    ("10_families.2", unflattened, "should be (12, 5)"),
    ("10_families.2", lambda fused, *sizes: fused, "return three tensors"),
    ("10_families.3", lambda tensors, config: tensors, "is still there"),
    ("10_families.3", lambda t, c: read(t, c, rows="thirds"), "has the shape"),
    ("10_families.3", by_hidden_size, "has the shape"),
    ("10_families.3", lambda t, c: read(t, c, gate_first=False), "gate and up are swapped"),
    ("10_families.3", lambda t, c: read(t, c, rest=False), "are missing"),
    ("10_families.3", lambda t, c: {**read(t, c), "bias": t}, "no weight bias"),
    ("10_families.3", lambda t, c: list(read(t, c)), "return a dictionary"),
]
