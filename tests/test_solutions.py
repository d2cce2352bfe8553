"""The worked solutions run and print what is saved, all pages in this one process.

A kernel a page, as nbval starts for the course's own, would load torch once for each of them. Here
a page has a namespace of its own, its own folder to run in, and torch's seed of a fresh start.
`pytest notebooks/solutions/05_rope.ipynb` still runs one in a kernel.
"""

import ast
import contextlib
import io
import json
import random
import traceback
from pathlib import Path

import pytest
import torch

PAGES = sorted((Path(__file__).parents[1] / "notebooks" / "solutions").glob("*.ipynb"))
FRESH = 67280421310721  # the seed with which torch starts


def printed(source: str, space: dict) -> str:
    """What a cell prints, and the value that it ends with; for an error, its traceback."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(compile(tree, "<cell>", "exec"), space)
            value = last and eval(compile(ast.Expression(last.value), "<cell>", "eval"), space)
        except Exception:
            return out.getvalue() + traceback.format_exc(limit=-3)
        if value is not None:
            print(repr(value))
    return out.getvalue()


def saved(cell: dict) -> str:
    """What the file says that it printed, and its value."""
    texts = ["".join(o["text"]) for o in cell["outputs"] if o.get("name") == "stdout"]
    values = [o["data"]["text/plain"] for o in cell["outputs"] if "data" in o]
    return "".join(texts) + "".join("".join(value) + "\n" for value in values)


def differences(cells: list[dict]) -> list[str]:
    """Run a page: the cells that fail, or print something else than is saved."""
    torch.manual_seed(FRESH)
    random.seed(0)
    space = {"__name__": "__main__"}
    found = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        now, then = printed(source, space), saved(cell)
        failed = "Traceback (most recent call last)" in now
        if failed or (now != then and "NBVAL_IGNORE_OUTPUT" not in source):
            found.append(f"--- cell\n{source}\n--- printed\n{now}\n--- saved\n{then}")
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_cell_prints_what_is_saved(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    found = differences(json.loads(path.read_text(encoding="utf-8"))["cells"])
    assert not found, "\n".join(found)
    assert torch.get_default_dtype() == torch.float32, "the next page starts with another dtype"


def cell(source: str, output: str = "", value: str | None = None) -> dict:
    outputs = [{"name": "stdout", "text": [output]}] if output else []
    outputs += [{"data": {"text/plain": [value]}}] if value else []
    return {"cell_type": "code", "source": [source], "outputs": outputs}


def test_a_cell_that_prints_what_is_saved_is_right():
    page = [
        cell("a = 2\nprint(a)", "2\n"),
        cell("print('a')\na + 1", "a\n", "3"),
        cell("a = 4"),
        cell("None"),
        cell("# NBVAL_IGNORE_OUTPUT\nprint(id(a))", "5\n"),
        cell("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int' = 0"),
        {"cell_type": "markdown", "source": ["text"]},
    ]
    assert differences(page) == []


@pytest.mark.parametrize(
    "wrong, said",
    [
        (cell("print(2)", "3\n"), "--- printed\n2"),
        (cell("print(2)"), "--- printed\n2"),
        (cell("2", "", "3"), "--- printed\n2"),
        (cell("x = 2", "", "2"), "--- saved\n2"),
        (cell("# NBVAL_IGNORE_OUTPUT\nassert 1 == 2, 'no'"), "AssertionError: no"),
        (cell("print('on its way')\n1 / 0", "on its way\n"), "ZeroDivisionError"),
    ],
)
def test_any_other_is_shown(wrong, said):
    right = cell("print(1)", "1\n")
    (found,) = differences([right, wrong, right])
    assert said in found and "".join(wrong["source"]) in found


def test_pages_know_nothing_of_each_other():
    draw = cell("import random, torch\nprint(torch.rand(1).item(), random.random())")
    first, again = (differences([draw, cell("mine = 1")]) for _ in range(2))
    assert first == again
    (found,) = differences([cell("mine")])
    assert "NameError" in found
