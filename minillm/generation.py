"""Generation: one forward pass and one draw a token; batched, cached, streamed, compiled.

Explained in notebooks/10_minillm.ipynb; what is drawn, and how, is in `minillm.sampling`.
"""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.cache import CACHE_KINDS, KVCache
from minillm.model import CausalLM
from minillm.sampling import GREEDY, Sampler
from minillm.speculative import speculative_generate as speculative_generate
from minillm.stopping import FROM_CONFIG, Stops, check_prompt

__all__ = ["FUSED", "compiled_step", "generate", "speculative_generate", "stream_text"]


def _draws(
    model: CausalLM,
    prompt: Tensor,
    mask: Tensor | None,
    max_new_tokens: int,
    sampler: Sampler,
    cache: KVCache | None,
    stops: Stops,
    step: Callable[..., Tensor],
) -> Iterator[Tensor]:
    """Ids (B,) for each new position, rows that ended filled; stops when all have ended."""
    (B, T), device = prompt.shape, prompt.device
    ids = prompt.new_full((B, T + max_new_tokens), stops.filler)
    ids[:, :T] = prompt
    seen, real = ids, None
    if mask is not None and not mask.all():
        real = torch.ones_like(ids)
        real[:, :T] = mask
        seen = ids.masked_fill(real == 0, -1)  # padding is no token that a penalty could count
    running = torch.ones(B, dtype=torch.bool, device=device)
    new: list[list[int]] = [[] for _ in range(B)]
    done = 0 if cache is None else cache.length
    for end in range(T, T + max_new_tokens):
        forward = step if end - done == 1 else model
        real_now = None if real is None else real[:, :end]
        fed = ids[:, done:end]
        with torch.inference_mode():
            logits = forward(fed, attention_mask=real_now, cache=cache, logits_to_keep=1)
            drawn = sampler(stops.hold_off(logits[:, -1], end - T), seen[:, :end])
        if stops.any:
            drawn = torch.where(running, drawn, stops.filler)
        ids[:, end] = drawn
        if seen is not ids:
            seen[:, end] = drawn
        done = done if cache is None else end
        yield drawn
        if stops.any:
            for row, token in zip(new, drawn.tolist(), strict=True):
                row.append(token)
            both = zip(running.tolist(), new, strict=True)
            alive = [on and not stops.ended(row) for on, row in both]
            running = torch.tensor(alive, device=device)
            if not running.any():
                return


def generate(
    model: CausalLM,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    min_new_tokens: int = 0,
    sampler: Sampler = GREEDY,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = FROM_CONFIG,
    stop: str | Sequence[str | Sequence[int]] | None = None,
    tokenizer: Any = None,
    cache: str | KVCache | None = "dynamic",
    compile: bool = False,
    on_token: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Continue each row of `input_ids` until it ends or has `max_new_tokens` more.

    Args:
        min_new_tokens: so many tokens come before an end token may.
        attention_mask: 1 for real tokens, 0 for padding, which must stand on the left.
        stop: strings (they need `tokenizer`) or sequences of ids that end a row; they stay in it.
        cache: a kind of cache, one that already holds the beginning of the rows, or None.
        compile: compile the step of one token, once (needs cache="static").
        on_token: called with the ids (B,) of each step; rows that have ended give padding.
    Shape: (B, T) ids -> (B, T + new), rows that ended filled with the pad (or end) token.
    Raises: ValueError for an empty prompt, padding on the right, stop strings without a tokenizer.
    """
    check_prompt(input_ids, attention_mask, max_new_tokens, model.config.vocab_size)
    stops = Stops(eos_token_id, stop, tokenizer, model.config, min_new_tokens)
    T = input_ids.shape[1]
    if isinstance(cache, str):
        room = T + max_new_tokens
        if compile:  # prompts of nearly one length share what is compiled
            room = -(-room // 256) * 256
        cache = model.make_cache(cache, batch_size=len(input_ids), max_length=room)
    elif cache is not None and cache.length >= T:
        held = f"the cache holds {cache.length} positions of a prompt of {T}"
        raise ValueError(f"{held}, but the last must be new: crop({T - 1}) the cache")
    step = compiled_step(model, cache) if compile else model
    parts = [input_ids]
    for drawn in _draws(
        model, input_ids, attention_mask, max_new_tokens, sampler, cache, stops, step
    ):
        parts.append(drawn[:, None])
        if on_token is not None:
            on_token(drawn)
    return torch.cat(parts, dim=1)


def _overlap(text: str, stop: str) -> int:
    """How many last characters of `text` are first characters of `stop`."""
    return next(n for n in range(min(len(text), len(stop)), -1, -1) if text.endswith(stop[:n]))


def stream_text(
    model: CausalLM,
    tokenizer: Any,
    prompt: str | Tensor,
    *,
    max_new_tokens: int,
    sampler: Sampler = GREEDY,
    stop: str | Sequence[str] | None = None,
    cache: str = "dynamic",
) -> Iterator[str]:
    """The continuation of one prompt, piece by piece as whole characters appear.

    `prompt` is a text, or ids (1, T) where a text cannot say what is meant. What could be the
    beginning of a stop string is held back until it is known; the stop string is left out.
    Raises: ValueError as `generate`.
    """
    if isinstance(prompt, str):
        prompt = torch.tensor([tokenizer.encode(prompt)], dtype=torch.long)
    prompt = prompt.to(model.lm_head.weight.device)
    check_prompt(prompt, None, max_new_tokens, model.config.vocab_size)
    stops = Stops(FROM_CONFIG, stop, tokenizer, model.config)
    room = prompt.shape[1] + max_new_tokens
    memory = model.make_cache(cache, batch_size=1, max_length=room)
    held, decoder = "", tokenizer.decoder()
    for drawn in _draws(model, prompt, None, max_new_tokens, sampler, memory, stops, model):
        if int(drawn) in stops.eos:
            break
        held += decoder.push(int(drawn))
        found = [held.find(s) for s in stops.strings if s in held]
        unsure = max((_overlap(held, s) for s in stops.strings), default=0)
        ready = min(found) if found else len(held) - unsure
        if ready:
            yield held[:ready]
        if found:
            return
        held = held[ready:]
    if held := held + decoder.finish():
        yield held


FUSED = {"cpp.enable_floating_point_contract_flag": "fast"}  # a * b + c in one instruction


def compiled_step(model: CausalLM, cache: KVCache | str | None) -> Callable[..., Tensor]:
    """The model for one new token, compiled once for a cache whose shapes never change.

    Masks and positions are made outside; the compiled part sees tensors of fixed shapes only.
    Raises: ValueError unless the cache is static.
    """
    if not isinstance(cache, KVCache) or not isinstance(cache[0], CACHE_KINDS["static"]):
        raise ValueError(
            "compile=True needs cache='static': a growing cache would be compiled anew"
        )
    if not hasattr(model, "compiled_run"):
        model.compiled_run = torch.compile(model.run, dynamic=False, options=FUSED)
    model.before_compiling()

    def step(ids: Tensor, *, attention_mask: Tensor | None, cache: KVCache, **_: Any) -> Tensor:
        positions, mask, is_causal = model.model.prepare(ids, attention_mask, None, cache)
        # a slice of a longer row has another stride each time, which would be compiled anew
        ids, positions = (x.clone(memory_format=torch.contiguous_format) for x in (ids, positions))
        return model.compiled_run(ids, positions, mask, is_causal, cache)

    return step
