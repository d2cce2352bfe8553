"""A conversation with a chat model: of each question, only what is new is computed.

Explained in deeper/10_chat; how a conversation becomes ids is in deeper/02_chat_templates.
"""

# Built from notebooks/deeper/10_chat.ipynb: edit there, then make build.

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.deeper.generation.stream import stream_text
from minillm.model import CausalLM
from minillm.sampling import GREEDY

__all__ = ["ContextFullError", "Conversation", "common_prefix"]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first ids of the two are the same."""
    pairs = zip(a, b, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


class ContextFullError(ValueError):
    """The conversation has more tokens than the model can read."""


class Conversation:
    """The messages of a conversation, and the keys and values of what was computed for them.

    `messages` says what has been said, and nothing else does: for each answer the chat template
    writes all of them as ids, and the cache is cut back to where these differ from the ids that it
    was computed for. So you may change `messages` between two answers.

    Args:
        messages: what the conversation begins with, now and after `reset`: a system message.
    Attributes:
        ids: the tokens of the last prompt and its answer; the cache holds a beginning of them.
        prompt_length, reused: tokens of the last prompt, and how many of them the cache held.
        ended: whether the last answer ended by itself (it may also be stopped, or become too long).
    Raises: ValueError if there is no tokenizer, or no chat template.
    """

    def __init__(
        self, model: CausalLM, tokenizer: Any, messages: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        if tokenizer is None or tokenizer.chat_template is None:
            lacks = "tokenizer" if tokenizer is None else "chat template"
            raise ValueError(
                f"a model without a {lacks} cannot chat; python -m minillm generate "
                "NAME --prompt ... goes on with a text"
            )
        self.model, self.tokenizer = model, tokenizer
        self.beginning = list(messages)
        self.cache = model.make_cache(batch_size=1)
        self.ids: list[int] = []
        self.prompt_length = self.reused = 0
        self.reset()

    def reset(self) -> None:
        """Back to the messages of the beginning; their keys and values stay for the next answer."""
        self.messages: list[dict[str, Any]] = [dict(message) for message in self.beginning]
        self.ended = True

    @property
    def context_length(self) -> int:
        """How many tokens the model can read: its config's number, or what its scaling covers."""
        rotary, trained = self.model.model.rotary, self.model.config.max_position_embeddings
        covered = trained if rotary is None else rotary.max_length
        return trained if covered == math.inf else int(covered)

    def ask(self, text: str, **options: Any) -> str:
        """The whole answer to what the user says; options and errors as those of `stream`."""
        return "".join(self.stream(text, **options))

    def stream(
        self,
        text: str,
        *,
        max_new_tokens: int = 1024,
        sampler: Callable[[Tensor, Tensor], Tensor] = GREEDY,
    ) -> Iterator[str]:
        """Take in what the user says; then the answer, piece by piece, as `stream_text`.

        Each piece is in `messages` once it is handed out. Whoever stops asking for pieces ends the
        answer there: the conversation goes on from what was handed out.
        Raises: ContextFullError if nothing more fits; ValueError if the chat template refuses the
            messages, or if `text` spells a special token. Nothing has changed then.
        """
        if max_new_tokens < 1:
            raise ValueError(f"an answer needs max_new_tokens of at least 1, not {max_new_tokens}")
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.tokenizer.apply_chat_template(messages)
        room = self.context_length - len(ids)
        if room < 1:
            raise ContextFullError(
                f"the context is full: the conversation would have {len(ids):,} tokens, "
                f"and this model can read {self.context_length:,}"
            )
        # an interrupted pass has reached some layers only
        held = min(layer.length for layer in self.cache.layers)
        # the last is always computed: its scores are what the first new token is drawn from
        self.reused = min(common_prefix(self.ids, ids), held, len(ids) - 1)
        if self.model.config.stateful:
            whole = all(layer.length == self.reused for layer in self.cache.layers)
            self.reused = self.reused if whole else 0  # a state cannot go back to a part
        self.cache.crop(self.reused)
        self.ids, self.prompt_length = ids, len(ids)
        answer = {"role": "assistant", "content": ""}
        self.messages, self.ended = [*messages, answer], False
        pieces = stream_text(
            self.model,
            self.tokenizer,
            torch.tensor([ids]),
            max_new_tokens=min(max_new_tokens, room),
            sampler=sampler,
            stop=list(self.tokenizer.special_tokens),
            cache=self.cache,
            on_token=lambda drawn: self.ids.append(int(drawn)),
        )
        return self._hand_out(pieces, answer, min(max_new_tokens, room))

    def _hand_out(
        self, pieces: Iterator[str], answer: dict[str, Any], max_new_tokens: int
    ) -> Iterator[str]:
        """The pieces, each added to the answer first; nothing more once another question came."""
        while self.messages and self.messages[-1] is answer:
            piece = next(pieces, None)
            if piece is None:
                new = self.ids[self.prompt_length :]
                # what ended it, an end token or a special one, is not in the answer
                written = self.tokenizer.decode_bytes(new).decode("utf-8", "replace")
                self.ended = len(new) < max_new_tokens or written != answer["content"]
                return
            answer["content"] += piece
            yield piece
