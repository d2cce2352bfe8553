"""Patterns of strangers, watched, and several in turn, as SmolLM's and DeepSeek's files ask for.

Explained in notebooks/deeper/02_tokenizer_files.
"""

# Built from notebooks/deeper/02_tokenizer_files.ipynb: edit there, then make build.

import math
import re
import time
from collections.abc import Sequence

import regex

from minillm.bpe import GPT2_PATTERN, PATTERNS, PreTokenizer, in_ascii, make_pre_tokenizer
from minillm.support.checks.words import quoted

__all__ = [
    "DEEPSEEK_V3_PATTERNS",
    "LONGEST_PATTERN",
    "SECONDS_A_CHARACTER",
    "SMOLLM_PATTERNS",
    "SeveralPatterns",
    "WatchedPattern",
    "check_pattern",
    "watched",
]

SMOLLM_PATTERNS = (r"\p{N}", GPT2_PATTERN)  # SmolLM, SmolLM2, StarCoder

DEEPSEEK_V3_PATTERNS = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

# What a published sequence does to ASCII text, as one pattern for Python's `re`.
_IN_ASCII = {
    SMOLLM_PATTERNS: in_ascii(
        GPT2_PATTERN.replace(r" ?\p{N}+", r"\p{N}").replace(r"\s+(?!\S)", r"\s+(?=\p{N})|\s+(?!\S)")
    ),
    DEEPSEEK_V3_PATTERNS: (
        r"[0-9]{1,3}|[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n!-~]?[A-Za-z]+| ?[!-/:-@\[-`{-~]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?=[0-9])|\s+(?!\S)|\s+|(?:[^\s!-~](?![A-Za-z]))+"
    ),
}

LONGEST_PATTERN = 20_000  # characters; DeepSeek-V3's three have 154


def check_pattern(pattern: str) -> None:
    """Refuse what could take too much time or memory before its time can be measured.

    Raises: ValueError for a pattern that is too long, counts too far, or calls itself.
    """
    if len(pattern) > LONGEST_PATTERN:
        start = f"{pattern[:40]!r}..., {len(pattern):,} characters"
        raise ValueError(f"the pattern {start}, is too long: at most {LONGEST_PATTERN:,} are read")
    if re.search(r"\(\?([+-]?[R0]|[\w-]*x)", pattern):  # (?x): counts would hide in white space
        raise ValueError(f"{pattern!r:.90} calls itself, or is verbose: not supported")
    counts = [int(count[:20]) for count in re.findall(r"\{(?:\d*,)?(\d+),?\}", pattern)]
    great = math.prod(count for count in counts if count > 9)  # 9: not \p{N}{1,3}
    if great >= 1000 or len(pattern) * math.prod(counts) > 100_000:  # as if each held the next
        raise ValueError(f"{pattern!r:.90} counts to {max(counts)}: it would take too much memory")


SECONDS_A_CHARACTER = 2e-5  # some forty times what a pattern needs that does not backtrack


class WatchedPattern(PreTokenizer):
    """A pattern that is not published: checked before it is compiled, and given a limit of time.

    Raises: ValueError if the pattern is no regular expression, or captures groups.
    """

    def __init__(self, pattern: str) -> None:
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
        self.pattern, self.published, self._find = pattern, False, compiled.findall

    def words(self, text: str) -> list[str]:
        """The words of `text` in order; joined, they are the text.

        Raises: ValueError if the pattern leaves out a part of the text, or takes forever.
        """
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


class SeveralPatterns(WatchedPattern):
    """Cut text by several patterns in turn: each cuts what the one before has left.

    A match is cut out, and what lies between two matches is a piece as well: nothing is lost.
    Raises: ValueError if they are no strings, or for a pattern that `WatchedPattern` refuses.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.pattern: tuple[str, ...] = (*patterns,)
        if not self.pattern or not all(isinstance(pattern, str) for pattern in self.pattern):
            raise ValueError(f"patterns should be one string or several, not {quoted(patterns)}")
        if sum(map(len, self.pattern)) > LONGEST_PATTERN:
            check_pattern("".join(self.pattern))
        steps = [make_pre_tokenizer(pattern) for pattern in self.pattern]
        self._cuts = [
            regex.compile(step.pattern).findall  # leaves nothing out
            if step.published
            else regex.compile(f"({step.pattern})").split
            for step in steps
        ]
        self._find = self._cut
        # some files hold a line end itself where others hold its name
        named = tuple(p.replace("\r", r"\r").replace("\n", r"\n") for p in self.pattern)
        self.published = named in _IN_ASCII
        if self.published:
            self._find_ascii = re.compile(_IN_ASCII[named], re.ASCII).findall

    def words(self, text: str) -> list[str]:
        return PreTokenizer.words(self, text) if self.published else super().words(text)

    def _cut(self, text: str, timeout: float = 86400.0) -> list[str]:
        """The words of `text`; a piece that occurs again is cut once by each pattern."""
        end = time.monotonic() + timeout
        words = [text]
        for cut in self._cuts:
            parts = {}
            for piece in {*words}:
                left = max(end - time.monotonic(), 1e-3)
                parts[piece] = [part for part in cut(piece, timeout=left) if part]
            words = [part for piece in words for part in parts[piece]]
        return words


def watched(pattern: str | Sequence[str]) -> PreTokenizer:
    """What cuts text by a pattern of a stranger, or by several, or by one that may leave gaps."""
    if isinstance(pattern, str):
        return WatchedPattern(pattern)
    if len(pattern) == 1 and pattern[0] in PATTERNS.values():
        return PreTokenizer(pattern[0])
    return SeveralPatterns(pattern)
