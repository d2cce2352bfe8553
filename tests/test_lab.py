"""Pages in JupyterLab, in a real Chromium: Run All, save; the saved outputs are the course's.

Needs playwright (pip install playwright) and Debian's chromium; skipped where one is missing. One
page by default; LAB_PAGES="notebooks/*.ipynb" runs all that match, in the order of their names.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbval.plugin import IPyNbCell, coalesce_streams, get_sanitize_patterns

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.glob(os.environ.get("LAB_PAGES", "notebooks/04_multihead.ipynb")))
]
# what nbval leaves out of a comparison
LEFT_OUT = "metadata traceback output_type name execution_count image/png image/jpeg".split()
LEFT_OUT.append("application/vnd.jupyter.widget-view+json")
LONGEST = 1800  # seconds for one page: a limit against hanging

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
]


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """The course in a folder of its own: JupyterLab saves what it runs."""
    folder = tmp_path_factory.mktemp("lab") / "course"
    skip = shutil.ignore_patterns(".*", "build", "student", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=skip)
    return folder


@pytest.fixture(scope="module")
def server(course, tmp_path_factory):
    """The address of a JupyterLab without a token, on the loopback, that knows no settings."""
    home = tmp_path_factory.mktemp("jupyter")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(course), "MINILLM_DEVICE": "cpu"}
    env |= {f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    env.pop("PYTEST_VERSION", None)  # sync() shall do here what it does for a reader
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    command += ["--IdentityProvider.token=", "--ServerApp.password="]
    with open(home / "log", "w") as log:
        process = subprocess.Popen(command, cwd=course, env=env, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(2 * LONGEST):
            try:
                urllib.request.urlopen(f"{address}/api/status", timeout=60)
                break
            except OSError:
                assert process.poll() is None, (home / "log").read_text()
                time.sleep(0.5)
        yield address
    finally:
        process.kill()  # asked to end, it may wait for kernels
        process.wait()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


def run_all(browser, server: str, page: str, path: Path) -> None:
    """Open a page that has no outputs, Run All, and save until every cell has its number."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, path)
    tab = browser.new_page()
    tab.goto(f"{server}/lab/tree/{page}?reset", timeout=1000 * LONGEST)
    accept = tab.locator("dialog .jp-mod-accept")  # it may ask for the kernel while that starts
    deadline, counts, asked = time.monotonic() + LONGEST, [], -300.0
    while counts != list(range(1, len(code) + 1)) and time.monotonic() < deadline:
        tab.wait_for_timeout(3000)
        if accept.count():
            accept.first.click()
        if state_of_kernel(server, page) != "idle":  # there is more to come
            continue
        tab.keyboard.press("Control+s")
        tab.wait_for_timeout(2000)
        counts = [cell.execution_count for cell in cells(path) if cell.cell_type == "code"]
        failed = [o for cell in cells(path) for o in cell.get("outputs", []) if "ename" in o]
        assert not failed, failed[0]["evalue"]
        if not any(counts) and time.monotonic() > asked + 300:  # not twice: cells would count on
            tab.get_by_role("menuitem", name="Run", exact=True).click()
            tab.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            asked = time.monotonic()
    assert counts == list(range(1, len(code) + 1)), f"not all of {page} was run: {counts}"
    tab.close()


def state_of_kernel(server: str, page: str) -> str:
    """What the server says of the page's kernel: idle, busy, starting; nothing without one."""
    with urllib.request.urlopen(f"{server}/api/sessions", timeout=60) as answer:
        sessions = json.load(answer)
    states = [s["kernel"]["execution_state"] for s in sessions if s["path"] == page]
    return states[0] if states else ""


def cells(path: Path) -> list:
    return nbformat.read(path, as_version=4).cells


def difference(ours, theirs) -> str:
    """What nbval would say of two cells' outputs; nothing if they agree."""
    if "NBVAL_IGNORE_OUTPUT" in ours.source:
        return ""
    text = (ROOT / "tests" / "nbval_sanitize.cfg").read_text(encoding="utf-8")
    page = SimpleNamespace(
        skip_compare=LEFT_OUT, sanitize_patterns=dict(get_sanitize_patterns(text))
    )
    found: list[str] = []
    judge = SimpleNamespace(parent=page, colors=SimpleNamespace(FAIL="", OKBLUE="", ENDC=""))
    judge.sanitize = lambda text: IPyNbCell.sanitize(judge, text)
    judge.format_output_compare = lambda *what: found.append(" | ".join(map(str, what)))
    outputs = (coalesce_streams(theirs.outputs), coalesce_streams(ours.outputs))
    if IPyNbCell.compare_outputs(judge, *outputs):
        return ""
    return f"{ours.id}: {'; '.join(found or judge.comparison_traceback)}"


@pytest.mark.parametrize("page", PAGES)
def test_run_all_gives_the_saved_outputs(browser, server, course, page):
    path = course / page
    if any(cell.source.startswith("#| export") for cell in cells(path)):
        assert "sync(" in cells(path)[-1].source
    run_all(browser, server, page, path)
    pairs = list(zip(cells(ROOT / page), cells(path), strict=True))
    assert [ours.source for ours, _ in pairs] == [theirs.source for _, theirs in pairs]
    code = [(ours, theirs) for ours, theirs in pairs if ours.cell_type == "code"]
    assert [text for text in (difference(*pair) for pair in code) if text] == []
    print(f"{page}: {len(code)} cells of code agree")


def test_a_copy_under_another_name_builds_nothing(browser, server, course):
    """Its last cell, `sync`, names the file that does."""
    page = "notebooks/01_mine.ipynb"
    notebook = nbformat.read(course / "notebooks/01_ngrams.ipynb", as_version=4)
    notebook.cells = [notebook.cells[0], notebook.cells[-1]]
    nbformat.write(notebook, course / page)
    run_all(browser, server, page, course / page)
    (output,) = cells(course / page)[-1].outputs
    assert f"{course / page} is a copy: only {course / 'notebooks/01_ngrams.ipynb'} builds the" in (
        output.text
    )


def test_a_changed_output_is_told():
    """The comparison itself can fail."""
    cell = next(c for c in cells(ROOT / "notebooks/04_multihead.ipynb") if c.get("outputs"))
    other = nbformat.from_dict({**cell, "outputs": []})
    assert difference(cell, cell) == "" and difference(cell, other) != ""
