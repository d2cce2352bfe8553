"""How text is cut into words before any merge: the published patterns and a fast splitter.

Explained in notebook 02. No merge crosses a word's border, so words can be counted and remembered.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import re
from collections.abc import Iterable, Iterator, Sequence

import regex

from minillm.checks import quoted

__all__ = [
    "GPT2_PATTERN",
    "GPT4_PATTERN",
    "KEEP",
    "LLAMA3_PATTERN",
    "PATTERNS",
    "QWEN2_PATTERN",
    "SECONDS_A_CHARACTER",
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


def well_formed(text: str) -> str:
    """Text that UTF-8 can write: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


KEEP = 1000  # characters behind a cut, so that no special token straddles it

_SPACE = re.compile(r" (?=\S)")

# (?r): from the end; U+3040 to U+30FF is kana, whose signs some patterns join to its letters
_BORDER = regex.compile(r"(?r)(?<=[\p{L}\p{N}])(?=[^\p{L}\p{N}\p{M}\u3040-\u30ff])")

SECONDS_A_CHARACTER = 2e-5  # some forty times what a pattern needs that does not backtrack


def in_ascii(pattern: str) -> str:
    """What a published pattern says of ASCII text, as Python's `re` writes it."""
    letters = pattern.replace(r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]")
    letters = letters.replace(r"[^\s\p{L}\p{N}]", r"[^\sA-Za-z0-9]")
    return letters.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")


class PreTokenizer:
    """Cut text into words (pre-tokens) by a pattern, or first into chunks that are cheap to find.

    For the published patterns, ASCII goes to `re`, which is twice as quick as `regex`.

    Raises: ValueError if the pattern is no regular expression, or captures groups.
    """

    def __init__(self, pattern: str) -> None:
        self.published = pattern in PATTERNS.values()
        if not self.published:
            from minillm.tokenizer.patterns import check_pattern

            check_pattern(pattern)
        try:
            compiled = regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"{quoted(pattern, 400)} is not a regular expression: {error}"
            ) from None
        if compiled.groups:
            raise ValueError(
                f"{quoted(pattern, 400)} captures groups: write (?:...) instead of (...)"
            )
        self.pattern: str | tuple[str, ...] = pattern
        self._find = compiled.findall
        if self.published:
            self._find_ascii = re.compile(in_ascii(pattern), re.ASCII).findall

    def words(self, text: str) -> list[str]:
        """The words of `text` in order; joined, they are the text.

        Raises: ValueError if the pattern leaves out a part of the text, or takes forever.
        """
        if self.published:
            return self._find_ascii(text) if text.isascii() else self._find(text)
        try:
            words = self._find(text, timeout=1 + len(text) * SECONDS_A_CHARACTER)
        except TimeoutError:
            raise ValueError(
                f"the pattern {quoted(self.pattern, 400)} takes forever on {text[:40]!r}: "
                "does it repeat what is repeated?"
            ) from None
        if sum(map(len, words)) != len(text):
            raise ValueError(
                f"the pattern {quoted(self.pattern, 400)} leaves out parts of {text[:40]!r}"
            )
        return words

    def chunks(self, text: str) -> list[str]:
        """Cut before each space that a visible character follows, and drop that space.

        A published pattern always ends a word there, and never looks beyond. Others are not cut.
        """
        return _SPACE.split(text) if self.published else [text]

    def blocks(
        self, texts: Iterable[str], *, whole: re.Pattern[str] | None = None, size: int = 1 << 19
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
                    cut = self._last_border(waiting, whole)
                    if cut:
                        yield waiting[:cut]
                        waiting = waiting[cut:]
                    limit = max(size, 2 * len(waiting))
        if waiting:
            yield waiting

    def _last_border(self, text: str, whole: re.Pattern[str] | None) -> int:
        found = _BORDER.search(text, 0, max(0, len(text) - KEEP)) if self.published else None
        cut = found.end() if found else 0
        for match in whole.finditer(text) if whole else ():
            if match.start() < cut < match.end():
                return match.start()
        return cut


def make_pre_tokenizer(pattern: str | Sequence[str]) -> PreTokenizer:
    """What cuts text by a pattern, or by several, one after another."""
    if isinstance(pattern, str) or len(pattern) == 1:
        return PreTokenizer(pattern if isinstance(pattern, str) else pattern[0])
    from minillm.tokenizer.patterns import SeveralPatterns

    return SeveralPatterns(pattern)
