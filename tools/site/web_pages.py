"""Sphinx extension: MathML, pictures at full size, folded solutions, links to the glossary."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

QUIET = (nodes.title, nodes.reference, nodes.literal, nodes.literal_block, nodes.math)
QUIET += (nodes.math_block, nodes.raw, nodes.caption, nodes.table)


def jupyter_anchor(title: str) -> str:
    """A heading's anchor as JupyterLab names it: spaces become hyphens."""
    return re.sub(r"[`*]", "", title).replace(" ", "-")


def inline_math(writer: Any, node: nodes.math) -> None:
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def display_math(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def open_image(writer: Any, node: nodes.image) -> None:
    """An output's picture leads to itself at full size, where a phone can enlarge it."""
    name = writer.builder.images.get(node["uri"])
    node["full"] = name and not isinstance(node.parent, nodes.reference)
    if node["full"]:
        address = f"{writer.builder.imgpath}/{quote(name)}"
        writer.body.append(f'<a class="full-size" href="{address}" title="open at full size">')
    HTML5Translator.visit_image(writer, node)


def close_image(writer: Any, node: nodes.image) -> None:
    HTML5Translator.depart_image(writer, node)
    if node["full"]:
        writer.body.append("</a>")


class Folded(nodes.General, nodes.Element):
    """What stays hidden until the reader asks for it."""


def open_folded(writer: Any, node: Folded) -> None:
    writer.body.append('<details class="solution"><summary>Show the solution</summary>\n')


def close_folded(writer: Any, node: Folded) -> None:
    writer.body.append("</details>\n")


def fold_solutions(app: Sphinx, doctree: nodes.document) -> None:
    """On a page of solutions, all but the number or heading of an exercise is folded."""
    if not app.env.docname.startswith("notebooks/solutions/"):
        return
    for page in [node for node in doctree.children if isinstance(node, nodes.section)]:
        children, folded = page.children, None
        page.children = []
        for child in children:
            first = next((node for node in child.children if node.astext()), child)
            if isinstance(child, nodes.section):  # "## 03.1 Attention by hand"
                folded = None
                body = child.children[1:]
                child.children = child.children[:1]
                child += Folded("", *body)
                page += child
            elif isinstance(first, nodes.strong) and re.fullmatch(r"(\w+\.)?\d+", first.astext()):
                child.remove(first)  # "**04.1** Cut the last dimension into heads, ..."
                folded = Folded("", child)
                page += [nodes.paragraph("", "", first), folded]
            elif folded is not None:
                folded += child
            else:
                page += child


def link_terms(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """The first mention of a glossary term on a notebook's page leads to the glossary.

    A word that plain English has too counts as the term only where it is set in bold.
    """
    if not docname.startswith("notebooks/") or docname == "notebooks/GLOSSARY":
        return
    terms = json.loads((Path(app.srcdir) / "terms.json").read_text(encoding="utf-8"))
    names = sorted(terms, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, names))})s?(?![\w-])", re.I)
    address = app.builder.get_relative_uri(docname, "notebooks/GLOSSARY")
    done: set[str] = set()

    def silent(node: nodes.Node) -> bool:
        return isinstance(node, QUIET) or (node.parent is not None and silent(node.parent))

    for text in [*doctree.findall(nodes.Text)]:
        if silent(text.parent):
            continue
        bold = isinstance(text.parent, nodes.strong)
        pieces: list[nodes.Node] = []
        end, string = 0, text.astext()
        for found in pattern.finditer(string):
            name = found[1].lower()
            term = terms[name]
            if term["id"] in done or not (bold or term["plain"]):
                continue
            done.add(term["id"])
            link = nodes.reference("", found[0], refuri=f"{address}#{term['id']}", internal=True)
            link["classes"] = ["term"]
            link["reftitle"] = term["meaning"]
            pieces += [nodes.Text(string[end : found.start()]), link]
            end = found.end()
        if pieces:
            text.parent.replace(text, [*pieces, nodes.Text(string[end:])])


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (inline_math, None), (display_math, None))
    app.add_node(nodes.image, override=True, html=(open_image, close_image))
    app.add_node(Folded, html=(open_folded, close_folded))
    app.connect("doctree-read", fold_solutions)
    app.connect("doctree-resolved", link_terms)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
