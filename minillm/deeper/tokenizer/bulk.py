"""Text and ids in bulk: long texts in blocks, streams of text and of ids, rows of one length.

Explained in notebooks/deeper/02_fast_bpe.
"""

# Built from notebooks/deeper/02_fast_bpe.ipynb: edit there, then make build.

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import regex

from minillm.bpe import LONG_TEXT, Allowed, PreTokenizer
from minillm.support.checks.texts import check_texts, ids_of
from minillm.support.checks.words import quoted

__all__ = [
    "KEEP",
    "StreamDecoder",
    "blocks",
    "chunks_of",
    "encode_batch",
    "encode_blocks",
    "encode_iterable",
    "pad",
    "stream_decoder",
]

KEEP = 1000  # characters behind a cut, so that no special token straddles it

_SPACE = re.compile(r" (?=\S)")

_SIGN = re.compile(r" (?=[!-/:-~])")  # before a sign or a letter, not before a digit

# (?r): from the end; U+3040 to U+30FF is kana, whose signs some patterns join to its letters
_BORDER = regex.compile(r"(?r)(?<=[\p{L}\p{N}])(?=[^\p{L}\p{N}\p{M}\u3040-\u30ff])")


def chunks_of(pre: PreTokenizer, text: str) -> list[str]:
    """Cut before each space that a visible character follows, and drop that space.

    A published pattern always ends a word there, and never looks beyond. A published sequence of
    patterns does so before a letter or a sign of ASCII. Others are not cut.
    """
    if not pre.published:
        return [text]
    return (_SPACE if isinstance(pre.pattern, str) else _SIGN).split(text)


def blocks(
    pre: PreTokenizer,
    texts: Iterable[str],
    *,
    whole: re.Pattern[str] | None = None,
    size: int = 1 << 19,
) -> Iterator[str]:
    """The concatenation of `texts` in blocks of about `size` characters that end with a word.

    No cut falls into a match of `whole` (of at most `KEEP` characters). Where nothing can be
    cut, as with patterns that are not published, a block grows.
    """
    waiting, limit = "", size
    for text in texts:
        for start in range(0, len(text), size):
            waiting += text[start : start + size]
            if len(waiting) >= limit:
                cut = _last_border(waiting, whole) if pre.published else 0
                if cut:
                    yield waiting[:cut]
                    waiting = waiting[cut:]
                limit = max(size, 2 * len(waiting))
    if waiting:
        yield waiting


def _last_border(text: str, whole: re.Pattern[str] | None) -> int:
    found = _BORDER.search(text, 0, max(0, len(text) - KEEP))
    cut = found.end() if found else 0
    for match in whole.finditer(text) if whole else ():
        if match.start() < cut < match.end():
            return match.start()
    return cut


if TYPE_CHECKING:
    from minillm.bpe import BPETokenizer


def encode_iterable(
    tokenizer: "BPETokenizer", texts: Iterable[str], *, add_special_tokens: bool = True
) -> Iterator[int]:
    """Ids of the concatenation of `texts`, special tokens allowed, in constant memory."""
    ids = chain.from_iterable(
        tokenizer.encode(block, allowed_special="all", add_special_tokens=False)
        for block in blocks(tokenizer.pre_tokenizer, texts, whole=tokenizer.names)
    )
    begin = tokenizer.bos_token_id
    if tokenizer.add_bos and add_special_tokens and begin is not None:
        first = next(ids, begin)
        yield from (begin, first) if first != begin else (begin,)
    yield from ids


class StreamDecoder:
    """Ids in, whole characters out: the bytes of an unfinished character wait for the rest.

    The ids in `skip` are left out.
    """

    def __init__(
        self, decode_bytes: Callable[[Iterable[int]], bytes], *, skip: Iterable[int] = ()
    ) -> None:
        self._decode_bytes, self._skip = decode_bytes, {*skip}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; often none."""
        ids = [i for i in ids_of([token_id]) if i not in self._skip]
        return self._decoder.decode(self._decode_bytes(ids))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)


def pad(
    tokenizer: "BPETokenizer", rows: Iterable[list[int]], side: Literal["left", "right"]
) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of one length, filled with the pad token, and their mask: 1 = token, 0 = padding.

    Raises: ValueError for an unknown side, or if there is no pad token.
    """
    fill = tokenizer.pad_token_id
    if side not in ("left", "right") or fill is None:
        name = quoted(tokenizer.pad_token)
        raise ValueError(f"cannot pad on side {side!r} with pad token {name}")
    rows = [*rows]
    length = max(map(len, rows), default=0)
    ids, mask = [], []
    for row in rows:
        gap, real = length - len(row), [1] * len(row)
        ids.append([fill] * gap + row if side == "left" else row + [fill] * gap)
        mask.append([0] * gap + real if side == "left" else real + [0] * gap)
    return ids, mask


def encode_blocks(tokenizer: "BPETokenizer", text: str) -> list[int]:
    """Ids of a long text, no special token in sight, block by block."""
    pre = tokenizer.pre_tokenizer
    words = chain.from_iterable(map(pre.words, blocks(pre, [text], size=LONG_TEXT)))
    return [*chain.from_iterable(map(tokenizer.memo.__getitem__, words))]


def stream_decoder(tokenizer: Any, *, skip_special_tokens: bool = False) -> StreamDecoder:
    """A decoder for ids that arrive one by one."""
    skip = tokenizer.special_tokens.values() if skip_special_tokens else ()
    return StreamDecoder(tokenizer.decode_bytes, skip=skip)


def encode_batch(
    tokenizer: Any,
    texts: Iterable[str],
    *,
    padding_side: Literal["left", "right"] | None = None,
    allowed_special: Allowed = (),
    add_special_tokens: bool = True,
) -> list[list[int]] | tuple[list[list[int]], list[list[int]]]:
    """Ids of each text, as `encode`; with a padding side, rows and their mask (`pad`)."""
    check_texts(texts)
    how: dict[str, Any] = {"allowed_special": allowed_special}
    rows = [tokenizer.encode(t, add_special_tokens=add_special_tokens, **how) for t in texts]
    return rows if padding_side is None else pad(tokenizer, rows, padding_side)
