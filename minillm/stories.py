"""A language of children's stories, in English and Chinese, whose probabilities are known exactly.

Every story has exactly one derivation, so `score` is its exact log-probability, and `entropy` is the floor that no
model of the language can beat. The grammars are `grammars/en.txt` and `grammars/zh.txt`; notebook 01 explains them.
"""

# Built from notebooks/01_ngrams.ipynb: edit there, then make build.

import math
import random
import re
from importlib.resources import files
from itertools import combinations
from typing import NamedTuple

from minillm.grammar import Chain, Choice, Copy, Draw, Record, Scope, Text, apart, worlds

__all__ = ["Grammar", "Story", "StoryLanguage"]

_SLOT = re.compile(
    r"\{(?P<capital>\^?)(?P<name>\w+)(?::(?P<pool>@\w+\.\w+|\w+))?(?:\+(?P<plus>\w+))?(?:\.(?P<form>\w+))?\}"
    r"|<(?P<rule>\w+)>|\((?P<inline>[^()]*)\)"
)


class Grammar:
    """Pools of cards and rules of templates, read from the notation shown in notebook 01.

    Raises: ValueError that names the place, if the notation is wrong or two derivations cannot be told apart.
    """

    def __init__(self, source: str, *, joiner: str = " ") -> None:
        self.pools: dict[str, list[Record]] = {}
        self.rules: dict[str, list[tuple[float, str]]] = {}
        self._load(source, joiner)
        self.root, _ = self._compile("<story>", {}, "story")

    def _load(self, source: str, joiner: str) -> None:
        forms: list[str] = []
        for line in source.splitlines():
            kind, _, rest = line.partition(" ")
            if not line.strip() or line.startswith("#"):
                continue
            if kind == "pool":
                name, _, columns = rest.partition(":")
                target, forms = self.pools.setdefault(name, []), columns.replace(" ", "").split("|")
            elif kind == "rule":
                target = self.rules.setdefault(rest.strip(), [])
            elif match := re.match(r"([\d.]*)- (.*)", line):
                target.append((float(match[1] or 1), match[2].strip()))
            elif line.startswith(" "):
                weight, text = target.pop()
                target.append((weight, text + joiner + line.strip()))
            else:
                values = [value.strip() for value in line.split("|")]
                if len(values) != len(forms):
                    raise ValueError(f"{line!r} has {len(values)} forms, its pool {len(forms)}")
                target.append({"": values[0], **dict(zip(forms, values, strict=True))})

    def _compile(self, template: str, scope: Scope, place: str) -> tuple[Chain, Scope]:
        """The nodes of a template whose earlier slots are `scope`, and the slots known after it."""
        nodes, scope, end = [], dict(scope), 0
        for match in _SLOT.finditer(template):
            nodes += [Text(template[end : match.start()])] if match.start() > end else []
            end, slot = match.end(), match.groupdict()
            if slot["rule"] or slot["inline"] is not None:
                chain, scope = self._choice(slot, scope, place)
                nodes += chain.nodes
                continue
            name, form = slot["name"], slot["capital"] + (slot["form"] or "")
            if slot["pool"]:
                scope[name] = Draw(name, slot["pool"], form, self.pools, scope)
                nodes.append(scope[name])
                self._check_draw(scope[name], place)
            else:
                names = [n for n in (name, slot["plus"]) if n]
                if not set(names) <= set(scope):
                    raise ValueError(f"{place}: {match[0]} is mentioned before it is drawn")
                nodes.append(Copy(names, form, self.pools, scope))
        nodes += [Text(template[end:])] if end < len(template) else []
        return Chain(nodes), scope

    def _choice(self, slot: dict[str, str], scope: Scope, place: str) -> tuple[Chain, Scope]:
        """The alternatives of a `<rule>` or of an inline `(a|b)`."""
        if slot["rule"]:
            place, ways = slot["rule"], self.rules[slot["rule"]]
        else:
            ways = [(1.0, way) for way in slot["inline"].split("|")]
        chains, scopes = zip(*(self._compile(way, scope, place) for _, way in ways), strict=True)
        if len(chains) == 1:
            return chains[0], scopes[0]
        for (i, first), (j, second) in combinations(enumerate(chains), 2):
            if not apart(first.nodes, second.nodes):
                raise ValueError(f"{place}: {ways[i][1]!r} and {ways[j][1]!r} may begin alike")
        after = {
            name: draw
            for name, draw in scopes[0].items()
            if all(name in s and s[name].pool == draw.pool for s in scopes)
        }
        return Chain([Choice([w for w, _ in ways], chains, list(after))]), after

    def _check_draw(self, draw: Draw, place: str) -> None:
        for _, bound in worlds([draw.parent] if draw.parent else [], draw.scope):
            values = [draw.text({draw.name: card}) for card in draw.options(bound)]
            for one, other in combinations(values, 2):
                if one.startswith(other) or other.startswith(one):
                    raise ValueError(f"{place}: {draw.name} may be {one!r} or {other!r}")


class Story(NamedTuple):
    """A text and its natural log-probability."""

    text: str
    log_prob: float


class StoryLanguage:
    """All stories of one language ("en" or "zh"), or of a grammar of your own.

    Raises: ValueError for an unknown language or a grammar with two derivations of a text.
    """

    def __init__(self, lang: str = "en", *, grammar: str | None = None) -> None:
        if lang not in ("en", "zh"):
            raise ValueError(f"stories are told in 'en' and 'zh', not in {lang!r}")
        if grammar is None:
            path = files("minillm") / "grammars" / f"{lang}.txt"
            grammar = path.read_text(encoding="utf-8")
        self.lang = lang
        self.grammar = Grammar(grammar, joiner=" " if lang == "en" else "")

    def sample(self, rng: random.Random) -> Story:
        """Draw one story; all choices come from `rng`."""
        out: list[str] = []
        _, log_prob = self.grammar.root.write(rng, {}, out)
        return Story("".join(out), log_prob)

    def corpus(self, n: int, seed: int) -> list[str]:
        """The texts of `n` stories, the same for the same seed."""
        rng = random.Random(seed)
        return [self.sample(rng).text for _ in range(n)]

    def score(self, text: str) -> float:
        """Exact natural log-probability of a whole story, its end included; -inf outside the language."""
        found = self.grammar.root.read(text, 0, {})
        return found[2] if found is not None and found[0] == len(text) else -math.inf

    def entropy(self) -> float:
        """Expected -log-probability of a story in nats, in closed form: no model can do better on average."""
        return self.grammar.root.entropy()

    def bits_per_byte(self) -> float:
        """The floor: expected bits of a story over its expected length in UTF-8 bytes."""
        return self.entropy() / math.log(2) / self.grammar.root.size()
