"""What a terminal is told: text of any model or file, and nothing that commands the terminal.

Written by hand.
"""

from __future__ import annotations

import io
import re
import sys
import traceback
import warnings
from types import TracebackType
from typing import Any

# The controls of ASCII and of Latin-1, but for line end and tab; what turns the writing direction.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""The text with each control character as it is written in Python: `\x1b`, `\u202e`.

    Such a character could clear the screen, fill the clipboard, or show words in another order.
    Line ends, tabs, and what joins letters or emoji stay. Each character is seen by itself, so a
    text may be shown in pieces.
    """
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def show(text: str, *, end: str = "\n") -> None:
    """Print what was asked for: to a terminal visibly, into a file or a pipe unchanged."""
    print(visible(text) if sys.stdout.isatty() else text, end=end, flush=True)


def tell(text: str) -> None:
    """Print what was not asked for, such as an error, on the error channel: always visibly."""
    print(visible(text), file=sys.stderr, flush=True)


def prepare() -> None:
    """For a whole program: no text is an error for the streams, warnings and errors are visible."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a ? for what the terminal has no character for
    plain = warnings.formatwarning

    def format_warning(*args: Any, **options: Any) -> str:
        return visible(plain(*args, **options))

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        tell("".join(traceback.format_exception(kind, error, trace)).rstrip())

    warnings.formatwarning, sys.excepthook = format_warning, uncaught
