"""The folder of a run: its metrics, and the rule that one run and one process own it.

Explained in deeper/07_runs_that_survive.
"""

# Built from notebooks/deeper/07_runs_that_survive.ipynb: edit there, then make build.

import json
import os
import socket
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from minillm.deeper.training.checkpoint import checkpoints
from minillm.support.files import replacing

__all__ = ["FolderLock", "append_record", "check_free", "forget_after"]


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record at the end of a file, as one line; warn if that is not possible."""
    size = None
    try:
        with open(path, "ab") as file:
            size = file.tell()
            file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        if size is not None:
            with suppress(OSError):
                os.truncate(path, size)  # half a line would spoil the next one
        where = f"{path}, step {record.get('step')}"
        warnings.warn(f"metrics not written: {where}: {error}", stacklevel=3)


def forget_after(path: Path, step: int) -> None:
    """Drop records of steps that a resumed run takes again, and a line that a kill cut short."""
    kept, old = [], path.read_bytes() if path.exists() else b""
    for line in old.split(b"\n"):  # bytes: the cut may go through a character
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line + b"\n")
    with replacing(path, durable=False) as temporary:
        temporary.write_bytes(b"".join(kept))


def check_free(folder: str | Path, advice: str = "resume it, or give another folder") -> None:
    """Raise a ValueError if `folder` holds a run already: checkpoints, or records of its steps."""
    found = [path.name for path in checkpoints(folder)[-1:]]
    metrics = Path(folder) / "metrics.jsonl"
    if metrics.is_file() and metrics.stat().st_size:
        found.append(metrics.name)
    if found:
        raise ValueError(f"{folder} holds a run: {advice} (found {' and '.join(found)})")


class FolderLock:
    """One process at a time may write into the folder of a run; a kill frees it too.

    Within a process it may be taken as often as one likes.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder, self.held, self.note = Path(folder), False, ""
        self.note_path = self.folder / ".lock-owner"
        self.lock = FileLock(self.folder / ".lock", is_singleton=True, thread_local=False)
        self.process = f"process {os.getpid()} on {socket.gethostname()}"

    def acquire(self) -> None:
        """Take the folder. Raises: ValueError, with its owner, if another process has it, or had it
        since we let it go: then it may hold another state of the run."""
        if self.held:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(timeout=0)
        except Timeout:
            time.sleep(0.1)  # who has just got it is writing its name
            raise ValueError(
                f"{self.folder} is in use by {self.owner()}: wait for its end"
            ) from None
        except (OSError, NotImplementedError) as error:
            warnings.warn(f"{self.folder} cannot be locked: {error}", stacklevel=2)
            return
        self.held = True
        if self.note and not self.owner().startswith(self.process):
            self.release()
            raise ValueError(f"{self.folder} was taken by {self.owner()} meanwhile: resume()")
        self.note = f"{self.process} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        with suppress(OSError), replacing(self.note_path, durable=False) as temporary:
            temporary.write_text(self.note, encoding="utf-8")  # a full disk is told elsewhere

    def owner(self) -> str:
        """Who has the folder, or had it last."""
        try:
            return self.note_path.read_text(encoding="utf-8") or "another process"
        except (OSError, ValueError):
            return "another process"

    def release(self) -> None:
        """Let others have it."""
        if self.held and self.process.startswith(f"process {os.getpid()} "):  # not a fork's copy
            self.held = False
            self.lock.release()

    def __del__(self) -> None:
        self.release()
