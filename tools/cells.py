"""The one reader of pages, for all tools: what a file holds, which cells are marked, what they say.

Other programs save pages, too. black and autopep8 write `# | export` for `#| export`, and nbdev
exports both; Colab and older formats save no ids of cells, nbstripout and jupytext other ones; a
source is a list of lines or one text. The site's tools have no torch: this needs Python alone.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import tokenize
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

# As nbdev 3 reads them: all of the lines that open a cell, blank ones and cell magics among them.
HEAD = re.compile(r"[ \t]*(#[ \t]*\|.*|%%\w.*)?$")
MARK = re.compile(
    r"[ \t]*#[ \t]*\|[ \t]*(default_exp|export)(?:(?:[ \t]*:[ \t]*|[ \t]+)(\w+(?:\.\w+)*))?[ \t:]*$"
)


class BuildError(Exception):
    """Something in a notebook or a module that cannot be built; the message names the place."""


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BuildError(f"{path.name}: not UTF-8 at byte {error.start}") from None


def load(path: Path, name: str, *, ids: bool = False) -> dict:
    """What a notebook file holds; with `ids`, a page each of whose cells has its own.

    Raises: BuildError with the line if it is none, with the cell that has no id.
    """
    text = read(path)
    if mark := re.search(r"^(<<<<<<<|=======|>>>>>>>)", text, re.M):
        line = text[: mark.start()].count("\n") + 1
        raise BuildError(f"{name}, line {line}: {mark[0]} is left of a merge: settle it first")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise BuildError(f"{name}, line {error.lineno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise BuildError(f"{name}: not a notebook: nested too deeply") from None
    if isinstance(data, dict) and data.get("nbformat", 4) != 4:
        raise BuildError(
            f"{name} is saved in notebook format {data['nbformat']!r}, and the "
            "course reads format 4: open it in JupyterLab 4 and save it"
        )
    cells = data.get("cells") if isinstance(data, dict) else None
    if not isinstance(cells, list):
        raise BuildError(f"{name}, line 1: not a notebook: no list of cells")
    seen: dict[str, int] = {}
    for i, cell in enumerate(cells):
        try:
            text_of(cell) + cell["cell_type"]
        except (TypeError, KeyError):
            raise BuildError(f"{name}, cell {i}: no cell of a notebook: {cell!r:.60}") from None
        if ids and (cell.get("id") is None or seen.setdefault(cell["id"], i) != i):
            what = f"the id of cell {seen[cell['id']]}" if cell.get("id") else "no id"
            page = name if "notebooks/" in name else f"notebooks/{name}"
            raise BuildError(
                f"{name}, cell {i}: {what}, as some programs save it (Colab, formats before 4.5): "
                f"`python tools/execute.py {page}` gives it one"
            )
    return data


def text_of(cell: dict) -> str:
    return "".join(cell["source"]).replace("\r\n", "\n")


def head_and_body(cell: dict) -> tuple[str, str]:
    """The lines of marks that open a cell, and the Python below; a cell magic belongs to that."""
    lines = text_of(cell).split("\n")
    end = next((i for i, line in enumerate(lines) if not HEAD.match(line)), len(lines))
    while end and not lines[end - 1].strip():
        end -= 1
    magics = [line for line in lines[:end] if line.lstrip().startswith("%%")]
    head = [line for line in lines[:end] if line not in magics]
    return "\n".join(head), "\n".join([*magics, *lines[end:]])


def marks(cell: dict) -> dict[str, str | None]:
    """`export` and `default_exp`, where a code cell has them, each with the module it names."""
    lines = head_and_body(cell)[0].split("\n") if cell["cell_type"] == "code" else []
    found = [mark for line in lines if (mark := MARK.match(line))]
    return {mark[1]: mark[2] for mark in found}


def exported(cell: dict) -> bool:
    return "export" in marks(cell)


def digest(cell: dict) -> str:
    """What a cell is recognized by: what it says, however a program has formatted that."""
    text = text_of(cell).strip()
    if cell["cell_type"] == "code":
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            text = meaning(text)  # else it has magics, or is not finished
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@lru_cache(maxsize=4096)
def meaning(text: str) -> str:
    """Python as a syntax tree, its imports sorted, and its comments, all without white space."""
    tree = ast.parse(text)
    imports, rest = set(), []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports |= set(single_imports(node))
        else:
            rest.append(node)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = "".join(t.string.lstrip("#") for t in tokens if t.type == tokenize.COMMENT)
    said = [*sorted(imports), *map(plain, rest), "#" + "".join(comments.split())]
    return "\n".join(said)


def plain(node: ast.AST) -> str:
    """A syntax tree as text, the same in all versions of Python, unlike that of `ast.dump`."""
    found = [type(node).__name__]
    for name, value in ast.iter_fields(node):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.Expr) and isinstance(one, ast.Constant):
                one = "".join(str(one.value).split())  # a docstring, which black indents
            if one is not None and name != "kind":
                found.append(f"{name}={plain(one) if isinstance(one, ast.AST) else repr(one)}")
    return f"({' '.join(found)})"


def single_imports(node: ast.stmt) -> list[str]:
    """`from a import b, c` as two statements."""
    if isinstance(node, ast.ImportFrom):
        return [ast.unparse(ast.ImportFrom(node.module, [name], node.level)) for name in node.names]
    return [ast.unparse(ast.Import([name])) for name in node.names]
