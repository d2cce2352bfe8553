"""House rules of the notebooks: executed, whole, in step with the package, no output hidden."""

import ast
import base64
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from nbval_cells import NBVAL_REFUSES, NBVAL_TAKES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import build  # noqa: E402
from cells import text_of  # noqa: E402

SPINE = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
TOUR = ROOT / "notebooks" / "tour.ipynb"  # one cell of each chapter: builds and exports nothing
DEEPER = sorted((ROOT / "notebooks" / "deeper").glob("*.ipynb"))
BEYOND = sorted((ROOT / "notebooks" / "beyond").glob("*.ipynb"))
COURSE = SPINE + DEEPER + BEYOND
SOLUTIONS = sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))
HISTORY = re.compile(r"Out|In|_[io]h|_\d+|_i+\d*")
IGNORE = re.compile(r"NBVAL_(IGNORE_OUTPUT|SKIP|RAISES_EXCEPTION)")


def load(path: Path) -> list[dict]:
    return [c | {"source": text_of(c)} for c in build.load(path, name(path))["cells"]]


def code(path: Path) -> list[dict]:
    return [c for c in load(path) if c["cell_type"] == "code"]


def name(path: Path) -> str:
    return path.relative_to(ROOT / "notebooks").as_posix()


EVERYTHING = [*COURSE, TOUR, *SOLUTIONS]


def failures(rule: Callable[[Path], Iterable[object]], pages: list[Path]) -> list[str]:
    """What a rule finds on each of the pages, by its name: a test asserts that it is nothing."""
    return [f"{name(path)}: {found}" for path in pages for found in rule(path)]


def test_package_equals_notebooks():
    assert build.drift(ROOT) == []


def test_the_course_is_complete():
    assert [p.name[:2] for p in SPINE] == [f"{n:02}" for n in range(11)]
    beyond = [int(p.name[:2]) for p in BEYOND]  # each stands for itself: numbers may be kept free
    assert beyond == sorted(set(beyond)) and beyond[0] == 11


def out_of_order(path: Path) -> Iterator[str]:
    counts = [c["execution_count"] for c in code(path) if c["source"].strip()]
    if counts != list(range(1, len(counts) + 1)):
        yield f"executed in the order {counts}"
    if not all(c["source"].strip() for c in code(path)):
        yield "an empty code cell"


def test_executed_top_to_bottom():
    assert failures(out_of_order, EVERYTHING) == []


def unclean_outputs(path: Path) -> Iterator[str]:
    for cell in code(path):
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                yield f"an error of {cell['source']}"
            text = json.dumps({k: v for k, v in output.items() if k != "data"})
            text += json.dumps(
                {k: v for k, v in output.get("data", {}).items() if "image" not in k}
            )
            if "Warning" in text:
                yield f"a warning of {cell['source']}"
            if re.search(r"<matplotlib|: \[?\"Text\(", text):
                yield f"the echo of a drawing call in {cell['source']}"
            if re.search(r"/(home|root|tmp|Users|work)/", text):
                yield f"a path of a machine, from {cell['source']}"


def test_outputs_hold_no_errors_warnings_or_paths():
    assert failures(unclean_outputs, EVERYTHING) == []


def sentences_twice(path: Path) -> list[str]:
    """A merge or a move that left a copy behind."""
    text = "\n\n".join(c["source"] for c in load(path) if c["cell_type"] == "markdown")
    sentences = [" ".join(s.split()) for s in re.split(r"(?<=[.?!:])\s+|\n\n|\n(?=[-|#])", text)]
    long = Counter(s for s in sentences if len(s.split()) >= 12)
    return [s for s, count in long.items() if count > 1]


def test_no_long_sentence_stands_twice_on_a_page():
    assert failures(sentences_twice, EVERYTHING) == []


def saved_unlike_nbval_runs(path: Path) -> Iterator[str]:
    """What nbval, which keeps no history and passes over some messages, runs to another output."""
    for cell in code(path):
        try:
            tree = ast.parse(cell["source"])
        except SyntaxError:
            continue
        names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        yield from (f"{n} in {cell['source']}" for n in names if HISTORY.fullmatch(n))
        if IGNORE.search(cell["source"]):
            continue
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in calls:
            called = ast.unparse(call.func).rpartition(".")[2]
            if called in ("clear_output", "update_display"):
                yield f"{called}() in {cell['source']}"
            if any(keyword.arg == "display_id" for keyword in call.keywords):
                yield f"a display that can be updated in {cell['source']}"
        if tree.body and isinstance(last := tree.body[-1], ast.Expr):
            line = cell["source"].split("\n")[last.end_lineno - 1]
            if line.encode()[last.end_col_offset :].lstrip().startswith(b";"):
                yield f"a semicolon that hides a value in {cell['source']}"


def test_every_page_is_saved_as_nbval_runs_it():
    """CONTRIBUTING names the kinds; tests/test_execute.py runs nbval on one of each."""
    assert failures(saved_unlike_nbval_runs, EVERYTHING) == []


@pytest.mark.parametrize("source", NBVAL_REFUSES.values(), ids=NBVAL_REFUSES)
def test_what_nbval_would_refuse_is_found(source, monkeypatch):
    monkeypatch.setitem(globals(), "code", lambda path: [{"source": source}])
    assert [*saved_unlike_nbval_runs(TOUR)]


@pytest.mark.parametrize("source", NBVAL_TAKES.values(), ids=NBVAL_TAKES)
def test_what_nbval_takes_is_not_found(source, monkeypatch):
    monkeypatch.setitem(globals(), "code", lambda path: [{"source": source}])
    assert not [*saved_unlike_nbval_runs(TOUR)]


def unclean_metadata(path: Path) -> Iterator[str]:
    data = build.load(path, name(path), ids=True)
    if more := set(data["metadata"]) - {"kernelspec", "language_info"}:
        yield f"metadata {sorted(more)}"
    if more := {key for c in data["cells"] for key in c["metadata"]} - {"tags"}:
        yield f"metadata {sorted(more)} of a cell"


def test_metadata_is_clean():
    assert failures(unclean_metadata, EVERYTHING) == []


def missing_frame(path: Path) -> Iterator[str]:
    cells = load(path)
    first, text = cells[0]["source"], "\n".join(c["source"] for c in cells)
    number = "# " if path in DEEPER else f"# {path.name[:2]} "
    if cells[0]["cell_type"] != "markdown" or not first.startswith(number):
        yield f"the first cell does not begin with {number!r}"
    if not re.search(r"\w\?", first):
        yield "the first cell does not ask the notebook's question"
    if "GLOSSARY.md)" not in first:
        yield "the first cell does not link to the glossary"
    yield from (f"no {heading}" for heading in ("## Recap", "## Sources") if heading not in text)
    if f'sync("{name(path)}")' not in code(path)[-1]["source"]:
        yield "the last cell does not call sync with the page's name"


def test_the_first_page_and_the_last():
    assert failures(missing_frame, COURSE) == []


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


@pytest.mark.parametrize("path", DEEPER + BEYOND, ids=name)
def test_the_minutes_of_the_other_shelves_are_true(path):
    """In notebooks/README, and in the page's head if it names them."""
    row = rf"^\|.*\]\({re.escape(name(path))}\).*\| (\d+) \|$"
    said = re.findall(row, (ROOT / "notebooks/README.md").read_text(encoding="utf-8"), re.M)
    said += re.findall(r"Reading (?:takes|time\*\*) about (\d+) minutes", load(path)[0]["source"])
    assert said and all(abs(int(number) - minutes(path)) <= 6 for number in said)


def test_the_scoreboard_is_made_of_lines_that_pages_measure():
    lines = json.loads((ROOT / "assets" / "scoreboard.json").read_text(encoding="utf-8"))
    pages = {p.name[:2]: "".join(c["source"] for c in code(p)) for p in SPINE}
    for chapter in sorted({chapter for chapter, *_ in lines}):
        assert f'scoreboard("{chapter}", ' in pages[chapter], chapter
    for chapter, model, _, floors in lines:
        assert float(floors) >= 1 and f'"{model}"' in pages[chapter], model


def pictures_from_elsewhere(path: Path) -> Iterator[str]:
    pictures = [
        o["data"]["image/png"]
        for c in code(path)
        for o in c["outputs"]
        if "image/png" in o.get("data", {})
    ]
    if not pictures:
        yield "no picture"
    if not all(base64.b64decode(p).startswith(b"\x89PNG") for p in pictures):
        yield "a picture that is no PNG"
    for cell in load(path):
        for line in cell["source"].splitlines():
            if "](http" in line and line.startswith("!["):
                yield f"a picture from elsewhere: {line}"


def test_there_is_a_picture_and_all_are_drawn_here():
    assert failures(pictures_from_elsewhere, COURSE) == []


def unused_names(path: Path) -> Iterator[str]:
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
                if not re.search(rf"\b{public}\b", text + own):
                    yield f"{public} is exported and never used"


def test_every_exported_name_is_used_in_its_notebook():
    assert failures(unused_names, COURSE) == []


def test_ignored_outputs_are_few_and_asserted():
    """A hidden figure is bounded by an assertion, in its own cell or in the next."""
    total = ignored = 0
    for path in EVERYTHING:
        cells = code(path)
        total += len(cells)
        for cell, after in pairwise([*cells, {"source": ""}]):
            if IGNORE.search(cell["source"]):
                ignored += 1
                both = ast.parse(cell["source"] + "\n" + after["source"])
                asserts = any(isinstance(n, ast.Assert) for n in ast.walk(both))
                assert asserts, f"{path.name}: {cell['source'][:60]}"
    assert 0 < ignored <= total / 20


def downloads_or_pickles(path: Path) -> Iterator[str]:
    for cell in code(path):
        source = cell["source"]
        if re.search(r"https?://|urllib|requests\.|import pickle|git clone", source):
            yield source
        if "torch.load(" in source and "weights_only=True" not in source:
            yield source


def test_no_cell_downloads_or_pickles():
    assert failures(downloads_or_pickles, EVERYTHING) == []


def test_the_glossary_holds_a_row_a_term_in_order_with_its_place():
    """Where the links lead is tested with all others, in test_links."""
    text = (ROOT / "notebooks" / "GLOSSARY.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.split("## Terms")[1].splitlines()[4:]]
    terms = [re.sub(r"[^a-z0-9]", "", row[0].lower()) for row in rows]
    assert len(rows) > 50 and terms == sorted(set(terms))
    assert all(len(row) == 3 and re.search(r"\]\([\w/]+\.ipynb#\S+\)", row[2]) for row in rows)
