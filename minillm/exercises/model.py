"""Graders of notebook 10: counting parameters, choosing answers, banning repeats, LoRA."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.exercises import exercise
from minillm.generation.decoding import generate
from minillm.model import CausalLM

_SHAPES: tuple[tuple[int, int, int, int, int, dict[str, Any]], ...] = (  # V, C, layers, H, F, more
    (100, 32, 1, 4, 48, {}),
    (100, 32, 3, 4, 48, {"num_key_value_heads": 1}),
    (1000, 48, 2, 6, 40, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    (77, 64, 2, 8, 96, {"head_dim": 16, "num_key_value_heads": 4}),
)


@exercise(
    "10.1",
    "Write count_parameters(config): how many numbers a Llama-like model of this config holds, "
    "from the sizes alone, without making the model.",
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
    "Write choose(model, prompt, answers): the index of the answer (a list of ids) that the model "
    "finds most probable after the prompt (a list of ids), as tests of knowledge are scored.",
)
def _choose(answer: Callable[[CausalLM, list[int], list[list[int]]], int]) -> str | None:
    generator = torch.Generator().manual_seed(7)
    model = _toy()
    missed = {"shift": 0, "mean": 0, "prefix": 0, "all": 0}
    for _ in range(30):
        draw = lambda n: torch.randint(40, (n,), generator=generator).tolist()  # noqa: E731
        prompt, answers = draw(5), [draw(n) for n in (2, 3, 5, 3)]
        scores = [_continuation(model, prompt, a) for a in answers]
        found = answer(model, list(prompt), [list(a) for a in answers])
        if not isinstance(found, int) or not 0 <= found < 4:
            return f"an index from 0 to 3 is asked, not {found!r}"
        shifted = [_continuation(model, prompt, a, shift=0) for a in answers]
        means = [s / len(a) for s, a in zip(scores, answers, strict=True)]
        firsts = [_continuation(model, prompt, a[:1]) for a in answers]
        if not _is_best(found, scores):
            missed["shift"] += _is_best(found, shifted)
            missed["mean"] += _is_best(found, means)
            missed["prefix"] += _is_best(found, firsts)
            missed["all"] += 1
    if not missed["all"]:
        return None
    reasons = {
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
    "Write no_repeats(n): a sampler for generate, (logits (B, V), previous_ids (B, T)) to ids; "
    "it takes each row's best token that completes no n-gram which the row already holds.",
)
def _no_repeats(answer: Callable[[int], Callable[[Tensor, Tensor], Tensor]]) -> str | None:
    generator = torch.Generator().manual_seed(3)
    for n in (2, 3):
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
                if _repeats([*ids[-n + 1 :], row], n + 1) or _repeats_with(ids, row, n):
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
    "Write lora(linear, rank, alpha): a module that gives linear(x) + alpha / rank * B A x, with A "
    "(rank, in) random and B (out, rank) zero, and that trains A and B but not linear.",
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
    if not down.any():
        return "A is zero as well as B: then neither ever gets a gradient"
    with torch.no_grad():
        up.copy_(torch.randn(7, 2))
        change, wanted = module(x) - frozen(x), x @ down.T @ up.T
    if torch.allclose(change, wanted, atol=1e-5):
        return "the update is not scaled: alpha / rank = 3 here"
    if not torch.allclose(change, 3.0 * wanted, atol=1e-5):
        return "after a change of B the module should give linear(x) + alpha / rank * B A x"
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
