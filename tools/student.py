"""The course to write yourself: a copy whose package has no bodies, and what judges it.

    python tools/student.py make               write student/: pages 00 to 10 and the tests
    python tools/student.py fill 01 02         take these chapters' code from the course
    python tools/student.py grade 03           run what belongs to chapter 03, say what is next
    python tools/student.py update             bring new tests and pages; what you wrote stays

They work in the course's folder, on its copy `student/` (`--to FOLDER`: another one), and in the
copy itself. Nothing that somebody wrote is overwritten. `given.json` in the copy holds a digest of
all that was handed out, `progress.json` how far its owner is. tools/student_class.py is for
teachers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import build
import moved
import student_blank as blanks
from cells import digest, exported, head_and_body, text_of

HERE = Path(__file__).resolve().parents[1]
GIVEN, PROGRESS = "given.json", "progress.json"

# Which tests judge which chapter: all of a file, but for those named below.
TESTS = {
    "01": ["test_ngram.py"],
    "02": ["test_pretokenizer.py", "test_bpe.py"],
    "03": ["test_attention.py"],
    "04": ["test_heads.py"],
    "05": ["test_rope.py"],
    "06": ["test_layers.py"],
    "07": [
        "training/test_loss.py",
        "training/test_data.py",
        "training/test_optim.py",
        "training/test_evaluation.py",
        "training/test_train.py",
    ],
    "08": ["test_cache.py"],
    "09": ["test_sampling.py"],
    "10": ["test_config.py", "test_model.py", "test_generation.py"],
}
# Tests that need a later chapter, and judge that one.
_HEADS = "test_heads.py::test_"
LATER = {
    _HEADS + "autocast[ours]": "06",
    _HEADS + "on_a_device": "06",
    _HEADS + "transformers_cached_steps_with_our_rope_masks_and_caches": "08",
    _HEADS + "compiled_decoding_is_one_graph": "08",
}

# What a copy holds beside pages and tests.
WHOLE = ["assets", "LICENSE", "pyproject.toml", "requirements.txt"]
TOOLS = ["build.py", "cells.py", "execute.py", "moved.py", "student.py", "student_blank.py"]
TOOLS += ["student_judge.py"]
NOT_COPIED = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", ".hypothesis")


UNKNOWN_IDS = "has not the course's cell ids, but another program's"


class StudentError(Exception):
    """A sentence for the one who typed the command."""


def spine(root: Path) -> list[Path]:
    """The pages that a copy has: 00, which only prepares, to 10."""
    return sorted((root / "notebooks").glob("[0-9]*.ipynb"))


def shelves(root: Path) -> list[Path]:
    """The deeper pages and those beyond."""
    return [
        p for s in ("deeper", "beyond") for p in sorted((root / "notebooks" / s).glob("*.ipynb"))
    ]


def page_name(root: Path, path: Path) -> str:
    return path.relative_to(root / "notebooks").as_posix()


# ---- make ----------------------------------------------------------------------------------------


def make(course: Path, copy: Path, *, deeper: bool = False) -> str:
    """Write the copy. Raises: StudentError if something is there already."""
    if copy.exists():
        raise StudentError(
            f"{copy} is there already: somebody's work, not overwritten. `update` brings what is "
            "new in the course; for a second copy name another folder: --to FOLDER"
        )
    part = copy.with_name(copy.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    files = handed_out(course, deeper=deeper)
    for name, text in files.items():
        put(part / name, text)
    pages, names = blank_pages(course, deeper=deeper)
    for name, data in pages.items():
        put(part / "notebooks" / name, dumped(data))
    try:
        build.build(part)
    except build.BuildError as error:
        raise StudentError(f"the course itself does not build: {error}") from None
    put(part / GIVEN, dumped(record(files, pages, names, deeper=deeper)))
    part.rename(copy)
    total = sum(map(len, (n for page in names.values() for n in page.values())))
    return f"{copy}: {total} bodies to write on {len(names)} pages. Its README says how to begin."


def put(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def dumped(data: dict) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def handed_out(course: Path, *, deeper: bool) -> dict[str, bytes]:
    """All files of a copy but its pages and what is built from them, with their contents."""
    paths = [p for name in WHOLE for p in files_below(course / name)]
    paths += [course / "tools" / name for name in TOOLS]
    paths += [p for p in files_below(course / "minillm")]
    paths += [p for p in (course / "tests").glob("*") if helps(p)]
    paths += [course / "tests" / name for names in TESTS.values() for name in names]
    paths += [course / "notebooks" / "GLOSSARY.md", course / "notebooks" / "conftest.py"]
    files = {path.relative_to(course).as_posix(): path.read_bytes() for path in paths}
    built = [blank for blank in build.owners(course).items() if deeper or "/" not in blank[1].name]
    for module, _ in built:
        files.pop(build.shown(module), None)
    files["not_written.py"] = blanks.NOT_WRITTEN.encode()
    for name in ("README.md", "Makefile"):
        files[name] = (course / "tools" / "student" / name).read_bytes()
    return files


def files_below(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.is_file())
    return [p for p in found if not {"__pycache__", ".ipynb_checkpoints"} & set(p.parts)]


def helps(path: Path) -> bool:
    """A file directly in tests/ that is no test: settings, and what several tests share."""
    return path.is_file() and not path.name.startswith("test_")


def blank_pages(
    course: Path, *, deeper: bool
) -> tuple[dict[str, dict], dict[str, dict[str, list[str]]]]:
    """The pages without outputs and bodies; what is to write, by page and cell."""
    pages, names = {}, {}
    for path in spine(course) + (shelves(course) if deeper else []):
        name = page_name(course, path)
        pages[name] = build.load(path, name, ids=True)
        found = blanks.blank_page(pages[name], name.removesuffix(".ipynb"))
        if found:
            names[name] = found
    return pages, names


def record(files: dict, pages: dict, names: dict, *, deeper: bool) -> dict:
    """What `given.json` holds: digests of files and cells, and what each cell has to define."""
    return {
        "deeper": deeper,
        "files": {name: blanks.digest(text.decode("latin-1")) for name, text in files.items()},
        "cells": {
            name: {c["id"]: digest(c) for c in data["cells"]} for name, data in pages.items()
        },
        "names": names,
    }


# ---- a copy, read --------------------------------------------------------------------------------


class Copy:
    """A learner's copy: what was handed out, and what its pages say now."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.read: dict[str, str] = {}  # the pages as they were when they were read
        try:
            self.given = json.loads((root / GIVEN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise StudentError(
                f"{root} is no copy of the course: there is no readable {GIVEN} in it. "
                "`student.py make` (make student) writes a copy"
            ) from None

    def page(self, name: str) -> dict:
        """A page as its owner saved it. Raises: StudentError with what is wrong with the file."""
        path = self.root / "notebooks" / name
        if not path.exists():
            raise StudentError(f"notebooks/{name} is missing: `update` brings it back, blank")
        try:
            self.read[name] = build.read(path)
            data = build.load(path, f"notebooks/{name}")
        except build.BuildError as error:
            raise StudentError(str(error)) from None
        first, *_ = [*self.given["cells"].get(name, {}), None]
        marked = any(map(exported, data["cells"]))
        if name in self.given["names"] and not marked and first not in self.find(name, data):
            raise StudentError(
                f"notebooks/{name} is no longer the course's page: it has another title and no "
                "marked cell. It stays as it is; rename it, and `update` brings the course's, blank"
            )
        return data

    def save(self, name: str, data: dict) -> None:
        """Write a page that was read. Raises: StudentError if somebody saved it since."""
        path = self.root / "notebooks" / name
        if path.exists() and build.read(path) != self.read.get(name):
            raise StudentError(
                f"notebooks/{name} was saved by another program at this moment: it stays as that "
                "saved it. Close the page in JupyterLab, then call this again"
            )
        build.write(path, dumped(data))
        self.read[name] = dumped(data)

    def save_given(self) -> None:
        build.write(self.root / GIVEN, dumped(self.given))

    def untouched(self, name: str, cell_id: str, cell: dict) -> bool:
        return self.given["cells"][name].get(cell_id) in told_by(cell)

    def knows(self, name: str, data: dict) -> bool:
        """Whether any cell still has the id that it was handed out with; a marked one may be ours,
        put back into a page that has others."""
        given = self.given["cells"].get(name, {})
        return any(cell.get("id") in given and not exported(cell) for cell in data["cells"])

    def find(self, name: str, data: dict) -> dict[str, dict]:
        """The cells that were handed out, by id: told by it, or by what they define, or by their
        text, or by the cells beside them."""
        cells = data["cells"]
        given, names = self.given["cells"].get(name, {}), self.given["names"].get(name, {})
        place = {c["id"]: n for n, c in reversed([*enumerate(cells)]) if c.get("id") in given}
        left = [n for n, cell in enumerate(cells) if cell.get("id") not in given]
        defines = {n: set(defined(cells[n])) for n in left}
        says = {n: told_by(cells[n]) for n in left}

        def take(cell_id: str, fit: list[int]) -> None:
            if fit and cell_id not in place:
                place[cell_id] = min(fit, key=lambda n: not exported(cells[n]))
                left.remove(place[cell_id])

        for cell_id in names:
            take(cell_id, [n for n in left if defines[n].intersection(names[cell_id])])
        for cell_id, noted in given.items():
            take(cell_id, [n for n in left if noted in says[n]])
        ids = list(given)
        for order, step in ((ids, 1), (ids[::-1], -1)):
            for neighbour, cell_id in zip([None, *order], order, strict=False):
                here = place.get(neighbour, len(cells)) + step
                fits = here in left and (exported(cells[here]) or cell_id not in names)
                take(cell_id, [here] if fits else [])
        return {cell_id: cells[n] for cell_id, n in place.items()}


def told_by(cell: dict) -> set[str]:
    """What a cell may be noted as: older copies have its text as it stood."""
    return {digest(cell), blanks.digest(text_of(cell))}


def defined(cell: dict) -> list[str]:
    """What a code cell defines; nothing where it is no Python."""
    try:
        return blanks.definitions(cell) if cell["cell_type"] == "code" else []
    except SyntaxError:
        return []


def section(data: dict, cell: dict) -> str:
    """The heading that a cell stands under."""
    heading = ""
    for other in data["cells"]:
        if other is cell:
            break
        if other["cell_type"] == "markdown":
            found = re.findall(r"^#+ (.+)$", text_of(other), re.M)
            heading = found[-1] if found else heading
    return heading


def pages_of(given: dict, chapters: Iterable[str]) -> list[str]:
    """The pages of these chapters (`03`, `3`, `03_attention`).

    Raises: StudentError for one that has nothing to write.
    """
    found = []
    for chapter in chapters:
        key = chapter.zfill(2)
        hits = [n for n in given["names"] if n.startswith(f"{key}_") or n == f"{key}.ipynb"]
        hits = hits or [n for n in given["names"] if n == f"{chapter}.ipynb"]
        if not hits:
            known = " ".join(sorted(TESTS))
            raise StudentError(f"there is no chapter {chapter!r} to write; there are {known}")
        found += hits
    return list(dict.fromkeys(found))


# ---- fill and update -----------------------------------------------------------------------------


def fill(copy: Copy, course: Path, chapters: list[str]) -> list[str]:
    """Put the course's cells of these chapters in where nobody has written; what was done."""
    said = []
    for name in pages_of(copy.given, chapters):
        data = copy.page(name)
        reference, blank = (build.load(course / "notebooks" / name, name, ids=True) for _ in "ab")
        blanks.blank_page(blank, name.removesuffix(".ipynb"))
        theirs, blank = ({c["id"]: c for c in page["cells"]} for page in (reference, blank))
        mine, done, left = copy.find(name, data), 0, []
        for cell_id, names in copy.given["names"][name].items():
            if cell_id not in theirs:
                raise StudentError(
                    f"the course has changed since notebooks/{name} was written: run update first"
                )
            cell = mine.get(cell_id)
            offered = {digest(theirs[cell_id]), digest(blank[cell_id])}
            if cell is None:
                cell = insert(data, reference, cell_id, mine)
            elif not copy.untouched(name, cell_id, cell) and digest(cell) not in offered:
                left.append(
                    f"  left as you wrote it: {', '.join(names)} "
                    f"(delete the cell, and fill puts the course's there)"
                )
                continue
            cell["source"] = theirs[cell_id]["source"]
            blanks.drop_outputs(cell)
            copy.given["cells"][name][cell_id] = digest(cell)
            done += len(names)
        copy.save(name, data)
        said += [f"notebooks/{name}: {done} bodies filled in", *left]
    copy.save_given()
    return said + rebuild(copy, list(copy.given["names"]))


def insert(data: dict, reference: dict, cell_id: str, mine: dict[str, dict]) -> dict:
    """A copy of the reference's cell, put behind the nearest of its predecessors that is there."""
    ids = [c["id"] for c in reference["cells"]]
    at = ids.index(cell_id)
    here = {i: n for i in mine for n, c in enumerate(data["cells"]) if c is mine[i]}
    before = [here[i] + 1 for i in ids[:at] if i in here]
    after = [here[i] for i in ids[at:] if i in here]
    place = [*before[-1:], *after, len(data["cells"])][0]
    cell = json.loads(json.dumps(reference["cells"][at]))
    if data.get("nbformat_minor", 5) < 5:
        del cell["id"]  # its format has none
    blanks.drop_outputs(cell)
    data["cells"].insert(place, cell)
    mine[cell_id] = cell
    return cell


def follow(data: dict, ordered: list[dict]) -> None:
    """Put cells into the order given; each other cell stays behind the one that it stood behind."""
    place, at = {id(cell): n for n, cell in enumerate(ordered)}, -1
    places = [at := place.get(id(cell), at) for cell in data["cells"]]
    pairs = sorted(zip(places, data["cells"], strict=True), key=lambda pair: pair[0])
    data["cells"] = [cell for _, cell in pairs]


def update(copy: Copy, course: Path) -> list[str]:
    """Bring what is new in the course; what its owner has changed stays, and is named."""
    deeper = copy.given["deeper"]
    files = handed_out(course, deeper=deeper)
    pages, names = blank_pages(course, deeper=deeper)
    new = record(files, pages, names, deeper=deeper)
    said = []
    for name, content in files.items():
        said += update_file(copy, name, content)
    for name, data in pages.items():
        reference = build.load(course / "notebooks" / name, name, ids=True)
        said += update_page(copy, name, data, reference, new)
    copy.given["files"] |= new["files"]
    copy.given["names"] = names
    copy.save_given()
    return (said or ["nothing is new"]) + rebuild(copy, list(names))


def update_file(copy: Copy, name: str, content: bytes) -> list[str]:
    path, was = copy.root / name, copy.given["files"].get(name)
    if path.exists():
        now = path.read_bytes()
        if now == content:
            return []
        if blanks.digest(now.decode("latin-1")) != was:
            return [f"left: {name} (you have changed it; to get the course's, rename yours)"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with build.replacing(path, durable=False) as temporary:  # whole, or as it was
        temporary.write_bytes(content)
    return [f"new: {name}"]


def update_page(copy: Copy, name: str, blank: dict, reference: dict, new: dict) -> list[str]:
    """One page, cell by cell: an untouched one becomes the course's, blank or filled as it was."""
    known = copy.given["cells"].setdefault(name, {})
    if not (copy.root / "notebooks" / name).exists():
        copy.save(name, blank)
        copy.given["cells"][name] = new["cells"][name]
        return [f"new: notebooks/{name}"]
    try:
        data = copy.page(name)
    except StudentError as error:
        return [f"left: {error}"]
    full = {c["id"]: c for c in reference["cells"]}
    said, changed, missing, found = [], 0, 0, copy.find(name, data)
    was = [i for i in known if i in full]
    known_ids = copy.knows(name, data)
    for cell in blank["cells"]:
        cell_id = cell["id"]
        mine = found.get(cell_id)
        if mine is None and not known_ids and not exported(cell):
            missing += 1
            continue
        what = ", ".join(new["names"].get(name, {}).get(cell_id, [])) or f"cell {cell_id}"
        if mine is None:
            insert(data, blank, cell_id, found)
            known[cell_id] = new["cells"][name][cell_id]
            said.append(f"put back or new in notebooks/{name}: {what}")
            continue
        offered = set.union(*map(told_by, (cell, full[cell_id])))
        if digest(mine) in offered:
            known[cell_id] = digest(mine)
            continue
        if known.get(cell_id) not in told_by(mine):
            if not known.get(cell_id) or known[cell_id] not in offered:
                said.append(f"left in notebooks/{name}: {what} (yours; the course's has changed)")
            continue
        filled = exported(mine) and not blanks.still_blank(mine)
        mine["source"] = (full[cell_id] if filled else cell)["source"]
        blanks.drop_outputs(mine)
        known[cell_id] = digest(mine)
        changed += 1
    if changed:
        said.append(f"new in notebooks/{name}: {changed} cells")
    if was != [i for i in new["cells"][name] if i in was]:
        follow(data, [found[i] for i in new["cells"][name] if i in found])
        said.append(f"new in notebooks/{name}: the order of its cells")
    if said:
        copy.save(name, data)
    if missing:
        said.append(
            f"notebooks/{name} {UNKNOWN_IDS}: only marked cells are put back, "
            f"no others ({missing} missing)"
        )
    order = dict.fromkeys([*new["cells"][name], *known])
    copy.given["cells"][name] = {cell_id: known[cell_id] for cell_id in order if cell_id in known}
    return said


def rebuild(copy: Copy, pages: list[str]) -> list[str]:
    """Write the modules of these pages; a sentence for each that could not be."""
    said = []
    for name in pages:
        try:
            notebook = build.Notebook(copy.root, name)
            texts = build.render_all(dict.fromkeys(notebook.marked, notebook), copy.root)
        except build.BuildError as error:
            said.append(f"not built: notebooks/{error}")
            continue
        for module, text in texts.items():
            path = build.module_path(copy.root, module)
            if path.exists() and build.read(path) != text:
                mend = build.which_command(copy.root, module, notebook, text)
                if not mend.startswith("the notebook was edited"):
                    said.append(
                        f"not built: {build.shown(module)} and notebooks/{name} differ: {mend}"
                    )
                    continue
            build.write(path, text)
            build.remember(copy.root, {module: text})
    return said


# ---- grade ---------------------------------------------------------------------------------------


def remarks(copy: Copy, chapter: str) -> list[str]:
    """What was edited, deleted, renamed, or saved in another form, in one sentence each."""
    said = []
    for name in copy.given["files"]:
        if name.startswith("tests/") and changed(copy, name):
            said.append(
                f"{name} is not the one that was handed out: what it says is not the "
                "course's judgement (rename it, and `update` brings the course's)"
            )
    for name in copy.given["names"]:
        if name[:2] > chapter:
            continue
        data = copy.page(name)
        if any("id" not in cell for cell in data["cells"]):
            said.append(
                f"notebooks/{name} was saved without cell ids (format 4."
                f"{data.get('nbformat_minor')}): its cells are told by what they define"
            )
        elif not copy.knows(name, data):
            said.append(f"notebooks/{name} {UNKNOWN_IDS}: its cells are told by what they define")
        for cell_id, names in copy.given["names"][name].items():
            said += remarks_on(copy, name, data, cell_id, names)
    return said


def changed(copy: Copy, name: str) -> bool:
    path = copy.root / name
    if not path.exists():
        return True
    return blanks.digest(path.read_bytes().decode("latin-1")) != copy.given["files"][name]


def remarks_on(copy: Copy, name: str, data: dict, cell_id: str, names: list[str]) -> list[str]:
    marked = {n for cell in data["cells"] if exported(cell) for n in defined(cell)}
    missing = [n for n in names if n not in marked]
    if not missing:
        return []
    what = ", ".join(missing)
    cell = copy.find(name, data).get(cell_id)
    if cell is None:
        return [f"notebooks/{name}: the cell that defines {what} was deleted: update puts it back"]
    where = f'notebooks/{name}, under "{section(data, cell)}"'
    if not exported(cell):
        return [
            f"{where}: the cell of {what} has lost its first line, `#| export`: without it "
            "nothing reaches the package"
        ]
    try:
        found = blanks.definitions(cell)
    except SyntaxError as error:
        above = head_and_body(cell)[0].count("\n") + 1
        return [
            f"{where}: line {(error.lineno or 0) + above} of the cell is no Python: {error.msg}"
        ]
    expected = {n for ns in copy.given["names"][name].values() for n in ns}
    tops = {n.partition(".")[0] for n in expected}
    others = [n for n in found if n not in expected and n not in tops]
    instead = f", but it has {', '.join(others)}" if others else ""
    return [
        f"{where}: {what} is no longer defined{instead}: tests and later pages use the old name"
    ]


def written(copy: Copy) -> dict[str, tuple[int, int]]:
    """Of each page: how many bodies are written, of how many."""
    found = {}
    for name, cells in copy.given["names"].items():
        try:
            data = copy.page(name)
        except StudentError:
            found[name] = (0, sum(map(len, cells.values())))
            continue
        marked = [cell for cell in data["cells"] if exported(cell)]
        open_names = {n for cell in marked for n in blanks.still_blank(cell)}
        there = {n for cell in marked for n in defined(cell)}
        all_names = [n for ns in cells.values() for n in ns]
        found[name] = (sum(n in there and n not in open_names for n in all_names), len(all_names))
    return found


def places(copy: Copy) -> dict[str, tuple[str, str]]:
    """Where each name stands that is still to be written: its page and the heading above it."""
    found = {}
    for name in copy.given["names"]:
        try:
            data = copy.page(name)
        except StudentError:
            continue
        for cell in data["cells"]:
            for missing in blanks.still_blank(cell):
                found[missing] = (name, section(data, cell))
    return found


def run_tests(
    root: Path, chapter: str, *, launch: Callable[..., int] = subprocess.call, **how: Any
) -> list[dict]:
    """What belongs to a chapter, run on the package in `root`: a record a test."""
    report = root / "build" / f"grade_{chapter}.jsonl"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    moved = [test for test, later in LATER.items() if later != chapter]
    added = [test for test, later in LATER.items() if later == chapter]
    files = [f"tests/{name}" for name in TESTS[chapter]] + [f"tests/{test}" for test in added]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "student_judge", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    command += ["-p", "no:nbval"]  # two seconds to import, and no page is run
    command += ["--continue-on-collection-errors", *files]
    command += [f"--deselect=tests/{test}" for test in moved]
    with open(root / "build" / f"grade_{chapter}.txt", "w", encoding="utf-8") as log:
        launch(command, cwd=root, env=environment(root, report), stdout=log, stderr=log, **how)
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    return [json.loads(line) for line in lines]


def environment(root: Path, report: Path) -> dict[str, str]:
    """For a process that imports the package of this copy, and no other."""
    paths = [str(root), str(root / "tools")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "MINILLM_REPORT": str(report),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def grade(copy: Copy, chapter: str) -> list[str]:
    """Build, test and count one chapter; the lines to print."""
    (name,) = pages_of(copy.given, [chapter])
    chapter = name[:2]
    start = time.perf_counter()
    not_built = rebuild(copy, [n for n in copy.given["names"] if n[:2] <= chapter])
    said = remarks(copy, chapter) + not_built
    done, todo = written(copy)[name]
    results = run_tests(copy.root, chapter) if done else []
    counts = {
        kind: [r for r in results if r["outcome"] == kind]
        for kind in ("passed", "failed", "waiting")
    }
    log = f"build/grade_{chapter}.txt"
    lines = [f"note: {line}" for line in said]
    lines.append(
        f"{name.removesuffix('.ipynb')}: {done} of {todo} bodies written; tests: "
        + ", ".join(f"{len(found)} {kind}" for kind, found in counts.items())
        + f" ({time.perf_counter() - start:.0f} s)"
    )
    if not done:
        lines.append("no test was run: they all wait for what is not written")
    elif not results:
        lines.append(f"no test was run: see {log}")
    if not_built and results:
        lines.append("these tests ran on minillm/ as it was before: see the note")
    lines += failed_lines(counts["failed"], log)
    lines += waiting_lines(copy, counts["waiting"], chapter)
    if done == todo and len(counts["passed"]) == len(results) > 0 and not not_built:
        later = [n for n, (d, t) in written(copy).items() if d < t and n > name]
        ahead = f"next: {later[0].removesuffix('.ipynb')}" if later else "no page is left"
        lines.append(f"all of it passes; {ahead}")
    keep_progress(copy, chapter, {kind: len(found) for kind, found in counts.items()})
    total = written(copy).values()
    lines.append(f"in all: {sum(d for d, _ in total)} of {sum(t for _, t in total)} written")
    return lines


def failed_lines(failed: list[dict], log: str) -> list[str]:
    """Tests that failed, each once, however many cases of it did, the first five with a message."""
    cases: dict[str, list[dict]] = {}
    for result in failed:
        cases.setdefault(result["test"].partition("[")[0], []).append(result)
    lines = []
    for test, results in list(cases.items())[:5]:
        times = f" ({len(results)} cases)" if len(results) > 1 else ""
        whole_file = "" if "::" in test else " (none of its tests could run)"
        lines.append(f"failed: {test}{whole_file}{times}\n        {results[0]['message']}")
    if more := [test.rpartition("::")[2] for test in list(cases)[5:]]:
        lines.append(f"and {len(more)} more: {', '.join(more)}")
    return [*lines, f"all that the tests said: {log}"] if failed else []


def waiting_lines(copy: Copy, waiting: list[dict], chapter: str) -> list[str]:
    """What tests wait for, most wanted first, and what to write next."""
    spots = places(copy)
    wanted: dict[str, int] = {}
    for result in waiting:
        wanted[result["message"]] = wanted.get(result["message"], 0) + 1
    lines = []
    for missing, count in sorted(wanted.items(), key=lambda pair: -pair[1]):
        page, heading = spots.get(missing, ("", ""))
        where = f'{page[:2]}, under "{heading}"' if page else "its page has it, minillm/ not yet"
        lines.append(f"waiting for {missing} ({where}): {count}")
    earlier = [m for m in wanted if m in spots and spots[m][0][:2] < chapter]
    mine = [m for m, (page, _) in spots.items() if page[:2] == chapter]
    if earlier:
        chapters = " ".join(sorted({spots[m][0][:2] for m in earlier}))
        lines.append(f'next: chapter {chapters}, by hand or by `make fill NB="{chapters}"`')
    elif mine:
        lines.append(f'next: {mine[0]}, under "{spots[mine[0]][1]}"')
    return lines


def keep_progress(copy: Copy, chapter: str, counts: dict[str, int]) -> None:
    """Note in progress.json what is written and what this chapter's tests said."""
    path = copy.root / PROGRESS
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    graded = kept.get("graded", {}) | {
        chapter: counts | {"at": time.strftime("%Y-%m-%d %H:%M", time.gmtime())}
    }
    found = written(copy)
    pages = {name.removesuffix(".ipynb"): f"{d} of {t}" for name, (d, t) in found.items()}
    total = f"{sum(d for d, _ in found.values())} of {sum(t for _, t in found.values())}"
    build.write(path, dumped({"written": total, "pages": pages, "graded": graded}))


# ---- the command ---------------------------------------------------------------------------------


def where(to: Path | None, course: Path | None) -> tuple[Path, Path | None]:
    """The copy that is meant, and the course it came from (None where that is not known)."""
    if (HERE / GIVEN).exists():  # this file lies in a copy
        parent = HERE.parent
        near = (parent / "notebooks").exists() and not (parent / GIVEN).exists()
        return HERE, course or (parent if near else None)
    return (to or HERE / "student").resolve(), course or HERE


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["make", "fill", "grade", "update"])
    parser.add_argument("chapters", nargs="*", help="03, or for fill several: 01 02")
    parser.add_argument("--to", type=Path, help="the copy (default: student/)")
    parser.add_argument("--course", type=Path, help="the course, where the copy lies elsewhere")
    parser.add_argument("--deeper", action="store_true", help="make: blank the other shelves, too")
    args = parser.parse_args(argv)
    root, course = where(args.to, args.course)
    try:
        print("\n".join(run(args.command, args.chapters, root, course, deeper=args.deeper)))
    except (StudentError, build.BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(
    command: str, chapters: list[str], root: Path, course: Path | None, *, deeper: bool = False
) -> list[str]:
    """One command; the lines to print. Raises: StudentError, BuildError."""
    if command == "make":
        if root == HERE and (HERE / GIVEN).exists():
            raise StudentError("this is a copy already: `make` works in the course's own folder")
        if root.exists() and moved.is_old(copy := Copy(root)):
            said = [moved.carry(copy, course or HERE), *update(copy, course or HERE)]
            return [line for line in said if not line.startswith(("new: minillm/", "new: tests/"))]
        return [make(course or HERE, root, deeper=deeper)]
    copy = Copy(root)
    if command in ("fill", "grade") and not chapters:
        raise StudentError(f"{command} which chapter? Such as: make {command} NB=03")
    if command == "grade":
        return [line for chapter in chapters for line in grade(copy, chapter)]
    if course is None:
        raise StudentError(
            f"{command} needs the course, and this copy came without it: "
            "name its folder with --course FOLDER, or ask who gave you the copy"
        )
    return fill(copy, course, chapters) if command == "fill" else update(copy, course)


if __name__ == "__main__":
    sys.exit(main())
