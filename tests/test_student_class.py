"""For a teacher: the zip holds no solution; hand-ins are graded in a box, whatever they do."""

import csv
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import build  # noqa: E402
import student  # noqa: E402
import student_blank as blanks  # noqa: E402
import student_class as teacher  # noqa: E402
import student_values  # noqa: E402
from cells import text_of  # noqa: E402

PAGE = "01_ngrams.ipynb"
BITS, PIECES = "ad07e74e", "5f71ba07"  # the cells of bits_per_byte and word_pieces
TESTS = """
from minillm.ngram import bits_per_byte, word_pieces

def test_bits():
    assert abs(bits_per_byte(1.0, 1) - 1.4427) < 1e-3

def test_pieces():
    assert word_pieces("a b") == ["a", " b"]
"""


# ---- the zip -------------------------------------------------------------------------------------


def test_the_zip_holds_no_solution_but_those_asked_for(tmp_path):
    said = teacher.class_zip(ROOT, tmp_path / "class.zip", ["01"])
    assert "without solutions, chapters 01 filled in" in said
    with zipfile.ZipFile(tmp_path / "class.zip") as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "minillm-student"
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*")]
    assert not [n for n in names if "solutions" in n or "tests/exercises" in n]
    assert "tools/student_class.py" not in names and "Makefile" in names
    modules = [build.module_path(folder, module) for module in build.owners(folder)]
    pages = list((folder / "notebooks").glob("*.ipynb"))
    texts = "".join(path.read_text("utf-8") for path in pages + modules)
    for page, line in solution_lines().items():
        assert (line in texts) == (page == PAGE), (page, line)
    # whoever has only this cannot fill in more
    done = subprocess.run(
        [sys.executable, "tools/student.py", "fill", "02"], cwd=folder, capture_output=True,
        text=True, env=student.environment(folder, folder / "unused"),
    )  # fmt: skip
    assert done.returncode == 1
    assert "fill needs the course, and this copy came without it" in done.stderr


def solution_lines() -> dict[str, str]:
    """Of each page the longest line of a body, comments aside."""
    found = {}
    for path in student.spine(ROOT):
        data = build.load(path, path.name)
        full = {c["id"]: text_of(c) for c in data["cells"]}
        names = blanks.blank_page(data, path.stem)
        left = {c["id"]: text_of(c) for c in data["cells"]}
        lines = [
            line.strip()
            for cell_id in names
            for line in full[cell_id].splitlines()
            if line not in left[cell_id].splitlines() and not {'"', "#", "\\"} & set(line)
        ]
        if lines:
            found[path.name] = max(lines, key=len)
    assert len(found) == 10
    return found


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", sorted(student.TESTS))
def test_values_are_those_of_the_seed(chapter):
    make = getattr(student_values, f"chapter_{chapter}")
    first, again, other = (
        {name: student_values.said(call) for name, call in make(seed).items()} for seed in (5, 5, 6)
    )
    assert not [v for v in first.values() if isinstance(v, str)], first
    json.dumps(first)
    assert teacher.same(list(first.values()), list(again.values()))
    assert not teacher.same(list(first.values()), list(other.values()))


@pytest.mark.parametrize(
    "ours, theirs, equal",
    [
        (1.0, 1.0 + 1e-6, True),
        (1.0, 1.1, False),
        ([1.0, [2]], [1.0, [2]], True),
        ([1.0], [1.0, 1.0], False),
        (1.0, True, False),
        (1, 1.0, False),
        (1.0, "1.0", False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        ([1.0], None, False),
    ],
)
def test_same(ours, theirs, equal):
    assert teacher.same(ours, theirs) is equal


# ---- hand-ins ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """The course, with two tests for its first chapter."""
    folder = tmp_path_factory.mktemp("teacher") / "course"
    for name in ("minillm", "tests", "tools", "assets"):
        shutil.copytree(ROOT / name, folder / name, ignore=student.NOT_COPIED)
    skip = shutil.ignore_patterns("deeper", "beyond", "solutions", "__pycache__")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=skip)
    for name in ("LICENSE", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    (folder / "tests/test_ngram.py").write_text(TESTS)
    (folder / "tests/conftest.py").write_text("")
    return folder


def page(change=None, *, blank: bool = False) -> str:
    """The first chapter as somebody hands it in: `change` maps cells to other sources."""
    data = build.load(ROOT / "notebooks" / PAGE, PAGE)
    if blank:
        blanks.blank_page(data, "01_ngrams")
    for cell in data["cells"]:
        blanks.drop_outputs(cell)
        if cell["id"] in (change or {}):
            cell["source"] = change[cell["id"]](text_of(cell))
    return student.dumped(data)


def after(code: str):
    return lambda source: f"{source}\n\n{code}\n"


def test_a_folder_of_hand_ins_becomes_a_table(course, tmp_path, monkeypatch):
    folder, canary = tmp_path / "hand-ins", tmp_path / "canary"
    folder.mkdir()
    canary.write_text("alive")
    canary.chmod(0o644)
    wipe = f"""
import os, shutil
shutil.rmtree(os.getcwd())
try:
    os.unlink({str(canary)!r})
except OSError:
    pass
"""
    fake = "import os\nos.write(1, b'2 passed in 0.01s\\n')\nos._exit(0)"
    for name, text in {
        "ben": page({BITS: lambda s: s.replace("math.log(2)", "math.log(10)")}),
        "dora": page({BITS: after(wipe)}),
        "eve": page({BITS: after(fake)}, blank=True),
        "fred": page(blank=True),
    }.items():
        (folder / f"{name}.ipynb").write_text(text, "utf-8")
    with zipfile.ZipFile(folder / "anna.zip", "w") as archive:
        archive.writestr(f"work/notebooks/{PAGE}", page())
    (folder / "hans").mkdir()
    (folder / "notes.txt").write_text("not a hand-in")
    (folder / "ida.ipynb").write_text("{")
    box = teacher.find_box(60, 8)
    said: list[str] = []
    target = tmp_path / "table.csv"
    teacher.grade_hand_ins(course, folder, "1", target, box, said.append)
    with open(target, encoding="utf-8", newline="") as file:
        rows = {row["hand-in"].partition(".")[0]: row for row in csv.DictReader(file)}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts.pop("anna") == "passed"
    assert verdicts.pop("hans") == verdicts.pop("ida") == "not gradable"
    assert set(verdicts) == {"ben", "dora", "eve", "fred"}
    if box.kind == "none":  # without a box it did delete its copy, so nothing is left to grade
        assert verdicts.pop("dora") == "not gradable"
    else:
        assert rows["dora"]["not_run"] == "2"
    assert set(verdicts.values()) == {"not passed"}, box.kind
    assert rows["ben"]["first_message"].startswith("tests/test_ngram.py::test_bits: AssertionError")
    assert (rows["ben"]["passed"], rows["ben"]["failed"], rows["ben"]["values"]) == (
        "1",
        "1",
        "4 of 5",
    )
    assert rows["eve"]["not_run"] == "2"
    assert rows["fred"]["waiting"] == "2" and rows["fred"]["written"] == "0 of 15"
    assert rows["hans"]["first_message"] == f"there are 0 files {PAGE} in it, not one"
    assert (
        "ida.ipynb" not in rows["ida"]["first_message"]
        and "not JSON" in rows["ida"]["first_message"]
    )
    if box.kind != "none":
        assert canary.read_text() == "alive"
    else:
        assert said[0] == teacher.NO_SANDBOX


def test_a_hand_in_that_never_ends_is_stopped(course, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "TIMES", 2)  # it never ends, and so in no multiple
    endless = "    import time\n    while True:\n        time.sleep(1)\n    return"
    path = tmp_path / "carl.ipynb"
    path.write_text(page({BITS: lambda s: s.replace("    return", endless)}), "utf-8")
    grader = teacher.Grader(course, "01", teacher.find_box(0, 8), tmp_path)
    row = grader.row(path)
    said = f"stopped after {grader.box.seconds:.0f} s"
    assert (row["verdict"], row["first_message"]) == ("not passed", said)


def test_a_slow_machine_stops_no_right_answer(course, tmp_path, monkeypatch):
    """By the clock of the course's own page: however long that takes, it may take ten times."""
    slow = "import time\ntime.sleep(1)\n" + TESTS  # longer than the second that is left to it
    monkeypatch.setattr(student, "TESTS", student.TESTS | {"01": ["test_slow.py"]})
    (course / "tests/test_slow.py").write_text(slow)
    path = tmp_path / "anna.ipynb"
    path.write_text(page(), "utf-8")
    grader = teacher.Grader(course, "01", teacher.find_box(1, 8), tmp_path)
    assert grader.box.seconds > 10 and grader.row(path)["verdict"] == "passed"


def test_values_find_out_who_forges_the_tests(course, tmp_path):
    """The hand-in itself writes records of tests that passed; the values are not there."""
    forged = """
import json, os
report = os.environ["MINILLM_REPORT"]
if report.endswith("jsonl"):
    with open(report, "w") as file:
        for test in ("test_bits", "test_pieces"):
            record = {"test": f"tests/test_ngram.py::{test}", "outcome": "passed", "message": ""}
            file.write(json.dumps(record) + "\\n")
    os._exit(0)
"""
    path = tmp_path / "fay.ipynb"
    path.write_text(page({BITS: after(forged)}, blank=True), "utf-8")
    grader = teacher.Grader(course, "01", teacher.find_box(60, 8), tmp_path)
    row = grader.row(path)
    assert (row["passed"], row["values"], row["verdict"]) == (2, "0 of 5", "not passed")
    assert "returns other values than the course's" in row["first_message"]


def test_a_page_writes_no_other_module(course, tmp_path):
    path = tmp_path / "gil.ipynb"
    path.write_text(
        page({BITS: lambda s: s.replace("#| export ngram", "#| export checks")}), "utf-8"
    )
    grader = object.__new__(teacher.Grader)
    grader.page, grader.chapter, grader.modules = PAGE, "01", {"ngram"}
    grader.folder, grader.blank = tmp_path, tmp_path / "blank"
    student.make(course, grader.blank)
    row = grader.row(path)
    assert row["verdict"] == "not gradable"
    assert row["first_message"] == "it writes modules that are not this page's: ['checks']"


def test_what_comes_back_is_read_with_care(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")  # would wait for ever
    assert teacher.read_back(tmp_path / "link") == ""
    assert teacher.read_back(tmp_path / "pipe") == ""
    assert teacher.read_back(tmp_path / "missing") == ""
    assert teacher.read_back(tmp_path / "secret") == "secret"


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x"])
def test_no_message_is_a_formula(text):
    assert teacher.safe(text) == "'" + text


def test_a_folder_without_hand_ins(tmp_path, capsys):
    assert teacher.main(["hand-ins", str(tmp_path), "01"]) == 1
    assert "holds no hand-ins: no .ipynb, no .zip, no folder" in capsys.readouterr().err


def test_without_container_or_root_it_says_that_it_is_no_sandbox(monkeypatch):
    monkeypatch.setattr(teacher.shutil, "which", lambda name: None)
    monkeypatch.setattr(teacher.os, "getuid", lambda: 1000)
    assert teacher.find_box(1, 1).kind == "none"
    assert "This is no sandbox" in teacher.NO_SANDBOX
