"""The runner of notebooks: same bytes twice, a failure leaves the file alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbval.plugin import coalesce_streams
from nbval_cells import NBVAL_REFUSES, NBVAL_TAKES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import execute  # noqa: E402


def write(path: Path, *sources: str, tags: dict[int, list[str]] | None = None) -> bytes:
    cells = [nbformat.v4.new_markdown_cell("# Title", id="title")]
    for i, source in enumerate(sources):
        metadata = {"tags": tags[i]} if tags and i in tags else {"collapsed": True}
        cells.append(nbformat.v4.new_code_cell(source, id=f"c{i}", metadata=metadata))
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"jupytext": {"x": 1}})
    nbformat.write(notebook, path)
    return path.read_bytes()


@pytest.fixture
def run(capsys):
    """The tool in this process: its status, and what it prints."""

    def run(*args: str | Path) -> subprocess.CompletedProcess:
        status = execute.main([str(arg) for arg in args])
        return subprocess.CompletedProcess(args, status, *capsys.readouterr())

    return run


def test_outputs_are_saved_and_reproducible(tmp_path, run):
    path = tmp_path / "a.ipynb"
    write(
        path,
        "import sys, time\nfor i in range(3):\n    print(i, flush=True)\n    time.sleep(0.05)",
        "sys.stderr.write('10%\\r')\nsys.stderr.write('100%\\n');",
        "1 + 1",
    )
    assert run(path).returncode == 0
    first = path.read_bytes()
    notebook = nbformat.read(path, as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == [1, 2, 3]
    assert [o.text for o in code[0].outputs] == ["0\n1\n2\n"]
    assert code[1].outputs[0].text == "100%\n"
    assert code[2].outputs[0].data["text/plain"] == "2"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert all(not c.metadata for c in notebook.cells)
    assert run(path).returncode == 0
    assert path.read_bytes() == first


def stream(*pieces: str | None) -> list[nbformat.NotebookNode]:
    """Pieces of stdout, where None is a picture between two of them."""
    new = nbformat.v4.new_output
    return [new("stream", text=p) if p else new("display_data") for p in pieces]


@given(st.lists(st.none() | st.text("ab\r\n", min_size=1)))
def test_a_stream_is_saved_as_nbval_compares_it(pieces):
    cell = nbformat.v4.new_code_cell(outputs=stream(*pieces))
    execute.clean(nbformat.v4.new_notebook(cells=[cell]))
    wanted, found = coalesce_streams(stream(*pieces)), coalesce_streams(cell.outputs)
    assert sorted(map(str, wanted)) == sorted(map(str, found))


def test_nbval_takes_what_is_saved_and_refuses_what_the_house_forbids(tmp_path, run):
    path = tmp_path / "a.ipynb"
    cells = NBVAL_TAKES | NBVAL_REFUSES
    write(path, *cells.values())
    assert run(path).returncode == 0
    command = [sys.executable, "-m", "pytest", "--nbval", "-p", "no:cacheprovider", "-rf"]
    command += ["-o", "addopts=", "--color=no", f"--rootdir={tmp_path}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    failed = {int(n) for n in re.findall(r"^FAILED .*::Cell (\d+)", done.stdout, re.M)}
    assert [name for i, name in enumerate(cells) if i in failed] == [*NBVAL_REFUSES], done.stdout


def test_a_cell_without_an_id_gets_one(tmp_path, run):
    """As Colab, and formats before 4.5, save it."""
    path = tmp_path / "a.ipynb"
    write(path, "1", "2", "3")
    data = json.loads(path.read_text(encoding="utf-8"))
    for cell in data["cells"][:2]:
        del cell["id"]
    data["cells"][3]["id"] = data["cells"][2]["id"]
    path.write_text(json.dumps(data | {"nbformat_minor": 4}), encoding="utf-8")
    assert run(path).returncode == 0
    saved, before = json.loads(path.read_text(encoding="utf-8")), path.read_bytes()
    ids = [cell["id"] for cell in saved["cells"]]
    assert len({*ids}) == 4 and ids[2] == "c1" and saved["nbformat_minor"] == 5
    assert run(path).returncode == 0 and path.read_bytes() == before


def test_a_failing_cell_leaves_the_file_alone(tmp_path):
    path = tmp_path / "a.ipynb"
    before = write(path, "print('fine')", "1 / 0")
    command = [sys.executable, ROOT / "tools" / "execute.py", path]
    done = subprocess.run([str(c) for c in command], capture_output=True, encoding="utf-8")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.ipynb"]


def test_a_copy_runs_where_it_is_put(tmp_path, run):
    path = tmp_path / "a.ipynb"
    before = write(path, "import os\nprint(os.path.basename(os.getcwd()))")
    assert run("--to", tmp_path / "build", path).returncode == 0 and path.read_bytes() == before
    copy = nbformat.read(tmp_path / "build" / "a.ipynb", as_version=4)
    assert copy.cells[1].outputs[0].text == "build\n"


@pytest.mark.parametrize(
    "damage",
    ["<<<<<<< HEAD\n{}", "", '{"cells": 3}', '{"cells": 3, "nbformat": 4}', "[]", '{"cells": ['],
)
def test_a_file_that_is_no_notebook_is_named_and_left_alone(tmp_path, run, damage):
    path = tmp_path / "a.ipynb"
    path.write_text(damage, encoding="utf-8")
    done = run(path, tmp_path / "b.ipynb")
    assert done.returncode == 1 and f"{path}: " in done.stderr
    assert "Traceback" not in done.stderr and path.read_text(encoding="utf-8") == damage
    assert [p.name for p in tmp_path.iterdir()] == ["a.ipynb"]


def test_without_names_it_takes_all_shelves(tmp_path):
    names = ["beyond/a", "solutions/01", "deeper/b", "02", "deeper/a", "01", "other/x"]
    for name in names:
        path = tmp_path / "notebooks" / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = [path.relative_to(tmp_path / "notebooks") for path in execute.course(tmp_path)]
    wanted = ["01", "02", "deeper/a", "deeper/b", "beyond/a", "solutions/01"]
    assert [path.with_suffix("").as_posix() for path in found] == wanted
    assert [*ROOT.glob("notebooks/*.ipynb")]
    assert {*execute.course()} == {
        path for path in ROOT.glob("notebooks/**/*.ipynb") if ".ipynb_checkpoints" not in path.parts
    }
