"""What a story of the course's language must keep, and where a text leaves the language."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from minillm.stories.language import StoryLanguage

__all__ = ["duties", "first_wrong", "hero_of"]


def hero_of(text: str) -> str | None:
    """The name of a story's hero."""
    found = re.search(r"(?:named|name was|called|heard of) ([A-Z][a-z]+)", text)
    return found and found[1]


def duties(texts: Sequence[str], language: StoryLanguage) -> dict[str, tuple[int, int]]:
    """How often English stories keep what they have said: (kept, asked) for each duty.

    After "But" or "So" comes the hero's name; the fruit that was asked for is found; what was
    found and what was picked add up; the whole story is one of the language.
    """
    pools = language.grammar.pools
    names = {card[""] for card in pools["names"]}
    counts = [*pools["small"], *pools["few"], *pools["numbers"]]
    number = {card[""]: int(card["n"]) for card in counts}
    asked: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for text in texts:
        cases = [("whole story valid", language.score(text) > float("-inf"))]
        for name in re.findall(r"\b(?:But|So) ([A-Z][a-z]+)", text):
            cases += [("hero's name", name == hero_of(text))] if name in names else []
        wanted = re.search(r"bring me some (\w+)\.", text)
        found = re.search(r"found (\w+) (\w+)\.", text)
        if wanted and found:
            cases.append(("the same fruit", wanted[1] == found[2]))
        more, total = re.search(r"picked (\w+) more", text), re.search(r"counted: (\w+) ", text)
        if found and more and total:
            first, second, both = (number.get(m[1], 99) for m in (found, more, total))
            cases.append(("the sum", first + second == both))
        for duty, good in cases:
            asked[duty] += 1
            kept[duty] += good
    return {duty: (kept[duty], asked[duty]) for duty in asked}


class Reader(str):
    """A text that notes how far it was found to agree with what could stand there."""

    far = 0

    def startswith(self, value: str, start: int = 0) -> bool:  # type: ignore[override]
        here = self[start : start + len(value)]
        pairs = enumerate(zip(value, here, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), len(here))
        self.far = max(self.far, start + same)
        return here == value


def first_wrong(language: StoryLanguage, text: str) -> str | None:
    """The first word of a text that no story has there, with its signs; "" if the text ends too
    early, None if it is a whole story.
    """
    reader = Reader(text)
    found = language.grammar.root.read(reader, 0, {})
    if found is not None and found[0] == len(text):
        return None
    if found is not None:  # a whole story, and more
        return (text[found[0] :].split() or [text[found[0] :]])[0]
    if reader.far == len(text):
        return ""
    start = text.rfind(" ", 0, reader.far) + 1
    return text[start:].partition(" ")[0] or " "
