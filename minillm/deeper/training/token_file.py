"""Token ids in a file, mapped into memory, and its documents (deeper/07_data_sources)."""

# Built from notebooks/deeper/07_data_sources.ipynb: edit there, then make build.

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from minillm.support.sources import IndexedSource
from minillm.training import document_row, epoch_order

__all__ = ["FileDocuments", "TokenDataset"]


def _write_tokens(
    path: Path, documents: Iterable[list[int]], *, vocab_size: int, eos_token_id: int | None
) -> None:
    """Write documents one by one, each with an end token; the file appears when it is whole.

    Without an end token one follows the other, and an empty one is nothing.
    """
    from minillm.support.files import replacing

    dtype, count = np.dtype("<u2" if vocab_size <= 2**16 else "<u4"), 0
    with replacing(path) as temporary, open(temporary, "w+b") as file:
        _write_header(file, dtype, 2**62)
        for ids in documents:
            if eos_token_id is not None:
                ids = document_row(ids, eos_token_id)[1:]  # it begins at the end before
            elif not ids:
                continue
            row = np.asarray(ids)
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
    the end token, if there is one.

        ids = (tokenizer.encode_ordinary(text) for text in texts)
        data = TokenDataset.write("tokens.npy", ids, vocab_size=V, eos_token_id=end)

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

    def __repr__(self) -> str:
        return f"TokenDataset({str(self.path)!r}, {len(self):,} tokens)"

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
        cls,
        path: str | Path,
        documents: Iterable[list[int]],
        *,
        vocab_size: int,
        eos_token_id: int | None,
    ) -> "TokenDataset":
        """Write documents one by one, each with an end token (None: one follows the other).

        The file appears when it is whole. Raises: ValueError for ids that are not below vocab_size.
        """
        _write_tokens(Path(path), documents, vocab_size=vocab_size, eos_token_id=eos_token_id)
        return cls(path, eos_token_id=eos_token_id)


class FileDocuments(IndexedSource):
    """The documents of a token file, epoch after epoch, each in an order of its own.

        documents = FileDocuments(TokenDataset("tokens.npy", eos_token_id=end))

    Raises: ValueError if the file has no whole document, or its end token was not said.
    """

    def __init__(self, dataset: TokenDataset, *, seed: int = 0) -> None:
        self.dataset, self.bounds = dataset, dataset.documents()
        self.settings = {"seed": seed, "tokens": len(dataset)}
        if not len(self.bounds):
            raise ValueError(
                f"{dataset.path} holds no whole document (end token {dataset.eos_token_id})"
            )

    def item(self, index: int) -> list[int]:
        """The ids of document number `index`, counted through all epochs."""
        epoch, place = divmod(index, len(self.bounds))
        order = epoch_order(self.settings["seed"], epoch, len(self.bounds))
        begin, end = self.bounds[order[place]]
        return self.dataset[begin : end - 1].tolist()
