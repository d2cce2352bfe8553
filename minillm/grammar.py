"""Grammars whose probabilities are known exactly: four kinds of node, in chains.

Each node can write (sample), read (score), list every text, and say its entropy and its expected size. Explained
in notebook 01, which builds the story language from them.
"""

# Built from notebooks/01_ngrams.ipynb: edit there, then make build.

import math
import random
from collections.abc import Iterator, Sequence

__all__ = [
    "Bound",
    "Chain",
    "Choice",
    "Copy",
    "Draw",
    "Found",
    "Node",
    "Record",
    "Scope",
    "Text",
    "apart",
    "worlds",
]

Record = dict[str, str]  # one card of a pool: its forms by name

Bound = dict[str, Record]  # the cards drawn so far, by slot

Found = tuple[int, Bound, float]  # where reading arrived, the cards, the log-probability


class Text:
    """Words that are always the same: no choice."""

    def __init__(self, value: str) -> None:
        self.value = value

    def text(self, bound: Bound) -> str:
        return self.value

    def write(self, rng: random.Random, bound: Bound, out: list[str]) -> tuple[Bound, float]:
        out.append(self.text(bound))
        return bound, 0.0

    def read(self, text: str, start: int, bound: Bound) -> Found | None:
        value = self.text(bound)
        return (start + len(value), bound, 0.0) if text.startswith(value, start) else None

    def every(self, bound: Bound) -> Iterator[tuple[str, Bound, float]]:
        yield self.text(bound), bound, 0.0

    def entropy(self) -> float:
        return 0.0

    def size(self) -> float:
        return len(self.value.encode())

    def values(self) -> set[str]:
        return {self.value}


class Copy(Text):
    """A slot that was filled before, in one of its forms, or the sum of two numbers: no choice either."""

    def __init__(self, names: Sequence[str], form: str, pools: dict, scope: "Scope") -> None:
        self.names, self.form, self.pools, self.scope = tuple(names), form, pools, dict(scope)
        self.capital = form.startswith("^")
        self.form = form.lstrip("^")

    def text(self, bound: Bound) -> str:
        if len(self.names) > 1:
            total = str(sum(int(bound[name]["n"]) for name in self.names))
            value = next(card[self.form] for card in self.pools["numbers"] if card["n"] == total)
        else:
            value = bound[self.names[0]][self.form]
        return value[:1].upper() + value[1:] if self.capital else value

    def size(self) -> float:
        return sum(p * len(self.text(b).encode()) for p, b in worlds(self.names, self.scope))

    def values(self) -> set[str]:
        return {self.text(bound) for _, bound in worlds(self.names, self.scope)}


class Draw(Copy):
    """A slot filled now: one card of a pool, each equally likely, and no card twice in a story."""

    def __init__(self, name: str, pool: str, form: str, pools: dict, scope: "Scope") -> None:
        super().__init__([name], form, pools, scope)
        self.name, self.pool = name, pool
        self.parent, _, self.column = pool[1:].partition(".") if pool[0] == "@" else ("", "", "")
        self.scope[name] = self

    def options(self, bound: Bound) -> list[Record]:
        """The cards that may come: those of the pool (or of the pool that the parent names) not yet on the table."""
        pool = self.pools[bound[self.parent][self.column] if self.parent else self.pool]
        held = {id(record) for record in bound.values()}
        return [record for record in pool if id(record) not in held]

    def write(self, rng: random.Random, bound: Bound, out: list[str]) -> tuple[Bound, float]:
        options = self.options(bound)
        bound = {**bound, self.name: options[int(rng.random() * len(options))]}
        out.append(self.text(bound))
        return bound, -math.log(len(options))

    def read(self, text: str, start: int, bound: Bound) -> Found | None:
        options = self.options(bound)
        for record in options:
            after = {**bound, self.name: record}
            value = self.text(after)
            if text.startswith(value, start):
                return start + len(value), after, -math.log(len(options))
        return None

    def every(self, bound: Bound) -> Iterator[tuple[str, Bound, float]]:
        options = self.options(bound)
        for record in options:
            after = {**bound, self.name: record}
            yield self.text(after), after, -math.log(len(options))

    def entropy(self) -> float:
        others = [n for n, d in self.scope.items() if d.pool == self.pool and d.name != self.name]
        needed = others + [self.parent] if self.parent else others[:0]
        taken = 0 if self.parent else len(others)
        worlds_ = worlds(needed, self.scope)
        return sum(p * math.log(len(self.options(bound)) - taken) for p, bound in worlds_)


Scope = dict[str, Draw]  # the slots filled so far, each with the node that fills it


def worlds(names: Sequence[str], scope: Scope) -> Iterator[tuple[float, Bound]]:
    """All joint values of some slots (and of their parents), each with its probability."""
    needed = {n for name in names for n in (name, scope[name].parent) if n}
    order = [n for n in scope if n in needed]

    def extend(depth: int, bound: Bound, p: float) -> Iterator[tuple[float, Bound]]:
        if depth == len(order):
            yield p, bound
            return
        options = scope[order[depth]].options(bound)
        for record in options:
            yield from extend(depth + 1, {**bound, order[depth]: record}, p / len(options))

    return extend(0, {}, 1.0)


class Chain:
    """Nodes one after the other: log-probabilities, entropies and sizes add."""

    def __init__(self, nodes: Sequence["Node"]) -> None:
        self.nodes = tuple(nodes)

    def write(self, rng: random.Random, bound: Bound, out: list[str]) -> tuple[Bound, float]:
        total = 0.0
        for node in self.nodes:
            bound, log_prob = node.write(rng, bound, out)
            total += log_prob
        return bound, total

    def read(self, text: str, start: int, bound: Bound) -> Found | None:
        total = 0.0
        for node in self.nodes:
            found = node.read(text, start, bound)
            if found is None:
                return None
            start, bound, log_prob = found
            total += log_prob
        return start, bound, total

    def every(self, bound: Bound, depth: int = 0) -> Iterator[tuple[str, Bound, float]]:
        if depth == len(self.nodes):
            yield "", bound, 0.0
            return
        for head, after, log_prob in self.nodes[depth].every(bound):
            for tail, last, rest in self.every(after, depth + 1):
                yield head + tail, last, log_prob + rest

    def entropy(self) -> float:
        return sum(node.entropy() for node in self.nodes)

    def size(self) -> float:
        return sum(node.size() for node in self.nodes)


class Choice:
    """Several ways to go on, each a chain with a weight; afterwards only slots that all of them fill are known."""

    def __init__(
        self, weights: Sequence[float], chains: Sequence[Chain], keep: Sequence[str]
    ) -> None:
        self.probs = [weight / sum(weights) for weight in weights]
        self.chains, self.keep = tuple(chains), tuple(keep)

    def _forget(self, bound: Bound) -> Bound:
        return bound if len(bound) == len(self.keep) else {name: bound[name] for name in self.keep}

    def write(self, rng: random.Random, bound: Bound, out: list[str]) -> tuple[Bound, float]:
        i, left = 0, rng.random() - self.probs[0]
        while left >= 0 and i + 1 < len(self.chains):
            i += 1
            left -= self.probs[i]
        bound, log_prob = self.chains[i].write(rng, bound, out)
        return self._forget(bound), math.log(self.probs[i]) + log_prob

    def read(self, text: str, start: int, bound: Bound) -> Found | None:
        for p, chain in zip(self.probs, self.chains, strict=True):
            found = chain.read(text, start, bound)
            if found is not None:
                return found[0], self._forget(found[1]), math.log(p) + found[2]
        return None

    def every(self, bound: Bound) -> Iterator[tuple[str, Bound, float]]:
        for p, chain in zip(self.probs, self.chains, strict=True):
            for text, after, log_prob in chain.every(bound):
                yield text, self._forget(after), math.log(p) + log_prob

    def entropy(self) -> float:
        pairs = zip(self.probs, self.chains, strict=True)
        return sum(p * (chain.entropy() - math.log(p)) for p, chain in pairs)

    def size(self) -> float:
        return sum(p * chain.size() for p, chain in zip(self.probs, self.chains, strict=True))


Node = Text | Choice


def apart(a: Sequence[Node], b: Sequence[Node]) -> bool:
    """Whether no text can begin both with `a` and with `b`: then a reader never wonders which was meant."""
    a, b = list(a), list(b)
    while a and b:
        for mine, other in ((a, b), (b, a)):
            if isinstance(mine[0], Choice):
                rest = mine[1:]
                return all(apart([*chain.nodes, *rest], other) for chain in mine[0].chains)
        first, second = a.pop(0), b.pop(0)
        if type(first) is type(second) is Copy:
            if (first.names, first.form, first.capital) == (
                second.names,
                second.form,
                second.capital,
            ):
                continue
        pairs = [(x, y) for x in first.values() for y in second.values()]
        if not any(x.startswith(y) or y.startswith(x) for x, y in pairs):
            return True
        if not (type(first) is type(second) is Text):
            return False
        common = min(len(first.value), len(second.value))
        a[:0] = [Text(first.value[common:])] if len(first.value) > common else []
        b[:0] = [Text(second.value[common:])] if len(second.value) > common else []
    return False
