"""Wrong answers of 06: exercise, answer, words that its message holds."""

import math

import torch
import torch.nn.functional as F

PREDICTED = {
    "RMSNorm(3 x) equals RMSNorm(x)": True,
    "RMSNorm(x + 5) equals RMSNorm(x)": False,
    "LayerNorm(x + 5) equals LayerNorm(x)": True,
    "LayerNorm of a token changes with its neighbours": False,
    "if every branch gives 0, a pre-norm layer gives x": True,
    "if every branch gives 0, a post-norm layer gives x": False,
    "width for C = 96, multiple of 64": 256,
    "width for C = 100, multiple of 2": 266,
}


def rms_norm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def in_its_own_type(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def eps_outside(x, weight, eps):
    root = x.float().pow(2).mean(-1, keepdim=True).sqrt()
    return (x.float() / (root + eps)).to(x.dtype) * weight


def centred(x, weight, eps):
    return F.layer_norm(x.float(), x.shape[-1:], None, None, eps).to(x.dtype) * weight


def over_all_tokens(x, weight, eps):
    return F.rms_norm(x.float(), x.shape, None, eps).to(x.dtype) * weight


def over_places(x, weight, eps):
    wide = x.float()
    square = wide.pow(2).mean((1, 2), keepdim=True)
    return (wide * torch.rsqrt(square + eps)).to(x.dtype) * weight


def added_up(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype) * weight


def eps_to_the_sum(x, weight, eps):
    wide = x.float()
    mean = (wide.pow(2).sum(-1, keepdim=True) + eps) / x.shape[-1]
    return (wide * torch.rsqrt(mean)).to(x.dtype) * weight


def layer(x, attention, mlp, w1, w2, eps, norm=rms_norm):
    x = x + attention(norm(x, w1, eps))
    return x + mlp(norm(x, w2, eps))


def with_norm(norm):
    return lambda *arguments: layer(*arguments, norm=norm)


def post_norm_layer(x, attention, mlp, w1, w2, eps):
    x = rms_norm(x + attention(x), w1, eps)
    return rms_norm(x + mlp(x), w2, eps)


def side_by_side(x, attention, mlp, w1, w2, eps):
    return x + attention(rms_norm(x, w1, eps)) + mlp(rms_norm(x, w2, eps))


def on_the_copy(x, attention, mlp, w1, w2, eps):
    x = rms_norm(x, w1, eps)
    x = x + attention(x)
    x = rms_norm(x, w2, eps)
    return x + mlp(x)


def no_norms(x, attention, mlp, w1, w2, eps):
    x = x + attention(x)
    return x + mlp(x)


def bare_mlp(x, attention, mlp, w1, w2, eps):
    x = x + attention(rms_norm(x, w1, eps))
    return x + mlp(x)


def without_the_second_plus(x, attention, mlp, w1, w2, eps):
    x = x + attention(rms_norm(x, w1, eps))
    return mlp(rms_norm(x, w2, eps))


def without_any_plus(x, attention, mlp, w1, w2, eps):
    return mlp(rms_norm(attention(rms_norm(x, w1, eps)), w2, eps))


def mlp_first(x, attention, mlp, w1, w2, eps):
    return layer(x, mlp, attention, w2, w1, eps)


def norms_behind(x, attention, mlp, w1, w2, eps):
    x = x + rms_norm(attention(x), w1, eps)
    return x + rms_norm(mlp(x), w2, eps)


def in_place(x, attention, mlp, w1, w2, eps):
    x += attention(rms_norm(x, w1, eps))
    x += mlp(rms_norm(x, w2, eps))
    return x


def below(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def density(x):
    return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def derivative(x):
    return below(x) + x * density(x)


def by_autograd(x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(F.gelu(x).sum(), x)[0]


def by_backward(x):
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        F.gelu(x).sum().backward()
    return x.grad


def by_func_grad(x):
    return torch.func.grad(lambda x: F.gelu(x).sum())(x)


def by_differences(x, h=1e-5):
    return (F.gelu(x + h) - F.gelu(x - h)) / (2 * h)


def by_five_points(x, h=1e-3):
    g = F.gelu
    return (g(x - 2 * h) - 8 * g(x - h) + 8 * g(x + h) - g(x + 2 * h)) / (12 * h)


def tanh_derivative(x):
    c, a = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (x + a * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * a * x * x)


def count(config, *, norms=1, last=1, all_heads=False, matrices=3, tie=None, qkv=None, o=None):
    C, L = config["hidden_size"], config["num_hidden_layers"]
    H = config["num_attention_heads"]
    G = H if all_heads else config["num_key_value_heads"]
    read = C + 2 * G * (C // H)
    qwen = config["model_type"] == "qwen2"
    qkv = (qwen or config.get("attention_bias", False)) if qkv is None else qkv
    o = (not qwen and config.get("attention_bias", False)) if o is None else o(config)
    layer = C * read + C * C + read * qkv + C * o + matrices * C * config["intermediate_size"]
    tie = config["tie_word_embeddings"] if tie is None else tie
    tables = config["vocab_size"] * C * (1 if tie else 2)
    return tables + L * (layer + 2 * C * norms) + C * last


def count_of_the_page(config):
    C, layers = config["hidden_size"], config["num_hidden_layers"]
    layer = 4 * C * C + 3 * C * config["intermediate_size"] + 2 * C
    return 2 * config["vocab_size"] * C + layers * layer + C


def sort_in_six():
    up = torch.tensor([[1.0, -1, 0, 0, 1, -1], [0, 0, 1, -1, -1, 1]])
    # a, -a, b, -b, a - b, b - a: max = b + relu(a - b), min = a - relu(a - b)
    down = torch.tensor([[0.0, 1], [0, -1], [1, 0], [-1, 0], [1, -1], [0, 0]])
    return up, down


def only_positive():
    up = torch.tensor([[0.0, 1, 1], [1, 0, -1]])
    return up, torch.tensor([[1.0, 0], [0, 1], [1, -1]])


WRONG = [
    ("06.1", with_norm(in_its_own_type), "take the mean square in float32"),
    ("06.1", with_norm(lambda x, w, e: rms_norm(x.float(), w, e)), "cast the norm's result back"),
    ("06.1", with_norm(eps_outside), "eps belongs under the root"),
    ("06.1", with_norm(centred), "you subtract the mean"),
    ("06.1", with_norm(lambda x, w, e: rms_norm(x, torch.ones_like(w), e)), "weights of the norms"),
    ("06.1", with_norm(over_all_tokens), "a mean square of its own"),
    ("06.1", with_norm(added_up), "averaged, not added up"),
    ("06.1", with_norm(eps_to_the_sum), "not to their sum"),
    ("06.1", with_norm(lambda x, w, e: rms_norm(x, w, 0)), "eps is missing"),
    ("06.1", with_norm(lambda x, w, e: rms_norm(x, w, 1e-6)), "use the eps that is given"),
    ("06.1", without_any_plus, "the results replace the stream"),
    ("06.1", mlp_first, "attention comes first"),
    ("06.1", norms_behind, "the norms stand behind the branches"),
    ("06.1", lambda *a: layer(*a).double(), "should give a float32 output"),
    ("06.1", lambda *a: layer(*a)[:, :1], "the shape (2, 3, 8) became (2, 1, 8)"),
    ("06.1", post_norm_layer, "that is post-norm"),
    ("06.1", side_by_side, "both branches read the first x"),
    ("06.1", on_the_copy, "add to the stream itself"),
    ("06.1", no_norms, "there are no norms"),
    ("06.1", bare_mlp, "mlp reads the stream without a norm"),
    ("06.1", without_the_second_plus, "returned alone"),
    ("06.1", in_place, "x itself has changed"),
    ("06.1", with_norm(over_places), "that of its whole row"),
    ("06.1", lambda x, f, g, a, b, e: layer(x, f, g, b, a, e), "are swapped"),
    ("06.1", lambda x, f, g, a, b, e: layer(x, f, g, a, a, e), "both norms use weight1"),
    ("06.1", lambda *a: layer(*a) * 1.1, "the output begins"),
    ("06.2", {**PREDICTED, "RMSNorm(x + 5) equals RMSNorm(x)": True}, "subtract anything"),
    (
        "06.2",
        {**PREDICTED, "if every branch gives 0, a post-norm layer gives x": True},
        "where does its norm stand",
    ),
    ("06.2", {**PREDICTED, "width for C = 96, multiple of 64": 320}, "which multiples of 64"),
    (
        "06.2",
        {**PREDICTED, "width for C = 100, multiple of 2": 268},
        "cut it to a whole number first",
    ),
    ("06.2", {**PREDICTED, "width for C = 100, multiple of 2": 266.0}, "a whole number (int)"),
    ("06.2", {**PREDICTED, "RMSNorm(3 x) equals RMSNorm(x)": ...}, "not filled in yet"),
    ("06.2", {**PREDICTED, "RMSNorm(3 x) equals RMSNorm(x)": "yes"}, "write True or False"),
    ("06.2", [True] * 8, "a dictionary"),
    ("06.3", by_autograd, "autograd is switched off"),
    ("06.3", by_backward, "autograd is switched off"),
    ("06.3", by_func_grad, "autograd is switched off"),
    ("06.3", by_differences, "a small difference"),
    ("06.3", by_five_points, "a small difference"),
    ("06.3", lambda x: below(x) + x * 0.39894 * torch.exp(-x * x / 2), "a rounded constant"),
    ("06.3", below, "only the first term"),
    ("06.3", lambda x: below(x) + density(x), "to be multiplied by x"),
    ("06.3", lambda x: below(x) - x * density(x), "added, not subtracted"),
    ("06.3", lambda x: below(x) + x * torch.exp(-x * x / 2), "factor 1 / sqrt(2 pi)"),
    ("06.3", F.gelu, "GELU itself"),
    ("06.3", tanh_derivative, "one of GELU's approximations"),
    ("06.3", lambda x: derivative(x.float()), "your slopes are float32"),
    ("06.3", lambda x: (x > 0).double(), "at x = "),
    ("06.3", lambda x: derivative(x).sum(), "as many slopes"),
    ("06.3", lambda x: derivative(x).tolist(), "return a tensor of slopes, not a list"),
    ("06.4", count_of_the_page, "Llama-3.1-8B: k and v have fewer heads than q"),
    ("06.4", lambda c: count(c, norms=0, last=0), "the norms are missing"),
    ("06.4", lambda c: count(c, last=0), "one norm is missing"),
    ("06.4", lambda c: count(c, tie=True), "two matrices unless they are tied"),
    ("06.4", lambda c: count(c, tie=False), "Qwen2.5-0.5B: embedding and head are tied here"),
    ("06.4", lambda c: count(c, all_heads=True), "fewer heads than q"),
    ("06.4", lambda c: count(c, matrices=2), "three matrices, not two"),
    ("06.4", lambda c: count(c, qkv=False), "Qwen2 always has biases on q, k and v"),
    ("06.4", lambda c: count(c, qkv=False, tie=False), "(and something else)"),
    ("06.4", lambda c: count(c, o=lambda c: False), "in a Llama, o has a bias too"),
    ("06.4", lambda c: count(c, o=lambda c: c["model_type"] == "qwen2"), "no bias in Qwen2"),
    ("06.4", lambda c: count(c, qkv=True), "Llama-2-7B: there are no biases in this model"),
    ("06.4", lambda c: count(c) + 7, "6,738,415,616 parameters, you count 6,738,415,623"),
    ("06.4", lambda c: count(c) + 0.5, "a count is a whole number"),
    ("06.5", only_positive, "right while both numbers are positive"),
    (
        "06.5",
        lambda: (sort_in_six()[0], sort_in_six()[1].flip(1)),
        "the smaller number comes first",
    ),
    ("06.5", lambda: (torch.ones(2, 9), torch.ones(9, 2)), "9 hidden units: at most 8"),
    ("06.5", lambda: (torch.ones(3, 2), torch.ones(2, 3)), "expected (2, F) and (F, 2)"),
    ("06.5", lambda: (torch.ones(2, 3), torch.ones(4, 2)), "up makes 3 numbers, down takes 4"),
    ("06.5", lambda: (torch.eye(2), torch.eye(2)), "(1, 3) should give (3, 1)"),
    ("06.5", lambda: torch.ones(3), "two matrices"),
    ("06.5", lambda: (sort_in_six()[0], torch.full((6, 2), math.nan)), "not finite"),
]
