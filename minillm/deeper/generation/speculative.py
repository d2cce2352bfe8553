"""Speculative generation: a small model guesses, the large one checks several guesses at once.

Explained in notebooks/deeper/09_speculative.ipynb.
"""

# Built from notebooks/deeper/09_speculative.ipynb: edit there, then make build.

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.cache import KVCache
from minillm.generation import FROM_CONFIG, StoppingCriteria
from minillm.model import CausalLM
from minillm.sampling import GREEDY, Sampler, draw
from minillm.support.checks.model import check_model, check_prompt, dynamic_from
from minillm.support.device import to_float64
from minillm.support.modes import EvalMode

__all__ = ["speculative_generate", "speculative_step"]


def speculative_step(
    draft_probs: Tensor,
    target_probs: Tensor,
    draft_ids: Tensor,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of drafted tokens and give the token after it; distributed as the target.

    Shape: draft_probs (B, K, V), target_probs (B, K + 1, V), draft_ids (B, K)
        -> num_accepted (B,) in 0..K, next_ids (B,).
    Raises: ValueError if the shapes do not fit, or if nothing was drafted (K = 0).
    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023.
    """
    B, K, V = draft_probs.shape
    if K == 0 or target_probs.shape != (B, K + 1, V) or draft_ids.shape != (B, K):
        shapes = [tuple(x.shape) for x in (draft_probs, target_probs, draft_ids)]
        raise ValueError(f"draft_probs, target_probs, draft_ids do not fit: {shapes}")
    draft, target = to_float64(draft_probs), to_float64(target_probs)
    ids = draft_ids.to(target.device)[..., None]
    p, q = target[:, :K].gather(-1, ids)[..., 0], draft.gather(-1, ids)[..., 0]  # (B, K)
    chance = torch.rand(B, K, generator=generator, dtype=torch.float64).to(p.device)
    accepted = (chance * q < p).long().cumprod(-1).sum(-1)  # (B,)
    rows = torch.arange(B, device=p.device)
    rest, refused = target[rows, accepted], draft[rows, accepted.clamp(max=K - 1)]
    residual = (rest - refused).clamp(min=0)
    use = (accepted < K)[:, None] & (residual.sum(-1, keepdim=True) > 0)
    uniform = torch.rand(B, generator=generator, dtype=torch.float64)
    next_ids = draw(torch.where(use, residual, rest), uniform)
    return accepted.to(draft_ids.device), next_ids.to(draft_ids.device)


def _distributions(logits: Tensor, tokens: Tensor, sampler: Sampler) -> Tensor:
    """What is drawn from after each of the last K tokens. Shape: (K, V) -> (1, K, V)."""
    K, T = len(logits), tokens.shape[1]
    if K == 1:
        return sampler.probabilities(logits, tokens)[None]
    seen = tokens.expand(K, T).clone()
    places = torch.arange(T, device=seen.device)
    later = places > places[T - K :, None]
    return sampler.probabilities(logits, seen.masked_fill(later, -1))[None]


def _guess(
    draft: CausalLM,
    ids: Tensor,
    count: int,
    sampler: Sampler,
    cache: KVCache,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """`ids` with `count` more tokens, and the distributions (1, count, V) they were drawn from."""
    guessed = []
    for _ in range(count):
        logits = draft(ids[:, cache.length :], cache=cache, logits_to_keep=1)[:, -1]
        guessed.append(sampler.probabilities(logits, ids))
        uniform = torch.rand(1, generator=generator, dtype=torch.float64)
        ids = torch.cat([ids, draw(guessed[-1], uniform)[:, None]], dim=1)
    empty = torch.zeros(1, 0, draft.config.vocab_size, device=ids.device)
    return ids, torch.stack(guessed, dim=1) if guessed else empty


def _verify(
    guessed: Tensor, wanted: Tensor, drafts: Tensor, generator: torch.Generator | None
) -> tuple[int, list[int]]:
    """How many guesses stand, and the new tokens: these, and one more.

    Reading them is the one question a round, for which a GPU is waited for.
    """
    if drafts.shape[1] == 0:
        uniform = torch.rand(1, generator=generator, dtype=torch.float64)
        return 0, draw(wanted[:, 0], uniform).tolist()
    accepted, after = speculative_step(guessed, wanted, drafts, generator=generator)
    count, last, *tokens = torch.cat([accepted, after, drafts[0]]).tolist()
    return count, [*tokens[:count], last]


@torch.inference_mode()
def speculative_generate(
    model: CausalLM,
    draft: CausalLM,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    num_draft: int = 4,
    sampler: Sampler = GREEDY,
    eos_token_id: int | Sequence[int] | None = FROM_CONFIG,
    generator: torch.Generator | None = None,
    on_round: Callable[[int, int], object] | None = None,
) -> Tensor:
    """`generate` for one row, with a small model that guesses and the large one that checks.

    What comes out is distributed as the large model's own text; greedily it is the same text. Where
    dynamic rope_scaling would turn several guesses otherwise than one by one, nothing is guessed.

    Args:
        num_draft: how many tokens the small model guesses before the large one reads them at once.
        generator: of all random numbers; without one, the sampler's first stream, if it has a seed.
        on_round: called with the numbers of tokens guessed and accepted.
    Shape: (1, T) ids -> (1, T + new).
    Raises: ValueError for more than one row, different vocabularies, a negative `num_draft`, or a
        model with states, which cannot forget a refused guess.
    Source: Leviathan et al. 2023.
    """
    check_model(model)
    check_prompt(input_ids, None, max_new_tokens, model.config.vocab_size)
    if len(input_ids) != 1 or model.config.vocab_size != draft.config.vocab_size:
        sizes = f"{model.config.vocab_size} and {draft.config.vocab_size}"
        raise ValueError(f"one row and one vocabulary, not {len(input_ids)} rows, {sizes} tokens")
    if strange := [m.config.model_type for m in (model, draft) if m.config.stateful]:
        raise ValueError(f"a state cannot go back behind a refused guess: {', '.join(strange)}")
    if num_draft < 0:
        raise ValueError(f"num_draft must not be negative: {num_draft}")
    generator = sampler.stream(0) if generator is None else generator
    stopping = StoppingCriteria(eos_token_id, model.config)
    caches = [m.make_cache(batch_size=1) for m in (model, draft)]
    ids, end = input_ids, input_ids.shape[1] + max_new_tokens
    room = min(dynamic_from(m.model.rotary) for m in (model, draft))
    with EvalMode(model, draft):
        while ids.shape[1] < end:
            guesses = int(max(0, min(num_draft, end - ids.shape[1] - 1, room - ids.shape[1])))
            tokens, guessed = _guess(draft, ids, guesses, sampler, caches[1], generator)
            logits = model(
                tokens[:, caches[0].length :], cache=caches[0], logits_to_keep=guesses + 1
            )
            wanted = _distributions(logits[0], tokens, sampler)
            accepted, new = _verify(guessed, wanted, tokens[:, ids.shape[1] :], generator)
            stop = next((i + 1 for i in range(len(new)) if stopping.ended(new[: i + 1])), None)
            ids = torch.cat([ids, ids.new_tensor([new[:stop]])], dim=1)
            if on_round is not None:
                on_round(guesses, accepted)
            if stop is not None:
                break
            for memory in caches:  # forget what was refused; the last token has not been read yet
                memory.crop(min(memory.length, ids.shape[1] - 1))
    return ids
