"""Notebooks -> package, package -> notebooks, and the check that both say the same.

    python tools/build.py build [NOTEBOOK ...]   write minillm/*.py from the marked cells
    python tools/build.py pull  [MODULE ...]     carry edits of minillm/*.py back into their cells
    python tools/build.py check                  fail if the two differ; say what mends it

A notebook names its module with `#| default_exp nn.rope`; a cell whose first line is `#| export`
belongs to that module, one with `#| export cache.base` to another. The first marked cell of a
module opens with its docstring. Imports of all its cells are gathered at the top; `__all__` is
made from the public names, and from names passed on with `from a import b as b`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"#\|\s*(default_exp|export)(?:[ \t]+(\w+(?:\.\w+)*))?[ \t]*$")
HEADER = "# Built from notebooks/{}: edit there, then make build."
HEADER_RE = re.compile(r"^# Built from notebooks/(.+?): edit there, then make build\.$", re.M)


class BuildError(Exception):
    """Something in a notebook or a module that cannot be built; the message names the place."""


@dataclass
class Segment:
    """One top-level statement with the comments above it, and the cell it stands in."""

    text: str
    node: ast.stmt
    cell: int = -1

    @property
    def key(self) -> str:
        node = self.node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return node.name
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return ", ".join(ast.unparse(t) for t in targets)
        return ast.unparse(node).splitlines()[0]

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, (ast.Import, ast.ImportFrom))

    @property
    def is_docstring(self) -> bool:
        return isinstance(self.node, ast.Expr) and isinstance(self.node.value, ast.Constant)


def split(source: str, where: str, cell: int = -1) -> list[Segment]:
    """Top-level statements of `source`. Raises: BuildError naming `where` if not plain Python."""
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        line = source.splitlines()[(error.lineno or 1) - 1] if source.strip() else ""
        hint = " (magics cannot be exported)" if line.lstrip()[:1] in ("%", "!", "?") else ""
        raise BuildError(
            f"{where}, line {error.lineno}: {error.msg}: {line.strip()!r}{hint}"
        ) from None
    lines, segments, start = source.splitlines(), [], 0
    for node in body:
        segments.append(Segment("\n".join(lines[start : node.end_lineno]).strip("\n"), node, cell))
        start = node.end_lineno
    rest = "\n".join(lines[start:]).strip("\n")
    if rest and segments:  # a trailing comment stays with the last statement
        segments[-1].text += "\n" + rest
    return segments


class Notebook:
    """A notebook file and, per module, the marked cells in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = json.loads(path.read_text(encoding="utf-8"))
        self.default: str | None = None
        self.marked: dict[str, list[int]] = {}
        for i, cell in enumerate(self.data["cells"]):
            first, _ = self.source(i)
            mark = MARK.match(first) if cell["cell_type"] == "code" else None
            if mark and mark[1] == "default_exp":
                self.default = mark[2]
            elif mark:
                module = mark[2] or self.default
                if module is None:
                    raise BuildError(
                        f"{path.name}, cell {i}: '#| export' before any '#| default_exp'"
                    )
                self.marked.setdefault(module, []).append(i)

    def source(self, i: int) -> tuple[str, str]:
        """First line (the mark, if any) and the rest of cell `i`."""
        first, _, rest = "".join(self.data["cells"][i]["source"]).partition("\n")
        return first, rest

    def segments(self, module: str) -> list[Segment]:
        found = []
        for i in self.marked[module]:
            found += split(self.source(i)[1], f"{self.path.name}, cell {i}", i)
        return found

    def replace(self, i: int, source: str) -> None:
        text = self.source(i)[0] + "\n" + source.strip("\n")
        self.data["cells"][i]["source"] = text.splitlines(keepends=True)

    def save(self) -> None:
        write(self.path, json.dumps(self.data, indent=1, ensure_ascii=False) + "\n")


def write(path: Path, text: str) -> bool:
    """Replace `path` atomically, only when its content changes."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
    return True


def module_path(root: Path, module: str) -> Path:
    """Where a module stands: `nn.rope` in `minillm/nn/rope.py`."""
    return root.joinpath("minillm", *module.split(".")).with_suffix(".py")


def shown(module: str) -> str:
    """The path of a module as messages name it."""
    return module_path(Path(), module).as_posix()


def module_name(root: Path, path: str | Path) -> str:
    """The module that a file or a name stands for: `minillm/nn/rope.py` or `nn.rope`."""
    parts = Path(path).with_suffix("").parts if str(path).endswith(".py") else (str(path),)
    return ".".join(parts[parts.index("minillm") + 1 :] if "minillm" in parts else parts)


def ruff(text: str, name: str, root: Path) -> str:
    """Sort imports and format, with the settings of pyproject.toml."""
    for command in (
        ["check", "--select", "I,RUF022", "--fix-only", "--quiet"],
        ["format", "--quiet"],
    ):
        command = [
            sys.executable,
            "-m",
            "ruff",
            *command,
            "--stdin-filename",
            shown(name),
            "-",
        ]
        done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=root)
        if done.returncode:
            raise BuildError(f"ruff could not format {name}: {done.stderr.strip()}")
        text = done.stdout
    return text


def render(notebook: Notebook, module: str, root: Path) -> str:
    """The text of `minillm/<module>.py` as the marked cells of `notebook` define it."""
    segments = notebook.segments(module)
    where = f"{notebook.path.name}, cell {notebook.marked[module][0]}"
    if not segments or not segments[0].is_docstring:
        raise BuildError(f"{where}: the first marked cell of {module} must open with its docstring")
    imports = dict.fromkeys(ast.unparse(s.node) for s in segments if s.is_import)
    body = [s for s in segments[1:] if not s.is_import]
    names = dict.fromkeys(n for s in segments for n in public_names(s.node))
    exported = "__all__ = [" + ", ".join(f'"{n}"' for n in names) + "]"
    parts = [segments[0].text, HEADER.format(notebook.path.name), "\n".join(imports), exported]
    return ruff("\n\n".join(parts + [s.text for s in body]) + "\n", module, root)


def public_names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        names = [node.name]
    elif isinstance(node, ast.Assign):
        names = [t.id for t in node.targets if isinstance(t, ast.Name)]
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        names = [node.target.id]
    elif isinstance(node, ast.ImportFrom):
        # `from a import b as b` passes b on, as type checkers read it
        names = [a.name for a in node.names if a.asname == a.name]
    else:
        names = []
    return [n for n in names if not n.startswith("_")]


def notebooks(root: Path) -> list[Notebook]:
    return [Notebook(path) for path in sorted((root / "notebooks").glob("*.ipynb"))]


def owners(root: Path) -> dict[str, Notebook]:
    """Which notebook owns which module. Raises: BuildError if two notebooks claim one."""
    found: dict[str, Notebook] = {}
    for notebook in notebooks(root):
        for module in notebook.marked:
            if module in found:
                both = f"{found[module].path.name} and {notebook.path.name}"
                raise BuildError(f"{shown(module)} is claimed by {both}")
            found[module] = notebook
    return found


def build(root: Path = ROOT, only: Iterable[str] = ()) -> list[str]:
    """Write the modules of all notebooks (or of those named); returns the modules that changed."""
    only = {Path(name).name for name in only}
    changed = []
    for module, notebook in owners(root).items():
        if not only or notebook.path.name in only:
            text = render(notebook, module, root)
            if write(module_path(root, module), text):
                changed.append(module)
    return changed


def drift(root: Path = ROOT) -> list[str]:
    """One line for each difference, naming the command that mends it."""
    problems, owned = [], owners(root)
    for module, notebook in owned.items():
        path, text = module_path(root, module), render(notebook, module, root)
        if not path.exists():
            problems.append(f"{shown(module)} is missing: run make build")
        elif path.read_text(encoding="utf-8") != text:
            mend = which_command(root, path, notebook.path, text)
            problems.append(f"{shown(module)} differs from notebooks/{notebook.path.name}: {mend}")
    for path in sorted((root / "minillm").rglob("*.py")):
        header = HEADER_RE.search(path.read_text(encoding="utf-8"))
        name = path.relative_to(root)
        if header and module_name(root, name) not in owned:
            problems.append(
                f"{name.as_posix()} says it is built from {header[1]}, which no longer exports it"
            )
    return problems


def which_command(root: Path, module: Path, notebook: Path, built: str) -> str:
    """Whose edit is newer? Ask git what was committed; without git, the clock."""
    shown = subprocess.run(
        ["git", "show", f"HEAD:./{module.relative_to(root).as_posix()}"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if shown.returncode == 0 and shown.stdout == built:
        return "the module was edited, run make pull"
    if shown.returncode == 0 and shown.stdout == module.read_text(encoding="utf-8"):
        return "the notebook was edited, run make build"
    if shown.returncode == 0:
        return "both were edited: make pull keeps the module's edits, make build the notebook's"
    newer = module.stat().st_mtime > notebook.stat().st_mtime
    return (
        "the module is newer, run make pull" if newer else "the notebook is newer, run make build"
    )


def pull(root: Path = ROOT, only: Iterable[str] = ()) -> list[str]:
    """Carry edits of minillm/*.py back into their cells; returns the notebooks that changed."""
    only = {module_name(root, name) for name in only}
    changed: dict[str, None] = {}
    for module, notebook in owners(root).items():
        path = module_path(root, module)
        if (only and module not in only) or not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        if text != render(notebook, module, root):
            pull_module(notebook, module, text, root)
            notebook.save()
            changed[notebook.path.name] = None
            write(path, render(notebook, module, root))
    return list(changed)


def pull_module(notebook: Notebook, module: str, text: str, root: Path) -> None:
    """Rewrite the cells of `module` so that they say what `text` says."""
    theirs = split(text, f"{shown(module)}")
    built = split(render(notebook, module, root), module)
    ours = notebook.segments(module)
    if not theirs or not theirs[0].is_docstring:
        raise BuildError(f"{shown(module)}: the module docstring is missing")
    if ast.unparse(theirs[0].node) != ast.unparse(ours[0].node):
        ours[0].text = theirs[0].text
    body = [s for s in ours[1:] if not s.is_import]
    old, new = (
        [s for s in side[1:] if not s.is_import and s.key != "__all__"] for side in (built, theirs)
    )
    added: dict[int, list[str]] = {}  # id of a segment -> texts that follow it
    for op, a0, a1, b0, b1 in SequenceMatcher(
        None, [s.key for s in old], [s.key for s in new], False
    ).get_opcodes():
        if op == "equal":
            for mine, before, after in zip(body[a0:a1], old[a0:a1], new[b0:b1], strict=True):
                if before.text != after.text:
                    mine.text = after.text
            continue
        anchor = body[a0 - 1] if a0 else next((s for s in reversed(ours) if s.is_import), ours[0])
        added.setdefault(id(anchor), []).extend(s.text for s in new[b0:b1])
        for mine in body[a0:a1]:
            mine.text = ""
    pull_imports(ours, built, theirs, added)
    for i in notebook.marked[module]:
        pieces = [t for s in ours if s.cell == i for t in (s.text, *added.get(id(s), ())) if t]
        before = split(notebook.source(i)[1], "")
        if [s.text for s in before] != pieces:
            source = "\n\n".join(pieces)
            notebook.replace(i, ruff(source, module, root) if source else "")


def pull_imports(
    ours: list[Segment], built: list[Segment], theirs: list[Segment], added: dict
) -> None:
    """Add to the first cell the imports that the module gained, drop those that it lost."""
    old, new = (
        {one for s in side if s.is_import for one in single_imports(s.node)}
        for side in (built, theirs)
    )
    for segment in ours:
        if segment.is_import and any(one in old - new for one in single_imports(segment.node)):
            segment.text = "\n".join(
                one for one in single_imports(segment.node) if one not in old - new
            )
    if new - old:
        added.setdefault(id(ours[0]), []).insert(0, "\n".join(sorted(new - old)))


def single_imports(node: ast.stmt) -> list[str]:
    """`from a import b, c` as two statements."""
    if isinstance(node, ast.ImportFrom):
        return [ast.unparse(ast.ImportFrom(node.module, [name], node.level)) for name in node.names]
    return [ast.unparse(ast.Import([name])) for name in node.names]


def sync(name: str) -> None:
    """A notebook's last cell: rebuild its modules from the saved file.

    Under pytest and in build/ it only checks. Edits that are not saved yet are named instead.
    """
    notebook = Notebook(ROOT / "notebooks" / name)
    saved = {
        "".join(c["source"]).strip() for c in notebook.data["cells"] if c["cell_type"] == "code"
    }
    try:
        history = get_ipython().user_ns.get("In", [])  # type: ignore[name-defined]
    except NameError:
        history = []
    latest: dict[str, str] = {}
    for source in (h.strip() for h in history if re.match(r"#\|\s*export", h)):
        for segment in split(source.partition("\n")[2], "a cell"):
            latest[segment.key] = source
    unsaved = sorted(
        {s.splitlines()[1] for s in latest.values() if s not in saved and len(s.splitlines()) > 1}
    )
    only_check = "PYTEST_VERSION" in os.environ or Path.cwd().name == "build"
    for module in notebook.marked:
        path, text = module_path(ROOT, module), render(notebook, module, ROOT)
        same = path.exists() and path.read_text(encoding="utf-8") == text
        if unsaved:
            print(
                f"unsaved edits: save the notebook, then run this cell again ({'; '.join(unsaved)})"
            )
            return
        if not same and only_check:
            raise BuildError(f"{shown(module)} differs from notebooks/{name}: run make build")
        if not same:
            write(path, text)
            print(
                f"{shown(module)} rebuilt: restart kernels that have imported it",
                file=sys.stderr,
            )
        print(f"{shown(module)} is what this notebook says")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["build", "pull", "check"])
    parser.add_argument(
        "names", nargs="*", help="notebooks (build) or modules (pull); all by default"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        if args.command == "check":
            problems = drift(args.root)
            print("\n".join(problems) if problems else "package and notebooks agree")
            return bool(problems)
        changed = (build if args.command == "build" else pull)(args.root, args.names)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.command}: " + (", ".join(changed) if changed else "nothing to do"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
