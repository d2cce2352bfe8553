"""Break package and notebook on purpose, in a copy; see check fail and build or pull mend it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

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
        '#| export other\n"""Another module."""\n\nfrom minillm.toy import add\n\nTWO = add(1, 1)',
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


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A small repository: one notebook, two modules, built and without drift."""
    root = tmp_path_factory.mktemp("built")
    (root / "notebooks").mkdir()
    (root / "minillm").mkdir()
    shutil.copy(ROOT / "pyproject.toml", root)
    write_notebook(root / "notebooks" / "01_toy.ipynb", CELLS)
    assert build.build(root) == ["toy", "other"]
    assert build.drift(root) == []
    return root


@pytest.fixture
def root(built, tmp_path):
    """A copy of it."""
    return shutil.copytree(built, tmp_path, dirs_exist_ok=True)


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
    assert '__all__ = ["TWO"]' in other and "import add\n" in other  # not passed on


@pytest.mark.parametrize(
    "passed_on",
    [
        "from minillm.toy import add as add",
        "from minillm.toy import TABLE, add as add",
        "import math as math",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import math as math",
    ],
)
def test_a_name_that_is_passed_on_is_refused(root, passed_on):
    cell = f'#| export third\n"""Third."""\n\n{passed_on}'
    write_notebook(root / "notebooks" / "01_toy.ipynb", [*CELLS, ("code", cell)])
    rule = r"cell 6: no import (add|math) as \1: names come from one place"
    for command in (build.build, build.drift):
        with pytest.raises(build.BuildError, match=rule):
            command(root)
    write_notebook(root / "notebooks" / "01_toy.ipynb", CELLS)
    edit(root / "minillm" / "toy.py", "import math", "import math as math")
    with pytest.raises(build.BuildError, match=r"cell 2: no import math as math"):
        build.pull(root)


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


def test_after_a_pull_the_next_edit_is_one_edit(root):
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "-m", "start")
    edit(root / "minillm" / "toy.py", "a + b", "b + a")
    assert build.pull(root) == ["01_toy.ipynb"] and build.drift(root) == []
    edit(root / "minillm" / "toy.py", "b + a", "a + b + 0")
    assert "the module was edited, run make pull" in build.drift(root)[0]
    edit(root / "minillm" / "toy.py", "a + b + 0", "b + a")
    edit(root / "notebooks" / "01_toy.ipynb", "b + a", "0 + a + b")
    assert "the notebook was edited, run make build" in build.drift(root)[0]
    build.build(root)
    edit(root / "notebooks" / "01_toy.ipynb", "0 + a + b", "1 + a + b - 1")
    assert "the notebook was edited, run make build" in build.drift(root)[0]
    (root / build.AGREED).write_text("not ours", encoding="utf-8")
    assert "both were edited" in build.drift(root)[0]


def test_pull_leaves_what_was_edited_in_the_notebook_alone(root, capsys):
    page, module = root / "notebooks" / "01_toy.ipynb", root / "minillm" / "toy.py"
    edit(page, "a + b", "b + a")
    before = page.read_bytes()
    assert build.main(["pull", "--root", str(root)]) == 0
    said = capsys.readouterr().out
    assert "pull: nothing to do" in said and "the notebook was edited, run make build" in said
    edit(module, "a + b", "a + b + 0")
    text = module.read_bytes()
    assert build.main(["pull", "--root", str(root)]) == 1
    said = capsys.readouterr().err
    assert "in add: both were edited: `python tools/build.py pull minillm/toy.py` keeps" in said
    assert (page.read_bytes(), module.read_bytes()) == (before, text)
    build.pull(root, ["minillm/toy.py"])
    assert "a + b + 0" in page.read_text(encoding="utf-8")
    assert (root / "build" / "before_pull" / "01_toy.ipynb").read_bytes() == before


def test_in_a_learners_copy_the_command_is_grade(root):
    (root / "given.json").write_text("{}", encoding="utf-8")
    edit(root / "notebooks" / "01_toy.ipynb", "a + b", "b + a")
    assert "the notebook was edited, run make grade NB=01" in build.drift(root)[0]


def test_pull_says_what_moved_and_what_is_new(root, capsys):
    edit(
        root / "minillm" / "toy.py",
        "class Pair:",
        "def new() -> int:\n    return 1\n\n\nclass Pair:",
    )
    assert build.main(["pull", "--root", str(root)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "pull: 01_toy.ipynb",
        "  new: notebooks/01_toy.ipynb, cell 4",
    ]
    text = (root / "minillm" / "toy.py").read_text(encoding="utf-8")
    function = 'def add(a: int, b: int) -> int:\n    """The sum."""\n    return a + b\n'
    assert function in text
    text = text.replace(function, "").rstrip("\n") + f"\n\n\n{function}"
    (root / "minillm" / "toy.py").write_text(text, encoding="utf-8")
    assert build.main(["pull", "--root", str(root)]) == 0
    places = "from notebooks/01_toy.ipynb, cell 2 to notebooks/01_toy.ipynb, cell 4"
    assert f"  add moved {places}\n" in capsys.readouterr().out


def test_all_modules_are_formatted_at_once_as_each_alone(root, monkeypatch):
    owned = build.owners(root)
    alone = {module: build.render(book, module, root) for module, book in owned.items()}
    started, run = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: started.append(a[0][1]) or run(*a, **k))
    build.formatted.cache_clear()  # the fixture has formatted them
    assert build.render_all(owned, root) == alone
    assert started == ["check", "format"]


def test_check_by_clock_where_there_is_no_git(root, monkeypatch):
    (root / build.AGREED).unlink()
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


def test_marks_as_formatters_write_them_build_and_pull_the_same(root):
    before = {path: path.read_bytes() for path in (root / "minillm").iterdir()}
    page = root / "notebooks" / "01_toy.ipynb"
    edit(page, "#| ", "# | ")
    assert build.build(root) == [] and build.drift(root) == []
    assert before == {path: path.read_bytes() for path in (root / "minillm").iterdir()}
    edit(root / "minillm" / "toy.py", "a + b", "b + a")
    assert build.pull(root) == ["01_toy.ipynb"]
    assert source(root, 2).startswith("# | export\n") and "b + a" in source(root, 2)


def test_a_definition_goes_only_if_that_is_said(root, monkeypatch, capsys):
    monkeypatch.setattr(build, "ROOT", root)
    before = {path: path.read_bytes() for path in (root / "minillm").iterdir()}
    write_notebook(root / "notebooks" / "01_toy.ipynb", [*CELLS[:4], ("code", "Pair = 1")])
    with pytest.raises(build.BuildError) as error:
        build.build(root)
    mend = "If it shall go: python tools/build.py build --remove 01_toy.ipynb"
    where = "no cell of notebooks/01_toy.ipynb that is marked `#| export` defines that. " + mend
    wanted = [f"minillm/toy.py would lose TABLE, Pair: {where}"]
    assert str(error.value).splitlines() == [*wanted, f"minillm/other.py would lose TWO: {where}"]
    monkeypatch.delenv("PYTEST_VERSION")
    build.sync("01_toy.ipynb")
    assert capsys.readouterr().out == f"nothing was built: {wanted[0]}\n"
    assert before == {path: path.read_bytes() for path in (root / "minillm").iterdir()}
    (orphan,) = [line for line in build.drift(root) if "other.py" in line]
    assert orphan.endswith(
        "or, if it shall go, run python tools/build.py build --remove 01_toy.ipynb"
    )
    assert build.main(["build", "--remove", "01_toy.ipynb", "--root", str(root)]) == 0
    assert [path.name for path in (root / "minillm").iterdir()] == ["toy.py"]
    assert build.drift(root) == []


def test_a_definition_that_moves_is_not_lost(root):
    cells = [*CELLS[:-1], ("code", CELLS[-1][1] + "\n\n\ndef add(a, b):\n    return a + b")]
    cells[2] = ("code", CELLS[2][1].partition("\n\n\ndef")[0])
    cells[5] = (
        "code",
        cells[5][1].replace("from minillm.toy import add\n\nTWO = add(1, 1)", "TWO = 2"),
    )
    write_notebook(root / "notebooks" / "01_toy.ipynb", cells)
    assert build.build(root) == ["toy", "other"]


def test_a_method_whose_cell_has_lost_its_mark_is_not_deleted(shapes):
    page = shapes / "notebooks" / "01_toy.ipynb"
    data = build.load(page, page.name)
    for cell in data["cells"]:
        if "class Square(Square)" in "".join(cell["source"]):
            cell["source"] = cell["source"][1:]
    page.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(build.BuildError, match=r"would lose Square\.\w+"):
        build.build(shapes)


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


def test_sync_knows_which_file_it_was_started_from(root, monkeypatch, capsys):
    monkeypatch.setattr(build, "ROOT", root)
    monkeypatch.delenv("PYTEST_VERSION")
    page, module = root / "notebooks" / "01_toy.ipynb", root / "minillm" / "toy.py"
    edit(page, "a + b", "b + a")
    before, copy = module.read_text(), root / "notebooks" / "01_mine.ipynb"
    for name, wanted in [(copy, "has been moved or renamed"), (copy, "is a copy")]:
        monkeypatch.setenv("JPY_SESSION_NAME", str(name))
        build.sync("01_toy.ipynb")
        assert f"{copy} {wanted}: only {page} builds the package" in capsys.readouterr().out
        assert module.read_text() == before
        shutil.copy(page, copy)
    shell = FakeShell()
    shell.user_ns["__vsc_ipynb_file__"] = str(copy)  # VS Code tells it so
    monkeypatch.setattr(build, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setenv("JPY_SESSION_NAME", str(page))
    build.sync("01_toy.ipynb")
    assert "is a copy" in capsys.readouterr().out
    del shell.user_ns["__vsc_ipynb_file__"]
    build.sync("01_toy.ipynb")
    assert "minillm/toy.py is what this notebook says" in capsys.readouterr().out
    assert "b + a" in module.read_text()


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


SHAPES = [
    ("code", "#| default_exp nn.shapes"),
    ("code", '#| export\n"""Shapes."""\n\nfrom __future__ import annotations\n\nSIDE = 2'),
    (
        "code",
        "#| export\n# Comment above the class.\nclass Square:\n"
        '    """A square.\n\n    With a side.\n    """\n\n'
        "    corners: int = 4\n    sides: int = 4\n\n"
        "    def __init__(self, side: float = SIDE) -> None:\n        super().__init__()\n"
        "        self.side = side\n        # ends the body",
    ),
    ("code", "%time half = Square(0.5)\nassert half.corners == 4"),
    ("code", "#| export\ndef double(x: float) -> float:\n    return 2 * x"),
    (
        "code",
        "#| export\nclass Square(Square):\n"
        "    # Comment above the area.\n    # Two lines.\n"
        "    @property\n    def area(self) -> float:\n        return self.side**2\n\n"
        "    @area.setter\n    def area(self, value: float) -> None:\n"
        "        self.side = value**0.5\n\n"
        "    @classmethod\n    def unit(cls, *, scale: float = 1) -> Square:\n"
        "        def make(x: float) -> Square:\n"
        '            """Made."""\n            return cls(x)\n\n'
        "        return make(scale)",
    ),
    ("code", "assert Square.unit().area == 1"),
    (
        "code",
        '#| export\nclass Square(Square):\n    letter = "s"\n    names = ("a", "b")\n\n'
        '    def draw(self) -> str:\n        return """\n##\n\n##\n"""\n\n\n'
        "# Comment above total.\ndef total(shapes: list[Square]) -> float:\n"
        "    return double(sum(s.area for s in shapes))",
    ),
    ("code", "assert total([Square()]) == 8"),
]
SHAPES_BODY = '''SIDE = 2


# Comment above the class.
class Square:
    """A square.

    With a side.
    """

    corners: int = 4
    sides: int = 4

    def __init__(self, side: float = SIDE) -> None:
        super().__init__()
        self.side = side
        # ends the body

    # Comment above the area.
    # Two lines.
    @property
    def area(self) -> float:
        return self.side**2

    @area.setter
    def area(self, value: float) -> None:
        self.side = value**0.5

    @classmethod
    def unit(cls, *, scale: float = 1) -> Square:
        def make(x: float) -> Square:
            """Made."""
            return cls(x)

        return make(scale)

    letter = "s"
    names = ("a", "b")

    def draw(self) -> str:
        return """
##

##
"""


def double(x: float) -> float:
    return 2 * x


# Comment above total.
def total(shapes: list[Square]) -> float:
    return double(sum(s.area for s in shapes))
'''


@pytest.fixture(scope="module")
def built_shapes(built, tmp_path_factory):
    """The small repository with a notebook whose class is reopened twice."""
    root = shutil.copytree(built, tmp_path_factory.mktemp("shapes"), dirs_exist_ok=True)
    write_notebook(root / "notebooks" / "01_toy.ipynb", SHAPES)
    for module in ("toy", "other"):
        (root / "minillm" / f"{module}.py").unlink()
    assert build.build(root) == ["nn.shapes"]
    assert build.drift(root) == []
    return root


@pytest.fixture
def shapes(built_shapes, tmp_path):
    """A copy of it."""
    return shutil.copytree(built_shapes, tmp_path, dirs_exist_ok=True)


def test_a_reopened_class_is_one_class_in_the_module(shapes):
    text = (shapes / "minillm" / "nn" / "shapes.py").read_text(encoding="utf-8")
    assert text == (
        '"""Shapes."""\n\n# Built from notebooks/01_toy.ipynb: edit there, then make build.\n\n'
        "from __future__ import annotations\n\n"
        '__all__ = ["SIDE", "Square", "double", "total"]\n\n' + SHAPES_BODY
    )
    namespace: dict = {}
    exec(text, namespace)
    square = namespace["Square"].unit(scale=3)
    assert (square.area, square.draw(), namespace["total"]([square])) == (9, "\n##\n\n##\n", 18)


def test_a_reopened_class_is_live_in_the_notebook(shapes):
    namespace: dict = {}
    exec("from __future__ import annotations", namespace)
    for kind, text in SHAPES:
        if kind == "code":
            exec(text.removeprefix("%time "), namespace)
    assert namespace["Square"].unit(scale=3).area == 9


MEMBER_EDITS = {  # name: (text in the module, its replacement, cell that owns it, text expected)
    "method of the first cell": ("self.side = side", "self.side = abs(side)", 2, "abs(side)"),
    "docstring": ("With a side.", "With four sides.", 2, "With four sides."),
    "attribute": ("sides: int = 4", "sides: int = 5", 2, "sides: int = 5"),
    "comment above the class": ("above the class", "above Square", 2, "# Comment above Square."),
    "base": ("class Square:", "class Square(object):", 2, "class Square(object):"),
    "method": ("cls(x)", "cls(abs(x))", 5, "return cls(abs(x))"),
    "setter": ("value**0.5", "abs(value) ** 0.5", 5, "abs(value) ** 0.5"),
    "comment": ("# Two lines.", "# Three lines.", 5, "# Comment above the area.\n    # Three"),
    "decorator": ("@classmethod", "@staticmethod", 5, "@staticmethod\n    def unit(cls"),
    "new name": ("def unit", "def one", 5, "def one(cls"),
    "new name of the first in a cell": ("letter =", "sign =", 7, "class Square(Square):\n    sign"),
    "later attribute": ('letter = "s"', 'letter = "q"', 7, 'letter = "q"\n    names'),
    "string": ("##\n\n##", "###\n\n###", 7, '"""\n###\n\n###\n"""'),
    "removed": ('    letter = "s"\n', "", 7, "class Square(Square):\n    names"),
    "new method": (
        "    @classmethod",
        "    def f(self) -> int:\n        return 1\n\n    @classmethod",
        5,
        "    def f(self) -> int:\n        return 1\n\n    @classmethod",
    ),
    "new method after the first cell's": (
        "    # Comment above the area.",
        "    def f(self) -> int:\n        return 1\n\n    # Comment above the area.",
        2,
        "        # ends the body\n\n    def f(self) -> int:\n        return 1",
    ),
    "new attribute": (
        "    names =",
        "    size = 1\n    names =",
        7,
        '"s"\n    size = 1\n    names',
    ),
    "first attribute": ("    corners:", "    kind = 1\n    corners:", 2, '"""\n\n    kind = 1\n'),
    "function after the class": (
        "def double",
        "def triple(x: float) -> float:\n    return 3 * x\n\n\ndef double",
        2,
        "# ends the body\n\n\ndef triple(x: float)",
    ),
    "function in a cell of the class": ("double(sum(", "2 * (sum(", 7, "return 2 * (sum("),
}


@pytest.mark.parametrize("name", MEMBER_EDITS)
def test_pull_carries_a_member_into_the_cell_that_owns_it(shapes, name):
    old, new, cell, expected = MEMBER_EDITS[name]
    module = shapes / "minillm" / "nn" / "shapes.py"
    edit(module, old, new)
    wanted = build.ruff(module.read_text(encoding="utf-8"), "nn.shapes", shapes)
    assert len(build.drift(shapes)) == 1
    assert build.pull(shapes) == ["01_toy.ipynb"]
    assert expected in source(shapes, cell)
    for other, (_, text) in enumerate(SHAPES):
        assert other == cell or source(shapes, other) == text
    assert build.drift(shapes) == []
    built = module.read_text(encoding="utf-8")
    assert built.replace(', "triple"', "") == wanted


def test_pull_renames_a_class_in_all_its_cells(shapes):
    edit(shapes / "minillm" / "nn" / "shapes.py", "Square", "Quad")
    build.pull(shapes)
    assert "class Quad:" in source(shapes, 2)
    for cell in (5, 7):
        assert source(shapes, cell).startswith("#| export\nclass Quad(Quad):\n")
    assert build.drift(shapes) == []


def test_pull_removes_a_cell_of_a_class_and_a_class(shapes):
    module = shapes / "minillm" / "nn" / "shapes.py"
    text = module.read_text(encoding="utf-8")
    start, end = text.index("    # Comment above the area"), text.index("    letter")
    module.write_text(text[:start] + text[end:], encoding="utf-8")
    build.pull(shapes)
    assert source(shapes, 5).strip() == "#| export" and "class Square(Square)" in source(shapes, 7)
    assert build.drift(shapes) == []
    text = module.read_text(encoding="utf-8")
    start, end = text.index("# Comment above the class"), text.index("def double")
    module.write_text(text[:start] + text[end:], encoding="utf-8")
    build.pull(shapes)
    assert all("class Square" not in source(shapes, cell) for cell in (2, 5, 7))
    assert build.drift(shapes) == []


def test_pull_refuses_to_leave_the_first_cell_of_a_class_empty(shapes):
    module = shapes / "minillm" / "nn" / "shapes.py"
    text = module.read_text(encoding="utf-8")
    start, end = text.index('    """A square'), text.index("    # Comment above the area")
    module.write_text(text[:start] + text[end:], encoding="utf-8")
    before = source(shapes, 2)
    with pytest.raises(build.BuildError, match="Square: nothing is left for cell 2"):
        build.pull(shapes)
    assert source(shapes, 2) == before


FIRST = "class A:\n    x = 1\n\n    def f(self):\n        return 1"
WRONG = {  # what is wrong: (cells after the first, the cell that is named, the rule)
    "another method of the name": (["class A(A):\n    def f(self): pass"], 2, "f is defined in an"),
    "attribute again": (["class A(A):\n    x = 2"], 2, "x is defined in an earlier cell of A"),
    "method over attribute": (["class A(A):\n    @property\n    def x(self): pass"], 2, "x is def"),
    "over an earlier reopening": (
        ["class A(A):\n    def g(self): pass", "class A(A):\n    g = 1"],
        3,
        "g is defined in an earlier cell of A: nothing is overridden",
    ),
    "super": (["class A(A):\n    def g(self): super().g()"], 2, r"super\(\) means another class"),
    "class cell": (["class A(A):\n    def g(self): return __class__"], 2, "__class__ means"),
    "docstring": (['class A(A):\n    """Doc."""'], 2, "the docstring stands in the first cell"),
    "nothing": (["class A(A):\n    pass"], 2, "not `pass`"),
    "statement": (["class A(A):\n    if 1:\n        y = 2"], 2, "not `if 1:`"),
    "nested class": (["class A(A):\n    class B: pass"], 2, "not `class B:`"),
    "base": (["class A(A, object):\n    y = 1"], 2, "its head has no other base"),
    "parameters": (["class A(A[int]):\n    y = 1"], 2, "its head has no other base"),
    "mixture": (["class A(mixed(A)):\n    y = 1"], 2, "its head has no other base"),
    "base in front": (["class A(object, A):\n    y = 1"], 2, "its head has no other base"),
    "keyword": (["class A(A, metaclass=type):\n    y = 1"], 2, "no keyword"),
    "decorated": (["@print\nclass A(A):\n    y = 1"], 2, "no decorator"),
    "comment in the head": (["class A(A):  # more\n    y = 1"], 2, "no comment"),
    "comment above": (["# More.\nclass A(A):\n    y = 1"], 2, "a comment above it would stand"),
    "comment at the end": (["class A(A):\n    y = 1\n    # end"], 2, "a comment after the last"),
    "one line": (["class A(A): y = 1"], 2, "its head"),
    "slots": (["class A(A):\n    __slots__ = ()"], 2, "__slots__ must stand in the first cell"),
    "equality": (["class A(A):\n    def __eq__(self, other): pass"], 2, "__eq__ must stand"),
    "unknown class": (
        ["class B(B):\n    y = 1"],
        2,
        "no earlier marked cell of this module defines B",
    ),
    "heir": (["class B(A):\n    pass", "class A(A):\n    y = 1"], 3, r"B \(cell 2\) uses A before"),
    "instance": (["B = A()", "class A(A):\n    y = 1"], 3, r"B \(cell 2\) uses A before it is who"),
    "default between": (
        ["def h(a=A()):\n    pass", "class A(A):\n    y = 1"],
        3,
        r"h \(cell 2\) uses A",
    ),
    "value": (["Y = 1", "class A(A):\n    y = Y"], 3, "Y is needed as the class is made"),
    "default": (["Y = 1", "class A(A):\n    def g(self, y=Y): pass"], 3, "Y is needed"),
    "keyword default": (["Y = 1", "class A(A):\n    def g(self, *, y=Y): pass"], 3, "Y is needed"),
    "decorator": (
        ["def d(f):\n    return f", "class A(A):\n    @d\n    def g(self): pass"],
        3,
        "d is needed as the class is made",
    ),
    "annotation": (["class A(A):\n    def g(self, a: A): pass"], 2, "A is needed as the class"),
    "result": (["class A(A):\n    def g(self) -> A: pass"], 2, "A is needed as the class is made"),
    "attribute of the first cell": (["class A(A):\n    y = x"], 2, "x, read as the class is made"),
}


def reopening(root: Path, first: str, later: list[str]) -> None:
    cells = [("code", "#| default_exp a"), ("code", '#| export\n"""A."""\n\n' + first)]
    cells += [("code", text if text[:1] == "%" else "#| export\n" + text) for text in later]
    write_notebook(root / "notebooks" / "01_toy.ipynb", cells)
    for name in ("toy", "other"):  # the page no longer builds them
        (root / "minillm" / f"{name}.py").unlink(missing_ok=True)


@pytest.mark.parametrize("name", WRONG)
def test_a_class_reopened_wrongly_is_refused(root, name, capsys):
    later, cell, message = WRONG[name]
    reopening(root, FIRST, [])
    assert build.build(root) == ["a"]
    before = (root / "minillm" / "a.py").read_text(encoding="utf-8")
    reopening(root, FIRST, later)
    with pytest.raises(
        build.BuildError, match=rf"^01_toy\.ipynb, cell {cell}: class \w.*{message}"
    ):
        build.build(root)
    assert (root / "minillm" / "a.py").read_text(encoding="utf-8") == before
    for command in ("build", "check", "pull"):
        assert build.main([command, "--root", str(root)]) == 1
        assert f"error: 01_toy.ipynb, cell {cell}: class" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (
            "import dataclasses\n\n\n@dataclasses.dataclass(frozen=True)\n" + FIRST,
            "@dataclasses.da",
        ),
        ("@total_ordering\n" + FIRST, "@total_ordering would see the first cell of A only"),
        (FIRST.replace("A:", "A(NamedTuple):"), "NamedTuple would see"),
        (FIRST.replace("A:", "A(typing.Protocol):"), "typing.Protocol would see"),
        (FIRST.replace("A:", "A(Protocol[T]):"), r"Protocol\[T\] would see"),
        (FIRST.replace("A:", "A(IntEnum):"), "IntEnum would see"),
        (FIRST.replace("A:", "A(metaclass=M):"), "metaclass=... would see"),
        (FIRST.replace("x = 1", "__slots__ = ()"), "__slots__ would see"),
        (FIRST.replace("def f(self", "def __init_subclass__(cls"), "__init_subclass__ would see"),
        ("class A:\n    pass", "needs a docstring, a method or an attribute"),
        ("class A: ...", "needs a docstring, a method or an attribute"),
        (FIRST + "\n    # end", "a comment after the last method belongs to none"),
        (
            "if True:\n    class A:\n        x = 1",
            "no earlier marked cell of this module defines A",
        ),
    ],
)
def test_a_class_that_cannot_be_reopened_is_refused(root, first, message):
    reopening(root, first, ["class A(A):\n    y = 1"])
    with pytest.raises(
        build.BuildError, match=r"01_toy\.ipynb, cell 2: class A\(A\): .*" + message
    ):
        build.build(root)


def test_an_heir_in_an_unmarked_cell_between_is_refused(root):
    heir = "%matplotlib inline\nif True:\n    class B(list, A):\n        pass"
    reopening(root, FIRST, [heir, "class A(A):\n    y = 1"])
    with pytest.raises(build.BuildError, match=r"cell 3: class A\(A\): B \(cell 2\) uses A before"):
        build.build(root)
    reopening(root, FIRST, ["class A(A):\n    y = 1", heir])  # after the last cell of the class
    assert build.build(root) == ["a"]


def test_what_a_reopening_may_read(root):
    cells = [
        "def late(x: int) -> int:\n    return x",
        "%%time\nA().f()",
        "class A(A):\n    y: int = 2\n    z = y + 1\n\n"
        '    def g(self, a: "A", b: int = y) -> "A":\n        return late(A(), LATER)\n\n'
        "    @property\n    def h(self) -> int:\n        return lambda: A",
        "LATER = 1\nB = A()",
    ]
    reopening(root, FIRST, cells)
    assert build.build(root) == ["a"]
    text = (root / "minillm" / "a.py").read_text(encoding="utf-8")
    assert '__all__ = ["LATER", "A", "B", "late"]' in text and text.count("class A") == 1
    reopening(root, "from __future__ import annotations\n\n\n" + FIRST, ["class A(A):\n    b: A"])
    assert build.build(root, remove=True) == ["a"]


def test_sync_notices_an_unsaved_cell_of_a_class(shapes, monkeypatch, capsys):
    monkeypatch.setattr(build, "ROOT", shapes)
    monkeypatch.delenv("PYTEST_VERSION")
    saved = [text for _, text in SHAPES if text.startswith("#| export")]
    for edited in (2, 5, 7):
        unsaved = SHAPES[edited][1].replace("self.side", "self.edge").replace("##", "#")
        shell = FakeShell(*saved, unsaved, SHAPES[4][1])
        monkeypatch.setattr(build, "get_ipython", lambda shell=shell: shell, raising=False)
        build.sync("01_toy.ipynb")
        assert "unsaved edits: save the notebook" in capsys.readouterr().out
    stale = "#| export\nclass Square(Square):\n    def gone(self) -> None:\n        pass"
    shell = FakeShell(*saved[:3], saved[2].replace("side", "edge"), stale, *saved)
    monkeypatch.setattr(build, "get_ipython", lambda: shell, raising=False)
    build.sync("01_toy.ipynb")
    assert "unsaved" not in capsys.readouterr().out


def test_notebooks_stand_on_three_shelves(root, monkeypatch, capsys):
    for folder in ("deeper", "beyond", "solutions", ".ipynb_checkpoints"):
        (root / "notebooks" / folder).mkdir()
        cells = [("code", f'#| export {folder.strip(".")}.page\n"""A page."""\n\nX = 1')]
        write_notebook(root / "notebooks" / folder / "03_page.ipynb", cells)
    (root / "notebooks" / "deeper" / ".ipynb_checkpoints").mkdir()
    shutil.copy(
        root / "notebooks" / "01_toy.ipynb", root / "notebooks" / "deeper" / ".ipynb_checkpoints"
    )
    assert build.build(root) == ["deeper.page", "beyond.page"]
    module = root / "minillm" / "deeper" / "page.py"
    text = module.read_text(encoding="utf-8")
    assert "# Built from notebooks/deeper/03_page.ipynb: edit there, then make build." in text
    edit(module, "X = 1", "X = 2")
    assert "differs from notebooks/deeper/03_page.ipynb in X: " in build.drift(root)[0]
    assert build.pull(root) == ["deeper/03_page.ipynb"]
    assert build.drift(root) == []
    monkeypatch.setattr(build, "ROOT", root)
    build.sync("deeper/03_page.ipynb")
    assert "minillm/deeper/page.py is what this notebook says" in capsys.readouterr().out
    edit(root / "notebooks" / "deeper" / "03_page.ipynb", "X = 2", "Y = (")
    with pytest.raises(build.BuildError, match=r"^deeper/03_page\.ipynb, cell 0, line 3"):
        build.build(root)


def test_build_and_pull_take_names(root):
    (root / "notebooks" / "deeper").mkdir()
    path = root / "notebooks" / "deeper" / "02_page.ipynb"
    write_notebook(path, [("code", '#| export page\n"""A page."""\n\nX = 1')])
    for name in ("02_page.ipynb", "deeper/02_page.ipynb", "notebooks/deeper/02_page.ipynb", path):
        shutil.rmtree(root / "minillm")
        assert build.build(root, [str(name)]) == ["page"]
    assert build.build(root, ["01_toy.ipynb", "notebooks/01_toy.ipynb"]) == ["toy", "other"]
    with pytest.raises(build.BuildError, match=r"no notebook deeper/01_toy\.ipynb"):
        build.build(root, ["deeper/01_toy.ipynb"])
    edit(root / "minillm" / "page.py", "X = 1", "X = 2")
    assert build.pull(root, ["toy"]) == []
    assert build.pull(root, ["minillm/page.py"]) == ["deeper/02_page.ipynb"]
    with pytest.raises(build.BuildError, match=r"no notebook builds minillm/nn/page\.py"):
        build.pull(root, ["nn.page"])


COMMENTS = [
    (
        "code",
        '#| export toy\n"""Toy."""\n\nimport cmath  # noqa: F401\n\n# roots\nimport math\n'
        "from pathlib import (\n    Path,  # for paths\n    PurePath,\n)",
    ),
    ("code", "#| export toy\n# arrays\nimport array\n\nX = math.sqrt(4), Path, PurePath, array"),
]


@pytest.fixture
def comments(root):
    """The small repository, its imports with comments."""
    write_notebook(root / "notebooks" / "01_toy.ipynb", COMMENTS)
    (root / "minillm" / "other.py").unlink()
    assert build.build(root, remove=True) == ["toy"]
    return root


def test_build_carries_comments_of_imports(comments):
    text = (comments / "minillm" / "toy.py").read_text(encoding="utf-8")
    assert text == (
        '"""Toy."""\n\n# Built from notebooks/01_toy.ipynb: edit there, then make build.\n\n'
        "# arrays\nimport array\nimport cmath  # noqa: F401\n\n# roots\nimport math\n"
        "from pathlib import (\n    Path,  # for paths\n    PurePath,\n)\n\n"
        '__all__ = ["X"]\n\nX = math.sqrt(4), Path, PurePath, array\n'
    )


IMPORT_EDITS = {
    "comment above": ("# roots\n", "# square roots\n", 0, "# square roots\nimport math"),
    "comment above the first": ("# arrays\n", "# lists\n", 1, "# lists\nimport array"),
    "no comment": ("# arrays\n", "", 1, "#| export toy\nimport array"),
    "noqa": ("import cmath  # noqa: F401", "import cmath  # noqa", 0, "import cmath  # noqa\n"),
    "inside": ("# for paths", "# for all paths", 0, "Path,  # for all paths"),
    "new import with a comment": (
        "import cmath",
        "# new\nimport bisect  # noqa: F401\nimport cmath",
        0,
        "# new\nimport bisect  # noqa: F401",
    ),
    "import without its comment": ("import cmath  # noqa: F401\n", "", 0, "# roots\nimport math"),
    "docstring with a comment above": ('"""Toy', '# Above.\n"""Toy', 0, '# Above.\n"""Toy."""'),
}


@pytest.mark.parametrize("name", IMPORT_EDITS)
def test_pull_carries_comments_of_imports(comments, name):
    old, new, cell, expected = IMPORT_EDITS[name]
    module = comments / "minillm" / "toy.py"
    edit(module, old, new)
    wanted = module.read_text(encoding="utf-8")
    build.pull(comments)
    assert expected in source(comments, cell)
    assert build.drift(comments) == []
    assert module.read_text(encoding="utf-8").replace("\n\n", "\n") == wanted.replace("\n\n", "\n")


NOT_CARRIED = {  # edits that no cell can hold: (text, replacement, line that is named)
    "name in __all__": ('__all__ = ["X"]', '__all__ = ["X", "array"]', 16),
    "no __all__": ('__all__ = ["X"]\n', "", 1),
    "comment above __all__": ("__all__ =", "# names\n__all__ =", 16),
    "import below": ("X = math", "import bisect\n\nX = math", 18),
}


@pytest.mark.parametrize("name", NOT_CARRIED)
def test_pull_refuses_what_no_cell_can_hold(comments, name):
    old, new, line = NOT_CARRIED[name]
    module = comments / "minillm" / "toy.py"
    edit(module, old, new)
    wanted, before = module.read_text(encoding="utf-8"), source(comments, 0)
    with pytest.raises(build.BuildError, match=rf"minillm/toy\.py, line {line}: "):
        build.pull(comments)
    assert (module.read_text(encoding="utf-8"), source(comments, 0)) == (wanted, before)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n "cells": [\n<<<<<<< HEAD\n', "line 3: <<<<<<< is left of a merge"),
        ('{\n "cells": [],\n>>>>>>> theirs\n}', "line 3: >>>>>>> is left of a merge"),
        ('{\n "cells": [\n,]}', "line 3: not JSON: Expecting value"),
        ("", "line 1: not JSON: Expecting value"),
        ("[" * 100_000, "not a notebook: nested too deeply"),
        ("[1]", "line 1: not a notebook: no list of cells"),
        ('{"worksheets": []}', "line 1: not a notebook: no list of cells"),
        ('{"cells": [5]}', "cell 0: no cell of a notebook: 5"),
        ('{"cells": [{"cell_type": "code"}]}', "cell 0: no cell of a notebook: {'cell_type'"),
        ('{"cells": [{"cell_type": 1, "source": [""]}]}', "cell 0: no cell of a notebook"),
        ('{"cells": [{"cell_type": "code", "source": [1]}]}', "cell 0: no cell of a notebook"),
        (b'{"cells": "\xff"}', "not UTF-8 at byte 11"),
    ],
)
def test_a_file_that_is_no_notebook_is_named(root, capsys, text, message):
    data = text if isinstance(text, bytes) else text.encode()
    (root / "notebooks" / "02_bad.ipynb").write_bytes(data)
    for command in ("build", "pull", "check"):
        assert build.main([command, "--root", str(root)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: 02_bad.ipynb") and message in error


def test_merge_marks_in_a_cell_and_in_a_module_are_named(root):
    edit(root / "minillm" / "toy.py", "class Pair", "<<<<<<< HEAD\nclass Pair")
    for command in (build.drift, build.pull):
        with pytest.raises(build.BuildError, match=r"minillm/toy\.py, line 23: .*'<<<<<<< HEAD'"):
            command(root)
    edit(root / "notebooks" / "01_toy.ipynb", "class Pair", "<<<<<<< HEAD\\nclass Pair")
    for command in (build.drift, build.pull, build.build):
        with pytest.raises(build.BuildError, match=r"cell 4, line 7: .*'<<<<<<< HEAD'"):
            command(root)


def test_a_trailing_comment_is_refused_where_pull_would_lose_its_place(root):
    edit(root / "notebooks" / "01_toy.ipynb", "return a + b", "return a + b\\n# adds")
    with pytest.raises(build.BuildError, match=r"cell 2: a comment after the last.*'# adds'"):
        build.build(root)


def test_check_names_what_differs(shapes):
    module = shapes / "minillm" / "nn" / "shapes.py"
    edit(module, "cls(x)", "cls(2 * x)")
    assert "01_toy.ipynb in Square.unit: " in build.drift(shapes)[0]
    for old, new in [("SIDE = 2", "SIDE = 3"), ("sides:", "edges:"), ("2 * x", "3 * x")]:
        edit(module, old, new)
    assert "01_toy.ipynb in SIDE, Square.sides, Square.unit, ...: " in build.drift(shapes)[0]


def test_files_are_written_as_on_any_system(root, monkeypatch):
    """Encodings are named, line ends are the same, nothing is called that Windows lacks."""
    strict = [sys.executable, "-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    edit(root / "notebooks" / "01_toy.ipynb", "The sum.", "The sum: 和.")
    script = "import os, runpy, sys; del os.fork, os.fchmod, os.getuid\n"
    script += "sys.argv = sys.argv[1:]; sys.path[0] = os.path.dirname(sys.argv[0])\n"
    script += "runpy.run_path(sys.argv[0], run_name='__main__')"
    tool, where = str(ROOT / "tools" / "build.py"), ["--root", str(root)]
    command = [*strict, "-c", script, tool, "build", *where]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and done.stdout == "build: toy\n", done.stderr
    text = (root / "minillm" / "toy.py").read_bytes()
    assert "The sum: 和.".encode() in text and b"\r" not in text
    check = [*strict, tool, "check", *where]
    assert subprocess.run(check, capture_output=True).returncode == 0
    edit(root / "notebooks" / "01_toy.ipynb", "和", "差")

    def in_use(*paths: object) -> None:
        raise PermissionError(13, "The process cannot access the file")

    monkeypatch.setattr(os, "replace", in_use)
    with pytest.raises(build.BuildError, match=r"toy\.py could not be written: .*cannot access"):
        build.build(root)
    assert (root / "minillm" / "toy.py").read_bytes() == text
    assert {p.name for p in (root / "minillm").iterdir()} == {"toy.py", "other.py"}


NAMES = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
BODIES = [
    "    def {name}(self, x: int = {n}) -> int:\n        return x + {n}",
    "    # Comment above {name}.\n    @property\n    def {name}(self) -> int:\n        return {n}",
    "    {name} = {n}",
    "    {name}: int = {n}  # a number",
    "    @staticmethod\n    def {name}() -> str:\n"
    '        return """\n{n}\n\n    # no comment\nclass A(A):\n"""',
    "    def {name}(self) -> object:\n        class Inner:\n            n = {n}\n\n"
    "        def inner() -> type:\n            return Inner\n\n        return inner",
    "    async def {name}(self) -> None:\n        pass\n        # ends with {n}",
    "    @property\n    def {name}(self) -> int:\n        return 1\n\n"
    "    @{name}.setter\n    def {name}(self, value: int) -> None:\n        self.n = value",
]
member = st.tuples(st.integers(0, len(BODIES) - 1), st.integers(0, 9))
members = st.dictionaries(st.sampled_from(NAMES), member, min_size=1, max_size=5)


def bodies(chosen: dict[str, tuple[int, int]]) -> list[str]:
    return [BODIES[kind].format(name=name, n=n) for name, (kind, n) in chosen.items()]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(before=members, after=members, cuts=st.lists(st.booleans(), min_size=5, max_size=5))
@example({"alpha": (0, 0), "beta": (0, 0)}, {"alpha": (7, 0)}, [False, True, False, False, False])
def test_any_class_cut_anywhere_comes_back_as_it_was_edited(tmp_path_factory, before, after, cuts):
    """Build is the whole class; after any edit of the module, pull makes cells that build it."""
    root = tmp_path_factory.mktemp("round")
    (root / "notebooks").mkdir()
    shutil.copy(ROOT / "pyproject.toml", root)
    cells = [("code", '#| export nn.a\n"""A."""'), ("code", "#| export nn.a\nclass A:\n")]
    cells[1] = ("code", '#| export nn.a\nclass A:\n    """Doc."""\n\n')
    for new_cell, text in zip(cuts, bodies(before), strict=False):
        if new_cell:
            cells += [("markdown", "More."), ("code", "#| export nn.a\nclass A(A):\n")]
        cells[-1] = ("code", cells[-1][1] + text + "\n\n")
    cells.append(("code", "#| export nn.a\nB = A"))
    write_notebook(root / "notebooks" / "01_toy.ipynb", cells)

    def whole(texts: list[str]) -> str:
        head = '"""A."""\n\n' + build.HEADER.format("01_toy.ipynb")
        head += '\n\n__all__ = ["A", "B"]\n\nclass A:\n    """Doc."""\n\n'
        return build.ruff(head + "\n\n".join(texts) + "\n\nB = A\n", "nn.a", root)

    def lines(text: str) -> list[str]:  # blank lines between attributes are not told apart
        return [line for line in text.splitlines() if line]

    build.build(root)
    module = root / "minillm" / "nn" / "a.py"
    assert lines(module.read_text(encoding="utf-8")) == lines(whole(bodies(before)))
    module.write_text(whole(bodies(after)), encoding="utf-8")
    build.pull(root)
    assert lines(module.read_text(encoding="utf-8")) == lines(whole(bodies(after)))
    assert build.drift(root) == [] and build.pull(root) == [] and build.build(root) == []
    namespace: dict = {}
    for i in range(1, len(cells)):
        exec(source(root, i) if cells[i][0] == "code" else "", namespace)
    assert set(after) <= set(dir(namespace["A"]))
