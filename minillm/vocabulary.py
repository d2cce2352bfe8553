"""What each id stands for: the bytes of tokens, special tokens, and decoding, which needs no more.

Explained in notebook 02. `BPETokenizer` adds the other direction.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import codecs
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Literal

from minillm.bpe_encoder import find_merges

__all__ = ["BEGIN_TOKENS", "END_TOKENS", "StreamDecoder", "Vocabulary", "find_names"]

BEGIN_TOKENS = ("<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>")

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>", "</s>")


def find_names(
    text: str,
    names: re.Pattern[str] | None,
    special: Collection[str],
    allowed: Literal["all"] | Collection[str] | None,
) -> Iterator[re.Match[str]]:
    """The special and added tokens that `text` spells; not the special ones if allowed is None.

    Raises: ValueError for a special token that is not allowed.
    """
    for match in names.finditer(text) if names else ():
        if (name := match[0]) in special:
            if allowed is None:
                continue  # plain text, also where an added token lies inside it
            if allowed != "all" and name not in allowed:
                raise ValueError(
                    f"the text spells the special token {name!r}: allow it by allowed_special, "
                    "or call encode_ordinary to read it as plain text"
                )
        yield match


class _Tokens:
    """Ids, the bytes that each stands for, and special tokens; see `Vocabulary`."""

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        special_tokens: Mapping[str, int] | None = None,
        *,
        added_tokens: Mapping[str, int] | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
    ) -> None:
        self.ranks, self.special_tokens = dict(ranks), dict(special_tokens or {})
        self.added_tokens = dict(added_tokens or {})
        self._named = {**self.special_tokens, **self.added_tokens}
        self._bytes = {i: token for token, i in self.ranks.items()}
        self._bytes |= {i: token.encode() for token, i in self._named.items()}
        known = self.special_tokens.keys()
        self.bos_token = bos_token or next((name for name in BEGIN_TOKENS if name in known), None)
        self.eos_token = eos_token or next((name for name in END_TOKENS if name in known), None)
        self.pad_token = pad_token or self.eos_token
        spellings = sorted(map(re.escape, self._named), key=len, reverse=True)
        self._names = re.compile("|".join(spellings)) if spellings else None
        self._check()

    def _check(self) -> None:
        missing = [byte for byte in range(256) if bytes([byte]) not in self.ranks]
        if missing:
            raise ValueError(f"{len(missing)} of the 256 bytes have no id, first {missing[0]}")
        if twice := self.special_tokens.keys() & self.added_tokens.keys():
            raise ValueError(f"{min(twice)!r} is special and not special")
        ids = [*self.ranks.values(), *self._named.values()]
        if len(self._bytes) < len(ids):
            shared = next(i for i, count in Counter(ids).items() if count > 1)
            raise ValueError(f"two tokens share the id {shared}")
        if min(ids) < 0 or b"" in self._bytes.values():
            raise ValueError(f"a token is empty, or its id negative (lowest id: {min(ids)})")
        for name in (self.bos_token, self.eos_token, self.pad_token):
            if name is not None and name not in self.special_tokens:
                raise ValueError(f"{name!r} is none of the special tokens {[*self.special_tokens]}")


class _Decoding(_Tokens):
    """From ids to bytes and text; see `Vocabulary`."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, exactly. Raises: ValueError for an unknown id."""
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        try:
            return b"".join(map(self._bytes.__getitem__, ids))
        except KeyError as error:
            raise ValueError(f"no token has the id {error}; there are {len(self)} ids") from None

    def decode(self, ids: Iterable[int], *, errors: str = "replace") -> str:
        """The text of `ids`; what is no UTF-8 becomes U+FFFD, or an error if errors="strict"."""
        return self.decode_bytes(ids).decode("utf-8", errors)

    def decoder(self) -> "StreamDecoder":
        """A decoder for ids that arrive one by one."""
        return StreamDecoder(self)

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: the greatest id plus one."""
        return max(self._bytes) + 1


class Vocabulary(_Decoding):
    """Ids and their bytes, with special tokens apart.

    Args:
        ranks: bytes of each token -> its id; all 256 bytes must be there.
        special_tokens: spelling -> id; text never makes them unless the caller allows it.
        added_tokens: the same for those that any text may make, such as Qwen 3's `<think>`.
        bos_token, eos_token, pad_token: which of them begin and end a text, and fill a batch
            (default: the first well-known name; the end token also fills).
    Raises: ValueError if ids or names repeat, bytes are missing, or one of the three is unknown.
    """

    @property
    def bos_token_id(self) -> int | None:
        return self.special_tokens.get(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self.special_tokens.get(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        return self.special_tokens.get(self.pad_token)

    @cached_property
    def merges(self) -> list[tuple[bytes, bytes]]:
        """The pair that makes each longer token, in order (without tokens that no pair makes)."""
        return [tuple(parts) for _, parts in find_merges(self.ranks) if len(parts) == 2]

    def pad(
        self, rows: Iterable[list[int]], side: Literal["left", "right"]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Rows of one length, filled with the pad token, and their mask: 1 = token, 0 = padding.

        Raises: ValueError for an unknown side, or if there is no pad token.
        """
        if side not in ("left", "right") or self.pad_token is None:
            raise ValueError(f"cannot pad on side {side!r} with pad token {self.pad_token!r}")
        rows = [*rows]
        length = max(map(len, rows), default=0)
        ids, mask = [], []
        for row in rows:
            gap = length - len(row)
            fill, real, empty = [self.pad_token_id] * gap, [1] * len(row), [0] * gap
            ids.append(fill + row if side == "left" else row + fill)
            mask.append(empty + real if side == "left" else real + empty)
        return ids, mask


class StreamDecoder:
    """Ids in, whole characters out: the bytes of an unfinished character wait for the rest."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; often none."""
        return self._decoder.decode(self._vocabulary.decode_bytes([token_id]))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)
