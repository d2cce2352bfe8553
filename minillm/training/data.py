"""Tokens for training: files mapped into memory, random windows, batches.

Explained in deeper/07_data_sources.
"""

# Built from notebooks/deeper/07_data_sources.ipynb: edit there, then make build.

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from minillm.checks import check_settings, count_in

__all__ = ["BatchSource", "TokenDataset", "WindowBatches", "document_row", "get_batch", "pad_rows"]


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
    Raises: ValueError if no window of T + 1 tokens fits.
    """
    if batch_size < 1 or context_length < 1 or len(tokens) < context_length + 1:
        raise ValueError(
            f"{batch_size} windows of {context_length} + 1 tokens from {len(tokens)} tokens"
        )
    starts = torch.randint(len(tokens) - context_length, (batch_size,), generator=generator)
    windows = [tokens[s : s + context_length + 1] for s in starts.tolist()]
    stacked = np.stack([w.cpu() if isinstance(w, Tensor) else w for w in windows])
    rows = torch.from_numpy(stacked.astype(np.int64)).to(device)
    return rows[:, :-1], rows[:, 1:]


class BatchSource(Protocol):
    """What `Trainer` draws from: batches without end, and a state (plain JSON) to go back to."""

    def __next__(self) -> tuple[Tensor, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class WindowBatches:
    """Random windows of a row of tokens; batch i depends on the seed and on i alone."""

    def __init__(self, tokens: Any, batch_size: int, context_length: int, *, seed: int = 0) -> None:
        self.tokens, self.batch_size, self.context_length = tokens, batch_size, context_length
        self.seed, self.index = seed, 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        mixed = np.random.SeedSequence([self.seed, self.index]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(mixed))  # torch's seeds have 32 bits
        batch = get_batch(self.tokens, self.batch_size, self.context_length, generator=generator)
        self.index += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, with the settings that must not change."""
        settings = {"batch_size": self.batch_size, "context_length": self.context_length}
        return {**settings, "seed": self.seed, "tokens": len(self.tokens), "index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where `state` says. Raises: ValueError if its settings are others than ours."""
        check_settings(state, {**self.state_dict(), "index": state.get("index")})
        self.index = count_in(state, "index")


def document_row(ids: Iterable[int], eos_token_id: int) -> list[int]:
    """A document between two end tokens; one that it begins with itself is not written twice."""
    row = [*map(int, ids), eos_token_id]  # numpy's integers are no JSON
    return row if len(row) > 1 and row[0] == eos_token_id else [eos_token_id, *row]


def _write_tokens(
    path: Path, documents: Iterable[list[int]], *, vocab_size: int, eos_token_id: int
) -> None:
    """Write documents one by one, each with an end token; the file appears when it is whole."""
    from minillm.files import replacing

    dtype, count = np.dtype("<u2" if vocab_size <= 2**16 else "<u4"), 0
    with replacing(path) as temporary, open(temporary, "w+b") as file:
        _write_header(file, dtype, 2**62)
        for ids in documents:
            row = np.asarray(document_row(ids, eos_token_id)[1:])  # it begins at the end before
            if row.min() < 0 or row.max() >= vocab_size:
                raise ValueError(f"ids {row.min()}..{row.max()}, vocabulary {vocab_size}")
            file.write(row.astype(dtype).tobytes())
            count += len(row)
        file.seek(0)
        _write_header(file, dtype, count)


def _write_header(file: Any, dtype: np.dtype, count: int) -> None:
    """numpy's own header; it leaves room for a count that grows, so it can be written twice."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(file, {**header, "shape": (count,)})


class TokenDataset:
    """Token ids in a file, mapped into memory: as large as the disk, read where touched.

    The file is a plain `.npy` of uint16 (uint32 for larger vocabularies); each document ends with
    the end token.

    Raises: ValueError if the file is no such array, FileNotFoundError if there is none.
    """

    def __init__(self, path: str | Path, *, eos_token_id: int | None = None) -> None:
        self.path, self.eos_token_id = Path(path), eos_token_id
        try:
            self.tokens = np.lib.format.open_memmap(self.path, mode="r")
        except (ValueError, EOFError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ValueError(f"{self.path} is not a whole token file: {error}") from None
        if self.tokens.ndim != 1 or self.tokens.dtype not in (np.uint16, np.uint32):
            raise ValueError(
                f"{self.path} holds {self.tokens.dtype} {self.tokens.shape}, not a row of tokens"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int | slice) -> np.ndarray:
        return self.tokens[index]

    def documents(self) -> np.ndarray:
        """Where each document begins and ends (past its end token). Shape: -> (documents, 2)."""
        if self.eos_token_id is None:
            raise ValueError("a dataset needs its eos_token_id to tell documents apart")
        ends = np.flatnonzero(self.tokens == self.eos_token_id) + 1
        return np.stack([np.concatenate([[0], ends])[:-1], ends], axis=1)

    @classmethod
    def write(
        cls, path: str | Path, documents: Iterable[list[int]], *, vocab_size: int, eos_token_id: int
    ) -> "TokenDataset":
        """Write documents one by one, each with an end token; the file appears when it is whole."""
        _write_tokens(Path(path), documents, vocab_size=vocab_size, eos_token_id=eos_token_id)
        return cls(path, eos_token_id=eos_token_id)


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
