"""Speculative generation: a small model guesses, the large one checks several guesses at once.

Explained in notebooks/10_minillm.ipynb; what keeps the distribution is in
`minillm.generation.sampling`.
"""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.cache.base import KVCache
from minillm.generation.decoding import FROM_CONFIG, StoppingCriteria, check_prompt
from minillm.generation.sampling import GREEDY, Sampler, draw, speculative_step
from minillm.model import CausalLM

__all__ = ["speculative_generate"]


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

    What comes out is distributed as the large model's own text; greedily it is the same text.

    Args:
        num_draft: how many tokens the small model guesses before the large one reads them at once.
        generator: of all random numbers; without one, the sampler's first stream, if it has a seed.
        on_round: called with the numbers of tokens guessed and accepted.
    Shape: (1, T) ids -> (1, T + new).
    Raises: ValueError for more than one row, different vocabularies, or a negative `num_draft`.
    Source: Leviathan et al. 2023.
    """
    check_prompt(input_ids, None, max_new_tokens, model.config.vocab_size)
    if len(input_ids) != 1 or model.config.vocab_size != draft.config.vocab_size:
        sizes = f"{model.config.vocab_size} and {draft.config.vocab_size}"
        raise ValueError(f"one row and one vocabulary, not {len(input_ids)} rows, {sizes} tokens")
    if num_draft < 0:
        raise ValueError(f"num_draft must not be negative: {num_draft}")
    generator = sampler.stream(0) if generator is None else generator
    stopping = StoppingCriteria(eos_token_id, None, None, model.config)
    caches = [m.make_cache(batch_size=1) for m in (model, draft)]
    ids, end = input_ids, input_ids.shape[1] + max_new_tokens
    while ids.shape[1] < end:
        guesses = min(num_draft, end - ids.shape[1] - 1)
        tokens, guessed = _guess(draft, ids, guesses, sampler, caches[1], generator)
        logits = model(tokens[:, caches[0].length :], cache=caches[0], logits_to_keep=guesses + 1)
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
