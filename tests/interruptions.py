"""Calls that write, counted, and cut off at the n-th; Windows' rules for files, on any system."""

from __future__ import annotations

import builtins
import errno
import io
import os
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch

CALLS = ("mkdir", "replace", "rename", "unlink", "rmdir", "fsync", "chmod", "open")


class Stopped(BaseException):
    """The process is no more: it writes nothing from here on."""


class Interruption:
    """Counts the calls that write; the n-th one is the last ("stops"), fails, or is interrupted.

    how: "stops": nothing is written from the n-th call on; "fails": this call alone finds the disk
        full; "interrupted": Ctrl-C comes just after this call has taken effect.
    """

    def __init__(self, n: int | None, how: str = "stops") -> None:
        self.n, self.how, self.count = n, how, 0

    def call(self, function, *args, half=None, **kwargs):
        """Count a call, and carry it out or not; `half` leaves half of what it would write."""
        self.count += 1
        if self.n is None or self.count < self.n or (self.count > self.n and self.how != "stops"):
            return function(*args, **kwargs)
        if self.how == "interrupted":
            function(*args, **kwargs)
            raise KeyboardInterrupt
        if half is not None and self.count == self.n:
            half()
        raise Stopped if self.how == "stops" else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def watch(self, function):
        """The function, counted."""
        return lambda *args, **kwargs: self.call(function, *args, **kwargs)

    def open(self, file, mode="r", *args, **kwargs):
        """`open`, counted if it writes, and its writes."""
        real = self.real_open
        if set(mode).isdisjoint("wax+"):
            return real(file, mode, *args, **kwargs)
        opened = self.call(real, file, mode, *args, **kwargs)
        write = opened.write

        def half(data):
            whole = data if isinstance(data, str) else bytes(data)
            write(whole[: len(whole) // 2])

        opened.write = lambda data: self.call(write, data, half=lambda: half(data))
        return opened

    def save_file(self, real):
        """safetensors' function, which writes where Python cannot see it."""

        def save(tensors, path, **kwargs):
            def half():
                real(tensors, path, **kwargs)
                Path(path).write_bytes(Path(path).read_bytes()[:-50])

            return self.call(real, tensors, path, half=half, **kwargs)

        return save

    @contextmanager
    def at_work(self, patch):
        """Inside, calls are counted and cut; `patch` is pytest's monkeypatch."""
        with patch.context() as p:
            for name in CALLS:
                function = (lambda *_: None) if name == "fsync" else getattr(os, name)
                p.setattr(os, name, self.watch(function))
            self.real_open = io.open
            p.setattr(builtins, "open", self.open)
            p.setattr(io, "open", self.open)
            p.setattr("safetensors.torch.save_file", self.save_file(safetensors.torch.save_file))
            yield self


def windows(patch) -> None:
    """Windows' rules: no folder is opened, only what may write is forced to disk, no mapped file
    is replaced or removed, and text is opened with an encoding. Maps are known on Linux only."""
    real = {name: getattr(os, name) for name in ("open", "fsync", "replace", "unlink")}
    real_open, handles = io.open, {}

    def open_handle(path, flags, *args, **kwargs):
        if os.path.isdir(path) and "dir_fd" not in kwargs and not flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        handle = real["open"](path, flags, *args, **kwargs)
        handles[handle] = flags
        return handle

    def fsync(file):
        handle = file if isinstance(file, int) else file.fileno()
        if not handles.get(handle, os.O_RDWR) & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real["fsync"](handle)

    def free(path) -> None:
        maps = Path("/proc/self/maps")
        if maps.exists() and os.path.exists(path):
            node = f" {os.stat(path).st_ino} "
            with real_open(maps, encoding="utf-8") as lines:
                if any(node in line for line in lines):
                    raise PermissionError(errno.EACCES, "Access is denied", str(path))

    def replace(source, target):
        free(source)
        free(target)
        real["replace"](source, target)

    def unlink(path, *args, **kwargs):
        if "dir_fd" not in kwargs:
            free(path)
        real["unlink"](path, *args, **kwargs)

    def open_file(file, mode="r", buffering=-1, encoding=None, *args, **kwargs):
        if "b" not in mode and encoding in (None, "locale"):
            raise ValueError(f"{file}: text opened without an encoding")
        opened = real_open(file, mode, buffering, encoding, *args, **kwargs)
        handles[opened.fileno()] = os.O_RDONLY if mode in ("r", "rb") else os.O_RDWR
        return opened

    for name, fake in (
        ("open", open_handle),
        ("fsync", fsync),
        ("replace", replace),
        ("unlink", unlink),
    ):
        patch.setattr(os, name, fake)
    patch.setattr(builtins, "open", open_file)
    patch.setattr(io, "open", open_file)
