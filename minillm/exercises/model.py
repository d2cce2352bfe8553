"""Graders of notebook 10: parameters, choosing answers, many rows, a silent head, the model."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.deeper.attention.rope_scaling import RotaryEmbedding
from minillm.exercises import check_values, exercise
from minillm.model import CausalLM

_SHAPES: tuple[tuple[int, int, int, int, int, dict[str, Any]], ...] = (  # V, C, layers, H, F, more
    (100, 32, 1, 4, 48, {}),
    (100, 32, 3, 4, 48, {"num_key_value_heads": 1}),
    (1000, 48, 2, 6, 40, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    (77, 64, 2, 8, 96, {"head_dim": 16, "num_key_value_heads": 4}),
)


@exercise(
    "10.1",
    "go through the layer drawn at the head of the page, one matrix after the other, and do not "
    "forget the norms",
    "a model's size follows from its config: most of it is L times what attention and "
    "feed-forward hold",
)
def _count(answer: Callable[[ModelConfig], int]) -> str | None:
    for V, C, L, H, F, more in _SHAPES:
        c = ModelConfig(V, C, L, H, F, **more)
        with torch.device("meta"):
            right = CausalLM(c).num_parameters()
        found, G, D = answer(c), c.num_key_value_heads, c.head_dim
        off = {
            "k_proj and v_proj have only num_key_value_heads heads": 2 * L * C * D * (H - G),
            "the norms have weights too, two a layer and one at the end": -2 * L * C - C,
            "the last norm is missing": -C,
            "the two norms of each layer are missing": -2 * L * C,
            "tie_word_embeddings decides whether the head has a matrix of its own or shares the "
            "embedding's": V * C if c.tie_word_embeddings else -V * C,
            "a Llama has no norms on queries and keys": 2 * L * D,
            "a gated block has three matrices: gate, up and down": -L * C * F,
        }
        slips = {why: right + amount for why, amount in off.items()}
        said = f"count part by part, with {V=}, layers={L}, {F=}"
        if D * H != C:
            said = f"a head has head_dim={D}, not C / H, numbers"
        if why := check_values(found, right, slips, near=0, otherwise=said):
            return f"{found} instead of {right} for {C=}, {H=}, {G=}: {why}"
    return None


def _toy(vocab_size: int = 40, seed: int = 0) -> CausalLM:
    """A small untrained model with strong opinions."""
    config = ModelConfig(vocab_size, 24, 2, 4, 40, num_key_value_heads=2, initializer_range=0.4)
    return CausalLM(config, seed=seed).eval()


@torch.no_grad()
def _continuation(model: CausalLM, prompt: list[int], answer: list[int], shift: int = 1) -> float:
    """Log-probability of `answer` after `prompt`; another shift makes the popular mistake."""
    ids = torch.tensor([prompt + answer])
    places = torch.arange(len(prompt), ids.shape[1])
    logs = model(ids)[0].log_softmax(-1)
    return float(logs[places - shift, ids[0, places]].sum())


def _is_best(choice: int, values: list[float]) -> bool:
    """Whether no other value is larger, but for the last digits, which differ from CPU to CPU."""
    return values[choice] > max(values) - 1e-4


@exercise(
    "10.2",
    "which token do the logits at position t speak about, and is the probability of a whole answer "
    "a mean or a product?",
    "the logits at t speak about token t + 1, and how probable an answer is is a sum of logs",
)
def _choose(answer: Callable[[CausalLM, list[int], list[list[int]]], int]) -> str | None:
    generator = torch.Generator().manual_seed(7)
    model = _toy()
    missed = {"both": 0, "shift": 0, "mean": 0, "prefix": 0, "all": 0}
    for _ in range(30):
        draw = lambda n: torch.randint(40, (n,), generator=generator).tolist()  # noqa: E731
        prompt, answers = draw(5), [draw(n) for n in (2, 3, 5, 3)]
        scores = [_continuation(model, prompt, a) for a in answers]
        found = answer(model, list(prompt), [list(a) for a in answers])
        try:
            found = operator.index(found)
        except TypeError:
            return f"an index from 0 to 3 is asked, not {found!r}"
        if not 0 <= found < 4:
            return f"an index from 0 to 3 is asked, not {found}"
        shifted = [_continuation(model, prompt, a, shift=0) for a in answers]
        means = [s / len(a) for s, a in zip(scores, answers, strict=True)]
        both = [s / len(a) for s, a in zip(shifted, answers, strict=True)]
        firsts = [_continuation(model, prompt, a[:1]) for a in answers]
        if not _is_best(found, scores):
            missed["both"] += _is_best(found, both)
            missed["shift"] += _is_best(found, shifted)
            missed["mean"] += _is_best(found, means)
            missed["prefix"] += _is_best(found, firsts)
            missed["all"] += 1
    if not missed["all"]:
        return None
    reasons = {
        "both": "both mistakes are still there",
        "shift": "the logits at a position speak about the next token: read one place earlier",
        "mean": "a mean per token is another convention, which prefers long answers; the most "
        "probable answer has the largest sum of log-probabilities",
        "prefix": "all tokens of an answer count, not only the first",
    }
    for kind, reason in reasons.items():
        if missed[kind] == missed["all"]:
            return f"{missed['all']} of 30 choices are wrong: {reason}"
    return f"{missed['all']} of 30 choices are wrong: sum log p(token | all before it) per answer"


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of ids with padding on the left, and the mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


@torch.no_grad()
def _complete(model: CausalLM, rows: list[list[int]], count: int, slip: str = "") -> Any:
    """The next ids of each row, right or with one popular mistake."""
    ids, mask = _padded(rows)
    if slip == "right":
        width = ids.shape[1]
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = mask.flip(1)
    if slip in ("mask", "right, no mask"):
        mask = torch.ones_like(mask)
    if slip == "zeros":
        mask = (ids != 0).long()
    start = 0 if slip == "whole rows" else ids.shape[1]
    for _ in range(count):
        last = model(ids, attention_mask=mask)[:, -1]
        new = last.argmin(-1) if slip == "argmin" else last.argmax(-1)
        ids = torch.cat([ids, new[:, None]], 1)
        mask = torch.cat([mask, torch.ones_like(new)[:, None]], 1)
    return ids[:, start:].tolist()


# What a mistake gives, and what is said about it.
COMPLETIONS = {
    "mask": "padding is read as if it were text: give attention_mask, 0 where padding stands",
    "zeros": "0 is also the id of a token: make the mask from the rows' lengths, not from ids != 0",
    "right": "pad on the left: the last column must hold each row's own last id",
    "whole rows": "the new ids only, without the prompt and its padding",
    "argmin": "the id with the largest logit is the most probable one",
}


@exercise(
    "10.3",
    "what stands in the last column of every row, what does the mask say, and what is fed once the "
    "cache holds the rest?",
    "left padding, a mask that grows, and a cache: that is generate",
)
def _completes(answer: Callable[[CausalLM, list[list[int]], int], Any]) -> str | None:
    model, passes = _toy(), []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        passes.append((args[0] if args else kwargs["input_ids"]).shape)

    model.register_forward_pre_hook(note, with_kwargs=True)
    for rows, count in (([[3, 7, 9, 4]], 5), ([[0, 9], [8, 3, 0, 21, 6], [17]], 7)):
        wanted, width = _complete(model, rows, count), max(map(len, rows))
        passes.clear()
        found = answer(model, [[*row] for row in rows], count)
        found = found.tolist() if isinstance(found, Tensor) else found
        fed, calls = sum(shape[-1] for shape in passes), len(passes)
        if found != wanted:
            for slip, reason in COMPLETIONS.items():
                if found == _complete(model, rows, count, slip):
                    return reason
            try:
                shape = [len(row) for row in found]
            except TypeError:
                return f"a list of ids for each row is asked, not {found!r:.60}"
            if shape != [count] * len(rows):
                return f"{count} new ids for each of {len(rows)} rows are asked, you gave {shape}"
            bad = next(i for i, row in enumerate(found) if row != wanted[i])
            return f"row {rows[bad]} goes on with {wanted[bad]}, not with {found[bad]}"
        if any(len(shape) != 2 or shape[0] != len(rows) for shape in passes) or calls > count:
            return f"{calls} passes for {count} new ids: all rows go through the model together"
        if fed > width + count - 1:
            return (
                f"{fed} columns went through the model, {width + count - 1} are enough: use a cache"
            )
    return None


@torch.no_grad()
def _silent(model: CausalLM, layer: int, head: int, slip: str = "") -> CausalLM:
    """A copy without that head, right or with one popular mistake."""
    copied, c = copy.deepcopy(model), model.config
    D, H, G = c.head_dim, c.num_attention_heads, c.num_key_value_heads
    D = c.hidden_size // H if slip == "size" else D
    layers: Any = copied.model.layers
    a = layers[{"layer": layer - 1}.get(slip, layer)].self_attn
    h = {"head": head - 1}.get(slip, head)
    own, shared = slice(h * D, (h + 1) * D), slice(h // (H // G) * D, (h // (H // G) + 1) * D)
    if slip == "rows":
        a.o_proj.weight[own] = 0
    elif slip == "queries":
        a.q_proj.weight[own] = 0
    elif slip == "values":
        a.v_proj.weight[shared] = 0
    elif slip == "all":
        a.o_proj.weight.zero_()
    else:
        a.o_proj.weight[:, own] = 0
    return copied


SILENCED = {
    "rows": "o_proj's weight is (C, H D): a head's part are columns, not rows",
    "queries": "without its queries a head's scores are all equal: it still reads, the mean of all",
    "values": "values are shared: the other query heads of the group lose them, too",
    "all": "only one head is to be silent, not the whole attention",
    "size": "a head has head_dim numbers, which need not be C / H",
    "head": "heads are counted from 0",
    "layer": "layers are counted from 0",
}


@exercise(
    "10.4",
    "where does what a head has read enter the stream, and which numbers of that matrix are its "
    "own?",
    "a head adds to the stream through its own columns of o_proj: zero them, and it is silent",
)
def _without_head(answer: Callable[[CausalLM, int, int], Any]) -> str | None:
    config = ModelConfig(40, 24, 3, 4, 40, head_dim=8, num_key_value_heads=2, initializer_range=0.4)
    model = CausalLM(config, seed=3).eval()
    ids = torch.randint(40, (3, 9), generator=torch.Generator().manual_seed(2))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for layer, head in ((1, 2), (2, 1)):
        found = answer(model, layer, head)
        if any(not torch.equal(w, before[name]) for name, w in model.state_dict().items()):
            return "the model that you were given has changed: work on a copy"
        if not isinstance(found, nn.Module):
            return f"a model is asked, not {type(found).__name__}"
        with torch.no_grad():
            logits = found(ids)
            wanted = _silent(model, layer, head)(ids)
            slips = {"your copy gives the logits of the whole model: no head is silent": model(ids)}
            slips |= {why: _silent(model, layer, head, slip)(ids) for slip, why in SILENCED.items()}
        said = f"without head {head} of layer {layer} other logits are right"
        if why := check_values(logits, wanted, slips, near=1e-4, otherwise=said):
            return why
    return None


def _by_hand(c: ModelConfig, w: dict[str, Tensor], ids: Tensor, slip: str = "") -> Tensor:
    """The model from its weights, right or with one popular mistake."""
    H, G, D, T = c.num_attention_heads, c.num_key_value_heads, c.head_dim, ids.shape[1]

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if slip == "centred" else x
        weight = 1.0 if slip == "norm weights" else w[name + ".weight"]
        eps = 1e-6 if slip == "eps" else c.rms_norm_eps
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight

    def heads(x: Tensor, name: str, count: int) -> Tensor:
        y = x @ w[name + ".weight"].T
        if slip == "reshaped":
            return y.reshape(len(y), count, T, D)
        return y.view(*y.shape[:2], count, D).transpose(1, 2)

    base = 10000.0 if slip == "base" else c.rope_theta
    rope = RotaryEmbedding(D, base=base, interleaved=slip == "interleaved")(torch.arange(T)[None])
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}."
        a, before = layer + "self_attn.", x
        y = norm(x, layer + "input_layernorm")
        q, k, v = (heads(y, f"{a}{n}_proj", m) for n, m in (("q", H), ("k", G), ("v", G)))
        if slip != "rotation":
            q, k = rope(q), rope(k)
        if slip == "tiled":
            k, v = (z.repeat(1, H // G, 1, 1) for z in (k, v))
        else:
            k, v = (z.repeat_interleave(H // G, 1) for z in (k, v))
        scores = q @ k.mT * {"unscaled": 1.0, "C": c.hidden_size**-0.5}.get(slip, D**-0.5)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        over = -2 if slip == "queries" else -1
        read = scores.masked_fill(future, -torch.inf).softmax(over) @ v
        read = read if slip == "merged" else read.transpose(1, 2)
        read = read.reshape(len(ids), T, H * D) @ w[a + "o_proj.weight"].T
        x = read if slip == "residual" else before + read
        y = x if slip == "second norm" else norm(x, layer + "post_attention_layernorm")
        gate, up = (y @ w[f"{layer}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        gate, up = (up, gate) if slip == "swapped" else (gate, up)
        x = x + (nn.functional.silu(gate) * up) @ w[layer + "mlp.down_proj.weight"].T
    x = x if slip == "last norm" else norm(x, "model.norm")
    return x @ w["model.embed_tokens.weight" if slip == "tied" else "lm_head.weight"].T


_SLIPS = {
    "last norm": "the last norm, before the head, is missing",
    "second norm": "the feed-forward block reads x without a norm",
    "norm weights": "a norm multiplies by its weight in the end",
    "centred": "RMSNorm does not take the mean away",
    "eps": "eps is not the usual one here: config.rms_norm_eps",
    "base": "the rotation's base is not the usual one here: config.rope_theta",
    "merged": "before heads are merged, positions and heads change places: transpose(1, 2)",
    "rotation": "queries and keys must turn by their positions (05)",
    "interleaved": "the pairs are half-split: number i turns with i + D/2 (05)",
    "unscaled": "scores are divided by the square root of D (03)",
    "C": "scores are divided by the square root of D, the size of a head, not of C",
    "queries": "the weights of each query sum to 1: softmax over the last dimension, the keys (03)",
    "tiled": "query head h reads with key head h // (H / G) (04): repeat each, do not tile them",
    "reshaped": "heads are cut from the last dimension, then moved before the positions (04)",
    "residual": "what attention read is added to x, it does not replace it",
    "swapped": "silu goes over the gate, not over up (06)",
    "tied": "this head has a matrix of its own, lm_head.weight",
}


@exercise(
    "10.5",
    "embed, then for each layer norm, attention, sum, norm, gated block, sum; a last norm, the "
    "head: which of the config's numbers does each need?",
    "you have written a language model from nothing but its weights",
)
def _forward(answer: Callable[[ModelConfig, dict[str, Tensor], Tensor], Tensor]) -> str | None:
    more: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
    more |= {"rope_theta": 500.0, "rms_norm_eps": 1e-2}  # not the usual ones
    c = ModelConfig(40, 24, 2, 4, 40, **more)
    model, generator = CausalLM(c, seed=1).eval(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.5 * torch.rand(p.shape, generator=generator))
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    ids = torch.randint(40, (3, 9), generator=generator)
    with torch.no_grad():
        right, found = model(ids), answer(c, dict(weights), ids.clone())
        if not isinstance(found, Tensor) or found.shape != right.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else found
            return f"logits of shape (B, T, V) = {tuple(right.shape)} are asked, not {shape}"
        if not found.isfinite().all():
            return (
                "your logits are not finite: is a row of scores masked whole, or divided by zero?"
            )
        changed = ids.clone()
        changed[:, -1] = (changed[:, -1] + 1) % 40
        later = answer(c, dict(weights), changed)
        off = (found - right).abs().max().item()
        said = f"the logits differ by up to {off:.2f}: compare with the model, layer after layer"
        if not torch.allclose(later[:, :-1], found[:, :-1], atol=1e-4):
            said = "the logits at earlier positions change with the last token: mask the future"
        slips = ((why, _by_hand(c, weights, ids, slip)) for slip, why in _SLIPS.items())
        return check_values(found, right, slips, near=1e-3, otherwise=said)
