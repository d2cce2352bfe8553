"""For a teacher: what a class gets, and what it hands in.

    python tools/student_class.py class                    build/class.zip: a copy, no solutions
    python tools/student_class.py class 01 02              the same, with these chapters filled in
    python tools/student_class.py hand-ins FOLDER 03       grade what lies in FOLDER -> FOLDER.csv

A hand-in is a page (anna.ipynb), or a zip or a folder that holds it under its own name
(03_attention.ipynb). Of it only the marked cells count. Each is put into a new copy in which the
earlier chapters are the course's, and is run there in a process with limits of time and memory: in
a container where bwrap (bubblewrap) is installed, else, for root, as another user; else there is no
sandbox, and the command says so.

What is compared: which tests ended and how, as their process wrote it to a file, and what the
chapter's functions return on numbers drawn from a seed, compared here. Printed text counts for
nothing. A hand-in that forges both inside its own process is not found out: read what you grade.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import json
import math
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build
import student
from student import HERE, StudentError

HANGS = 3600  # seconds in which the course's own code ends on any machine
TIMES = 10  # so many times as long as the course's page a hand-in may take
LARGEST = 20_000_000  # bytes of a page, or of what a hand-in's process writes to one file
COLUMNS = "hand-in verdict written passed failed waiting not_run values first_message".split()
NO_SANDBOX = (
    "This is no sandbox: every hand-in runs as you, and may read and delete what you may. Install "
    "bwrap (bubblewrap), or run this in a container or as a user of its own."
)

KINDS = {
    "container": "in a container, without network and without sight of the course",
    "user": "as another user, who may read what all users may, the course too, and use the network",
}

# ---- what a class gets ---------------------------------------------------------------------------


def class_zip(course: Path, target: Path, chapters: list[str]) -> str:
    """A copy as a zip, with these chapters filled in."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "minillm-student"
        student.make(course, folder)
        if chapters:
            student.fill(student.Copy(folder), course, chapters)
        shutil.rmtree(folder / "build", ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                archive.write(path, path.relative_to(folder.parent))
    filled = f", chapters {' '.join(chapters)} filled in" if chapters else ""
    return f"{target}: {target.stat().st_size / 1e6:.1f} MB, without solutions{filled}"


# ---- hand-ins, read ------------------------------------------------------------------------------


def page_in(path: Path, page: str) -> bytes:
    """The page that was handed in. Raises: StudentError with what is wrong."""
    if path.is_dir():
        found = [p for p in sorted(path.rglob(page)) if p.is_file() and not p.is_symlink()]
        return read_small(only(found, page))
    if path.suffix == ".zip":
        try:
            with zipfile.ZipFile(path) as archive:
                infos = [i for i in archive.infolist() if Path(i.filename).name == page]
                info = only([i for i in infos if "__MACOSX" not in i.filename], page)
                if info.file_size > LARGEST:
                    raise StudentError(f"{page} is larger than {LARGEST:,} bytes")
                with archive.open(info) as file:
                    return file.read(LARGEST)
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
            raise StudentError(f"the zip cannot be read: {error}") from None
    return read_small(path)


def only(found: list, page: str) -> Any:
    if len(found) != 1:
        raise StudentError(f"there are {len(found)} files {page} in it, not one")
    return found[0]


def read_small(path: Path) -> bytes:
    if path.stat().st_size > LARGEST:
        raise StudentError(f"{path.name} is larger than {LARGEST:,} bytes")
    return path.read_bytes()


def hand_ins(folder: Path) -> Iterator[Path]:
    """Pages, zips and folders, in the order of their names."""
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(".") and (path.is_dir() or path.suffix in (".ipynb", ".zip")):
            yield path


# ---- a box to run them in ------------------------------------------------------------------------


@dataclass
class Box:
    """Runs commands that may do anything, in a folder; `kind` is container, user or none."""

    kind: str
    seconds: float
    gigabytes: float
    hidden: tuple[Path, ...] = ()  # what a container does not show
    uid: int = 0
    late: bool = False  # whether the last command was stopped
    took: float = 0.0  # seconds, of the command that took longest

    def run(
        self, command: list[str], *, cwd: Path, env: dict[str, str], stdout: Any, stderr: Any
    ) -> int:
        how: dict[str, Any] = {"preexec_fn": self.limit} if os.name == "posix" else {}
        if self.kind == "container":
            command = [*self.container(cwd), *command]
        if self.kind == "user":
            give(cwd, self.uid)
            how |= {"user": self.uid, "group": self.uid, "extra_groups": []}
        env = bare(env, cwd)
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            **how,
        )
        try:
            process.wait(self.seconds)
            self.late = False
        except subprocess.TimeoutExpired:
            self.late = True
        self.stop(process)
        self.took = max(self.took, time.monotonic() - start)
        return process.returncode

    def container(self, folder: Path) -> list[str]:
        """Everything can be read but what is hidden, one folder written, no network."""
        options = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        options += ["--tmpfs", "/tmp"]
        for path in self.hidden:
            options += ["--tmpfs", str(path)]
        options += ["--bind", str(folder), str(folder), "--chdir", str(folder)]
        return [
            *options,
            "--unshare-all",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
        ]

    def limit(self) -> None:
        """In the child, before it begins."""
        resource = importlib.import_module("resource")  # not on Windows, where nothing calls this

        size = int(self.gigabytes * 2**30)
        seconds = math.ceil(self.seconds)
        for which, most in [
            (resource.RLIMIT_AS, size),
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_FSIZE, LARGEST),
            (resource.RLIMIT_CORE, 0),
        ]:
            resource.setrlimit(which, (most, most))

    def stop(self, process: subprocess.Popen) -> None:
        """The process and all that it started."""
        if os.name != "posix":
            process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if self.kind == "user":  # its own user has no other processes
                everything = "import os, signal; os.kill(-1, signal.SIGKILL)"
                subprocess.run([sys.executable, "-c", everything], user=self.uid, group=self.uid)
        process.wait()


def bare(env: dict[str, str], home: Path) -> dict[str, str]:
    """Only what a hand-in needs to know of the surroundings."""
    keep = {k: v for k, v in env.items() if k in ("PATH", "PYTHONPATH", "MINILLM_REPORT", "LANG")}
    return keep | {
        "HOME": str(home),
        "USER": "hand-in",
        "TMPDIR": str(home / "build"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
    }


def give(folder: Path, uid: int) -> None:
    for path in [folder, *folder.rglob("*")] if os.name == "posix" else ():
        os.chown(path, uid, uid, follow_symlinks=False)


def find_box(seconds: float, gigabytes: float) -> Box:
    """The strongest of container, other user, none that works here."""
    hidden = tuple(p for p in (HERE / "notebooks", HERE / "minillm", HERE / ".git") if p.is_dir())
    uid = 61_000 + os.getpid() % 4000
    boxes = [Box("container", HANGS, gigabytes, hidden)] if shutil.which("bwrap") else []
    if os.name == "posix" and os.getuid() == 0:
        boxes.append(Box("user", HANGS, gigabytes, uid=uid))
    for box in boxes:
        if works(box):
            box.seconds = seconds
            return box
    return Box("none", seconds, gigabytes)


def works(box: Box) -> bool:
    """Whether Python with torch starts in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        command = [sys.executable, "-c", "import torch, pytest"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        try:
            return box.run(command, cwd=folder, env=dict(os.environ), **quiet) == 0
        except (OSError, subprocess.SubprocessError):
            return False


# ---- grading -------------------------------------------------------------------------------------


@dataclass
class Judged:
    """What a package says of itself: the records of its tests, the values of its functions."""

    tests: dict[str, dict]
    values: dict[str, Any]


def judge(root: Path, chapter: str, seed: int, box: Box) -> Judged:
    """Run tests and functions of a chapter in `box`."""
    student.run_tests(root, chapter, launch=box.run)
    tests: dict[str, dict] = {}
    for line in read_back(root / "build" / f"grade_{chapter}.jsonl").splitlines():
        try:
            record = json.loads(line)
            name, outcome = str(record["test"]), str(record["outcome"])
            message = str(record["message"])[:300]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if tests.get(name, {}).get("outcome", "passed") == "passed":  # the worst of its parts
            tests[name] = {"outcome": outcome, "message": message}
    late = box.late
    target = root / "build" / "values.json"
    command = [sys.executable, str(root / "tools" / "student_values.py"), chapter, str(seed)]
    env = student.environment(root, target)
    if not late:
        quiet = subprocess.DEVNULL
        box.run([*command, str(target)], cwd=root, env=env, stdout=quiet, stderr=quiet)
    box.late |= late
    try:
        values = json.loads(read_back(target))
    except (ValueError, RecursionError):
        values = {}
    return Judged(tests, values if isinstance(values, dict) else {})


def read_back(path: Path) -> str:
    """A file that a hand-in's process wrote: a plain one, no link, of a bounded size."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return ""
        with open(path, "rb") as file:
            return file.read(LARGEST).decode("utf-8", "replace")
    except OSError:
        return ""


def same(ours: Any, theirs: Any) -> bool:
    """Numbers to five digits, all else exactly."""
    if isinstance(ours, list):
        return (
            isinstance(theirs, list) and len(ours) == len(theirs) and all(map(same, ours, theirs))
        )
    if isinstance(ours, float):
        if isinstance(theirs, bool) or not isinstance(theirs, int | float):
            return False
        if math.isnan(ours):
            return math.isnan(theirs)
        return math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=1e-5)
    return type(ours) is type(theirs) and ours == theirs


class Grader:
    """Grades the hand-ins of one chapter, each on a copy of its own.

    The course's page goes first: TIMES as long as it took, but at least the seconds of the box, is
    what a hand-in may take.
    """

    def __init__(self, course: Path, chapter: str, box: Box, folder: Path) -> None:
        self.box, self.folder, self.seed = box, folder, random.SystemRandom().randrange(10**6)
        self.blank = folder / "blank"
        student.make(course, self.blank)
        copy = student.Copy(self.blank)
        (self.page,) = student.pages_of(copy.given, [chapter])
        self.chapter = self.page[:2]
        shutil.copy(course / "tools" / "student_values.py", self.blank / "tools")
        earlier = [c for c in student.TESTS if c < self.chapter]
        if earlier:
            student.fill(copy, course, earlier)
        full = self.fresh("course")
        student.fill(student.Copy(full), course, [self.chapter])
        self.modules = set(build.Notebook(full, self.page).marked)
        least, box.seconds, box.took = box.seconds, HANGS, 0.0
        self.course = judge(full, self.chapter, self.seed, box)
        wrong = [t for t, r in self.course.tests.items() if r["outcome"] != "passed"]
        if wrong or not self.course.tests or box.late:
            raise StudentError(
                f"the course itself does not pass within {box.seconds:.0f} s and "
                f"{box.gigabytes:g} GB: {(wrong or ['no test ended'])[0]}"
            )
        box.seconds = max(least, TIMES * box.took)
        shutil.rmtree(full)

    def fresh(self, name: str) -> Path:
        target = self.folder / name
        shutil.copytree(self.blank, target)
        return target

    def row(self, path: Path) -> dict[str, Any]:
        """One line of the table."""
        row = dict.fromkeys(COLUMNS, 0) | {"hand-in": path.name, "values": "", "first_message": ""}
        root = self.fresh("hand-in")
        try:
            (root / "notebooks" / self.page).write_bytes(page_in(path, self.page))
            self.fill_row(row, student.Copy(root))
        except (StudentError, build.BuildError, OSError) as error:
            row |= {"verdict": "not gradable", "first_message": str(error)}
        except (RecursionError, MemoryError, ValueError) as error:
            message = f"the page cannot be read: {type(error).__name__}: {error}"
            row |= {"verdict": "not gradable", "first_message": message[:300]}
        finally:
            shutil.rmtree(root, ignore_errors=True)
        return row

    def fill_row(self, row: dict[str, Any], copy: student.Copy) -> None:
        data = copy.page(self.page)
        others = set(build.Notebook(copy.root, self.page).marked) - self.modules
        if others:
            raise StudentError(f"it writes modules that are not this page's: {sorted(others)}")
        notes = [
            note
            for cell_id, names in copy.given["names"][self.page].items()
            for note in student.remarks_on(copy, self.page, data, cell_id, names)
        ]
        notes += student.rebuild(copy, [self.page])
        done, todo = student.written(copy)[self.page]
        found = judge(copy.root, self.chapter, self.seed, self.box)
        wanted = {name: found.tests.get(name) for name in self.course.tests}
        ended = [record for record in wanted.values() if record]
        for kind in ("passed", "failed", "waiting"):
            row[kind] = sum(record["outcome"] == kind for record in ended)
        row["not_run"] = len(wanted) - len(ended)
        right = [n for n, v in self.course.values.items() if same(v, found.values.get(n))]
        wrong = [name for name in self.course.values if name not in right]
        row["written"] = f"{done} of {todo}"
        row["values"] = f"{len(right)} of {len(self.course.values)}"
        if self.box.late:
            notes.append(f"stopped after {self.box.seconds:.0f} s")
        notes += [
            f"{name}: {record['message']}"
            for name, record in wanted.items()
            if record and record["outcome"] == "failed"
        ]
        if row["not_run"] == len(wanted):
            notes.append("no test came to its end")
        notes += [f"waits for {r['message']}" for r in ended if r["outcome"] == "waiting"]
        notes += [f"{name}: returns other values than the course's" for name in wrong]
        row["first_message"] = notes[0] if notes else ""
        row["verdict"] = "passed" if row["passed"] == len(wanted) and not wrong else "not passed"


def grade_hand_ins(
    course: Path, folder: Path, chapter: str, target: Path, box: Box, say: Callable[[str], None]
) -> None:
    """Grade all of a folder into a csv. Raises: StudentError."""
    if not folder.is_dir():
        raise StudentError(f"{folder} is no folder")
    waiting = list(hand_ins(folder))
    if not waiting:
        raise StudentError(f"{folder} holds no hand-ins: no .ipynb, no .zip, no folder")
    if box.kind == "none":
        say(NO_SANDBOX)
    else:
        say(f"each runs {KINDS[box.kind]}")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        grader = Grader(course, chapter, box, Path(name).resolve())
        with open(target, "w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            for path in waiting:
                row = grader.row(path)
                table.writerow({k: safe(v) for k, v in row.items()})
                file.flush()
                say(f"{path.name}: {row['verdict']}. {row['first_message']}")
    say(f"{target}: {len(waiting)} hand-ins")


def safe(value: Any) -> Any:
    """No text that a spreadsheet would take for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    give_out = commands.add_parser("class", help="write a zip without solutions")
    give_out.add_argument("chapters", nargs="*", help="to be filled in: 01 02")
    give_out.add_argument("--to", type=Path, default=HERE / "build" / "class.zip")
    take_in = commands.add_parser("hand-ins", help="grade a folder")
    take_in.add_argument("folder", type=Path)
    take_in.add_argument("chapter")
    take_in.add_argument("--csv", type=Path, help="default: the folder's name with .csv")
    take_in.add_argument(
        "--seconds",
        type=float,
        default=300,
        help=f"that a hand-in's tests may take; {TIMES} times what the course's take, if more",
    )
    take_in.add_argument("--gigabytes", type=float, default=8, help="of address space")
    args = parser.parse_args(argv)
    try:
        if (HERE / student.GIVEN).exists():
            raise StudentError("this is a copy for learners: grade in the course's own folder")
        if args.command == "class":
            print(class_zip(HERE, args.to, args.chapters))
        else:
            folder = args.folder.resolve()
            target = args.csv or folder.with_name(folder.name + ".csv")
            box = find_box(args.seconds, args.gigabytes)
            grade_hand_ins(
                HERE, folder, args.chapter, target, box, lambda line: print(line, flush=True)
            )
    except (StudentError, build.BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
