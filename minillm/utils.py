"""Small things that serve everywhere: files replaced whole or not at all, JSON, the device.

Written by hand.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["pick_device", "read_json", "replacing", "write_json"]


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside `target` that takes its place if the block succeeds."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    path = Path(name)
    try:
        yield path
        with path.open("r+b") as file:  # on the disk before it has the name
            os.fsync(file.fileno())
        os.chmod(path, 0o644)
        os.replace(path, target)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises: FileNotFoundError if there is no file; ValueError if it holds something else.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not whole JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data`, keys in order, in place of what was there."""
    with replacing(path) as temporary:
        text = json.dumps(data, ensure_ascii=False, indent=2, sort_keys=True)
        temporary.write_text(text + "\n", encoding="utf-8")


def pick_device() -> torch.device:
    """The best device of this machine, unless the environment variable MINILLM_DEVICE names one."""
    import torch

    if name := os.environ.get("MINILLM_DEVICE"):
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
