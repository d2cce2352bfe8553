"""The story language: the reader finds what the sampler said; one derivation; closed forms."""

import hashlib
import math
import random
import re
import subprocess
import sys
import time
from collections import Counter
from importlib.resources import files

import pytest

from minillm.ngram import NGramModel, bits_per_byte
from minillm.stories.curriculum import DECKS, DeckDocuments, fewer_cards
from minillm.stories.grammar import Choice, Copy, Draw
from minillm.stories.language import StoryLanguage, read_notation

LANGUAGES = {lang: StoryLanguage(lang) for lang in ("en", "zh")}
each = pytest.mark.parametrize("lang", ["en", "zh"])


@pytest.fixture(scope="module")
def samples():
    rng = random.Random(20)
    return {
        lang: [language.sample(rng) for _ in range(10_000)] for lang, language in LANGUAGES.items()
    }


def reduced(lang, plot, cards):
    """The real grammar with one plot, two ways to end, one way to say all else, and few cards."""
    source = (files("minillm.stories") / "grammars" / f"{lang}.txt").read_text(encoding="utf-8")
    pools, rules = read_notation(source, " " if lang == "en" else "")
    lines = []
    for name, pool in pools.items():
        forms = [form for form in pool[0] if form]
        size = len(pool) if name == "numbers" else cards.get(name, 1)
        lines += [f"pool {name}: {' | '.join(forms)}"]
        lines += [" | ".join(card[form] for form in forms) for card in pool[:size]]
    for name, ways in rules.items():
        ways = [way for way in ways if plot in way[1]] if name == "plot" else ways
        ways = ways[: 2 if name == "ending" else 1]
        lines += [f"rule {name}", *(f"{weight:g}- {text}" for weight, text in ways)]
    return StoryLanguage(lang, grammar="\n".join(lines))


REDUCED = {
    "en door": reduced(
        "en", "door", {"names": 3, "animals": 2, "colors": 2, "small": 2, "spots": 2}
    ),
    "en basket": reduced(
        "en", "basket", {"names": 2, "animals": 2, "small": 3, "few": 3, "spots": 3}
    ),
    "en tea": reduced("en", "tea", {"names": 2, "animals": 3, "small": 2, "spots": 4}),
    "zh lost": reduced("zh", "lost", {"names": 2, "animals": 2, "spots": 4}),
    "zh basket": reduced(
        "zh", "basket", {"names": 2, "animals": 2, "small": 4, "few": 2, "spots": 2}
    ),
}


@each
def test_ten_thousand_stories_score_what_the_sampler_said(lang, samples):
    assert all(LANGUAGES[lang].score(story.text) == story.log_prob for story in samples[lang])


@each
def test_sampled_means_agree_with_the_closed_forms(lang, samples):
    language = LANGUAGES[lang]
    nats = [-story.log_prob for story in samples[lang]]
    sizes = [len(story.text.encode()) for story in samples[lang]]
    for values, exact in ((nats, language.entropy()), (sizes, language.grammar.root.size())):
        mean = sum(values) / len(values)
        error = math.sqrt(sum((v - mean) ** 2 for v in values)) / len(values)
        assert abs(mean - exact) < 4 * error
    floor = language.entropy() / math.log(2) / language.grammar.root.size()
    assert math.isclose(language.bits_per_byte(), floor, rel_tol=1e-12)
    texts = language.corpus(2000, seed=3)
    nats, size = -sum(map(language.score, texts)), sum(len(t.encode()) for t in texts)
    assert math.isclose(language.bits_per_byte(texts), nats / math.log(2) / size, rel_tol=1e-12)
    assert math.isclose(language.bits_per_byte(texts), floor, rel_tol=0.01)
    assert language.bits_per_byte(["It rained."]) == math.inf
    with pytest.raises(ValueError, match="no texts"):
        language.bits_per_byte([])


@each
def test_size_and_number_of_stories(lang, samples):
    texts = [story.text for story in samples[lang]]
    lengths = [len(text.split()) if lang == "en" else len(text) for text in texts]
    low, high = (50, 150) if lang == "en" else (100, 300)
    assert low <= min(lengths) and max(lengths) <= high
    assert len(set(texts)) == len(texts)
    assert LANGUAGES[lang].entropy() / math.log(2) > math.log2(1e12)  # H bits need 2^H texts


@each
def test_corpus_is_the_same_for_the_same_seed(lang):
    language = LANGUAGES[lang]
    assert language.corpus(3, seed=5) == language.corpus(3, seed=5) != language.corpus(3, seed=6)
    rng = random.Random(5)
    assert language.corpus(3, seed=5) == [language.sample(rng).text for _ in range(3)]


@pytest.mark.parametrize("lang, wanted", [("en", "8c8afe508b696e09"), ("zh", "af93c8eb84799afa")])
def test_the_language_has_not_changed(lang, wanted):
    """The checkpoint in assets has learned these stories: a new grammar needs a new one."""
    text = "\n".join(LANGUAGES[lang].corpus(200, seed=0))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == wanted


@pytest.mark.parametrize("name", REDUCED)
def test_reduced_grammars_by_enumeration(name):
    language = REDUCED[name]
    every = [(text, log_prob) for text, _, log_prob in language.grammar.root.every({})]
    table = dict(every)
    assert len(every) == len(table) > 100, "two derivations print the same text"
    assert math.isclose(sum(map(math.exp, table.values())), 1, rel_tol=1e-12)
    assert all(math.isclose(language.score(text), log_prob) for text, log_prob in every)
    entropy = -sum(math.exp(log_prob) * log_prob for log_prob in table.values())
    assert math.isclose(language.entropy(), entropy, rel_tol=1e-9)
    size = sum(math.exp(log_prob) * len(text.encode()) for text, log_prob in every)
    assert math.isclose(language.grammar.root.size(), size, rel_tol=1e-9)


@pytest.mark.parametrize("name", REDUCED)
def test_continuations_of_random_prefixes_sum_to_one(name):
    """P(prefix) comes from choices one by one, its continuations from scores of whole stories."""
    language, rng = REDUCED[name], random.Random(3)
    texts = [text for text, _, _ in language.grammar.root.every({})]
    for _ in range(30):
        text = rng.choice(texts)
        prefix = text[: rng.randrange(len(text))]
        going_on = [t for t in texts if t.startswith(prefix)]
        begun, following = prefix_log_prob(language, prefix), Counter()
        for t in going_on:
            following[t[len(prefix)]] += math.exp(language.score(t) - begun)
        assert math.isclose(following.total(), 1, rel_tol=1e-9)
        assert all(p > 0 for p in following.values())


def prefix_log_prob(language, prefix):
    """Log-probability that a story begins with `prefix`, summed over all partial derivations."""
    total = 0.0
    stack = [([*language.grammar.root.nodes], "", {}, 0.0)]
    while stack:
        nodes, text, table, log_prob = stack.pop()
        if len(text) >= len(prefix):
            total += math.exp(log_prob) if text.startswith(prefix) else 0.0
        elif prefix.startswith(text) and nodes:
            stack += expand(nodes, text, table, log_prob)
    return math.log(total)


def expand(nodes, text, table, log_prob):
    first, *rest = nodes
    if isinstance(first, Choice):
        # what only one alternative filled is never mentioned later: nothing need be forgotten
        return [([*chain.nodes, *rest], text, table, log_prob + p) for p, chain in first.ways]
    if isinstance(first, Draw):
        cards = [card for card in first.pool if not any(card is other for other in table.values())]
        tables = [{**table, first.slot: card} for card in cards]
        step = -math.log(len(cards))
    else:
        tables, step = [table], 0.0
    return [(rest, text + first.text(t), t, log_prob + step) for t in tables]


@each
def test_every_text_has_exactly_one_derivation(lang, samples):
    """Not even a reader that tries everything finds a second one."""
    root = LANGUAGES[lang].grammar.root
    for story in samples[lang][:60]:
        found, stack = [], [([*root.nodes], "", {}, 0.0)]
        while stack:
            nodes, text, table, log_prob = stack.pop()
            if not nodes and text == story.text:
                found.append(log_prob)
            elif nodes and story.text.startswith(text):
                stack += expand(nodes, text, table, log_prob)
        assert len(found) == 1 and math.isclose(found[0], story.log_prob)


@each
def test_mutated_texts_are_outside_the_language(lang, samples):
    language, rng = LANGUAGES[lang], random.Random(8)
    for story in samples[lang][:300]:
        text, i = story.text, rng.randrange(len(story.text))
        assert language.score(text[:i] + text[i + 1 :]) == -math.inf
        assert language.score(text[:i]) == language.score(text + text[i]) == -math.inf
        assert language.score(text[:i] + "?" + text[i:]) == -math.inf
        assert language.score(" " + text) == language.score(text + " ") == -math.inf


@each
def test_broken_ties_are_outside_the_language(lang, samples):
    """One mention changed, sentences intact: only who remembers the beginning can tell."""
    language, changed = LANGUAGES[lang], 0
    names = [card[""] for card in language.grammar.pools["names"]]
    places = [card[""] for card in language.grammar.pools["colors" if lang == "zh" else "animals"]]
    for story in samples[lang][:300]:
        for words in (names, places):
            present = [word for word in words if story.text.count(word) > 1]
            absent = [word for word in words if word not in story.text]
            if present:
                i = story.text.rindex(present[0])
                text = story.text[:i] + absent[0] + story.text[i + len(present[0]) :]
                assert language.score(text) == -math.inf, (story.text, text)
                changed += 1
    assert changed >= 300
    assert language.score("") == language.score("Once upon a time") == -math.inf


def test_sums_pronouns_and_promises_are_read():
    language = REDUCED["en basket"]
    text = language.sample(random.Random(0)).text
    assert language.score(text) > -math.inf
    total = re.search(r"counted: (\w+) ", text)[1]
    wrong = "nine" if total != "nine" else "four"
    assert language.score(text.replace(f"counted: {total}", f"counted: {wrong}")) == -math.inf
    assert language.score(text.replace(" her ", " his ").replace(" she ", " he ")) == -math.inf
    deed = re.search(r"I will (\w+)", text)[1]
    assert language.score(text.replace(f"I will {deed}", "I will forget")) == -math.inf


def test_english_articles_and_sentences(samples):
    for story in samples["en"]:
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiouh]|  | [,.!?]", story.text), story.text
        assert re.fullmatch(r"[A-Z].*[.!?]\"?", story.text)
        assert story.text.count('"') % 2 == 0
        assert all(s[0].isupper() for s in re.findall(r"[.!?] \"?(\w)", story.text))


def test_chinese_is_chinese(samples):
    for story in samples["zh"]:
        assert re.fullmatch(r"[\u4e00-\u9fff，。！？：“”、]+", story.text), story.text
        assert story.text.count("“") == story.text.count("”")
        assert not re.search(r"[，。、：][，。、：]|他她|她他", story.text)


@each
def test_best_six_gram_stays_far_above_the_floor(lang):
    """At three sizes; one that learned its test text by heart is below every 6-gram there is."""
    language = LANGUAGES[lang]
    held_out = language.corpus(100, seed=2)
    floor = bits_per_byte(
        -sum(map(language.score, held_out)), sum(len(t.encode()) for t in held_out)
    )
    for size in (60, 240, 960):
        corpus = language.corpus(size, seed=1)
        model = NGramModel(6, smoothing="kneser_ney").fit(corpus)
        nats = -sum(map(model.log_prob, held_out))
        assert bits_per_byte(nats, sum(len(t.encode()) for t in held_out)) > 2 * floor
    by_heart = NGramModel(6).fit(corpus)
    below = -sum(map(by_heart.log_prob, corpus))
    assert (
        bits_per_byte(below, sum(len(t.encode()) for t in corpus)) > 1.25 * language.bits_per_byte()
    )


@pytest.mark.parametrize(
    "source, message",
    [
        ("rule story\n- Mia ran.\n- Mia ran. She fell.", "may begin alike"),
        ("rule story\n- (a|ab)c", "may begin alike"),
        ("pool p: a\nx\ny\nrule story\n- {q:p}({q}a|{q}ab)", "may begin alike"),
        ("pool p: a\nrose\nrosehip\nrule story\n- A {x:p}.", "may print 'rose' and 'rosehip'"),
        ("pool p: a | n\nx | 1\ny | 1\nrule story\n- {x:p.n}.", "may print '1' and '1'"),
        ("pool p: a\nx\nrule story\n- {x}{x:p}", "{x} is not drawn yet"),
        ("pool p: a\nx\ny\nrule story\n- {x:p}{x:p}", "{x:p} is drawn twice"),
        ("pool p: a\nx\ny\nrule story\n- ({x:p}|z) {x}", "{x} is not drawn yet"),
        ("pool p: a\nx | y\nrule story\n- {x:p}", "has 2 forms, its pool 1"),
        ("pool p: a\nx\nrule story\n- {x:p} {x.they}", "'they'"),
        ("pool p: a\nx\nrule story\n- {x:q}", "'q'"),
        ("rule story\n- <missing>", "'missing'"),
        ("pool p: a\nx", "'story'"),
    ],
)
def test_bad_grammars_are_refused(source, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        StoryLanguage(grammar=source)


def test_unknown_language():
    with pytest.raises(ValueError, match="'fr'"):
        StoryLanguage("fr")


def test_draws_without_replacement_and_local_slots():
    """Alternatives may fill other slots; what only one of them fills is forgotten after it."""
    source = "pool p: a\nx\ny\nz\nrule story\n- {a:p}(1{b:p}|2){c:p}"
    language = StoryLanguage(grammar=source)
    table = {text: math.exp(p) for text, _, p in language.grammar.root.every({})}
    assert len(table) == 18 and "x1yy" in table and "x1xy" not in table and "x1yx" not in table
    assert math.isclose(sum(table.values()), 1)
    assert math.isclose(language.entropy(), -sum(p * math.log(p) for p in table.values()))
    assert all(math.isclose(math.exp(language.score(text)), p) for text, p in table.items())
    counts = Counter(language.corpus(9000, seed=1))
    assert all(abs(counts[t] / 9000 - p) < 5 * math.sqrt(p / 9000) for t, p in table.items())


def test_sums_of_cards_from_one_pool():
    """Two cards are never the same one: one and one is not among the sums, nor in the mean size."""
    few = "pool few: a | n\none | 1\ntwo | 2\nthree | 3\n"
    numbers = "pool numbers: a | n\ntwo | 2\nthree | 3\nfour | 4\nfive | 5\nsix | 6\n"
    language = StoryLanguage(grammar=few + numbers + "rule story\n- {a:few}, {b:few}: {a+b}")
    every = [(text, math.exp(p)) for text, _, p in language.grammar.root.every({})]
    assert len(every) == 6 and "one, three: four" in dict(every)
    size = sum(p * len(text) for text, p in every)
    assert math.isclose(language.grammar.root.size(), size, rel_tol=1e-12)


def test_the_same_mention_may_open_two_alternatives():
    language = StoryLanguage(grammar="pool p: a\nx\ny\nrule story\n- {q:p}({q}a|{q}b)")
    assert {text for text, _, _ in language.grammar.root.every({})} == {"xxa", "xxb", "yya", "yyb"}
    assert all(math.isclose(language.score(t), math.log(1 / 4)) for t in ("xxa", "yyb"))


def test_weights():
    language = StoryLanguage(grammar="rule story\n3- a\n- b")
    assert math.isclose(math.exp(language.score("a")), 0.75)
    counts = Counter(language.corpus(4000, seed=1))
    assert abs(counts["a"] / 4000 - 0.75) < 0.04
    assert isinstance(language.grammar.root.nodes[0], Choice) and issubclass(Draw, Copy)


def test_no_torch_is_imported():
    code = "import sys, minillm.stories.language, minillm.ngram; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def random_grammar(rng):
    """A small grammar of two letters, full of traps; most are refused."""

    def template(slots, depth):
        text = ""
        for _ in range(rng.randint(1, 3)):
            kind = rng.randrange(5)
            if kind == 0 and depth < 2:
                text += "(" + "|".join(template([], 2) for _ in range(2)) + ")"
            elif kind == 1 and depth == 0 and len(slots) < 3:
                slots.append(f"s{len(slots)}")
                text += f"{{{slots[-1]}:p}}"
            elif kind == 2 and slots:
                text += f"{{{rng.choice(slots)}.{rng.choice('ij')}}}"
            else:
                text += rng.choice("ab")
        return text

    cards = "\n".join(
        " | ".join(rng.choice("abc") * rng.randint(1, 2) for _ in "ij") for _ in "123"
    )
    ways = "\n".join(f"{rng.randint(1, 3)}- {template([], 0)}" for _ in range(2))
    return f"pool p: i | j\n{cards}\nrule story\n{ways}"


def test_every_accepted_grammar_is_exact():
    """The proof at compile time is sound: no accepted grammar has two derivations of a text."""
    rng, accepted = random.Random(9), 0
    for _ in range(4000):
        source = random_grammar(rng)
        try:
            language = StoryLanguage(grammar=source)
        except ValueError:
            continue
        accepted += 1
        every = [(text, p) for text, _, p in language.grammar.root.every({})]
        table = dict(every)
        assert len(table) == len(every), source
        assert math.isclose(sum(map(math.exp, table.values())), 1), source
        assert all(math.isclose(language.score(text), p, abs_tol=1e-12) for text, p in every), (
            source
        )
        entropy = -sum(math.exp(p) * p for p in table.values())
        assert math.isclose(language.entropy(), entropy, abs_tol=1e-12), source
        assert not any(a != b and a.startswith(b) for a in table for b in table), source  # it ends
    assert accepted > 300


def test_speed():
    """Some 6,000 stories a second are written and 2,500 read: far fewer would be a mistake."""
    language, writing, reading = LANGUAGES["en"], [], []
    for seed in range(3):
        started = time.process_time()
        texts = language.corpus(500, seed=seed)
        writing.append(time.process_time() - started)
        started = time.process_time()
        assert all(math.isfinite(language.score(text)) for text in texts)
        reading.append(time.process_time() - started)
    assert 500 / min(writing) > 10 and 500 / min(reading) > 5


@each
def test_small_decks_keep_the_rules_and_some_of_the_cards(lang):
    source = (files("minillm.stories") / "grammars" / f"{lang}.txt").read_text(encoding="utf-8")
    few = StoryLanguage(lang, grammar=fewer_cards(source, 4, random.Random(1))).grammar
    whole = LANGUAGES[lang].grammar
    assert few.rules == whole.rules and list(few.pools) == list(whole.pools)
    for name, pool in few.pools.items():
        assert len(pool) == (4 if name in DECKS else len(whole.pools[name]))
        assert all(card in whole.pools[name] for card in pool)
    all_cards = StoryLanguage(lang, grammar=fewer_cards(source, 99, random.Random(1)))
    assert all_cards.entropy() == pytest.approx(LANGUAGES[lang].entropy(), rel=1e-12)


@each
def test_the_cards_of_a_deck_change_after_its_stories(lang):
    stream = DeckDocuments(lang, list, cards=3, stories=5, seed=2)
    decks = []
    for deck in (0, 1, 2, 1, 0):
        texts = [stream.text(i) for i in range(5 * deck, 5 * deck + 5)]
        assert all(stream.language.score(text) > -math.inf for text in texts)
        assert all(LANGUAGES[lang].score(text) > -math.inf for text in texts)
        decks.append([[card[""] for card in stream.language.grammar.pools[name]] for name in DECKS])
    assert decks[0] == decks[4] and decks[1] == decks[3]  # whatever was read before
    assert decks[0] != decks[1] != decks[2] != decks[0]
    other = DeckDocuments(lang, list, cards=3, stories=5, seed=3)
    assert other.text(0) != stream.text(0)
    with pytest.raises(ValueError, match="decks of 2 cards for 5 stories"):
        DeckDocuments(lang, list, cards=2, stories=5)
    state = stream.state_dict()
    with pytest.raises(ValueError, match="cards: saved 3, now 4"):
        DeckDocuments(lang, list, cards=4, stories=5, seed=2).load_state_dict(state)


def test_facts_are_the_cards_that_were_drawn():
    """Read back from its facts alone, a story of one way to tell is the same story."""
    grammar = """
pool names: is | they
Ann | she
Ben | he

pool deeds: do | did
sing | sang
run | ran

rule story
- {hero:names} said: I {deed:deeds}. <end>

rule end
- So {hero.they} {deed.did}.
- But {other:names} {act:deeds.did}.
"""
    language = StoryLanguage(grammar=grammar)
    rng = random.Random(0)
    for _ in range(40):
        text = language.sample(rng).text
        facts = language.facts(text)
        kept = "act" not in facts
        assert set(facts) == {"hero", "deed"} | (set() if kept else {"other", "act"})
        told = f"{facts['hero']['']} said: I {facts['deed']['']}. "
        told += (
            f"So {facts['hero']['they']} {facts['deed']['did']}."
            if kept
            else f"But {facts['other']['']} {facts['act']['did']}."
        )
        assert told == text


@each
def test_facts_of_a_story(lang, samples):
    language = LANGUAGES[lang]
    for story in samples[lang][:200]:
        facts = language.facts(story.text)
        assert facts["hero"][""] in story.text and len(facts) >= 8
        assert facts == language.facts(story.text)
    for text in ("", "Once upon a time.", story.text + " ", story.text[:-1]):
        with pytest.raises(ValueError, match="no story of this language: "):
            language.facts(text)
