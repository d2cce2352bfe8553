"""The page "The whole model in JavaScript": the scripts that run, and beside each function its name
in the package.

The name is looked up, not written here: a function's own, spelt as Python spells it, or what its
comment says, `// Python: NAME`; the module and the chapter are those of its definition.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

SCRIPTS = {  # in static/: what part of the way it is
    "minillm.js": "From a token to the scores of the next",
    "sampling.js": "From scores to the next token",
    "tokenizer.js": "From text to tokens and back",
}


class CounterpartError(Exception):
    """A function of a script that has no counterpart in Python, or none that it names."""


def pieces(script: str) -> list[str]:
    """A script, cut before each of its parts that is not indented and follows an empty line."""
    return re.split(r"\n\n(?=\S)", script.strip())


def definitions(root: Path) -> dict[str, list[tuple[Path, Path | None]]]:
    """Function or class of the package -> the modules that define it, each with its notebook."""
    found: dict[str, list[tuple[Path, Path | None]]] = {}
    for path in sorted((root / "minillm").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        built = re.search(r"^# Built from (\S+\.ipynb)", text, re.M)
        place = path.relative_to(root), Path(built[1]) if built else None
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.setdefault(node.name, []).append(place)
    return found


def label(piece: str, known: dict[str, list[tuple[Path, Path | None]]]) -> str:
    """What a piece is in Python, with links; empty for one that defines no function and no class.

    Of several definitions of a name that of the earliest shelf counts: the course, then the others.

    Raises: CounterpartError with the function's name.
    """
    defined = re.search(r"^(?:export )?(?:function|class) (\w+)", piece, re.M)
    if not defined:
        return ""
    said = re.search(r"^// Python: (\S+)$", piece, re.M)
    snake = (
        defined[1] if defined[1][0].isupper() else re.sub(r"([A-Z])", r"_\1", defined[1]).lower()
    )
    name = said[1] if said else snake
    places = known.get(name.partition(".")[0], [])
    if not places and "." in name:
        return f"in Python: `{name}`"
    shelf = [(len(page.parts) if page else 9, module, page) for module, page in places]
    best = [place for place in shelf if place[0] == min(shelf)[0]]
    if len(best) != 1 or best[0][2] is None:
        where = ", ".join(str(module) for module, _ in places) or "nowhere"
        raise CounterpartError(
            f"{defined[1]}: the package defines {name} {where}; say // Python: NAME"
        )
    _, module, page = best[0]
    chapter = page.relative_to("notebooks").as_posix().partition("_")[0]
    return (
        f"in the package: `{name}`, [{module.as_posix()}]({module.with_suffix('.md').as_posix()}), "
        f"of [{chapter}]({page.as_posix()})"
    )


def page(root: Path, static: Path) -> str:
    """The Markdown of the page."""
    known = definitions(root)
    scripts = {name: (static / name).read_text(encoding="utf-8") for name in SCRIPTS}
    lines = {name: len(script.splitlines()) for name, script in scripts.items()}
    text = [
        f"""# The whole model in JavaScript

The [front page](index.md) tells stories with these {sum(lines.values())} lines and no library; what
stands here is cut from the files that run. Chapters 02 to 10 have built each part of it; above a
function stands its name in the package, with the module and the chapter. One thing is left out:
the page reads one text, a token at a time, so there is no batch and no mask.

The weights are the course's own file, `assets/stories-en/model.safetensors`, 16 bits a number, and
none is rounded on the way. Tests compare with the package, in Node and in Chromium: the scores
after each token of 20 beginnings agree within 0.001, the greedy stories of 50 beginnings are the
same token for token, and so is what is drawn with given random numbers.
"""
    ]
    for name, title in SCRIPTS.items():
        text.append(f"## {title}\n\n`{name}`, {lines[name]} lines.\n")
        for piece in pieces(scripts[name]):
            if said := label(piece, known):
                text.append(f"```{{container}} package-label\n{said}\n```\n")
            text.append(f"```````javascript\n{piece}\n```````\n")
    return "\n".join(text)
