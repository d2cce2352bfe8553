"""Searching for the best sequence: the best cut of a text, beam search, and exhaustive search.

Explained in notebooks/deeper/09_best_path.ipynb.
"""

# Built from notebooks/deeper/09_best_path.ipynb: edit there, then make build.

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minillm.sampling import end_ids, enforce_min_new_tokens
from minillm.support.checks.sampling import check_ends, check_length_penalty
from minillm.support.checks.words import our_words
from minillm.support.device import to_float64
from minillm.support.modes import EvalMode

__all__ = ["Hypothesis", "Step", "beam_search", "exhaustive_search", "viterbi_segment"]


def viterbi_segment(text: str, word_probs: Mapping[str, float]) -> list[str]:
    """The most probable way to cut `text` into words, each drawn by itself from `word_probs`.

    A character that is no word may stand alone, at a thousandth of the rarest word's chance.
    Raises: ValueError if a probability is not positive.
    """
    if any(p <= 0 for p in word_probs.values()):
        raise ValueError(f"probabilities must be positive, not {min(word_probs.values())}")
    longest = max(map(len, word_probs), default=1)
    rare = math.log(min(word_probs.values(), default=1.0) / 1000)
    best = [0.0] + [-math.inf] * len(text)  # log-probability of the best path to each position
    start = [0] * (len(text) + 1)
    for end in range(1, len(text) + 1):
        for i in range(max(0, end - longest), end):
            word = text[i:end]
            score = math.log(word_probs[word]) if word in word_probs else rare
            if (word in word_probs or end - i == 1) and best[i] + score > best[end]:
                best[end], start[end] = best[i] + score, i
    words, end = [], len(text)
    while end:
        words.append(text[start[end] : end])
        end = start[end]
    return words[::-1]


Step = Callable[[Tensor], Tensor]  # ids (N, T) -> logits (N, V) of the next token


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence: the new ids, their log-probability in nats, and log_prob / length**a."""

    ids: list[int]
    log_prob: float
    score: float


def _next_log_probs(
    step: Step | nn.Module, prompt: Tensor, paths: list[list[int]], ends: Sequence[int] = ()
) -> Tensor:
    """Log-probabilities (N, V) in float64 of what follows the prompt (T,) and each path."""
    tails = torch.tensor(paths, dtype=torch.long, device=prompt.device).view(len(paths), -1)
    ids = torch.cat([prompt.expand(len(paths), -1), tails], dim=1)
    if isinstance(step, nn.Module):
        with EvalMode(step), torch.no_grad():
            logits = step(ids)[:, -1]
    else:
        logits = step(ids)
    if not (logits < math.inf).all():
        raise ValueError("logits hold NaN or +inf")
    check_ends(ends, logits.shape[-1])
    return to_float64(logits).log_softmax(-1)


def exhaustive_search(
    step: Step,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    eos_token_id: int | Iterable[int] | None = None,
) -> Hypothesis:
    """The best of all sequences up to `max_new_tokens`: exact, and V**max_new_tokens expensive.

    Raises: ValueError for no new tokens, a length_penalty that is not finite or far too large, ends
        outside the vocabulary, and logits that hold NaN or +inf.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens ({max_new_tokens}) must be at least 1")
    check_length_penalty(length_penalty, max_new_tokens)
    ends = end_ids(eos_token_id)
    live: list[tuple[list[int], float]] = [([], 0.0)]
    best: Hypothesis | None = None
    for length in range(1, max_new_tokens + 1):
        log_probs = _next_log_probs(step, prompt, [path for path, _ in live], ends).tolist()
        grown = []
        for (path, sofar), row in zip(live, log_probs, strict=True):
            for token, value in enumerate(row):
                if token in ends or length == max_new_tokens:
                    total = sofar + value
                    found = Hypothesis([*path, token], total, total / length**length_penalty)
                    best = found if best is None or found.score > best.score else best
                else:
                    grown.append(([*path, token], sofar + value))
        live = grown
    assert best is not None  # there is at least one step, and in the last one everything ends
    return best


def _longer(
    log_probs: Tensor, live: list[tuple[list[int], float]], count: int
) -> list[tuple[list[int], float]]:
    """The `count` best paths that are one token longer than those in `live`, best first.

    Shape: log_probs (N, V), a row for each path in `live`.
    """
    scores = torch.tensor([s for _, s in live], dtype=log_probs.dtype, device=log_probs.device)
    total = log_probs + scores[:, None]
    best, index = total.flatten().topk(min(count, total.numel()))
    V, pairs = total.shape[1], zip(best.tolist(), index.tolist(), strict=True)
    return [([*live[i // V][0], i % V], value) for value, i in pairs if value > -math.inf]


@our_words
def beam_search(
    step: Step | nn.Module,
    prompt: Tensor,
    *,
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    eos_token_id: int | Iterable[int] | None = None,
    min_new_tokens: int = 0,
    num_return: int = 1,
) -> list[Hypothesis]:
    """The best sequences that a beam of `num_beams` finds, best first; a beam of one is greedy.

    `step` is a model, or a function of ids (N, T) to the logits (N, V) of the next token; `prompt`
    holds ids (T,) or (1, T). All ids are read anew for each new token. A sequence ends with a token
    of `eos_token_id`, if that is among the `num_beams` best candidates, or at `max_new_tokens`; it
    has at least `min_new_tokens`, the end included. Ranked by log_prob / length**length_penalty.

        best = beam_search(model, prompt, num_beams=4, max_new_tokens=40, eos_token_id=end)[0]
        text = tokenizer.decode(best.ids)

    Raises: ValueError for several prompts, sizes below 1, num_return > num_beams, negative numbers,
        a length_penalty that is not finite or far too large, ends outside the vocabulary, and
        logits that hold NaN or +inf (-inf forbids a token).
    """
    if min(num_beams, max_new_tokens, num_return) < 1 or num_return > num_beams:
        raise ValueError(
            f"need 1 <= num_return ({num_return}) <= num_beams ({num_beams})"
            f" and max_new_tokens ({max_new_tokens}) >= 1"
        )
    check_length_penalty(length_penalty, max_new_tokens)
    if length_penalty < 0:
        raise ValueError(f"length_penalty must be >= 0, got {length_penalty}")
    if min_new_tokens < 0:
        raise ValueError(f"min_new_tokens must not be negative: {min_new_tokens}")
    if prompt.dim() > 2 or (prompt.dim() == 2 and len(prompt) != 1):
        raise ValueError(f"beams go on from one prompt, (T,) or (1, T), not {tuple(prompt.shape)}")
    ends = end_ids(eos_token_id)
    live: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[Hypothesis] = []
    count = num_beams * (1 + len(ends))  # so many hold num_beams unfinished ones, if there are
    for length in range(1, max_new_tokens + 1):
        grown, ended = [], []
        log_probs = _next_log_probs(step, prompt, [path for path, _ in live], ends)
        log_probs = enforce_min_new_tokens(log_probs, ends, length, min_new_tokens)
        for rank, (path, value) in enumerate(_longer(log_probs, live, count)):
            if path[-1] not in ends and length < max_new_tokens:
                grown.append((path, value))
            elif rank < num_beams:
                ended.append(Hypothesis(path, value, value / length**length_penalty))
        live = [] if len(ended) == num_beams == 1 else grown[:num_beams]  # greedy ends at its end
        done = sorted(done + ended, key=lambda h: -h.score)[:num_return]
        # No continuation can beat this: log-probabilities only fall, lengths end at the limit.
        bound = max((s for _, s in live), default=-math.inf) / max_new_tokens**length_penalty
        if not live or (len(done) == num_return and done[-1].score >= bound):
            break
    return done
