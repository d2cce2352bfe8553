"""Stop strings, and text that is handed out while it is made.

Explained in deeper/10_fast_decoding; the loop itself is in `minillm.generation`.
"""

# Built from notebooks/deeper/10_fast_decoding.ipynb: edit there, then make build.

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.generation import FROM_CONFIG, StoppingCriteria, decode_loop
from minillm.model import CausalLM
from minillm.sampling import GREEDY
from minillm.support.checks.model import check_model, check_prompt
from minillm.support.checks.texts import check_tokenizer, check_utf8, ids_of
from minillm.support.checks.words import our_words
from minillm.support.modes import open_cache

__all__ = ["StopStrings", "stream_text"]


class StopStrings(StoppingCriteria):
    """What ends a row beside end tokens: strings, sequences of ids.

    Raises: ValueError for an empty stop, ids outside the vocabulary, strings without a tokenizer.
    """

    def __init__(
        self,
        eos_token_id: int | Sequence[int] | None,
        stop: str | Sequence[str | Sequence[int]] | None,
        tokenizer: Any,
        config: ModelConfig,
    ) -> None:
        super().__init__(eos_token_id, config)
        stops = [stop] if isinstance(stop, str) else list(() if stop is None else stop)
        if any(isinstance(s, Integral) or getattr(s, "ndim", 1) == 0 for s in stops):
            raise ValueError(f"stop takes strings or sequences of ids, as in [{stops}]")
        self.strings = [s for s in stops if isinstance(s, str)]
        for string in self.strings:
            check_utf8("a stop string", string)
        self.bytes = [s.encode() for s in self.strings]
        self.sequences = [ids_of(s) for s in stops if not isinstance(s, str)]
        wanted = [i for s in self.sequences for i in s if not 0 <= i < config.vocab_size]
        if wanted:
            raise ValueError(f"stop asks for ids {wanted}, but ids are 0..{config.vocab_size - 1}")
        self.tokenizer, self.any = tokenizer, bool(self.eos or stops)
        if not all((*self.strings, *self.sequences)):
            raise ValueError(f"a stop must not be empty: {stops}")
        if self.strings and tokenizer is None:
            raise ValueError(f"stop strings {self.strings} need a tokenizer")

    def ended(self, new_ids: list[int]) -> bool:
        if super().ended(new_ids) or any(new_ids[-len(s) :] == s for s in self.sequences):
            return True
        if not self.strings:
            return False
        # Most tokens are a byte or more: so many hold what a stop string that ends here may need.
        needed = count = max(map(len, self.bytes))
        tail = self.tokenizer.decode_bytes(new_ids[-count:])
        while len(tail) < needed and count < len(new_ids):  # an id without a token is no byte
            count *= 2
            tail = self.tokenizer.decode_bytes(new_ids[-count:])
        return any(s in tail for s in self.bytes)


def _overlap(text: str, stop: str) -> int:
    """How many last characters of `text` are first characters of `stop`."""
    return next(n for n in range(min(len(text), len(stop)), -1, -1) if text.endswith(stop[:n]))


@our_words
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
    check_tokenizer(tokenizer)
    if isinstance(prompt, str):
        prompt = torch.tensor([tokenizer.encode(prompt)], dtype=torch.long)
    elif not isinstance(prompt, Tensor):
        prompt = torch.tensor([tokenizer.apply_chat_template(prompt)], dtype=torch.long)
        stop = [stop] if isinstance(stop, str) else list(stop or ())
        stop += tokenizer.special_tokens  # no message may spell one, so no answer may either
    prompt = prompt.to(model.lm_head.weight.device)
    check_model(model)
    check_prompt(prompt, None, max_new_tokens, model.config.vocab_size)
    stopping = StopStrings(FROM_CONFIG, stop, tokenizer, model.config)
    memory = open_cache(model, cache, prompt, max_new_tokens)
    held, decoder = "", tokenizer.decoder()
    options = (model, prompt, None, max_new_tokens, sampler, memory, stopping)
    for drawn in decode_loop(*options):
        if on_token is not None:
            on_token(drawn)
        token = int(drawn)
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
