"""Where programs run that came with somebody's file, chat templates and patterns: a process apart.

A template can loop for years or fill the memory, with operators, filters, methods, macros, and
before it is filled: Jinja computes constants as it compiles. No list of what is forbidden is long
enough, so the process has limits: `SECONDS` for a call, `MEMORY` on Linux (elsewhere only the time
bounds what it takes), `ANSWER` bytes of text. A process that reaches one is ended, and the next
task starts another. Written by hand; `minillm.support.fence_worker` is the other side.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

SECONDS = 10.0  # for all of one call; an ordinary one takes a thousandth of a second
MEMORY = 512 << 20  # bytes of addresses, of which Python and Jinja take 25 million
ANSWER = 1 << 20  # bytes of each text, and four times what the caller gave
LONGEST = 256_000  # characters of a template or a pattern

_WORKER = Path(__file__).with_name("fence_worker.py")


class TooMuchError(ValueError):
    """A program takes more time, memory or text than it may."""


class Time:
    """The seconds that are left for all that one call wants of a program."""

    def __init__(self) -> None:
        self.left = SECONDS


def fill(
    template: str, wanted: Sequence[tuple[Mapping[str, Any], bool]], time: Time
) -> list[str | ValueError]:
    """What a chat template writes, or why it refuses, for each of (variables, marked).

    Marked: with signs where answers begin and end.
    Raises: ValueError if the template is too long, TooMuchError if it takes more than it may;
        ImportError without jinja2.
    """
    what = "the chat template"
    _check_length(what, template)
    found = _process.ask(what, {"template": template, "wanted": wanted}, time, jinja=True)
    refuses = f"{what} refuses these messages: "
    return [text if done else ValueError(refuses + text) for text, done in found]


def matches(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that the pattern matches whole, as Python's `re` has it.

    Raises: ValueError for what is no pattern, or too long; TooMuchError if it takes more time or
        memory than it may.
    """
    names = [*names]
    _check_length("the pattern", pattern)
    what = f"the pattern {pattern[:60]!r}"
    found = _process.ask(what, {"pattern": pattern, "names": names}, Time())
    if isinstance(found, str):
        raise ValueError(f"{pattern[:60]!r} is no pattern: {found}")
    return [name for name, fits in zip(names, found, strict=True) if fits]


def stop() -> None:
    """End the process, if there is one; the next task starts another."""
    _process.stop()


def _check_length(what: str, program: str) -> None:
    if len(program) > LONGEST:
        start = f"{program[:40]!r}..., {len(program):,} characters"
        raise ValueError(f"{what} is too long: {start}; at most {LONGEST:,} are run")


class _Process:
    """A process of `fence_worker`, started by the first task; one task at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: subprocess.Popen[bytes] | None = None
        self.has_jinja = False

    def start(self) -> subprocess.Popen[bytes]:
        # -I -S: the standard library alone, and where we found these two
        specs = [find_spec(name) for name in ("jinja2", "markupsafe")]
        folders = [
            str(Path(spec.origin).absolute().parents[1]) for spec in specs if spec and spec.origin
        ]
        self.has_jinja = len(folders) == len(specs)
        settings = json.dumps([MEMORY, folders if self.has_jinja else []])
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WORKER), settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd=_WORKER.parent,  # not where we are: Windows could not remove that folder
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )

    def ask(self, what: str, task: Mapping[str, Any], time: Time, *, jinja: bool = False) -> Any:
        """The answer to a task. Raises: TooMuchError if it takes more than it may."""
        late = TooMuchError(f"{what} takes more than {SECONDS:g} seconds")
        if time.left <= 0:
            raise late
        seconds = max(time.left, 1e-3)  # alarms count in millionths, and 0 sets none
        line = json.dumps({**task, "seconds": seconds}, ensure_ascii=False)
        data = line.encode("utf-8", "surrogatepass") + b"\n"
        longest = len(task.get("wanted", [1])) * ANSWER + 4 * len(data)
        with self.lock:
            if self.running is None or self.running.poll() is not None:
                self.stop()
                self.running = self.start()
            try:
                if jinja and not self.has_jinja:
                    raise ImportError("chat templates are written in Jinja: pip install jinja2")
                start = monotonic()
                answer = _exchange(self.running, data, longest)
                took = monotonic() - start
                time.left -= took
                if answer.endswith(b"\n"):
                    return json.loads(answer)
                if len(answer) > longest:
                    raise TooMuchError(f"{what} writes more than {longest:,} bytes")
                if took >= seconds:
                    raise late
                raise TooMuchError(f"{what} takes more than {MEMORY >> 20} MB, or breaks Python")
            except BaseException:  # Ctrl-C: its answer would be taken for that of the next task
                self.stop()
                raise

    def stop(self) -> None:
        running, self.running = self.running, None
        if running is not None:
            running.kill()
            _close_pipes(running)
            running.wait()

    def leave(self) -> None:
        """Let the process be: it is that of the process that we were forked from."""
        if self.running is not None:
            _close_pipes(self.running)
            self.running.returncode = 0  # nobody's child here, so not to be waited for


def _exchange(running: subprocess.Popen[bytes], data: bytes, longest: int) -> bytes:
    """Write one line and read one; it ends early if the other side ends, or if it is too long."""
    assert running.stdin is not None and running.stdout is not None
    answer = bytearray()
    with suppress(OSError):
        left = memoryview(data)
        while left:
            left = left[os.write(running.stdin.fileno(), left) :]
        while not answer.endswith(b"\n") and len(answer) <= longest:
            chunk = os.read(running.stdout.fileno(), 1 << 16)
            if not chunk:
                break
            answer += chunk
    return bytes(answer)


def _close_pipes(running: subprocess.Popen[bytes]) -> None:
    for pipe in (running.stdin, running.stdout):
        if pipe is not None:
            pipe.close()


def _after_fork() -> None:
    """A forked child has a lock that nobody opens and pipes that are its parent's."""
    global _process
    _process.leave()
    _process = _Process()


_process = _Process()
atexit.register(stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
