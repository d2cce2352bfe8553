"""Lay out the web edition's sources under build/site-src and let Sphinx make build/site of them.

    build/site-tools/venv/bin/python tools/site/pages.py

Everything comes from the notebooks, the documents, the package's docstrings, the scripts in static/
and the story of tools/site/recorded_story.py. No page is named here but for the two that get a
moving figure: a notebook that is added to a shelf is on the site.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import api
import front
import javascript

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent))
from cells import BuildError, load, marks, text_of  # noqa: E402

SOURCE, OUT = ROOT / "build/site-src", ROOT / "build/site"
STORY = ROOT / "build/site-live/story.json"
GRAMMAR = ROOT / "minillm/stories/grammars/en.txt"
MODEL = ("config.json", "model.safetensors", "tokenizer.json")  # of assets/stories-en

SHELVES = {  # folder in notebooks/: its name, what it is
    "deeper": (
        "Deeper",
        "Optional deep dives behind the chapters, pages of their own.",
    ),
    "beyond": ("Beyond", "Other architectures and other kinds of training."),
    "solutions": (
        "Solutions",
        "Worked answers to the exercises, each folded until you ask for it.",
    ),
}

# Words that plain English has too: only where a page sets them in bold are they the term.
COMMON = set(
    "accumulation activation adapter alignment alpha attention backend bit nat block stack branch "
    "chunk config context conversation decode decoding delta derivation drawing encode epoch "
    "expert family floor floors forgetting fork frequency gate graph grid head hook hybrid id "
    "kernel key latent layer load loss mask memory merge merger merging mixer module momentum norm "
    "packing padding panels parameter parents patch permutation placeholder projector query rank "
    "replay residual ridge ring router score selective shape shard shift state stream surprise "
    "tail target temperature tied token tokenizer valid value variance vocabulary weights window "
    "wavelength gradient clipping checkpoint interleaved pruning penalty draft embedding".split()
)


NOT_COMPARED = re.compile(r"^# *NBVAL_\w+ *\n?", re.M)  # a mark for tests, not for readers


class SourceError(Exception):
    """Something in the repository that no page can be made of."""


def read_notebook(path: Path) -> dict[str, Any]:
    """A notebook that was run: pages show stored outputs.

    Raises: SourceError with the notebook's name if a code cell of it was never run; BuildError if
        the file is no notebook or a cell has no id.
    """
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    notebook = load(path, str(name), ids=True)
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code" and text_of(c).strip()]
    missing = [c["id"] for c in cells if c.get("execution_count") is None]
    if missing or not any(c["outputs"] for c in cells):
        where = f"cell {missing[0]} was" if missing else "its cells were"
        mend = f"python tools/execute.py {name}"
        raise SourceError(f"{name} has no outputs: {where} never run; run {mend}")
    return notebook


def markdown_cell(text: str, name: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": text}


def package_label(module: str, up: str) -> str:
    """The line above an exported cell: what it becomes, with a link to the file."""
    file = f"minillm/{module.replace('.', '/')}.py"
    if not (ROOT / file).exists():
        raise SourceError(f"a cell is exported to {file}, which does not exist: run make build")
    return f"```{{container}} package-label\npackage code: [{file}]({up}{file[:-3]}.md)\n```"


def only_draws(cell: dict[str, Any]) -> bool:
    """Nothing but pictures comes of the cell, and it proves nothing: a page folds its code."""
    if cell["cell_type"] != "code" or re.search(r"^\s*assert\b", text_of(cell), re.M):
        return False
    outputs = cell["outputs"]
    return bool(outputs) and all("image/png" in output.get("data", {}) for output in outputs)


def with_ways(notebook: dict[str, Any], path: Path, repository: str) -> None:
    """After the head of a page, links to its exercises, their solutions, the chapters."""
    up = "../" * (len(path.relative_to(ROOT / "notebooks").parts) - 1)
    texts = [text_of(c) for c in notebook["cells"] if c["cell_type"] == "markdown"]
    ways = []
    if any(re.search(r"^## Exercises$", text, re.M) for text in texts):
        ways.append("[Exercises](#Exercises)")
        if (ROOT / "notebooks/solutions" / path.name).exists():
            ways.append(f"[solutions]({up}solutions/{path.name})")
    ways.append(f"[all chapters]({up}../README.md#The-ten-chapters)")
    ways += [f"[repository]({repository})"] if repository else []
    line = f"```{{container}} page-ways\n{' · '.join(ways)}\n```"
    notebook["cells"].insert(1, markdown_cell(line, "page-ways"))


def marked(notebook: dict[str, Any], up: str) -> int:
    """Label exported cells, fold those that only draw, and leave out the marks of tests; how many
    are exported.
    """
    default, cells, count = "", [], 0
    for cell in notebook["cells"]:
        found = marks(cell)
        default = found.get("default_exp") or default
        if "export" in found:
            count += 1
            module = found["export"] or default
            cells.append(markdown_cell(package_label(module, up), f"{cell['id']}-label"))
            cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), "package-code"]
        elif only_draws(cell):
            cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), "hide-input"]
        if cell["cell_type"] == "code":
            cell["source"] = NOT_COMPARED.sub("", text_of(cell))
        cells.append(cell)
    notebook["cells"] = cells
    return count


def figure_of_temperature(notebook: dict[str, Any]) -> dict[str, Any]:
    """The eight words of chapter 09 and the thousand others, as its first cell defines them."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and "\nlikely = {" in text_of(cell):
            dicts = [n for n in ast.walk(ast.parse(text_of(cell))) if isinstance(n, ast.Dict)]
            likely = {k: v for d in dicts for k, v in ast.literal_eval(d).items()}
            return {"likely": likely, "others": 1000, "rest": 0.02}
    raise SourceError("09_sampling.ipynb no longer defines `likely`, which its moving figure shows")


MOVING = {  # notebook: what to find in the cell with the static picture, the figure's class, data
    "03_attention": ('"window of 3": build_mask', "figure-mask", lambda notebook: {}),
    "09_sampling": ("ax.stackplot(", "figure-temperature", figure_of_temperature),
}


def relinked(text: str, path: Path) -> str:
    """A document whose links to files of the repository lead to what the site has of them."""

    def page_of(match: re.Match[str]) -> str:
        target = (path.parent / match[1]).resolve()
        if not target.is_file() or not target.is_relative_to(ROOT):
            return match[0]
        if target.suffix == ".py":
            api.lay_module(ROOT, SOURCE, target)
            return f"]({match[1][:-3]}.md)"
        if target.suffix not in (".md", ".ipynb", ".png"):  # a file to be had as it is
            copy = SOURCE / target.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, copy)
        return match[0]

    return re.sub(r"\]\((?!\w+:)([^()\s#]+)\)", page_of, text)


def add_figure(name: str, notebook: dict[str, Any]) -> None:
    """Put the moving figure of a page behind its static picture."""
    needle, kind, data = MOVING[name]
    places = [i for i, c in enumerate(notebook["cells"]) if needle in text_of(c)]
    if len(places) != 1:
        raise SourceError(f"{name}.ipynb: {len(places)} cells contain {needle!r}, wanted one")
    inside = json.dumps(data(notebook)).replace("<", "\\u003c")
    html = f'<div class="moving {kind}"><script type="application/json">{inside}</script></div>\n'
    html += '<script type="module" src="../_static/figures.js"></script>'
    notebook["cells"].insert(places[0] + 1, markdown_cell(html, f"{kind}-cell"))


def lay_notebooks() -> dict[str, list[str]]:
    """Write every notebook's page source; the names of each shelf, in order."""
    shelves: dict[str, list[str]] = {}
    for shelf in ("", *SHELVES):
        folder = Path("notebooks") / shelf
        (SOURCE / folder).mkdir(parents=True, exist_ok=True)
        shelves[shelf] = []
        for path in sorted((ROOT / folder).glob("*.ipynb")):
            notebook = read_notebook(path)
            marked(notebook, "../" * len(folder.parts))
            if shelf != "solutions":
                with_ways(notebook, path, os.environ.get("REPO", ""))
            if not shelf and path.stem in MOVING:
                add_figure(path.stem, notebook)
            for cell in notebook["cells"]:
                if cell["cell_type"] == "markdown":
                    cell["source"] = relinked(text_of(cell), path)
            target = SOURCE / folder / path.name
            target.write_text(json.dumps(notebook), encoding="utf-8")
            shelves[shelf].append(path.stem)
    if absent := MOVING.keys() - set(shelves[""]):
        raise SourceError(f"a moving figure waits for {min(absent)}.ipynb, which is not there")
    return shelves


def names_of_term(term: str) -> list[str]:
    """ "a, b (c)" names a and b; an abbreviation in brackets is a name of its own."""
    inside = re.findall(r"\(([^)]*)\)", term)
    names = re.sub(r"\s*\([^)]*\)", "", term).split(", ")
    return [n.strip() for n in names] + [n for n in inside if re.fullmatch(r"[A-Z]{2,}", n)]


def lay_glossary() -> None:
    """The glossary with an anchor a term, and terms.json for the links that lead there."""
    lines, terms = [], {}
    in_terms = False
    for line in (ROOT / "notebooks/GLOSSARY.md").read_text(encoding="utf-8").splitlines():
        in_terms = in_terms or line.startswith("## Terms")
        row = re.match(r"\| ([^|]+?) \| (.+) \| [^|]* \|$", line)
        if in_terms and row and row[1] != "term":
            term = row[1].replace("`", "")
            name = "term-" + re.sub(r"[^a-z0-9]+", "-", term.lower()).strip("-")
            meaning = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", row[2])
            for word in names_of_term(term):
                plain = word.lower() not in COMMON
                terms.setdefault(word.lower(), {"id": name, "meaning": meaning, "plain": plain})
            line = line.replace("| ", f'| <span id="{name}"></span>', 1)
        lines.append(line)
    if not terms:
        raise SourceError("notebooks/GLOSSARY.md has no table of terms")
    (SOURCE / "notebooks/GLOSSARY.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (SOURCE / "terms.json").write_text(json.dumps(terms), encoding="utf-8")


def lay_documents() -> None:
    """README, CONTRIBUTING, results, notes on the assets, and the drawings, at their places."""
    shelves = ["*.md", "notebooks/README.md", "benchmarks/*.md", "assets/**/*.md"]
    for path in [path for shelf in shelves for path in ROOT.glob(shelf)]:
        target = SOURCE / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8")
        text = re.sub(rf"\]\(((notebooks/)?({'|'.join(SHELVES)}))/?\)", r"](\1/index.md)", text)
        text = relinked(text, path)
        if path.parent.is_relative_to(ROOT / "assets"):
            text = f"---\norphan: true\n---\n{text}"
        target.write_text(text, encoding="utf-8")
    for path in ROOT.glob("assets/**/*.png"):
        target = SOURCE / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def toctree(entries: list[str], caption: str = "", depth: int = 1, *, shown: bool = False) -> str:
    options = [f":maxdepth: {depth}", *([] if shown else [":hidden:"])]
    options += [f":caption: {caption}"] if caption else []
    return "\n".join(["```{toctree}", *options, "", *entries, "```", ""])


def lay_shelves(shelves: dict[str, list[str]]) -> None:
    """A page a shelf: its rows of notebooks/README.md, if it has some, and its pages."""
    lines = (ROOT / "notebooks/README.md").read_text(encoding="utf-8").splitlines()
    for shelf, (title, what) in SHELVES.items():
        folder = SOURCE / "notebooks" / shelf
        (folder / "index.md").write_text(
            f"# {title}\n\n{what}\n\n{toctree(shelves[shelf], shown=True)}", encoding="utf-8"
        )
        rows = [s for s in lines if f"]({shelf}/" in s and s[0] == "|"]
        if rows:
            start = lines.index(rows[0])
            table = "\n".join([*lines[start - 2 : start], *rows])
            table = table.replace(f"]({shelf}/", "](")
            text = f"# {title}\n\n{what}\n\n{table}\n\n{toctree(shelves[shelf])}"
            (folder / "index.md").write_text(text, encoding="utf-8")


def lay_static() -> int:
    """Style, scripts and the model; how many bytes the live model needs."""
    static = SOURCE / "_static"
    shutil.copytree(HERE / "static", static)
    live = static / "live"
    live.mkdir()
    for name in MODEL:
        shutil.copy(ROOT / "assets/stories-en" / name, live)
    shutil.copy(GRAMMAR, live)
    return sum(path.stat().st_size for path in live.iterdir())


def lay_out() -> None:
    """All sources of the site, anew."""
    if not STORY.exists():
        raise SourceError(f"{STORY.relative_to(ROOT)} is missing: run make site")
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    shelves = lay_notebooks()
    lay_glossary()
    lay_documents()
    lay_shelves(shelves)
    rooms = api.lay(ROOT, SOURCE)
    size = lay_static()
    text = javascript.page(ROOT, HERE / "static")
    (SOURCE / "javascript.md").write_text(text, encoding="utf-8")
    spine = [f"notebooks/{name}" for name in shelves[""]]
    spine.sort(key=lambda name: not name.endswith("tour"))  # the tour first
    documents = sorted(path.stem for path in ROOT.glob("*.md") if path.stem != "README")
    trees = [
        toctree([*spine, "javascript"], "The course"),
        toctree(
            ["notebooks/README", *(f"notebooks/{shelf}/index" for shelf in SHELVES)],
            "Installing, further shelves",
        ),
        toctree(["notebooks/GLOSSARY", "benchmarks/RESULTS", "benchmarks/HISTORY"], "Look up"),
        toctree(["README", *documents, *rooms], "The package"),
    ]
    story = json.loads(STORY.read_text(encoding="utf-8"))
    text = front.page(ROOT, story, size, os.environ.get("REPO", ""))
    (SOURCE / "index.md").write_text("\n".join([text, *trees]), encoding="utf-8")


def main() -> None:
    start = time.perf_counter()
    try:
        lay_out()
    except (SourceError, BuildError, front.NumberError, javascript.CounterpartError) as error:
        sys.exit(f"make site: {error}")
    shutil.rmtree(OUT, ignore_errors=True)
    options = ["-b", "html", "-W", "--keep-going", "-q", "-j", "2", "-c", str(HERE)]
    cache = ["-d", str(ROOT / "build/site-doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, "-E", *cache, str(SOURCE), str(OUT)]
    if done := subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(done)
    files = [path for path in OUT.rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    pages = sum(path.suffix == ".html" for path in files)
    seconds = time.perf_counter() - start
    print(
        f"{OUT.relative_to(ROOT)}: {pages} pages, {len(files)} files, {total / 1e6:.1f} MB, "
        f"made in {seconds:.0f} s. make serve shows it."
    )


if __name__ == "__main__":
    main()
