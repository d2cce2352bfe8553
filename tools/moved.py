"""Where each module lay before the package was rebuilt around twelve files, and where it lies now.

A learner's copy made before that says `from minillm.nn.rope import ...` and `#| export nn.rope`.
`make student` carries it over with `carry`. Commit 1072af8 is the last with the old places.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import build
import student_blank as blanks
from cells import exported, marks, text_of

if TYPE_CHECKING:
    from student import Copy

# the old room, the new one, the modules that keep their names
ROOMS = [
    ("tokenizer", "deeper.tokenizer", "bulk chat_template hf_json long_words merges patterns"),
    ("tokenizer", "deeper.tokenizer", "vocabulary wrapped"),
    ("nn", "deeper.attention", "flash fused maps mla rope_layouts rope_scaling"),
    ("cache", "deeper.caches", "kinds paged quantized sliding static"),
    ("training", "deeper.training", "checkpoint distributed documents expected_loss"),
    ("training", "deeper.training", "half_precision muon packing plain_batches run run_folder"),
    ("training", "deeper.training", "scoring tensor_parallel token_file"),
    ("generation", "deeper.generation", "compiled conversation fast_sampling search speculative"),
    ("generation", "deeper.generation", "stream"),
    ("pretrained", "deeper.pretrained", "adapters changes families folder gguf load presets"),
    ("pretrained", "deeper.pretrained", "qwen_vl seq2seq vision weights"),
    ("fast", "deeper.fast", "kernels packed small whole"),
    ("models", "deeper.pictures", "qwen_vl"),
    ("training", "beyond.answers", "conversations sft sft_files"),
    ("nn", "beyond.experts", "grouped moe routing"),
    ("training", "beyond.experts", "balance"),
    ("nn", "beyond.state", "mamba mamba_parts selective_scan"),
    ("nn", "beyond.lora", "adapters lora"),
    ("nn", "beyond.two_sequences", "cross"),
    ("models", "beyond.two_sequences", "seq2seq"),
    ("models", "beyond.pictures", "picture_parts pictures vision vision_parts"),
    ("stories", "beyond.pictures", "scenes"),
    ("models.families", "beyond.families", "deepseek_v3 experts falcon gemma gpt2 qwen state"),
    ("fast", "beyond.export", "onnx_file"),
    ("models", "support", "saved"),
    ("", "support", "checks counting device family fence fence_worker files modes"),
]
MODULES = {
    f"{old}.{name}".lstrip("."): f"{new}.{name}"
    for old, new, names in ROOMS
    for name in names.split()
}
MODULES |= {
    "tokenizer.pretokenizer": "bpe",
    "tokenizer.bpe": "bpe",
    "nn.attention": "attention",
    "nn.multihead": "heads",
    "nn.rope": "rope",
    "nn.layers": "layers",
    "training.data": "training",
    "training.loss": "training",
    "training.optim": "training",
    "training.evaluation": "training",
    "training.trainer": "training",
    "cache.base": "cache",
    "cache.state": "beyond.state.state_cache",
    "generation.sampling": "sampling",
    "generation.decoding": "generation",
    "fast.export": "beyond.export.step",
}

_OLD = "|".join(re.escape(name) for name in sorted(MODULES, key=len, reverse=True))
_DOTTED = re.compile(rf"\bminillm\.({_OLD})(?!\w)")
_FILE = re.compile(rf"\bminillm/({_OLD.replace(re.escape('.'), '/')})\.py\b")
_MARK = re.compile(rf"^(#\| *(?:default_exp|export)[ \t]+)({_OLD})(?=[ \t]*$)", re.M)
_FROM_ROOM = re.compile(
    r"from minillm((?:\.(?:nn|cache|training|tokenizer|generation|models|pretrained|fast))?)"
    r" import ([a-z]\w*(?: as \w+)?(?:, [a-z]\w*(?: as \w+)?)*)(?=[ \t]*(?:[\\\n\"';#`]|$))"
)
_FROM_CHECKS = re.compile(r"from minillm\.checks import (\([^)]*\)|[^\n]*)")
_CHECKS = Path(__file__).resolve().parents[1] / "minillm" / "support" / "checks"


def rewritten(text: str) -> str:
    """A text with the new places of modules: dotted names, files, imports and marks of cells."""
    text = _FROM_CHECKS.sub(_by_subject, text)
    text = _MARK.sub(lambda m: m[1] + MODULES[m[2]], text)
    text = text.replace("from minillm.tokenizer import BPETok", "from minillm.bpe import BPETok")
    text = _FROM_ROOM.sub(_modules, text)
    text = _DOTTED.sub(lambda m: f"minillm.{MODULES[m[1]]}", text)
    return _FILE.sub(
        lambda m: f"minillm/{MODULES[m[1].replace('/', '.')].replace('.', '/')}.py", text
    )


def _by_subject(found: re.Match[str]) -> str:
    """`from minillm.checks import ...` by the files that define the names now.

    A check that is gone checks nothing, so that what calls it still runs.
    """
    places: dict[str, list[str]] = {}
    gone = []
    for name in re.findall(r"\w+", found[1]):
        defined = re.compile(rf"^(?:def|class) {name}\b|^{name}\b", re.M)
        files = (p for p in sorted(_CHECKS.glob("*.py")) if defined.search(p.read_text("utf-8")))
        if (path := next(files, None)) is None:
            gone.append(f"{name} = lambda *_, **__: None  # a check that the package no longer has")
        else:
            places.setdefault(path.stem, []).append(name)
    lines = [
        f"from minillm.support.checks.{subject} import {', '.join(names)}"
        for subject, names in places.items()
    ]
    return "\n".join(lines + gone)


def _modules(found: re.Match[str]) -> str:
    """`from minillm.training import checkpoint, distributed`, where these are modules."""
    room = found[1].lstrip(".")
    by_place: dict[str, list[str]] = {}
    for part in found[2].split(", "):
        name, _, alias = part.partition(" as ")
        old = f"{room}.{name}".lstrip(".")
        if old not in MODULES:
            if room:
                return found[0]
            by_place.setdefault("minillm", []).append(part)
            continue
        place, _, new = f"minillm.{MODULES[old]}".rpartition(".")
        if new != name and not alias:
            alias = name
        by_place.setdefault(place, []).append(f"{new} as {alias}" if alias else new)
    lines = [f"from {place} import {', '.join(names)}" for place, names in by_place.items()]
    return "; ".join(lines) if len(lines) > 1 else lines[0]


KEPT = "build/before_move"  # where a copy's old package and tests are kept


def is_old(copy: Copy) -> bool:
    """Whether a copy was made before the move and not carried over since."""
    return "minillm/nn/__init__.py" in copy.given["files"]


def carry(copy: Copy, course: Path) -> str:
    """Let what was written in an old copy say the new places; `update` then brings the rest.

    Nothing is deleted: the old package and tests go to `build/before_move`. A copy that was left
    half-way by a kill is carried over by the next call.
    """
    kept = copy.root / KEPT
    kept.mkdir(parents=True, exist_ok=True)
    for folder in ("minillm", "tests"):
        if (copy.root / folder).exists() and not (kept / folder).exists():
            (copy.root / folder).rename(kept / folder)
    written = 0
    for name in copy.given["cells"]:
        path = course / "notebooks" / name
        if not (copy.root / "notebooks" / name).exists() or not path.exists():
            continue
        data, reference = copy.page(name), build.Notebook(course, name)
        docs = {c["id"]: docstring(text_of(c)) for c in reference.data["cells"]}
        for cell in [*data["cells"]]:
            cell_id, source = cell.get("id"), text_of(cell)
            if copy.untouched(name, cell_id, cell):  # `update` brings the course's, if it has one
                if exported(cell) and cell_id not in docs:
                    data["cells"].remove(cell)
                continue
            new = rewritten(source)
            if exported(cell):
                module = marks({**cell, "source": new})["export"]
                new = without_own_imports(new, module or reference.default or "")
                if (old := docstring(new)) and old != (doc := docs.get(cell_id, "")):
                    new = new.replace(old, doc, 1)
            if new != source:
                cell["source"] = blanks.lines_of(new)
                written += 1
        copy.save(name, data)
    moved = ("minillm/", "tests/")
    copy.given["files"] = {n: d for n, d in copy.given["files"].items() if not n.startswith(moved)}
    copy.save_given()
    return (
        f"{copy.root} was made before the package moved: {written} cells of yours now say the new "
        f"places; minillm/ and tests/ as they were are in {KEPT}/"
    )


def docstring(source: str) -> str:
    """A marked cell's docstring with its quotation marks and the lines to what follows, or ""."""
    found = re.match(r'#\|[^\n]*\n("""(?:.*?)"""\n+)', source, re.S)
    return found[1] if found else ""


def without_own_imports(source: str, module: str) -> str:
    """A cell of a module that other modules joined does not import from itself."""
    own = rf"^from minillm\.{re.escape(module)} import (\([^)]*\)|.*)\n"
    return re.sub(own, "", source, flags=re.M)
