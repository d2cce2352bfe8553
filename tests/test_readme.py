"""README and the pages that it leads to say what is true: numbers, examples, commands, tables."""

import argparse
import importlib.util
import json
import math
import os
import re
import runpy
import statistics
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from minillm import Sampler, StoryLanguage, from_pretrained, generate

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from cells import exported, load  # noqa: E402

README, SHELVES, PACKAGE, HOUSE = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "notebooks/README.md", "PACKAGE.md", "CONTRIBUTING.md")
)
BLOCKS = re.findall(r"```python\n(.*?)```", PACKAGE, re.S)
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


# README: its first screen, its numbers


def test_readme_is_short_and_begins_with_what_a_newcomer_asks():
    assert len(README.split()) <= 1500
    first = README.partition("## The ten chapters")[0]
    parts = ["\n> ", "\n| **", "```sh\nmake CPU=1 story", "**For whom.**", "**How long.**"]
    parts += ["**Afterwards you can**", "**How large it is, honestly.**"]
    assert [first.index(part) for part in parts] == sorted(first.index(part) for part in parts)
    assert len(re.findall(r"^make ", first, re.M)) == 3 == len(re.findall(r"^\| \*\*", first, re.M))


def test_the_story_of_readme_is_valid_and_the_shipped_model_tells_it():
    story = re.search(r"^> (.*)$", README, re.M)[1]
    assert StoryLanguage("en").score(story) > -math.inf
    model, tokenizer = from_pretrained(ROOT / "assets/stories-en", dtype="float32")
    begin = torch.tensor([[tokenizer.bos_token_id]])
    ids = generate(model, begin, max_new_tokens=320, sampler=Sampler(seed=6))
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == story


def lines_of_the_package() -> dict[str, int]:
    """Lines by who builds them: the ten chapters, the optional pages, nobody; the exercises."""
    found = dict.fromkeys(("chapters", "optional", "by hand", "exercises"), 0)
    for path in (ROOT / "minillm").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        page = re.search(r"^# Built from notebooks/(\S+)\.ipynb", text, re.M)
        kind = "by hand" if page is None else "optional" if "/" in page[1] else "chapters"
        if path.relative_to(ROOT / "minillm").parts[0].startswith("exercises"):
            kind = "exercises"
        found[kind] += len(text.splitlines())
    return found


READ = r"""
import re, sys, torch
from minillm import from_pretrained, generate
model, tokenizer = from_pretrained("assets/stories-en", dtype="float32")
generate(model, torch.tensor([[tokenizer.bos_token_id]]), max_new_tokens=4)
files = [m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "minillm"]
texts = [open(file, encoding="utf-8").read() for file in files]
ours = [t for t in texts if re.search(r"^# Built from notebooks/\w+\.ipynb", t, re.M)]
print(*(sum(len(t.splitlines()) for t in those) for those in (texts, ours)))
"""


def test_every_number_of_readme_is_true():
    """Each is read or computed here from its source; what every change moves, within a tenth."""

    def of(name: str, pattern: str) -> str:
        return re.search(pattern, (ROOT / name).read_text(encoding="utf-8"))[1]

    def pages(shelf: str) -> list[Path]:
        return [*(ROOT / "notebooks" / shelf).glob("*.ipynb")]

    board = json.loads((ROOT / "assets/scoreboard.json").read_text(encoding="utf-8"))
    floors = {model: times for chapter, model, _, times in board if chapter == "10"}
    card, tokens = "assets/stories-en/README.md", r"The (\d+) greedy tokens after it: identical"
    same = of("benchmarks/RESULTS.md", tokens)
    minutes = re.findall(r"^\| (0[1-9]|10) \|.*\| (\d+) \|$", README, re.M)
    exact = {  # what README says: what its source says
        r"Of 1,000 stories that it told, (\d+) were": of(card, r"temperature 1: (\d+) are valid"),
        r"of another 1,000, (\d+)\.": of(card, r"\((\d+) of another 1,000"),
        r"\*\*(\S+)%\*\* \| That model, after": of(card, r"stands (\S+)% above the floor"),
        r"A (\d)-gram that counts": "7",
        r"counts words pays (\S+) times": floors["7-gram of words, the same"],
        r"the same stories, in one to two minutes, (\S+) times": floors["network, 2 layers, live"],
        r"\*\*(\d+) of": same,
        r"of (\d+)\*\* \| tokens": same,
        r"This needs Python (\S+) or": of("pyproject.toml", r'requires-python = ">=([\d.]+)'),
        r"take about (\d+) hours": str(round(sum(int(m) for _, m in minutes) / 60)),
        r"behind the chapters, (\d+) on": str(len(pages("deeper"))),
        r"beyond them, (\d+) on": str(len(pages("beyond"))),
        r"fetches one \((\d+) MB\)": of("Makefile", r"chat model \((\d+) MB, Apache"),
    }
    for pattern, value in exact.items():
        assert of("README.md", pattern) == value, pattern
    cells = [
        c for s in ("", "deeper", "beyond") for p in pages(s) for c in load(p, p.name)["cells"]
    ]
    assert 250 <= sum(map(exported, cells)) < 300 and "**250 cells** | and more are" in README
    lines = lines_of_the_package()
    read, ours = map(int, run(READ, ROOT).split())
    near = {
        r"is some (\S+) lines, twelve files": lines["chapters"],
        r"package has (\S+):": sum(lines.values()),
        r": (\S+) are built by optional": lines["optional"],
        r"optional pages, (\S+) are written": lines["by hand"],
        r"and (\S+) check the exercises": lines["exercises"],
        r"Python reads (\S+) lines": read,
        r"of which (\S+) are of the ten": ours,
    }
    for pattern, value in near.items():
        said = int(of("README.md", pattern).replace(",", ""))
        assert abs(said - value) <= value / 10, (pattern, value)
    assert of(card, r"(?m)^(\d),\d{3},\d{3} parameters") == "2" and "some two million" in README
    last = (ROOT / "notebooks/10_minillm.ipynb").read_text(encoding="utf-8")
    assert "one to two minutes on two quiet cores" in last
    heads = [load(page, page.name)["cells"][0]["source"] for page in sorted(pages(""))]
    said = re.findall(r"exercises another (\w+)", " ".join(map("".join, heads[1:])))
    hours = sum(60 if m == "hour" else int(m) for m in said) / 60
    assert len(said) == 10 and round(hours) == 9 and "the exercises another nine" in README
    assert "running two to four minutes" in last and "trained for nearly three hours" in last
    assert of("notebooks/tour.ipynb", r"The course in (half an hour)") in README
    # and there is no other number, but in the rows of the chapters and in code
    rest = re.sub(
        r"^(\| [^*\n]|> )[^\n]*$|`[^`\n]+`|\]\([^)]*\)|```.*?```",
        "",
        README,
        flags=re.M | re.S,
    )
    for pattern in [*exact, *near]:
        found = re.search(pattern, rest)
        rest = rest[: found.start(1)] + "N" * len(found[1]) + rest[found.end(1) :]
    rest = rest.replace("SmolLM2-135M", "")
    assert set(re.findall(r"\d(?:[\d,]*\d)?", rest)) == {"1,000", "250", "00", "01", "10"}


# PACKAGE.md, the tables, the commands


def test_the_examples_use_public_names_only():
    import minillm

    assert len(BLOCKS) == 3
    for block in BLOCKS:
        assert "from minillm import" in block and "from minillm." not in block
        assert "import minillm." not in block
        imported = re.search(r"from minillm import (\([^)]*\)|.*)", block)[1]
        assert set(re.findall(r"\w+", imported)) <= set(minillm.__all__)


OPENED = """
import sys
from collections import Counter
lines = Counter()
for name, module in sys.modules.items():
    if name.partition(".")[0] == "minillm":
        column = name.split(".")[1] if name.count(".") > 1 else "chapters"
        with open(module.__file__, encoding="utf-8") as file:
            lines[column if column in ("chapters", "support") else "shelves"] += len([*file])
print(*map(lines.__getitem__, ("chapters", "support", "shelves")))
"""


def test_the_first_example_trains_to_two_floors_and_tells_a_story(tmp_path):
    """And Python reads no more of the package for it than it did when this was written."""
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 25
    told, _, opened = run(BLOCKS[0] + OPENED, tmp_path).rstrip().rpartition("\n")
    chapters, support, shelves = map(int, opened.split())
    assert chapters <= 2350 and chapters + support + shelves <= 5420
    measured, _, story = told.partition("\n")
    bits, ratio = (float(x) for x in re.findall(r"\d+\.\d+", measured))
    assert 1.0 < ratio <= 2.0 and 0.0944 < bits <= 0.189
    assert len(story.split()) >= 40


def run_here(code: str, folder: Path, monkeypatch, capsys) -> str:
    """What an example prints that may run in this process, with a namespace of its own."""
    monkeypatch.chdir(folder)
    exec(compile(code, "PACKAGE.md", "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out


def test_the_second_example_compares_two_models_on_ones_own_text(tmp_path, monkeypatch, capsys):
    sources = [Path(module.__file__) for module in (argparse, statistics, textwrap)]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    (tmp_path / "my.txt").write_text(text, encoding="utf-8")
    lines = run_here(BLOCKS[1], tmp_path, monkeypatch, capsys).splitlines()
    assert len(lines) == 2 and lines[0] != lines[1]
    losses = [float(re.search(r"loss (\d+\.\d+)", line)[1]) for line in lines]
    assert all(1.0 < loss < 5.0 for loss in losses)  # ln 512 = 6.24 is what knowing nothing costs


def test_the_third_example_tells_a_story_of_the_shipped_model(monkeypatch, capsys):
    story = run_here(BLOCKS[2], ROOT, monkeypatch, capsys).strip()
    assert story.startswith("Once upon a time") and StoryLanguage("en").score(story) > -math.inf


def test_what_is_installed_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    def names(requirements):
        return {re.match(r"[\w-]+", one)[0] for one in requirements}

    needed = re.search(r"has them\): it needs (.*?)\.", PACKAGE)[1]
    assert {*re.findall(r"\w+", needed)} - {"and"} == names(project["dependencies"])
    extras = dict(re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", PACKAGE, re.M))
    told = {name: {*brought.split(", ")} for name, brought in extras.items()}
    assert told == {k: names(v) for k, v in project["optional-dependencies"].items()}


def test_the_table_names_every_notebook():
    """One row each, in the table of its shelf: with its question or what it shows, and minutes."""
    chapters = re.findall(r"^\|.*?\]\(notebooks/(\S+?\.ipynb)\).*\| \d+ \|$", README, re.M)
    assert sorted(chapters) == sorted(p.name for p in (ROOT / "notebooks").glob("*.ipynb"))
    for shelf, title in (("deeper", "Behind the chapters"), ("beyond", "Beyond the chapters")):
        part = SHELVES.partition(f"## {title}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\|.*?\]\((\S+?\.ipynb)\).*\| \d+ \|$", part, re.M)
        pages = [f"{shelf}/{p.name}" for p in (ROOT / "notebooks" / shelf).glob("*.ipynb")]
        assert sorted(rows) == sorted(pages)


def test_the_house_names_every_file():
    rows = re.findall(r"^\| `([\w/]+)/` \| (`.*`) \|$", HOUSE.partition("## The house")[2], re.M)
    told = {room: set(re.findall(r"`([\w.]+)/?`", files)) for room, files in rows}
    there: dict[str, set[str]] = {}
    for path in (ROOT / "minillm").rglob("*.py"):
        place = path.relative_to(ROOT / "minillm").parent.as_posix()
        if place in told and path.name != "__init__.py":
            there.setdefault(place, set()).add(path.name)
    there["support"].add("checks")  # a folder, a file for each subject
    assert told == there
    twelve = re.search(r"^(`ngram\.py` \(01\).*)$", HOUSE, re.M)[1]
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
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.M))
    for page, text in (("README", README), ("notebooks/README", SHELVES), ("CONTRIBUTING", HOUSE)):
        named = set(
            re.findall(r"\bmake (?:[A-Z]+=\S+ )?([a-z][a-z-]*)\b", "\n".join(code_of(text)))
        )
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
    for command in re.findall(r"^(?:python -m venv|\.venv\\).*$", SHELVES, re.M):
        for part in command.split(" && "):
            assert part in windows, part


def test_the_profiles_of_hypothesis(monkeypatch):
    loaded = settings.get_current_profile_name()
    try:
        for profile, examples in (("minillm", 100), ("workflow", 500)):
            monkeypatch.setenv("HYPOTHESIS_PROFILE", profile)
            runpy.run_path(str(ROOT / "tests" / "conftest.py"))
            assert settings().max_examples == examples
    finally:
        settings.load_profile(loaded)


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
