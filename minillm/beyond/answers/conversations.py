"""Conversations as examples, and batches of examples: what is refused, and why.

Shown in notebooks/beyond/13_answers.ipynb; which tokens are learned: `minillm.beyond.answers.sft`.
"""

import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minillm.beyond.answers.sft import Example, token_mask
from minillm.deeper.tokenizer.chat_template import render_answers
from minillm.deeper.training.packing import share_rows
from minillm.support.checks.texts import check_utf8
from minillm.support.checks.words import our_words, quoted
from minillm.support.sources import IndexedSource

ROLES = ("system", "developer", "user", "assistant", "tool")


def conversation_example(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> Example:
    """A conversation as ids, and which of them are the assistant's, end tokens included.

    The assistant's tokens are those that the chat template puts between its {% generation %} marks;
    without marks they are found as `render_answers` says. Warns if the marks leave out the special
    token that ends an answer: a model trained so does not learn to stop.

    Raises: ValueError for an unknown role, a content that is no string, no message of the
        assistant, a mask that is empty, and for what `render_chat` refuses.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages must be a list of dicts, not a {type(messages).__name__}")
    plain = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if all(message["role"] != "assistant" for message in plain):
        raise ValueError(f"no answer: the roles are {[message['role'] for message in plain]}")
    text, spans = render_answers(tokenizer, plain)
    ids = tokenizer.encode(text, allowed_special="all", add_special_tokens=False)
    mask = token_mask(tokenizer, text, ids, spans)
    if not any(mask[1:]):
        raise ValueError("nothing to learn: no token after the first is marked as an answer's")
    special = set(tokenizer.special_tokens.values())
    for t in range(1, len(ids)):
        if mask[t - 1] and not mask[t] and ids[t] in special and ids[t - 1] not in special:
            warnings.warn(
                f"the chat template's marks leave out {tokenizer.decode([ids[t]])!r} after an "
                "answer: a model trained so does not learn to stop",
                stacklevel=2,
            )
            break
    return Example(ids, mask)


def _message(message: Any, place: str) -> dict[str, Any]:
    """A copy of a message. Raises: ValueError for a role or a content that will not do."""
    if not isinstance(message, Mapping):
        raise ValueError(f"{place} must be a dict, not a {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"{place} has the role {quoted(role)}; known are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"{place}['content'] must be a string, not a {type(content).__name__}")
    check_utf8(f"{place}['content']", content)
    return dict(message)


def conversation_examples(
    tokenizer: Any, conversations: Iterable[Sequence[Mapping[str, Any]]]
) -> list[Example]:
    """The examples of many conversations.

    Raises: ValueError, with the number of the conversation, as `conversation_example` does.
    """
    if not isinstance(conversations, Iterable):
        kind = type(conversations).__name__
        raise ValueError(f"conversations must be a list of lists of dicts, not a {kind}")
    examples = []
    for n, messages in enumerate(conversations):
        try:
            examples.append(conversation_example(tokenizer, messages))
        except ValueError as error:
            raise ValueError(f"conversation {n}: {error}") from None
    return examples


@our_words
class ConversationBatches(IndexedSource):
    """Batches of examples, epoch after epoch, each in an order of its own: a `BatchSource`.

    Targets are the next ids; those that the mask leaves out are -100, as those of padding are. With
    `layout="padded"` a row holds one example. With `layout="packed"` a row of `context_length`
    holds as many whole examples as fit, and the inputs are two rows: the ids, and the number of the
    example that each belongs to; `Isolated` makes a model of ids read them.

    Shape: -> inputs (B, T) or, packed, (B, 2, T); targets (B, T).
    Raises: ValueError, with its number, for what is no `Example`, for an example without a target,
        and for one too long for a row, if what would be cut off is to be learned; else it is cut.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,
        context_length: int,
        *,
        layout: Literal["padded", "packed"] = "padded",
        seed: int = 0,
    ) -> None:
        whole = isinstance(batch_size, int) and isinstance(context_length, int)
        if layout not in ("padded", "packed") or not whole or min(batch_size, context_length) < 1:
            raise ValueError(f"{layout=}, {batch_size=}, {context_length=}")
        if not isinstance(examples, list | tuple):
            raise ValueError(f"examples must be a list, not a {type(examples).__name__}")
        if not examples:
            raise ValueError("no examples to train on")
        self.settings: dict[str, Any] = {
            "batch_size": batch_size,
            "context_length": context_length,
            "layout": layout,
            "seed": seed,
            "examples": len(examples),
        }
        self.pairs = [_input_and_target(e, context_length, n) for n, e in enumerate(examples)]
        self._epoch = 0
        self._batches = self._deal()

    def _deal(self) -> list[list[list[int]]]:
        """The batches of the epoch, each a list of rows, each row the numbers of its examples."""
        shuffle = random.Random(f"{self.settings['seed']}/{self._epoch}").shuffle
        order = list(range(len(self.pairs)))
        shuffle(order)
        rows = [[n] for n in order]
        if self.settings["layout"] == "packed":
            lengths = [len(self.pairs[n][0]) for n in order]
            packed = share_rows(lengths, self.settings["context_length"])
            rows = [[order[i] for i in row] for row in packed]
            shuffle(rows)
        size = self.settings["batch_size"]
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    def __repr__(self) -> str:
        size = "{examples} examples, batches of {batch_size} x {context_length}, {layout}"
        return f"ConversationBatches({size.format(**self.settings)})"

    def item(self, index: int) -> tuple[Tensor, Tensor]:
        """Batch number `index`, counted through all epochs."""
        epoch, place = divmod(index, len(self._batches))  # all epochs have as many
        if epoch != self._epoch:
            self._epoch = epoch
            self._batches = self._deal()
        rows = self._batches[place]
        inputs, targets = (
            [torch.cat([self.pairs[n][side] for n in row]) for row in rows] for side in (0, 1)
        )
        ids = pad_sequence(inputs, batch_first=True)
        if self.settings["layout"] == "packed":
            numbers = [
                torch.cat([torch.full_like(self.pairs[n][0], n) for n in row]) for row in rows
            ]
            ids = torch.stack([ids, pad_sequence(numbers, True, padding_value=-1)], dim=1)
        return ids, pad_sequence(targets, True, padding_value=-100)


def _input_and_target(example: Example, context_length: int, number: int) -> tuple[Tensor, Tensor]:
    """Shape: -> (T,), (T,). Raises: ValueError if nothing is to be learned, or would be cut."""
    if not isinstance(example, Example):
        raise ValueError(f"example {number} must be an Example, not a {type(example).__name__}")
    ids, mask = example
    if len(ids) != len(mask) or not any(mask[1:]):
        raise ValueError(
            f"example {number}: {len(ids)} ids, a mask of {len(mask)}, {sum(mask[1:])} targets"
        )
    last = max(t for t, learned in enumerate(mask) if learned)
    if last > context_length:
        raise ValueError(
            f"example {number}: {len(ids)} ids, the last to be learned is number {last + 1}; "
            f"a row of {context_length} would cut it off"
        )
    row = torch.tensor(ids[: context_length + 1])
    learned = torch.tensor(mask[: context_length + 1], dtype=torch.bool)
    return row[:-1], row[1:].masked_fill(~learned[1:], -100)
