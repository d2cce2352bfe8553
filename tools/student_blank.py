"""The marked cells of a page with every body taken out, as `tools/student.py` hands them out.

What stays: signatures, docstrings, fields, constants, imports, bodies that say nothing (`...`).
A body becomes `raise NotWritten(name, page, cell)`; a value that is made by calling such a body as
the module is imported becomes `unwritten(name, page, cell)`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from hashlib import sha256

import build
from cells import exported, head_and_body, text_of

GIVEN = {"in_ascii", "bytes_to_unicode"}  # stay whole: other modules call them when imported
GIVEN |= {  # and what shows a thing in a notebook or a failing test
    "KVCache.__repr__",
    "RowBatches.__repr__",
    "WindowBatches.__repr__",
}
IMPORT = "from not_written import {}"
BLANK = re.compile(r"\b(?:raise NotWritten|unwritten)\(\s*[\"']([\w.]+)[\"']")

# not_written.py in a copy: no part of the package, whose tests count what it imports
NOT_WRITTEN = '''"""What a body raises that is still to be written."""


class NotWritten(Exception):
    """Of a name, a page, a cell. No NotImplementedError: abstract methods use that."""

    def __str__(self) -> str:
        name, page, cell = self.args
        return (
            f"{name} is not written yet: notebooks/{page}.ipynb, cell {cell}. If it is written "
            f"there, then not in minillm/: save the page, make grade NB={page[:2]}, restart "
            "the kernel"
        )


class unwritten:
    """Stands for a value that needs such a body; whoever uses it meets NotWritten."""

    def __init__(self, name: str, page: str, cell: str) -> None:
        self.__dict__["_where"] = (name, page, cell)

    def __call__(self, *args, **kwargs):
        raise NotWritten(*self._where)

    def __getattr__(self, name: str):
        if name.startswith("__"):  # copy, pickle and inspect ask for those
            raise AttributeError(name)
        raise NotWritten(*self._where)
'''


def digest(text: str) -> str:
    """What a text is recognized by, white space at its ends aside."""
    return sha256(text.strip().encode()).hexdigest()[:16]


def lines_of(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods with their names, `Trainer.train`; none inside of another function."""
    for node in body:
        if isinstance(node, build.FUNCTIONS):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{prefix}{node.name}.")


def says_nothing(node: ast.FunctionDef) -> bool:
    """Only a docstring, `...`, `pass`, or NotImplementedError: a protocol, an abstract method."""
    for statement in node.body:
        raised = isinstance(statement, ast.Raise) and "NotImplementedError" in ast.unparse(
            statement
        )
        constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not (raised or constant or isinstance(statement, ast.Pass)):
            return False
    return True


def called(node: ast.stmt) -> set[str]:
    """Names that a statement calls where it stands, not inside of a function or class."""
    if isinstance(node, (*build.FUNCTIONS, ast.ClassDef)):
        return set()
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    return {n.func.id for n in calls if isinstance(n.func, ast.Name)}


def blank(
    text: str, page: str, cell: str, known: set[str], imported: set[str]
) -> tuple[str, list[str]]:
    """The Python of a marked cell without its bodies, and the names of those.

    `known` collects the functions and classes of this page that cells so far have left blank,
    `imported` what they have imported of the package.
    """
    tree = ast.parse(text)
    lines = text.split("\n")
    cuts: list[tuple[int, int, str]] = []  # first and last line (from 0, exclusive), what replaces
    names: list[str] = []
    wanted: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minillm"):
            imported |= {alias.asname or alias.name for alias in node.names}
    ours = known | imported | {node.name for _, node in functions(tree.body)}
    for name, node in functions(tree.body):
        if name in GIVEN or says_nothing(node):
            continue
        names.append(name)
        wanted.add("NotWritten")
        known.add(name.partition(".")[0])
        new = f'raise NotWritten("{name}", "{page}", "{cell}")'
        cuts.append(cut_body(lines, node, new, ours))
    for node in tree.body:
        if called(node) & known and isinstance(node, ast.Assign | ast.AnnAssign):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            names.append(name)
            wanted.add("unwritten")
            value = f'unwritten("{name}", "{page}", "{cell}")'
            head = "\n".join([*lines[node.lineno - 1 : node.end_lineno]])
            head = head[: head.index(ast.get_source_segment(text, node.value) or "")]
            cuts.append((node.lineno - 1, node.end_lineno or 0, head + value))
    for first, last, new in sorted(cuts, reverse=True):
        lines[first:last] = new.split("\n")
    if wanted:
        add_import(lines, tree, IMPORT.format(", ".join(sorted(wanted))))
    return "\n".join(lines), names


def cut_body(
    lines: list[str], node: ast.FunctionDef, new: str, ours: set[str]
) -> tuple[int, int, str]:
    """Which lines of a function its body takes, and what stands there instead.

    A comment names what the body imports, which of `ours` it calls, the attributes that it sets and
    the keys that it returns: other modules have them or ask for them, and no reader could guess
    them.
    """
    first, end = node.body[0], build.last_line(lines, node)
    indent = " " * (node.col_offset + 4)
    kept = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
    said = [f"# where it is needed: {line}" for line in dict.fromkeys(map(ast.unparse, kept))]
    said += [f"# {line}" for line in textwrap.wrap(promised(node, ours), 97 - len(indent))]
    new = f"\n{indent}".join([*said, new])
    if ast.get_docstring(node, clean=False) is not None:
        return first.end_lineno or 0, end, indent + new
    head = lines[first.lineno - 1][: first.col_offset].rstrip()
    if head:  # def f(x): return x
        return first.lineno - 1, end, f"{head}\n{indent}{new}"
    start = first.lineno - 1
    while not lines[start - 1].strip() or lines[start - 1].lstrip().startswith("#"):
        start -= 1  # what stands above the first statement is said about it
    return start, end, indent + new


def promised(node: ast.FunctionDef, ours: set[str]) -> str:
    """Which of `ours` a function calls, what it sets, the keys of what it returns, in words."""
    calls: list[ast.Name] = []
    targets, keys, more = [], [], False
    for n in ast.walk(node):
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in ours:
            calls.append(n.func)
        stored = isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
        if stored and ast.unparse(n.value) == "self":
            targets.append(f"self.{n.attr}")
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "self.register_buffer":
            targets.append(f"the buffer {ast.unparse(n.args[0])}")
        if isinstance(n, ast.Return) and isinstance(n.value, ast.Dict):
            keys += [ast.unparse(key) for key in n.value.keys if isinstance(key, ast.Constant)]
            more = more or None in n.value.keys  # {**others, "index": 3}
    names = dict.fromkeys(n.id for n in sorted(calls, key=lambda n: (n.lineno, n.col_offset)))
    parts = [f"calls {', '.join(names)}"] if names else []
    parts += [f"sets {', '.join(dict.fromkeys(targets))}"] if targets else []
    among = "among the keys" if more else "the keys"
    parts += [f"{among} of what it returns: {', '.join(keys)}"] if keys else []
    return "; ".join(parts)


def add_import(lines: list[str], tree: ast.Module, new: str) -> None:
    """Put an import below the cell's own, or below its docstring, or first."""
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    opening = tree.body[:1] if ast.get_docstring(tree) is not None else []
    if above := imports or opening:
        lines.insert(above[-1].end_lineno or 0, new if imports else f"\n{new}")
    else:
        lines[:0] = [new, "", ""]


def blank_page(data: dict, page: str) -> dict[str, list[str]]:
    """Take the outputs and, in marked cells, the bodies out of a notebook; the names, cell by cell.

    `data` is changed in place. Raises: BuildError if a marked cell is no Python.
    """
    known: set[str] = set()
    imported: set[str] = set()
    names: dict[str, list[str]] = {}
    for i, cell in enumerate(data["cells"]):
        drop_outputs(cell)
        if exported(cell):
            head, body = head_and_body(cell)
            build.split(body, f"{page}.ipynb, cell {i}")
            text, found = blank(body, page, cell["id"], known, imported)
            if found:
                cell["source"] = lines_of(f"{head}\n{text}")
                names[cell["id"]] = found
    return names


def drop_outputs(cell: dict) -> None:
    if cell["cell_type"] == "code":
        cell["outputs"], cell["execution_count"] = [], None


def definitions(cell: dict) -> list[str]:
    """Functions, methods and classes that a cell defines, and its constants.

    Raises: SyntaxError if it is no Python.
    """
    tree = ast.parse(head_and_body(cell)[1])
    found = [name for name, _ in functions(tree.body)]
    found += [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return found + [n for node in tree.body for n in build.public_names(node) if n not in found]


def still_blank(cell: dict) -> list[str]:
    """What a marked cell has left to write."""
    return BLANK.findall(text_of(cell)) if exported(cell) else []
