"""How text is cut into words before any merge: the published patterns and a fast splitter.

Explained in notebook 02. No merge crosses a word's border, so words can be counted and remembered.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import re
from collections.abc import Sequence

import regex

__all__ = [
    "GPT2_PATTERN",
    "GPT4_PATTERN",
    "LLAMA3_PATTERN",
    "PATTERNS",
    "QWEN2_PATTERN",
    "PreTokenizer",
    "in_ascii",
    "make_pre_tokenizer",
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
    from minillm.tokenizer.patterns import watched

    return watched(pattern)


def well_formed(text: str) -> str:
    """Text that UTF-8 can write: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
