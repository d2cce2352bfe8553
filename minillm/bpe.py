"""A byte-pair tokenizer: any text to ids and back, special tokens apart (notebook 02).

Text is cut into words by a published pattern; no merge crosses a word's border. Ranks map the bytes
of each token to its rank, which is also its id. `deeper.tokenizer` learns fast, reads and writes
files, those of other models, too; it is imported when it is asked for.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Literal

import regex  # as Python's `re`, and it knows \p{L}

from minillm.support.checks import texts as checks
from minillm.support.checks.words import our_words
from minillm.support.door import TokenizerDoors

__all__ = [
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
    "learn_merges",
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


def learn_merges(words: Mapping[str, int], num_merges: int) -> list[tuple[bytes, bytes]]:
    """The most frequent pair of tokens, again and again; of equal ones the greatest.

    `words` says how often each word occurs. There are fewer merges if no pair is left.
    """
    split = [([bytes([byte]) for byte in word.encode()], count) for word, count in words.items()]
    merges: list[tuple[bytes, bytes]] = []
    while len(merges) < num_merges:
        counts: Counter[tuple[bytes, bytes]] = Counter()
        for tokens, count in split:
            for pair in pairwise(tokens):
                counts[pair] += count
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        for tokens, _ in split:
            i = 0
            while i < len(tokens) - 1:  # from left to right
                if (tokens[i], tokens[i + 1]) == best:
                    tokens[i : i + 2] = [best[0] + best[1]]
                i += 1
    return merges


LONG_WORD = 72  # bytes from which the method with places by rank is the faster one

LONG_TEXT = 1 << 16  # characters from which a text is encoded in blocks


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


def in_ascii(pattern: str) -> str:
    """What a published pattern says of ASCII text, as Python's `re` writes it."""
    letters = pattern.replace(r"\p{L}\p{N}", "A-Za-z0-9")  # both stand in brackets only
    return letters.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")


class PreTokenizer:
    """Cut text into words by a published pattern; ASCII by `re`, which is twice as quick."""

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
    if pattern in PATTERNS.values():
        return PreTokenizer(str(pattern))
    from minillm.deeper.tokenizer.patterns import watched

    return watched(pattern)


def well_formed(text: str) -> str:
    """Text that UTF-8 can write: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


Allowed = Literal["all"] | Collection[str]  # special tokens that a text may spell


@our_words
class BPETokenizer(TokenizerDoors):
    """Byte-pair encoding in which ranks are ids, as in tiktoken: a lower rank is merged earlier.

    `ranks` give the bytes of each token its id, `special_tokens` a name: no text makes these unless
    the caller allows it. Which of them begin and end a text and fill a batch is said, or found by
    well-known names (the end token also fills). With `add_bos`, `encode` puts the begin token
    first; without one the end token, as GPT-2 does.
    Raises: ValueError for ids or names that repeat, missing bytes, an unknown name, a bad pattern.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        pattern: str | Sequence[str],
        special_tokens: Mapping[str, int] | None = None,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        add_bos: bool = False,
    ) -> None:
        checks.check_ranks(self, ranks, special_tokens, bos_token, eos_token, pad_token, add_bos)
        self.ranks, self.special_tokens = dict(ranks), dict(special_tokens or {})
        self.named = self.special_tokens  # what `encode` finds before it cuts a text
        self.pieces = {i: token for token, i in self.ranks.items()}  # id -> bytes
        self.pieces |= {i: name.encode() for name, i in self.named.items()}
        known = self.special_tokens.__contains__
        self.eos_token = eos_token or next(filter(known, checks.END_TOKENS), None)
        self.bos_token = bos_token or next(filter(known, checks.BEGIN_TOKENS), None)
        self.bos_token = self.bos_token or (self.eos_token if add_bos else None)
        self.pad_token, self.add_bos = pad_token or self.eos_token, add_bos
        self.pre_tokenizer = make_pre_tokenizer(pattern)
        self.pattern, self.memo = self.pre_tokenizer.pattern, Memo(self._encode_word)
        longest_first = sorted(map(re.escape, self.named), key=len, reverse=True)
        self.names = re.compile("|".join(longest_first)) if self.named else None

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: the greatest id plus one."""
        return max(self.pieces) + 1

    def encode(
        self, text: str, *, allowed_special: Allowed = (), add_special_tokens: bool = True
    ) -> list[int]:
        """Ids of `text`; a special token that it spells becomes one id, if allowed.

        With `add_bos` and `add_special_tokens` the begin token is put first, unless it is there.
        Raises: ValueError if the text spells a special token that is not allowed.
        """
        checks.check_special(self, text, allowed_special)
        ids, start = [], 0
        for found in self.names.finditer(text) if self.names else ():
            ids += self.encode_ordinary(text[start : found.start()])
            ids.append(self.named[found[0]])
            start = found.end()
        ids += self.encode_ordinary(text[start:])
        begins = self.add_bos and add_special_tokens and self.bos_token is not None
        return [self.bos_token_id, *ids] if begins and ids[:1] != [self.bos_token_id] else ids

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`, in which the spelling of a special token is text like any other."""
        checks.check_text(text, "encode_batch takes several")
        text = well_formed(text)
        if len(text) > LONG_TEXT:
            from minillm.deeper.tokenizer.bulk import encode_blocks

            return encode_blocks(self, text)
        return [*chain.from_iterable(map(self.memo.__getitem__, self.pre_tokenizer.words(text)))]

    def _encode_word(self, word: str) -> list[int]:
        data = word.encode()
        parts = [data] if data in self.ranks else merge_word(data, self.ranks)
        return [self.ranks[part] for part in parts]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, exactly; an id that no token has adds none, as in transformers."""
        return b"".join(self.pieces.get(i, b"") for i in checks.ids_of(ids))

    def decode(
        self, ids: Iterable[int], *, errors: str = "replace", skip_special_tokens: bool = False
    ) -> str:
        """The text of `ids`; what is no UTF-8 becomes U+FFFD, or an error if errors="strict"."""
        if skip_special_tokens:
            left_out = {*self.special_tokens.values()}
            ids = [i for i in checks.ids_of(ids) if i not in left_out]
        return self.decode_bytes(ids).decode("utf-8", errors)
