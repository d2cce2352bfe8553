"""Models saved over others: whole, whatever interrupts the save; and what cannot be saved."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter

import pytest
import torch
import transformers
from interruptions import Interruption, Stopped, windows
from safetensors import SafetensorError

from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.fast.packed import PackedLM
from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.model import CausalLM

TEXTS = ["one fish, two fish, red fish, blue fish", "a cat sat on a mat"]
transformers.logging.disable_progress_bar()
SHARDED, WHOLE = {"max_shard_bytes": 15_000}, {}


def made(number):
    """One of two models that differ in all that their files say."""
    tokenizer = BPETokenizer.train(TEXTS[number], 270, special_tokens=(f"<|end{number}|>",))
    sizes = (tokenizer.vocab_size, 16, 1, 2, 32)
    ends = {"eos_token_id": 260 + number, "initializer_range": 0.02 + 0.1 * number}
    return CausalLM(ModelConfig(*sizes, **ends), seed=number), tokenizer


MODELS = [made(0), made(1)]


def fingerprint(folder):
    """What is loaded: weights, config and tokenizer, in one number each."""
    model, tokenizer = from_pretrained(folder)
    weights = b"".join(t.numpy().tobytes() for _, t in sorted(model.state_dict().items()))
    vocabulary = repr((tokenizer.ranks, tokenizer.special_tokens)) if tokenizer else ""
    parts = (weights, repr(model.config).encode(), vocabulary.encode())
    return tuple(hashlib.sha256(part).hexdigest()[:8] for part in parts)


def old_folder(folder, options):
    """The first model, and files that are no part of it."""
    save_pretrained(*MODELS[0], folder, **options)
    ends = {"eos_token_id": [1, 2]}  # of the older model: the newer one has others
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    (folder / "README.md").write_text("mine", encoding="utf-8")
    (folder / "model_ema.safetensors").write_bytes(b"mine too")


def contents(folder):
    """The files in a folder and below, by name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def state_of(files):
    """The files without the random parts of their names: many cuts leave the same ones."""
    drawn = r"saving-[0-9a-f]{16}|(?<=[a-z]\.)[a-z0-9_]{8}$"
    inside = re.compile(rb"saving-[0-9a-f]{16}")
    return frozenset((re.sub(drawn, "", k), inside.sub(b"", v)) for k, v in files.items())


def check_no_mixture(found, old, new):
    """Other readers look at the names alone: what is there is never of both models."""
    kinds = set()
    for name in {*old, *new} - {"README.md", "model_ema.safetensors"}:
        data = found.get(name)
        if data is None or b"was interrupted" in data[:40] or old.get(name) == new.get(name):
            continue
        assert data in (old.get(name), new.get(name))
        kinds.add("old" if data == old.get(name) else "new")
    assert len(kinds) < 2


def denied(folder):
    raise PermissionError("denied")


@pytest.mark.parametrize(
    ("before", "after", "how", "with_tokenizer"),
    [
        (SHARDED, WHOLE, "stops", True),
        (WHOLE, SHARDED, "stops", True),
        (SHARDED, SHARDED, "stops", False),
        (WHOLE, WHOLE, "stops", False),
        (SHARDED, SHARDED, "fails", True),
        (SHARDED, SHARDED, "interrupted", True),
    ],
)
def test_a_save_cut_at_every_call_that_writes(
    before, after, how, with_tokenizer, tmp_path, monkeypatch
):
    """The older model whole or the newer one whole, and the next save ends as if nothing were."""
    model, tokenizer = MODELS[1]
    tokenizer = tokenizer if with_tokenizer else None
    base, done, folder = (tmp_path / name for name in ("base", "done", "folder"))
    old_folder(base, before)
    shutil.copytree(base, done)
    with Interruption(None).at_work(monkeypatch) as counted:
        save_pretrained(model, tokenizer, done, **after)
    old, new = contents(base), contents(done)
    assert new["README.md"] == b"mine" and new["model_ema.safetensors"] == b"mine too"
    assert not any("saving" in name for name in new) and "generation_config.json" not in new
    either = {fingerprint(base): "old", fingerprint(done): "new"}
    assert len(either) == 2 and counted.count > 40
    found, examined = Counter(), {}
    for n in range(1, counted.count + 1):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        with (
            Interruption(n, how).at_work(monkeypatch),
            pytest.raises((Stopped, OSError, KeyboardInterrupt)),
        ):
            save_pretrained(model, tokenizer, folder, **after)
            raise KeyboardInterrupt  # what follows the commit may be interrupted without harm
        left = contents(folder)
        state = state_of(left)
        if state in examined:
            found[examined[state]] += 1
            continue
        check_no_mixture(left, old, new)
        with monkeypatch.context() as p:  # who may not write reads the same
            p.setattr("minillm.deeper.pretrained.folder.recover", denied)
            p.setattr("minillm.deeper.tokenizer.hf_json.recover", denied)
            seen = fingerprint(folder)
        assert contents(folder) == left
        assert fingerprint(folder) == seen
        examined[state] = either[seen]
        found[either[seen]] += 1
        settled = {k: v for k, v in contents(folder).items() if ".saving-" not in k}
        assert settled == (old if either[seen] == "old" else new)
        save_pretrained(model, tokenizer, folder, **after)
        assert contents(folder) == new
    assert min(found["old"], found["new"]) > 8


def test_transformers_finds_one_of_the_models_or_an_error(tmp_path, monkeypatch):
    model, tokenizer = MODELS[1]
    wanted = {torch.cat([p.flatten() for p in m.parameters()]).sum().item() for m, _ in MODELS}
    examined = {}
    with Interruption(None).at_work(monkeypatch) as counted:
        old_folder(tmp_path / "0", WHOLE)
        counted.count = 0
        save_pretrained(model, tokenizer, tmp_path / "0")
    for n in range(counted.count // 2, counted.count + 1):
        folder = tmp_path / str(n)
        old_folder(folder, WHOLE)
        with Interruption(n).at_work(monkeypatch), pytest.raises(Stopped):
            save_pretrained(model, tokenizer, folder)
            raise Stopped
        state = state_of(contents(folder))
        if state in examined:
            continue
        try:
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
        except (OSError, ValueError, SafetensorError):
            examined[state] = "error"
            continue
        found = torch.cat([p.flatten() for p in theirs.parameters()]).sum().item()
        assert min(abs(found - w) for w in wanted) < 1e-3
        examined[state] = "whole"
    counts = Counter(examined.values())
    assert min(counts["whole"], counts["error"]) > 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_saves_that_are_killed(tmp_path):
    """A child saves two models in turns until SIGKILL; two dozen times, at a random moment."""
    rng, kinds = random.Random(0), ((WHOLE, SHARDED), (SHARDED, SHARDED), (SHARDED, WHOLE))
    wanted = set()
    for i, (model, tokenizer) in enumerate(MODELS):
        save_pretrained(model, tokenizer, tmp_path / str(i))
        wanted.add(fingerprint(tmp_path / str(i)))
    folder = tmp_path / "folder"
    save_pretrained(*MODELS[0], folder)
    (folder / "README.md").write_text("mine", encoding="utf-8")
    found = set()
    for k in range(24):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    for pair, options in zip(MODELS[::-1], kinds[k % 3], strict=True):
                        save_pretrained(*pair, folder, **options)
            finally:
                os._exit(1)
        time.sleep(rng.uniform(0.01, 0.2))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        found.add(fingerprint(folder))
        assert found <= wanted
    assert (folder / "README.md").read_text(encoding="utf-8") == "mine"


def test_a_disk_that_is_too_small_is_said_before_the_first_byte(tmp_path, monkeypatch):
    model, tokenizer = MODELS[0]
    size = sum(t.nbytes for t in model.parameters())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size - 1))
    with pytest.raises(OSError, match=rf"{size:,} bytes are to be written.* {size - 1:,} free"):
        save_pretrained(model, tokenizer, tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size))
    save_pretrained(model, tokenizer, tmp_path / "new" / "folder")


def test_a_disk_that_fills_up_while_tensors_are_written(tmp_path, monkeypatch):
    """safetensors has an error of its own for it."""
    save_pretrained(*MODELS[0], tmp_path)
    before = contents(tmp_path)

    def full(tensors, path, **kwargs):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"model\.safetensors could not be written: .*No space"):
        save_pretrained(*MODELS[1], tmp_path)
    assert contents(tmp_path) == before


@torch.no_grad()
def test_a_packed_model_is_saved_as_the_model_that_it_was_made_from(tmp_path):
    model, tokenizer = MODELS[0]
    save_pretrained(PackedLM(model, "transposed"), tokenizer, tmp_path)
    again, _ = from_pretrained(tmp_path)
    assert type(again) is CausalLM
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)


def test_a_model_with_more_weights_than_its_config_says_is_refused(tmp_path):
    model = CausalLM(MODELS[0][0].config)
    model.adapter = torch.nn.Linear(2, 2)
    save_pretrained(*MODELS[1], tmp_path)
    before = contents(tmp_path)
    with pytest.raises(
        ValueError, match=r"CausalLM cannot be saved.*known: adapter\.bias, adapter\.w"
    ):
        save_pretrained(model, None, tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which files are mapped")
@pytest.mark.parametrize("options", [WHOLE, SHARDED])
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_under_windows_rules_a_loaded_model_is_saved_over_itself(
    options, packed, tmp_path, monkeypatch
):
    windows(monkeypatch)
    save_pretrained(*MODELS[0], tmp_path, **options)
    model, tokenizer = from_pretrained(tmp_path)
    shown = PackedLM(model, "transposed") if packed else model
    ids = torch.arange(8)[None]
    expected = shown(ids)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert str(tmp_path) in maps.read()  # the weights are not copied when they are loaded
    model.model.embed_tokens.weight[9] += 1
    save_pretrained(shown, tokenizer, tmp_path, **options)
    assert torch.equal(shown(ids), expected)
    again, _ = from_pretrained(tmp_path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which files are mapped")
def test_under_windows_rules_a_file_in_use_elsewhere_stops_a_save_that_goes_on_later(
    tmp_path, monkeypatch
):
    windows(monkeypatch)
    save_pretrained(*MODELS[0], tmp_path / "new")
    save_pretrained(*MODELS[1], tmp_path / "old")
    wanted = fingerprint(tmp_path / "new")
    reader, _ = from_pretrained(tmp_path / "old")
    with pytest.raises(PermissionError) as caught:
        save_pretrained(*MODELS[0], tmp_path / "old")
    assert "All is saved, but not in place" in caught.value.__notes__[0]
    assert fingerprint(tmp_path / "old") == wanted  # read where it lies
    assert (tmp_path / "old" / ".saving.json").exists()
    del reader
    assert fingerprint(tmp_path / "old") == wanted
    assert contents(tmp_path / "old") == contents(tmp_path / "new")
