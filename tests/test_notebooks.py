"""House rules of the notebooks: executed, whole, in step with the package, no output hidden."""

import ast
import base64
import json
import re
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import build  # noqa: E402

SPINE = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
TOUR = ROOT / "notebooks" / "tour.ipynb"  # one cell of each chapter: builds and exports nothing
DEEPER = sorted((ROOT / "notebooks" / "deeper").glob("*.ipynb"))
BEYOND = sorted((ROOT / "notebooks" / "beyond").glob("*.ipynb"))
COURSE = SPINE + DEEPER + BEYOND
SOLUTIONS = sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))
IGNORE = re.compile(r"NBVAL_(IGNORE_OUTPUT|SKIP|RAISES_EXCEPTION)")


def load(path: Path) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [c | {"source": "".join(c["source"])} for c in cells]


def code(path: Path) -> list[dict]:
    return [c for c in load(path) if c["cell_type"] == "code"]


def name(path: Path) -> str:
    return path.relative_to(ROOT / "notebooks").as_posix()


course = pytest.mark.parametrize("path", COURSE, ids=name)
everything = pytest.mark.parametrize("path", [*COURSE, TOUR, *SOLUTIONS], ids=name)


def test_package_equals_notebooks():
    assert build.drift(ROOT) == []


def test_the_course_is_complete():
    assert [p.name[:2] for p in SPINE] == [f"{n:02}" for n in range(11)]
    beyond = [int(p.name[:2]) for p in BEYOND]  # each stands for itself: numbers may be kept free
    assert beyond == sorted(set(beyond)) and beyond[0] == 11


@everything
def test_executed_top_to_bottom(path):
    counts = [c["execution_count"] for c in code(path) if c["source"].strip()]
    assert counts == list(range(1, len(counts) + 1))
    assert all(c["source"].strip() for c in code(path)), "an empty code cell"


@everything
def test_outputs_hold_no_errors_warnings_or_paths(path):
    for cell in code(path):
        for output in cell["outputs"]:
            assert output["output_type"] != "error", cell["source"]
            text = json.dumps({k: v for k, v in output.items() if k != "data"})
            text += json.dumps(
                {k: v for k, v in output.get("data", {}).items() if "image" not in k}
            )
            assert "Warning" not in text, cell["source"]
            assert not re.search(r"<matplotlib|: \[?\"Text\(", text), "echo of a drawing call"
            assert not re.search(r"/(home|root|tmp|Users|work)/", text), cell["source"]


@everything
def test_no_long_sentence_stands_twice_on_a_page(path):
    """A merge or a move that left a copy behind."""
    text = "\n\n".join(c["source"] for c in load(path) if c["cell_type"] == "markdown")
    sentences = [" ".join(s.split()) for s in re.split(r"(?<=[.?!:])\s+|\n\n|\n(?=[-|#])", text)]
    long = Counter(s for s in sentences if len(s.split()) >= 12)
    assert [s for s, count in long.items() if count > 1] == []


@everything
def test_metadata_is_clean(path):
    data = json.loads(path.read_text(encoding="utf-8"))
    assert set(data["metadata"]) <= {"kernelspec", "language_info"}
    assert all(set(c["metadata"]) <= {"tags"} for c in data["cells"])
    assert len({c["id"] for c in data["cells"]}) == len(data["cells"])


@course
def test_the_first_page_and_the_last(path):
    cells = load(path)
    first, text = cells[0]["source"], "\n".join(c["source"] for c in cells)
    number = "# " if path in DEEPER else f"# {path.name[:2]} "
    assert cells[0]["cell_type"] == "markdown" and first.startswith(number)
    assert re.search(r"\w\?", first), "the first cell asks the notebook's question"
    assert "GLOSSARY.md)" in first, "the first cell links to the glossary"
    for heading in ("## Recap", "## Sources"):
        assert heading in text
    assert f'sync("{name(path)}")' in code(path)[-1]["source"]


def test_the_tour_has_one_cell_of_each_chapter_and_leads_to_it():
    cells = load(TOUR)
    assert [c["cell_type"] == "code" for c in cells] == [i % 2 == 1 for i in range(len(cells))]
    shown = [re.search(r"^## (\d\d) ", c["source"], re.M) for c in cells[0:-1:2]]
    assert [found and found[1] for found in shown] == [path.name[:2] for path in SPINE]
    for path, behind in zip(SPINE, cells[2::2], strict=True):
        assert f"]({path.name})" in behind["source"], "each cell is followed by its chapter's link"
    for page in (ROOT / "README.md", SPINE[0]):
        assert "tour.ipynb)" in page.read_text(encoding="utf-8")


def minutes(path: Path) -> float:
    """An estimate: 170 words or 12 lines of code a minute, up to the exercises."""
    words = lines = 0
    for cell in load(path):
        if cell["cell_type"] == "code":
            lines += len(cell["source"].splitlines())
            continue
        before, exercises, _ = cell["source"].partition("## Exercises")
        words += len(before.split())
        if exercises:
            break
    return words / 170 + lines / 12


@pytest.mark.parametrize("path", SPINE[1:11], ids=name)
def test_the_head_of_a_chapter_shows_the_map_and_the_minutes(path):
    head = load(path)[0]["source"]
    assert f"](../assets/map/{path.name[:2]}.png)" in head
    assert (ROOT / "assets" / "map" / f"{path.name[:2]}.png").is_file()
    (said,) = re.findall(r"Reading takes about (\d+) minutes", head)
    assert abs(int(said) - minutes(path)) <= 4
    rows = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert [r for r in rows if f"](notebooks/{path.name})" in r and r.endswith(f"| {said} |")]


def test_the_scoreboard_is_made_of_lines_that_pages_measure():
    lines = json.loads((ROOT / "assets" / "scoreboard.json").read_text(encoding="utf-8"))
    pages = {p.name[:2]: "".join(c["source"] for c in code(p)) for p in SPINE}
    for chapter in sorted({chapter for chapter, *_ in lines}):
        assert f'scoreboard("{chapter}", ' in pages[chapter], chapter
    for chapter, model, _, floors in lines:
        assert float(floors) >= 1 and f'"{model}"' in pages[chapter], model


@course
def test_there_is_a_picture_and_all_are_drawn_here(path):
    pictures = [
        o["data"]["image/png"]
        for c in code(path)
        for o in c["outputs"]
        if "image/png" in o.get("data", {})
    ]
    assert pictures
    assert all(base64.b64decode(p).startswith(b"\x89PNG") for p in pictures)
    assert not any(
        "](http" in line and line.startswith("![")
        for c in load(path)
        for line in c["source"].splitlines()
    )


@course
def test_every_exported_name_is_used_in_its_notebook(path):
    notebook = build.Notebook(ROOT, name(path))
    for module in notebook.marked:
        for segment in notebook.segments(module):
            for public in build.public_names(segment.node):
                elsewhere = [
                    c["source"] if c is not notebook.data["cells"][segment.cell] else ""
                    for c in notebook.data["cells"]
                    if c["cell_type"] == "code"
                ]
                text = "\n".join("".join(s) for s in elsewhere)
                own = notebook.source(segment.cell)[1].replace(segment.text, "")
                assert re.search(rf"\b{public}\b", text + own), f"{public} is never used"


def test_ignored_outputs_are_few_and_asserted():
    """A hidden figure is bounded by an assertion, in its own cell or in the next."""
    total = ignored = 0
    for path in [*COURSE, TOUR, *SOLUTIONS]:
        cells = code(path)
        total += len(cells)
        for cell, after in pairwise([*cells, {"source": ""}]):
            if IGNORE.search(cell["source"]):
                ignored += 1
                both = ast.parse(cell["source"] + "\n" + after["source"])
                asserts = any(isinstance(n, ast.Assert) for n in ast.walk(both))
                assert asserts, f"{path.name}: {cell['source'][:60]}"
    assert 0 < ignored <= total / 20


@everything
def test_no_cell_downloads_or_pickles(path):
    for cell in code(path):
        assert not re.search(r"https?://|urllib|requests\.|import pickle|git clone", cell["source"])
        assert "torch.load(" not in cell["source"] or "weights_only=True" in cell["source"]


def test_the_glossary_holds_a_row_a_term_in_order_with_its_place():
    """Where the links lead is tested with all others, in test_links."""
    text = (ROOT / "notebooks" / "GLOSSARY.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.split("## Terms")[1].splitlines()[4:]]
    terms = [re.sub(r"[^a-z0-9]", "", row[0].lower()) for row in rows]
    assert len(rows) > 50 and terms == sorted(set(terms))
    assert all(len(row) == 3 and re.search(r"\]\([\w/]+\.ipynb#\S+\)", row[2]) for row in rows)
