"""Copies of the pages for Google Colab, in build/colab/: each begins with a cell that fetches all.

    python tools/colab.py https://github.com/NAME/minillm v0.1.0

The address of the repository and a tag of it. The pages themselves hold no download; their copies
do in their first cell, which does nothing anywhere but on Colab. It was tested in a process that
takes itself for Colab, with a repository on the same disk; on Colab itself nobody has tried it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import build

ROOT = Path(__file__).resolve().parents[1]
CELL = """\
# On Google Colab: fetch the course and what is missing. Anywhere else this cell does nothing.
import os

if "COLAB_RELEASE_TAG" in os.environ:
    import re
    import subprocess
    import sys
    import tomllib
    from importlib import metadata
    from pathlib import Path

    course, shelf = Path(<folder>), <shelf>
    address, tag = <address>, <tag>

    def installed(name):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    def run(*command):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(" ".join(command) + "\\n" + done.stdout + done.stderr)

    if not course.exists():  # whole, or not at all: an interrupted clone has another name
        part = course.with_name(course.name + ".part")
        run("rm", "-rf", str(part))
        run("git", "clone", "--quiet", "--depth", "1", "--branch", tag, address, str(part))
        part.rename(course)
    project = tomllib.loads((course / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["notebooks"]
    wanted = {re.match(r"[\\w.-]+", line)[0]: line for line in wanted if "jupyter" not in line}
    least = re.search(r">=(\\d+)\\.(\\d+)", wanted["torch"]).groups()
    found = re.match(r"(\\d+)\\.(\\d+)", installed("torch") or "0.0").groups()
    if tuple(map(int, found)) < tuple(map(int, least)):
        raise RuntimeError(
            f"torch {installed('torch')} is too old for the course, which needs {'.'.join(least)}: "
            "choose a newer runtime version (Runtime, Change runtime type)"
        )
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    if missing := [line for name, line in wanted.items() if installed(name) is None]:
        fixed = course.with_name(course.name + "-fixed.txt")  # what pip must not move
        fixed.write_text("".join(f"{n}=={installed(n)}\\n" for n in ("torch", "numpy")))
        run(*pip, "--constraint", str(fixed), *missing)
    if installed("minillm") is None:
        run(*pip, "--no-deps", "--editable", str(course))
    if str(course) not in sys.path:
        sys.path.insert(0, str(course))  # for this kernel, which began before
    os.chdir(course / "notebooks" / shelf)
    print(f"the course, {tag}, is in {course}")
"""


def first_cell(address: str, tag: str, shelf: str, folder: str = "/content/minillm") -> str:
    """The source of the injected cell for a page of this shelf ("" or "deeper")."""
    values = {"folder": folder, "address": address, "tag": tag, "shelf": shelf}
    source = CELL
    for name, value in values.items():
        source = source.replace(f"<{name}>", repr(value))
    return source


def injected(page: Path, source: str) -> dict:
    """A page with the cell in front."""
    data = build.load(page, page.name, ids=True)
    cell = {"cell_type": "code", "execution_count": None, "id": "on-colab", "metadata": {}}
    cell |= {"outputs": [], "source": source.splitlines(keepends=True)}
    data["cells"].insert(0, cell)
    return data


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", help="of the repository, such as https://...")
    parser.add_argument("tag", help="the tag that the copies fetch")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "colab")
    args = parser.parse_args(argv)
    folder = ROOT / "notebooks"
    pages = [p for shelf in build.SHELVES for p in sorted((folder / shelf).glob("*.ipynb"))]
    try:
        for page in pages:
            name = page.relative_to(folder)
            shelf = "" if name.parent == Path() else name.parent.as_posix()
            data = injected(page, first_cell(args.address, args.tag, shelf))
            text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
            build.write(args.to / name, text)
    except build.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.to}: {len(pages)} pages, which fetch {args.tag} of {args.address}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
