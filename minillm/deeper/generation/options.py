"""Objects for what `generate` is asked beside its loop: what ends a row, draws, runs a step.

Written by hand; deeper/10_fast_decoding explains stop strings and the compiled step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from minillm.cache import KVCache
from minillm.deeper.generation.compiled import compiled_step
from minillm.deeper.generation.stream import StopStrings
from minillm.generation import StoppingCriteria
from minillm.sampling import enforce_min_new_tokens


def with_options(
    model: Any,
    sampler: Callable[[Tensor, Tensor], Tensor],
    stopping: StoppingCriteria,
    eos_token_id: int | Sequence[int] | None,
    stop: str | Sequence[str | Sequence[int]] | None,
    tokenizer: Any,
    min_new_tokens: int,
    compile: bool,
    cache: str | KVCache | None,
    input_ids: Tensor,
) -> tuple[Any, Callable[[Tensor, Tensor], Tensor], StoppingCriteria]:
    """What stands in for the model, the sampler and what ends a row.

    Raises: ValueError as `StopStrings`, `HeldOff` and `compiled_step` do.
    """
    if stop is not None:
        stopping = StopStrings(eos_token_id, stop, tokenizer, model.config)
    if min_new_tokens:
        sampler = HeldOff(sampler, stopping, input_ids.shape[1], min_new_tokens)
    return CompiledModel(model, cache) if compile else model, sampler, stopping


class HeldOff:
    """A sampler that draws no end token while there are fewer new tokens than a minimum.

    Raises: ValueError for a negative minimum.
    """

    def __init__(
        self,
        sampler: Callable[[Tensor, Tensor], Tensor],
        stopping: StoppingCriteria,
        length: int,
        minimum: int,
    ) -> None:
        if minimum < 0:
            raise ValueError(f"min_new_tokens must not be negative: {minimum}")
        self.sampler, self.ends = sampler, stopping.eos
        self.length, self.minimum = length, minimum  # the prompt's, and that of new tokens

    def __call__(self, logits: Tensor, previous_ids: Tensor) -> Tensor:
        num_new = previous_ids.shape[1] - self.length
        logits = enforce_min_new_tokens(logits, self.ends, num_new, self.minimum)
        return self.sampler(logits, previous_ids)


class CompiledModel:
    """A `CausalLM` whose step of one token is compiled; a longer piece it reads as before.

    Raises: ValueError unless its cache is static, and for a model that keeps states.
    """

    def __init__(self, model: Any, cache: str | KVCache | None) -> None:
        self.model, self.config = model, model.config
        if not isinstance(cache, str):
            self.step = compiled_step(model, cache)

    def make_cache(self, kind: str, *, batch_size: int, max_length: int) -> KVCache:
        """A cache of a multiple of 256 positions: few sizes to compile for."""
        room = -(-max_length // 256) * 256
        cache = self.model.make_cache(kind, batch_size=batch_size, max_length=room)
        self.step = compiled_step(self.model, cache)
        return cache

    def __call__(self, ids: Tensor, **given: Any) -> Tensor:
        return (self.step if ids.shape[1] == 1 else self.model)(ids, **given)
