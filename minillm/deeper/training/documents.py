"""Whole documents for training: fresh stories, a list of texts, rows that begin with them.

Explained in deeper/07_data_sources.
"""

# Built from notebooks/deeper/07_data_sources.ipynb: edit there, then make build.

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from minillm.deeper.training.packing import batches_of_like_length, pack
from minillm.support.checks.kinds import check_settings, count_in
from minillm.support.checks.texts import check_texts
from minillm.support.checks.training import check_begin, check_documents, check_end
from minillm.support.checks.words import quoted
from minillm.support.sources import IndexedSource
from minillm.training import document_row, epoch_order, pad_rows

__all__ = ["DocumentBatches", "StoryDocuments", "TextDocuments"]


class StoryDocuments(IndexedSource):
    """Fresh stories without end, as token ids: story number i depends on the seed and on i alone.

    `language` has `sample(rng)`, which returns an object with a `text`, as `StoryLanguage` does;
    `encode` is a tokenizer's `encode_ordinary`. For `DocumentBatches`.

    Raises: ValueError for texts instead of a language.
    """

    def __init__(
        self, language: Any, encode: Callable[[str], list[int]], *, seed: int | str = 0
    ) -> None:
        if not hasattr(language, "sample"):
            texts = "a list of texts is TextDocuments(texts, encode)"
            raise ValueError(f"language must have sample(rng), not be {quoted(language)}; {texts}")
        self.language, self.encode, self.seed = language, encode, seed
        self.settings = {"seed": seed, "lang": getattr(language, "lang", None)}

    def text(self, index: int) -> str:
        """The text of story number `index`."""
        return self.language.sample(random.Random(f"{self.seed}/{index}")).text

    def item(self, index: int) -> list[int]:
        """The ids of story number `index`."""
        return self.encode(self.text(index))


class TextDocuments(IndexedSource):
    """The texts of a list as token ids, epoch after epoch, each in an order of its own.

    `encode` is a tokenizer's `encode_ordinary`. For `DocumentBatches`.

    Raises: ValueError if there is no text, or one text instead of several.
    """

    def __init__(
        self, texts: Sequence[str], encode: Callable[[str], list[int]], *, seed: int = 0
    ) -> None:
        check_texts(texts)
        self.texts, self.encode = list(texts), encode
        self.settings = {"seed": seed, "texts": len(self.texts)}
        if not self.texts:
            raise ValueError("no text to train on")

    def item(self, index: int) -> list[int]:
        """The ids of text number `index`, counted through all epochs."""
        epoch, place = divmod(index, len(self.texts))
        order = epoch_order(self.settings["seed"], epoch, len(self.texts))
        return self.encode(self.texts[order[place]])


def _deal(
    rows: list[list[int]], settings: dict[str, Any], number: int
) -> tuple[list[list[list[int]]], list[list[int]]]:
    """The batches of buffer `number`, the first to be dealt first, and the rows carried over."""
    size, length = settings["batch_size"], settings["context_length"]
    shuffle = random.Random(f"{settings['seed']}/{number}").shuffle
    if settings["layout"] == "padded":
        rows = sorted(rows, key=len, reverse=number % 2 == 1)  # in turn: the carry must not stay
        batches = batches_of_like_length(rows, size * length)
    else:
        rows = pack(rows, length + 1)
        shuffle(rows)
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    carry = batches.pop() if len(batches) > 1 else []
    shuffle(batches)
    return batches, carry


class DocumentBatches:
    """Batches whose rows begin where a document begins; no document is cut.

    A row is the begin token, a document, the end token; without `bos_token_id` the end token says
    "begin here", too. With `layout="padded"` a row holds one document; rows of like length share a
    batch of about `batch_size * context_length` tokens, with -100 as the target of padding. With
    `layout="packed"` a row of `context_length` holds as many whole documents as fit, one after the
    other, and a batch has `batch_size` rows. Documents are drawn and dealt for `shuffle_buffer`
    batches at a time.

    A document that is longer than a row is left out, with a warning, and counted in `skipped`.

        documents = TextDocuments(texts, tokenizer.encode_ordinary)
        batches = DocumentBatches(documents, 16, 256, eos_token_id=tokenizer.eos_token_id)

    For a tokenizer that may have a begin token of its own, add `bos_token_id=begin_id(tokenizer)`.

    Shape: -> inputs (B, T), targets (B, T), int64.
    Raises: ValueError if `documents` is a text or a list of them (that is `TextDocuments`), without
        an end token, or, before the first batch, if most of the first documents are too long.
    """

    def __init__(
        self,
        documents: Any,
        batch_size: int,
        context_length: int,
        *,
        eos_token_id: int,
        bos_token_id: int | None = None,
        layout: Literal["padded", "packed"] = "padded",
        shuffle_buffer: int = 16,
        seed: int = 0,
    ) -> None:
        sizes = (batch_size, context_length, shuffle_buffer)
        if layout not in ("padded", "packed") or min(sizes) < 1:
            raise ValueError(f"{layout=}, {batch_size=}, {context_length=}, {shuffle_buffer=}")
        check_documents(documents)
        check_end(eos_token_id)
        check_begin(bos_token_id)
        self.documents, self.eos_token_id, self.skipped = documents, eos_token_id, 0
        self.bos_token_id = eos_token_id if bos_token_id is None else bos_token_id
        self.settings: dict[str, Any] = {
            "batch_size": batch_size,
            "context_length": context_length,
            "layout": layout,
            "shuffle_buffer": shuffle_buffer,
            "seed": seed,
            "eos_token_id": eos_token_id,
        }
        if self.bos_token_id != eos_token_id:
            self.settings["bos_token_id"] = bos_token_id
        self._carry: list[list[int]] = []  # rows that did not fill a batch, for the next buffer
        self._buffer: list[list[list[int]]] = []  # batches of rows, the next one first
        self._before: dict[str, Any] = {}
        self._taken = self._number = 0

    def _fill(self) -> None:
        """Draw documents for the next buffer of batches and deal them out."""
        self._before = {"documents": self.documents.state_dict(), "carry": self._carry}
        self._before |= {"number": self._number, "skipped": self.skipped}
        size, length = self.settings["batch_size"], self.settings["context_length"]
        rows, tokens, skipped = list(self._carry), sum(map(len, self._carry)), self.skipped
        while tokens < self.settings["shuffle_buffer"] * size * length:
            row = document_row(next(self.documents), self.eos_token_id, self.bos_token_id)
            if len(row) <= length + 1:
                rows.append(row)
                tokens += len(row) - 1
                continue
            self.skipped += 1
            long = f"a document of {len(row) - 1} tokens does not fit rows of {length}"
            if self._number == 0 and self.skipped - skipped > max(8, len(rows)):
                raise ValueError(f"{long}, nor do most of the first {self.skipped + len(rows)}")
        if self.skipped.bit_length() > skipped.bit_length():  # at 1, 2, 4, 8, ...: not each of many
            warnings.warn(f"{long}: left out ({self.skipped} so far)", stacklevel=3)
        self._buffer, self._carry = _deal(rows, self.settings, self._number)
        self._taken, self._number = 0, self._number + 1

    def __repr__(self) -> str:
        size = "{batch_size} x {context_length}, {layout}".format(**self.settings)
        return f"DocumentBatches({type(self.documents).__name__}, batches of {size})"

    def __iter__(self) -> "DocumentBatches":
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        while self._taken >= len(self._buffer):
            self._fill()
        rows = self._buffer[self._taken]
        self._taken += 1
        width = self.settings["context_length"] + 1
        if self.settings["layout"] == "padded":
            width = min(width, -(-(max(map(len, rows)) - 1) // 8) * 8 + 1)
        return pad_rows(rows, width, self.eos_token_id)

    def state_dict(self) -> dict[str, Any]:
        """Where we stand: the stream before the buffer, rows carried in, batches taken."""
        if not self._before:
            self._fill()
        return {**self.settings, **self._before, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where `state` says. Raises: ValueError if its settings are others than ours."""
        check_settings({k: state.get(k) for k in self.settings}, self.settings)
        number, skipped, taken = (count_in(state, k) for k in ("number", "skipped", "taken"))
        carry = state.get("carry")
        if not isinstance(carry, list) or not all(_is_row(row) for row in carry):
            raise ValueError(f"carry must be rows of ids, not {carry!r:.60}")
        if not isinstance(state.get("documents"), dict):
            raise ValueError(f"documents must be a state, not {state.get('documents')!r:.60}")
        self.documents.load_state_dict(state["documents"])
        self._carry, self._number, self.skipped = carry, number, skipped
        self._fill()
        self._taken = taken


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and all(type(i) is int for i in row)
