"""What single tokens stand for, by the decoder of a `tokenizers.Tokenizer`.

Used by `minillm.wrapped_tokenizer`; written by hand, not built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from minillm.tokenizer_reader import unspell

if TYPE_CHECKING:
    from tokenizers.decoders import Decoder

__all__ = ["token_reader"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_KNOWN = ("ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip")


def token_reader(decoder: Decoder | None) -> Callable[[str], bytes]:
    """The function from a token to its bytes; where the token stands makes no difference.

    The library's own decoder gives text only, and gives U+FFFD for a token that is a part of a
    character. Raises: ValueError for a decoder of another kind, or one that replaces by a regex.
    """
    steps = [] if decoder is None else [json.loads(decoder.__getstate__())]
    if steps and steps[0]["type"] == "Sequence":
        steps = steps[0]["decoders"]
    kinds = [step["type"] for step in steps]
    if not steps or not set(kinds).issubset(_KNOWN):
        raise ValueError(f"decoder {kinds} is not supported, only {', '.join(_KNOWN)}")
    if "ByteLevel" in kinds:
        return _spelled_bytes
    swaps = [(s["replacement"], " ") for s in steps if s["type"] == "Metaspace"]
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise ValueError(f"decoder Replace is not supported with {step['pattern']}")
            swaps.append((step["pattern"]["String"], step["content"]))
    return partial(_swapped, swaps=swaps, byte_fallback="ByteFallback" in kinds)


# The readers are plain functions, so that a tokenizer can be pickled for other processes.
def _swapped(token: str, *, swaps: list[tuple[str, str]], byte_fallback: bool) -> bytes:
    if byte_fallback and (byte := _BYTE.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    for old, new in swaps:
        token = token.replace(old, new)
    return token.encode()


def _spelled_bytes(token: str) -> bytes:
    try:
        return unspell(token)
    except ValueError:
        return token.encode()
