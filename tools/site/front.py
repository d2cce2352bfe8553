"""The front page: a recorded story, the button of the live model, where to begin, three claims.

Every number on it is read from the repository, so none can go out of date unseen.
"""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path
from typing import Any


class NumberError(Exception):
    """A number of the front page is no longer where it was read."""


def found(pattern: str, path: Path) -> re.Match[str]:
    """Where a document says it. Raises: NumberError with the document's name."""
    if match := re.search(pattern, path.read_text(encoding="utf-8")):
        return match
    raise NumberError(f"{path.name} no longer has the number of the front page: {pattern}")


def claims(root: Path) -> list[str]:
    """What no other course has, in three lines, with today's numbers."""
    board = json.loads((root / "assets/scoreboard.json").read_text(encoding="utf-8"))
    floors = {(chapter, what): times for chapter, what, _, times in board}
    try:
        ngram, live = (
            floors["10", "7-gram of words, the same"],
            floors["10", "network, 2 layers, live"],
        )
    except KeyError as error:
        raise NumberError(f"scoreboard.json has no row {error}") from None
    card = root / "assets/stories-en/README.md"
    above = found(r"stands (\d+\.\d+)% above the floor", card)[1]
    valid = found(r"1,000 stories sampled at temperature 1: (\d+) are valid", card)[1]
    cells = lines = pages = 0
    for path in sorted((root / "notebooks").rglob("*.ipynb")):
        if path.parent.name == "solutions":
            continue
        notebook = json.loads(path.read_text(encoding="utf-8"))
        code = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
        exported = [text for text in code if text.startswith("#| export")]
        pages += bool(exported)
        cells += len(exported)
        lines += sum(len(text.splitlines()) - 1 for text in exported)
    results = root / "benchmarks/RESULTS.md"
    chat = r"off from transformers' by at most (\S+)\. The (\d+) greedy tokens after it: identical"
    off, tokens = found(chat, results).groups()
    packed = found(r"\| writing \d+ tokens \| \S+ tokens/s \| [^|]+ \| (\d+\.\d+) ", results)[1]
    return [
        "**The best possible score is known.** The stories come from a language whose every "
        "probability is known, so each model is measured against a floor that none can beat: a "
        f"7-gram of words pays {ngram} times the floor, a network trained on the same stories in "
        f"one to two minutes {live} times, the shipped one {above}% more than the floor; {valid} "
        "of 1,000 stories that it told are valid to the last word.",
        f"**The pages are the package.** {cells} cells on {pages} pages, {lines:,} lines, are word "
        "for word the code that you import. The tests run every cell and compare what it prints, "
        "but for times and whatever else a machine decides.",
        "**It runs real models.** SmolLM2-135M in our code: numbers within "
        f"{float(off):.5f} of `transformers`, the same {tokens} greedy tokens, written "
        f"{packed} times as fast with packed weights, on one thread of a CPU "
        "([how it was measured](benchmarks/RESULTS.md)).",
    ]


def shade(p: float) -> str:
    """The redder, the less probable: full at 8 bits of surprise."""
    return f"{min(1.0, -math.log2(max(p, 1e-9)) / 8):.3f}"


def told(story: dict[str, Any]) -> str:
    """The recorded story, a span a token, in the shade of its probability."""
    spans = []
    for token in story["tokens"]:
        text = html.escape(token["text"]) or "∎"
        title = f"probability {token['p']:.3f}"
        spans.append(f'<span style="--s:{shade(token["p"])}" title="{title}">{text}</span>')
    return "".join(spans)


def page(root: Path, story: dict[str, Any], size: int, repository: str = "") -> str:
    """The Markdown of index.md, without its lists of pages; `repository` is its address."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    what = found(r"(?m)^Ten Jupyter notebooks.* like this one:$", root / "README.md")[0]
    drawing = re.search(r"!\[([^\]]*)\]\((assets/course\.png)\)", readme)
    if not drawing:
        raise NumberError("README.md no longer shows assets/course.png")
    megabytes = f"{size / 1e6:.0f} MB"
    per_byte, floor = story["bits"] / story["bytes"], story["floor_bits"] / story["bytes"]
    code = f"- [The repository]({repository})\n" if repository else ""
    lines = "\n".join(f"- {claim}" for claim in claims(root))
    return f"""# minillm

{what}

<section class="live" id="live" aria-label="A story of the shipped model"
 data-size="{megabytes}" data-base="_static/live/">
<p class="story" id="story">{told(story)}</p>
<p class="story-note" id="story-note">Told by the model of chapter 10, recorded. The redder a token,
the less probable the model found it. Valid to the last word. The story cost the model
{per_byte:.4f} bits a byte. Its own floor, what a perfect model would have paid for it, is
{floor:.4f}.</p>
<p><button type="button" id="load">Let it tell another, here in your browser ({megabytes})</button>
<span id="status" role="status"></span></p>
<noscript><p>Without JavaScript the recorded story is all there is to see here.</p></noscript>
<script nomodule>
document.getElementById("load").disabled = true;
document.getElementById("status").textContent =
  "The live model cannot run here: this browser is too old for it. The recorded story stays.";
</script>
<div id="panel" hidden></div>
</section>
<script type="module" src="_static/front.js"></script>

What runs there is [the whole model in JavaScript](javascript.md), without a library.

## Begin

- [The course in half an hour](notebooks/tour.ipynb), a cell of each chapter
- [00 Before you begin](notebooks/00_before_you_begin.ipynb), if tensors and gradients are new
- [01 Language models and n-grams](notebooks/01_ngrams.ipynb), the first chapter; all ten are in
  the menu and in [the table](README.md#The-ten-chapters), with their questions and minutes
- [Exercises](notebooks/01_ngrams.ipynb#Exercises) stand at the end of each chapter and check
  themselves; [solutions](notebooks/solutions/index.md)
{code}
## What you will not find elsewhere

{lines}

## The map

![{drawing[1]}]({drawing[2]})

To run the pages on your own machine, see [how to install it](notebooks/README.md#Installing).
"""
