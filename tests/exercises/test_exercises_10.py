"""The graders of notebook 10 accept right answers and say what is wrong with wrong ones."""

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


def no_repeats(n, *, whole=False, inplace=False):
    def sampler(logits, previous):
        logits = logits if inplace else logits.clone()
        for scores, row in zip(logits, previous.tolist(), strict=True):
            seen = {}
            for i in range(len(row) - n + 1):
                seen.setdefault(tuple(row[i : i + n - 1]), set()).add(row[i + n - 1])
            banned = set(row) if whole else seen.get(tuple(row[len(row) - n + 1 :]), set())
            for token in banned if len(banned) < len(scores) else ():
                scores[token] = -math.inf
        return logits.argmax(-1)

    return sampler


class Lora(nn.Module):
    def __init__(self, linear, rank, alpha, *, frozen=True, scaled=True, zero_a=False, one_b=False):
        super().__init__()
        self.linear = linear.requires_grad_(not frozen)
        self.scale = alpha / rank if scaled else 1.0
        size = 0.0 if zero_a else linear.in_features**-0.5
        self.a = nn.Parameter(size * torch.randn(rank, linear.in_features))
        self.b = nn.Parameter(torch.full((linear.out_features, rank), 1.0 if one_b else 0.0))

    def forward(self, x):
        return self.linear(x) + self.scale * (x @ self.a.T @ self.b.T)


RIGHT = {"10.1": count, "10.2": choose, "10.3": no_repeats, "10.4": Lora}
WRONG = [
    ("10.1", count_as_mha, "only num_key_value_heads heads"),
    ("10.1", count_without_norms, "the norms have weights too"),
    ("10.1", count_head_twice, "shares the embedding's"),
    ("10.1", lambda c: 12, "12 instead of"),
    ("10.2", lambda m, p, a: choose(m, p, a, shift=0), "read one place earlier"),
    ("10.2", lambda m, p, a: choose(m, p, a, mean=True), "prefers long answers"),
    ("10.2", lambda m, p, a: choose(m, p, a, first=True), "not only the first"),
    (
        "10.2",
        lambda m, p, a: choose(m, p, [x[:1] for x in a]),
        "not only the first",
    ),  # other digits
    ("10.2", lambda m, p, a: 7, "an index from 0 to 3"),
    ("10.3", lambda n: lambda logits, previous: logits.argmax(-1), "for the second time"),
    ("10.3", lambda n: no_repeats(n, whole=True), "is not the best allowed one"),
    ("10.3", lambda n: no_repeats(n, inplace=True), "work on a copy"),
    ("10.4", lambda *a: Lora(*a, frozen=False), "still trains"),
    ("10.4", lambda *a: Lora(*a, scaled=False), "not scaled"),
    ("10.4", lambda *a: Lora(*a, zero_a=True), "neither ever gets a gradient"),
    ("10.4", lambda *a: Lora(*a, one_b=True), "B begins at zero"),
]
