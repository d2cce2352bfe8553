"""Generation: one forward pass and one draw a token; batched, cached, streamed, compiled.

Explained in deeper/10_fast_decoding; what is drawn, and how, is in `minillm.generation.sampling`.
"""

# Built from notebooks/deeper/10_fast_decoding.ipynb: edit there, then make build.

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.cache.base import KVCache
from minillm.checks import check_mask, check_utf8
from minillm.config import ModelConfig
from minillm.generation.sampling import GREEDY, end_ids, enforce_min_new_tokens
from minillm.model import CausalLM
from minillm.modes import EvalMode

__all__ = [
    "FROM_CONFIG",
    "StoppingCriteria",
    "check_prompt",
    "context_length",
    "generate",
    "stream_text",
]

FROM_CONFIG: Any = "from config"  # stands for what the model's config says


def check_prompt(
    input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int, vocab_size: int
) -> None:
    """Raises: ValueError for unknown ids, or a prompt that has no right end to continue at."""
    for x in (input_ids, attention_mask):
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"a prompt and its mask must be tensors, not {x!r:.60}")
    if input_ids.dim() != 2 or not input_ids.numel():
        shape = tuple(input_ids.shape)
        raise ValueError(f"a prompt is (B, T) ids, at least one a row, not {shape}")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be an integer, 0 or more, not {max_new_tokens!r}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        shapes = f"{tuple(attention_mask.shape)} and {tuple(input_ids.shape)}"
        raise ValueError(f"attention_mask and input_ids differ in shape: {shapes}")
    check_mask(attention_mask)
    if input_ids.is_meta:
        return  # shapes without numbers
    first, last = int(input_ids.min()), int(input_ids.max())
    if first < 0 or last >= vocab_size:
        wrong = first if first < 0 else last
        raise ValueError(f"the prompt has id {wrong}, the vocabulary ids 0 to {vocab_size - 1}")
    if attention_mask is None:
        return
    mask = attention_mask.bool()
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("padding must stand on the left: generation continues at the right end")


class StoppingCriteria:
    """What ends a row (end token, stop string, sequence of ids), and what fills it afterwards.

    Raises: ValueError for an empty stop, ids outside the vocabulary, strings without a tokenizer.
    """

    def __init__(
        self,
        eos_token_id: int | Sequence[int] | None,
        stop: str | Sequence[str | Sequence[int]] | None,
        tokenizer: Any,
        config: ModelConfig,
    ) -> None:
        if eos_token_id == FROM_CONFIG:
            eos_token_id = config.eos_token_ids
        eos = end_ids(eos_token_id)
        if any(not 0 <= i < config.vocab_size for i in eos):
            raise ValueError(f"end tokens {eos}, but ids are 0..{config.vocab_size - 1}")
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        if any(isinstance(s, Integral) for s in stops):
            raise ValueError(f"stop takes strings or sequences of ids, as in [{stops}]")
        self.eos = set(eos)
        self.strings = [s for s in stops if isinstance(s, str)]
        for string in self.strings:
            check_utf8("a stop string", string)
        self.bytes = [s.encode() for s in self.strings]
        self.sequences = [list(s) for s in stops if not isinstance(s, str)]
        wanted = [i for s in self.sequences for i in s if not 0 <= i < config.vocab_size]
        if wanted:
            raise ValueError(f"stop asks for ids {wanted}, but ids are 0..{config.vocab_size - 1}")
        self.tokenizer = tokenizer
        self.any = bool(eos or stops)
        pad = config.pad_token_id
        self.filler = pad if pad is not None else (eos[0] if eos else 0)
        if not all(stops):
            raise ValueError(f"a stop must not be empty: {stops}")
        if self.strings and tokenizer is None:
            raise ValueError(f"stop strings {self.strings} need a tokenizer")

    def ended(self, new_ids: list[int]) -> bool:
        """Whether the row ends with the last of its new tokens."""
        if new_ids[-1] in self.eos or any(new_ids[-len(s) :] == s for s in self.sequences):
            return True
        if not self.strings:
            return False
        # A token is a byte or more: only so many can hold a stop string that ends in the last one.
        tail = self.tokenizer.decode_bytes(new_ids[-max(map(len, self.bytes)) :])
        return any(s in tail for s in self.bytes)


def _read(ids: Tensor) -> list[int]:
    """The ids as Python's numbers: the one question a step, for which a GPU is waited for."""
    return ids.tolist()


def _one_id_a_row(drawn: Any, rows: int) -> Tensor:
    """What a sampler returned; not its values, for which a GPU would be waited for.

    Raises: ValueError unless it is ids, of that many rows.
    """
    if isinstance(drawn, Tensor):
        if drawn.shape == (rows,) and drawn.dtype in (torch.int64, torch.int32):
            return drawn
        found = f"{drawn.dtype} {tuple(drawn.shape)}"
    else:
        found = f"{drawn!r:.60}"
    raise ValueError(f"a sampler must return ids, int64 or int32 ({rows},), not {found}")


def _decode_loop(
    model: CausalLM,
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
            drawn = _one_id_a_row(sampler(logits[:, -1], seen), B)
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
        if stopping.any:
            for row, token in enumerate(_read(drawn)):
                if running[row]:
                    new[row].append(token)
                    running[row] = not stopping.ended(new[row])
            if not any(running):
                return


def context_length(config: Any) -> int:
    """How many positions the config is for: those of the training, or those of its scaling."""
    trained, scaling = config.max_position_embeddings, getattr(config, "rope_scaling", None) or {}
    original = scaling.get("original_max_position_embeddings") or trained
    return max(trained, int(original * (scaling.get("factor") or 1)))


def _open_cache(
    model: CausalLM,
    cache: str | KVCache | None,
    input_ids: Tensor,
    max_new_tokens: int,
    compile: bool = False,
) -> KVCache | None:
    """An empty cache of that kind with room for all tokens, or the given one, which may hold some.

    Raises: ValueError if it holds the whole prompt: the last token has to be computed; or if it
        would reserve more room than the model has positions.
    """
    B, T = input_ids.shape
    if isinstance(cache, str):
        room, known = T + max_new_tokens, context_length(model.config)
        reserved = {"static": room, "sliding": getattr(model.config, "sliding_window", None)}
        if min(room, reserved.get(cache) or 0) > known:
            raise ValueError(
                f"a prompt of {T} and max_new_tokens={max_new_tokens}, but this model has {known} "
                f"positions: cache={cache!r} reserves no more, cache='dynamic' grows"
            )
        if compile:  # prompts of nearly one length share what is compiled
            room = -(-room // 256) * 256
        return model.make_cache(cache, batch_size=B, max_length=room)
    if cache is not None and cache.length >= T:
        held = f"the cache holds {cache.length} positions of a prompt of {T}"
        raise ValueError(f"{held}, but the last must be new: crop({T - 1}) the cache")
    return cache


def generate(
    model: CausalLM,
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

    Args:
        min_new_tokens: so many tokens come before an end token may.
        sampler: chooses from logits (B, V) and previous ids (B, T) (-1: padding) one id a row.
        attention_mask: 1 for real tokens, 0 for padding, which must stand on the left.
        stop: strings (they need `tokenizer`) or sequences of ids that end a row; they stay in it.
        cache: a kind of cache, one that already holds the beginning of the rows, or None.
        compile: compile the step of one token, once (needs cache="static").
        on_token: called with the ids (B,) of each step; rows that have ended give padding.
    Shape: (B, T) ids -> (B, T + new), rows that ended filled with the pad (or end) token.
    Raises: ValueError for an empty prompt, padding on the right, stop strings without a tokenizer,
        a static cache for more tokens than the model has positions.
    """
    check_prompt(input_ids, attention_mask, max_new_tokens, model.config.vocab_size)
    stopping = StoppingCriteria(eos_token_id, stop, tokenizer, model.config)
    if min_new_tokens < 0:
        raise ValueError(f"min_new_tokens must not be negative: {min_new_tokens}")
    T = input_ids.shape[1]
    memory = _open_cache(model, cache, input_ids, max_new_tokens, compile)
    step = _compiled_step(model, memory) if compile else model

    def choose(logits: Tensor, previous_ids: Tensor) -> Tensor:
        num_new = previous_ids.shape[1] - T
        logits = enforce_min_new_tokens(logits, stopping.eos, num_new, min_new_tokens)
        return sampler(logits, previous_ids)

    parts = [input_ids]
    options = (model, input_ids, attention_mask, max_new_tokens, choose, memory, stopping, step)
    with EvalMode(model):  # once for all steps
        for drawn in _decode_loop(*options):
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
    prompt: str | Sequence[Mapping[str, Any]] | Tensor,
    *,
    max_new_tokens: int,
    sampler: Callable[[Tensor, Tensor], Tensor] = GREEDY,
    stop: str | Sequence[str] | None = None,
    cache: str | KVCache = "dynamic",
    on_token: Callable[[Tensor], object] | None = None,
) -> Iterator[str]:
    """The continuation of one prompt, piece by piece as whole characters appear.

    `prompt` is a text; or a conversation, a list of messages such as {"role": "user", "content":
    "Hi"}, which the tokenizer's chat template writes as ids; or ids (1, T). The answer in a
    conversation ends before a special token, be it the token or its spelling. What could be the
    beginning of a stop string is held back until it is known; the stop string is left out.
    `cache` and `on_token` are as in `generate`.
    Raises: ValueError as `generate`, and if the chat template refuses the conversation.
    """
    if isinstance(prompt, str):
        prompt = torch.tensor([tokenizer.encode(prompt)], dtype=torch.long)
    elif not isinstance(prompt, Tensor):
        prompt = torch.tensor([tokenizer.apply_chat_template(prompt)], dtype=torch.long)
        stop = [stop] if isinstance(stop, str) else list(stop or ())
        stop += tokenizer.special_tokens  # no message may spell one, so no answer may either
    prompt = prompt.to(model.lm_head.weight.device)
    check_prompt(prompt, None, max_new_tokens, model.config.vocab_size)
    stopping = StoppingCriteria(FROM_CONFIG, stop, tokenizer, model.config)
    memory = _open_cache(model, cache, prompt, max_new_tokens)
    held, decoder = "", tokenizer.decoder()
    options = (model, prompt, None, max_new_tokens, sampler, memory, stopping, model)
    for drawn in _decode_loop(*options):
        if on_token is not None:
            on_token(drawn)
        (token,) = _read(drawn)
        if token in stopping.eos:
            break
        held += decoder.push(token)
        found = [held.find(s) for s in stopping.strings if s in held]
        begun = [s for s in stopping.strings if s[0] in held]  # there may be thousands
        unsure = max((_overlap(held, s) for s in begun), default=0)
        ready = min(found) if found else len(held) - unsure
        if ready:
            yield held[:ready]
        if found:
            return
        held = held[ready:]
    if held := held + decoder.finish():
        yield held


_FUSED: dict[str, Any] = {
    "cpp.enable_floating_point_contract_flag": "fast"
}  # a * b + c in one instruction


def _compiled_step(model: CausalLM, cache: KVCache | str | None) -> Callable[..., Tensor]:
    """The model for one new token, compiled once for a cache whose shapes never change.

    Masks and positions are made outside; the compiled part sees tensors of fixed shapes only.
    Raises: ValueError unless the cache is static, and for a model that keeps states.
    """
    if model.config.stateful:
        raise ValueError(f"compile=True: a step of {model.config.model_type} cannot be compiled")
    if not isinstance(cache, KVCache) or not cache[0].fixed_shapes:
        raise ValueError(
            "compile=True needs cache='static': a growing cache would be compiled anew"
        )
    if not hasattr(model, "compiled_run"):
        model.compiled_run = torch.compile(model.run, dynamic=False, options=_FUSED)
    model.before_compiling()

    def step(ids: Tensor, *, attention_mask: Tensor | None, cache: KVCache, **_: Any) -> Tensor:
        positions, mask, is_causal = model.model.prepare(ids, attention_mask, None, cache)
        # a slice of a longer row has another stride each time, which would be compiled anew
        ids, positions = (x.clone(memory_format=torch.contiguous_format) for x in (ids, positions))
        return model.compiled_run(ids, positions, mask, is_causal, cache)

    return step
