"""The README does what it says: its examples run, its commands exist, the workflow uses them."""

import argparse
import importlib.util
import math
import os
import re
import statistics
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from minillm.stories.language import StoryLanguage

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"


def run(code: str, folder: Path) -> str:
    """What an example prints, in a folder of its own; the limit is there against hanging."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=folder,
        env=environment,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_examples_use_public_names_only():
    import minillm

    assert len(BLOCKS) == 3
    for block in BLOCKS:
        assert "from minillm import" in block and "from minillm." not in block
        assert "import minillm." not in block
        imported = re.search(r"from minillm import (\([^)]*\)|.*)", block)[1]
        assert set(re.findall(r"\w+", imported)) <= set(minillm.__all__)


def test_the_first_example_trains_to_two_floors_and_tells_a_story(tmp_path):
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 25
    measured, _, story = run(BLOCKS[0], tmp_path).partition("\n")
    bits, ratio = (float(x) for x in re.findall(r"\d+\.\d+", measured))
    assert 1.0 < ratio <= 2.0 and 0.0944 < bits <= 0.189
    assert len(story.split()) >= 40


def test_the_second_example_compares_two_models_on_ones_own_text(tmp_path):
    sources = [Path(module.__file__) for module in (argparse, statistics, textwrap)]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    (tmp_path / "my.txt").write_text(text, encoding="utf-8")
    lines = run(BLOCKS[1], tmp_path).splitlines()
    assert len(lines) == 2 and lines[0] != lines[1]
    losses = [float(re.search(r"loss (\d+\.\d+)", line)[1]) for line in lines]
    assert all(1.0 < loss < 5.0 for loss in losses)  # ln 512 = 6.24 is what knowing nothing costs


def test_the_third_example_tells_a_story_of_the_shipped_model():
    story = run(BLOCKS[2], ROOT).strip()
    assert story.startswith("Once upon a time") and StoryLanguage("en").score(story) > -math.inf


def test_what_is_installed_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    def names(requirements):
        return {re.match(r"[\w-]+", one)[0] for one in requirements}

    needed = re.search(r"has them\): it needs (.*?)\.", README)[1]
    assert {*re.findall(r"\w+", needed)} - {"and"} == names(project["dependencies"])
    extras = dict(re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", README, re.M))
    told = {name: {*brought.split(", ")} for name, brought in extras.items()}
    assert told == {k: names(v) for k, v in project["optional-dependencies"].items()}


def test_the_table_names_every_notebook():
    """One row each, in the table of its shelf: with its question or what it shows, and minutes."""
    rows = re.findall(r"^\|.*?\]\(notebooks/(\S+?\.ipynb)\).*\| \d+ \|$", README, re.M)
    shelves = [ROOT / "notebooks" / name for name in ("", "deeper", "beyond")]
    pages = [p.relative_to(shelves[0]).as_posix() for s in shelves for p in s.glob("*.ipynb")]
    assert sorted(rows) == sorted(pages)


def test_the_house_names_every_file():
    rows = re.findall(r"^\| `([\w/]+)/` \| (`.*`) \|$", README.partition("## The house")[2], re.M)
    told = {room: set(re.findall(r"`([\w.]+)/?`", files)) for room, files in rows}
    there: dict[str, set[str]] = {}
    for path in (ROOT / "minillm").rglob("*.py"):
        place = path.relative_to(ROOT / "minillm").parent.as_posix()
        if place in told and path.name != "__init__.py":
            there.setdefault(place, set()).add(path.name)
    there["support"].add("checks")  # a folder, a file for each subject
    assert told == there
    twelve = re.search(r"^(`ngram\.py` \(01\).*)$", README, re.M)[1]
    top = {path.name for path in (ROOT / "minillm").glob("*.py")}
    assert {*re.findall(r"`(\w+\.py)`", twelve)} == top - {
        "__init__.py",
        "__main__.py",
        "exercises.py",
    }


def test_ci_runs_the_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "\nmake test\n" in script and "make test" in README


def test_every_make_target_that_is_named_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        named = set(re.findall(r"\bmake (?:[A-Z]+=\S+ )?([a-z]+)\b", " ".join(code_of(text))))
        assert named and named <= targets, page


def code_of(text: str) -> list[str]:
    """What a document sets as code."""
    return re.findall(r"```\w*\n(.*?)```", text, re.S) + re.findall(r"`([^`\n]+)`", text)


@pytest.mark.skipif(sys.platform == "win32", reason="needs make")
def test_make_takes_the_small_torch_when_asked():
    """`make CPU=1` adds the index of CPU builds to what pip is told already, and only then."""
    recipe = 'show:\n\t@echo "index=$$PIP_EXTRA_INDEX_URL"\n'
    for cpu, index in (
        ("1", "https://one.example https://download.pytorch.org/whl/cpu"),
        ("x86_64", "https://one.example"),
    ):
        done = subprocess.run(
            ["make", "-s", "-f", "Makefile", "-f", "-", "show"],
            input=recipe,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "CPU": cpu, "PIP_EXTRA_INDEX_URL": "https://one.example"},
        )
        assert done.stdout.strip() == f"index={index}", done.stderr


def test_the_workflow_is_well_formed_and_runs_what_the_readme_says():
    yaml = pytest.importorskip("yaml")
    text = WORKFLOW.read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    steps = {name: [s["run"] for s in job["steps"] if "run" in s] for name, job in jobs.items()}
    assert all(job["timeout-minutes"] and steps[name] for name, job in jobs.items())
    assert steps["linux"] == [".ci/run"] and steps["real"] == ["make real"]
    assert jobs["linux"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert {job["runs-on"] for job in jobs.values()} == {
        "ubuntu-latest",
        "macos-latest",
        "windows-latest",
    }
    assert jobs["plain-instructions"]["env"] == {
        "ATEN_CPU_CAPABILITY": "default",
        "DNNL_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    }
    assert jobs["two-threads"]["env"]["OMP_NUM_THREADS"] == "2"
    assert jobs["more-examples"]["env"]["HYPOTHESIS_PROFILE"] == "workflow"
    windows = " ".join(steps["windows"])
    for command in re.findall(r"^(?:python -m venv|\.venv\\).*$", README, re.M):
        for part in command.split(" && "):
            assert part in windows, part


def test_the_profiles_of_hypothesis():
    code = "import conftest; from hypothesis import settings as s; print(s().max_examples)"
    for profile, examples in (("minillm", 100), ("workflow", 500)):
        environment = {**os.environ, "HYPOTHESIS_PROFILE": profile}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT / "tests",
            env=environment,
        )
        assert done.stdout.strip() == str(examples), done.stderr


def test_the_drawing_names_every_chapter_and_every_shelf():
    """The picture of the course would be wrong in silence if a chapter came or went.

    Deeper pages behind one of the shelf beyond (11 and on) are not in it.
    """
    spec = importlib.util.spec_from_file_location("draw_course", ROOT / "tools/draw_course.py")
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    drawn = [text.get_text() for text in drawing.draw().axes[0].texts]
    labels = {
        number for text in drawn if re.fullmatch(r"[\d, ]+", text) for number in text.split(", ")
    }
    shelf = {text[:2] for text in drawn if re.match(r"\d\d  ", text)}
    chapters = {path.name[:2] for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert labels == chapters
    behind = {path.name[:2] for path in (ROOT / "notebooks/deeper").glob("*.ipynb")}
    assert shelf == behind & chapters
