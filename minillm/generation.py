"""Generation: one forward pass and one draw a token, for rows that begin and end anywhere.

Explained in notebook 10; what is drawn, and how, is in `minillm.sampling`. Looked up
when asked for: stop strings (`deeper.generation.stream`), `deeper.generation.compiled`.
"""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.sampling import GREEDY, end_ids, enforce_min_new_tokens
from minillm.support.checks.model import check_cached, check_drawn, check_model, check_prompt
from minillm.support.checks.words import our_words
from minillm.support.modes import EvalMode, LanguageModel, open_cache

__all__ = ["FROM_CONFIG", "StoppingCriteria", "decode_loop", "generate"]

FROM_CONFIG: Any = "from config"  # stands for what the model's config says


class StoppingCriteria:
    """Which tokens end a row, and what fills it afterwards.

    Raises: ValueError for ids outside the vocabulary.
    """

    def __init__(self, eos_token_id: int | Sequence[int] | None, config: ModelConfig) -> None:
        if eos_token_id is FROM_CONFIG:
            eos_token_id = config.eos_token_ids
        eos = end_ids(eos_token_id)
        if any(not 0 <= i < config.vocab_size for i in eos):
            raise ValueError(f"end tokens {eos}, but ids are 0..{config.vocab_size - 1}")
        self.eos, self.any, pad = set(eos), bool(eos), config.pad_token_id
        self.filler = pad if pad is not None else (eos[0] if eos else 0)

    def ended(self, new_ids: list[int]) -> bool:
        """Whether the row ends with the last of its new tokens."""
        return new_ids[-1] in self.eos


def decode_loop(
    model: LanguageModel,
    prompt: Tensor,
    mask: Tensor | None,
    max_new_tokens: int,
    sampler: Callable[[Tensor, Tensor], Tensor],
    cache: KVCache | None,
    stopping: StoppingCriteria,
    step: Callable[..., Tensor],
) -> Iterator[Tensor]:
    """Ids (B,) for each new position, rows that ended filled; stops when all have ended."""
    B, T = prompt.shape
    ids, seen, real = prompt, prompt, None
    if mask is not None and (mask.is_meta or not mask.all()):
        real = mask.to(ids.dtype)
        seen = ids.masked_fill(real == 0, -1)  # padding is no token that a penalty could count
    new: list[list[int]] = [[] for _ in range(B)]
    running = [True] * B
    done = 0 if cache is None else cache.length
    no_dropout = EvalMode(model)
    for end in range(T, T + max_new_tokens):
        forward = step if end - done == 1 else model
        with torch.inference_mode(), no_dropout:
            logits = forward(ids[:, done:], attention_mask=real, cache=cache, logits_to_keep=1)
            if end == T and cache is not None:  # once: an attention of one's own may forget it
                check_cached(cache, end)
            drawn = check_drawn(sampler(logits[:, -1], seen), B)
        if not all(running):
            drawn = drawn.masked_fill(~torch.tensor(running, device=ids.device), stopping.filler)
        column = drawn[:, None].to(ids)  # room for all of max_new_tokens may be more than there is
        if real is None:
            ids = seen = torch.cat([ids, column], dim=1)
        else:
            ids, seen = (torch.cat([x, column], dim=1) for x in (ids, seen))
            real = F.pad(real, (0, 1), value=1)
        done = done if cache is None else end
        yield drawn
        if stopping.any:  # the one question a step, for which a GPU is waited for
            for row, token in enumerate(drawn.tolist()):
                if running[row]:
                    new[row].append(token)
                    running[row] = not stopping.ended(new[row])
            if not any(running):
                return


@our_words
def generate(
    model: LanguageModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    min_new_tokens: int = 0,
    sampler: Callable[[Tensor, Tensor], Tensor] = GREEDY,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = FROM_CONFIG,
    stop: str | Sequence[str | Sequence[int]] | None = None,
    tokenizer: Any = None,
    cache: str | KVCache | None = "dynamic",
    compile: bool = False,
    on_token: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Continue each row of `input_ids` until it ends or has `max_new_tokens` more.

        prompt = torch.tensor([tokenizer.encode("The")])
        text = tokenizer.decode(generate(model, prompt, max_new_tokens=20)[0])

    Args:
        min_new_tokens: so many tokens come before an end token may.
        sampler: chooses one id a row from logits (B, V) and previous ids (B, T) (-1: padding), as
            `Sampler(temperature=0.7)` does.
        attention_mask: 1 for real tokens, 0 for padding, which must stand on the left.
        eos_token_id: what ends a row, one id or several; None: nothing (default: the config's).
        stop: strings (they need `tokenizer`) or sequences of ids that end a row; they stay in it.
        cache: a kind of cache, one that already holds the beginning of the rows, or None.
        compile: compile the step of one token, once (needs cache="static").
        on_token: called with the ids (B,) of each step; rows that have ended give padding.
    Shape: (B, T) ids -> (B, T + new), rows that ended filled with the pad (or end) token.
    Raises: ValueError for an empty prompt, padding on the right, stop strings without a tokenizer,
        a static cache for more tokens than the model has positions.
    """
    check_model(model)
    check_prompt(input_ids, attention_mask, max_new_tokens, model.config.vocab_size)
    stopping = StoppingCriteria(eos_token_id, model.config)
    if stop is not None:
        from minillm.deeper.generation.stream import StopStrings

        stopping = StopStrings(eos_token_id, stop, tokenizer, model.config)
    if min_new_tokens < 0:
        raise ValueError(f"min_new_tokens must not be negative: {min_new_tokens}")
    options: dict[str, int] = {"multiple_of": 256} if compile else {}  # few sizes to compile for
    memory = open_cache(model, cache, input_ids, max_new_tokens, **options)
    step: Callable[..., Tensor] = model
    if compile:
        from minillm.deeper.generation.compiled import compiled_step

        whole: Any = model  # a `CausalLM`: no other has a step that is compiled
        step = compiled_step(whole, memory)
    T, parts = input_ids.shape[1], [input_ids]

    def choose(logits: Tensor, previous_ids: Tensor) -> Tensor:
        num_new = previous_ids.shape[1] - T
        logits = enforce_min_new_tokens(logits, stopping.eos, num_new, min_new_tokens)
        return sampler(logits, previous_ids)

    given = (model, input_ids, attention_mask, max_new_tokens, choose, memory, stopping, step)
    with EvalMode(model):  # once for all steps
        for drawn in decode_loop(*given):
            parts.append(drawn[:, None])
            if on_token is not None:
                on_token(drawn)
    return torch.cat(parts, dim=1)
