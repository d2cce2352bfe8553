"""Every relative link and anchor of the documents and the notebooks leads somewhere."""

import json
import re
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("notebooks", "assets", "benchmarks")
PAGES = sorted(ROOT.glob("*.md"))
PAGES += sorted(p for f in FOLDERS for k in ("*.md", "*.ipynb") for p in (ROOT / f).rglob(k))
PAGES = [p for p in PAGES if ".ipynb_checkpoints" not in p.parts]

FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
NO_LINKS = re.compile(r"``.+?``|`[^`\n]*`|\$\$.+?\$\$|\$[^$\n]+\$", re.S)
LINK = re.compile(r"\]\(\s*<?([^()\s<>]+(?:\([^()\s]*\)[^()\s<>]*)?)>?(?:\s+[\"'][^)]*)?\)")
HTML = re.compile(r"<(?:a|img)\b[^>]*?\b(?:href|src)=[\"']([^\"']+)")
REFERENCE = re.compile(r"^\[[^\]]+\]:\s+<?(\S+?)>?\s*$", re.M)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.M)
ANCHOR = re.compile(r"<a\b[^>]*?\b(?:id|name)=[\"']([^\"']+)")


def prose(path: Path) -> str:
    """The text of a page, without code: of a notebook its markdown cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"]
        text = "\n\n".join("".join(c["source"]) for c in cells)
    return FENCE.sub("", text)


def links(text: str) -> list[str]:
    """The links of a text that stay here: no address of the web, no mail, no attachment."""
    text = NO_LINKS.sub("", text)
    found = [m[1] for pattern in (LINK, HTML, REFERENCE) for m in pattern.finditer(text)]
    return [link for link in found if not re.match(r"[a-z][a-z0-9+.-]*:|//", link)]


def anchors(text: str, *, notebook: bool) -> set[str]:
    """What may stand after the #: headings as JupyterLab or, of documents, GitHub names them."""
    names, own = [], set(ANCHOR.findall(text))
    for heading in HEADING.findall(text):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        heading = re.sub(r"[*]", "", heading)
        if notebook:
            names.append(heading.replace(" ", "-"))
        else:
            names.append(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    seen: dict[str, int] = {}
    for name in names:  # the second of one name gets -1
        own.add(f"{name}-{seen[name]}" if name in seen and not notebook else name)
        seen[name] = seen.get(name, 0) + 1
    return own


def dead_links(path: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    dead = []
    for link in links(prose(path)):
        place, _, anchor = unquote(link).partition("#")
        target = (path.parent / place).resolve() if place else path
        if not target.exists() or ROOT not in [target, *target.parents]:
            dead.append(link)
        elif anchor and target.suffix in (".md", ".ipynb"):
            known = anchors(prose(target), notebook=target.suffix == ".ipynb")
            dead += [] if anchor in known else [link]
    return dead


def test_links_lead_somewhere():
    assert [(path.relative_to(ROOT), dead) for path in PAGES for dead in dead_links(path)] == []


def test_a_dead_link_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# One `two`, three!\n# Again\n# Again\n", encoding="utf-8")
    cells = [{"cell_type": "markdown", "source": ["## The floor\n"]}]
    cells += [{"cell_type": "code", "source": ["# No heading\n"]}]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    page = tmp_path / "page.md"
    good = "# Here\n[a](other.md) ![b](n.ipynb) [c](#here) [d](other.md#one-two-three) "
    good += "[e](n.ipynb#The-floor) [f](https://x.org/none#y) [g](other.md#again-1) `[h](none)` "
    good += "$f[i](x)$\n```\n[j](none)\n```\n<img src='other.md'>\n"
    page.write_text(good, encoding="utf-8")
    assert dead_links(page) == []
    bad = ["none.md", "#Here", "other.md#nowhere", "n.ipynb#the-floor", "n.ipynb#No-heading", ".."]
    page.write_text("# Here\n" + " ".join(f"[x]({link})" for link in bad), encoding="utf-8")
    assert dead_links(page) == bad
    page.write_text("<a href='gone.md'>x</a> [y]\n\n[y]: gone2.md\n", encoding="utf-8")
    assert dead_links(page) == ["gone.md", "gone2.md"]
