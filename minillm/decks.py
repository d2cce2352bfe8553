"""Stories told with few cards, so that "no card twice" is a rule one cannot overlook.

Written by hand; the cards are explained in notebook 01, what the small decks are good for in 10.
"""

import random
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from minillm.documents import StoryDocuments
from minillm.stories import StoryLanguage

__all__ = ["DECKS", "DeckDocuments", "fewer_cards"]

DECKS = ("names", "animals", "colors", "things")  # a story draws twice or more from each


def fewer_cards(grammar: str, cards: int, rng: random.Random) -> str:
    """The text of a grammar whose pools of `DECKS` keep `cards` cards each, chosen by `rng`."""
    kept: list[str] = []
    pool, rest = "", []
    for line in [*grammar.splitlines(), "# end"]:
        is_card = bool(line.strip()) and not line.startswith(("#", "pool ", "rule "))
        if is_card and pool in DECKS:
            rest.append(line)
            continue
        kept += rng.sample(rest, min(cards, len(rest)))
        rest = []
        if line.startswith(("pool ", "rule ")):
            pool = line.removeprefix("pool ").partition(":")[0]
        kept.append(line)
    return "\n".join(kept)


class DeckDocuments(StoryDocuments):
    """Fresh stories with `cards` cards in each of `DECKS`, and other cards every `stories` stories.

    Whoever ignores that no card comes twice pays ln(24/23), 0.04 nats, for a second of 24 names,
    and ln(4/3), 0.29 nats, for one of 4: enough to learn from. The cards of a deck depend on the
    seed and on its number alone.

    Raises: ValueError for fewer than 3 cards, since a story may draw so many, or no stories.
    """

    def __init__(
        self,
        lang: str,
        encode: Callable[[str], list[int]],
        *,
        cards: int,
        stories: int,
        seed: int | str = 0,
    ) -> None:
        if cards < 3 or stories < 1:
            raise ValueError(f"decks of {cards} cards for {stories} stories: at least 3 and 1")
        super().__init__(StoryLanguage(lang), encode, seed=seed)
        path = files("minillm") / "grammars" / f"{lang}.txt"
        self.grammar, self.cards, self.stories = path.read_text(encoding="utf-8"), cards, stories
        self._deck = -1

    def text(self, index: int) -> str:
        """The text of story number `index`, told with the cards of its time."""
        deck = index // self.stories
        if deck != self._deck:
            rng = random.Random(f"{self.seed}/deck {deck}")
            grammar = fewer_cards(self.grammar, self.cards, rng)
            self.language, self._deck = StoryLanguage(self.language.lang, grammar=grammar), deck
        return super().text(index)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return {**super().state_dict(), "cards": self.cards, "stories": self.stories}
