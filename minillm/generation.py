"""One forward pass and one draw a token, for rows that begin and end anywhere (notebook 10)."""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.sampling import GREEDY, end_ids
from minillm.support.checks.model import check_ends, check_generation, check_step
from minillm.support.checks.words import our_words
from minillm.support.modes import EvalMode, LanguageModel, open_cache

__all__ = ["FROM_CONFIG", "StoppingCriteria", "decode_loop", "generate"]

FROM_CONFIG: Any = "from config"  # stands for what the model's config says


class StoppingCriteria:
    """Which tokens end a row, and what fills it afterwards. Raises: ValueError for unknown ids."""

    def __init__(self, eos_token_id: int | Sequence[int] | None, config: ModelConfig) -> None:
        eos = end_ids(config.eos_token_ids if eos_token_id is FROM_CONFIG else eos_token_id)
        check_ends(eos, config.vocab_size)
        self.eos, self.any, pad = set(eos), bool(eos), config.pad_token_id
        self.filler = pad if pad is not None else (eos[0] if eos else 0)

    def ended(self, new_ids: list[int]) -> bool:
        """Whether the row ends with the last of its new tokens."""
        return new_ids[-1] in self.eos


def decode_loop(
    model: LanguageModel,
    ids: Tensor,
    mask: Tensor | None,
    max_new_tokens: int,
    sampler: Callable[[Tensor, Tensor], Tensor],
    cache: KVCache | None,
    stopping: StoppingCriteria,
) -> Iterator[Tensor]:
    """Ids (B,) for each new position, rows that ended filled; stops when all have ended."""
    if mask is not None:  # without padding none is needed
        mask = mask.to(ids.dtype) if mask.is_meta or not mask.all() else None
    new: list[list[int]] = [[] for _ in range(len(ids))]
    running, no_dropout = [True] * len(ids), EvalMode(model)
    done = 0 if cache is None else cache.length
    for _ in range(max_new_tokens):
        with torch.inference_mode(), no_dropout:
            logits = model(ids[:, done:], attention_mask=mask, cache=cache, logits_to_keep=1)
            seen = ids if mask is None else ids.masked_fill(mask == 0, -1)  # padding is no token
            drawn = sampler(logits[:, -1], seen)
        check_step(drawn, ids, cache)
        if not all(running):
            drawn = drawn.masked_fill(~torch.tensor(running, device=ids.device), stopping.filler)
        done = 0 if cache is None else ids.shape[1]
        ids = torch.cat([ids, drawn[:, None].to(ids)], dim=1)
        mask = None if mask is None else F.pad(mask, (0, 1), value=1)
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
    Raises: ValueError for a prompt that cannot be continued, and options that do not fit together.
    """
    check_generation(model, input_ids, attention_mask, max_new_tokens)
    stopping, parts = StoppingCriteria(eos_token_id, model.config), [input_ids]
    if stop is not None or min_new_tokens or compile:
        from minillm.deeper.generation.options import with_options

        asked = (eos_token_id, stop, tokenizer, min_new_tokens, compile, cache, input_ids)
        model, sampler, stopping = with_options(model, sampler, stopping, *asked)
    memory = open_cache(model, cache, input_ids, max_new_tokens)
    given = (model, input_ids, attention_mask, max_new_tokens, sampler, memory, stopping)
    with EvalMode(model):  # once for all steps
        for drawn in decode_loop(*given):
            parts.append(drawn[:, None])
            if on_token is not None:
                on_token(drawn)
    return torch.cat(parts, dim=1)
