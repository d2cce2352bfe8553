"""A page that went through other people's tools: each state of it through each of our commands.

What the tools write was looked at once, with black 26.10.1, autopep8 2.3.2, ruff 0.17.6,
nbstripout 0.9.1 and jupytext 1.19.6 on pages 01 to 10; here it is imitated, ruff's by ruff. The
verdict is that of the page before the tool, or one sentence that names the mend; nothing that a
learner wrote is lost.
"""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest
from ruff import find_ruff_bin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import build  # noqa: E402
import cells  # noqa: E402
import colab  # noqa: E402
import student  # noqa: E402
import student_class as teacher  # noqa: E402

PAGE, SOFTMAX, MASK = "03_attention.ipynb", "c024", "c054"
TEST = "test_attention.py"


# ---- what the tools write ------------------------------------------------------------------------


def each(change, kinds=("code", "markdown")):
    """A state in which `change` has worked on the cells of these kinds, with their numbers."""

    def tool(data: dict) -> dict:
        for i, cell in enumerate(data["cells"]):
            if cell["cell_type"] in kinds:
                change(i, cell)
        return data

    return tool


def formatted(*options: str, mark: str = "#| "):
    """ruff with these settings; it leaves `#|`, which black and autopep8 pull apart."""

    def tool(data: dict) -> dict:
        command = [find_ruff_bin(), "format", "--isolated", "--stdin-filename", "a.ipynb"]
        command += [part for option in options for part in ("--config", option)]
        done = subprocess.run(
            [*command, "-"], input=json.dumps(data), capture_output=True, encoding="utf-8"
        )
        assert done.returncode == 0, done.stderr
        data = json.loads(done.stdout)
        return each(lambda _, c: c.update(source=cells.text_of(c).replace("#| ", mark)))(data)

    return tool


def autopep8(data: dict) -> dict:
    """Imports one by one, and comments above the lines that they ended."""

    def change(_: int, cell: dict) -> None:
        lines = cells.text_of(cell).split("\n")
        for node in reversed(ast.parse("\n".join(lines)).body):
            line = lines[node.lineno - 1]
            code = line.encode()[: node.end_col_offset].decode()
            comment = line.removeprefix(code).strip()
            if node.lineno == node.end_lineno and comment.startswith("#"):
                lines[node.lineno - 1 : node.lineno] = [comment, code]
        cell["source"] = "\n".join(lines)

    return each(change, ("code",))(formatted("line-length = 79", mark="# | ")(data))


def without_ids(data: dict) -> dict:
    """Format 4.4, or Colab."""
    data |= {"nbformat_minor": 4}
    data["metadata"] |= {"colab": {"provenance": []}}
    return each(lambda _, c: c.pop("id"))(data)


def other_order(_: int, cell: dict) -> None:
    """VS Code's keys, and its note on the language."""
    cell["metadata"] = {"vscode": {"languageId": "python"}}
    found = sorted(cell.items(), reverse=True)
    cell.clear()
    cell.update(found)


def injected(data: dict) -> dict:
    """What Colab, Kaggle and others put in front."""
    cell = {"cell_type": "markdown", "id": "view-in-github", "metadata": {}, "source": "[badge](x)"}
    return data | {"cells": [cell, *data["cells"]]}


def new_id(i: int, cell: dict) -> None:
    cell["id"] = sha256(f"{i}".encode()).hexdigest()[:8]


STATES = {
    "black": formatted("line-length = 88", mark="# | "),
    "autopep8": autopep8,
    "ruff": formatted("line-length = 60", "format.quote-style = 'single'"),
    "no space in the mark": each(
        lambda _, c: c.update(source=cells.text_of(c).replace("#| ", "#|")), ("code",)
    ),
    "without ids": without_ids,
    "renumbered by nbstripout": each(lambda i, c: c.update(id=str(i))),
    "ids of jupytext": each(new_id),
    "black, then jupytext": lambda data: each(new_id)(
        formatted("line-length = 88", mark="# | ")(data)
    ),
    "keys of VS Code": each(other_order),
    "source as a string": each(lambda _, c: c.update(source=cells.text_of(c))),
    "Windows' line ends": each(
        lambda _, c: c.update(source=cells.text_of(c).replace("\n", "\r\n"))
    ),
    "an injected cell": injected,
}


# ---- a course of one page, and its copies --------------------------------------------------------


def page_of(root: Path) -> Path:
    return root / "notebooks" / PAGE


def write(path: Path, data: dict) -> None:
    path.write_text(student.dumped(data), encoding="utf-8")


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("course") / "course"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(student, "TESTS", {"03": [TEST]})
        patch.setattr(student, "LATER", {})
        patch.setattr(teacher, "judge", lambda *a: teacher.Judged({}, {}))
        for name in [*student.WHOLE[1:], "notebooks/GLOSSARY.md", "notebooks/conftest.py"]:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        shutil.copytree(ROOT / "tools" / "student", root / "tools" / "student")
        for name in student.TOOLS:
            shutil.copy(ROOT / "tools" / name, root / "tools")
        for name in ("assets/none", "minillm/__init__.py", f"tests/{TEST}"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        shutil.copy(ROOT / "notebooks" / PAGE, page_of(root))
        build.build(root)
        yield root


@pytest.fixture(scope="module")
def newer(course) -> Path:
    """The course with a word less in a docstring, and another in a text that comes late."""
    root = Path(shutil.copytree(course, course.with_name("newer")))
    data = build.load(page_of(root), PAGE)
    late = [c for c in data["cells"] if c["cell_type"] == "markdown"][-1]
    late["source"] = cells.text_of(late) + "\n\nNewer."
    for cell in data["cells"]:
        if cell["id"] == SOFTMAX:
            cell["source"] = cells.text_of(cell).replace("in at least float32", "in float32")
    write(page_of(root), data)
    build.build(root)
    return root


@pytest.fixture(scope="module")
def copies(course) -> dict[str, Path]:
    """A learner's copies: blank, filled in, and one with work of many kinds."""
    found = {name: course.with_name(name) for name in ("blank", "filled", "edited")}
    for root in found.values():
        student.make(course, root)
    student.fill(student.Copy(found["filled"]), course, ["03"])
    data = build.load(page_of(found["edited"]), PAGE)
    data["cells"] = [c for c in data["cells"] if c["id"] != MASK]
    text = [c for c in data["cells"] if c["cell_type"] == "markdown"]
    for cell in text[:2] + text[5:7]:
        cell["source"] = cells.text_of(cell) + "\n\nMy remark."
    softmax = next(c for c in data["cells"] if c["id"] == SOFTMAX)
    softmax["source"] = cells.text_of(softmax).replace("raise NotWritten", "return print", 1)
    note = {"cell_type": "markdown", "id": "my-note", "metadata": {}, "source": "My own note."}
    data["cells"].insert(-1, note)
    write(page_of(found["edited"]), data)
    return found


# ---- the commands on a copy, and what they say ---------------------------------------------------


def said_of(data: dict) -> list[str]:
    """What the cells of a page say, in their order, but for one that a program has put in."""
    return [cells.digest(c) for c in data["cells"] if "[badge]" not in c["source"]]


def modules(root: Path) -> list[str]:
    owned = build.owners(root)
    return [cells.meaning(build.read(build.module_path(root, name))) for name in owned]


def without_remark(lines: list[str]) -> list[str]:
    """All but the one sentence on ids."""
    return [line for line in lines if "cell ids" not in line]


def grade(root: Path, course: Path, newer: Path) -> list:
    copy = student.Copy(root)
    not_built = student.rebuild(copy, [PAGE])
    said = without_remark(student.remarks(copy, "03"))
    return [not_built, said, student.written(copy), student.places(copy), modules(root)]


def fill(root: Path, course: Path, newer: Path) -> list:
    said = student.fill(student.Copy(root), course, ["03"])
    again = student.fill(student.Copy(root), course, ["03"])
    return [said, again, said_of(build.load(page_of(root), PAGE)), modules(root)]


def update(root: Path, course: Path, newer: Path) -> list:
    said = without_remark(student.update(student.Copy(root), newer))
    again = without_remark(student.update(student.Copy(root), newer))
    return [said, again, said_of(build.load(page_of(root), PAGE)), modules(root)]


def hand_in(root: Path, course: Path, newer: Path) -> list:
    grader = object.__new__(teacher.Grader)
    grader.page, grader.chapter, grader.box = PAGE, "03", teacher.Box("none", 1, 1)
    grader.seed, grader.blank, grader.folder = 0, root.with_name("blank"), root.parent / "graded"
    grader.folder.mkdir()
    grader.modules = set(build.Notebook(course, PAGE).marked)
    grader.course = teacher.Judged({}, {})
    row = grader.row(page_of(root))
    shutil.rmtree(grader.folder)
    return [row["verdict"], row["written"], row["first_message"]]


COMMANDS = {"grade": grade, "fill": fill, "update": update, "hand-in": hand_in}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["blank", "filled", "edited"])
def test_the_verdict_is_that_of_the_page_before_the_tool(copies, course, newer, kind, command):
    wrong = {}

    def verdict(tool) -> list:
        root = Path(shutil.copytree(copies[kind], copies[kind].with_name("tried")))
        try:
            data = tool(build.load(page_of(root), PAGE))
            write(page_of(root), data)
            own = said_of(data)
            found = COMMANDS[command](root, course, newer)
            kept = {*said_of(build.load(page_of(root), PAGE))}
            lost = [one for one in own if one not in kept]
            return [*found, lost]
        finally:
            shutil.rmtree(root)

    wanted = verdict(lambda data: data)
    for name, tool in STATES.items():
        found = verdict(tool)
        if found != wanted:
            wrong[name] = [(a, b) for a, b in zip(wanted, found, strict=True) if a != b]
    assert wrong == {}


# ---- the same in the course ----------------------------------------------------------------------


def names_to_write(root: Path, _: Path) -> list:
    found = student.blank_pages(root, deeper=False)
    return [found[1], [said_of(page) for page in found[0].values()]]


def check(root: Path, _: Path) -> list:
    """A formatter's work is an edit of the page, and `make build` carries it over."""
    mends = [line.rpartition(": ")[2] for line in build.drift(root)]
    assert mends in ([], ["the notebook was edited, run make build"])
    return []


def carried(root: Path, _: Path) -> list:
    build.build(root)
    return [build.drift(root), modules(root), said_of(build.load(page_of(root), PAGE))]


def pulled(root: Path, _: Path) -> list:
    """An edit of the module, into the page; where both were edited, once the module is named."""
    (name,) = build.owners(root)
    path = build.module_path(root, name)
    path.write_text(build.read(path).replace("at least float32", "float32"), encoding="utf-8")
    try:
        build.pull(root)
    except build.BuildError as error:
        assert f"both were edited: `python tools/build.py pull {build.shown(name)}`" in str(error)
        build.pull(root, [name])
    return [modules(root), said_of(build.load(page_of(root), PAGE))]


def labelled(root: Path, _: Path) -> int:
    site = pages_of_the_site()
    return site.marked(site.read_notebook(page_of(root)), "../")


@cache
def pages_of_the_site():
    folder = ROOT / "tools" / "site"
    spec = importlib.util.spec_from_file_location("site_pages", folder / "pages.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        spec.loader.exec_module(module)
    return module


def class_zip(root: Path, target: Path) -> str:
    return teacher.class_zip(root, target / "class.zip", ["03"]).partition(", ")[2]


COURSE_COMMANDS = {
    "check": check,
    "build": carried,
    "pull": pulled,
    "make": names_to_write,
    "class": class_zip,
    "site": labelled,
}


@pytest.mark.parametrize("command", COURSE_COMMANDS)
def test_a_page_of_the_course_says_the_same_after_the_tool(course, tmp_path, command):
    wrong = {}

    def verdict(tool) -> object:
        root = Path(shutil.copytree(course, tmp_path / "tried"))
        try:
            write(page_of(root), tool(build.load(page_of(root), PAGE)))
            return COURSE_COMMANDS[command](root, tmp_path)
        except build.BuildError as error:
            return str(error)
        finally:
            shutil.rmtree(root)

    wanted = verdict(lambda data: data)
    for name, tool in STATES.items():
        found = verdict(tool)
        if name == "without ids" and command in ("make", "class", "site"):
            assert f"{PAGE}, cell 0: no id, as some" in found
            assert f"notebooks/{PAGE}` gives it one" in found and "tools/execute.py" in found
        elif command == "make" and name in BY_OTHER_IDS:  # the cells that hold them are the same
            assert [*found[0][PAGE].values()] == [*wanted[0][PAGE].values()]
        elif found != wanted:
            wrong[name] = (wanted, found)
    assert wrong == {}


BY_OTHER_IDS = ["renumbered by nbstripout", "ids of jupytext", "black, then jupytext"]


# ---- what no tool can mend for its owner ---------------------------------------------------------


def magics(data: dict) -> dict:
    cell = next(c for c in data["cells"] if c.get("id") == SOFTMAX)
    cell["source"] = "%%time\n" + cells.text_of(cell)
    return data


def another(data: dict) -> dict:
    """Another page under the name of this one."""
    found = [c for c in data["cells"] if not cells.exported(c)][1:4]
    found[0] |= {"cell_type": "markdown", "source": "# My diary"}
    return each(new_id)(data | {"cells": found})


def format_3(data: dict) -> dict:
    return {"nbformat": 3, "worksheets": [{"cells": data["cells"]}], "metadata": {}}


@pytest.mark.parametrize("command", ["grade", "fill", "update"])
@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (magics, "magics cannot be exported"),
        (another, f"notebooks/{PAGE} is no longer the course's page: it has another title and no"),
        (format_3, "is saved in notebook format 3, and the course reads format 4: open it in"),
    ],
)
def test_what_is_no_page_of_the_course_is_named_and_stays(
    copies, course, newer, tmp_path, command, tool, message
):
    root = Path(shutil.copytree(copies["edited"], tmp_path / "tried"))
    write(page_of(root), tool(build.load(page_of(root), PAGE)))
    before = page_of(root).read_bytes()
    try:
        said = str(COMMANDS[command](root, course, newer))
    except (student.StudentError, build.BuildError) as error:
        said = str(error)
    assert message in said
    if tool is not magics:  # else it is the course's page, and the rest of it is filled
        assert page_of(root).read_bytes() == before


@pytest.mark.parametrize("tool", [format_3, magics])
def test_the_course_itself_is_refused_with_a_sentence(course, tmp_path, tool, capsys):
    root = Path(shutil.copytree(course, tmp_path / "tried"))
    write(page_of(root), tool(build.load(page_of(root), PAGE)))
    module = {path: path.read_bytes() for path in (root / "minillm").rglob("*.py")}
    wanted = "notebook format 3" if tool is format_3 else "magics cannot be exported"
    for command in ("check", "build", "pull"):
        assert build.main([command, "--root", str(root)]) == 1
        assert wanted in capsys.readouterr().err
    with pytest.raises((student.StudentError, build.BuildError), match=wanted):
        student.make(root, tmp_path / "copy")
    assert module == {path: path.read_bytes() for path in (root / "minillm").rglob("*.py")}


def test_a_page_of_the_course_without_ids_is_named_by_site_and_colab(tmp_path, course):
    path = tmp_path / PAGE
    write(path, without_ids(build.load(page_of(course), PAGE)))
    for read in (lambda: pages_of_the_site().read_notebook(path), lambda: colab.injected(path, "")):
        with pytest.raises(build.BuildError, match=r"cell 0: no id, as some .*execute\.py"):
            read()
