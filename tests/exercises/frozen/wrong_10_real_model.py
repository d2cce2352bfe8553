"""Wrong answers of 10_real_model: exercise, answer, words that its message holds."""

import torch

SIZES = {
    "bytes in the cache for one token, float32": 81_920,
    "the same with a key head for each query head": 245_760,
    "bytes in the cache for one token, bfloat16": 40_960,
    "bytes of the layers' matrices in Q4_1": 196_608_000,
    "tokens at which a bfloat16 cache has as many bytes as these matrices": 4_800,
}

CACHE, ALL_HEADS, HALF, MATRICES, TOKENS = SIZES

PREDICTED = {CACHE: 81_920, ALL_HEADS: 245_760, HALF: 40_960, MATRICES: 196_608_000, TOKENS: 4_800}


def places(states, g, embedding, token):
    x = states / (states.square().mean(-1, keepdim=True) + 1e-5).sqrt() * g
    order = (x @ embedding.T).argsort(-1, descending=True)
    return [row.tolist().index(token) for row in order]


def without_weight(states, g, embedding, token):
    return places(states, torch.ones_like(g), embedding, token)


def from_one(states, g, embedding, token):
    return [place + 1 for place in places(states, g, embedding, token)]


def from_below(states, g, embedding, token):
    return [len(embedding) - 1 - place for place in places(states, g, embedding, token)]


def divided(states, g, embedding, token):
    return places(states, 1 / g, embedding, token)


def last_only(states, g, embedding, token):
    return places(states[-1:], g, embedding, token)


def other_token(states, g, embedding, token):
    return places(states, g, embedding, token - 1)


def induction(weights, n):
    L, H = weights.shape[:2]
    found = torch.zeros(L, H)
    for t in range(n, 2 * n):
        found += weights[:, :, t, t - n + 1] / n
    return found


def diagonal(shift, first=0):
    def score(weights, n):
        return weights.diagonal(shift - n, dim1=-2, dim2=-1)[..., first:].mean(-1)

    return score


def q4_0(weight, block=32):
    blocks = weight.reshape(len(weight), -1, block)
    best = blocks.abs().argmax(-1, keepdim=True)
    d = blocks.gather(-1, best) / -8
    q = torch.floor(blocks / torch.where(d == 0, 1, d) + 8.5).clamp(max=15) - 8
    return (q * d).reshape(weight.shape)


def seventeen_levels(weight, block=32):
    blocks = weight.reshape(len(weight), -1, block)
    d = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    return ((blocks / torch.where(d == 0, 1, d)).round() * d).reshape(weight.shape)


def without_sign(weight, block=32, steps=8):
    blocks = weight.reshape(len(weight), -1, block)
    d = blocks.abs().amax(-1, keepdim=True) / steps
    q = (blocks / torch.where(d == 0, 1, d)).round().clamp(-8, 7)
    return (q * d).reshape(weight.shape)


def seven_steps(weight, block=32):
    blocks = weight.reshape(len(weight), -1, block)
    d = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -7
    return ((blocks / torch.where(d == 0, 1, d)).round().clamp(-8, 7) * d).reshape(weight.shape)


def not_a_number(weight, block=32):
    blocks = weight.reshape(len(weight), -1, block)
    d = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    return ((blocks / d).round().clamp(-8, 7) * d).reshape(weight.shape)


def in_place(weight, block=32):
    return weight.copy_(q4_0(weight, block))


WRONG = [
    ("10_real_model.1", without_weight, "g is missing"),
    ("10_real_model.1", from_one, "place 0, not 1"),
    ("10_real_model.1", from_below, "not the lowest"),
    ("10_real_model.1", divided, "does not divide"),
    ("10_real_model.1", last_only, "5 streams to read"),
    ("10_real_model.1", other_token, "should be"),
    ("10_real_model.2", {**PREDICTED, CACHE: 40_960}, "which factor is missing"),
    ("10_real_model.2", {**PREDICTED, ALL_HEADS: 81_920}, "how many times"),
    ("10_real_model.2", {**PREDICTED, HALF: 81_920}, "bytes has a number in bfloat16"),
    ("10_real_model.2", {**PREDICTED, MATRICES: 157_286_400}, "two numbers of 16 bits"),
    ("10_real_model.2", {**PREDICTED, TOKENS: 2_400}, "divide"),
    ("10_real_model.2", {**PREDICTED, TOKENS: ...}, "not filled in"),
    ("10_real_model.2", {**PREDICTED, CACHE: 8.192e4}, "write a whole number"),
    ("10_real_model.2", [81_920], "a dictionary"),
    ("10_real_model.3", diagonal(0), "the same token"),
    ("10_real_model.3", diagonal(-1), "one place too far"),
    ("10_real_model.3", diagonal(1), "last query of the first half"),
    ("10_real_model.3", lambda weights, n: n * induction(weights, n), "asked is the mean"),
    ("10_real_model.3", lambda weights, n: induction(weights, n)[0], "the scores should be"),
    ("10_real_model.3", lambda weights, n: weights[..., -1, 1], "off by"),
    ("10_real_model.4", seventeen_levels, "no number beyond 7"),
    ("10_real_model.4", without_sign, "the step has a sign"),
    ("10_real_model.4", seven_steps, "not -7"),
    ("10_real_model.4", not_a_number, "NaN"),
    ("10_real_model.4", in_place, "changes the weight"),
    ("10_real_model.4", lambda weight, block: q4_0(weight, weight.shape[1]), "the whole row"),
    ("10_real_model.4", lambda weight, block: 1.01 * q4_0(weight, block), "off by"),
    ("10_real_model.4", lambda weight, block: weight.flatten(), "the result should be"),
]
