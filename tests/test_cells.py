"""The one reader of pages: marks as nbdev reads them, and what makes two cells the same."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import cells  # noqa: E402

EXPORT, NAMED = {"export": None}, {"export": "nn.rope"}
MARKS = {  # as nbdev 3.3.26 reads them, each above `x = 1`
    "#| export": EXPORT,
    "# | export": EXPORT,
    "#|export": EXPORT,
    "#  |  export": EXPORT,
    "# |export nn.rope": NAMED,
    "#| export nn.rope": NAMED,
    "#| export: nn.rope": NAMED,
    "#| export:": EXPORT,
    "  #| export": EXPORT,
    "\n\n# | export": EXPORT,
    "#| hide\n#| export": EXPORT,
    "%%time\n#| export": EXPORT,
    "#| export \t": EXPORT,
    "#| export\r": EXPORT,
    "#| exporti": {},
    "# export": {},
    "# note\n#| export": {},
    "x = 1\n#| export": {},
    "## | export": {},
    "# | default_exp nn.rope\n#| export": {"default_exp": "nn.rope", **EXPORT},
}


def code(source: str | list[str]) -> dict:
    return {"cell_type": "code", "source": source}


@pytest.mark.parametrize("head", MARKS)
def test_marks_are_those_that_nbdev_reads(head):
    assert cells.marks(code(f"{head}\nx = 1")) == MARKS[head]
    assert cells.marks(code(f"{head}\nx = 1".splitlines(keepends=True))) == MARKS[head]
    assert cells.marks(code(f"{head}\nx = 1") | {"cell_type": "markdown"}) == {}


def test_a_cell_magic_belongs_to_the_code_and_line_ends_to_nobody():
    assert cells.head_and_body(code("%%time\n#| export\nx")) == ("#| export", "%%time\nx")
    assert cells.head_and_body(code("#| export toy\r\n\r\nx\r\n")) == ("#| export toy", "\nx\n")


CELL = 'import b\nimport a\n\n\ndef f(x):\n    """Says.\n\n    More."""\n'
CELL += '    return [x, "one"]  # why\n'


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (CELL.replace("import b\nimport a", "import a, b"), True),
        (CELL.replace("[x, ", "[\n        x,\n        "), True),
        (CELL.replace('"one"', "'one'"), True),
        (CELL.replace("    More", "      More"), True),
        (CELL.replace("    return", "    # why\n    return").replace("  # why", "", 1), True),
        (CELL.replace("# why", "#why"), True),
        (CELL.replace("why", "because"), False),
        (CELL.replace("  # why", ""), False),
        (CELL.replace("one", "on e"), False),
        (CELL.replace("Says", "Said"), False),
        (CELL.replace("import b\n", ""), False),
        ("#| export\n" + CELL, False),
    ],
)
def test_a_formatter_changes_nothing_and_an_edit_does(other, same):
    assert other != CELL and (cells.digest(code(other)) == cells.digest(code(CELL))) == same


@pytest.mark.parametrize("text", ["def f(:", "%matplotlib inline", "x = '\ud800'", "(" * 5000])
def test_what_is_no_python_is_told_by_its_text(text):
    assert cells.digest(code(text)) == cells.digest(code(f"{text}\n")) != cells.digest(code("x"))
