"""Batches: documents in rows, windows of a long text, the shift by one (notebook 07)."""

# Built from notebooks/07_training.ipynb: edit there, then make build.

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from minillm.checks import check_end, check_sizes, check_token_row, index_in

__all__ = [
    "BatchSource",
    "IndexedSource",
    "RowBatches",
    "WindowBatches",
    "batch_source",
    "document_row",
    "epoch_order",
    "get_batch",
    "pad_rows",
]


def document_row(ids: Iterable[int], eos_token_id: int) -> list[int]:
    """A document between two end tokens; one that it begins with itself is not written twice."""
    row = [*map(int, ids), eos_token_id]  # numpy's integers are no JSON
    return row if len(row) > 1 and row[0] == eos_token_id else [eos_token_id, *row]


def pad_rows(rows: list[list[int]], width: int, fill: int) -> tuple[Tensor, Tensor]:
    """Rows of different length as inputs and targets, shifted by one; targets of padding are -100.

    Shape: rows of at most W ids -> inputs (B, W - 1), targets (B, W - 1).
    """
    filled = np.full((len(rows), width), fill, dtype=np.int64)
    targets = np.full((len(rows), width - 1), -100, dtype=np.int64)
    for i, row in enumerate(rows):
        filled[i, : len(row)] = row
        targets[i, : len(row) - 1] = row[1:]
    return torch.from_numpy(filled[:, :-1].copy()), torch.from_numpy(targets)


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order in which an epoch takes `count` things: of the seed and the epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(count)


class IndexedSource:
    """What gives items without end, item i depending on `settings` and on i alone.

    So a number, `index`, says where it stands. One of your own sets `settings` (plain JSON) and
    says what `item(index)` is.
    """

    settings: dict[str, Any]  # what must not change
    index = 0  # of the next item

    def item(self, index: int) -> Any:
        """Item number `index`."""
        raise NotImplementedError

    def __iter__(self) -> "IndexedSource":
        return self

    def __next__(self) -> Any:
        item = self.item(self.index)
        self.index += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, with the settings that must not change."""
        return {**self.settings, "index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where `state` says. Raises: ValueError if its settings are others than ours."""
        self.index = index_in(state, self.state_dict())


class RowBatches(IndexedSource):
    """Rows of tokens, some at a time, padded to the longest of them; each row once an epoch.

        rows = [[*tokenizer.encode(text), end] for text in texts]
        inputs, targets = next(RowBatches(rows, 16, end))

    The order of an epoch depends on the seed and on the epoch alone; its last batch may be smaller.

    Shape: -> inputs (B, T), targets (B, T), int64; targets of padding are -100.
    Raises: ValueError if there is no row, or no end token.
    """

    def __init__(
        self, rows: Sequence[list[int]], batch_size: int, eos_token_id: int, *, seed: int = 0
    ) -> None:
        check_sizes(batch_size=batch_size, rows=len(rows))
        check_end(eos_token_id)
        self.rows, self.batch_size, self.eos_token_id = rows, batch_size, eos_token_id
        self.settings = {"batch_size": batch_size, "seed": seed, "rows": len(rows)}

    def __repr__(self) -> str:
        return f"RowBatches({len(self.rows):,} rows, {self.batch_size} a batch)"

    def item(self, index: int) -> tuple[Tensor, Tensor]:
        """Batch number `index`."""
        epoch, place = divmod(index, -(-len(self.rows) // self.batch_size))
        order = epoch_order(self.settings["seed"], epoch, len(self.rows))
        rows = [self.rows[i] for i in order[place * self.batch_size :][: self.batch_size]]
        return pad_rows(rows, max(map(len, rows)), self.eos_token_id)


def get_batch(
    tokens: Tensor | np.ndarray,
    batch_size: int,
    context_length: int,
    *,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Random windows and, shifted by one, what follows each of their tokens.

    The shift by one happens here (and in `pad_rows`, for documents) and nowhere else.

    Shape: tokens (N,) -> inputs (B, T), targets (B, T), int64; inputs[:, 1:] == targets[:, :-1].
    Raises: ValueError if no window of T + 1 tokens fits, or for a text instead of its ids.
    """
    check_token_row(tokens)
    if batch_size < 1 or context_length < 1 or len(tokens) < context_length + 1:
        raise ValueError(
            f"{batch_size} windows of {context_length} + 1 tokens from {len(tokens)} tokens"
        )
    starts = torch.randint(len(tokens) - context_length, (batch_size,), generator=generator)
    windows = [tokens[s : s + context_length + 1] for s in starts.tolist()]
    stacked = np.stack([w.cpu() if isinstance(w, Tensor) else w for w in windows])
    rows = torch.from_numpy(stacked.astype(np.int64)).to(device)
    return rows[:, :-1], rows[:, 1:]


class WindowBatches(IndexedSource):
    """Random windows of a row of tokens; batch i depends on the seed and on i alone.

        batches = WindowBatches(torch.tensor(tokenizer.encode(text)), 16, 256)
        inputs, targets = next(batches)

    Shape: tokens (N,), a tensor, an array or a `TokenDataset` -> inputs (B, T), targets (B, T).
    Raises: ValueError for a text instead of its ids; as batches are drawn, if no window fits.
    """

    def __init__(self, tokens: Any, batch_size: int, context_length: int, *, seed: int = 0) -> None:
        check_token_row(tokens)
        self.tokens, self.batch_size, self.context_length = tokens, batch_size, context_length
        sizes = {"batch_size": batch_size, "context_length": context_length}
        self.settings = {**sizes, "seed": seed, "tokens": len(tokens)}

    def __repr__(self) -> str:
        size = f"batches of {self.batch_size} x {self.context_length}"
        return f"WindowBatches({len(self.tokens):,} tokens, {size})"

    def item(self, index: int) -> tuple[Tensor, Tensor]:
        """Batch number `index`."""
        mixed = np.random.SeedSequence([self.settings["seed"], index]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(mixed))  # torch's seeds have 32 bits
        return get_batch(self.tokens, self.batch_size, self.context_length, generator=generator)


class BatchSource(Protocol):
    """What `Trainer` draws from: batches without end, and a state (plain JSON) to go back to."""

    def __next__(self) -> tuple[Tensor, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def batch_source(batches: Any) -> BatchSource:
    """`batches` itself if it has a state; any other iterable of (inputs, targets) is given one.

    Raises: ValueError for what is no batches, such as texts.
    """
    if all(hasattr(batches, name) for name in ("__next__", "state_dict", "load_state_dict")):
        return batches
    from minillm.training.plain_batches import PlainBatches

    return PlainBatches(batches)
