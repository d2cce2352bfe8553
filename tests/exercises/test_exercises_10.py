"""The graders of notebook 10 accept right answers and say what is wrong with wrong ones."""

import copy

import torch


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


@torch.no_grad()
def complete(model, rows, count, *, slip=""):
    """Greedy ids for rows of different lengths; `slip` names one mistake."""
    width = max(map(len, rows))
    new = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    if slip == "right":
        new = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = mask.flip(1)
    mask = torch.ones_like(mask) if slip == "mask" else mask
    mask = (new != 0).long() if slip == "id 0" else mask
    cache, ids = None if slip == "no cache" else model.make_cache(batch_size=len(rows)), new
    for _ in range(count):
        logits = model(ids if slip == "no cache" else new, attention_mask=mask, cache=cache)[:, -1]
        new = (
            logits.argmin(-1, keepdim=True) if slip == "argmin" else logits.argmax(-1, keepdim=True)
        )
        mask = torch.cat([mask, torch.ones_like(new)], 1)
        ids = torch.cat([ids, new], 1)
    if slip == "short":
        return ids[:, width + 1 :].tolist()
    return (ids if slip == "whole rows" else ids[:, width:]).tolist()


def completing(slip):
    return lambda model, rows, count: complete(model, rows, count, slip=slip)


def complete_one_by_one(model, rows, count):
    return [complete(model, [row], count)[0] for row in rows]


def without_head(model, layer, head, *, slip=""):
    c = model.config
    model = model if slip == "in place" else copy.deepcopy(model)
    D = c.hidden_size // c.num_attention_heads if slip == "size" else c.head_dim
    a = model.model.layers[layer - (slip == "layer")].self_attn
    h = head - (slip == "head")
    kv = h // (c.num_attention_heads // c.num_key_value_heads)
    with torch.no_grad():
        if slip == "rows":
            a.o_proj.weight[h * D : (h + 1) * D] = 0
        elif slip == "queries":
            a.q_proj.weight[h * D : (h + 1) * D] = 0
        elif slip == "values":
            a.v_proj.weight[kv * D : (kv + 1) * D] = 0
        elif slip == "all":
            a.o_proj.weight.zero_()
        elif slip != "nothing":
            a.o_proj.weight[:, h * D : (h + 1) * D] = 0
    return a if slip == "attention" else model


def silencing(slip):
    return lambda model, layer, head: without_head(model, layer, head, slip=slip)


def forward(c, w, ids, *, mask=True, slip=""):
    """The whole model; `slip` names one mistake."""
    H, G, D, T = c.num_attention_heads, c.num_key_value_heads, c.head_dim, ids.shape[1]
    theta = (10000.0 if slip == "base" else c.rope_theta) ** (-torch.arange(0, D, 2) / D)
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
        eps = {"eps": 1e-6, "no eps": 0.0}.get(slip, c.rms_norm_eps)
        x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
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
        y = scores.softmax(-1) @ v[:, each]
        y = (y if slip == "merged" else y.transpose(1, 2)).reshape(len(ids), T, H * D)
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


RIGHT = {
    "10.1": count,
    "10.2": choose,
    "10.3": complete,
    "10.4": without_head,
    "10.5": forward,
}
WRONG = [
    ("10.1", count_as_mha, "only num_key_value_heads heads"),
    ("10.1", count_without_norms, "the norms have weights too"),
    ("10.1", count_head_twice, "shares the embedding's"),
    ("10.1", count_as_qwen3, "no norms on queries and keys"),
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
    ("10.2", lambda m, p, a: [1.0, 2.0, 0.5, 0.1], "an index from 0 to 3"),
    ("10.2", lambda m, p, a: choose(m, p, a, shift=0, mean=True), "both mistakes"),
    ("10.3", completing("mask"), "give attention_mask"),
    ("10.3", completing("id 0"), "not from ids != 0"),
    ("10.3", completing("right"), "pad on the left"),
    ("10.3", completing("argmin"), "the largest logit"),
    ("10.3", completing("whole rows"), "the new ids only"),
    ("10.3", completing("short"), "new ids for each of"),
    ("10.3", completing("no cache"), "use a cache"),
    ("10.3", complete_one_by_one, "all rows go through the model together"),
    ("10.4", silencing("rows"), "are columns, not rows"),
    ("10.4", silencing("queries"), "it still reads"),
    ("10.4", silencing("values"), "values are shared"),
    ("10.4", silencing("all"), "only one head"),
    ("10.4", silencing("size"), "need not be C / H"),
    ("10.4", silencing("head"), "heads are counted from 0"),
    ("10.4", silencing("layer"), "layers are counted from 0"),
    ("10.4", silencing("in place"), "work on a copy"),
    ("10.4", silencing("nothing"), "no head is silent"),
    ("10.5", lambda c, w, ids: forward(c, w, ids, mask=False), "mask the future"),
    ("10.5", slipping("last position"), "(B, T, V) = (3, 9, 40) are asked, not (3, 40)"),
    ("10.5", slipping("base"), "config.rope_theta"),
    ("10.5", slipping("eps"), "config.rms_norm_eps"),
    ("10.5", slipping("no eps"), "config.rms_norm_eps"),
    ("10.5", slipping("merged"), "change places"),
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


def test_other_right_answers_are_right():
    from minillm.exercises import grade

    as_tensor = grade("10.2", lambda m, p, a: torch.tensor(choose(m, p, a)))
    assert as_tensor.status == "correct", as_tensor.message
    as_ids = grade("10.3", lambda m, rows, count: torch.tensor(complete(m, rows, count)))
    assert as_ids.status == "correct", as_ids.message
