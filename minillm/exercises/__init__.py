"""Exercises that check themselves: `check("02.3", answer)` says what is asked, wrong or right.

One module a notebook: `tokenizer.py` holds 02.1, 02.2, ..., `experts.py` 11.1, ...; those of a
deeper page are called after it, so that `flash_attention.py` holds 03_flash_attention.1. A grader,
registered with `@exercise`, takes the reader's answer and returns None if it is right, else one
sentence that says why not.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MODULES",
    "Result",
    "apart",
    "as_given",
    "check",
    "check_table",
    "check_values",
    "exercise",
    "grade",
    "is_number",
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

Values: TypeAlias = "Tensor | float | Sequence[Any]"
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


def is_number(value: Any) -> bool:
    """Whether a prediction is a number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def apart(table: Mapping[Any, tuple[Any, str]]) -> tuple[dict[Any, Any], dict[Any, str]]:
    """Answers and hints of a table that holds both for each question."""
    answers = {question: wanted for question, (wanted, _) in table.items()}
    return answers, {question: hint for question, (_, hint) in table.items()}


def check_table(
    answer: Any,
    questions: Mapping[Any, Any],
    hints: Mapping[Any, str],
    slip: Callable[[Any, Any], str | None] = lambda question, value: None,
    *,
    kind: str = "a number",
    fits: Callable[[Any], bool] = is_number,
    near: float = 1e-6,
    share: float = 0.0,
) -> str | None:
    """What is wrong with predictions, given in a dictionary with the questions as keys.

    First what is not of the `kind` that `fits` knows is named, then what is wrong, by the sentence
    of the `slip` that gives this value, else by its hint; what is not filled in comes last. Numbers
    are right up to `near`, or up to this `share` of what is wanted.

    Raises: Unsolved if nothing is filled in.
    """
    if (answer := as_given(answer, questions)) is None:
        return f"the answer is a dictionary with the {len(questions)} questions as keys, as given"
    filled = {question: value for question, value in answer.items() if value is not ...}
    for question, value in filled.items():
        if not fits(value):
            return f"{question}: write {kind}, not {value!r}"

    def right(value: Any, wanted: Any) -> bool:
        if is_number(value) and is_number(wanted):  # NaN is wrong, too
            return math.isclose(value, wanted, rel_tol=share, abs_tol=near)
        return bool(value == wanted)

    wrong = [q for q in questions if q in filled and not right(filled[q], questions[q])]
    if not wrong and len(filled) == len(questions):
        return None
    so_far = f"right so far: {len(filled) - len(wrong)} of {len(questions)}"
    if not wrong:
        return f"{so_far}; {next(q for q in questions if q not in filled)}: not filled in yet"
    question, value = wrong[0], filled[wrong[0]]
    said = f"{value:,}" if is_number(value) else repr(value)
    return f"{so_far}; {question}: not {said}; {slip(question, value) or hints[question]}"


def check_values(
    got: Values,
    wanted: Values,
    mistakes: Mapping[str, Values] | Iterable[tuple[str, Values]] = (),
    *,
    near: float = 1e-6,
    otherwise: str = "",
) -> str | None:
    """What is wrong with computed numbers: the sentence of the first mistake that gives them.

    Args:
        got, wanted: a number, a list of numbers or a tensor.
        mistakes: sentences, and what comes out if one makes that mistake; those of a generator are
            computed only when they are asked for.
        near: the share by which numbers may be off; near 0, that share of 1, or of the largest
            number if all are smaller.
        otherwise: what is said if no mistake is known that gives them.
    """
    import torch

    def tensor(values: Values) -> Tensor:
        return torch.as_tensor(values).detach().to(torch.float64)

    found, right = tensor(got), tensor(wanted)

    def same(other: Tensor) -> bool:
        if found.shape != other.shape:
            return False
        sizes = other[other.isfinite()].abs()
        largest = min(1.0, float(sizes.max())) if len(sizes) else 0.0
        return torch.allclose(found, other, rtol=near, atol=max(near * largest, 1e-12))

    if same(right):
        return None
    for sentence, mistake in mistakes.items() if isinstance(mistakes, Mapping) else mistakes:
        if same(tensor(mistake)):
            return sentence
    if found.shape != right.shape:
        return f"the shape is {tuple(found.shape)}, not {tuple(right.shape)}"
    off = (found - right).abs().max()
    return otherwise or f"the numbers differ: off by up to {off:.3g}"


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
