"""Wrong answers of 01_story_language: exercise, answer, words that its message holds."""

import math


def pool(name, count):
    return f"pool {name}: the | it\n" + "".join(
        f"the {i:02}th {name} | {i:02}\n" for i in range(count)
    )


def grammar(names=4, things=8, story="{x:boys} has {y:toys}. Number {x.it} is glad."):
    return f"{pool('boys', names)}\n{pool('toys', things)}\nrule story\n- {story}\n"


def same_for_all(names=4, things=8):
    boys = "pool boys: the | he\n" + "".join(f"the {i:02}th boy | he\n" for i in range(names))
    story = "{x:boys} has {y:toys}. Glad is {x.he}."
    return f"{boys}\n{pool('toys', things)}\nrule story\n- {story}\n"


def occurrences(token, pairs):
    return sum(second == token for _, second in pairs) / len(pairs)


def half_different(token, pairs):
    return sum(second == token for _, second in set(pairs)) / len(pairs)


ONE_WAY = "{x:boys} (has {y:toys}. Number {x.it} is glad|saw {y:toys})."

WRONG = [
    ("01_story_language.1", lambda x: -sum(x) / len(x), "e to that power"),
    ("01_story_language.1", lambda x: math.exp(min(-sum(x), 700)), "forgot to average"),
    ("01_story_language.1", lambda x: 2 ** (-sum(x) / len(x)), "the base is e"),
    ("01_story_language.1", lambda x: math.exp(sum(x) / len(x)), "never below 1"),
    ("01_story_language.1", lambda x: math.exp(sum(x)) ** (-1 / len(x)), "stay with logarithms"),
    (
        "01_story_language.1",
        lambda x: sum(math.exp(min(-v, 700)) for v in x) / len(x),
        "average the logarithms",
    ),
    ("01_story_language.2", occurrences, "how often"),
    ("01_story_language.2", half_different, "different pairs, not of all"),
    ("01_story_language.2", lambda token, pairs: 0.3, "the share is"),
    (
        "01_story_language.2",
        lambda token, pairs: sum(second == token for _, second in set(pairs)),
        "a share of all",
    ),
    ("01_story_language.3", grammar(things=7), "not 5"),
    ("01_story_language.3", grammar(names=1, things=5), "how many have 5"),
    ("01_story_language.3", grammar(names=12, things=12), "nats are"),
    ("01_story_language.3", grammar(story="{x:boys} has {y:toys}."), "no tie"),
    ("01_story_language.3", grammar(things=4, story=ONE_WAY), "some texts have no tie"),
    ("01_story_language.3", same_for_all(), "differs from card to card"),
    ("01_story_language.3", grammar(story="{x} has {y:toys}."), "the compiler refuses it"),
    ("01_story_language.3", ["a", "b"], "not list"),
]
