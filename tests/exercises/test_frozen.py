"""Wrong answers of before, kept apart from the graders and their tests: still none is accepted.

`frozen/wrong_<page>.py` holds them with the words that a message must hold, `frozen/said.json` the
whole messages, in the same order: what a grader written anew should say as well.
"""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from minillm import exercises

FROZEN = Path(__file__).with_name("frozen")
PAGES = {path.stem.removeprefix("wrong_"): path for path in sorted(FROZEN.glob("wrong_*.py"))}
SAID = json.loads((FROZEN / "said.json").read_text(encoding="utf-8"))


def wrong_answers(page):
    spec = importlib.util.spec_from_file_location(f"frozen_{page}", PAGES[page])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WRONG


@pytest.mark.parametrize("page", PAGES)
def test_no_wrong_answer_of_before_is_accepted(page):
    cases = wrong_answers(page)
    counts = Counter(exercise for exercise, *_ in cases)
    assert sorted(counts) == sorted(exercises.names(page)) and min(counts.values()) >= 3
    assert counts == {exercise: len(SAID[exercise]) for exercise in counts}
    before = {exercise: iter(SAID[exercise]) for exercise in counts}
    for exercise, answer, words in cases:
        assert words in (said := next(before[exercise]))
        result = exercises.grade(exercise, answer)
        assert result.status == "wrong", f"{exercise}, said before: {said}; now {result}"
        explained = not result.message.startswith("your answer raised")
        assert explained or said.startswith("your answer raised"), f"said before: {said}; {result}"
