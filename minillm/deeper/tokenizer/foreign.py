"""A byte-pair tokenizer with what only the files of other models ask for.

Explained in notebooks/deeper/02_tokenizer_files.
"""

# Built from notebooks/deeper/02_tokenizer_files.ipynb: edit there, then make build.

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from minillm.bpe import BPETokenizer, merge_word, well_formed
from minillm.support.checks.kinds import check_one_of
from minillm.support.checks.texts import check_text, check_utf8

__all__ = ["ForeignTokenizer"]


class ForeignTokenizer(BPETokenizer):
    """Byte-pair encoding with what only the files of other models ask for.

    Args:
        ranks, pattern, special_tokens: as `BPETokenizer`, and so are the other names and `add_bos`.
        added_tokens: spelling -> id of those that any text may make, such as Qwen 3's `<think>`.
        normalizer: "NFC" composes characters before encoding, so decoding returns composed text.
        chat_template: a Jinja2 template for `apply_chat_template`.
        drop_unknown_bytes: bytes without a token are left out of the ids (SmolLM2 lacks 21).
        named_tokens: what the template sees under names such as "unk_token" (default: the tokens
            that begin, end and fill).
    Raises: ValueError as `BPETokenizer`, and for an unknown normalizer, or half a character.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        pattern: str | Sequence[str],
        special_tokens: Mapping[str, int] | None = None,
        *,
        added_tokens: Mapping[str, int] | None = None,
        normalizer: Literal["NFC"] | None = None,
        chat_template: str | None = None,
        drop_unknown_bytes: bool = False,
        named_tokens: Mapping[str, str] | None = None,
        **names: Any,
    ) -> None:
        self.added_tokens, self.drop_unknown_bytes = dict(added_tokens or {}), drop_unknown_bytes
        super().__init__(ranks, pattern, special_tokens, **names)
        if normalizer is not None:
            check_one_of("normalizer", normalizer, ["NFC"])
        if chat_template is not None:
            check_utf8("the chat template", chat_template)
        self.normalizer, self.chat_template = normalizer, chat_template
        self.named_tokens = named_tokens
        self.unknown = bytes(byte for byte in range(256) if bytes([byte]) not in self.ranks)
        self.named = {**self.special_tokens, **self.added_tokens}
        self.pieces |= {i: token.encode() for token, i in self.added_tokens.items()}
        longest_first = sorted(map(re.escape, self.named), key=len, reverse=True)
        self.names = re.compile("|".join(longest_first)) if self.named else None

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`, in which the spelling of a special token is text like any other.

        Added tokens are found all the same, also where they lie inside a special one.
        """
        check_text(text, "encode_batch takes several")
        ids, start = [], 0
        for found in self.names.finditer(text) if self.added_tokens and self.names else ():
            if found[0] in self.added_tokens:
                ids += self._encode_text(text[start : found.start()])
                ids.append(self.added_tokens[found[0]])
                start = found.end()
        return ids + self._encode_text(text[start:])

    def _encode_text(self, text: str) -> list[int]:
        text = well_formed(text)
        text = unicodedata.normalize(self.normalizer, text) if self.normalizer else text
        return super().encode_ordinary(text)

    def _encode_word(self, word: str) -> list[int]:
        known = word.encode().translate(None, delete=self.unknown)
        parts = [known] if known in self.ranks else merge_word(known, self.ranks)
        return [self.ranks[part] for part in parts]
