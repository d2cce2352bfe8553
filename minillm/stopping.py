"""Where a generated text ends, and which prompts can be continued at all.

Explained in notebooks/10_minillm.ipynb; used by `minillm.generation` and `minillm.speculative`.
"""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from torch import Tensor

from minillm.config import ModelConfig

__all__ = ["FROM_CONFIG", "Stops", "check_prompt"]

FROM_CONFIG: Any = object()  # stands for "what the model's config says"


def check_prompt(
    input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int, vocab_size: int
) -> None:
    """Raises: ValueError for unknown ids, or a prompt that has no right end to continue at."""
    if input_ids.dim() != 2 or not input_ids.numel():
        shape = tuple(input_ids.shape)
        raise ValueError(f"a prompt is (B, T) ids, at least one a row, not {shape}")
    first, last = int(input_ids.min()), int(input_ids.max())
    if first < 0 or last >= vocab_size:
        wrong = first if first < 0 else last
        raise ValueError(f"the prompt has id {wrong}, the vocabulary ids 0 to {vocab_size - 1}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative: {max_new_tokens}")
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        shapes = f"{tuple(attention_mask.shape)} and {tuple(input_ids.shape)}"
        raise ValueError(f"attention_mask and input_ids differ in shape: {shapes}")
    mask = attention_mask.bool()
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("padding must stand on the left: generation continues at the right end")


class Stops:
    """What ends a row (end token, stop string, sequence of ids), and what fills it afterwards."""

    def __init__(
        self,
        eos_token_id: int | Sequence[int] | None,
        stop: str | Sequence[str | Sequence[int]] | None,
        tokenizer: Any,
        config: ModelConfig,
        min_new_tokens: int = 0,
    ) -> None:
        if eos_token_id is FROM_CONFIG:
            eos_token_id = config.eos_token_ids
        eos = (eos_token_id,) if isinstance(eos_token_id, Integral) else tuple(eos_token_id or ())
        if any(not 0 <= i < config.vocab_size for i in eos):
            raise ValueError(f"end tokens {eos}, but ids are 0..{config.vocab_size - 1}")
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        if any(isinstance(s, Integral) for s in stops):
            raise ValueError(f"stop takes strings or sequences of ids, as in [{stops}]")
        self.eos = set(eos)
        self.strings = [s for s in stops if isinstance(s, str)]
        self.bytes = [s.encode() for s in self.strings]
        self.sequences = [list(s) for s in stops if not isinstance(s, str)]
        wanted = [i for s in self.sequences for i in s if not 0 <= i < config.vocab_size]
        if wanted:
            raise ValueError(f"stop asks for ids {wanted}, but ids are 0..{config.vocab_size - 1}")
        if min_new_tokens < 0:
            raise ValueError(f"min_new_tokens must not be negative: {min_new_tokens}")
        self.tokenizer = tokenizer
        self.any = bool(eos or stops)
        pad = config.pad_token_id
        self.filler = pad if pad is not None else (eos[0] if eos else 0)
        self.minimum = min_new_tokens
        if not all(stops):
            raise ValueError(f"a stop must not be empty: {stops}")
        if self.strings and tokenizer is None:
            raise ValueError(f"stop strings {self.strings} need a tokenizer")

    def hold_off(self, logits: Tensor, count: int) -> Tensor:
        """Scores (B, V) that forbid end tokens while fewer than the minimum of tokens are new."""
        if count >= self.minimum or not self.eos:
            return logits
        forbidden = logits.clone()
        forbidden[:, sorted(self.eos)] = -math.inf
        return forbidden

    def ended(self, new_ids: list[int]) -> bool:
        """Whether the row ends with the last of its new tokens."""
        if new_ids[-1] in self.eos or any(new_ids[-len(s) :] == s for s in self.sequences):
            return True
        if not self.strings:
            return False
        # A token is a byte or more: only so many can hold a stop string that ends in the last one.
        tail = self.tokenizer.decode_bytes(new_ids[-max(map(len, self.bytes)) :])
        return any(s in tail for s in self.bytes)
