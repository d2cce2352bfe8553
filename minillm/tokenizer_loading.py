"""Which class reads the tokenizer of a folder; written by hand, not built."""

from __future__ import annotations

import warnings
from pathlib import Path

from minillm.tokenizer import BPETokenizer
from minillm.tokenizer_reader import DIGEST
from minillm.wrapped_tokenizer import WrappedTokenizer

__all__ = ["load_tokenizer"]


def load_tokenizer(folder: str | Path) -> BPETokenizer | WrappedTokenizer | None:
    """The folder's tokenizer; None if there is none.

    A byte-level BPE comes as `BPETokenizer`; what that class refuses is wrapped from the library
    `tokenizers`, be it SentencePiece's or a byte-level BPE that cuts text in its own way.

    Raises: ValueError if a file is damaged; ImportError if the library is needed and missing.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        if (folder / "tokenizer.model").exists():
            message = f"{folder} has a tokenizer.model but no tokenizer.json: no tokenizer is read"
            warnings.warn(message, stacklevel=2)
        return None
    try:
        return BPETokenizer.load(folder)
    except ValueError as refusal:
        if DIGEST in path.read_text(encoding="utf-8"):
            raise  # our own file: nobody else knows better
        try:
            return WrappedTokenizer.load(folder)
        except ImportError as error:
            raise ImportError(f"{refusal}: {error}") from None
