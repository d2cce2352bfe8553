"""The last page of the course for a person to watch: a model is built, trained, measured, and asked
for stories. Runs on a copy under build/.

    python tools/run.py                            as `make run` does
    python tools/run.py notebooks/05_rope.ipynb    another page

Headings say where it is, and what the cells print appears while they run, up to the exercises. What
the cells tagged `result` printed stands once more at the end.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from cells import text_of
from execute import ROOT, execute, prepare
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

LAST = ROOT / "notebooks/10_minillm.ipynb"
BEFORE = """\
A language model is put together from its parts, trained (one to two minutes on two quiet cores of a
CPU, five on a slow machine), measured, and asked for stories.

Scores are in floors. The stories come from a small language whose every probability is known, so we
know what a perfect model would pay for them, in bits a byte: that is the floor. 1 floor is perfect,
2 floors are twice the bits. A story is valid if every word of it is one that the language allows.
"""
AFTER = """\
What next?
- {copy} is this run with its text and pictures.
- {python} -m minillm generate build/stories tells a story of the model that you have just trained.
- make story tells one of the model in assets/stories-en, which was trained for three hours.
- make lab opens the course: notebooks/tour.ipynb is half an hour, notebooks/01_ngrams.ipynb the
  first chapter."""


class Aloud(NotebookClient):
    """Says where it is, and repeats what the cells print, up to the exercises."""

    def __init__(self, notebook: nbformat.NotebookNode, **options: Any) -> None:
        super().__init__(notebook, on_cell_execute=self.announce, **options)
        cells = notebook.cells
        self.end = next((i for i, c in enumerate(cells) if "Exercises" in headings(c)), len(cells))
        self.total = sum(cell.cell_type == "code" for cell in cells[: self.end])
        self.said = ""

    def announce(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        before = self.nb.cells[: cell_index + 1]
        title = next((h for c in reversed(before) for h in reversed(headings(c))), "")
        if cell_index < self.end and title != self.said:
            self.said = title
            done = sum(c.cell_type == "code" for c in before)
            print(f"\n[{done}/{self.total}] {title}", flush=True)

    def output(self, outs, msg, display_id, cell_index):  # noqa: ANN001, ANN201 (nbclient's signature)
        if msg["msg_type"] == "stream" and cell_index < self.end:
            target = sys.stdout if msg["content"]["name"] == "stdout" else sys.stderr
            print(msg["content"]["text"], end="", file=target, flush=True)
        return super().output(outs, msg, display_id, cell_index)


def headings(cell: nbformat.NotebookNode) -> list[str]:
    """The headings in a cell of text, without their marks."""
    if cell.cell_type != "markdown":
        return []
    return [re.sub(r"[`*]", "", h) for h in re.findall(r"^#+ +(.*)$", text_of(cell), re.M)]


def results(notebook: nbformat.NotebookNode) -> str:
    """What the cells tagged `result` printed."""
    tagged = [c for c in notebook.cells if "result" in c.metadata.get("tags", [])]
    return "\n".join(
        o.text.rstrip()
        for c in tagged
        for o in c.outputs
        if o.output_type == "stream" and o.name == "stdout"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", nargs="?", type=Path, default=LAST)
    path = parser.parse_args(argv).notebook
    prepare()
    target = ROOT / "build" / path.name
    last = path.resolve() == LAST
    print(BEFORE if last else f"{path.name}, run on a copy")
    start = time.perf_counter()
    try:
        notebook = execute(path, target, client=Aloud)
    except (CellExecutionError, ValueError, OSError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    minutes = (time.perf_counter() - start) / 60
    told = results(notebook)
    print(f"\nIn short, after {minutes:.1f} minutes:\n\n{told}\n" if told else "")
    here = os.path.relpath(target)
    python = os.path.relpath(sys.executable)
    print(AFTER.format(copy=here, python=python) if last else f"{here} is this run.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
