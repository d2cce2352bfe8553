"""Patterns that Python's `regex` and the library `tokenizers` read alike.

The patterns of a `tokenizer.json` are Oniguruma's (its Ruby syntax), ours are those of `regex`, and
much is spelled the same and means something else. What is listed here means the same in both, or
has a spelling that does; tests compare the two, character by character. (Which characters are
letters is each library's own Unicode.) Written by hand.

Source: Oniguruma's doc/RE; the documentation of `regex`.
"""

import re

from minillm.support.checks.words import quoted

_CATEGORIES = "L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs"
_SCRIPTS = "Arabic Cyrillic Devanagari Greek Han Hangul Hebrew Hiragana Katakana Latin Thai"
_NAMES = "|".join(f"{_CATEGORIES} Zl Zp Cc Cf Co Alphabetic {_SCRIPTS}".split())

_SET = rf"\\[sSdD]|\\[pP]\{{(?:{_NAMES})\}}"
_SINGLE = r"\\[tnrfv]|\\[!-/:-@\[-`{-~]|\\x[0-7][\dA-Fa-f]|\\u(?![dD][89a-fA-F])[\dA-Fa-f]{4}"
_ITEM = rf"(?:{_SET}|\\w|(?:{_SINGLE}|[^\\\[\]\-])(?:-(?:{_SINGLE}|[^\\\[\]\-]))?)"
_CLASS = rf"\[(?!.[^\]]*(?:&&|~~|\|\|))\^?(?!\^)-?{_ITEM}+-?\]"
_LETTER = "[a-hj-zA-HJ-Z]"  # i has dotted and dotless relatives, in one of the two only
_CASELESS = rf"\(\?i:(?:'?(?:\[{_LETTER}+\]|{_LETTER}+)(?:\|(?!\)))?)+\)"
_ATOM = re.compile(rf"{_SET}|{_SINGLE}|{_CLASS}|\\[wW]|[^\\\[\](){{}}|?*+^$]", re.DOTALL)
_GROUP = re.compile(rf"(?P<caseless>{_CASELESS})|\(\?(?::|>|(?P<looks>=|!|<=|<!))", re.DOTALL)
_QUANTIFIER = re.compile(r"(?:[?*+]|\{\d+(?:,\d*)?\}|\{,\d+\})(?=(?P<mode>[?+]?))")
_ALONE = re.compile(
    rf"(?:{_ATOM.pattern})(?:\*\+?|\?\+)|\(\?<?[=!](?:{_ATOM.pattern})+\)", re.DOTALL
)
_TWO_FOR_ONE = re.compile("ff|fl|s[st]", re.IGNORECASE)  # one character, "ß", stands for two

_END, _LAST_LINE_END = r"(?![\s\S])", r"(?=\n?(?![\s\S]))"
_LINE_BEGIN = r"(?:(?<![\s\S])|(?<=\n)(?=[\s\S]))"
_ANCHOR = re.compile(r"[$^]|\\[AzZ]")
_WORD = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\u200c\u200d"  # what regex means by \w

# from Oniguruma's dialect or not -> what an anchor is in both
_ANCHORS = {
    True: {"^": _LINE_BEGIN, "$": r"(?![^\n])", r"\z": _END, r"\Z": _LAST_LINE_END},
    False: {"^": r"(?<![\s\S])", "$": _LAST_LINE_END, r"\z": _END, r"\Z": _END},
}


def read_alike(pattern: str, *, theirs: bool) -> str:
    """The pattern in a spelling that both read alike; most patterns are that as they are.

    Args:
        theirs: whether the pattern is written for Oniguruma, or for Python's `regex`.
    Raises: ValueError naming the first part that we know no such spelling of.
    """
    return _Reader(pattern, theirs).whole()


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str, theirs: bool) -> None:
        self.pattern, self.theirs, self.at = pattern, theirs, 0

    def whole(self) -> str:
        text, empty = self.alternatives()
        if self.at < len(self.pattern):
            self.refuse()
        if empty and not _ALONE.fullmatch(text):  # what follows an empty match differs
            raise ValueError(f"the pattern {quoted(self.pattern, 400)} may match nothing")
        return text

    def refuse(self) -> None:
        raise ValueError(
            f"the pattern {quoted(self.pattern, 400)} is read differently by the library "
            f"tokenizers, or may be, at {quoted(self.pattern[self.at : self.at + 12])}"
        )

    def take(self, kind: re.Pattern[str]) -> re.Match[str] | None:
        found = kind.match(self.pattern, self.at)
        if found:
            self.at = found.end()
        return found

    def alternatives(self) -> tuple[str, bool]:
        """Up to a closing bracket or the end; and whether they may match nothing."""
        text, empty = self.sequence()
        while self.pattern.startswith("|", self.at):
            self.at += 1
            more, nothing = self.sequence()
            text, empty = f"{text}|{more}", empty or nothing
        return text, empty

    def sequence(self) -> tuple[str, bool]:
        text, empty = "", True
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            part, nothing = self.part()
            text, empty = text + part, empty and nothing
        return text, empty

    def part(self) -> tuple[str, bool]:
        """An atom with its quantifier, or an anchor."""
        if anchor := self.take(_ANCHOR):
            return _ANCHORS[self.theirs].get(anchor[0], anchor[0]), True
        if atom := self.take(_ATOM):
            return self.repeated(self.spelled(atom), False)
        group = self.take(_GROUP)
        if group is None:
            self.refuse()
        elif group["caseless"]:
            if _TWO_FOR_ONE.search(group[0]):
                self.at = group.start()
                self.refuse()
            return self.repeated(group[0], False)
        else:
            text, empty = self.alternatives()
            if group["looks"] in ("<=", "<!") and not _ATOM.fullmatch(text):
                self.refuse()  # how far it may look back is another question
            if not self.pattern.startswith(")", self.at):
                self.refuse()
            self.at += 1
            text = f"{group[0]}{text})"
            return (text, True) if group["looks"] else self.repeated(text, empty)
        raise AssertionError  # refused

    def spelled(self, atom: re.Match[str]) -> str:
        """A character, or a set of characters, in which \\w is written out."""
        found = atom[0]
        if found in (r"\w", r"\W") or (found[0] == "[" and re.search(r"(?<!\\)(\\\\)*\\w", found)):
            if self.theirs:
                self.at = atom.start()
                self.refuse()
            if found[0] == "\\":
                return f"[^{_WORD}]" if found == r"\W" else f"[{_WORD}]"
            found = re.sub(r"\\.", lambda m: _WORD if m[0] == r"\w" else m[0], found)
        return found

    def repeated(self, text: str, empty: bool) -> tuple[str, bool]:
        start = self.at
        quantifier = self.take(_QUANTIFIER)
        if quantifier is None:
            return text, empty
        if empty:  # rounds that match nothing
            self.at = start
            self.refuse()
        count, mode = quantifier[0], quantifier["mode"]
        self.at += len(mode)
        if self.at < len(self.pattern) and self.pattern[self.at] in "?*+{":
            self.refuse()
        empty = count in "?*" or re.match(r"\{(0+[,}]|,)", count) is not None
        counted = text + count
        if count[0] != "{" or not mode or (mode == "?" and "," in count):
            return counted + mode, empty
        if not self.theirs:  # all or none of it; "exactly three, rather fewer" is exactly three
            return (f"(?>{counted})" if mode == "+" else counted), empty
        if empty:
            self.at = start
            self.refuse()
        return f"(?:{counted}){mode}", mode == "?"
