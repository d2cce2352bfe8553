"""The pages of the package: one a room with the public names, and one a module with its code.

Read from the source by `ast`, so nothing is imported and no torch is needed here.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path


def public_names(root: Path) -> dict[str, list[str]]:
    """Module -> public names, as minillm/__init__.py has them."""
    tree = ast.parse((root / "minillm/__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_PUBLIC":
            return ast.literal_eval(node.value)
    raise SystemExit("make site: minillm/__init__.py has no table _PUBLIC of public names")


def escaped(text: str) -> str:
    """Text of a docstring as Markdown: code in backticks stays, nothing else is a mark."""
    parts = re.split(r"(`[^`\n]+`)", text)
    parts[::2] = [re.sub(r"([\\*_\[\]<>$|#~{}])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: paragraphs, a list of arguments, labels in bold."""
    if not docstring:
        return ""
    lines, item = [], False
    for line in docstring.splitlines():
        text = line.strip()
        label = re.match(
            r"(Args|Attributes|Shape|Raises|Returns|Source|Yields|Note|Example)s?:\s*(.*)", text
        )
        argument = re.match(r"([\w, *]+): (.*)", text) if line.startswith("    ") else None
        if label and not line.startswith(" "):
            lines += ["", f"**{label[1]}:** {escaped(label[2])}".rstrip()]
            item = label[1] in ("Args", "Attributes")
            lines += [""] if item else []
        elif argument and item and not line.startswith("        "):
            lines.append(f"- `{argument[1]}`: {escaped(argument[2])}")
        elif item and text and line.startswith(" "):
            lines.append(f"  {escaped(text)}")
        else:
            lines.append(escaped(text))
            item = False
    return "\n".join(lines).strip()


def signature(node: ast.FunctionDef, *, method: bool = False) -> str:
    arguments = node.args
    if method and arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(arguments)}){returns}"


def decorated(node: ast.ClassDef | ast.FunctionDef, name: str) -> bool:
    return any(name in ast.unparse(d) for d in node.decorator_list)


def fields(node: ast.ClassDef) -> str:
    """The signature of a dataclass: its fields, in order."""
    found = [
        n
        for n in node.body
        if isinstance(n, ast.AnnAssign)
        and not ast.unparse(n.target).startswith("_")
        and not ast.unparse(n.annotation).startswith("ClassVar")
    ]
    return "(" + ", ".join(ast.unparse(n) for n in found) + ")"


def directive(kind: str, head: str, body: str, fence: str = "```") -> str:
    return f"{fence}{{py:{kind}}} {head}\n\n{body}\n{fence}\n"


def method(node: ast.FunctionDef) -> str:
    if decorated(node, "property"):
        head = f"{node.name}"
        return directive("property", head, prose(ast.get_docstring(node)))
    kind = "classmethod" if decorated(node, "classmethod") else "method"
    return directive(kind, node.name + signature(node, method=True), prose(ast.get_docstring(node)))


def described(tree: ast.Module, name: str) -> str:
    """The entry of one public name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return directive("function", name + signature(node), prose(ast.get_docstring(node)))
        if isinstance(node, ast.ClassDef) and node.name == name:
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            init = next((n for n in methods if n.name == "__init__"), None)
            head = fields(node) if decorated(node, "dataclass") else "()"
            head = signature(init, method=True).partition(" -> ")[0] if init else head
            if not (init or decorated(node, "dataclass")):
                head = ""
            shown = [n for n in methods if not n.name.startswith("_") and ast.get_docstring(n)]
            body = prose(ast.get_docstring(node))
            body += "".join("\n\n" + method(n) for n in shown)
            return directive("class", name + head, body, "````")
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == name and node.value is not None:
                value = ast.unparse(node.value)
                value = value if len(value) < 60 else value[:57] + "..."
                return directive("data", name, f"`{value}`")
    raise SystemExit(f"make site: minillm/__init__.py names {name}, which its module lacks")


def lay(root: Path, source: Path) -> list[str]:
    """Write api/*.md and minillm/**/*.md; the names of the former."""
    rooms: dict[str, list[tuple[str, list[str]]]] = {}
    for module, names in sorted(public_names(root).items()):
        room = module.partition(".")[0] if "." in module else ""
        rooms.setdefault(room, []).append((module, names))
    (source / "api").mkdir()
    rows = []
    for room, modules in sorted(rooms.items()):
        text = [f"# minillm.{room}\n" if room else "# minillm\n"]
        for module, names in modules:
            file = f"minillm/{module.replace('.', '/')}"
            tree = ast.parse((root / f"{file}.py").read_text(encoding="utf-8"))
            text.append(f"## {module}\n\n{escaped(ast.get_docstring(tree) or '')}\n")
            text.append(f"The code: [{file}.py](../{file}.md). Import from `minillm`.\n")
            text += [described(tree, name) for name in names]
        name = room or "minillm"
        (source / f"api/{name}.md").write_text("\n".join(text), encoding="utf-8")
        listed = ", ".join(f"`{n}`" for _, names in modules for n in names)
        rows.append(f"| [{'minillm.' + room if room else 'minillm'}]({name}.md) | {listed} |")
    table = "\n".join(["| room | public names |", "|---|---|", *rows])
    entries = "\n".join(room or "minillm" for room in sorted(rooms))
    (source / "api/index.md").write_text(
        f"# API: the public names\n\nEach can be imported from `minillm` itself.\n\n{table}\n\n"
        f"```{{toctree}}\n:hidden:\n\n{entries}\n```\n",
        encoding="utf-8",
    )
    lay_modules(root, source)
    return ["api/index"]


def lay_modules(root: Path, source: Path) -> None:
    """A page a module with its code, as the labels of exported cells link to it."""
    for path in sorted((root / "minillm").rglob("*.py")):
        if "exercises" not in str(path.relative_to(root)) and not path.name.startswith("__"):
            lay_module(root, source, path)


def lay_module(root: Path, source: Path, path: Path) -> None:
    """The page of one Python file."""
    name = path.relative_to(root)
    code = path.read_text(encoding="utf-8").rstrip()
    built = re.search(r"^# Built from (\S+\.ipynb)", code, re.M)
    up = "../" * (len(name.parts) - 1)
    said = f"Built, word for word, from [{built[1]}]({up}{built[1]})." if built else ""
    fence = "`" * 7
    text = f"---\norphan: true\n---\n# {name.as_posix()}\n\n{said}\n\n"
    text += f"{fence}python\n{code}\n{fence}\n"
    target = source / name.with_suffix(".md")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
