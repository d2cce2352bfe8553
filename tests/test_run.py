"""`make run` for a person: headings, no exercises, results once more, what next."""

import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import run as runner  # noqa: E402


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A short page in place of the last one, its copy in the same folder."""
    new, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    cells = [
        new("# Title"),
        code("# NBVAL_IGNORE_OUTPUT\nprint('first')"),
        new("Text.\n\n## A `second` thing\n\nMore."),
        code("#| export\nx = 1\nprint('found')", metadata={"tags": ["result"]}),
        code("import sys\nprint('bar', file=sys.stderr)"),
        new("## Recap\n\n- short\n\n## Exercises\n\n**1** Do."),
        code("print('1 unsolved: think')"),
        new("## What now?"),
        code("print('in sync')"),
    ]
    (tmp_path / "notebooks").mkdir()
    path = tmp_path / "notebooks/10_minillm.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "LAST", path)
    return path


def test_a_person_sees_headings_and_results_but_no_exercises_and_no_marks(page, capsys):
    assert runner.main([]) == 0
    said, errors = capsys.readouterr()
    assert said.startswith(runner.BEFORE) and "1 floor is perfect" in runner.BEFORE
    lines = said.splitlines()
    assert lines[lines.index("[1/3] Title") + 1] == "first"
    assert lines[lines.index("[2/3] A second thing") + 1] == "found"
    assert errors == "bar\n"
    assert not re.search("NBVAL|export|unsolved|Exercises|What now|in sync", said)
    assert said.count("found") == 2  # where it happens, and at the end
    at_the_end = said[said.index("In short") :]
    assert at_the_end.index("found") < at_the_end.index("What next?")
    assert "make story" in at_the_end and "build/10_minillm.ipynb" in at_the_end.replace("\\", "/")
    copy = nbformat.read(page.parents[1] / "build/10_minillm.ipynb", as_version=4)
    assert copy.cells[6].outputs[0].text == "1 unsolved: think\n"  # the copy has them


def test_another_page_runs_too_and_a_failure_is_told(page, capsys):
    other = page.with_name("other.ipynb")
    cells = [nbformat.v4.new_code_cell("1 / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), other)
    assert runner.main([str(other)]) == 1
    said, errors = capsys.readouterr()
    assert "ZeroDivisionError" in errors and "What next" not in said
    assert runner.main([str(page.with_name("none.ipynb"))]) == 1
    assert "none.ipynb: " in capsys.readouterr().err


def test_what_it_promises_is_there():
    """The page has results, headings before its first code, and saves the model that is named."""
    notebook = nbformat.read(runner.LAST, as_version=4)
    assert runner.LAST == ROOT / "notebooks/10_minillm.ipynb"
    assert runner.results(notebook).count("floors") >= 3
    assert runner.headings(notebook.cells[0])
    code = "\n".join(c.source for c in notebook.cells if c.cell_type == "code")
    assert '"../build/stories")' in code and "build/stories" in runner.AFTER
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"make (\w+)", runner.AFTER)
    assert named and all(f"\n{target}: " in makefile for target in named)
    pages = re.findall(r"notebooks/\S+\.ipynb", runner.AFTER)
    assert len(pages) == 2 and all((ROOT / page).is_file() for page in pages)
