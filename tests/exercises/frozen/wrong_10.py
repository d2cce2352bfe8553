"""Wrong answers of 10: exercise, answer, words that its message holds."""

import math

import torch
from torch import nn


def count(c, *, kv_heads=None, norms=True, head=True):
    V, C, L, F = c.vocab_size, c.hidden_size, c.num_hidden_layers, c.intermediate_size
    H, G, D = c.num_attention_heads, kv_heads or c.num_key_value_heads, c.head_dim
    layer = 2 * C * H * D + 2 * C * G * D + 3 * C * F + (2 * C if norms else 0)
    last = 0 if c.tie_word_embeddings and head else V * C
    return V * C + L * layer + (C if norms else 0) + last


def count_as_mha(c):
    return count(c, kv_heads=c.num_attention_heads)


def count_without_norms(c):
    return count(c, norms=False)


def count_as_qwen3(c):
    return count(c) + 2 * c.num_hidden_layers * c.head_dim


def count_head_twice(c):
    return count(c, head=False)


def choose(model, prompt, answers, *, shift=1, mean=False, first=False):
    scores = []
    for answer in answers:
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logs = model(ids)[0].log_softmax(-1)
        end = len(prompt) + 1 if first else ids.shape[1]
        found = [logs[t - shift, ids[0, t]].item() for t in range(len(prompt), end)]
        scores.append(sum(found) / (len(found) if mean else 1))
    return scores.index(max(scores))


def no_repeats(n, *, whole=False, inplace=False, tail=False):
    def sampler(logits, previous):
        logits = logits if inplace else logits.clone()
        for scores, row in zip(logits, previous.tolist(), strict=True):
            seen = {}
            for i in range(len(row) - n + 1):
                seen.setdefault(tuple(row[i : i + n - 1]), set()).add(row[i + n - 1])
            last = row[-(n - 1) :] if tail else row[len(row) - n + 1 :]
            banned = set(row) if whole else seen.get(tuple(last), set())
            for token in banned if len(banned) < len(scores) else ():
                scores[token] = -math.inf
        return logits.argmax(-1)

    return sampler


class Lora(nn.Module):
    def __init__(
        self,
        linear,
        rank,
        alpha,
        *,
        frozen=True,
        scaled=True,
        zero_a=False,
        random_b=False,
        one_b=False,
        cut=False,
    ):
        super().__init__()
        self.linear, self.cut = linear.requires_grad_(not frozen and not cut), cut
        self.scale = alpha / rank if scaled else 1.0
        size = 0.0 if zero_a else linear.in_features**-0.5
        self.a = nn.Parameter(size * torch.randn(rank, linear.in_features))
        self.b = nn.Parameter(torch.full((linear.out_features, rank), 1.0 if one_b else 0.0))
        if random_b:
            nn.init.normal_(self.b)

    def forward(self, x):
        with torch.set_grad_enabled(not self.cut):
            y = self.linear(x)
        return y + self.scale * (x @ self.a.T @ self.b.T)


def forward(c, w, ids, *, mask=True, slip=""):
    """The whole model; `slip` names one mistake."""
    H, G, D, T = c.num_attention_heads, c.num_key_value_heads, c.head_dim, ids.shape[1]
    theta = c.rope_theta ** (-torch.arange(0, D, 2) / D)
    angles = torch.arange(T)[:, None] * theta

    def turn(x):
        if slip == "rotation":
            return x
        if slip == "interleaved":
            a, b = x[..., ::2], x[..., 1::2]
        else:
            a, b = x.chunk(2, -1)
        halves = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
        if slip == "interleaved":
            return torch.stack(halves, -1).flatten(-2)
        return torch.cat(halves, -1)

    def norm(x, weight):
        x = x - x.mean(-1, keepdim=True) if slip == "centred" else x
        x = x / (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).sqrt()
        return x if slip == "norm weights" else x * weight

    x = w["model.embed_tokens.weight"][ids]
    for i in range(c.num_hidden_layers):
        part = {n.split(f"layers.{i}.")[1]: p for n, p in w.items() if f"layers.{i}." in n}
        y = norm(x, part["input_layernorm.weight"])
        q, k, v = (y @ part[f"self_attn.{n}_proj.weight"].T for n in "qkv")
        q, k, v = (z.unflatten(-1, (-1, D)).transpose(1, 2) for z in (q, k, v))
        q, k = turn(q), turn(k)
        each = torch.arange(H) % G if slip == "tiled" else torch.arange(H) // (H // G)
        scores = q @ k[:, each].mT / {"unscaled": 1, "C": c.hidden_size**0.5}.get(slip, D**0.5)
        if mask:
            scores = scores + torch.full((T, T), -torch.inf).triu(1)
        y = (scores.softmax(-1) @ v[:, each]).transpose(1, 2).flatten(2)
        y = y @ part["self_attn.o_proj.weight"].T
        x = y if slip == "residual" else x + y
        y = x if slip == "second norm" else norm(x, part["post_attention_layernorm.weight"])
        gate, up = (y @ part[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        gate, up = (up, gate) if slip == "swapped" else (gate, up)
        x = x + (gate * gate.sigmoid() * up) @ part["mlp.down_proj.weight"].T
    x = x if slip == "last norm" else norm(x, w["model.norm.weight"])
    if slip == "last position":
        x = x[:, -1]
    return x @ w["model.embed_tokens.weight" if slip == "tied" else "lm_head.weight"].T


def slipping(slip):
    return lambda c, w, ids: forward(c, w, ids, slip=slip)


WRONG = [
    ("10.1", count_as_mha, "only num_key_value_heads heads"),
    ("10.1", count_without_norms, "the norms have weights too"),
    ("10.1", count_head_twice, "shares the embedding's"),
    ("10.1", count_as_qwen3, "no norms on queries and keys"),
    ("10.1", lambda c: 12, "12 instead of"),
    ("10.2", lambda m, p, a: choose(m, p, a, shift=0), "read one place earlier"),
    ("10.2", lambda m, p, a: choose(m, p, a, mean=True), "prefers long answers"),
    ("10.2", lambda m, p, a: choose(m, p, a, first=True), "not only the first"),
    ("10.2", lambda m, p, a: choose(m, p, [x[:1] for x in a]), "not only the first"),
    ("10.2", lambda m, p, a: 7, "an index from 0 to 3"),
    ("10.2", lambda m, p, a: [1.0, 2.0, 0.5, 0.1], "an index from 0 to 3"),
    ("10.2", lambda m, p, a: choose(m, p, a, shift=0, mean=True), "both mistakes"),
    ("10.3", lambda n: lambda logits, previous: logits.argmax(-1), "for the second time"),
    ("10.3", lambda n: no_repeats(n, whole=True), "is not the best allowed one"),
    ("10.3", lambda n: no_repeats(n, inplace=True), "work on a copy"),
    ("10.3", lambda n: no_repeats(n, tail=True), "the whole row at n = 1"),
    ("10.4", lambda *a: Lora(*a, frozen=False), "still trains"),
    ("10.4", lambda *a: Lora(*a, scaled=False), "not scaled"),
    ("10.4", lambda *a: Lora(*a, zero_a=True), "neither ever gets a gradient"),
    ("10.4", lambda *a: Lora(*a, one_b=True), "B begins at zero"),
    ("10.4", lambda *a: Lora(*a, cut=True), "no gradient passes through linear(x)"),
    ("10.5", lambda c, w, ids: forward(c, w, ids, mask=False), "mask the future"),
    ("10.5", slipping("last position"), "(B, T, V) = (3, 9, 40) are asked, not (3, 40)"),
    ("10.5", slipping("last norm"), "before the head, is missing"),
    ("10.5", slipping("second norm"), "reads x without a norm"),
    ("10.5", slipping("norm weights"), "multiplies by its weight"),
    ("10.5", slipping("centred"), "does not take the mean away"),
    ("10.5", slipping("rotation"), "turn by their positions"),
    ("10.5", slipping("interleaved"), "half-split"),
    ("10.5", slipping("unscaled"), "the square root of D (03)"),
    ("10.5", slipping("C"), "not of C"),
    ("10.5", slipping("tiled"), "do not tile them"),
    ("10.5", slipping("residual"), "does not replace it"),
    ("10.5", slipping("swapped"), "silu goes over the gate"),
    ("10.5", slipping("tied"), "a matrix of its own"),
    ("10.5", lambda c, w, ids: 2 * forward(c, w, ids), "the logits differ by up to"),
]
