"""The copy to write yourself: blank, filled, judged, brought up to date, and never overwritten."""

import json
import os
import re
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
from cells import exported, text_of  # noqa: E402

CHAPTERS = sorted(student.TESTS)


def stripped(path: Path) -> str:
    """A page of the course without its outputs."""
    data = build.load(path, path.name)
    for cell in data["cells"]:
        blanks.drop_outputs(cell)
    return student.dumped(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A copy that nobody has written in."""
    folder = tmp_path_factory.mktemp("student") / "copy"
    assert "bodies to write on 10 pages" in student.make(ROOT, folder)
    return folder


@pytest.fixture
def copy(made, tmp_path) -> student.Copy:
    """One of one's own."""
    shutil.copytree(made, tmp_path / "copy")
    return student.Copy(tmp_path / "copy")


def edit(copy: student.Copy, page: str, change) -> None:
    """Let `change` work on the cells of a page, by id."""
    data = copy.page(page)
    change({cell.get("id"): cell for cell in data["cells"]}, data)
    copy.save(page, data)


def write_cell(copy: student.Copy, page: str, cell_id: str, source: str) -> None:
    edit(copy, page, lambda cells, _: cells[cell_id].update(source=source))


def reference(page: str, cell_id: str) -> str:
    data = build.load(ROOT / "notebooks" / page, page)
    return next(text_of(c) for c in data["cells"] if c["id"] == cell_id)


SOFTMAX = ("03_attention.ipynb", "c024")


# ---- what is blank -------------------------------------------------------------------------------


def test_blank_and_filled_again_it_is_the_course_byte_for_byte(copy):
    student.fill(copy, ROOT, CHAPTERS)
    for path in student.spine(copy.root):
        assert path.read_text("utf-8") == stripped(ROOT / "notebooks" / path.name), path.name
    for path in sorted((ROOT / "minillm").rglob("*.py")):
        mine = copy.root / path.relative_to(ROOT)
        assert mine.read_bytes() == path.read_bytes(), mine
    assert all(done == todo for done, todo in student.written(copy).values())


def test_every_body_of_the_spine_is_blank_but_the_given(made):
    for path in student.spine(made):
        data = build.load(path, path.name)
        for cell in filter(exported, data["cells"]):
            tree = build.ast.parse(text_of(cell))
            for name, node in blanks.functions(tree.body):
                raised = build.ast.unparse(node.body[-1]).startswith("raise NotWritten(")
                assert raised or blanks.says_nothing(node) or name in blanks.GIVEN, name


def test_signatures_docstrings_fields_and_ids_stay(made):
    for path in student.spine(made):
        blank, full = build.load(path, ""), build.load(ROOT / "notebooks" / path.name, "")
        assert [c["id"] for c in blank["cells"]] == [c["id"] for c in full["cells"]]
        for mine, theirs in zip(blank["cells"], full["cells"], strict=True):
            if not exported(theirs):
                assert mine["source"] == theirs["source"]
                continue
            assert student.defined(mine) == student.defined(theirs)
            ours, course = (build.ast.parse(text_of(c)) for c in (mine, theirs))
            pairs = zip(blanks.functions(ours.body), blanks.functions(course.body), strict=True)
            for (_, one), (_, other) in pairs:
                assert build.ast.get_docstring(one) == build.ast.get_docstring(other)
                one.body = other.body
            assert build.ast.dump(head(ours)) == build.ast.dump(head(course))


def head(tree: build.ast.Module) -> build.ast.Module:
    """A module without imports, of which a blank has one more, and without values it makes."""
    dropped = (build.ast.Import, build.ast.ImportFrom, build.ast.Assign)
    tree.body = [node for node in tree.body if not isinstance(node, dropped)]
    return tree


def test_no_solution_stands_in_a_demonstration_cell(made):
    """A page tells how, and now and then shows a line; never three that follow each other."""
    leaks, single = [], set()
    for path in student.spine(made):
        full = build.load(ROOT / "notebooks" / path.name, path.name)
        blank = {c["id"]: set(lines(c)) for c in build.load(path, path.name)["cells"]}
        shown = [lines(c) for c in full["cells"] if c["cell_type"] == "code" and not is_ours(c)]
        for cell in filter(exported, full["cells"]):
            # "" stands where a line is no secret: the blank has it, too
            body = ["" if line in blank[cell["id"]] else line for line in lines(cell)]
            single |= {ln for ln in body for other in shown if len(ln) > 12 and ln in other}
            leaks += [
                (path.name, three)
                for three in neighbours(body)
                if all(three) and any(three in neighbours(other) for other in shown)
            ]
    assert leaks == []
    assert len(single) <= 20, sorted(single)


def neighbours(texts: list[str]) -> list[tuple[str, ...]]:
    return list(zip(texts, texts[1:], texts[2:], strict=False))


def is_ours(cell: dict) -> bool:
    return text_of(cell).startswith("#|")


def lines(cell: dict) -> list[str]:
    return [line.strip() for line in text_of(cell).splitlines() if line.strip()]


def test_every_module_imports_and_says_what_is_missing(made):
    code = """
import importlib, pkgutil
import minillm
for found in pkgutil.walk_packages(minillm.__path__, "minillm."):
    if found.name.rpartition(".")[2] not in ("__main__", "fence_worker"):
        importlib.import_module(found.name)
from minillm.sampling import GREEDY
rate = minillm.cosine_schedule
for call in (lambda: GREEDY(None), lambda: GREEDY.seed, lambda: rate(0, 1, 1, 1, 1)):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=made,
        env=student.environment(made, made / "unused"),
    )
    assert done.returncode == 0, done.stderr
    assert "there, then not in minillm/: save the page, make grade NB=07" in done.stdout
    assert [line.partition(". If ")[0] for line in done.stdout.splitlines()] == [
        "NotWritten GREEDY is not written yet: notebooks/09_sampling.ipynb, cell n11934",
        "NotWritten GREEDY is not written yet: notebooks/09_sampling.ipynb, cell n11934",
        "NotWritten cosine_schedule is not written yet: notebooks/07_training.ipynb, cell 422dd181",
    ]


CUT = '''
def one(x): return x


def two(
    x: int,
) -> int:
    """Says two."""
    # why
    return x
    # the end


class A:
    size: int = 3

    def empty(self): ...

    def abstract(self):
        raise NotImplementedError

    async def method(self):

        # why
        from minillm.support.checks.kinds import whole

        self.size, self.rest = 1, []
        self.register_buffer("table", whole(one(two(3))))
        return {"a": 1, **self.rest, "b": 2}


X: int = one(2)
Y = len("a")
'''
BLANK = '''
def one(x):
    raise NotWritten("one", "03_page", "id")


def two(
    x: int,
) -> int:
    """Says two."""
    raise NotWritten("two", "03_page", "id")


class A:
    size: int = 3

    def empty(self): ...

    def abstract(self):
        raise NotImplementedError

    async def method(self):
        # where it is needed: from minillm.support.checks.kinds import whole
        # calls one, two; sets the buffer 'table', self.size, self.rest; among the keys of what it
        # returns: 'a', 'b'
        raise NotWritten("A.method", "03_page", "id")


X: int = unwritten("X", "03_page", "id")
Y = len("a")
'''


def test_how_bodies_are_cut_out():
    text, names = blanks.blank(CUT.lstrip(), "03_page", "id", set(), set())
    head = "from not_written import NotWritten, unwritten\n"
    assert text == head + "\n" + BLANK
    assert names == ["one", "two", "A.method", "X"]


# ---- work is never overwritten -------------------------------------------------------------------


def test_a_folder_that_is_there_is_somebodys_work(copy):
    before = sorted((p, p.read_bytes()) for p in copy.root.rglob("*") if p.is_file())
    with pytest.raises(student.StudentError, match="is there already: somebody's work"):
        student.make(ROOT, copy.root)
    assert sorted((p, p.read_bytes()) for p in copy.root.rglob("*") if p.is_file()) == before


MINE = "#| export\ndef softmax(x, dim):\n    return x\n\n\ndef upcast(x):\n    return x\n"


def test_fill_leaves_what_somebody_wrote_and_names_it(copy):
    write_cell(copy, *SOFTMAX, MINE)
    said = "\n".join(student.fill(copy, ROOT, ["3"]))
    assert "5 bodies filled in" in said
    assert "left as you wrote it: softmax, upcast (delete the cell, and fill puts" in said
    cells = {c["id"]: c for c in copy.page(SOFTMAX[0])["cells"]}
    assert text_of(cells["c024"]) == MINE
    assert text_of(cells["c054"]) == reference("03_attention.ipynb", "c054")


def test_a_deleted_cell_is_named_and_filled_in_at_its_place(copy):
    edit(copy, SOFTMAX[0], lambda cells, data: data["cells"].remove(cells["c024"]))
    said = student.remarks(copy, "03")
    assert said == [
        "notebooks/03_attention.ipynb: the cell that defines softmax, upcast was "
        "deleted: update puts it back"
    ]
    student.fill(copy, ROOT, ["03"])
    assert student.remarks(copy, "03") == []
    wanted = stripped(ROOT / "notebooks" / SOFTMAX[0])
    assert (copy.root / "notebooks" / SOFTMAX[0]).read_text("utf-8") == wanted


def test_a_renamed_function_is_named(copy):
    write_cell(copy, *SOFTMAX, MINE.replace("def softmax", "def soft_max"))
    (said,) = student.remarks(copy, "03")
    assert said.startswith('notebooks/03_attention.ipynb, under "')
    assert "softmax is no longer defined, but it has soft_max: tests and later pages use" in said


def test_a_lost_mark_and_a_syntax_error_are_named(copy):
    write_cell(copy, *SOFTMAX, MINE.partition("\n")[2])
    (said,) = student.remarks(copy, "03")
    assert "the cell of softmax, upcast has lost its first line, `#| export`" in said
    write_cell(copy, *SOFTMAX, MINE.replace("return x\n", "return x]\n", 1))
    assert "line 3 of the cell is no Python: unmatched ']'" in "".join(student.remarks(copy, "03"))
    assert "not built: notebooks/03_attention.ipynb, cell 33" in "".join(
        student.rebuild(copy, [SOFTMAX[0]])
    )


def test_an_edited_test_is_named(copy):
    path = copy.root / "tests/test_attention.py"
    path.write_text(path.read_text("utf-8") + "\n\ndef test_me():\n    pass\n", "utf-8")
    (said,) = student.remarks(copy, "03")
    assert said.startswith("tests/test_attention.py is not the one that was handed out")


@pytest.mark.parametrize(
    "change, wanted",
    [
        (lambda data: data.update(nbformat=3), "saved in notebook format 3, and the course reads"),
        (lambda data: data.update(cells=None), "not a notebook: no list of cells"),
    ],
)
def test_another_notebook_format_is_named(copy, change, wanted):
    edit(copy, SOFTMAX[0], lambda _, data: change(data))
    with pytest.raises(student.StudentError, match=wanted):
        student.grade(copy, "03")


def test_a_page_saved_without_ids_is_read_by_what_its_cells_define(copy):
    write_cell(copy, *SOFTMAX, MINE)

    def older(_, data):
        data["nbformat_minor"] = 4
        data["metadata"] |= {"widgets": {}, "colab": {"provenance": []}}
        for cell in data["cells"]:
            del cell["id"]
            cell["metadata"] = {"tags": [], "collapsed": False, "vscode": {"languageId": "python"}}
            cell["source"] = text_of(cell)  # a string, as some programs save it

    edit(copy, SOFTMAX[0], older)
    (said,) = student.remarks(copy, "03")
    assert said.startswith("notebooks/03_attention.ipynb was saved without cell ids (format 4.4)")
    assert student.written(copy)[SOFTMAX[0]] == (2, 7)
    assert "5 bodies filled in" in "\n".join(student.fill(copy, ROOT, ["03"]))
    texts = [text_of(c) for c in copy.page(SOFTMAX[0])["cells"]]
    assert MINE in texts and reference("03_attention.ipynb", "c054") in texts


def test_a_copy_whose_digests_are_of_texts_is_read(copy):
    """As copies were made before: what nobody has written is filled, the rest stays."""
    for page, known in copy.given["cells"].items():
        texts = {c["id"]: blanks.digest(text_of(c)) for c in copy.page(page)["cells"]}
        assert known.keys() == texts.keys()
        known |= texts
    copy.save_given()
    older = student.Copy(copy.root)
    write_cell(older, *SOFTMAX, MINE)
    assert "5 bodies filled in" in "\n".join(student.fill(older, ROOT, ["03"]))
    assert student.update(student.Copy(copy.root), ROOT)[0] == "nothing is new"


def test_without_a_known_id_only_marked_cells_are_put_back(copy):
    """And below the title, wherever their neighbours are."""

    def renumbered(cells, data):
        data["cells"].remove(cells["c024"])
        gone = [c for c in data["cells"] if c["cell_type"] == "markdown"][3]
        data["cells"].remove(gone)
        for i, cell in enumerate(data["cells"]):
            cell["id"] = str(i)

    edit(copy, SOFTMAX[0], renumbered)
    said = student.update(copy, ROOT)
    assert said[0] == "put back or new in notebooks/03_attention.ipynb: softmax, upcast"
    assert "has not the course's cell ids" in said[1] and "no others (1 missing)" in said[1]
    page = copy.page(SOFTMAX[0])["cells"]
    full = build.load(ROOT / "notebooks" / SOFTMAX[0], "")["cells"]
    at, wanted = ([c["id"] for c in cells].index("c024") for cells in (page, full))
    assert at == wanted - 1 and text_of(page[0]).startswith("# 03")
    assert student.update(student.Copy(copy.root), ROOT) == [said[1]]


def test_an_edit_of_the_package_is_not_built_over(copy):
    path = copy.root / "minillm/attention.py"
    text = path.read_text("utf-8")
    path.write_text(text.replace('raise NotWritten("softmax"', "return (x", 1), "utf-8")
    edited = path.read_text("utf-8")
    (said,) = student.rebuild(copy, [SOFTMAX[0]])
    assert "the module was edited, run make pull" in said
    assert path.read_text("utf-8") == edited


# ---- update --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def newer(tmp_path_factory) -> Path:
    """A course in which a test, a text, a solution and the place of a cell have changed."""
    course = tmp_path_factory.mktemp("newer") / "course"
    for name in ("minillm", "tests", "tools", "assets"):
        shutil.copytree(ROOT / name, course / name, ignore=student.NOT_COPIED)
    shutil.copytree(
        ROOT / "notebooks",
        course / "notebooks",
        ignore=shutil.ignore_patterns("deeper", "beyond", "solutions", "__pycache__"),
    )
    for name in ("LICENSE", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, course)
    page = course / "notebooks" / SOFTMAX[0]
    data = build.load(page, "")
    for cell in data["cells"]:
        text = text_of(cell)
        if cell["id"] == "c024":
            text = text.replace('"""`x` in at least float32."""', '"""`x` in float32 or more."""')
            assert "or more" in text
        cell["source"] = text.replace("# 03 Attention and masks", "# 03 Attention, and masks")
    data["cells"].insert(-1, data["cells"].pop())
    page.write_text(student.dumped(data), "utf-8")
    test = course / "tests/test_attention.py"
    test.write_text(test.read_text("utf-8") + "\n# newer\n", "utf-8")
    return course


def test_update_brings_what_is_new_to_untouched_cells(copy, newer):
    said = student.update(copy, newer)
    assert "new: tests/test_attention.py" in said
    assert "new in notebooks/03_attention.ipynb: 2 cells" in said
    cells = {c["id"]: text_of(c) for c in copy.page(SOFTMAX[0])["cells"]}
    assert "float32 or more" in cells["c024"] and "raise NotWritten(" in cells["c024"]
    assert "or more" in (copy.root / "minillm/attention.py").read_text("utf-8")
    assert student.update(student.Copy(copy.root), newer) == ["nothing is new"]


def test_update_leaves_what_was_written_and_fills_what_was_filled(copy, newer):
    student.fill(copy, ROOT, ["03"])
    write_cell(copy, SOFTMAX[0], "c054", "#| export\ndef causal_mask(*a, **k):\n    return 1\n")
    (copy.root / "tests/test_attention.py").write_text("mine = 1\n")
    said = "\n".join(student.update(copy, newer))
    assert "left: tests/test_attention.py (you have changed it" in said
    cells = {c["id"]: text_of(c) for c in copy.page(SOFTMAX[0])["cells"]}
    assert "return 1" in cells["c054"]
    assert "float32 or more" in cells["c024"] and "NotWritten" not in cells["c024"]
    write_cell(copy, *SOFTMAX, MINE)
    again = student.Copy(copy.root)
    older = "\n".join(student.update(again, ROOT))
    assert "left in notebooks/03_attention.ipynb: softmax, upcast (yours; the course's" in older
    assert text_of({c["id"]: c for c in again.page(SOFTMAX[0])["cells"]}["c024"]) == MINE


def test_update_takes_the_course_s_order_and_leaves_one_of_your_own(copy, newer):
    page = copy.page(SOFTMAX[0])
    own = {"cell_type": "markdown", "id": "mine0001", "metadata": {}, "source": "behind it"}
    first, second = (c["id"] for c in page["cells"][-2:])
    page["cells"].insert(-1, own)
    copy.save(SOFTMAX[0], page)
    order = "new in notebooks/03_attention.ipynb: the order of its cells"
    assert order in student.update(copy, newer)
    page = copy.page(SOFTMAX[0])
    assert [c["id"] for c in page["cells"][-3:]] == [second, first, "mine0001"]
    page["cells"][-3:-1] = page["cells"][-2:-4:-1]
    copy.save(SOFTMAX[0], page)
    assert student.update(student.Copy(copy.root), newer) == ["nothing is new"]
    assert [c["id"] for c in copy.page(SOFTMAX[0])["cells"][-3:]] == [first, second, "mine0001"]


def die(*args, **how):
    raise KeyboardInterrupt


def contents(root: Path) -> dict[str, bytes]:
    files = (p for p in root.rglob("*") if p.is_file() and p.parent.name != "build")
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in files}


@pytest.mark.parametrize("command", ["fill", "update"])
def test_killed_before_any_of_its_writes_and_called_again(copy, newer, monkeypatch, command):
    write_cell(copy, SOFTMAX[0], "c054", "#| export\ndef causal_mask(*a, **k):\n    return 1\n")

    def call(root: Path) -> str:
        if command == "fill":
            return "\n".join(student.fill(student.Copy(root), ROOT, ["03"]))
        return "\n".join(student.update(student.Copy(root), newer))

    def fresh(name: str) -> Path:
        return Path(shutil.copytree(copy.root, copy.root.with_name(name)))

    whole = fresh("whole")
    call(whole)
    writing = build.replacing
    for count in range(20):
        root = fresh(f"killed at {count}")
        left = [writing] * count + [die]
        monkeypatch.setattr(build, "replacing", lambda *a, left=left, **k: left.pop(0)(*a, **k))
        try:
            call(root)
            break
        except KeyboardInterrupt:
            monkeypatch.setattr(build, "replacing", writing)
        said = call(root)
        assert said.count("left") <= 1 and "left as you wrote it: softmax" not in said, said
        assert contents(root) == contents(whole), count
    assert 3 <= count < 20


@pytest.fixture
def old_copy(tmp_path) -> Path:
    """Three pages of a copy made at 1072af8; every other body is "written by me"."""
    with zipfile.ZipFile(ROOT / "tests" / "copy_of_1072af8.zip") as packed:
        packed.extractall(tmp_path / "old")
    return tmp_path / "old"


def cells_of(root: Path, page: str) -> dict[str, str]:
    data = build.load(root / "notebooks" / page, page)
    return {c["id"]: text_of(c) for c in data["cells"]}


def test_an_old_copy_is_carried_over_the_move(old_copy):
    pages = ["02_tokenizer.ipynb", "03_attention.ipynb", "07_training.ipynb"]
    before = {page: cells_of(old_copy, page) for page in pages}
    package = (old_copy / "minillm/nn/attention.py").read_bytes()
    said = student.run("make", [], old_copy, ROOT)
    assert "cells of yours" in said[0] and "build/before_move/" in said[0]
    assert (old_copy / "build/before_move/minillm/nn/attention.py").read_bytes() == package
    assert not (old_copy / "minillm/nn").exists()
    for page in pages:
        after = cells_of(old_copy, page)
        for cell_id, source in before[page].items():
            if "written by me" not in source and cell_id != "mine0001":
                continue
            now = after[cell_id].splitlines()
            code = [line for line in source.splitlines() if re.match(r" {4}\S|# written", line)]
            lost = [line for line in code if line not in now and "minillm" not in line]
            assert lost == [], f"{page}, cell {cell_id}"
            assert not re.search(r"minillm\.(nn|training|cache)\.|export nn", after[cell_id])
    copy = student.Copy(old_copy)
    assert student.written(copy)["03_attention.ipynb"] == (4, 7)
    assert not any(line.startswith("not built") for line in student.rebuild(copy, pages))
    assert "# written by me" in (old_copy / "minillm/attention.py").read_text("utf-8")
    paths = {**os.environ, "PYTHONPATH": str(old_copy)}
    modules = "import minillm.bpe, minillm.attention"  # what they took from minillm.checks is found
    subprocess.run([sys.executable, "-c", modules], cwd=old_copy, env=paths, check=True)
    with pytest.raises(student.StudentError, match="somebody's work"):
        student.run("make", [], old_copy, ROOT)


@pytest.mark.parametrize("moment", ["save", "save_given"])
def test_an_old_copy_is_carried_over_after_a_kill(old_copy, monkeypatch, moment):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(student.Copy, moment, killed)
        student.run("make", [], old_copy, ROOT)
    student.run("make", [], old_copy, ROOT)
    assert (old_copy / "build/before_move/tests/nn/test_attention.py").exists()
    assert student.written(student.Copy(old_copy))["03_attention.ipynb"] == (4, 7)
    assert "written by me" in (old_copy / "notebooks/03_attention.ipynb").read_text("utf-8")


def test_a_page_that_is_saved_while_fill_reads_it_stays(copy, monkeypatch):
    """It is open in JupyterLab, too: what was saved last is not overwritten."""
    inserting = blanks.drop_outputs

    def meanwhile(cell):
        inserting(cell)
        monkeypatch.setattr(blanks, "drop_outputs", inserting)
        write_cell(student.Copy(copy.root), *SOFTMAX, MINE)

    monkeypatch.setattr(blanks, "drop_outputs", meanwhile)
    with pytest.raises(student.StudentError, match="was saved by another program"):
        student.fill(copy, ROOT, ["03"])
    assert "5 bodies filled in" in "\n".join(student.fill(student.Copy(copy.root), ROOT, ["03"]))
    cells = {c["id"]: text_of(c) for c in copy.page(SOFTMAX[0])["cells"]}
    assert cells["c024"] == MINE


# ---- the judge -----------------------------------------------------------------------------------

ATTEMPT = """
import pytest
from minillm.ngram import bits_per_byte, word_pieces

def test_right():
    assert bits_per_byte(0.0, 3) == 0

def test_wrong():
    assert bits_per_byte(1.0, 1) == 7, "seven"

def test_wording_is_free():
    with pytest.raises(ValueError, match="this sentence"):
        raise ValueError("another")

def test_wrong_in_another_process():
    import subprocess, sys
    subprocess.run([sys.executable, "-c", "raise KeyError('why')"], check=True)

def test_waits():
    with pytest.raises(ValueError, match="x"):
        word_pieces("a b")

def test_waits_in_another_process():
    import subprocess, sys
    done = subprocess.run([sys.executable, "-c", "import minillm.ngram as n; n.word_pieces('a')"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

def test_waits_in_a_process_that_must_succeed():
    import subprocess, sys
    subprocess.run([sys.executable, "-c", "import minillm.ngram as n; n.word_pieces('a')"],
                   capture_output=True, text=True, check=True)
"""


def test_grade_tells_passed_failed_and_waiting(copy, monkeypatch, capsys):
    monkeypatch.setitem(student.TESTS, "01", ["test_a.py", "test_b.py"])
    (copy.root / "tests/test_a.py").write_text(ATTEMPT)
    (copy.root / "tests/test_b.py").write_text("from minillm.ngram import *\nX = word_pieces('')\n")
    text = text_of(next(c for c in copy.page("01_ngrams.ipynb")["cells"] if c["id"] == "ad07e74e"))
    body = text[: text.index("raise NotWritten")] + "return nats / num_bytes\n"
    write_cell(copy, "01_ngrams.ipynb", "ad07e74e", body)
    code = student.main(["grade", "1", "--to", str(copy.root)])
    said = capsys.readouterr().out
    assert code == 0
    assert "01_ngrams: 1 of 15 bodies written; tests: 2 passed, 2 failed, 4 waiting" in said
    assert "failed: tests/test_a.py::test_wrong\n        AssertionError: seven" in said
    assert "a process that the test began ended with 1 | KeyError: 'why' (test_a.py, line" in said
    assert '(test_a.py, line 9: assert bits_per_byte(1.0, 1) == 7, "seven")' in said
    assert 'waiting for word_pieces (01, under "' in said and "next: word_pieces" in said
    kept = json.loads((copy.root / student.PROGRESS).read_text())
    assert kept["written"].startswith("1 of ") and kept["pages"]["01_ngrams"] == "1 of 15"
    assert kept["graded"]["01"].items() >= {"passed": 2, "failed": 2, "waiting": 4}.items()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_what_comes_next_leads_through_a_chapter(copy, chapter):
    """Written piece by piece as it says, a chapter is whole in the order of its page."""
    student.fill(copy, ROOT, [c for c in CHAPTERS if c < chapter])
    (page,) = student.pages_of(copy.given, [chapter])
    asked = []
    while said := student.waiting_lines(copy, [], chapter):
        name = said[0].removeprefix("next: ").partition(", under ")[0]
        cell_id, names = next(kv for kv in copy.given["names"][page].items() if name in kv[1])
        write_cell(copy, page, cell_id, reference(page, cell_id))
        asked.append(names)
    assert asked == list(copy.given["names"][page].values())
    assert student.written(copy)[page][0] == sum(map(len, asked))
    assert not student.rebuild(copy, [page])


def test_a_chapter_that_passes_names_the_next(copy, monkeypatch):
    student.fill(copy, ROOT, ["03"])
    monkeypatch.setattr(student, "run_tests", lambda *a: [{"test": "t", "outcome": "passed"}])
    assert "all of it passes; next: 04_multihead" in student.grade(copy, "03")
    path = copy.root / "minillm/attention.py"
    path.write_text(path.read_text("utf-8").replace("float32", "float64"), "utf-8")
    said = "\n".join(student.grade(copy, "03"))
    assert "the module was edited, run make pull" in said and "all of it passes" not in said
    assert "these tests ran on minillm/ as it was before" in said


def test_a_chapter_without_a_body_is_not_tested(copy, monkeypatch):
    monkeypatch.setattr(student, "run_tests", None)
    said = student.grade(copy, "03")
    assert "no test was run: they all wait for what is not written" in said
    assert any(line.startswith("next: ") for line in said)


def test_what_a_page_has_and_the_package_not_yet(copy):
    student.fill(copy, ROOT, ["03"])
    (line,) = student.waiting_lines(copy, [{"message": "softmax"}] * 2, "03")
    assert line == "waiting for softmax (its page has it, minillm/ not yet): 2"


def test_a_file_that_cannot_be_read_and_more_than_five_failures(copy, monkeypatch):
    monkeypatch.setitem(student.TESTS, "01", ["test_a.py", "test_b.py"])
    tests = "\n".join(f"def test_{i}():\n    assert {i} == 7\n" for i in range(7))
    (copy.root / "tests/test_a.py").write_text(tests)
    (copy.root / "tests/test_b.py").write_text("from minillm.ngram import renamed\n")
    student.fill(copy, ROOT, ["01"])
    said = "\n".join(student.grade(copy, "01"))
    assert (
        "failed: tests/test_b.py (none of its tests could run)\n        ImportError: cannot" in said
    )
    assert "and 3 more: test_4, test_5, test_6\nall that the tests said: build/grade_01.txt" in said


def test_pages_and_sync_sort_imports_alike(made):
    """render, which `sync` calls, runs beside not_written.py; render_all, for `grade`, does not."""
    owned = {"attention": build.owners(made)["attention"]}
    alone = build.render(owned["attention"], "attention", made)
    assert build.render_all(owned, made)["attention"] == alone


@pytest.mark.parametrize(
    "arguments, wanted",
    [
        (["grade"], "grade which chapter? Such as: make grade NB=03"),
        (["fill", "11"], "there is no chapter '11' to write; there are 01 02 03"),
        (["grade", "00"], "there is no chapter '00'"),
    ],
)
def test_bad_commands_are_answered_by_a_sentence(copy, capsys, arguments, wanted):
    assert student.main([*arguments, "--to", str(copy.root)]) == 1
    assert wanted in capsys.readouterr().err


def test_a_folder_that_is_no_copy(tmp_path, capsys):
    assert student.main(["grade", "03", "--to", str(tmp_path)]) == 1
    assert "is no copy of the course: there is no readable given.json" in capsys.readouterr().err


# ---- all tests of a chapter, blank and filled: minutes, so for those that WALK names -------------

# These pass without any body, for they ask nothing of one.
NEED_NO_BODY = {
    "test_pretokenizer.py::test_unicode_differs_from_tiktokens_only_where_one_table_is",
    "test_bpe.py::test_importing_the_tokenizer_is_quick_and_needs_no_torch",
    "test_attention.py::test_the_stand_in_for_a_device_refuses",
    "test_rope.py::test_reordering_is_that_of_the_published_llama_conversion",
    "test_rope.py::test_rows_that_make_no_heads_are_an_error",
    "training/test_data.py::test_settings_that_differ_are_named",
    "training/test_trainer.py::test_a_run_refuses_values_out_of_range",
    "training/test_trainer.py::test_random_numbers_of_a_mac",
}
walk = pytest.mark.parametrize("chapter", os.environ.get("WALK", "").split())


def outcomes(copy: student.Copy, chapter: str) -> dict[str, str]:
    results = student.run_tests(copy.root, chapter)
    return {r["test"].removeprefix("tests/"): r["outcome"] for r in results}


@walk
def test_walk_no_test_passes_that_needs_a_body(copy, chapter):
    found = outcomes(copy, chapter)
    assert found
    ended = [test for test, outcome in found.items() if outcome != "waiting"]
    assert [t for t in ended if not t.startswith(tuple(NEED_NO_BODY))] == []


@walk
def test_walk_filled_every_test_passes_and_none_waits(copy, chapter):
    student.fill(copy, ROOT, [c for c in CHAPTERS if c <= chapter])
    found = outcomes(copy, chapter)
    assert found and {t: o for t, o in found.items() if o != "passed"} == {}
