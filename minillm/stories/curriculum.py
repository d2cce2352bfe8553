"""Stories told so that more can be learned from each: small decks of cards, exact targets.

Written by hand; the cards are explained in deeper/01_story_language, what for in
deeper/10_exact_targets.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from minillm.deeper.training.documents import DocumentBatches, StoryDocuments
from minillm.stories.grammar import Chain, Choice, Draw, Node, Table
from minillm.stories.language import StoryLanguage

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
        self.settings |= {"cards": cards, "stories": stories}
        path = files("minillm.stories") / "grammars" / f"{lang}.txt"
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


Drawn = tuple[int, int, list[str]]  # begin and end of what was drawn, and all that might have been


def draws(language: StoryLanguage, text: str) -> list[Drawn]:
    """Where a story draws a card, and what all the cards that it could draw there would print.

    Raises: ValueError for a text that is no story of the language.
    """
    found = _read(language.grammar.root, text, 0, {})
    if found is None or found[0] != len(text):
        raise ValueError(f"no story of the language: {text!r}")
    return found[2]


def _read(
    node: Chain | Node, text: str, start: int, table: Table
) -> tuple[int, Table, list[Drawn]] | None:
    """As a node's `read`, but with the draws on the way in the place of the log-probability."""
    if isinstance(node, Chain):
        drawn: list[Drawn] = []
        for part in node.nodes:
            if (found := _read(part, text, start, table)) is None:
                return None
            start, table = found[:2]
            drawn += found[2]
        return start, table, drawn
    if isinstance(node, Choice):
        ways = (_read(chain, text, start, table) for _, chain in node.ways)
        found = next((way for way in ways if way is not None), None)
        if found is None:
            return None
        return found[0], {slot: found[1][slot] for slot in node.keep}, found[2]
    if (read := node.read(text, start, table)) is None:
        return None
    options = [option for option, _, _ in node.every(table)] if isinstance(node, Draw) else []
    return read[0], read[1], [(start, read[0], options)] if options else []


class ExactBatches:
    """Batches of whole stories with the probabilities of their tokens as targets (B, T, V).

    Where a story draws a card, all cards it could draw there have their probability; elsewhere the
    token that came has probability 1, as it has where a card's tokens are not its own (a Chinese
    token may go on beyond it). Padding has zeros. `batches` are rows of whole stories.
    """

    def __init__(self, batches: DocumentBatches, language: StoryLanguage, tokenizer: Any) -> None:
        self.batches, self.language, self.tokenizer = batches, language, tokenizer
        sizes = range(tokenizer.vocab_size)
        self._bytes = [len(tokenizer.decode_bytes([i])) for i in sizes]
        self._encode = cache(lambda text: tuple(tokenizer.encode_ordinary(text)))

    def __iter__(self) -> "ExactBatches":
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        inputs, targets = next(self.batches)
        begins = int(self.batches.bos_token_id != self.batches.eos_token_id)  # of the next story
        counted = targets != -100
        probs = torch.zeros(*targets.shape, len(self._bytes))
        probs.scatter_(-1, targets.where(counted, 0)[..., None], counted[..., None].float())
        for row, ids in zip(probs, targets.tolist(), strict=True):
            start = 0
            while self.batches.eos_token_id in ids[start:]:
                end = ids.index(self.batches.eos_token_id, start)
                for place, known in self._known(ids[start:end]):
                    row[start + place] = 0.0
                    row[start + place, list(known)] = torch.tensor(list(known.values()))
                start = end + 1 + begins
        return inputs, probs

    def _known(self, ids: list[int]) -> Iterator[tuple[int, dict[int, float]]]:
        """Places in a story's tokens where cards decide, with the tokens' probabilities there."""
        text = self.tokenizer.decode_bytes(ids).decode("utf-8")
        starts = accumulate((self._bytes[i] for i in ids[:-1]), initial=0)
        places = dict(zip(starts, range(len(ids)), strict=True))
        for begin, end, options in draws(self.language, text):
            begin -= text[:begin].endswith(" ")  # the space belongs to the word
            drawn = self._encode(text[begin:end])
            place = places.get(len(text[:begin].encode("utf-8")), len(ids))
            if tuple(ids[place : place + len(drawn)]) != drawn:
                continue
            space = " " * text[begin:end].startswith(" ")
            left = [self._encode(space + option) for option in options]
            for k, token in enumerate(drawn):
                if min(map(len, left)) == k:
                    break  # a card has ended within another's tokens
                share = Counter(tokens[k] for tokens in left)
                if len(share) > 1:
                    yield place + k, {t: count / len(left) for t, count in share.items()}
                left = [tokens for tokens in left if tokens[k] == token]

    def state_dict(self) -> dict[str, Any]:
        """Where the batches stand."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where `state` says. Raises: ValueError as the batches do."""
        self.batches.load_state_dict(state)
