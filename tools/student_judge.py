"""A plugin of pytest: writes for each test whether it passed, failed, or waits for a body.

The records go, one JSON object a line, to the file that MINILLM_REPORT names: `test`, `outcome`,
and as `message` the name that is waited for, or the first lines of what went wrong. How an error is
worded is left to whoever writes the body: `pytest.raises(..., match=...)` asks for its type alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

WAITING = re.compile(r"([\w.]+) is not written yet: notebooks/")
RAISED = re.compile(r"raise NotWritten\(\s*\"([\w.]+)\"")  # a line of a traceback


def waits_for(report: pytest.CollectReport | pytest.TestReport, error: object) -> str | None:
    """The name in a NotWritten that was raised here, or, as text, in a process that was started."""
    while isinstance(error, BaseException):
        if type(error).__name__ == "NotWritten" and (found := WAITING.match(str(error))):
            return found[1]
        error = error.__cause__ or error.__context__
    text = f"{report.longrepr}\n{report.capstderr}"
    found = WAITING.search(text) or RAISED.search(text)
    return found[1] if found else None


def first_lines(error: object) -> str:
    """The kind of an error and up to three lines of it: a pattern, say, and what did not match."""
    lines = [line.strip() for line in str(error).strip().splitlines()][:3]
    return f"{type(error).__name__}: {' | '.join(lines)}"[:240]


def record(test: str, outcome: str, message: str = "") -> None:
    line = json.dumps({"test": test, "outcome": outcome, "message": message})
    with open(os.environ["MINILLM_REPORT"], "a", encoding="utf-8") as file:
        file.write(line + "\n")


def judge(report: pytest.CollectReport | pytest.TestReport, call: pytest.CallInfo | None) -> None:
    error = call.excinfo.value if call and call.excinfo else None
    if name := waits_for(report, error):
        record(report.nodeid, "waiting", name)
    else:
        record(report.nodeid, "failed", first_lines(error or report.longrepr))


def pytest_configure() -> None:
    strict = pytest.raises

    def raises(expected: Any, *args: Any, match: Any = None, **kwargs: Any) -> Any:
        return strict(expected, *args, **kwargs)

    pytest.raises = raises


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo) -> Iterator[None]:
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
