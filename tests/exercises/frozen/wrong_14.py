"""Wrong answers of 14: exercise, answer, words that its message holds."""

import torch


def adapted(x, W, A, B, alpha):
    return x @ W.T + alpha / len(A) * (x @ A.T) @ B.T


def plain(x, W, A, B, alpha):
    return x @ W.T


def undivided(x, W, A, B, alpha):
    return x @ W.T + alpha * (x @ A.T) @ B.T


def whole_division(x, W, A, B, alpha):
    return x @ W.T + alpha // len(A) * (x @ A.T) @ B.T


def no_alpha(x, W, A, B, alpha):
    return x @ W.T + (x @ A.T) @ B.T


def root(x, W, A, B, alpha):
    return x @ W.T + alpha / len(A) ** 0.5 * (x @ A.T) @ B.T


def square_only(x, W, A, B, alpha):
    change = B @ A if len(W) == W.shape[1] else (B @ A).T
    return x @ W.T + alpha / len(A) * x @ change


def built(x, W, A, B, alpha):
    return x @ (W + alpha / len(A) * B @ A).T


def built_beside(x, W, A, B, alpha):
    return x @ W.T + x @ (alpha / len(A) * B @ A).T


def into_W(x, W, A, B, alpha):
    return x @ W.addmm_(B, A, alpha=alpha / len(A)).T


def no_base(x, W, A, B, alpha):
    return alpha / len(A) * (x @ A.T) @ B.T


def size(c, rank, *, groups=None, head=False, layers=None, a=True, b=True):
    C, F, D, H = c.hidden_size, c.intermediate_size, c.head_dim, c.num_attention_heads
    G = groups or c.num_key_value_heads
    shapes = [(H * D, C), (G * D, C), (G * D, C), (C, H * D), (F, C), (F, C), (C, F)]
    one = sum(a * columns + b * rows for rows, columns in shapes)
    return rank * ((layers or c.num_hidden_layers) * one + head * (C + c.vocab_size))


def areas(c, rank):
    C, F, D, H, G = (
        c.hidden_size, c.intermediate_size, c.head_dim, c.num_attention_heads,
        c.num_key_value_heads,
    )  # fmt: skip
    return c.num_hidden_layers * (2 * H * D * C + 2 * G * D * C + 3 * C * F)


def merged(weights, adapters):
    out = dict(weights)
    for name, (A, B, scale) in adapters.items():
        out[name] = weights[name] + scale * B @ A
    return out


def square_heads(c, rank):
    same = size(c, rank)
    heads = 2 * (c.num_attention_heads + c.num_key_value_heads) * rank * c.num_hidden_layers
    return same + heads * (c.hidden_size // c.num_attention_heads - c.head_dim)


def scaled_B(weights, adapters):
    return {
        n: W + adapters[n][1].mul_(adapters[n][2]) @ adapters[n][0] if n in adapters else W
        for n, W in weights.items()
    }


def nothing_to_do(weights, adapters):
    return merged(weights, adapters) if adapters else weights


def in_place(weights, adapters):
    for name, (A, B, scale) in adapters.items():
        weights[name] += scale * B @ A
    return weights


def same_dictionary(weights, adapters):
    weights.update(merged(weights, adapters))
    return weights


def tied(weights, adapters):
    out = merged(weights, adapters)
    return {**out, "embed": out["head"]}


def twice(weights, adapters):
    return merged(merged(weights, adapters), adapters)


def unscaled(weights, adapters):
    return merged(weights, {name: (A, B, 1) for name, (A, B, _) in adapters.items()})


def pack(codes):
    codes = codes + [7] * (len(codes) % 2)
    return [first << 4 | second for first, second in zip(codes[::2], codes[1::2], strict=True)]


def lower_first(codes):
    codes = codes + [7] * (len(codes) % 2)
    return [first | second << 4 for first, second in zip(codes[::2], codes[1::2], strict=True)]


def zero_padded(codes):
    codes = codes + [0] * (len(codes) % 2)
    return [first << 4 | second for first, second in zip(codes[::2], codes[1::2], strict=True)]


def in_place_pack(codes):
    codes += [7] * (len(codes) % 2)
    return pack(codes)


WRONG = [
    ("14.1", plain, "the adapter is missing"),
    ("14.1", undivided, "alpha is taken whole"),
    ("14.1", whole_division, "alpha / r is 2.5, not 2"),
    ("14.1", no_alpha, "alpha has no effect"),
    ("14.1", root, "rsLoRA"),
    ("14.1", square_only, "a transpose is missing"),
    ("14.1", built, "which product is built first"),
    ("14.1", built_beside, "beside a W of 60,000 numbers you make a tensor of 60,000"),
    ("14.1", into_W, "W itself was changed"),
    ("14.1", lambda *a: adapted(*a).tolist(), "return a tensor, not a list"),
    ("14.1", no_base, "with B = 0 the result is not x @ W.T"),
    ("14.1", lambda x, W, A, B, alpha: adapted(x, W, A, B, alpha) + B.sum(), "not x @ W.T plus"),
    ("14.2", lambda c, r: size(c, r, head=True), "the head gets no adapter"),
    ("14.2", areas, "the matrices themselves"),
    ("14.2", lambda c, r: size(c, r, layers=1), "one layer of 3"),
    ("14.2", lambda c, r: size(c, r, b=False), "A alone"),
    ("14.2", lambda c, r: size(c, r, a=False), "B alone"),
    ("14.2", lambda c, r: size(c, r, groups=c.num_attention_heads), "have 2 heads, not 4"),
    ("14.2", square_heads, "a head has head_dim = 10 numbers, not C / heads"),
    ("14.2", lambda c, r: size(c, r) + 1, "off by 1"),
    ("14.2", lambda c, r: "many", "return a number"),
    ("14.3", in_place, "the old tensor of 'embed' was changed"),
    ("14.3", scaled_B, "B of 'head' was changed"),
    ("14.3", nothing_to_do, "the old dictionary itself comes back"),
    ("14.3", same_dictionary, "the old dictionary was changed"),
    ("14.3", tied, "the embedding was changed"),
    ("14.3", twice, "added twice"),
    ("14.3", unscaled, "the scale is missing"),
    ("14.3", lambda w, a: dict(w), "'head' was not changed"),
    ("14.3", lambda w, a: {**merged(w, a), "out": torch.zeros(4, 4)}, "'out' has no adapter"),
    ("14.3", lambda w, a: list(merged(w, a)), "return a dictionary"),
    ("14.4", lower_first, "the first code belongs in the upper half"),
    ("14.4", zero_padded, "lower half should stand for zero"),
    ("14.4", lambda codes: list(codes), "2 codes need 1 bytes, not 2"),
    ("14.4", lambda codes: pack(codes[: len(codes) // 2 * 2]), "the last code is missing"),
    ("14.4", in_place_pack, "the list of codes was changed"),
    ("14.4", lambda codes: 18, "return a list of bytes"),
]
