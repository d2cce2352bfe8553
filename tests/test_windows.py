"""Training, saving and the tools under Windows' rules for files; see windows_rules.py."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from windows_rules import POSIX_ONLY

from minillm.bpe import BPETokenizer
from minillm.cli.corpus import END, stories
from minillm.cli.main import main
from minillm.config import ModelConfig
from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.model import CausalLM

ROOT = Path(__file__).resolve().parents[1]
RULES = Path(__file__).with_name("windows_rules.py")

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="reads in /proc what is open and mapped"
)


def under_rules(*words: object) -> subprocess.CompletedProcess:
    """A python under the rules."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNDEFAULTENCODING": "1"}
    command = [sys.executable, RULES, *words]
    return subprocess.run(
        [str(word) for word in command], capture_output=True, encoding="utf-8", env=env, cwd=ROOT
    )


def run_code(code: str, *words: object) -> str:
    """What the code prints under the rules."""
    done = under_rules("-c", textwrap.dedent(code), *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_rules_hold(tmp_path):
    """Each of them refuses what Windows refuses, and lets through what it lets through."""
    code = """
        import mmap, os, shutil, sys
        from pathlib import Path

        def refused(kind, call, *args, **more):
            try:
                call(*args, **more)
            except kind as error:
                return type(error).__name__
            raise SystemExit(f"{call} {args} was let through")

        folder = Path(sys.argv[1])
        a, b, c = (folder / name for name in "abc")
        for path in (a, b, c):
            path.write_text(path.name, encoding="utf-8")
        refused(PermissionError, os.open, folder, os.O_RDONLY)
        handle = os.open(a, os.O_RDONLY)
        refused(OSError, os.fsync, handle)
        for call in (os.remove, os.unlink, Path.unlink):
            refused(PermissionError, call, a)
        refused(PermissionError, os.replace, b, a)
        refused(PermissionError, os.replace, a, b)
        refused(PermissionError, folder.rename, folder.with_name("other"))
        refused(PermissionError, shutil.rmtree, folder)
        os.close(handle)
        for name in "bc":
            assert not (folder / name).exists() or (folder / name).read_bytes() == name.encode()
        for path in (a, b, c):
            path.write_text(path.name, encoding="utf-8")
        refused(FileExistsError, os.rename, b, a)
        with open(a, "r+b") as file:
            os.fsync(file.fileno())
            view = mmap.mmap(file.fileno(), 0)
        refused(PermissionError, os.replace, b, a)
        refused(OSError, open, a, "w", encoding="utf-8")
        view.close()
        os.replace(b, a)
        assert a.read_bytes() == b"b" and not b.exists()
        refused(EncodingWarning, open, a)
        refused(EncodingWarning, a.read_text)
        refused(EncodingWarning, a.write_text, "x")
        refused(ModuleNotFoundError, lambda: __import__("resource"))
        refused(AttributeError, os.fork)
        refused(AttributeError, os.getuid)
        shutil.rmtree(folder)
        print("held")
    """
    (tmp_path / "f").mkdir()
    assert run_code(code, tmp_path / "f") == "held\n"


def asked_first(tree):
    """What lies in functions that ask for the system: there POSIX's own names are in place."""
    asking = [
        n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and "os.name" in ast.unparse(n)
    ]
    return {id(node) for function in asking for node in ast.walk(function)}


def test_our_code_names_nothing_that_only_posix_systems_have():
    for path in [*ROOT.glob("minillm/**/*.py"), *ROOT.glob("tools/*.py")]:
        tree = ast.parse(text := path.read_text(encoding="utf-8"))
        asked = asked_first(tree) if "os.name" in text else set()
        for node in ast.walk(tree):
            if id(node) in asked:
                continue
            where, names = f"{path.name}, line {getattr(node, 'lineno', 0)}", set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
                found = {alias.name for alias in node.names} & POSIX_ONLY.get(node.module, set())
                assert not found, where
            assert not names & POSIX_ONLY["modules"], where
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.attr not in POSIX_ONLY.get(node.value.id, set()), where


TRAIN = ["--device", "cpu", "--hidden-size", "32", "--layers", "1", "--batch-size", "2", "--quiet"]
TRAIN += ["--vocab-size", "1000", "--held-out", "3", "--steps", "4", "--checkpoint-interval", "2"]


def test_a_run_is_trained_resumed_and_read(tmp_path):
    """It leaves the very bytes that it leaves without the rules."""
    out, here = tmp_path / "out", tmp_path / "here"
    code = """
        import shutil, sys
        from pathlib import Path
        from minillm.cli.main import main

        out, words = Path(sys.argv[1]), sys.argv[2:]
        assert main(["train", "--output-dir", str(out), *words]) == 0
        shutil.rmtree(out / "step-00000004")
        (out / "model.safetensors").unlink()
        assert main(["train", "--output-dir", str(out), "--resume", *words]) == 0
        assert main(["generate", str(out), "--max-new-tokens", "5"]) == 0
        assert main(["eval", str(out), "--documents", "2", "--samples", "1"]) == 0
        assert main(["train", "--output-dir", str(out), "--resume", *words]) == 0
    """
    shown = run_code(code, out, *TRAIN)
    assert "bits per byte" in shown
    assert main(["train", "--output-dir", str(here), *TRAIN]) == 0
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (out / name).read_bytes() == (here / name).read_bytes()
    assert {p.name for p in out.iterdir()} >= {"step-00000002", "step-00000004", "run.json"}
    assert not [p for p in out.iterdir() if re.match(r"\.(?!lock)", p.name)]


def test_a_text_file_is_trained_on_and_resumed(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(END.join(f"the {i} cats\r\nsat on {i} mats" for i in range(300)).encode())
    code = """
        import sys
        from minillm.cli.main import main
        for layout in ("windows", "padded"):
            words = ["train", "--layout", layout, "--output-dir", f"{sys.argv[1]}/{layout}"]
            words += sys.argv[2:]
            assert main(words) == 0
            assert main([*words, "--resume", "--steps", "6"]) == 1  # another schedule
            assert main([*words, "--resume"]) == 0
    """
    options = ["--vocab-size", 290, "--corpus", text, "--context-length", 40]
    run_code(code, tmp_path, *TRAIN, *options)
    for layout in ("windows", "padded"):
        _, tokenizer = from_pretrained(tmp_path / layout)
        text_alone = tokenizer.encode("cats\r\nsat", add_special_tokens=False)
        assert tokenizer.decode(text_alone) == "cats\r\nsat"
        begin = [tokenizer.bos_token_id] if layout == "padded" else []  # as its rows begin
        assert tokenizer.encode("cats\r\nsat") == begin + text_alone


def test_a_model_is_saved_over_the_one_it_was_loaded_from(tmp_path):
    """The model's weights are mapped from that very file: they are copied then, not when loaded."""
    texts = stories("stories-en", 50, "x")
    tokenizer = BPETokenizer.train(texts, 300, special_tokens=[END])
    model, sizes = CausalLM(ModelConfig(300, 32, 2, 4, 64)), (10**9, 20_000)
    for size in sizes:
        folder = tmp_path / str(size)
        save_pretrained(model, tokenizer, folder, max_shard_bytes=size)
        (folder / "README.md").write_text("kept", encoding="utf-8")
    code = """
        import sys
        from pathlib import Path
        import torch
        from minillm.deeper.pretrained.load import from_pretrained, save_pretrained

        def mapped(folder):
            lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
            return {line.rpartition("/")[2] for line in lines if str(folder) in line}

        for folder in map(Path, sys.argv[1:]):
            model, tokenizer = from_pretrained(folder)
            print(len(mapped(folder)))
            with torch.no_grad():
                model.model.norm.weight.fill_(2.0)
            save_pretrained(model, tokenizer, folder, max_shard_bytes=int(folder.name))
            save_pretrained(model, tokenizer, folder, max_shard_bytes=10**9)
            again, _ = from_pretrained(folder)
            for name, value in again.state_dict().items():
                assert torch.equal(value, model.state_dict()[name])
    """
    whole, shards = map(int, run_code(code, *(tmp_path / str(size) for size in sizes)).split())
    assert whole == 1 and shards > 2
    for size in sizes:
        saved, read = from_pretrained(tmp_path / str(size))
        assert torch.all(saved.model.norm.weight == 2.0)
        ours, theirs = saved.state_dict(), model.state_dict()
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs if n != "model.norm.weight")
        assert read.encode("A cat") == tokenizer.encode("A cat")
        assert (tmp_path / str(size) / "README.md").read_text(encoding="utf-8") == "kept"


def test_tokenizers_are_saved_over_what_they_were_loaded_from(tmp_path):
    from tokenizer_folders import write

    ours, wrapped = tmp_path / "ours", write(tmp_path, "llama-2")
    BPETokenizer.train(["a cat 猫"], 300, special_tokens=[END]).save(ours)
    code = """
        import sys
        from minillm.bpe import BPETokenizer
        from minillm.deeper.tokenizer.wrapped import load_tokenizer
        for folder in sys.argv[1:]:
            for _ in range(2):
                tokenizer = load_tokenizer(folder)
                ids = tokenizer.encode("a cat 猫")
                tokenizer.save(folder)
            assert load_tokenizer(folder).encode("a cat 猫") == ids
            print(type(tokenizer).__name__)
    """
    assert run_code(code, ours, wrapped) == "BPETokenizer\nWrappedTokenizer\n"


def test_notebooks_are_built_checked_pulled_and_executed(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# 01 Ein Stück 猫"]},
        *(
            {"cell_type": "code", "id": name, "metadata": {}, "outputs": [], "source": [source]}
            | {"execution_count": None}
            for name, source in [
                ("b", "#| default_exp toy"),
                ("c", '#| export\n"""A toy: 猫."""\n\n\ndef add(a: int) -> int:\n    return a + 1'),
                ("d", "print('猫', add(1))"),
            ]
        ),
    ]
    path = tmp_path / "notebooks" / "01_toy.ipynb"
    path.parent.mkdir()
    (tmp_path / "minillm").mkdir()
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook), encoding="utf-8")
    module = tmp_path / "minillm" / "toy.py"
    for command in ("build", "check", "pull", "check"):
        done = under_rules("tools/build.py", command, "--root", tmp_path)
        assert done.returncode == 0, done.stderr
        if command == "build":
            text = module.read_bytes()
            assert "猫".encode() in text and b"\r" not in text
        elif command == "check":
            module.write_bytes(module.read_bytes().replace(b"a + 1", b"1 + a"))
        else:
            assert "1 + a" in path.read_text(encoding="utf-8")
    module.write_bytes(text)
    before = path.read_bytes()
    done = under_rules("tools/execute.py", path)
    assert done.returncode == 0, done.stderr
    assert "猫 2" in path.read_text(encoding="utf-8") and before != path.read_bytes()
    assert {p.name for p in path.parent.iterdir()} == {"01_toy.ipynb"}


def test_the_suite_can_be_collected():
    """No module of the tests needs, when it is imported, what Windows lacks."""
    quick = ["--collect-only", "-q", "-s", "-p", "no:cacheprovider", "--assert=plain"]
    quick += ["-p", "no:nbval", "-o", "addopts=--import-mode=importlib"]  # no page: starts sooner
    done = under_rules("-m", "pytest", *quick, "tests")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{Path(__file__).name}::test_the_suite_can_be_collected" in done.stdout
