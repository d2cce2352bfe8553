"""The checker of exercises itself, and that each exercise has its stub and its solution."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from minillm import exercises
from minillm.exercises import Result, check, exercise, grade

sys.path.insert(0, str(Path(__file__).parent))

# Each test_exercises_NN.py holds, for its notebook, right answers and wrong ones; NN is "03" (of
# beyond/ "11") or, for a page one shelf deeper, "03_flash_attention".
ANSWERS = {
    path.stem.removeprefix("test_exercises_"): importlib.import_module(path.stem)
    for path in sorted(Path(__file__).parent.glob("test_exercises_*.py"))
}
RIGHT = {name: answer for module in ANSWERS.values() for name, answer in module.RIGHT.items()}
WRONG = [case for module in ANSWERS.values() for case in module.WRONG]
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.fixture
def toy(monkeypatch):
    """An exercise "01.99" that lives for one test."""
    exercises.names("01")  # its module registers once, when it is imported: not into the copy
    monkeypatch.setattr(exercises, "_registry", dict(exercises._registry))

    @exercise("01.99", "Write double(x) -> 2 * x.")
    def grader(answer):
        for x in (0, 3, -2):
            if answer(x) != 2 * x:
                return f"double({x}) should be {2 * x}"
        return None

    return "01.99"


def raises(x):
    raise KeyError("gone")


def unsolved(x):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (None, "unsolved", "Write double(x) -> 2 * x."),
        (..., "unsolved", "Write double(x) -> 2 * x."),
        (unsolved, "unsolved", "Write double(x) -> 2 * x."),
        (lambda x: None, "unsolved", "Write double(x) -> 2 * x."),
        (lambda x: ..., "unsolved", "Write double(x) -> 2 * x."),
        (lambda x: x, "wrong", "double(3) should be 6"),
        (raises, "wrong", "your answer raised KeyError: 'gone'"),
        (lambda: 1, "wrong", "your answer raised TypeError"),
        (7, "wrong", "your answer raised TypeError"),
        (lambda x: x + x, "correct", "Write double(x) -> 2 * x."),
    ],
)
def test_grade(toy, answer, status, message):
    result = grade(toy, answer)
    assert result.status == status and message in result.message


def test_check_prints_one_line(toy, capsys):
    check(toy, lambda x: x)
    assert capsys.readouterr().out == "01.99 wrong: double(3) should be 6\n"
    assert str(Result("01.99", "correct", "well")) == "01.99 correct: well"


def test_unknown_exercises_are_errors():
    with pytest.raises(ValueError, match="no notebook '77'"):
        grade("77.1", None)
    with pytest.raises(ValueError, match=r"no exercise '01\.42'"):
        grade("01.42", None)


def outputs(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    streams = [o for c in cells for o in c.get("outputs", []) if o["output_type"] == "stream"]
    return "\n".join("".join(o["text"]) for o in streams)


@pytest.mark.parametrize("notebook", ANSWERS)
def test_stub_and_solution_of_every_exercise(notebook):
    pages = [p for p in NOTEBOOKS.rglob(f"{notebook}*.ipynb") if p.parent.name != "solutions"]
    (course,) = [p for p in pages if len(notebook) > 2 or p.parent.name != "deeper"]
    names = exercises.names(notebook)
    assert (2 if course.parent.name == "deeper" else 3) <= len(names) <= 6
    asked, solved = outputs(course), outputs(NOTEBOOKS / "solutions" / course.name)
    for name in names:
        assert f"{name} unsolved: {exercises.task(name)}" in asked
        assert f"{name} correct: " in solved
    cells = ["".join(cell["source"]) for cell in json.loads(course.read_text("utf-8"))["cells"]]
    assert not [c for c in cells if "check(" in c and "NotImplementedError" in c]  # a stub is `...`


def test_every_notebook_with_graders_has_answers():
    files = Path(exercises.__file__).parent.glob("[a-z]*.py")
    graders = {path.stem for path in files} - {"duties", "plotting", "scoreboard"}
    assert graders == {exercises.MODULES.get(n, n[3:]) for n in ANSWERS}


def test_every_exercise_has_a_right_and_three_wrong_answers():
    everything = [name for notebook in ANSWERS for name in exercises.names(notebook)]
    assert sorted(everything) == sorted(RIGHT)
    for name in everything:
        assert sum(case[0] == name for case in WRONG) >= 3, name


def stub(*_, **__):
    raise NotImplementedError


@pytest.mark.parametrize("name", RIGHT)
def test_the_answers_to_an_exercise(name):
    """The right one is accepted, each wrong one explained, each stub unsolved; all that is not so
    is listed."""
    cases = [(RIGHT[name], "correct", "")]
    cases += [(answer, "wrong", words) for other, answer, words in WRONG if other == name]
    stubs = [stub, lambda *_, **__: None, lambda *_, **__: ..., None, ...]
    if isinstance(RIGHT[name], dict):
        stubs.append(dict.fromkeys(RIGHT[name], ...))  # as the page gives it
    cases += [(answer, "unsolved", "") for answer in stubs]
    failures = []
    for number, (answer, status, words) in enumerate(cases):
        result = grade(name, answer)
        if result.status != status or words not in result.message:
            failures.append(f"answer {number} should be {status}: {words}\n    but {result}")
    assert not failures, "\n".join(failures)
