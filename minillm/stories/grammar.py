"""Grammars whose probabilities are known exactly: four kinds of node, in chains.

A node can write (sample), read (score), list every text, and say its entropy and its expected size
in bytes. The story language is built from them; see notebooks/deeper/01_story_language.ipynb.
"""

# Built from notebooks/deeper/01_story_language.ipynb: edit there, then make build.

import math
import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from statistics import fmean

__all__ = ["Card", "Chain", "Choice", "Copy", "Draw", "Found", "Node", "Table", "Text", "apart"]

Card = dict[str, str]  # one entry of a pool: its forms by name

Table = dict[str, Card]  # the cards drawn so far, by slot

Found = tuple[int, Table, float]  # where reading arrived, the cards, the log-probability


class Text:
    """Words that are always the same: no choice."""

    def __init__(self, value: str) -> None:
        self.value = value

    def text(self, table: Table) -> str:
        return self.value

    def texts(self) -> list[str]:
        """What it may print, each with the same chance."""
        return [self.value]

    def write(self, rng: random.Random, table: Table, out: list[str]) -> tuple[Table, float]:
        out.append(self.text(table))
        return table, 0.0

    def read(self, text: str, start: int, table: Table) -> Found | None:
        value = self.text(table)
        return (start + len(value), table, 0.0) if text.startswith(value, start) else None

    def every(self, table: Table) -> Iterator[tuple[str, Table, float]]:
        yield self.text(table), table, 0.0

    def entropy(self) -> float:
        return 0.0

    def size(self) -> float:
        return fmean(len(text.encode()) for text in self.texts())


class Copy(Text):
    """A slot filled before, in one of its forms, or the sum of two numbers: no choice either."""

    def __init__(self, form: str, capital: bool, pools: dict[str, list[Card]], slots: dict) -> None:
        self.form, self.capital, self.pools = form, capital, pools
        self.slots = dict(slots)  # slot -> pool

    def text(self, table: Table) -> str:
        cards = [table[slot] for slot in self.slots]
        value = cards[0][self.form] if len(cards) == 1 else self._sum(cards)
        return value[:1].upper() + value[1:] if self.capital else value

    def _sum(self, cards: Sequence[Card]) -> str:
        total = str(sum(int(card["n"]) for card in cards))
        return next(card[self.form] for card in self.pools["numbers"] if card["n"] == total)

    def texts(self) -> list[str]:
        hands = product(*(self.pools[pool] for pool in self.slots.values()))
        tables = [dict(zip(self.slots, hand, strict=True)) for hand in hands]
        return [self.text(t) for t in tables if len({id(c) for c in t.values()}) == len(t)]


class Draw(Copy):
    """A slot filled now: any card of its pool that is not on the table, equally likely."""

    def __init__(
        self, slot: str, pool: str, form: str, capital: bool, pools: dict, before: dict[str, str]
    ) -> None:
        super().__init__(form, capital, pools, {slot: pool})
        self.slot, self.pool = slot, pools[pool]
        self.others = [name for name, drawn in before.items() if drawn == pool]
        self.log_prob = -math.log(len(self.pool) - len(self.others))

    def options(self, table: Table) -> list[Card]:
        taken = [table[other] for other in self.others]
        return [card for card in self.pool if all(card is not other for other in taken)]

    def write(self, rng: random.Random, table: Table, out: list[str]) -> tuple[Table, float]:
        options = self.options(table)
        table = {**table, self.slot: options[int(rng.random() * len(options))]}
        out.append(self.text(table))
        return table, self.log_prob

    def read(self, text: str, start: int, table: Table) -> Found | None:
        for value, after, log_prob in self.every(table):
            if text.startswith(value, start):
                return start + len(value), after, log_prob
        return None

    def every(self, table: Table) -> Iterator[tuple[str, Table, float]]:
        for card in self.options(table):
            after = {**table, self.slot: card}
            yield self.text(after), after, self.log_prob

    def entropy(self) -> float:
        return -self.log_prob


class Chain:
    """Nodes one after the other: log-probabilities, entropies and sizes add."""

    def __init__(self, nodes: Sequence["Node"]) -> None:
        self.nodes = tuple(nodes)

    def write(self, rng: random.Random, table: Table, out: list[str]) -> tuple[Table, float]:
        total = 0.0
        for node in self.nodes:
            table, log_prob = node.write(rng, table, out)
            total += log_prob
        return table, total

    def read(self, text: str, start: int, table: Table) -> Found | None:
        total = 0.0
        for node in self.nodes:
            found = node.read(text, start, table)
            if found is None:
                return None
            start, table, log_prob = found
            total += log_prob
        return start, table, total

    def every(self, table: Table, first: int = 0) -> Iterator[tuple[str, Table, float]]:
        if first == len(self.nodes):
            yield "", table, 0.0
            return
        for head, after, log_prob in self.nodes[first].every(table):
            for tail, last, rest in self.every(after, first + 1):
                yield head + tail, last, log_prob + rest

    def entropy(self) -> float:
        return sum(node.entropy() for node in self.nodes)

    def size(self) -> float:
        return sum(node.size() for node in self.nodes)


class Choice:
    """Several ways to go on, each with a weight; only slots that all of them fill stay known."""

    def __init__(
        self, weights: Sequence[float], chains: Sequence[Chain], keep: Sequence[str]
    ) -> None:
        probs = [weight / sum(weights) for weight in weights]
        self.ways = [(math.log(p), chain) for p, chain in zip(probs, chains, strict=True)]
        self.borders = list(accumulate(probs))[:-1]
        self.keep = tuple(keep)

    def _forget(self, table: Table) -> Table:
        return table if len(table) == len(self.keep) else {slot: table[slot] for slot in self.keep}

    def write(self, rng: random.Random, table: Table, out: list[str]) -> tuple[Table, float]:
        log_p, chain = self.ways[bisect(self.borders, rng.random())]
        table, log_prob = chain.write(rng, table, out)
        return self._forget(table), log_p + log_prob

    def read(self, text: str, start: int, table: Table) -> Found | None:
        for log_p, chain in self.ways:
            found = chain.read(text, start, table)
            if found is not None:
                return found[0], found[1], log_p + found[2]  # all slots: facts are read off
        return None

    def every(self, table: Table) -> Iterator[tuple[str, Table, float]]:
        for log_p, chain in self.ways:
            for text, after, log_prob in chain.every(table):
                yield text, self._forget(after), log_p + log_prob

    def entropy(self) -> float:
        return sum(math.exp(log_p) * (chain.entropy() - log_p) for log_p, chain in self.ways)

    def size(self) -> float:
        return sum(math.exp(log_p) * chain.size() for log_p, chain in self.ways)


Node = Text | Choice


def apart(a: Sequence[Node], b: Sequence[Node]) -> bool:
    """Whether no text can begin both as `a` and as `b`: then a reader never has to guess."""
    if not (a and b):
        return False
    first, second = a[0], b[0]
    if isinstance(first, Choice):
        return all(apart([*chain.nodes, *a[1:]], b) for _, chain in first.ways)
    if isinstance(second, Choice):
        return apart(b, a)
    if type(first) is type(second) is Copy and vars(first) == vars(second):
        return apart(a[1:], b[1:])  # the same mention: whatever it says, both say it
    pairs = product(first.texts(), second.texts())
    if not any(x.startswith(y) or y.startswith(x) for x, y in pairs):
        return True
    if not type(first) is type(second) is Text:
        return False
    common = min(len(first.value), len(second.value))
    rest = [[Text(t.value[common:])] if len(t.value) > common else [] for t in (first, second)]
    return apart([*rest[0], *a[1:]], [*rest[1], *b[1:]])
