"""Windows' rules for files, as far as they differ, in a process on Linux.

    python tests/windows_rules.py -c CODE ...
    python tests/windows_rules.py -m MODULE ...
    python tests/windows_rules.py SCRIPT ...

What runs so meets what it would meet there:

- modules and calls that only POSIX systems have are missing, for our own code (`POSIX_ONLY`)
- a folder cannot be opened
- fsync wants a handle that may write
- a file that is open or mapped into memory cannot be removed, renamed or replaced; one that is
  mapped cannot be opened for writing from its beginning either
- rename does not replace
- a text file that our code opens without an encoding is an error (its default is another there)

What compiled libraries open and map is seen (/proc/self lists it), what they replace is not.
"""

import builtins
import errno
import io
import os
import runpy
import shutil
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path

with suppress(ModuleNotFoundError):  # on Windows the rules hold without us
    import fcntl

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(str(ROOT / name) + os.sep for name in ("minillm", "tools", "tests"))
POSIX_ONLY = {
    "modules": {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios"},
    "os": {
        *("fork", "forkpty", "wait", "wait3", "wait4", "killpg", "setsid", "getpgid", "nice"),
        *("getuid", "geteuid", "getgid", "getegid", "chown", "lchown", "mkfifo", "mknod"),
        *("statvfs", "fstatvfs", "sync", "fdatasync", "sysconf", "confstr", "uname", "getloadavg"),
        *("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "sendfile"),
        *("pread", "pwrite", "O_DIRECTORY", "O_NOFOLLOW", "O_SYNC", "WIFSIGNALED", "WEXITSTATUS"),
    },
    "signal": {"SIGKILL", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGPIPE", "alarm", "pause"},
}


def denied(path: object, why: str) -> PermissionError:
    """What Windows answers, with its number in the place of ours."""
    return PermissionError(errno.EACCES, f"The process cannot access the file: {why}", str(path))


def opened() -> set[str]:
    """The files that this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the one that listed them
            continue
    return found


def mapped() -> set[str]:
    """The files that are mapped into the memory of this process."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        return {line.rstrip("\n").split(maxsplit=5)[5] for line in file if "/" in line}


def check_free(path: object) -> None:
    """Raises: PermissionError if the file, or one in the folder, is open or mapped."""
    name = os.path.realpath(path)
    for kind, used in (("open", opened()), ("mapped", mapped())):
        if busy := [one for one in used if one == name or one.startswith(name + os.sep)]:
            raise denied(path, f"{busy[0]} is {kind}")


def missing_here(name: str, ours: set[str]) -> bool:
    """Whether our own code asks for `name`, two frames up, though Windows lacks it."""
    frame = sys._getframe(2)
    return name in ours and frame.f_code.co_filename.startswith(OURS)


def install() -> None:
    """Let the rules hold in this process, from here on."""
    _hide(os, POSIX_ONLY["os"])
    _hide(signal, POSIX_ONLY["signal"])
    real_import = builtins.__import__

    def import_(name: str, *rest: object, **more: object) -> object:
        if missing_here(name.partition(".")[0], POSIX_ONLY["modules"]):
            raise ModuleNotFoundError(f"No module named {name!r} (on Windows)")
        return real_import(name, *rest, **more)

    builtins.__import__ = import_
    _restrict_files()
    shutil._use_fd_functions = False  # rmtree by opened folders is POSIX's
    warnings.filterwarnings("ignore", category=EncodingWarning)
    for place in (r"minillm(\.|$)", "__main__$", "build$", "execute$"):
        warnings.filterwarnings("error", category=EncodingWarning, module=place)


def _hide(module: object, names: set[str]) -> None:
    """Replace functions by ones that our code finds missing; constants stay (see the test)."""
    for name in names:
        real = getattr(module, name, None)
        if not callable(real) or isinstance(real, int):
            continue

        def hidden(*args: object, real: object = real, name: str = name, **more: object) -> object:
            if missing_here(name, names):
                raise AttributeError(f"module has no attribute {name!r} (on Windows)")
            return real(*args, **more)

        setattr(module, name, hidden)


def _restrict_files() -> None:
    real_open, real_fsync, real_file = os.open, os.fsync, io.open
    rename, replace, unlink = os.rename, os.replace, os.unlink

    def open_(path: object, flags: int, *rest: object, **more: object) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied: a folder", str(path))
        return real_open(path, flags, *rest, **more)

    def fsync(file: object) -> None:
        number = file if isinstance(file, int) else file.fileno()
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor: it is for reading only")
        real_fsync(number)

    def file_(file: object, mode: str = "r", *rest: object, **more: object) -> object:
        if not isinstance(file, int) and "w" in mode and os.path.realpath(file) in mapped():
            raise OSError(errno.EINVAL, "Invalid argument: the file is mapped", str(file))
        if "b" not in mode and (len(rest) < 2 or rest[1] is None) and not more.get("encoding"):
            io.text_encoding(None)  # the warning is the caller's, as without us
            more.setdefault("encoding", "locale")
        return real_file(file, mode, *rest, **more)

    def renamed(source: object, target: object, **more: object) -> None:
        check_free(source)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "File exists", str(target))
        rename(source, target, **more)

    def replaced(source: object, target: object, **more: object) -> None:
        check_free(source)
        check_free(target)
        if os.path.isdir(target):
            raise denied(target, "it is a folder")
        replace(source, target, **more)

    def removed(path: object, **more: object) -> None:
        if not os.path.islink(path):
            check_free(path)
        unlink(path, **more)

    os.open, os.fsync, builtins.open, io.open = open_, fsync, file_, file_
    os.rename, os.replace, os.unlink, os.remove = renamed, replaced, removed, removed


def main() -> None:
    """Run what the command line says, under the rules."""
    words = sys.argv[1:]
    install()
    sys.path[0] = os.getcwd()
    if words[0] == "-c":
        sys.argv = words[1:]
        exec(compile(words[1], OURS[1] + "-c", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
