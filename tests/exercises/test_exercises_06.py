"""The graders of notebook 06 accept the solutions and say what is wrong with wrong answers."""

import math

import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps):
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight


def rms_norm_in_its_own_type(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rms_norm_eps_outside(x, weight, eps):
    root = x.float().pow(2).mean(-1, keepdim=True).sqrt()
    return (x.float() / (root + eps)).to(x.dtype) * weight


def layer_norm(x, weight, eps):
    return F.layer_norm(x.float(), x.shape[-1:], None, None, eps).to(x.dtype) * weight


def below(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def density(x):
    return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def tanh_derivative(x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(F.gelu(x, approximate="tanh").sum(), x)[0]


def count(config, *, norms=1, last=1, heads=None, matrices=3, tie=None, bias=None):
    C, L = config["hidden_size"], config["num_hidden_layers"]
    G = heads or config["num_key_value_heads"]
    if heads == "all":
        G = config["num_attention_heads"]
    read = C + 2 * G * (C // config["num_attention_heads"])
    bias = config["attention_bias"] if bias is None else bias
    layer = C * read + C * C + read * bias + matrices * C * config["intermediate_size"]
    tie = config["tie_word_embeddings"] if tie is None else tie
    tables = config["vocab_size"] * C * (1 if tie else 2)
    return tables + L * (layer + 2 * C * norms) + C * last


RIGHT = {
    "06.1": rms_norm,
    "06.2": lambda C, m: math.ceil(8 * C // 3 / m) * m,
    "06.3": lambda x: below(x) + x * density(x),
    "06.4": count,
}
WRONG = [
    ("06.1", rms_norm_in_its_own_type, "take the mean square in float32"),
    ("06.1", rms_norm_eps_outside, "eps belongs under the root"),
    ("06.1", layer_norm, "you subtract the mean"),
    ("06.1", lambda x, w, eps: rms_norm(x, torch.ones_like(w), eps), "the weight is missing"),
    ("06.1", lambda x, w, eps: rms_norm(x, w, eps).double(), "should give a float32 output"),
    ("06.1", lambda x, w, eps: rms_norm(x, w, eps)[..., :1], "the shape (2, 3, 8) became"),
    ("06.1", lambda x, w, eps: x * w, "a float32 vector comes out"),
    ("06.2", lambda C, m: 8 * C // 3 // m * m, "is rounded down"),
    ("06.2", lambda C, m: math.ceil(4 * C / m) * m, "three matrices want two thirds"),
    ("06.2", lambda C, m: (8 * C // 3 // m + 1) * m, "is a multiple already"),
    ("06.2", lambda C, m: math.ceil(8 * C // 3 / m) * float(m), "a whole number (int)"),
    ("06.2", lambda C, m: 8 * C // 3, "expected 11008, got 10922"),
    ("06.3", below, "only the first term"),
    ("06.3", lambda x: below(x) + density(x), "to be multiplied by x"),
    ("06.3", lambda x: below(x) + x * torch.exp(-x * x / 2), "factor 1 / sqrt(2 pi)"),
    ("06.3", F.gelu, "GELU itself"),
    ("06.3", tanh_derivative, "one of GELU's approximations"),
    ("06.3", lambda x: (x > 0).double(), "at x = "),
    ("06.3", lambda x: x.sum(), "as many slopes"),
    ("06.4", lambda c: count(c, norms=0, last=0), "the norms are missing"),
    ("06.4", lambda c: count(c, last=0), "one norm is missing"),
    ("06.4", lambda c: count(c, tie=True), "two matrices unless they are tied"),
    ("06.4", lambda c: count(c, tie=False), "tied here: count them once"),
    ("06.4", lambda c: count(c, heads="all"), "fewer heads than q"),
    ("06.4", lambda c: count(c, matrices=2), "three matrices, not two"),
    ("06.4", lambda c: count(c, bias=False), "have biases here"),
    ("06.4", lambda c: 8_000_000_000, "has 8,030,261,248 parameters, you count 8,000,000,000"),
]
