"""Graders of notebook 10: parameters, choosing answers, no repeats, LoRA, the whole model."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.exercises import exercise
from minillm.generation.decoding import generate
from minillm.model import CausalLM
from minillm.nn.rope import RotaryEmbedding

_SHAPES: tuple[tuple[int, int, int, int, int, dict[str, Any]], ...] = (  # V, C, layers, H, F, more
    (100, 32, 1, 4, 48, {}),
    (100, 32, 3, 4, 48, {"num_key_value_heads": 1}),
    (1000, 48, 2, 6, 40, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    (77, 64, 2, 8, 96, {"head_dim": 16, "num_key_value_heads": 4}),
)


@exercise(
    "10.1",
    "from config's sizes alone, without making the model: go through the thirty lines, one "
    "matrix after the other, and do not forget the norms",
    "a model's size follows from its config: most of it is L times what attention and "
    "feed-forward hold",
)
def _count(answer: Callable[[ModelConfig], int]) -> str | None:
    for V, C, L, H, F, more in _SHAPES:
        c = ModelConfig(V, C, L, H, F, **more)
        with torch.device("meta"):
            right = CausalLM(c).num_parameters()
        found = answer(c)
        if found == right:
            continue
        G, D = c.num_key_value_heads, c.head_dim
        reasons = {
            2 * L * C * D * (H - G): "k_proj and v_proj have only num_key_value_heads heads",
            -2 * L * C - C: "the norms have weights too, two a layer and one at the end",
            -C: "the last norm is missing",
            -2 * L * C: "the two norms of each layer are missing",
            V * C if c.tie_word_embeddings else -V * C: "tie_word_embeddings decides whether the "
            "head has a matrix of its own or shares the embedding's",
            2 * L * D: "a Llama has no norms on queries and keys",
            -L * C * F: "a gated block has three matrices: gate, up and down",
        }
        if (reason := reasons.get(found - right)) is not None:
            return f"{found} instead of {right} for {C=}, {H=}, {G=}: {reason}"
        if D * H != C:
            return f"{found} instead of {right}: a head has head_dim={D}, not C / H, numbers"
        return f"{found} instead of {right} for {V=}, {C=}, layers={L}, {H=}, {G=}, {F=}"
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
    "prompt is a list of ids, answers are lists of ids, and the index of the most probable one is "
    "asked: which token do the logits at position t speak about, and what does a mean prefer?",
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
        "mean": "compare sums of log-probabilities; a mean per token prefers long answers",
        "prefix": "all tokens of an answer count, not only the first",
    }
    for kind, reason in reasons.items():
        if missed[kind] == missed["all"]:
            return f"{missed['all']} of 30 choices are wrong: {reason}"
    return f"{missed['all']} of 30 choices are wrong: sum log p(token | all before it) per answer"


def _repeats(row: list[int], n: int) -> bool:
    grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
    return len(grams) > len(set(grams))


def _greedy_without_repeats(logits: Tensor, previous: list[int], n: int) -> int:
    last = tuple(previous[len(previous) - n + 1 :])
    starts = range(len(previous) - n + 1)
    banned = {previous[i + n - 1] for i in starts if tuple(previous[i : i + n - 1]) == last}
    scores = logits.clone()
    scores[list(banned)] = -torch.inf
    return int(scores.argmax())


@exercise(
    "10.3",
    "no_repeats(n) returns a function from logits (B, V) and previous_ids (B, T) to ids (B,), each "
    "row's best token that completes no n-gram which the row already has; which tokens followed "
    "the row's last n - 1 tokens before?",
    "a sampler is any function from logits and previous ids to ids; no_repeats(1) forbids every "
    "token that was said",
)
def _no_repeats(answer: Callable[[int], Callable[[Tensor, Tensor], Tensor]]) -> str | None:
    generator = torch.Generator().manual_seed(3)
    for n in (2, 3, 1):
        sampler = answer(n)
        for _ in range(20):
            previous = torch.randint(4, (3, 12), generator=generator)
            logits = torch.randn(3, 6, generator=generator)
            before = logits.clone()
            found = sampler(logits, previous)
            if not isinstance(found, Tensor) or found.shape != (3,):
                return f"ids of shape (3,) are asked for 3 rows, not {found!r}"
            if not torch.equal(logits, before):
                return "your sampler changes the logits that it was given: work on a copy"
            for row, ids, scores in zip(found.tolist(), previous.tolist(), logits, strict=True):
                right = _greedy_without_repeats(scores, ids, n)
                if row == right:
                    continue
                if n == 1 and row in ids:
                    last = "row[-(n - 1):] is the whole row at n = 1"
                    return f"n=1: after {ids}, token {row} is said again (mind that {last})"
                if _repeats_with(ids, row, n):
                    return (
                        f"n={n}: after {ids}, token {row} completes an n-gram for the second time"
                    )
                return f"n={n}: after {ids}, token {row} is not the best allowed one, {right} is"
    short = answer(3)(torch.tensor([[0.0, 1.0]]), torch.tensor([[1]]))
    if int(short) != 1:
        return "a row shorter than n - 1 tokens has no n-gram yet: nothing is forbidden"
    row = generate(_toy(), torch.tensor([[1, 2]]), max_new_tokens=40, sampler=answer(2))[0]
    return "generate repeats a pair with your sampler" if _repeats(row.tolist(), 2) else None


def _repeats_with(ids: list[int], token: int, n: int) -> bool:
    last = (*ids[len(ids) - n + 1 :], token)
    return any(tuple(ids[i : i + n]) == last for i in range(len(ids) - n + 1))


@exercise(
    "10.4",
    "lora(linear, rank, alpha) returns a module that gives linear(x) + alpha / rank * B A x; A "
    "(rank, in) and B (out, rank) are learned, linear is not, and at first nothing must change",
    "two thin matrices teach a frozen one: one of them begins at zero, not both, and gradients "
    "still pass through",
)
def _lora(answer: Callable[[nn.Linear, int, float], nn.Module]) -> str | None:
    torch.manual_seed(0)
    linear, x = nn.Linear(12, 7), torch.randn(5, 3, 12)
    frozen = copy.deepcopy(linear)
    module = answer(linear, 2, 6.0)
    if not isinstance(module, nn.Module):
        return f"a module is asked, not {type(module).__name__}"
    if not torch.allclose(module(x), frozen(x)):
        return "at the start the module must do what linear does: B begins at zero"
    free = [p for p in module.parameters() if p.requires_grad]
    shapes = sorted(tuple(p.shape) for p in free)
    if any(p.shape == linear.weight.shape for p in free):
        return "the weight of linear still trains: set requires_grad to False"
    if shapes != [(2, 12), (7, 2)]:
        return f"what trains should be A (2, 12) and B (7, 2), not {shapes}"
    down, up = sorted(free, key=lambda p: tuple(p.shape))
    if not (down.any() or up.any()):
        return "A is zero as well as B: then neither ever gets a gradient"
    x.requires_grad_()
    given = torch.autograd.grad(module(x).sum(), x, allow_unused=True)[0]
    if given is None or not torch.allclose(given, torch.autograd.grad(frozen(x).sum(), x)[0]):
        return (
            "no gradient passes through linear(x) to what stands before it: freeze the weight "
            "(requires_grad_(False)), not the product (no_grad, detach)"
        )
    with torch.no_grad():
        down.copy_(torch.randn(2, 12))
        up.copy_(torch.randn(7, 2))
        change, wanted = module(x) - frozen(x), x @ down.T @ up.T
    if torch.allclose(change, wanted, atol=1e-5):
        return "the update is not scaled: alpha / rank = 3 here"
    if not torch.allclose(change, 3.0 * wanted, atol=1e-5):
        return "after a change of A and B the module should give linear(x) + alpha / rank * B A x"
    return _trains(answer)


def _trains(answer: Callable[[nn.Linear, int, float], nn.Module]) -> str | None:
    """In a model, a few steps must lower the loss without touching what was there."""
    model = _toy()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        attention.q_proj = answer(attention.q_proj, 4, 8.0)
        attention.v_proj = answer(attention.v_proj, 4, 8.0)
    free: list[Any] = [p for m in model.modules() for p in m.parameters() if p.requires_grad]
    small = [p for p in dict.fromkeys(free) if 4 in p.shape]
    optimizer = torch.optim.Adam(small, lr=3e-2)
    ids = torch.randint(40, (4, 12), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(12):
        logits = model(ids)[:, :-1].flatten(0, 1)
        losses.append(nn.functional.cross_entropy(logits, ids[:, 1:].flatten()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    if not losses[-1] < losses[0]:
        return "12 steps of Adam on A and B in a small model do not lower its loss"
    kept = [v for k, v in model.state_dict().items() if "norm" in k]
    same = all(any(torch.equal(v, old) for old in before.values()) for v in kept)
    return None if same else "training the update changed weights outside it"


def _by_hand(c: ModelConfig, w: dict[str, Tensor], ids: Tensor, slip: str = "") -> Tensor:
    """The model from its weights, right or with one popular mistake."""
    H, G, D, T = c.num_attention_heads, c.num_key_value_heads, c.head_dim, ids.shape[1]

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if slip == "centred" else x
        weight = 1.0 if slip == "norm weights" else w[name + ".weight"]
        return x * (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).rsqrt() * weight

    def heads(x: Tensor, name: str, count: int) -> Tensor:
        y = x @ w[name + ".weight"].T
        if slip == "reshaped":
            return y.reshape(len(y), count, T, D)
        return y.view(*y.shape[:2], count, D).transpose(1, 2)

    rope = RotaryEmbedding(D, base=c.rope_theta, interleaved=slip == "interleaved")(
        torch.arange(T)[None]
    )
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
        read = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        read = read.transpose(1, 2).flatten(2) @ w[a + "o_proj.weight"].T
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
    "rotation": "queries and keys must turn by their positions (05)",
    "interleaved": "the pairs are half-split: number i turns with i + D/2 (05)",
    "unscaled": "scores are divided by the square root of D (03)",
    "C": "scores are divided by the square root of D, the size of a head, not of C",
    "tiled": "query head h reads with key head h // (H / G) (04): repeat each, do not tile them",
    "reshaped": "heads are cut from the last dimension, then moved before the positions (04)",
    "residual": "what attention read is added to x, it does not replace it",
    "swapped": "silu goes over the gate, not over up (06)",
    "tied": "this head has a matrix of its own, lm_head.weight",
}


@exercise(
    "10.5",
    "weights are named as in model.state_dict() of a Llama; write the thirty lines as one "
    "function, layer after layer, ids (B, T) to logits (B, T, V)",
    "you have written a language model from nothing but its weights",
)
def _forward(answer: Callable[[ModelConfig, dict[str, Tensor], Tensor], Tensor]) -> str | None:
    more: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
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
        if torch.allclose(found, right, atol=1e-3, rtol=1e-3):
            return None
        changed = ids.clone()
        changed[:, -1] = (changed[:, -1] + 1) % 40
        later = answer(c, dict(weights), changed)
        if not torch.allclose(later[:, :-1], found[:, :-1], atol=1e-4):
            return "the logits at earlier positions change with the last token: mask the future"
        for slip, reason in _SLIPS.items():
            if torch.allclose(found, _by_hand(c, weights, ids, slip), atol=1e-3, rtol=1e-3):
                return reason
    off = (found - right).abs().max().item()
    return f"the logits differ by up to {off:.2f}: compare with Mini, layer after layer"
