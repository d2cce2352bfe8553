"""A language of children's stories, in English and Chinese, whose probabilities are known exactly.

Every story has exactly one derivation, so `score` is its exact log-probability and `entropy` the
floor that no model can beat. The grammars are `grammars/en.txt` and `zh.txt`; explained in
notebooks/deeper/01_story_language.ipynb.
"""

# Built from notebooks/deeper/01_story_language.ipynb: edit there, then make build.

import math
import random
import re
from collections.abc import Sequence
from importlib.resources import files
from itertools import combinations
from typing import NamedTuple

from minillm.stories.grammar import Card, Chain, Choice, Copy, Draw, Node, Text, apart

__all__ = ["Grammar", "Rules", "Slots", "Story", "StoryLanguage", "read_notation"]

Rules = dict[str, list[tuple[float, str]]]  # per rule its alternatives, each with a weight

Slots = dict[str, str]  # the slots filled so far, each with its pool

_SLOT = re.compile(
    r"\{(?P<capital>\^?)(?P<slot>\w+)(?::(?P<pool>\w+)|\+(?P<plus>\w+))?(?:\.(?P<form>\w+))?\}"
    r"|<(?P<rule>\w+)>|\((?P<inline>[^()]*)\)"
)


def read_notation(source: str, joiner: str) -> tuple[dict[str, list[Card]], Rules]:
    """The pools and rules of a grammar file; a rule's continued lines are joined with `joiner`."""
    pools: dict[str, list[Card]] = {}
    rules: Rules = {}
    forms: list[str] = []
    for line in source.splitlines():
        kind, _, rest = line.partition(" ")
        if not line.strip() or line.startswith("#"):
            continue
        if kind == "pool":
            name, _, columns = rest.partition(":")
            pool, forms = pools.setdefault(name, []), re.findall(r"\w+", columns)
        elif kind == "rule":
            rule = rules.setdefault(rest.strip(), [])
        elif match := re.match(r"([\d.]*)- (.*)", line):
            rule.append((float(match[1] or 1), match[2].strip()))
        elif line.startswith(" "):
            weight, text = rule.pop()
            rule.append((weight, text + joiner + line.strip()))
        else:
            values = [value.strip() for value in line.split("|")]
            if len(values) != len(forms):
                raise ValueError(f"{line!r} has {len(values)} forms, its pool {len(forms)}")
            pool.append({"": values[0], **dict(zip(forms, values, strict=True))})
    return pools, rules


def _compile(template: str, slots: Slots, grammar: "Grammar", place: str) -> tuple[Chain, Slots]:
    """A template as nodes, given the slots filled before it, and the slots filled after it."""
    nodes: list[Node] = []
    slots, end = dict(slots), 0
    for match in _SLOT.finditer(template):
        nodes += [Text(template[end : match.start()])] if match.start() > end else []
        end = match.end()
        if match["slot"]:
            nodes.append(_mention(match, slots, grammar.pools, place))
            continue
        ways = grammar.rules[match["rule"]] if match["rule"] else None
        ways = ways or [(1.0, way) for way in match["inline"].split("|")]
        chain, slots = _alternatives(ways, slots, grammar, match["rule"] or place)
        nodes += chain.nodes
    nodes += [Text(template[end:])] if end < len(template) else []
    return Chain(nodes), slots


def _mention(match: re.Match, slots: Slots, pools: dict[str, list[Card]], place: str) -> Copy:
    """The node of a first mention {slot:pool}, which is noted in `slots`, or of a later one."""
    names = [name for name in (match["slot"], match["plus"]) if name]
    known, form, capital = set(names) <= set(slots), match["form"] or "", bool(match["capital"])
    if known == bool(match["pool"]):
        raise ValueError(f"{place}: {match[0]} is " + ("drawn twice" if known else "not drawn yet"))
    if known:
        node = Copy(form, capital, pools, {name: slots[name] for name in names})
    else:
        node = Draw(names[0], match["pool"], form, capital, pools, slots)
        slots[names[0]] = match["pool"]
    for one, other in combinations([] if known else node.texts(), 2):
        if one.startswith(other) or other.startswith(one):
            raise ValueError(f"{place}: {match[0]} may print {one!r} and {other!r}")
    node.size()  # all the forms it needs are there, or this raises KeyError
    return node


def _alternatives(
    ways: Sequence[tuple[float, str]], slots: Slots, grammar: "Grammar", place: str
) -> tuple[Chain, Slots]:
    """Alternatives as a chain: of one Choice, or of the nodes of the only alternative."""
    chains, ends = zip(*(_compile(way, slots, grammar, place) for _, way in ways), strict=True)
    if len(chains) == 1:
        return chains[0], ends[0]
    for (i, first), (j, second) in combinations(enumerate(chains), 2):
        if not apart(first.nodes, second.nodes):
            raise ValueError(f"{place}: {ways[i][1]!r} and {ways[j][1]!r} may begin alike")
    common = set.intersection(*(set(end.items()) for end in ends))
    after = {slot: pool for slot, pool in ends[0].items() if (slot, pool) in common}
    return Chain([Choice([weight for weight, _ in ways], chains, list(after))]), after


class Grammar:
    """Pools of cards and rules of templates, compiled to nodes; `root` is the rule "story".

    Raises: ValueError that names the place, if a name is missing or two derivations print alike.
    """

    def __init__(self, source: str, *, joiner: str = " ") -> None:
        self.pools, self.rules = read_notation(source, joiner)
        try:
            self.root, _ = _alternatives(self.rules["story"], {}, self, "story")
        except KeyError as error:
            raise ValueError(f"the grammar has no pool, rule or form {error}") from None


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
            path = files("minillm.stories") / "grammars" / f"{lang}.txt"
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
        """Natural log-probability of a whole story, its end included; -inf outside the language."""
        found = self.grammar.root.read(text, 0, {})
        return found[2] if found is not None and found[0] == len(text) else -math.inf

    def facts(self, text: str) -> dict[str, Card]:
        """What a story says: each slot that it fills, with the card drawn for it.

        Raises: ValueError for a text outside the language.
        """
        found = self.grammar.root.read(text, 0, {})
        if found is None or found[0] != len(text):
            raise ValueError(f"no story of this language: {text[:80]!r}")
        return dict(found[1])

    def entropy(self) -> float:
        """Expected nats of a story, in closed form: no model can do better on average."""
        return self.grammar.root.entropy()

    def bits_per_byte(self, texts: Sequence[str] | None = None) -> float:
        """The floor: bits over UTF-8 bytes, of all stories on average or of these texts.

        Infinite for a text that is no story. Raises: ValueError if there are no texts.
        """
        if texts is None:
            return self.entropy() / math.log(2) / self.grammar.root.size()
        if not (num_bytes := sum(len(text.encode()) for text in texts)):
            raise ValueError("no texts to measure")
        return -sum(map(self.score, texts)) / math.log(2) / num_bytes
