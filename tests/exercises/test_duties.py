"""Which duties a story keeps: all of a true one; an altered word breaks its own."""

import pytest

from minillm.exercises.duties import duties, hero_of
from minillm.stories.language import StoryLanguage

LANGUAGE = StoryLanguage("en")
STORIES = LANGUAGE.corpus(300, seed=9)
PICKING = next(text for text in STORIES if "picked two more" in text and "So " in text)
ANOTHER = next(c[""] for c in LANGUAGE.grammar.pools["names"] if c[""] != hero_of(PICKING))


def test_true_stories_keep_all_duties():
    found = duties(STORIES, LANGUAGE)
    assert set(found) == {"whole story valid", "hero's name", "the same fruit", "the sum"}
    assert all(kept == asked > 20 for kept, asked in found.values())


@pytest.mark.parametrize(
    ("duty", "old", "new"),
    [
        ("hero's name", f"So {hero_of(PICKING)}", f"So {ANOTHER}"),
        ("the same fruit", "bring me some ", "bring me some un"),
        ("the sum", "picked two more", "picked three more"),
    ],
)
def test_an_altered_word_breaks_its_duty_and_the_story(duty, old, new):
    altered = PICKING.replace(old, new, 1)
    assert altered != PICKING
    before, after = duties([PICKING], LANGUAGE), duties([altered], LANGUAGE)
    assert before[duty][0] == before[duty][1] and before["whole story valid"] == (1, 1)
    assert {name for name in after if after[name][0] < before[name][0]} == {
        duty, "whole story valid"
    }  # fmt: skip


def test_a_text_that_names_nobody_has_no_hero():
    assert hero_of("It rained.") is None and duties([], LANGUAGE) == {}
