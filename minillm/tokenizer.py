"""A byte-pair tokenizer: any text to ids and back, special tokens apart, files others read.

Explained in notebook 02. Training lives in `bpe_trainer`, file formats in `tokenizer_files`.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import codecs
import heapq
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from minillm.pretokenizer import (
    GPT2_PATTERN,
    GPT4_PATTERN,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    PreTokenizer,
    well_formed,
)

__all__ = [
    "BEGIN_TOKENS",
    "END_TOKENS",
    "PATTERNS",
    "BPETokenizer",
    "StreamDecoder",
    "merge_long_word",
    "merge_word",
]

PATTERNS = {
    "gpt2": GPT2_PATTERN,
    "gpt4": GPT4_PATTERN,
    "llama3": LLAMA3_PATTERN,
    "qwen2": QWEN2_PATTERN,
}

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>")

BEGIN_TOKENS = ("<|begin_of_text|>", "<s>", "<bos>")


def merge_word(word: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Merge the neighbours whose union has the lowest rank, leftmost first, while there are any."""
    if len(word) > 100:
        return merge_long_word(word, ranks)
    parts = [word[i : i + 1] for i in range(len(word))]
    never = len(ranks) + 1 << 32
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


def merge_long_word(word: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """What `merge_word` does, in O(n log n): places grouped by rank, neighbours linked."""
    size = len(word)
    after = list(range(1, size + 1))  # where the part that begins here ends
    before = list(range(-1, size))  # where the part that ends here begins
    places: dict[int, list[int]] = {}
    for i in range(size - 1):
        if (rank := ranks.get(word[i : i + 2])) is not None:
            places.setdefault(rank, []).append(i)
    queue = list(places)
    heapq.heapify(queue)
    while queue:
        rank = heapq.heappop(queue)
        found = sorted(places.pop(rank))
        for k, i in enumerate(found):
            middle = after[i]
            if not 0 < middle < size or ranks.get(word[i : (end := after[middle])]) != rank:
                continue  # an earlier merge took one of the two
            after[i], before[end], after[middle] = end, i, -1
            lower = False
            spans = [(before[i], end)] if i else []
            if end < size:
                spans.append((i, after[end]))
            for start, stop in spans:
                if (new := ranks.get(word[start:stop])) is not None:
                    if new not in places:
                        places[new] = []
                        heapq.heappush(queue, new)
                    places[new].append(start)
                    lower |= new < rank
            if lower and found[k + 1 :]:  # no training makes such ranks, but nobody forbids them
                places[rank] = found[k + 1 :]
                heapq.heappush(queue, rank)
                break
    starts = [0]
    while after[starts[-1]] < size:
        starts.append(after[starts[-1]])
    return [word[i : after[i]] for i in starts]


class _Memory(dict):
    """What a function of a string returned; forgets all when full, never keeps a long string."""

    def __init__(
        self, function: Callable[[str], Any], size: int = 1 << 17, longest: int = 64
    ) -> None:
        self.function, self.size, self.longest = function, size, longest

    def __missing__(self, text: str) -> Any:
        value = self.function(text)
        if len(text) <= self.longest:
            if len(self) >= self.size:
                self.clear()
            self[text] = value
        return value


class StreamDecoder:
    """Ids in, whole characters out: bytes of an unfinished character wait for the rest."""

    def __init__(self, tokenizer: "BPETokenizer", errors: str = "replace") -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; often none."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token_id]))

    def finish(self) -> str:
        """What an unfinished character leaves: U+FFFD, or an error if errors are strict."""
        return self._decoder.decode(b"", final=True)


class BPETokenizer:
    """Byte-pair encoding with the ranks as ids, as in tiktoken: a lower rank is merged earlier.

    Args:
        ranks: bytes of each token -> its id; all 256 bytes must be there.
        pattern: the regular expression that cuts text into words.
        special_tokens: spelling -> id; they are never made from text unless allowed.
        bos_token, eos_token, pad_token: which special tokens begin and end a text and fill a batch
            (default: the well-known names; the end token fills).
        add_bos: `encode` puts the begin token first.
        normalizer: "NFC" or None.
        chat_template: a Jinja2 template.
    Raises: ValueError if ids repeat, bytes are missing, or a special token is unknown or empty.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        pattern: str,
        special_tokens: Mapping[str, int] | None = None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        add_bos: bool = False,
        normalizer: Literal["NFC"] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.ranks = dict(ranks)
        self.special_tokens = dict(special_tokens or {})
        self.pattern, self.normalizer, self.chat_template = pattern, normalizer, chat_template
        self._pre = PreTokenizer(pattern)
        self._bytes = {i: token for token, i in self.ranks.items()}
        self._bytes |= {i: token.encode() for token, i in self.special_tokens.items()}
        self._check()
        self.bos_token = bos_token or next(
            (t for t in BEGIN_TOKENS if t in self.special_tokens), None
        )
        self.eos_token = eos_token or next(
            (t for t in END_TOKENS if t in self.special_tokens), None
        )
        self.pad_token = pad_token or self.eos_token
        for token in (self.bos_token, self.eos_token, self.pad_token):
            if token is not None and token not in self.special_tokens:
                raise ValueError(
                    f"{token!r} is not among the special tokens {list(self.special_tokens)}"
                )
        if add_bos and self.bos_token is None:
            raise ValueError("add_bos needs a bos_token")
        self.add_bos = add_bos
        longest_first = sorted(map(re.escape, self.special_tokens), key=len, reverse=True)
        self._special = re.compile("(" + "|".join(longest_first) + ")") if longest_first else None
        self._words = _Memory(self._encode_word)
        self._chunks = _Memory(lambda chunk: self._encode_chunk(" " + chunk))

    def _check(self) -> None:
        missing = [byte for byte in range(256) if bytes([byte]) not in self.ranks]
        if missing:
            raise ValueError(f"ranks lack {len(missing)} of the 256 bytes, among them {missing[0]}")
        if len(self._bytes) != len(self.ranks) + len(self.special_tokens):
            raise ValueError("two tokens share one id")
        if min(self._bytes) < 0 or "" in self.special_tokens or b"" in self.ranks:
            raise ValueError("negative ids and empty tokens are not allowed")

    @classmethod
    def train(
        cls,
        texts: str | Iterable[str],
        vocab_size: int,
        *,
        pattern: str = GPT4_PATTERN,
        special_tokens: Collection[str] = (),
        ties: Literal["greatest", "lowest_ids"] = "greatest",
        progress: bool = False,
    ) -> "BPETokenizer":
        """Learn `vocab_size` ids (bytes, merges, special tokens), fewer if the text runs out.

        Raises: ValueError if `vocab_size` has no room for the bytes and the special tokens.
        """
        from minillm.bpe_trainer import byte_alphabet, count_words, learn_merges

        num_merges = vocab_size - 256 - len(special_tokens)
        if num_merges < 0:
            raise ValueError(
                f"vocab_size {vocab_size} < 256 bytes + {len(special_tokens)} special tokens"
            )
        texts = [texts] if isinstance(texts, str) else texts
        words = count_words(texts, PreTokenizer(pattern), special_tokens)
        merges = learn_merges(words, num_merges, ties=ties, progress=progress)
        tokens = [bytes([byte]) for byte in byte_alphabet(ties)] + [a + b for a, b in merges]
        ranks = {token: i for i, token in enumerate(tokens)}
        return cls(ranks, pattern, {t: len(ranks) + i for i, t in enumerate(special_tokens)})

    def _encode_word(self, word: str) -> list[int]:
        data = word.encode()
        whole = self.ranks.get(data)
        return (
            [self.ranks[part] for part in merge_word(data, self.ranks)]
            if whole is None
            else [whole]
        )

    def _encode_chunk(self, chunk: str) -> list[int]:
        return list(chain.from_iterable(map(self._words.__getitem__, self._pre.words(chunk))))

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`, in which the spelling of a special token is text like any other."""
        text = well_formed(text)
        if self.normalizer:
            text = unicodedata.normalize(self.normalizer, text)
        head, *tail = self._pre.chunks(text)
        ids = self._encode_chunk(head)
        ids.extend(chain.from_iterable(map(self._chunks.__getitem__, tail)))
        return ids

    def encode(
        self, text: str, *, allowed_special: Literal["all"] | Collection[str] = ()
    ) -> list[int]:
        """Ids of `text`; special tokens that are spelled in it become one id each, if allowed.

        Raises: ValueError if the text spells a special token that is not allowed.
        """
        ids = [self.bos_token_id] if self.add_bos else []
        if self._special is None:
            return ids + self.encode_ordinary(text)
        for i, part in enumerate(self._special.split(text)):
            if i % 2 == 0:
                ids += self.encode_ordinary(part)
            elif allowed_special == "all" or part in allowed_special:
                ids.append(self.special_tokens[part])
            else:
                raise ValueError(
                    f"the text spells the special token {part!r}: allow it by allowed_special, "
                    "or call encode_ordinary to take it as plain text"
                )
        return ids

    def encode_batch(
        self,
        texts: Iterable[str],
        *,
        padding_side: Literal["left", "right"] | None = None,
        allowed_special: Literal["all"] | Collection[str] = (),
    ) -> list[list[int]] | tuple[list[list[int]], list[list[int]]]:
        """Ids of each text; with a padding side, rows of one length and their mask (1 = token).

        Raises: ValueError if padding is asked for and there is no pad token.
        """
        rows = [self.encode(text, allowed_special=allowed_special) for text in texts]
        if padding_side is None:
            return rows
        if padding_side not in ("left", "right") or self.pad_token_id is None:
            raise ValueError(f"cannot pad on {padding_side!r} with pad token {self.pad_token!r}")
        length = max(map(len, rows), default=0)
        ids, mask = [], []
        for row in rows:
            fill, ones = [self.pad_token_id] * (length - len(row)), [1] * len(row)
            zeros = [0] * len(fill)
            ids.append(fill + row if padding_side == "left" else row + fill)
            mask.append(zeros + ones if padding_side == "left" else ones + zeros)
        return ids, mask

    def encode_iterable(self, texts: Iterable[str]) -> Iterator[int]:
        """Ids of the concatenation of `texts`, special tokens allowed, in constant memory."""
        if self.add_bos:
            yield self.bos_token_id
        for block in self._pre.blocks(texts, whole=self._special):
            for i, part in enumerate(self._special.split(block) if self._special else [block]):
                if i % 2:
                    yield self.special_tokens[part]
                else:
                    yield from self.encode_ordinary(part)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, exactly. Raises: ValueError for an unknown id."""
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        try:
            return b"".join(map(self._bytes.__getitem__, ids))
        except KeyError as error:
            raise ValueError(f"id {error} is not among the {len(self)} ids") from None

    def decode(self, ids: Iterable[int], *, errors: str = "replace") -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, or an error if "strict"."""
        return self.decode_bytes(ids).decode("utf-8", errors)

    def decoder(self) -> StreamDecoder:
        """A decoder for ids that arrive one by one."""
        return StreamDecoder(self)

    @cached_property
    def merges(self) -> list[tuple[bytes, bytes]]:
        """The pair that makes each longer token, in order (without tokens that no pair makes)."""
        pairs = []
        for token, rank in sorted(self.ranks.items(), key=lambda item: item[1]):
            if len(token) > 1:
                parts = merge_word(token, _Below(self.ranks, rank))
                if len(parts) == 2:
                    pairs.append((parts[0], parts[1]))
        return pairs

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: the greatest id plus one."""
        return max(self._bytes) + 1

    @property
    def bos_token_id(self) -> int | None:
        return self.special_tokens.get(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self.special_tokens.get(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        return self.special_tokens.get(self.pad_token)

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which Hugging Face reads."""
        from minillm.tokenizer_files import save

        save(self, Path(directory))

    @classmethod
    def load(cls, path: str | Path) -> "BPETokenizer":
        """Read a `tokenizer.json` (or the directory that holds it), ours or any of byte-level BPE.

        Raises: ValueError if the file is damaged or asks for a feature that this class lacks.
        """
        from minillm.tokenizer_files import load

        return load(Path(path))


class _Below(dict):
    """Ranks below a bound, without a copy."""

    def __init__(self, ranks: Mapping[bytes, int], bound: int) -> None:
        self.ranks, self.bound = ranks, bound

    def get(self, token: bytes, default: int | None = None) -> int | None:
        rank = self.ranks.get(token)
        return rank if rank is not None and rank < self.bound else default
