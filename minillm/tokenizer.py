"""A byte-pair tokenizer: any text to ids and back, special tokens apart, files that others read.

Explained in notebook 02. Training lives in `bpe_trainer`, file formats in `tokenizer_files`.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from minillm.bpe_encoder import Memory, merge_word, with_parts
from minillm.bpe_trainer import Ties, byte_alphabet, count_words, learn_merges
from minillm.pretokenizer import (
    GPT2_PATTERN,
    GPT4_PATTERN,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    PreTokenizer,
    well_formed,
)
from minillm.vocabulary import Vocabulary, find_names

__all__ = ["PATTERNS", "Allowed", "BPETokenizer", "Encoder"]

PATTERNS = {
    "gpt2": GPT2_PATTERN,
    "gpt4": GPT4_PATTERN,
    "llama3": LLAMA3_PATTERN,
    "qwen2": QWEN2_PATTERN,
}

Allowed = Literal["all"] | Collection[str]


class _WordEncoder(Vocabulary):
    """Text to ids, no special token in sight: words, then merges; every word is merged once."""

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        pattern: str,
        special_tokens: Mapping[str, int] | None = None,
        *,
        add_bos: bool = False,
        normalizer: Literal["NFC"] | None = None,
        chat_template: str | None = None,
        **named: Any,
    ) -> None:
        super().__init__(ranks, special_tokens, **named)
        if normalizer not in (None, "NFC"):
            raise ValueError(f"normalizer must be 'NFC' or None, not {normalizer!r}")
        if add_bos and self.bos_token is None:
            raise ValueError("add_bos needs a bos_token")
        self.pattern, self.add_bos = pattern, add_bos
        self.normalizer, self.chat_template = normalizer, chat_template
        self._pre = PreTokenizer(pattern)
        self._memory = Memory(self._encode_word)

    def _encode_word(self, word: str) -> list[int]:
        data = word.encode()
        parts = [data] if data in self.ranks else merge_word(data, self.ranks)
        return [self.ranks[part] for part in parts]

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`, in which the spelling of a special token is text like any other."""
        text = well_formed(text)
        if self.normalizer:
            text = unicodedata.normalize(self.normalizer, text)
        ids: list[int] = []
        for block in self._pre.blocks([text], size=1 << 16):
            ids += chain.from_iterable(map(self._memory.__getitem__, self._pre.words(block)))
        return ids


class Encoder(_WordEncoder):
    """Text to ids: special tokens first, then words, then merges. Args: see `BPETokenizer`."""

    def encode(self, text: str, *, allowed_special: Allowed = ()) -> list[int]:
        """Ids of `text`; a special token that it spells becomes one id, if allowed.

        Raises: ValueError if the text spells a special token that is not allowed.
        """
        ids = [self.bos_token_id] if self.add_bos else []
        return ids + self._encode_named(text, allowed_special)

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`, in which the spelling of a special token is text like any other."""
        if not self.added_tokens:
            return super().encode_ordinary(text)
        return self._encode_named(text, None)

    def _encode_named(self, text: str, allowed: Allowed | None) -> list[int]:
        ids, start = [], 0
        for name in find_names(text, self._names, self.special_tokens, allowed):
            ids += super().encode_ordinary(text[start : name.start()])
            ids.append(self._named[name[0]])
            start = name.end()
        return ids + super().encode_ordinary(text[start:])

    def encode_batch(
        self,
        texts: Iterable[str],
        *,
        padding_side: Literal["left", "right"] | None = None,
        allowed_special: Allowed = (),
    ) -> list[list[int]] | tuple[list[list[int]], list[list[int]]]:
        """Ids of each text, as `encode`; with a padding side, rows and their mask, as `pad`."""
        rows = [self.encode(text, allowed_special=allowed_special) for text in texts]
        return rows if padding_side is None else self.pad(rows, padding_side)

    def encode_iterable(self, texts: Iterable[str]) -> Iterator[int]:
        """Ids of the concatenation of `texts`, special tokens allowed, in constant memory."""
        if self.add_bos:
            yield self.bos_token_id
        for block in self._pre.blocks(texts, whole=self._names):
            yield from self._encode_named(block, "all")


if TYPE_CHECKING:
    import tiktoken
    import tokenizers


class _Trainable(Encoder):
    """A tokenizer that can be learnt from texts; see `BPETokenizer`."""

    @classmethod
    def train(
        cls,
        texts: str | Iterable[str],
        vocab_size: int,
        *,
        pattern: str = GPT4_PATTERN,
        special_tokens: Collection[str] = (),
        ties: Ties = "greatest",
        progress: bool = False,
    ) -> "BPETokenizer":
        """Learn `vocab_size` ids: bytes, merges (fewer if the text runs out), special tokens.

        Raises: ValueError if `vocab_size` has no room for the bytes and the special tokens, or
            if these are one string, or the same twice.
        """
        if isinstance(special_tokens, str) or len({*special_tokens}) < len(special_tokens):
            raise ValueError(f"special_tokens must be different names, not {special_tokens!r}")
        num_merges = vocab_size - 256 - len(special_tokens)
        if num_merges < 0:
            raise ValueError(f"vocab_size {vocab_size} < 256 bytes + {len(special_tokens)} special")
        texts = [texts] if isinstance(texts, str) else texts
        words = count_words(texts, PreTokenizer(pattern), special_tokens)
        merges = learn_merges(words, num_merges, ties=ties, progress=progress)
        tokens = [bytes([byte]) for byte in byte_alphabet(ties)] + [a + b for a, b in merges]
        ranks = {token: i for i, token in enumerate(tokens)}
        return cls(ranks, pattern, {t: len(ranks) + i for i, t in enumerate(special_tokens)})


class _Prunable(_Trainable):
    """A tokenizer that can drop ids; see `BPETokenizer`."""

    def prune(self, keep_ids: Iterable[int]) -> tuple["BPETokenizer", list[int]]:
        """A smaller tokenizer, and the old id of each of its ids: new embedding = old[old_ids].

        Kept are the bytes, special and added tokens, `keep_ids` and the tokens they are merged
        from: a text whose old ids are all kept is cut into the same tokens.
        """
        keep = {*keep_ids, *self._named.values()}
        if unknown := keep - self._bytes.keys():
            raise ValueError(f"no token has the id {min(unknown)}; there are {len(self)} ids")
        old_ids = sorted(with_parts(keep, self.ranks))
        new_id = {old: new for new, old in enumerate(old_ids)}
        ranks = {token: new_id[i] for token, i in self.ranks.items() if i in new_id}
        special = {token: new_id[i] for token, i in self.special_tokens.items()}
        added = {token: new_id[i] for token, i in self.added_tokens.items()}
        names = ("bos_token", "eos_token", "pad_token", "add_bos", "normalizer", "chat_template")
        options = {name: getattr(self, name) for name in names}
        return BPETokenizer(ranks, self.pattern, special, added_tokens=added, **options), old_ids


class _Exchanged(_Prunable):
    """Chats, and the same tokenizer in other libraries."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation, written by the chat template that came with the tokenizer.

        Raises: ValueError if there is no template, or if a message spells a special token.
        """
        from minillm.chat import render_chat

        text = render_chat(self, messages, add_generation_prompt=add_generation_prompt)
        return self._encode_named(text, "all")

    def to_tiktoken(self) -> "tiktoken.Encoding":
        """The same tokenizer in the native library tiktoken (warns where tiktoken may differ)."""
        from minillm import tokenizer_interchange

        return tokenizer_interchange.to_tiktoken(self)

    def to_hf(self) -> "tokenizers.Tokenizer":
        """The same tokenizer in the native library tokenizers."""
        from minillm import tokenizer_interchange

        return tokenizer_interchange.to_hf(self)


class BPETokenizer(_Exchanged):
    """Byte-pair encoding in which ranks are ids, as in tiktoken: a lower rank is merged earlier.

    Args:
        ranks, special_tokens, added_tokens, bos_token, eos_token, pad_token: see `Vocabulary`.
        pattern: the regular expression that cuts text into words.
        add_bos: `encode` puts the begin token first.
        normalizer: "NFC" composes characters before encoding, so decoding returns composed text.
        chat_template: a Jinja2 template for `apply_chat_template`.
    Raises: ValueError as `Vocabulary`, for a bad pattern, an unknown normalizer, or a begin token
        to be added when there is none.
    """

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which Hugging Face reads."""
        from minillm import tokenizer_files

        tokenizer_files.save(self, Path(directory))

    @classmethod
    def load(cls, path: str | Path) -> "BPETokenizer":
        """Read a `tokenizer.json`, or the folder that holds it: ours, or any byte-level BPE.

        Raises: ValueError if the file is damaged or needs a feature that this class lacks.
        """
        from minillm import tokenizer_files

        return cls(**tokenizer_files.load(Path(path)))

    @classmethod
    def from_tiktoken_file(
        cls,
        path: str | Path,
        *,
        pattern: str = LLAMA3_PATTERN,
        special_tokens: Mapping[str, int] | None = None,
    ) -> "BPETokenizer":
        """Read a file of ranks as tiktoken and Llama 3 ship; the file holds nothing else.

        Raises: ValueError naming the line that is damaged.
        """
        from minillm import tokenizer_files

        return cls(tokenizer_files.read_tiktoken(Path(path)), pattern, special_tokens)
