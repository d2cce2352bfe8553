"""Exercises that check themselves: `check("02.3", answer)` says what is asked, wrong or right.

One module a notebook: `tokenizer.py` holds 02.1, 02.2, ..., `experts.py` 11.1, ...; those of a
deeper page are called after it, so that `flash_attention.py` holds 03_flash_attention.1. A grader,
registered with `@exercise`, takes the reader's answer and returns None if it is right, else one
sentence that says why not.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MODULES",
    "Result",
    "as_given",
    "check",
    "check_choices",
    "check_numbers",
    "check_tensor",
    "exercise",
    "grade",
    "names",
    "task",
]

MODULES = {
    "00": "basics",
    "01": "ngram",
    "02": "tokenizer",
    "03": "attention",
    "04": "multihead",
    "05": "rope",
    "06": "layers",
    "07": "train",
    "08": "cache",
    "09": "sampling",
    "10": "model",
    "11": "experts",
    "12": "state",
    "13": "answers",
    "14": "lora",
    "15": "two_sequences",
    "16": "pictures",
    "17": "leaving",
    "18": "rewards",
    "19": "scale",
}

Grader = Callable[[Any], "str | None"]
_registry: dict[str, tuple[str, str, Grader]] = {}


@dataclass(frozen=True)
class Result:
    """What a grader found: "unsolved", "wrong" or "correct", and one sentence about it."""

    exercise: str
    status: Literal["unsolved", "wrong", "correct"]
    message: str

    def __str__(self) -> str:
        return f"{self.exercise} {self.status}: {self.message}"


class Unsolved(Exception):  # noqa: N818 (it is no error)
    """Raised by a grader that met a stub: the answer returned None or `...`."""


def exercise(name: str, task: str, learned: str = "") -> Callable[[Grader], Grader]:
    """Register a grader under `name` ("02.3").

    `task` is what an unsolved stub is told, `learned` what a right answer shows.
    """

    def register(grader: Grader) -> Grader:
        if name in _registry and _registry[name][2].__qualname__ != grader.__qualname__:
            raise ValueError(f"exercise {name} has two graders")
        _registry[name] = (task, learned or task, grader)
        return grader

    return register


def as_given(answer: Any, questions: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """A dictionary of predictions, or a function's that returns it; None if its keys are others.

    Raises: Unsolved if nothing is filled in: all values are still `...`.
    """
    answer = answer() if callable(answer) else answer
    if not isinstance(answer, dict) or answer.keys() != questions.keys():
        return None
    if all(value is ... for value in answer.values()):
        raise Unsolved
    return answer


def check_numbers(
    answer: Any, questions: Mapping[Any, float], hints: Mapping[Any, str]
) -> str | None:
    """What is wrong with predicted numbers, in a dictionary with the questions as keys.

    Raises: Unsolved if nothing is filled in.
    """
    if (answer := as_given(answer, questions)) is None:
        return f"the answer is a dictionary with the {len(questions)} questions as keys, as given"
    for question, wanted in questions.items():
        value = answer[question]
        if value is ...:
            return f"{question}: not filled in yet"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{question}: write a number, not {value!r}"
        if not abs(value - wanted) <= 1e-6:  # NaN is wrong, too
            return f"{question}: not {value:,}; {hints[question]}"
    return None


def check_choices(
    answer: Any,
    questions: Mapping[Any, Any],
    hints: Mapping[Any, str],
    kind: str = "an answer",
    fits: Callable[[Any], bool] = lambda value: True,
) -> str | None:
    """What is wrong with predictions of one `kind`, such as "True or False", which `fits` knows.

    A wrong one is named with its hint, and how many are right.

    Raises: Unsolved if nothing is filled in.
    """
    if (answer := as_given(answer, questions)) is None:
        return f"the answer is a dictionary with the {len(questions)} questions as keys, as given"
    for question, value in answer.items():
        if value is ...:
            return f"{question}: not filled in yet"
        if not fits(value):
            return f"{question}: write {kind}, not {value!r}"
    wrong = [question for question, wanted in questions.items() if answer[question] != wanted]
    if not wrong:
        return None
    right = f"right so far: {len(questions) - len(wrong)} of {len(questions)}"
    return f"{right}; look at {wrong[0]} again: {hints[wrong[0]]}"


def check_tensor(
    got: Tensor,
    wanted: Tensor,
    mistakes: Iterable[tuple[str, Tensor]],
    near: float,
    otherwise: str = "the numbers differ",
) -> str | None:
    """What is wrong with a tensor: the sentence of the first mistake that gives it, up to `near`;
    `otherwise`, and by how much. Mistakes of a generator are computed when they are asked for.
    """
    import torch

    def same(other: Tensor) -> bool:
        return got.shape == other.shape and torch.allclose(got, other, rtol=near, atol=near)

    if same(wanted):
        return None
    for sentence, mistake in mistakes:
        if same(mistake):
            return sentence
    if got.shape != wanted.shape:
        return f"the shape is {tuple(got.shape)}, not {tuple(wanted.shape)}"
    return f"{otherwise}: off by up to {(got - wanted).abs().max():.3f}"


def names(notebook: str) -> list[str]:
    """The exercises of one notebook, given as "02" or, of a deeper page, as "02_fast_bpe"."""
    _load(notebook)
    return sorted(name for name in _registry if name.startswith(notebook + "."))


def task(name: str) -> str:
    """What the exercise asks for, in one sentence."""
    return _find(name)[0]


def grade(name: str, answer: Any) -> Result:
    """Grade `answer`; an error raised inside it is a finding, not a crash.

    Raises: ValueError if there is no such exercise.
    """
    asked, learned, grader = _find(name)
    if answer is None or answer is ...:
        return Result(name, "unsolved", asked)
    try:
        finding = grader(_Watched(answer) if callable(answer) else answer)
    except (NotImplementedError, Unsolved):
        return Result(name, "unsolved", asked)
    except Exception as error:
        return Result(name, "wrong", f"your answer raised {type(error).__name__}: {error}")
    return Result(name, "wrong", finding) if finding else Result(name, "correct", learned)


def check(name: str, answer: Any) -> None:
    """Grade the reader's answer and print one line: unsolved, wrong (and why) or correct."""
    print(grade(name, answer))


class _Watched:
    """The reader's function; a call that returns None or `...` means that the stub still stands."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = self.function(*args, **kwargs)
        if value is None or value is ...:
            raise Unsolved
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


def _find(name: str) -> tuple[str, str, Grader]:
    _load(name.partition(".")[0])
    if name not in _registry:
        known = ", ".join(names(name.partition(".")[0]))
        raise ValueError(f"there is no exercise {name!r}; there are {known}")
    return _registry[name]


def _load(notebook: str) -> None:
    deeper = re.fullmatch(r"\d\d_(\w+)", notebook)
    module = f"{__name__}.{deeper[1] if deeper else MODULES.get(notebook)}"
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"no notebook {notebook!r}; exercises are named like '02.3'")
    importlib.import_module(module)
