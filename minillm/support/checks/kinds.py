"""What a value may be, in words: numbers, switches, tables, one of several names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from minillm.support.checks.words import quoted


def check_number(name: str, value: Any, *, whole: bool = False) -> None:
    """Raises: ValueError for what is no number, such as "1", or no whole one."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{name} must be {kind}, not {quoted(value)}")


Kind = tuple[str, Callable[[Any], bool]]  # in words, and whether a value is of that kind


def whole(least: int = 0, most: int = 2**31 - 1, why: str = "") -> Kind:
    """Whole numbers from `least` to `most`."""
    words = f"a whole number from {least} to {most}{why}"
    return words, lambda x: type(x) is int and least <= x <= most


def number(words: str, fits: Callable[[float], bool]) -> Kind:
    """Numbers that fit, neither NaN nor infinite; `words` follow "a number" in the error."""

    def check(x: Any) -> bool:
        is_number = isinstance(x, int | float) and not isinstance(x, bool)
        return is_number and abs(x) < 1e300 and fits(x)

    return f"a number {words}", check


def any_of(*kinds: Kind) -> Kind:
    """Values of one of these kinds."""
    words = " or ".join(words for words, _ in kinds)
    return words, lambda x: any(fits(x) for _, fits in kinds)


def list_of(kind: Kind) -> Kind:
    """Lists and tuples of values of a kind."""
    words, fits = kind
    return f"a list, each {words}", lambda x: isinstance(x, list | tuple) and all(map(fits, x))


SWITCH: Kind = "true or false", lambda x: type(x) is bool


NULL: Kind = "null", lambda x: x is None


TEXT: Kind = "a string", lambda x: isinstance(x, str)


TABLE: Kind = "a table", lambda x: isinstance(x, Mapping) and all(isinstance(k, str) for k in x)


POSITIVE = number("above 0", lambda x: x > 0)


NOT_NEGATIVE = number("of at least 0", lambda x: x >= 0)


SHARE = number("from 0 to below 1", lambda x: 0 <= x < 1)


def check_kind(name: str, value: Any, kind: Kind) -> None:
    """Raises: ValueError, with the name, for a value of another kind."""
    words, fits = kind
    if not fits(value):
        raise ValueError(f"{name} must be {words}, not {quoted(value)}")


def check_values(given: Any, kinds: Mapping[str, Kind]) -> None:
    """Raises: ValueError for a field of a dataclass that is of another kind; None fits where it is
    the default.
    """
    for f in fields(given):
        value = getattr(given, f.name)
        if f.name in kinds and (value is not None or f.default is not None):
            check_kind(f.name, value, kinds[f.name])


def check_one_of(name: str, value: Any, known: Sequence[str]) -> None:
    """Raises: ValueError for a name that is not known; the error lists those that are."""
    if value not in known:
        raise ValueError(f"{name} {quoted(value)} is unknown: choose one of {', '.join(known)}")


def check_known(name: str, value: Any, known: Collection[str]) -> None:
    """Raises: ValueError with the known names unless `value` is one of them."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"unknown {name} {value!r}; known are {', '.join(known)}")


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


def index_in(state: dict[str, Any], ours: dict[str, Any]) -> int:
    """How many things a source had given when `state` was saved; `ours` is what it says now.

    Raises: ValueError if anything but the index differs, or if that is no count from 0.
    """
    check_settings(state, {**ours, "index": state.get("index")})
    return count_in(state, "index")


def check_sizes(**sizes: int | None) -> None:
    """Raises: ValueError that names the first size below 1; None is no size."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")
