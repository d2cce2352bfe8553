"""A byte-pair tokenizer: any text to ids and back, special tokens apart (notebook 02).

Text is cut into words by a published pattern; no merge crosses a word's border. Ranks map the bytes
of each token to its rank, which is also its id. `deeper.tokenizer` trains fast, reads and writes
files; it is imported when it is asked for.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import regex

from minillm.support.checks.kinds import check_one_of
from minillm.support.checks.texts import (
    check_text,
    check_texts,
    check_tokens,
    check_utf8,
    ids_of,
    texts_of,
)
from minillm.support.checks.words import quoted

__all__ = [
    "BEGIN_TOKENS",
    "END_TOKENS",
    "GPT2_PATTERN",
    "GPT4_PATTERN",
    "LLAMA3_PATTERN",
    "LONG_TEXT",
    "LONG_WORD",
    "PATTERNS",
    "QWEN2_PATTERN",
    "Allowed",
    "BPETokenizer",
    "Memo",
    "PreTokenizer",
    "in_ascii",
    "make_pre_tokenizer",
    "merge_word",
    "well_formed",
]

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

GPT4_PATTERN = (  # cl100k as first published; the version that tiktoken ships now differs
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LLAMA3_PATTERN = GPT4_PATTERN  # Llama 3 took it over letter by letter

QWEN2_PATTERN = GPT4_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")  # one digit a token

PATTERNS = {
    "gpt2": GPT2_PATTERN,
    "gpt4": GPT4_PATTERN,
    "llama3": LLAMA3_PATTERN,
    "qwen2": QWEN2_PATTERN,
}


def in_ascii(pattern: str) -> str:
    """What a published pattern says of ASCII text, as Python's `re` writes it."""
    letters = pattern.replace(r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]")
    letters = letters.replace(r"[^\s\p{L}\p{N}]", r"[^\sA-Za-z0-9]")
    return letters.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")


class PreTokenizer:
    """Cut text into words (pre-tokens) by a pattern, such as one of `PATTERNS`.

    For the published patterns, ASCII goes to `re`, which is twice as quick as `regex`. A pattern
    that comes from elsewhere is checked by `make_pre_tokenizer`.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern: str | tuple[str, ...] = pattern
        self.published = pattern in PATTERNS.values()
        self._find = self._find_ascii = regex.compile(pattern).findall
        if self.published:
            self._find_ascii = re.compile(in_ascii(pattern), re.ASCII).findall

    def words(self, text: str) -> list[str]:
        """The words of `text` in order; joined, they are the text."""
        return self._find_ascii(text) if text.isascii() else self._find(text)


def make_pre_tokenizer(pattern: str | Sequence[str]) -> PreTokenizer:
    """What cuts text by a pattern, or by several in turn; one that is not published is watched."""
    if isinstance(pattern, str) or len(pattern) == 1:
        only = pattern if isinstance(pattern, str) else pattern[0]
        if only in PATTERNS.values():
            return PreTokenizer(only)
    from minillm.deeper.tokenizer.patterns import watched

    return watched(pattern)


def well_formed(text: str) -> str:
    """Text that UTF-8 can write: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


LONG_WORD = 72  # bytes from which the method with places by rank is the faster one


def merge_word(word: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Merge the neighbours whose union has the lowest rank, leftmost first, while there are any."""
    if len(word) > LONG_WORD:
        from minillm.deeper.tokenizer.long_words import merge_long_word

        return merge_long_word(word, ranks)
    never = 1 << 62
    parts = [word[i : i + 1] for i in range(len(word))]
    pairs = [ranks.get(word[i : i + 2], never) for i in range(len(word) - 1)]
    while pairs and (lowest := min(pairs)) < never:
        i = pairs.index(lowest)
        parts[i] += parts.pop(i + 1)
        del pairs[i]
        if i < len(pairs):
            pairs[i] = ranks.get(parts[i] + parts[i + 1], never)
        if i:
            pairs[i - 1] = ranks.get(parts[i - 1] + parts[i], never)
    return parts


class Memo(dict):
    """What a function of a string returned; forgets all when full, never keeps a long string."""

    def __init__(
        self, function: Callable[[str], Any], *, size: int = 1 << 17, longest: int = 64
    ) -> None:
        super().__init__()
        self.function, self.size, self.longest = function, size, longest

    def __missing__(self, text: str) -> Any:
        value = self.function(text)
        if len(text) <= self.longest:
            if len(self) >= self.size:
                self.clear()
            self[text] = value
        return value


if TYPE_CHECKING:
    from minillm.deeper.tokenizer.bulk import StreamDecoder
    from minillm.deeper.tokenizer.merges import Ties

BEGIN_TOKENS = ("<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>")

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>", "</s>")

LONG_TEXT = 1 << 16  # characters from which a text is encoded in blocks

Allowed = Literal["all"] | Collection[str]  # special tokens that a text may spell


class BPETokenizer:
    """Byte-pair encoding in which ranks are ids, as in tiktoken: a lower rank is merged earlier.

    Args:
        ranks: bytes of each token -> its id; all 256 bytes must be there, but for
            `drop_unknown_bytes`.
        pattern: the regular expression that cuts text into words, or several: each cuts what the
            one before has left.
        special_tokens: spelling -> id; text never makes them unless the caller allows it.
        added_tokens: the same for those that any text may make, such as Qwen 3's `<think>`.
        bos_token, eos_token, pad_token: which of them begin and end a text, and fill a batch
            (default: the first well-known name; the end token also fills).
        add_bos: `encode` puts the begin token first; without one the end token, as GPT-2 does.
        normalizer: "NFC" composes characters before encoding, so decoding returns composed text.
        chat_template: a Jinja2 template for `apply_chat_template`.
        named_tokens: what it sees under names such as "unk_token" (default: the three above).
        drop_unknown_bytes: bytes without a token are left out of the ids (SmolLM2 lacks 21).
    Raises: ValueError if ids or names repeat, bytes are missing, one of the three is unknown, the
        pattern is bad, the normalizer unknown, or a begin token to be added when there is none.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        pattern: str | Sequence[str],
        special_tokens: Mapping[str, int] | None = None,
        *,
        added_tokens: Mapping[str, int] | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        add_bos: bool = False,
        normalizer: Literal["NFC"] | None = None,
        chat_template: str | None = None,
        drop_unknown_bytes: bool = False,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.ranks, self.special_tokens = dict(ranks), dict(special_tokens or {})
        self.added_tokens, self.chat_template = dict(added_tokens or {}), chat_template
        check_tokens(self.ranks, self.special_tokens, self.added_tokens)
        self._unknown = bytes(byte for byte in range(256) if bytes([byte]) not in self.ranks)
        if (missing := self._unknown) and not drop_unknown_bytes:
            raise ValueError(f"{len(missing)} of the 256 bytes have no id, first {missing[0]}")
        self._named = {**self.special_tokens, **self.added_tokens}
        self._bytes = {i: token for token, i in self.ranks.items()}
        self._bytes |= {i: token.encode() for token, i in self._named.items()}
        known = self.special_tokens.keys()
        self.bos_token = bos_token or next((name for name in BEGIN_TOKENS if name in known), None)
        self.eos_token = eos_token or next((name for name in END_TOKENS if name in known), None)
        if add_bos and self.bos_token is None:
            self.bos_token = self.eos_token
        self.pad_token = pad_token or self.eos_token
        for name in (self.bos_token, self.eos_token, self.pad_token):
            if name is not None and name not in known:
                raise ValueError(f"{quoted(name)} is none of the special tokens {quoted([*known])}")
        if add_bos and self.bos_token is None:
            raise ValueError("add_bos needs a bos_token")
        if normalizer is not None:
            check_one_of("normalizer", normalizer, ["NFC"])
        if chat_template is not None:
            check_utf8("the chat template", chat_template)
        self.pre_tokenizer, self.add_bos = make_pre_tokenizer(pattern), add_bos
        self.pattern, self.normalizer = self.pre_tokenizer.pattern, normalizer
        self.drop_unknown_bytes, self.named_tokens = drop_unknown_bytes, named_tokens
        self._memo = Memo(self._encode_word)
        spellings = sorted(map(re.escape, self._named), key=len, reverse=True)
        self.names = re.compile("|".join(spellings)) if spellings else None

    def __len__(self) -> int:
        return len(self._bytes)

    def __repr__(self) -> str:
        return f"BPETokenizer({len(self):,} tokens, {len(self.special_tokens)} of them special)"

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: the greatest id plus one."""
        return max(self._bytes) + 1

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.special_tokens[self.bos_token]

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.special_tokens[self.eos_token]

    @property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self.special_tokens[self.pad_token]

    def encode(
        self, text: str, *, allowed_special: Allowed = (), add_special_tokens: bool = True
    ) -> list[int]:
        """Ids of `text`; a special token that it spells becomes one id, if allowed.

        If the tokenizer has `add_bos`, the begin token comes first, once: a text that spells it
        there gets no other. `add_special_tokens=False` gives the text alone, for a text in the
        middle of another, and only that is what `decode` gives back.
        Raises: ValueError if the text spells a special token that is not allowed, or for several
            texts: `encode_batch` takes them.
        """
        check_text(text, "encode_batch takes several")
        ids = self._encode_parts(text, allowed_special)
        begin = self.bos_token_id
        if self.add_bos and add_special_tokens and begin is not None and ids[:1] != [begin]:
            ids.insert(0, begin)
        return ids

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`, in which the spelling of a special token is text like any other."""
        check_text(text, "encode_batch takes several")
        return self._encode_parts(text, None) if self.added_tokens else self._encode_text(text)

    def _encode_parts(self, text: str, allowed: Allowed | None) -> list[int]:
        """Ids of the special and added tokens in `text`, and of the texts between them."""
        ids, start = [], 0
        for found in self._find_special(text, allowed):
            ids += self._encode_text(text[start : found.start()])
            ids.append(self._named[found[0]])
            start = found.end()
        return ids + self._encode_text(text[start:])

    def _find_special(self, text: str, allowed: Allowed | None) -> Iterator[re.Match[str]]:
        """The special and added tokens that `text` spells; if allowed is None, the added ones."""
        if isinstance(allowed, str):
            allowed = self.special_tokens if allowed == "all" else [allowed]
        for match in self.names.finditer(text) if self.names else ():
            if (name := match[0]) in self.special_tokens:
                if allowed is None:
                    continue  # plain text, also where an added token lies inside it
                if name not in allowed:
                    raise ValueError(
                        f"the text spells the special token {quoted(name)}: allow it by "
                        "allowed_special, or call encode_ordinary to read it as plain text"
                    )
            yield match

    def _encode_text(self, text: str) -> list[int]:
        """Ids of `text`, no special or added token in sight: words, each merged once."""
        text = well_formed(text)
        if self.normalizer:
            text = unicodedata.normalize(self.normalizer, text)
        parts: Iterable[str] = [text]
        if len(text) > LONG_TEXT:
            from minillm.deeper.tokenizer.bulk import blocks

            parts = blocks(self.pre_tokenizer, parts, size=LONG_TEXT)
        ids: list[int] = []
        for part in parts:
            ids += chain.from_iterable(map(self._memo.__getitem__, self.pre_tokenizer.words(part)))
        return ids

    def _encode_word(self, word: str) -> list[int]:
        data = word.encode().translate(None, delete=self._unknown)
        parts = [data] if data in self.ranks else merge_word(data, self.ranks)
        return [self.ranks[part] for part in parts]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, exactly; an id that no token has adds none, as in transformers.

        Raises: ValueError for what is no id.
        """
        return b"".join(self._bytes.get(i, b"") for i in ids_of(ids))

    def decode(
        self, ids: Iterable[int], *, errors: str = "replace", skip_special_tokens: bool = False
    ) -> str:
        """The text of `ids`; what is no UTF-8 becomes U+FFFD, or an error if errors="strict"."""
        if skip_special_tokens:
            left_out = {*self.special_tokens.values()}
            ids = [i for i in ids_of(ids) if i not in left_out]
        return self.decode_bytes(ids).decode("utf-8", errors)

    @classmethod
    def train(
        cls,
        texts: str | Iterable[str],
        vocab_size: int,
        *,
        pattern: str | Sequence[str] = GPT4_PATTERN,
        special_tokens: Collection[str] = (),
        add_bos: bool = False,
        ties: "Ties" = "greatest",
        progress: bool = False,
    ) -> "BPETokenizer":
        """Learn `vocab_size` ids: bytes, merges (fewer if the text runs out), special tokens.

        `add_bos` is for a model that learns rows which begin with the begin token: so will prompts.
        Raises: ValueError if there is no room for bytes and special tokens, if these are one
            string, or repeat, or cannot begin a text; for a file's name instead of its text.
        """
        from minillm.deeper.tokenizer.merges import byte_alphabet, count_words, learn_merges

        if isinstance(special_tokens, str) or len({*special_tokens}) < len(special_tokens):
            raise ValueError(
                f"special_tokens must be different names, not {quoted(special_tokens)}"
            )
        if add_bos and not {*BEGIN_TOKENS, *END_TOKENS}.intersection(special_tokens):
            known = quoted([*special_tokens])
            raise ValueError(f"add_bos needs a begin or end token: {known} has none")
        num_merges = vocab_size - 256 - len(special_tokens)
        if num_merges < 0:
            raise ValueError(f"vocab_size {vocab_size} < 256 bytes + {len(special_tokens)} special")
        words = count_words(texts_of(texts), make_pre_tokenizer(pattern), special_tokens)
        merges = learn_merges(words, num_merges, ties=ties, progress=progress)
        tokens = [bytes([byte]) for byte in byte_alphabet(ties)] + [a + b for a, b in merges]
        ranks = {token: i for i, token in enumerate(tokens)}
        special = {token: len(ranks) + i for i, token in enumerate(special_tokens)}
        return cls(ranks, pattern, special, add_bos=add_bos)

    def decoder(self, *, skip_special_tokens: bool = False) -> "StreamDecoder":
        """A decoder for ids that arrive one by one."""
        from minillm.deeper.tokenizer.bulk import StreamDecoder

        skip = self.special_tokens.values() if skip_special_tokens else ()
        return StreamDecoder(self.decode_bytes, skip=skip)

    def encode_batch(
        self,
        texts: Iterable[str],
        *,
        padding_side: Literal["left", "right"] | None = None,
        allowed_special: Allowed = (),
        add_special_tokens: bool = True,
    ) -> list[list[int]] | tuple[list[list[int]], list[list[int]]]:
        """Ids of each text, as `encode`; with a padding side, rows and their mask (`pad`)."""
        from minillm.deeper.tokenizer.bulk import pad

        check_texts(texts)
        rows = [
            self.encode(t, allowed_special=allowed_special, add_special_tokens=add_special_tokens)
            for t in texts
        ]
        return rows if padding_side is None else pad(self, rows, padding_side)

    @cached_property
    def merges(self) -> list[tuple[bytes, bytes]]:
        """The pair that makes each longer token, in order (without tokens that no pair makes)."""
        from minillm.deeper.tokenizer.vocabulary import find_merges

        pairs = (parts for _, parts in find_merges(self.ranks) if len(parts) == 2)
        return [(left, right) for left, right in pairs]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation, written by the chat template; no message may spell a border."""
        from minillm.deeper.tokenizer.chat_template import render_chat

        text = render_chat(self, messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, allowed_special="all", add_special_tokens=False)

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which Hugging Face reads."""
        from minillm.deeper.tokenizer import hf_json

        hf_json.save(self, Path(directory))

    @classmethod
    def load(cls, path: str | Path) -> "BPETokenizer":
        """Read a `tokenizer.json`, or the folder that holds it: ours, or any byte-level BPE."""
        from minillm.deeper.tokenizer import hf_json

        return cls(**hf_json.load(Path(path)))
