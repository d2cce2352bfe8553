"""A first answer: the house rules, drift, and the unit tests of what `git diff` touches.

    python tools/quick.py          what is not committed yet, new files included
    python tools/quick.py main     and all that this branch has changed since it left main

A file is tested by its own test, as minillm/rope.py is by tests/test_rope.py, or by its folder of
them, tests/training; one that has none, by the tests that name it, or by those of the files that
do. After 45 seconds of tests, which with the start are less than 60, no further one is begun. What
was left out is named at the end: these tests, others that name a changed file, and pages that do,
whose cells are never run here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = ["tests/test_notebooks.py::test_package_equals_notebooks", "tests/test_house.py"]
BY_ITS_NAME = "minillm/beyond/families"  # what a string calls up, no test names
ITS_TESTS = ["tests/test_model.py", "tests/deeper/pretrained/test_load.py"]
SECONDS = 45  # the start takes some 10, and a test that was begun is finished


def changed(root: Path, base: str = "HEAD") -> list[str]:
    """Files, from the root, that are new or differ from the commit `base`; of a branch, from the
    commit at which it was left.

    Raises: ValueError if git does not know `base`.
    """

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"git {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.splitlines()

    (left,) = git("merge-base", base, "HEAD")
    new = git("ls-files", "--others", "--exclude-standard")
    return sorted({*git("diff", "--name-only", "--no-renames", left), *new})


def naming(root: Path, folder: str, name: str, ending: str = ".py") -> list[str]:
    """Files in a folder that import a module, or name it: `minillm.rope`."""
    inside, _, last = name.replace(".", r"\.").rpartition(r"\.")
    named = rf"\b{inside}\.{last}\b|from {inside} import .*\b{last}\b"
    pattern = named if inside else rf"\b(import|from) {name}\b"
    found = []
    for file in sorted((root / folder).rglob(f"*{ending}")):
        text = file.read_text(encoding="utf-8")
        if last in text and re.search(pattern, text):  # the first is quick, and mostly false
            found.append(file.relative_to(root).as_posix())
    return found


def of_exercises(root: Path, module: str) -> list[str]:
    """The tests of a file of graders: `rope` is page 05's, `flash_attention` its own page's."""
    text = (root / "minillm/exercises/__init__.py").read_text(encoding="utf-8")
    number = re.search(rf'"(\d\d)": "{module}"', text)
    own = (root / "tests/exercises").glob(
        f"test_exercises_{number[1] if number else f'*_{module}'}.py"
    )
    files = [file.relative_to(root).as_posix() for file in own]
    return [*files, "tests/exercises/test_exercises.py", "tests/exercises/test_frozen.py"]


def tests_of(root: Path, file: str, seen: tuple[str, ...] = ()) -> list[str]:
    """The files of tests that a change of `file` asks for; none for what no unit test knows."""
    path = PurePosixPath(file)
    room, name = path.parts[0], path.stem
    if room == "notebooks" or path.suffix == ".md":
        pages = ["tests/test_notebooks.py", "tests/test_links.py"]
        return pages + ["tests/test_solutions.py"] * ("solutions" in path.parts)
    if path.suffix != ".py" or file in seen:
        return []
    if file.startswith("tests/exercises/frozen/"):
        return ["tests/exercises/test_frozen.py"]
    if file.startswith("minillm/exercises/"):
        return of_exercises(root, name)
    if name in ("__init__", "__main__"):
        return ["tests/test_package.py"]
    if file.startswith(BY_ITS_NAME):
        return ITS_TESTS
    own = file
    if room != "tests":
        own = "/".join(["tests", *path.parts[1:-1], f"test_{name}.py"])
    if own.rpartition("/")[2].startswith("test_") and (root / own).is_file():
        return [own]
    if room == "minillm" and (folder := root.joinpath("tests", *path.parts[1:-1], name)).is_dir():
        return sorted(test.relative_to(root).as_posix() for test in folder.glob("test_*.py"))
    dotted = dotted_name(path)
    named = [t for t in naming(root, "tests", dotted) if "/test_" in t]
    if named or room != "minillm":
        return named
    users = naming(root, "minillm", dotted)
    return sorted({test for user in users for test in tests_of(root, user, (*seen, file))})


def dotted_name(path: PurePosixPath) -> str:
    """As other files name it: `minillm.rope`; a file of tests without its folder."""
    return path.stem if path.parts[0] == "tests" else ".".join(path.with_suffix("").parts)


def also_naming(root: Path, files: Iterable[str]) -> list[str]:
    """Files of tests and pages that name one of these modules."""
    found: set[str] = set()
    for path in map(PurePosixPath, files):
        if path.suffix == ".py" and path.stem not in ("__init__", "__main__"):
            found |= {t for t in naming(root, "tests", dotted_name(path)) if "/test_" in t}
            found |= {*naming(root, "notebooks", dotted_name(path), ".ipynb")}
    return sorted(found)


class Limit:
    """Of pytest's tests, those that begin so many seconds after the first are left out."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start: float | None = None
        self.left_out: Counter[str] = Counter()  # file: how many of its tests

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.start = self.start or time.monotonic()
        if time.monotonic() - self.start > self.seconds:
            self.left_out[item.nodeid.partition("::")[0]] += 1
            pytest.skip(f"{self.seconds} seconds are over")


def main(words: list[str], root: Path = ROOT, seconds: float = SECONDS) -> int:
    limit = Limit(seconds)
    tests = dict.fromkeys(ALWAYS)
    files = changed(root, *words)
    for file in files:
        found = [test for test in tests_of(root, file) if (root / test).is_file()]
        print(f"{file}: {', '.join(found) or 'no unit test'}")
        tests |= dict.fromkeys(found)
    options = ["-q", "-m", "not real and not browser", f"--rootdir={root}"]
    options += ["-p", "no:nbval", "-o", "addopts=--import-mode=importlib"]  # no page: starts sooner
    status = pytest.main([*options, *(str(root / test) for test in tests)], plugins=[limit])
    late = [f"{file} ({count} tests)" for file, count in limit.left_out.items()]
    others = [file for file in also_naming(root, files) if file not in tests]
    for kind, names in (
        (f"not begun after {seconds:g} seconds", late),
        ("name a changed file", [name for name in others if name.endswith(".py")]),
        ("pages", [name for name in others if name.endswith(".ipynb")]),
    ):
        if names:
            print(f"left out ({kind}; `make test` runs all): {', '.join(names)}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
