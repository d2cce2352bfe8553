"""What a door is, and the doors of a tokenizer; needs no torch. Written by hand.

`generate = Door("minillm.generation:generate")` makes a method of that function: it is looked up
when it is called, and `help(model.generate)` is the function's own. The doors of a model stand in
`support.doors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pkgutil import resolve_name
from types import MappingProxyType, MethodType
from typing import Any, Literal

__all__ = ["ClassDoor", "Door", "TokenizerDoors"]


class Door:
    """A method that is a function of another file, called with the object first."""

    def __init__(self, where: str) -> None:
        self.where = where  # "package.module:function"

    def __get__(self, instance: Any, owner: type) -> Any:
        function = resolve_name(self.where)
        return function if instance is None else MethodType(function, instance)


class ClassDoor(Door):
    """A door that hands over the class, as a classmethod does."""

    def __get__(self, instance: Any, owner: type) -> Any:
        return MethodType(resolve_name(self.where), owner)


class TokenizerDoors:
    """What tokenizers have beside ids: doors, and what files of other models say: here nothing."""

    added_tokens: Mapping[str, int] = MappingProxyType({})
    normalizer: Literal["NFC"] | None = None
    chat_template: str | None = None
    named_tokens: Mapping[str, str] | None = None
    drop_unknown_bytes: bool = False

    train = ClassDoor("minillm.deeper.tokenizer.merges:train_tokenizer")
    decoder = Door("minillm.deeper.tokenizer.bulk:stream_decoder")
    encode_batch = Door("minillm.deeper.tokenizer.bulk:encode_batch")
    apply_chat_template = Door("minillm.deeper.tokenizer.chat_template:apply_chat_template")
    save = Door("minillm.deeper.tokenizer.hf_json:save")
    load = Door("minillm.deeper.tokenizer.hf_json:load_bpe")

    ranks: dict[bytes, int]
    special_tokens: dict[str, int]
    pieces: dict[int, bytes]

    # the ids of what begins and ends a text, and fills a batch; None for what there is not
    bos_token_id = property(lambda self: self.special_tokens.get(self.bos_token))
    eos_token_id = property(lambda self: self.special_tokens.get(self.eos_token))
    pad_token_id = property(lambda self: self.special_tokens.get(self.pad_token))

    @cached_property
    def merges(self) -> list[tuple[bytes, ...]]:
        """The pair that makes each longer token, in order (without tokens that no pair makes)."""
        from minillm.deeper.tokenizer.vocabulary import find_merges

        return [tuple(parts) for _, parts in find_merges(self.ranks) if len(parts) == 2]

    def __len__(self) -> int:
        return len(self.pieces)

    def __repr__(self) -> str:
        known = f"{len(self):,} tokens, {len(self.special_tokens)} of them special"
        return f"{type(self).__name__}({known})"
