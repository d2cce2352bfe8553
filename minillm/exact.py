"""Exact targets: where a story draws a card, the probabilities of all cards and not the one drawn.

The gradient is the one that samples give on average, without their noise. Written by hand; the
story language is explained in notebook 01, targets that are probabilities in 09.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from minillm.documents import DocumentBatches
from minillm.grammar import Chain, Choice, Draw, Node, Table
from minillm.stories import StoryLanguage

__all__ = ["ExactBatches", "draws"]

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
        kept = found and {slot: found[1][slot] for slot in node.keep}
        return found and (found[0], kept, found[2])
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

    def __next__(self) -> tuple[Tensor, Tensor]:
        inputs, targets = next(self.batches)
        counted = targets != -100
        probs = torch.zeros(*targets.shape, len(self._bytes))
        probs.scatter_(-1, targets.where(counted, 0)[..., None], counted[..., None].float())
        for row, ids in zip(probs, targets.tolist(), strict=True):
            start = 0
            while self.batches.end_id in ids[start:]:
                end = ids.index(self.batches.end_id, start)
                for place, known in self._known(ids[start:end]):
                    row[start + place] = 0.0
                    row[start + place, list(known)] = torch.tensor(list(known.values()))
                start = end + 1
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
