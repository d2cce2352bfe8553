"""Notebooks -> package, package -> notebooks, and the check that both say the same.

    python tools/build.py build [NOTEBOOK ...]   write minillm/*.py from the marked cells; a
                                    definition goes only with --remove
    python tools/build.py pull  [MODULE ...]     carry edits of minillm/*.py back into their cells
    python tools/build.py check                  fail if the two differ; say what mends it

A notebook names its module with `#| default_exp nn.rope`; a cell that begins with `#| export`
belongs to that module, one with `#| export cache.base` to another. The first marked cell of a
module opens with its docstring. Imports of all its cells are gathered at the top; `__all__` is made
from the public names. Names come from one place: `from a import b as b`, which would pass one on,
is refused.

A later cell may reopen a class: `class Decoder(Decoder):` adds methods and attributes. That is live
Python in the notebook; the module gets one class, the bodies in the notebook's order, at the place
of the first. Only what means the same in both is allowed: see REOPENING.

`pull` carries definitions (a member of a reopened class into the cell that owns it), loose
statements, the module's docstring, imports, and the comments above or on each of these. `__all__`,
the line "Built from" and blank lines are made by `build`. Any other edit, such as one of `__all__`
or a comment above it, is refused with its line, and the notebook stays as it was.
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
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

from cells import BuildError, digest, exported, head_and_body, load, marks, read, single_imports

from minillm.support.files import replacing

ROOT = Path(__file__).resolve().parents[1]
SHELVES = ("", "deeper/", "beyond/")  # folders of notebooks that are sources
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
        if self.is_docstring:
            return "docstring"
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
        """A class whose own name is among its bases."""
        bases = self.node.bases if isinstance(self.node, ast.ClassDef) else []
        return any(self.key in eager_names(base, annotations=True) for base in bases)

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

    def __init__(self, root: Path, name: str) -> None:
        self.name = name  # under notebooks/, as in `deeper/03_flash_attention.ipynb`
        self.path = root / "notebooks" / name
        self.data = load(self.path, name)
        self.default: str | None = None
        self.marked: dict[str, list[int]] = {}
        for i, cell in enumerate(self.data["cells"]):
            found = marks(cell)
            self.default = found.get("default_exp") or self.default
            if "export" in found:
                module = found["export"] or self.default
                if module is None:
                    raise BuildError(f"{name}, cell {i}: '#| export' before any '#| default_exp'")
                self.marked.setdefault(module, []).append(i)

    def source(self, i: int) -> tuple[str, str]:
        """The marks that open cell `i`, if any, and the rest."""
        return head_and_body(self.data["cells"][i])

    def segments(self, module: str) -> list[Segment]:
        found = []
        for i in self.marked[module]:
            found += split(self.source(i)[1], f"{self.name}, cell {i}", i)
        for segment in found:
            for node in ast.walk(segment.node):
                if isinstance(node, ast.alias) and node.asname == node.name:
                    raise BuildError(
                        f"{self.name}, cell {segment.cell}: no import {node.name} as {node.name}: "
                        "names come from one place, and are imported from there"
                    )
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
        where = f"{notebook.name}, cell {segment.cell}"
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
    bases = [b for b in map(ast.unparse, node.bases) if MAKERS.intersection(re.findall(r"\w+", b))]
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
    nodes = [node for part in (first, *first.reopened) for node in part.node.body]
    return set().union(*(bound_names(node) for node in nodes))


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
    if path.exists() and read(path) == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:  # the disk is full; on Windows also: another program has `path` open
        raise BuildError(f"{path.name} could not be written: {error}") from None
    return True


def module_path(root: Path, module: str) -> Path:
    """Where a module stands: `rope` in `minillm/rope.py`."""
    return root.joinpath("minillm", *module.split(".")).with_suffix(".py")


def shown(module: str) -> str:
    """The path of a module as messages name it."""
    return module_path(Path(), module).as_posix()


def module_name(root: Path, path: str | Path) -> str:
    """The module that a file or a name stands for: `minillm/rope.py` or `rope`."""
    parts = Path(path).with_suffix("").parts if str(path).endswith(".py") else (str(path),)
    return ".".join(parts[parts.index("minillm") + 1 :] if "minillm" in parts else parts)


OURS = 'lint.isort.known-first-party = ["minillm", "not_written"]'  # the latter: in a copy
RUFF = (
    ["check", "--select", "I,RUF022", "--fix-only", "--quiet", "--config", OURS],
    ["format", "--quiet"],
)


@cache
def ruff(text: str, name: str, root: Path) -> str:
    """Sort imports and format, with the settings of pyproject.toml."""
    from ruff import find_ruff_bin

    for command in RUFF:
        command = [find_ruff_bin(), *command, "--stdin-filename", shown(name), "-"]
        done = subprocess.run(command, input=text, capture_output=True, encoding="utf-8", cwd=root)
        if done.returncode:
            raise BuildError(f"ruff could not format {name}: {done.stderr.strip()}")
        text = done.stdout
    return text


def render(notebook: Notebook, module: str, root: Path) -> str:
    """The text of `minillm/<module>.py` as the marked cells of `notebook` define it."""
    return ruff(draft(notebook, module), module, root)


def render_all(owned: dict[str, Notebook], root: Path) -> dict[str, str]:
    """The texts of these modules, as `render` gives them; ruff is started twice for all."""
    drafts = tuple((module, draft(notebook, module)) for module, notebook in owned.items())
    return dict(formatted(drafts, read(root / "pyproject.toml")))


@cache
def formatted(drafts: tuple[tuple[str, str], ...], settings: str) -> tuple[tuple[str, str], ...]:
    """These modules, formatted as `settings`, the text of pyproject.toml, says."""
    from ruff import find_ruff_bin

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pyproject.toml").write_text(settings, encoding="utf-8")
        for module, text in drafts:
            path = module_path(folder, module)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        for command in RUFF:
            done = subprocess.run(
                [find_ruff_bin(), *command, "."], capture_output=True, encoding="utf-8", cwd=folder
            )
            if done.returncode:
                raise BuildError(f"ruff could not format the modules: {done.stderr.strip()}")
        return tuple((module, read(module_path(folder, module))) for module, _ in drafts)


def draft(notebook: Notebook, module: str) -> str:
    """The text of a module before ruff has sorted its imports and formatted it."""
    segments = notebook.segments(module)
    where = f"{notebook.name}, cell {notebook.marked[module][0]}"
    if not segments or not segments[0].is_docstring:
        raise BuildError(f"{where}: the first marked cell of {module} must open with its docstring")
    imports = {s.text if "#" in s.text else ast.unparse(s.node) for s in segments if s.is_import}
    # ruff sorts imports with the comments above them, but for the first one's
    ordered = sorted(imports, key=lambda text: (text.startswith("#"), text))
    body = [s for s in fold(notebook, segments)[1:] if not s.is_import]
    names = dict.fromkeys(n for s in segments for n in public_names(s.node))
    exported = "__all__ = [" + ", ".join(f'"{n}"' for n in names) + "]"
    parts = [segments[0].text, HEADER.format(notebook.name), "\n".join(ordered), exported]
    return "\n\n".join(parts + [s.whole for s in body]) + "\n"


def public_names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        names = [node.name]
    elif isinstance(node, ast.Assign):
        names = [t.id for t in node.targets if isinstance(t, ast.Name)]
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        names = [node.target.id]
    else:
        names = []
    return [n for n in names if not n.startswith("_")]


def notebooks(root: Path) -> list[Notebook]:
    folder = root / "notebooks"
    found = [path for shelf in SHELVES for path in sorted((folder / shelf).glob("*.ipynb"))]
    return [Notebook(root, path.relative_to(folder).as_posix()) for path in found]


def owners(root: Path) -> dict[str, Notebook]:
    """Which notebook owns which module. Raises: BuildError if two notebooks claim one."""
    found: dict[str, Notebook] = {}
    for notebook in notebooks(root):
        for module in notebook.marked:
            if module in found:
                both = f"{found[module].name} and {notebook.name}"
                raise BuildError(f"{shown(module)} is claimed by {both}")
            found[module] = notebook
    return found


def build(root: Path = ROOT, only: Iterable[str] = (), *, remove: bool = False) -> list[str]:
    """Write the modules of all notebooks (or of those named); returns the modules that changed.

    Raises: BuildError if a module would lose a definition and `remove` does not say that it may.
    """
    owned = owners(root)
    pages = {module: notebook.name for module, notebook in owned.items()}
    there = {m: p for m, p in orphans(root, owned).items() if (root / "notebooks" / p).exists()}
    pages |= there
    chosen = list(pages)
    if only:
        chosen = [m for name in only for m, page in pages.items() if is_named(root, page, name)]
    for name in only:
        if not any(is_named(root, page, name) for page in pages.values()):
            raise BuildError(f"no notebook {name} has marked cells")
    texts = render_all({m: owned[m] for m in dict.fromkeys(chosen) if m in owned}, root)
    gone = [module for module in chosen if module in there]
    if not remove and (losses := lost(root, {**texts, **dict.fromkeys(gone, "")}, pages)):
        raise BuildError("\n".join(losses))
    changed = [m for m, text in texts.items() if write(module_path(root, m), text)]
    for module in gone:
        module_path(root, module).unlink()
    remember(root, texts)
    return changed + gone


def is_named(root: Path, page: str, name: str) -> bool:
    """`03_rope.ipynb`, `notebooks/03_rope.ipynb`, `deeper/03_flash.ipynb` or the whole path."""
    tail = Path(name).parts
    return (root / "notebooks" / page).resolve().parts[-len(tail) :] == tail


def orphans(root: Path, owned: dict[str, Notebook]) -> dict[str, str]:
    """Modules that say they are built from a page, which exports no such module."""
    found = {}
    for path in sorted((root / "minillm").rglob("*.py")):
        module = module_name(root, path.relative_to(root))
        if (header := HEADER_RE.search(read(path))) and module not in owned:
            found[module] = header[1]
    return found


def definitions(text: str, where: str) -> list[str]:
    """Functions, classes, methods and values of a module; none of one that is no Python."""
    found = []
    try:
        segments = split(text, where)
    except BuildError:
        return []
    for segment in segments:
        found += sorted(bound_names(segment.node) - {"__all__"})
        if is_class(segment):
            methods = [m.name for m in segment.node.body if isinstance(m, FUNCTIONS)]
            found += [f"{segment.key}.{name}" for name in methods]
    return found


def lost(root: Path, texts: dict[str, str], pages: dict[str, str]) -> list[str]:
    """A sentence for each module that has definitions which these new `texts` have nowhere."""
    old, new = {}, {}
    for module, text in texts.items():
        path = module_path(root, module)
        old[module] = definitions(read(path), shown(module)) if path.exists() else []
        new[module] = definitions(text, shown(module))
    moved = {name for module in new for name in new[module] if name not in old[module]}
    said = []
    for module, names in old.items():
        names = [name for name in names if name not in moved.union(new[module])]
        names = [name for name in names if name.rpartition(".")[0] not in names]
        if names:
            what = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            said.append(
                f"{shown(module)} would lose {what}: no cell of notebooks/{pages[module]} that is "
                "marked `#| export` defines that. If it shall go: "
                f"python tools/build.py build --remove {pages[module]}"
            )
    return said


def drift(root: Path = ROOT) -> list[str]:
    """One line for each difference, naming the command that mends it."""
    problems, owned = [], owners(root)
    for module, text in render_all(owned, root).items():
        path, notebook = module_path(root, module), owned[module]
        if not path.exists():
            problems.append(f"{shown(module)} is missing: run {build_command(root, notebook)}")
        elif read(path) != text:
            mend = which_command(root, module, notebook, text)
            names = differences(text, read(path), shown(module))
            problems.append(
                f"{shown(module)} differs from notebooks/{notebook.name}{names}: {mend}"
            )
    for module, page in orphans(root, owned).items():
        there = (root / "notebooks" / page).exists()
        mend = f"run python tools/build.py build --remove {page}" if there else "delete the file"
        problems.append(
            f"{shown(module)} says it is built from {page}, which no longer exports it: mark its "
            f"cells `#| export` again, or, if it shall go, {mend}"
        )
    return problems


def edited(root: Path, module: str, notebook: Notebook, built: str) -> str:
    """Which side was edited, "module", "notebook" or "both"? Ask what both said last: when they
    were built or pulled, or, in git, committed; without either, the clock."""
    path = module_path(root, module)
    committed = in_git(root, path)
    known = [remembered(root).get(module), None if committed is None else text_digest(committed)]
    for agreed in known:
        if agreed == text_digest(built):
            return "module"
        if agreed == text_digest(read(path)):
            return "notebook"
    if any(known):
        return "both"
    return "module" if path.stat().st_mtime > notebook.path.stat().st_mtime else "notebook"


def which_command(root: Path, module: str, notebook: Notebook, built: str) -> str:
    """The command that carries an edit over, in words."""
    side = edited(root, module, notebook, built)
    if side == "both":
        one = f"python tools/build.py pull {shown(module)}"
        other = f"python tools/build.py build {notebook.name}"
        return (
            f"both were edited: `{one}` keeps the module's edits (and the notebook as it was in "
            f"build/before_pull/), `{other}` the notebook's"
        )
    command = "make pull" if side == "module" else build_command(root, notebook)
    return f"the {side} was edited, run {command}"


def build_command(root: Path, notebook: Notebook) -> str:
    """What carries a notebook's edits over: in a learner's copy `grade` does."""
    return f"make grade NB={notebook.path.name[:2]}" if in_copy(root) else "make build"


def in_copy(root: Path) -> bool:
    return (root / "given.json").exists()


AGREED = "build/agreed.json"  # of each module, a digest of the text at which both sides agreed last


def text_digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def remembered(root: Path) -> dict[str, str]:
    """What `remember` wrote; nothing if there is no such file, or another one."""
    try:
        found = json.loads((root / AGREED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(root: Path, texts: dict[str, str]) -> None:
    """Note that notebooks and modules say the same now."""
    agreed = {**remembered(root), **{module: text_digest(text) for module, text in texts.items()}}
    write(root / AGREED, json.dumps(agreed, indent=1, sort_keys=True) + "\n")


def in_git(root: Path, path: Path) -> str | None:
    """The file as it was last committed; None without git, or before the first commit."""
    command = ["git", "show", f"HEAD:./{path.relative_to(root).as_posix()}"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, encoding="utf-8")
    except OSError:
        return None
    return None if done.returncode else done.stdout


def differences(built: str, text: str, where: str) -> str:
    """Up to three names, `Class.method` among them, of what differs between two texts."""
    ours, theirs = named_texts(built, where), named_texts(text, where)
    names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    shown_names = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f" in {shown_names}" if names else ""


def named_texts(text: str, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for s in split(text, where):
        head, members, rest = open_class(s) if is_class(s) else (s.text, [], "")
        found[s.key] = found.get(s.key, "") + head + rest
        for m in members:
            name = f"{s.key}.{m.key}"
            found[name] = found.get(name, "") + m.text
    return found


def pull(root: Path = ROOT, only: Iterable[str] = ()) -> list[str]:
    """Carry edits of minillm/*.py back into their cells; returns the notebooks that changed.

    A notebook's own edits stay. Where both sides were edited, only a module that is named is
    carried, and the notebook as it was is kept in build/before_pull/. Raises: BuildError where it
    is not named, before anything is written.
    """
    only, owned = {module_name(root, name) for name in only}, owners(root)
    for module in only - set(owned):
        raise BuildError(f"no notebook builds {shown(module)}")
    sides = {}
    for module, notebook in owned.items():
        path = module_path(root, module)
        if (only and module not in only) or not path.exists():
            continue
        built = render(notebook, module, root)
        if read(path) == built:
            continue
        sides[module] = edited(root, module, notebook, built)
        if sides[module] == "both" and not only:
            names = differences(built, read(path), shown(module))
            where = f"{shown(module)} and notebooks/{notebook.name} differ{names}"
            raise BuildError(f"{where}: {which_command(root, module, notebook, built)}")
    changed: dict[str, None] = {}
    for module, side in sides.items():
        if side == "notebook" and not only:
            continue
        path, notebook = module_path(root, module), owned[module]
        text, built = read(path), render(notebook, module, root)
        if side != "module":
            write(root / "build" / "before_pull" / notebook.path.name, read(notebook.path))
        pull_module(notebook, module, text, root)
        again = render(notebook, module, root)
        check_carried(notebook, module, built, text, again, root)
        notebook.save()
        changed[notebook.name] = None
        write(path, again)
        remember(root, {module: again})
    return list(changed)


def places(root: Path) -> set[tuple[str, str]]:
    """Each definition with the cell that holds it."""
    found = set()
    for module, notebook in owners(root).items():
        for s in notebook.segments(module):
            if isinstance(s.node, (*FUNCTIONS, ast.ClassDef)):
                where = f"notebooks/{notebook.name}, cell {s.cell}"
                found |= {(name, where) for name in defined_names([s])}
    return found


def moves(before: set[tuple[str, str]], after: set[tuple[str, str]]) -> list[str]:
    """One line for each definition that stands in another cell now, and for each new one."""
    gone, lines = dict(before - after), []
    for name, where in sorted(after - before):
        lines.append(
            f"{name} moved from {gone[name]} to {where}" if name in gone else f"{name}: {where}"
        )
    return lines


def pull_module(notebook: Notebook, module: str, text: str, root: Path) -> None:
    """Rewrite the cells of `module` so that they say what `text` says."""
    split(text, shown(module))  # errors name the lines of the file
    theirs = split(HEADER_RE.sub("", ruff(text, module, root)), shown(module))
    built = split(HEADER_RE.sub("", render(notebook, module, root)), shown(module))
    ours = notebook.segments(module)
    if not theirs or not theirs[0].is_docstring:
        raise BuildError(f"{shown(module)}: the module docstring is missing")
    if theirs[0].text != built[0].text:
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


def joined(members: list[Segment]) -> list[Segment]:
    """Members with a property's getter and setter as one, so that no edit parts them."""
    found: list[Segment] = []
    for member in members:
        if found and (found[-1].key, found[-1].cell) == (member.key, member.cell):
            found[-1].text += "\n" + member.text
        else:
            found.append(member)
    return found


def revise(mine: Segment, before: Segment, after: Segment) -> None:
    """Carry an edit of one statement; of a reopened class, each member into its own cell."""
    if not (mine.reopened and is_class(after)):
        mine.replace(after.text)
        return
    name, parts = after.node.name, [mine, *mine.reopened]
    opened = [(head, joined(members)) for head, members, _ in map(open_class, parts)]
    (old_head, old, _), (new_head, new, _) = open_class(before), open_class(after)
    start = Segment("", mine.node)
    align([member for _, members in opened for member in members], joined(old), joined(new), start)
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
    """Carry comments on imports; drop what the module lost; its first cell gets what it gained."""
    before, after = (
        {ast.unparse(s.node): s.text for s in side if s.is_import} for side in (built, theirs)
    )
    old, new = (
        {one for s in side if s.is_import for one in single_imports(s.node)}
        for side in (built, theirs)
    )
    for segment in (s for s in ours if s.is_import):
        key, ones = ast.unparse(segment.node), single_imports(segment.node)
        if key in before and key in after and before[key] != after[key]:
            segment.text = after[key]
        elif not new.issuperset(ones):
            segment.text = "\n".join(one for one in ones if one in new)
    fresh = []
    for segment in (s for s in theirs if s.is_import):
        ones = single_imports(segment.node)
        if old.isdisjoint(ones):
            fresh.append(segment.text)
        else:
            fresh += [one for one in ones if one not in old]
    # not first, or ruff, which sorts the imports of the cell, would leave the comment on top
    mine = [s for s in ours if s.is_import and s.cell == ours[0].cell]
    (mine or ours)[-1 if mine else 0].added[:0] = [text for text in fresh if text[0] == "#"]
    ours[0].added[:0] = [text for text in fresh if text[0] != "#"]


def check_carried(
    notebook: Notebook, module: str, built: str, text: str, again: str, root: Path
) -> None:
    """Refuse a module `text` that the pulled cells do not give `again`, naming the line."""
    theirs = ruff(text, module, root)
    wanted, exported, line = written_by_hand(theirs)
    got, _, _ = written_by_hand(again)
    if exported not in (written_by_hand(built)[1], written_by_hand(again)[1]):
        raise BuildError(f"{shown(module)}, line {line}: __all__ is made of the public names")
    matcher = SequenceMatcher(None, [text for _, text in wanted], [text for _, text in got], False)
    edits = [op for op in matcher.get_opcodes() if op[0] != "equal"]
    if edits:
        start = next((a for _, a, b, _, _ in edits if b > a), edits[0][1])  # best a line of theirs
        number, one = wanted[min(start, len(wanted) - 1)]
        raise BuildError(
            f"{shown(module)}, line {number}: {one.strip()!r}: "
            f"the edit here cannot be carried over: make it in notebooks/{notebook.name}"
        )


def written_by_hand(text: str) -> tuple[list[tuple[int, str]], str, int]:
    """The lines that build does not make, each with its number; `__all__`, and its line."""
    lines = HEADER_RE.sub("", text).split("\n")
    exported, first = "", 1
    for node in ast.parse(text).body:
        if "__all__" in bound_names(node):
            exported, first = ast.unparse(node), node.lineno
            lines[first - 1 : node.end_lineno] = [""] * len(lines[first - 1 : node.end_lineno])
    return [(i, line) for i, line in enumerate(lines, 1) if line.strip()], exported, first


def defined_names(segments: list[Segment]) -> list[str]:
    """What a cell defines: `add`, `Pair`, and `Pair.swap` where it reopens the class."""
    names = []
    for s in segments:
        members = open_class(s)[1] if s.is_reopening else []
        names += [f"{s.key}.{m.key}" for m in members] or [s.key]
    return names


def running_file() -> Path | None:
    """The notebook file that this kernel was started for, where Jupyter or VS Code tell."""
    try:
        named = get_ipython().user_ns.get("__vsc_ipynb_file__")  # type: ignore[name-defined]
    except NameError:
        named = None
    named = named or os.environ.get("JPY_SESSION_NAME", "")
    return Path(named) if str(named).endswith(".ipynb") else None


def sync(name: str) -> None:
    """A notebook's last cell: rebuild its modules from the saved file.

    Under pytest and in build/ it only checks. Edits that are not saved yet are named instead. In
    a copy that lies elsewhere, or was renamed, it says so and builds nothing.
    """
    here = Path.cwd()  # `make run` executes copies under build/
    only_check = "PYTEST_VERSION" in os.environ or "build" in (here.name, here.parent.name)
    if "COLAB_RELEASE_TAG" in os.environ and not only_check:
        print("on Colab a page lies outside the course's folder: nothing was built.")
        return
    notebook, running = Notebook(ROOT, name), running_file()
    if running and not only_check and not (running.exists() and running.samefile(notebook.path)):
        kind = "is a copy" if running.exists() else "has been moved or renamed"
        print(f"{running} {kind}: only {notebook.path} builds the package. Nothing was built.")
        return
    saved = set(map(digest, notebook.data["cells"]))
    try:
        history = get_ipython().user_ns.get("In", [])  # type: ignore[name-defined]
    except NameError:
        history = []
    latest: dict[str, dict] = {}
    for cell in ({"cell_type": "code", "source": source.strip()} for source in history):
        body = head_and_body(cell)[1] if exported(cell) else ""
        for defined in defined_names(split(body, "a cell")):
            # a class that begins anew has lost what cells of an earlier run had added
            latest = {k: v for k, v in latest.items() if not k.startswith(f"{defined}.")}
            latest[defined] = cell
    unsaved = [c for c in latest.values() if digest(c) not in saved]
    first_lines = sorted({head_and_body(cell)[1].strip().splitlines()[0] for cell in unsaved})
    for module in notebook.marked:
        path, text = module_path(ROOT, module), render(notebook, module, ROOT)
        same = path.exists() and read(path) == text
        if unsaved:
            print(
                "unsaved edits: save the notebook, then run this cell again "
                f"({'; '.join(first_lines)})"
            )
            return
        if not same and only_check:
            command = build_command(ROOT, notebook)
            raise BuildError(f"{shown(module)} differs from notebooks/{name}: run {command}")
        if losses := [] if same or in_copy(ROOT) else lost(ROOT, {module: text}, {module: name}):
            print(f"nothing was built: {losses[0]}")
            return
        if not same:
            write(path, text)
            remember(ROOT, {module: text})
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
    parser.add_argument(
        "--remove", action="store_true", help="build: delete what no marked cell defines any longer"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    try:
        if args.command == "check":
            problems = drift(args.root)
            print("\n".join(problems) if problems else "package and notebooks agree")
            return bool(problems)
        if args.command == "build":
            changed, said = build(args.root, args.names, remove=args.remove), []
        else:
            before = places(args.root)
            changed = pull(args.root, args.names)
            said = moves(before, places(args.root)) + ([] if args.names else drift(args.root))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.command}: " + (", ".join(changed) if changed else "nothing to do"))
    for line in said:
        print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
