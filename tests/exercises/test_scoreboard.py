"""The scoreboard prints what earlier chapters measured, and refuses what does not agree with it."""

import pytest

from minillm.exercises.scoreboard import scoreboard


def test_a_line_is_printed_where_the_page_measures_it(capsys):
    scoreboard("02", {"6-gram of tokens": 2.51})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 5 and printed[-1].split()[-2:] == ["1,600", "2.5"]


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"6-gram of tokens": 2.7}, "2.7000 floors; the scoreboard has 2.5"),
        ({"6-gram of tokens": float("nan")}, "nan floors"),
        ({}, "has the lines"),
        ({"6-gram": 2.5}, "has the lines"),
    ],
)
def test_what_does_not_agree_is_refused(measured, words):
    with pytest.raises(ValueError, match=words):
        scoreboard("02", measured)
