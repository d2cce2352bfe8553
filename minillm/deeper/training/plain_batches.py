"""Batches from any iterable, for a trainer that wants to know where they stand. By hand."""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from minillm.support.checks.kinds import count_in
from minillm.support.checks.words import quoted

Batch = tuple[Tensor, Tensor]


class PlainBatches:
    """Batches of a list, a generator or a `DataLoader`, with as much of a state as they allow.

    A list or a loader begins anew when it is used up. A step that is undone gets its batches again.
    A run that resumes begins them from their start, with a warning.

    Raises: ValueError for what gives no batches; as they are drawn, for a batch that is no pair of
        tensors, and for a generator that has ended.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        if isinstance(batches, str | bytes | os.PathLike) or not hasattr(batches, "__iter__"):
            raise ValueError(f"batches must give (inputs, targets), not be {quoted(batches)}")
        self.batches, self.iterator = batches, iter(batches)
        self.count = 0  # batches given since the beginning
        self.drawn: list[Batch] | None = None  # since `state_dict`, once it was asked
        self.waiting: list[Batch] = []  # to be given again

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.waiting.pop(0) if self.waiting else self._new()
        self.count += 1
        if self.drawn is not None:
            self.drawn.append(batch)
        return batch

    def _new(self) -> Batch:
        for again in (True, False):
            try:
                batch: Any = next(self.iterator)
                break
            except StopIteration:
                if not again:
                    end = "a generator gives its batches once, a list again and again"
                    raise ValueError(f"the batches ended after {self.count}: {end}") from None
                self.iterator = iter(self.batches)
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not (pair and all(isinstance(x, Tensor) for x in batch)):
            road = "of texts, RowBatches or TextDocuments and DocumentBatches make batches"
            if isinstance(batch, Mapping):  # as transformers has them: it shifts by one itself
                road = "of ids (B, T) inputs are ids[:, :-1], targets ids[:, 1:]"
            if hasattr(batch, "mask"):  # an `Example`
                road = "ConversationBatches(examples, batch_size, context_length) makes batches"
            raise ValueError(f"a batch must be (inputs, targets), not {quoted(batch)}; {road}")
        return batch[0], batch[1]

    def state_dict(self) -> dict[str, Any]:
        """How many batches were given; from here on the next ones are remembered."""
        self.drawn = []
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back to where `state_dict` was asked last; from elsewhere, to the start."""
        count, drawn = count_in(state, "count"), self.drawn or []
        if count == self.count - len(drawn):
            self.waiting = drawn + self.waiting
        else:
            begin = "batches without a state begin from their start"
            warnings.warn(f"{begin}; the run had used {count}", stacklevel=2)
            self.iterator, self.waiting = iter(self.batches), []
        self.count, self.drawn = count, []
