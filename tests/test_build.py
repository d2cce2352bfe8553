"""Break package and notebook on purpose, in a copy; see check fail and build or pull mend it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import build  # noqa: E402

CELLS = [
    ("markdown", "# 01 A toy"),
    ("code", "#| default_exp toy"),
    (
        "code",
        '#| export\n"""A toy module.\n\nIt adds.\n"""\n\nimport math\n\n\n'
        'def add(a: int, b: int) -> int:\n    """The sum."""\n    return a + b',
    ),
    ("code", "assert add(1, 2) == 3"),
    (
        "code",
        "#| export\nfrom pathlib import Path\n\nTABLE: dict[str, int] = {}\n\n\n"
        "# A comment that belongs to Pair.\nclass Pair:\n    x = 1\n\n\n"
        'TABLE["pair"] = Pair.x\nTABLE["root"] = int(math.sqrt(4)) + len(Path("ab").parts)',
    ),
    (
        "code",
        '#| export other\n"""Another module."""\n\nfrom minillm.toy import add as add\n\nTWO = 2',
    ),
]


def write_notebook(path: Path, cells: list[tuple[str, str]]) -> None:
    data = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    for i, (kind, source) in enumerate(cells):
        cell = {"cell_type": kind, "id": f"c{i}", "metadata": {}}
        cell["source"] = source.splitlines(keepends=True)
        if kind == "code":
            cell |= {"execution_count": i, "outputs": []}
        data["cells"].append(cell)
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@pytest.fixture
def root(tmp_path):
    """A small repository: one notebook, two modules, built and without drift."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "minillm").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    write_notebook(tmp_path / "notebooks" / "01_toy.ipynb", CELLS)
    assert build.build(tmp_path) == ["toy", "other"]
    assert build.drift(tmp_path) == []
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def source(root: Path, cell: int) -> str:
    data = json.loads((root / "notebooks" / "01_toy.ipynb").read_text(encoding="utf-8"))
    return "".join(data["cells"][cell]["source"])


def test_module_reads_as_if_written_by_hand(root):
    assert (root / "minillm" / "toy.py").read_text() == (
        '"""A toy module.\n\nIt adds.\n"""\n\n'
        "# Built from notebooks/01_toy.ipynb: edit there, then make build.\n\n"
        "import math\nfrom pathlib import Path\n\n"
        '__all__ = ["TABLE", "Pair", "add"]\n\n\n'
        'def add(a: int, b: int) -> int:\n    """The sum."""\n    return a + b\n\n\n'
        "TABLE: dict[str, int] = {}\n\n\n"
        "# A comment that belongs to Pair.\nclass Pair:\n    x = 1\n\n\n"
        'TABLE["pair"] = Pair.x\n\n'
        'TABLE["root"] = int(math.sqrt(4)) + len(Path("ab").parts)\n'
    )
    other = (root / "minillm" / "other.py").read_text()
    assert '__all__ = ["TWO", "add"]' in other  # `import add as add` passes a name on


def test_build_changes_nothing_when_nothing_changed(root):
    before = (root / "minillm" / "toy.py").stat().st_mtime_ns
    assert build.build(root) == []
    assert (root / "minillm" / "toy.py").stat().st_mtime_ns == before


BREAKS = {  # name: (text in the module, its replacement, cell that owns it, text expected there)
    "definition": ("return a + b", "return b + a", 2, "return b + a"),
    "import": ("import math\n", "import cmath\nimport math\n", 2, "import cmath"),
    "loose statement": ('TABLE["pair"] = Pair.x', 'TABLE["pair"] = 7', 4, 'TABLE["pair"] = 7'),
    "comment": ("belongs to Pair", "goes with Pair", 4, "# A comment that goes with Pair."),
    "docstring": ("It adds.", "It sums.", 2, "It sums."),
    "new function": ("class Pair:", "def f() -> None:\n    pass\n\n\nclass Pair:", 4, "def f()"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_pull_carries_an_edit_of_the_module_home(root, name):
    old, new, cell, expected = BREAKS[name]
    module = root / "minillm" / "toy.py"
    edit(module, old, new)
    assert len(build.drift(root)) == 1
    after = module.read_text()
    assert build.pull(root) == ["01_toy.ipynb"]
    assert expected in source(root, cell)
    assert build.drift(root) == []
    if name != "new function":  # there __all__ gains a name
        assert build.ruff(after, "toy", root) == module.read_text()
    assert source(root, 3) == "assert add(1, 2) == 3"


def test_pull_removes_what_the_module_lost(root):
    edit(root / "minillm" / "toy.py", "class Pair:\n    x = 1\n\n\n", "")
    edit(root / "minillm" / "toy.py", "# A comment that belongs to Pair.\n", "")
    edit(root / "minillm" / "toy.py", "Pair.x", "1")
    edit(root / "minillm" / "toy.py", "from pathlib import Path\n", "")
    edit(root / "minillm" / "toy.py", ' + len(Path("ab").parts)', "")
    build.pull(root)
    assert "Pair" not in source(root, 4) and "pathlib" not in source(root, 4)
    assert build.drift(root) == []


@pytest.mark.parametrize("change", [("a + b", "a - b"), ("import math", "import cmath as math")])
def test_build_carries_an_edit_of_the_notebook_over(root, change):
    path = root / "notebooks" / "01_toy.ipynb"
    edit(path, *change)
    assert len(build.drift(root)) == 1
    assert build.build(root) == ["toy"]
    assert change[1] in (root / "minillm" / "toy.py").read_text()
    assert build.drift(root) == []


def git(root: Path, *command: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *command], cwd=root, check=True, capture_output=True)


def test_check_names_the_command_that_mends(root):
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "-m", "start")
    edit(root / "minillm" / "toy.py", "a + b", "b + a")
    assert "run make pull" in build.drift(root)[0]
    git(root, "checkout", ".")
    edit(root / "notebooks" / "01_toy.ipynb", "a + b", "b + a")
    assert "run make build" in build.drift(root)[0]
    edit(root / "minillm" / "toy.py", "a + b", "a + b + 0")
    assert "both were edited" in build.drift(root)[0]


def test_check_by_clock_where_there_is_no_git(root, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(root.parent))
    edit(root / "minillm" / "toy.py", "a + b", "b + a")
    os.utime(root / "notebooks" / "01_toy.ipynb", (1, 1))
    assert "run make pull" in build.drift(root)[0]
    os.utime(root / "minillm" / "toy.py", (0, 0))
    assert "run make build" in build.drift(root)[0]


def test_check_sees_missing_and_orphaned_modules(root):
    (root / "minillm" / "other.py").unlink()
    assert build.drift(root) == ["minillm/other.py is missing: run make build"]
    build.build(root)
    shutil.copy(root / "minillm" / "toy.py", root / "minillm" / "old.py")
    assert "no longer exports it" in build.drift(root)[0]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            "#| export\n%matplotlib inline",
            "01_toy.ipynb, cell 6, line 1.*magics cannot be exported",
        ),
        ("#| export\n!ls", "01_toy.ipynb, cell 6.*magics"),
        ("#| export\ndef f(:\n    pass", "01_toy.ipynb, cell 6, line 1"),
        ("#| export third\nX = 1", "01_toy.ipynb, cell 6.*must open with its docstring"),
    ],
)
def test_what_cannot_be_exported_is_an_error_that_names_the_place(root, cell, message):
    write_notebook(root / "notebooks" / "01_toy.ipynb", [*CELLS, ("code", cell)])
    with pytest.raises(build.BuildError, match=message):
        build.build(root)


def test_export_without_a_module_and_a_module_with_two_owners(root):
    write_notebook(root / "notebooks" / "02_bad.ipynb", [("code", "#| export\nX = 1")])
    with pytest.raises(build.BuildError, match=r"before any '#\| default_exp'"):
        build.build(root)
    write_notebook(root / "notebooks" / "02_bad.ipynb", CELLS)
    with pytest.raises(build.BuildError, match=r"claimed by 01_toy\.ipynb and 02_bad\.ipynb"):
        build.build(root)


def test_command_line_says_what_it_did(root):
    def run(*args: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "tools" / "build.py"), *args, "--root", str(root)]
        return subprocess.run(command, capture_output=True, text=True)

    assert run("check").stdout == "package and notebooks agree\n"
    edit(root / "minillm" / "toy.py", "a + b", "b + a")
    failed = run("check")
    assert failed.returncode == 1 and "run make pull" in failed.stdout
    assert run("pull").stdout == "pull: 01_toy.ipynb\n"
    assert run("check").returncode == 0


class FakeShell:
    """What sync sees of IPython: the inputs of this session."""

    def __init__(self, *inputs: str) -> None:
        self.user_ns = {"In": ["", *inputs]}


def test_sync_rebuilds_after_an_edit_and_only_checks_under_pytest(root, monkeypatch, capsys):
    monkeypatch.setattr(build, "ROOT", root)
    edit(root / "notebooks" / "01_toy.ipynb", "a + b", "b + a")
    with pytest.raises(build.BuildError, match="run make build"):  # PYTEST_VERSION is set here
        build.sync("01_toy.ipynb")
    monkeypatch.delenv("PYTEST_VERSION")
    build.sync("01_toy.ipynb")
    assert "b + a" in (root / "minillm" / "toy.py").read_text()
    assert "minillm/toy.py is what this notebook says" in capsys.readouterr().out


def test_sync_notices_unsaved_edits(root, monkeypatch, capsys):
    monkeypatch.setattr(build, "ROOT", root)
    monkeypatch.delenv("PYTEST_VERSION")
    unsaved = CELLS[2][1].replace("a + b", "b + a")
    monkeypatch.setattr(build, "get_ipython", lambda: FakeShell(unsaved), raising=False)
    build.sync("01_toy.ipynb")
    out = capsys.readouterr().out
    assert "unsaved edits: save the notebook" in out and "A toy module" in out
    saved = FakeShell(unsaved, CELLS[2][1])  # edited, then put back: the newest run counts
    monkeypatch.setattr(build, "get_ipython", lambda: saved, raising=False)
    build.sync("01_toy.ipynb")
    assert "unsaved" not in capsys.readouterr().out
