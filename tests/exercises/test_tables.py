"""The two helpers of the graders: predictions, and computed numbers with their known mistakes."""

import math

import pytest
import torch

from minillm.exercises import Unsolved, apart, check_table, check_values

RIGHT, HINTS = apart({"one": (1.0, "count"), "inf": (math.inf, "divide"), "half": (0.5, "halve")})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"one": 1 + 1e-7}, None),
        ({"one": 1 + 1e-5}, "right so far: 2 of 3; one: not 1.00001; count"),
        ({"one": -1}, "right so far: 2 of 3; one: not -1; the sign"),
        ({"half": float("nan"), "inf": 9}, "right so far: 1 of 3; inf: not 9; divide"),
        ({"half": True, "one": 7}, "half: write a number, not True"),
        ({"half": "1/2"}, "half: write a number, not '1/2'"),
        ({"one": ..., "half": 2}, "right so far: 1 of 3; half: not 2; halve"),
        ({"inf": ...}, "right so far: 2 of 3; inf: not filled in yet"),
        ({"two": 2}, "the answer is a dictionary with the 3 questions as keys, as given"),
    ],
)
def test_predictions(change, said):
    def slip(question, value):
        return "the sign" if value == -RIGHT[question] else None

    assert check_table({**RIGHT, **change}, RIGHT, HINTS, slip) == said


def test_predictions_of_another_kind_and_up_to_a_share():
    asked, hints = {"a": "same", "b": 1000}, {"a": "hint", "b": "hint"}
    anything = {"fits": lambda value: True}
    assert check_table({"a": "same", "b": 1009}, asked, hints, share=0.01, **anything) is None
    assert "b: not 1,011" in check_table(
        {"a": "same", "b": 1011}, asked, hints, share=0.01, **anything
    )
    assert "a: not 'other'" in check_table({"a": "other", "b": 1000}, asked, hints, **anything)
    assert check_table(lambda: {"a": "same", "b": 1000}, asked, hints, **anything) is None
    with pytest.raises(Unsolved):
        check_table({"a": ..., "b": ...}, asked, hints)


def test_computed_numbers():
    wanted = torch.tensor([1.0, -200.0])
    mistakes = {"the sign": -wanted, "the half": wanted / 2, "of another shape": torch.ones(3)}
    assert check_values(wanted.double() * (1 + 1e-7), wanted, mistakes) is None
    assert check_values([-1.0, 200.0], wanted, mistakes) == "the sign"
    assert check_values(wanted / 2, [1.0, -200.0], mistakes) == "the half"
    assert check_values(torch.ones(3), wanted) == "the shape is (3,), not (2,)"
    assert check_values(torch.ones(3), wanted, mistakes) == "of another shape"
    assert check_values(wanted + 1, wanted, mistakes) == "the numbers differ: off by up to 1"
    assert check_values(wanted + 1, wanted, mistakes, otherwise="look again") == "look again"
    assert check_values(math.nan, 1.0) and check_values([1.0, math.nan], [1.0, math.nan])
    assert check_values(math.inf, math.inf) is None and check_values(0.0, 0.0) is None


def test_how_near():
    assert check_values([1e9 + 500, 1.1], [1e9, 1.1]) is None
    assert check_values([1e9, 1.1 + 1e-5], [1e9, 1.1])  # a large neighbour forgives nothing
    assert check_values(1.0005e-7, 1e-7)  # nor does being small
    assert check_values(1.0005, 1.0, near=1e-3) is None
    assert check_values([1.0, 5e-4], [1.0, 0.0], near=1e-3) is None
    assert check_values([1.0, 3e-3], [1.0, 0.0], near=1e-3)
    assert check_values(2.0, 1.0, {"nothing": math.nan, "far": math.inf, "twice": 2.0}) == "twice"


def test_mistakes_of_a_generator_are_computed_only_when_asked_for():
    def mistakes():
        yield "the first", 3.0
        raise AssertionError("asked for one too many")

    assert check_values(2.0, 2.0, mistakes()) is None
    assert check_values(3.0, 2.0, mistakes()) == "the first"
