"""How a caller's mistake is refused: with the value, cut if it is long, and what would be right.

Written by hand.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "check_mask",
    "check_number",
    "check_one_of",
    "check_settings",
    "check_texts",
    "check_utf8",
    "count_in",
    "quoted",
    "texts_of",
]


def quoted(value: object, most: int = 60) -> str:
    """A value as an error shows it: its `repr`, without the middle of one that is long."""
    if isinstance(value, str | bytes) and len(value) > most:
        half = most // 2
        return f"{value[:half]!r}...{value[-half:]!r} ({len(value):,} long)"
    text = repr(value)
    return text if len(text) <= 2 * most else f"{text[: 2 * most]}..."


def check_number(name: str, value: Any, *, whole: bool = False) -> None:
    """Raises: ValueError for what is no number, such as "1", or no whole one."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{name} must be {kind}, not {quoted(value)}")


def check_one_of(name: str, value: Any, known: Sequence[str]) -> None:
    """Raises: ValueError for a name that is not known; the error lists those that are."""
    if value not in known:
        raise ValueError(f"{name} {quoted(value)} is unknown: choose one of {', '.join(known)}")


def check_settings(saved: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise a ValueError that names each setting in which two runs differ."""
    names = sorted(saved.keys() | ours.keys())
    wrong = [
        f"{n}: saved {saved.get(n)!r}, now {ours.get(n)!r}"
        for n in names
        if saved.get(n) != ours.get(n)
    ]
    if wrong:
        raise ValueError("the saved run had other settings: " + "; ".join(wrong))


def count_in(state: dict[str, Any], name: str) -> int:
    """A count from 0 in a saved state. Raises: ValueError if it is something else."""
    value = state.get(name)
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be a count from 0, not {value!r}")
    return value


def check_utf8(name: str, text: str) -> None:
    """Raises: ValueError, with the place, for half a character, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = f"{text[error.start]!r} at place {error.start}, surrogates not allowed"
        raise ValueError(f"{name}, {quoted(text)}, holds half a character: {wrong}") from None


def check_texts(texts: Any, name: str = "texts") -> None:
    """Raises: ValueError for one text where many belong, for its letters would be taken for them.

    Also for bytes, and for the path of a file that was not read.
    """
    if isinstance(texts, str):
        one_or_many = "write [text] for one, text.split(...) if it holds many"
        raise ValueError(f"{name} must be several texts, not one, {quoted(texts)}: {one_or_many}")
    _check_read(texts, name)


def texts_of(texts: str | Iterable[str]) -> Iterable[str]:
    """Texts, or one as the only one of a list.

    Raises: ValueError for bytes, a path, and a string that is the name of a file.
    """
    if not isinstance(texts, str):
        _check_read(texts, "texts")
        return texts
    if "\n" not in texts and len(texts) < 1024 and os.path.isfile(texts):
        read = f"Path({texts!r}).read_text(encoding='utf-8')"
        raise ValueError(f"{quoted(texts)} is the name of a file: hand in what it holds, {read}")
    return [texts]


def _check_read(texts: Any, name: str) -> None:
    if isinstance(texts, os.PathLike):
        read = f"[Path({os.fspath(texts)!r}).read_text(encoding='utf-8')]"
        raise ValueError(f"{name} must be texts, not a path: {read}")
    if isinstance(texts, bytes | bytearray):
        raise ValueError(f"{name} must be texts, not bytes, {quoted(bytes(texts))}: decode them")


def check_mask(mask: Tensor | None, name: str = "attention_mask") -> None:
    """Raises: ValueError for a mask that holds neither bools nor integers.

    Only the type is looked at: for a number of a tensor on a GPU one would have to wait.
    """
    if mask is not None and (mask.is_floating_point() or mask.is_complex()):
        wanted = "bool or an integer type: 1 is a token, 0 is padding"
        raise ValueError(f"{name} is {mask.dtype}; it must be {wanted}")
