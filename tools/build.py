"""Notebooks -> package, package -> notebooks, and the check that both say the same.

    python tools/build.py build [NOTEBOOK ...]   write minillm/*.py from the marked cells
    python tools/build.py pull  [MODULE ...]     carry edits of minillm/*.py back into their cells
    python tools/build.py check                  fail if the two differ; say what mends it

A notebook names its module with `#| default_exp nn.rope`; a cell whose first line is `#| export`
belongs to that module, one with `#| export cache.base` to another. The first marked cell of a
module opens with its docstring. Imports of all its cells are gathered at the top; `__all__` is made
from the public names, and from names passed on with `from a import b as b`.

A later cell may reopen a class: `class Decoder(Decoder):` adds methods and attributes. That is live
Python in the notebook; the module gets one class, the bodies in the notebook's order, at the place
of the first. Only what means the same in both is allowed: see REOPENING.
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
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"#\|\s*(default_exp|export)(?:[ \t]+(\w+(?:\.\w+)*))?[ \t]*$")
HEADER = "# Built from notebooks/{}: edit there, then make build."
HEADER_RE = re.compile(r"^# Built from notebooks/(.+?): edit there, then make build\.$", re.M)


# What a cell `class X(X):` may not hold, and why: its body moves up into the first cell's class.
REOPENING = {
    "first": "no earlier marked cell of this module defines {name}",
    "head": "its head has no other base, no keyword, no decorator and no comment",
    "above": "a comment above it would stand inside the class: put it above the first method",
    "doc": "the docstring stands in the first cell of {name}",
    "body": "only methods and class attributes are added, not `{what}`",
    "comment": "a comment after the last method belongs to none: put it above one",
    "empty": "the first cell of {name} needs a docstring, a method or an attribute, not `pass`",
    "kind": "{what} would see the first cell of {name} only: keep the class whole",
    "override": "{what} is defined in an earlier cell of {name}: nothing is overridden",
    "super": "{what} means another class here than in the module",
    "special": "{what} must stand in the first cell of {name}",
    "order": "{what} is needed as the class is made, but defined only after its first cell",
    "scope": "{what}, read as the class is made, would mean {name}.{what} in the module",
    "between": "{what} uses {name} before it is whole: reopen {name} first",
}
# Class decorators, keywords and these bases act on the class as its first cell leaves it.
MAKERS = {"NamedTuple", "TypedDict", "Protocol", "Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class BuildError(Exception):
    """Something in a notebook or a module that cannot be built; the message names the place."""


@dataclass
class Segment:
    """One statement of a module or of a class body, with the comments above it, and its cell."""

    text: str
    node: ast.stmt
    cell: int = -1
    reopened: list[Segment] = field(default_factory=list)  # later cells of this class
    added: list[str] = field(default_factory=list)  # what pull puts after it

    @property
    def key(self) -> str:
        node = self.node
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
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

    @property
    def is_reopening(self) -> bool:
        return isinstance(self.node, ast.ClassDef) and any(
            isinstance(base, ast.Name) and base.id == self.node.name for base in self.node.bases
        )

    @property
    def whole(self) -> str:
        """The text in the module: of a reopened class, all bodies under the first head."""
        bodies = [part.text.partition("\n")[2].strip("\n") for part in self.reopened]
        return "\n\n".join([self.text, *bodies])

    def replace(self, text: str) -> None:
        """Let `text` stand for this statement, and nothing in the cells that reopen it."""
        self.text = text
        for part in self.reopened:
            part.text = ""


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
    lines = source.split("\n")
    segments, rest = cut(lines, body, 0, cell)
    if rest.strip() and cell >= 0:
        raise BuildError(f"{where}: a comment after the last statement belongs to none: {rest!r}")
    for segment in segments:
        segment.text = segment.text.strip("\n")
    if rest.strip() and segments:  # the end of a module
        segments[-1].text += "\n" + rest
    return segments


def cut(lines: list[str], body: list[ast.stmt], start: int, cell: int) -> tuple[list[Segment], str]:
    """`lines` from `start` on, one piece a statement with what stands above it; and the rest."""
    segments = []
    for node in body:
        end = last_line(lines, node)
        segments.append(Segment("\n".join(lines[start:end]), node, cell))
        start = end
    return segments, "\n".join(lines[start:]).strip("\n")


def last_line(lines: list[str], node: ast.stmt) -> int:
    """Where `node` ends, with the comments that end its body."""
    end = node.end_lineno or 0
    for number, line in enumerate(lines[end:], end + 1):
        text = line.lstrip()
        if text and (text[0] != "#" or len(line) - len(text) <= node.col_offset):
            break
        end = number if text else end
    return end


def open_class(segment: Segment) -> tuple[str, list[Segment], str]:
    """The head of a class, up to `class X(Base):`, its members, and a comment after the last."""
    lines, node = segment.text.split("\n"), ast.parse(segment.text).body[0]
    end = max([node.lineno, *(n.end_lineno for n in (*node.bases, *node.keywords))])
    while end < node.body[0].lineno - 1 and not re.search(r":[ \t]*(#.*)?$", lines[end - 1]):
        end += 1
    members, rest = cut(lines, [n for n in node.body if n.lineno > end], end, segment.cell)
    return "\n".join(lines[:end]), members, rest


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

    def classes(self, i: int) -> list[ast.ClassDef]:
        """Classes that cell `i` defines, marked or not; lines that are not Python are skipped."""
        if self.data["cells"][i]["cell_type"] != "code":
            return []
        lines = "\n".join(self.source(i)).split("\n")
        try:
            tree = ast.parse(
                "\n".join(line for line in lines if line.lstrip()[:1] not in ("%", "!"))
            )
        except SyntaxError:
            return []
        return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]

    def replace(self, i: int, source: str) -> None:
        text = self.source(i)[0] + "\n" + source.strip("\n")
        self.data["cells"][i]["source"] = text.splitlines(keepends=True)

    def save(self) -> None:
        write(self.path, json.dumps(self.data, indent=1, ensure_ascii=False) + "\n")


def eager_names(node: ast.AST, annotations: bool) -> set[str]:
    """Names that `node` reads where it stands: not those in bodies of functions."""
    found = {node.id} if isinstance(node, ast.Name) else set()
    for name, value in ast.iter_fields(node):
        in_function = name == "body" and isinstance(node, (*FUNCTIONS, ast.Lambda))
        if not in_function and (annotations or name not in ("annotation", "returns")):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    found |= eager_names(child, annotations)
    return found


def bound_names(node: ast.stmt) -> set[str]:
    """Names that a statement defines where it stands."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return {node.name}
    names = {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    return names | {n.name for n in ast.walk(node) if isinstance(n, (*FUNCTIONS, ast.ClassDef))}


def fold(notebook: Notebook, segments: list[Segment]) -> list[Segment]:
    """Statements of a module, each class once, with the cells that reopen it in `reopened`.

    Raises: BuildError naming the cell of a class that is reopened against the rules of REOPENING.
    """
    folded: list[Segment] = []
    future = "from __future__ import annotations"
    annotations = not any(ast.unparse(s.node) == future for s in segments)
    for segment in segments:
        if not segment.is_reopening:
            folded.append(segment)
            continue
        where = f"{notebook.path.name}, cell {segment.cell}"
        found = [i for i, s in enumerate(folded) if s.key == segment.key and is_class(s)]
        if not found:
            refuse(where, segment.key, "first")
        first, later = folded[found[-1]], folded[found[-1] + 1 :]
        check_class(where, first)
        check_body(where, first, segment)
        check_order(where, first, segment, later, annotations)
        check_between(where, notebook, first, segment, later, {s.cell for s in segments})
        first.reopened.append(segment)
    return folded


def is_class(segment: Segment) -> bool:
    return isinstance(segment.node, ast.ClassDef)


def refuse(where: str, name: str, rule: str, what: str = "") -> NoReturn:
    text = REOPENING[rule].format(name=name, what=what)
    raise BuildError(f"{where}: class {name}({name}): {text}")


def check_class(where: str, first: Segment) -> None:
    """Whether the class of a first cell can be reopened at all."""
    node = first.node
    keywords = [f"{k.arg}=..." for k in node.keywords]
    decorators = ["@" + ast.unparse(d) for d in node.decorator_list]
    bases = [name for base in node.bases if (name := ast.unparse(base)).split(".")[-1] in MAKERS]
    if made := decorators + keywords + bases:
        refuse(where, node.name, "kind", made[0])
    _, members, rest = open_class(first)
    if not members or ast.unparse(members[0].node) in ("pass", "..."):
        refuse(where, node.name, "empty")
    if rest:
        refuse(where, node.name, "comment")


def check_body(where: str, first: Segment, segment: Segment) -> None:
    """Whether the reopening says what a body moved up may say."""
    name = first.node.name
    head, members, rest = open_class(segment)
    if head.lstrip("\n").startswith("#"):
        refuse(where, name, "above")
    if head.strip() != f"class {name}({name}):":
        refuse(where, name, "head")
    if rest:
        refuse(where, name, "comment")
    taken = names_of(first)
    for member in members:
        node = member.node
        if not isinstance(node, (*FUNCTIONS, ast.Assign, ast.AnnAssign)):
            what = ast.unparse(node).splitlines()[0]
            refuse(where, name, "doc" if member.is_docstring else "body", what)
        for what in sorted(bound_names(node)):
            if what in taken:
                refuse(where, name, "override", what)
            if what in ("__slots__", "__init_subclass__", "__eq__"):
                refuse(where, name, "special", what)
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        for what in sorted(used & {"super", "__class__"}):
            refuse(where, name, "super", "super()" if what == "super" else what)
    for what in sorted(taken & {"__slots__", "__init_subclass__"}):
        refuse(where, name, "kind", what)


def names_of(first: Segment) -> set[str]:
    """What the cells of a class have defined in it so far."""
    return {
        n for part in (first, *first.reopened) for node in part.node.body for n in bound_names(node)
    }


def check_order(
    where: str, first: Segment, segment: Segment, later: list[Segment], annotations: bool
) -> None:
    """What defaults, decorators, values and annotations read must be there for the first cell."""
    name = segment.node.name
    taken = names_of(first)
    missing = {name}.union(*(bound_names(s.node) for s in later))
    own: set[str] = set()
    for node in segment.node.body:
        for what in sorted(eager_names(node, annotations) - own):
            if what in taken:
                refuse(where, name, "scope", what)
            if what in missing:
                refuse(where, name, "order", what)
        own |= bound_names(node)


def check_between(
    where: str,
    notebook: Notebook,
    first: Segment,
    segment: Segment,
    later: list[Segment],
    own: set[int],
) -> None:
    """No heir and no statement of the module may take the class as its first cell leaves it."""
    name = segment.node.name
    for other in later:
        if name in eager_names(other.node, annotations=False):
            refuse(where, name, "between", f"{other.key} (cell {other.cell})")
    for i in sorted(set(range(first.cell + 1, segment.cell)) - own):
        for node in notebook.classes(i):
            if any(name in eager_names(base, annotations=True) for base in node.bases):
                refuse(where, name, "between", f"{node.name} (cell {i})")


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


@cache
def ruff(text: str, name: str, root: Path) -> str:
    """Sort imports and format, with the settings of pyproject.toml."""
    from ruff import find_ruff_bin

    for command in (
        ["check", "--select", "I,RUF022", "--fix-only", "--quiet"],
        ["format", "--quiet"],
    ):
        command = [find_ruff_bin(), *command, "--stdin-filename", shown(name), "-"]
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
    body = [s for s in fold(notebook, segments)[1:] if not s.is_import]
    names = dict.fromkeys(n for s in segments for n in public_names(s.node))
    exported = "__all__ = [" + ", ".join(f'"{n}"' for n in names) + "]"
    parts = [segments[0].text, HEADER.format(notebook.path.name), "\n".join(imports), exported]
    return ruff("\n\n".join(parts + [s.whole for s in body]) + "\n", module, root)


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
    split(text, shown(module))  # errors name the lines of the file
    theirs = split(ruff(text, module, root), shown(module))
    built = split(render(notebook, module, root), module)
    ours = notebook.segments(module)
    if not theirs or not theirs[0].is_docstring:
        raise BuildError(f"{shown(module)}: the module docstring is missing")
    if ast.unparse(theirs[0].node) != ast.unparse(ours[0].node):
        ours[0].text = theirs[0].text
    body = [s for s in fold(notebook, ours)[1:] if not s.is_import]
    old, new = (
        [s for s in side[1:] if not s.is_import and s.key != "__all__"] for side in (built, theirs)
    )
    start = next((s for s in reversed(ours) if s.is_import), ours[0])
    align(body, old, new, start)
    pull_imports(ours, built, theirs)
    for i in notebook.marked[module]:
        pieces = [t for s in ours if s.cell == i for t in (s.text, *s.added) if t]
        before = split(notebook.source(i)[1], "")
        if [s.text for s in before] != pieces:
            source = "\n\n".join(pieces)
            notebook.replace(i, ruff(source, module, root) if source else "")


def align(ours: list[Segment], old: list[Segment], new: list[Segment], start: Segment) -> None:
    """Give `ours`, built as `old`, the texts of `new`; what is new follows its predecessor."""
    matcher = SequenceMatcher(None, [s.key for s in old], [s.key for s in new], False)
    for _, a0, a1, b0, b1 in matcher.get_opcodes():
        both = min(a1 - a0, b1 - b0)
        for mine, before, after in zip(ours[a0:a1], old[a0:a1], new[b0:b1], strict=False):
            if before.text != after.text:
                revise(mine, before, after)
        for mine in ours[a0 + both : a1]:
            mine.replace("")
        anchor = ours[a0 + both - 1] if a0 + both else start
        anchor.added += [s.text for s in new[b0 + both : b1]]


def revise(mine: Segment, before: Segment, after: Segment) -> None:
    """Carry an edit of one statement; of a reopened class, each member into its own cell."""
    if not (mine.reopened and is_class(after)):
        mine.replace(after.text)
        return
    name, parts = after.node.name, [mine, *mine.reopened]
    opened = [open_class(part)[:2] for part in parts]
    (old_head, old, _), (new_head, new, _) = open_class(before), open_class(after)
    start = Segment("", mine.node)
    align([member for _, members in opened for member in members], old, new, start)
    for part, (head, members) in zip(parts, opened, strict=True):
        if part is not mine:
            head = f"class {name}({name}):"
        elif new_head != old_head:
            head = new_head
        texts = [text for m in members for text in (m.text, *m.added) if text]
        body = "\n".join((start.added if part is mine else []) + texts)
        part.text = head + "\n" + body.strip("\n") if body else ""
    if not mine.text:
        raise BuildError(f"{name}: nothing is left for cell {mine.cell}, where the class begins")


def pull_imports(ours: list[Segment], built: list[Segment], theirs: list[Segment]) -> None:
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
        ours[0].added.insert(0, "\n".join(sorted(new - old)))


def single_imports(node: ast.stmt) -> list[str]:
    """`from a import b, c` as two statements."""
    if isinstance(node, ast.ImportFrom):
        return [ast.unparse(ast.ImportFrom(node.module, [name], node.level)) for name in node.names]
    return [ast.unparse(ast.Import([name])) for name in node.names]


def defined_names(segments: list[Segment]) -> list[str]:
    """What a cell defines: `add`, `Pair`, and `Pair.swap` where it reopens the class."""
    names = []
    for s in segments:
        members = open_class(s)[1] if s.is_reopening else []
        names += [f"{s.key}.{m.key}" for m in members] or [s.key]
    return names


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
        for name in defined_names(split(source.partition("\n")[2], "a cell")):
            latest[name] = source
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
