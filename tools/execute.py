"""Run notebooks top to bottom and save their outputs, reproducibly.

    python tools/execute.py                        all notebooks of the course, in place
    python tools/execute.py notebooks/05_rope.ipynb
    python tools/execute.py --to build notebooks/05_rope.ipynb    on a copy

Timing metadata and kernel noise are dropped; a cell that has no id, or another's, gets one. A cell
that fails stops the run, shows the traceback and leaves the file as it was. `tools/run.py` runs the
last page so that a person can follow it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import sys
import time
from hashlib import sha256
from pathlib import Path

import nbformat
from cells import text_of
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from minillm.support.files import replacing

ROOT = Path(__file__).resolve().parents[1]


def joined(outputs: list) -> list:
    """Neighbouring pieces of a stream as one: where they were cut was a matter of timing."""
    whole: list = []
    for output in outputs:
        last = whole[-1] if whole else {}
        same = output.output_type == "stream" and last.get("name") == output.get("name")
        if same:
            last.text += output.text
        else:
            whole.append(output)
    return whole


def clean(notebook: nbformat.NotebookNode) -> None:
    """Drop what differs from run to run though nothing of interest did."""
    notebook.metadata.clear()
    notebook.metadata.kernelspec = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        for key in set(cell.metadata) - {"tags"}:
            del cell.metadata[key]
        if cell.cell_type != "code":
            continue
        cell.outputs = joined(cell.outputs)
        for name in ("stdout", "stderr"):
            overwrite([o for o in cell.outputs if o.get("name") == name])
        cell.outputs = [output for output in cell.outputs if output.get("text") != ""]


def overwrite(stream: list) -> None:
    """Of a line that was begun anew, as a progress bar's, keep the last state: by nbval's rule, on
    the whole of a cell's stream, however many outputs hold it."""
    whole = "".join(output.text for output in stream)
    spans = [found.span() for found in re.finditer(r"^.*\r(?=[^\n])", whole, re.M)]
    end = 0
    for output in stream:
        start, end = end, end + len(output.text)
        kept = (i for i in range(start, end) if not any(a <= i < b for a, b in spans))
        output.text = "".join(whole[i] for i in kept)


def identify(data: dict) -> None:
    """Give an id to each cell that has none, as Colab and older formats save it, or another's."""
    seen: set[str] = set()
    for i, cell in enumerate(data["cells"]):
        if cell.get("id") is None or cell["id"] in seen:
            cell["id"] = sha256(f"{i} {text_of(cell)}".encode()).hexdigest()[:8]
            data["nbformat_minor"] = max(5, data["nbformat_minor"])
        seen.add(cell["id"])


def read(path: Path) -> nbformat.NotebookNode:
    """The notebook in a file. Raises: ValueError if there is none, such as after a merge."""
    text = path.read_text(encoding="utf-8")
    try:
        data = json.loads(text)
        if data["nbformat"] == 4:
            identify(data)
        notebook = nbformat.reads(json.dumps(data), as_version=4)
        nbformat.validate(notebook)
    except Exception as error:  # of many kinds: what is wrong is met while it is converted
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ValueError(f"not a notebook: {type(error).__name__}: {reason}") from None
    return notebook


def execute(
    path: Path, target: Path, *, client: type[NotebookClient] = NotebookClient, timeout: int = 1800
) -> nbformat.NotebookNode:
    """Run the notebook at `path` in the folder of `target`, which is made, and write it there.

    Raises: ValueError for a file that is no notebook; CellExecutionError if a cell fails.
    """
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(target.parent)}}
    target.parent.mkdir(parents=True, exist_ok=True)
    client(
        notebook,
        extra_arguments=["--log-level=ERROR"],
        timeout=timeout,
        kernel_name="python3",
        resources=resources,
        record_timing=False,
    ).execute()
    clean(notebook)
    with replacing(target) as temporary:
        nbformat.write(notebook, temporary)
    return notebook


def course(root: Path = ROOT) -> list[Path]:
    """All notebooks: the course, then its other shelves, each in the order of their names."""
    shelves = [root / "notebooks" / name for name in ("", "deeper", "beyond", "solutions")]
    return [path for shelf in shelves for path in sorted(shelf.glob("*.ipynb"))]


def prepare() -> None:
    """Let Windows run a kernel, and any terminal show what it has no character for as a ?."""
    if sys.platform == "win32":
        asyncio.set_event_loop_policy(asyncio.WindowsSelectorEventLoopPolicy())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument(
        "--to", type=Path, help="folder for the executed copies (default: in place)"
    )
    args = parser.parse_args(argv)
    prepare()
    for path in args.notebooks or course():
        target = (args.to or path.parent).resolve() / path.name
        start = time.perf_counter()
        try:
            execute(path, target)
        except (CellExecutionError, ValueError, OSError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
        print(f"{os.path.relpath(target)}: {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
