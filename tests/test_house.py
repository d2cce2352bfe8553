"""The house rules of the package: whole classes, names from one place, a core that stands alone."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minillm"

# The small minillm, each file with the chapter that builds it: what one reads first.
CORE = {
    "ngram": 1,
    "bpe": 2,
    "attention": 3,
    "heads": 4,
    "rope": 5,
    "layers": 6,
    "training": 7,
    "cache": 8,
    "sampling": 9,
    "config": 10,
    "model": 10,
    "generation": 10,
}

# Which rooms a room may import at the top of its files, beside the core and `support`, which are
# free; what it looks up when asked is below.
MAY_IMPORT = {
    "support": "",
    "stories": "deeper.training",
    "deeper.attention": "",
    "deeper.caches": "",
    "deeper.fast": "deeper.attention deeper.tokenizer",
    "deeper.generation": "",
    "deeper.pictures": "beyond.pictures",
    "deeper.pretrained": "beyond.lora beyond.pictures beyond.two_sequences deeper.attention "
    "deeper.pictures deeper.tokenizer",
    "deeper.tokenizer": "",
    "deeper.training": "",
    "beyond.answers": "deeper.tokenizer deeper.training",
    "beyond.experts": "",
    "beyond.export": "deeper.fast",
    "beyond.families": "beyond.experts beyond.state deeper.attention",
    "beyond.lora": "",
    "beyond.pictures": "beyond.two_sequences",
    "beyond.state": "",
    "beyond.two_sequences": "",
    "cli": "",
}

# And which it looks up inside a function: an edge of the house that a newcomer does not read.
LOOKS_UP = {
    "attention": "deeper.attention",  # the backends "tiled" and "flash"
    "bpe": "deeper.tokenizer",  # fast training, files
    "ngram": "stories",  # how much to take from a count
    "generation": "deeper.generation",  # stop strings, compiled steps
    "sampling": "deeper.generation",  # rows drawn together
    "training": "deeper.training",  # Muon, plain batches, expected losses
    "support": "beyond.families cache deeper.attention deeper.caches deeper.fast deeper.pretrained "
    "deeper.tokenizer deeper.training generation layers model",  # families, devices, doors
    "deeper.fast": "beyond.lora deeper.pretrained deeper.training",
    "deeper.pretrained": "deeper.fast deeper.training",  # the kinds of bits that are kept
    "deeper.training": "deeper.pretrained",  # a checkpoint tells from_pretrained its model
    "beyond.lora": "deeper.pretrained",  # a layer's name in the family's files
    "cli": "bpe config deeper.generation deeper.pretrained deeper.tokenizer deeper.training "
    "generation model sampling stories training",
}


def name_of(path: Path) -> str:
    """The module of a file, without the package: `rope`; a room's own is `nn`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {
    name_of(path): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "exercises.py"  # stands in for the folder where that is not
}
ROOMS = [name_of(path) for path in sorted(PACKAGE.rglob("*/__init__.py"))]
SUPPORT = {name for name in TREES if name.startswith("support.")}


def imported_at_the_top(tree: ast.Module) -> set[str]:
    """Our own modules that a module imports as it is imported itself (not for type checkers)."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("minillm.")
                found.add(f"minillm.{inner}" if inner in TREES else node.module or "")
        else:
            waiting += ast.iter_child_nodes(node)
    return {name.removeprefix("minillm.") for name in found if name.startswith("minillm.")}


def looked_up(tree: ast.Module) -> set[str]:
    """Our modules that are imported anywhere, those whose names stand in strings included."""
    named = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = re.fullmatch(r"(minillm\.[\w.]+?)(:\w+|\.[A-Z]\w*)?", node.value)
            named += [found[1]] if found else []
    return {name.removeprefix("minillm.") for name in named if name.startswith("minillm.")}


def room_of(module: str) -> str:
    """The folder that a module lies in, on a shelf the second, or a module that lies in none."""
    parts = module.split(".")
    return ".".join(parts[:2] if parts[0] in ("deeper", "beyond") else parts[:1])


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_the_rooms_that_it_may(room):
    allowed = {room, *MAY_IMPORT[room].split(), *CORE, "support"}
    found = {
        f"{module} imports {other}"
        for module, tree in TREES.items()
        if room_of(module) == room
        for other in imported_at_the_top(tree)
        if room_of(other) not in allowed
    }
    assert sorted(found) == []


@pytest.mark.parametrize("room", [*CORE, *MAY_IMPORT])
def test_a_room_looks_up_only_the_rooms_that_are_listed(room):
    of_room = {module: tree for module, tree in TREES.items() if room_of(module) == room}
    at_the_top = {room_of(m) for tree in of_room.values() for m in imported_at_the_top(tree)}
    found = {room_of(name) for tree in of_room.values() for name in looked_up(tree)}
    assert sorted(found - at_the_top - {room, "support"}) == sorted(LOOKS_UP.get(room, "").split())


def test_every_room_is_in_the_table():
    rooms = {room_of(name) for name in TREES} - {"", "__main__", "exercises", "deeper", "beyond"}
    assert rooms == {*MAY_IMPORT, *CORE}


def test_what_is_built_lies_on_the_shelf_of_its_page():
    for path in PACKAGE.rglob("*.py"):
        built = re.search(r"^# Built from notebooks/(.+?)\.ipynb", path.read_text("utf-8"), re.M)
        module = name_of(path)
        if built and "/" in built[1]:
            assert room_of(module) == "stories" or module.startswith(built[1].split("/")[0])
        elif built:
            assert module in CORE


def test_no_files_import_each_other_in_a_circle():
    """By imports at their tops: such a file could not be read before the others."""
    waiting = {name: imported_at_the_top(tree) & TREES.keys() for name, tree in TREES.items()}
    while ready := [name for name, needs in waiting.items() if not needs]:
        waiting = {
            name: needs.difference(ready) for name, needs in waiting.items() if name not in ready
        }
    assert sorted(waiting) == []


def test_no_private_class_is_the_base_of_exactly_one():
    private, heirs = set(), Counter()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                private |= {node.name} if node.name.startswith("_") else set()
                for base in node.bases:
                    heirs[ast.unparse(base).split("[")[0].rpartition(".")[2]] += 1
    assert sorted(name for name in private if heirs[name] == 1) == []


def names_passed_on(module: str) -> list[str]:
    """Names that a module offers though they come from another."""
    tree = TREES[module]
    found = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
        if alias.asname == alias.name
    ]
    if module in ("", *ROOMS):
        return found  # a room's __init__ may offer the room's core names
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found += imported.intersection(ast.literal_eval(node.value))
    return found


def test_names_come_from_one_place():
    assert [(m, name) for m in TREES for name in names_passed_on(m)] == []


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_only_the_core_of_earlier_chapters(module):
    needed = imported_at_the_top(TREES[module]) - SUPPORT
    depth = sorted(needed - CORE.keys())
    assert depth == [], f"{module} asks for {depth} before anybody needs it"
    later = sorted(name for name in needed if CORE[name] > CORE[module])
    assert later == [], f"{module} (chapter {CORE[module]}) builds on a later chapter: {later}"


def test_what_serves_all_needs_nothing_else_of_ours():
    for module in SUPPORT:
        assert imported_at_the_top(TREES[module]) <= SUPPORT


def test_from_text_to_token_and_weights_takes_few_files():
    code = """
import sys
import torch
from minillm.config import ModelConfig
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.bpe import BPETokenizer
from minillm.bpe import GPT4_PATTERN
from minillm.training import TrainConfig, WindowBatches, train

tokenizer = BPETokenizer({bytes([byte]): byte for byte in range(256)}, GPT4_PATTERN, {})
ids = torch.tensor([tokenizer.encode("Once upon a time")])
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = CausalLM(ModelConfig(vocab_size=256, **sizes))
assert generate(model, ids, max_new_tokens=3).shape == (1, 19)
train(model, WindowBatches(ids[0], 2, 8), TrainConfig(2, warmup_steps=0))
ours = [name for name, module in sys.modules.items() if name.partition(".")[0] == "minillm"
        and not module.__file__.endswith("__init__.py")]
print(*sorted(ours))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    files = {name.removeprefix("minillm.") for name in done.stdout.split()}
    assert len(files) <= 30, sorted(files)
    assert files <= CORE.keys() | SUPPORT, (
        f"depth that nobody asked for: {sorted(files - CORE.keys() - SUPPORT)}"
    )


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_offers_no_name_that_is_also_one_of_its_modules(room):
    modules = {name.rpartition(".")[2] for name in TREES if name.startswith(f"{room}.")}
    offered = getattr(importlib.import_module(f"minillm.{room}"), "__all__", [])
    assert modules.isdisjoint(offered)


def test_the_package_offers_no_name_that_is_also_a_module():
    import minillm

    assert {name.partition(".")[0] for name in TREES}.isdisjoint(minillm.__all__)
