"""A plugin of pytest: writes for each test whether it passed, failed, or waits for a body.

The records go, one JSON object a line, to the file that MINILLM_REPORT names: `test`, `outcome`,
and as `message` the name that is waited for, or the first lines of what went wrong. How an error is
worded is left to whoever writes the body: `pytest.raises(..., match=...)` asks for its type alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WAITING = re.compile(r"([\w.]+) is not written yet: notebooks/")
RAISED = re.compile(r"raise NotWritten\(\s*[\"']([\w.]+)[\"']")  # a line of a traceback


def not_written(error: object) -> str | None:
    """The name in a NotWritten that was raised here."""
    while isinstance(error, BaseException):
        if type(error).__name__ == "NotWritten" and (found := WAITING.match(str(error))):
            return found[1]
        error = error.__cause__ or error.__context__
    return None


def waits_for(report: pytest.CollectReport | pytest.TestReport, error: object) -> str | None:
    """That name, or one that stands as text in what a process that was started has left."""
    if name := not_written(error):
        return name
    text = f"{report.longrepr}\n{report.capstderr}\n{getattr(error, 'stderr', '')}"
    found = WAITING.search(text) or RAISED.search(text)
    return found[1] if found else None


def first_lines(error: object, said_by_a_process: str) -> str:
    """The kind of an error, up to three lines of it, and which line of the tests met it."""
    lines = [line.strip() for line in str(error).strip().splitlines()][:3]
    if isinstance(error, subprocess.CalledProcessError):  # its own text is the command
        said = f"{said_by_a_process}\n{error.stderr or ''}".strip().splitlines()
        lines = [f"a process that the test began ended with {error.returncode}", *said[-1:]]
    if isinstance(error, pytest.Collector.CollectError):  # its own text is a traceback
        lines = [line[1:].strip() for line in str(error).splitlines() if line.startswith("E ")][-1:]
        return lines[0][:400] if lines else str(error)[-400:]
    said = f"{type(error).__name__}: {' | '.join(lines)}"[:240]
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, BaseException) else []
    for frame in reversed(frames):
        if Path(frame.filename).is_relative_to(Path.cwd() / "tests"):
            return f"{said} ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"[:400]
    return said


def record(test: str, outcome: str, message: str = "") -> None:
    line = json.dumps({"test": test, "outcome": outcome, "message": message})
    with open(os.environ["MINILLM_REPORT"], "a", encoding="utf-8") as file:
        file.write(line + "\n")


def judge(report: pytest.CollectReport | pytest.TestReport, call: pytest.CallInfo | None) -> None:
    error = call.excinfo.value if call and call.excinfo else None
    if name := waits_for(report, error):
        record(report.nodeid, "waiting", name)
    else:
        record(report.nodeid, "failed", first_lines(error or report.longrepr, report.capstderr))


def pytest_configure() -> None:
    strict = pytest.raises

    def raises(expected: Any, *args: Any, match: Any = None, **kwargs: Any) -> Any:
        return strict(expected, *args, **kwargs)

    pytest.raises = raises


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    if call.excinfo and not_written(call.excinfo.value):
        item.repr_failure = lambda error: str(error.value)  # a traceback takes longer
    report = (yield).get_result()
    if report.failed:
        judge(report, call)
    elif report.passed and report.when == "call":
        record(report.nodeid, "passed")


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report = (yield).get_result()
    if report.failed:  # a file that calls the package as it is read
        judge(report, getattr(report, "call", None))
