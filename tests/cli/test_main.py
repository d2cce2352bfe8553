"""python -m minillm: train, generate, eval, and what they say when something is wrong."""

import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizer_folders import write

from minillm.bpe import BPETokenizer
from minillm.cli import main as cli
from minillm.cli.corpus import END, documents, stories
from minillm.cli.generate import begin_ids, sample_texts
from minillm.cli.main import main
from minillm.config import ModelConfig
from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.deeper.tokenizer.wrapped import load_tokenizer
from minillm.deeper.training.checkpoint import newest_checkpoint
from minillm.deeper.training.documents import DocumentBatches
from minillm.deeper.training.token_file import TokenDataset
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.sampling import Sampler
from minillm.stories.language import StoryLanguage
from minillm.training import evaluate

SMALL = ["--device", "cpu", "--hidden-size", "32", "--layers", "1", "--batch-size", "2", "--quiet"]
SMALL += ["--warmup", "2", "--lr", "5e-3", "--vocab-size", "1000", "--held-out", "3"]


def run(*words):
    return main([str(word) for word in words])


def train(folder, *words):
    return run("train", "--output-dir", folder, *words)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model of a few steps on English stories."""
    out = tmp_path_factory.mktemp("run")
    shown = train(out, "--steps", 6, "--checkpoint-interval", 3, *SMALL)
    assert shown == 0
    return out


def test_train_leaves_a_model_a_tokenizer_and_a_record(trained):
    names = {p.name for p in trained.iterdir()}
    assert names == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("metrics.jsonl", "run.json", "step-00000003", "step-00000006"),
        *(".lock", ".lock-owner"),
    }
    model, tokenizer = from_pretrained(trained)
    assert tokenizer.vocab_size == 1000 and model.config.bos_token_id == tokenizer.eos_token_id
    record = json.loads((trained / "run.json").read_text())
    assert record["parameters"] == model.num_parameters() and record["step"] == 6
    assert (record["processes"], record["torch"]) == (1, torch.__version__)
    assert record["options"]["seed"] == 0 and record["options"]["hidden_size"] == 32
    held_out = evaluate(model, tokenizer, stories("stories-en", 3, "held out"))
    assert record["held_out"] == pytest.approx(held_out, rel=1e-5)


def test_optimizer_fresh_weights_and_rotation_can_be_chosen(trained, tmp_path, capsys):
    out, options = tmp_path / "o", ["--init-range", 0.2, "--rope-theta", 5e4, *SMALL]
    options += ["--optimizer", "muon", "--tokenizer", trained, "--steps", 3]
    assert train(out, *options) == 0
    asked = json.loads((out / "run.json").read_text())["options"]
    assert (asked["optimizer"], asked["init_range"], asked["rope_theta"]) == ("muon", 0.2, 5e4)
    config = json.loads((out / "config.json").read_text())
    assert config["initializer_range"] == 0.2 and config["rope_theta"] == 5e4
    model, _ = from_pretrained(out)
    assert model.config.rope_theta == 5e4
    assert 0.15 < model.lm_head.weight.std() < 0.25  # three steps move it little
    saved = load_file(newest_checkpoint(out) / "optimizer.safetensors")
    moments = {name.rpartition("/")[2] for name in saved}
    assert moments == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}
    assert all(("_proj." in name) == name.endswith("momentum_buffer") for name in saved)
    options[options.index("muon")] = "adamw"
    assert train(out, "--resume", *options) == 1
    assert "optimizer: saved 'muon', now 'adamw'" in capsys.readouterr().err


def test_a_wrapped_tokenizer_trains_and_goes_on_with_a_prompt(tmp_path, capsys):
    folder, out = write(tmp_path, "llama-2"), tmp_path / "o"
    options = ["--tokenizer", folder, "--context-length", 1024, "--steps", 2, *SMALL]
    assert train(out, *options) == 0
    model, tokenizer = from_pretrained(out)
    assert model.config.vocab_size == tokenizer.vocab_size == load_tokenizer(folder).vocab_size
    capsys.readouterr()
    assert run("generate", out, "--prompt", "A cat", "--max-new-tokens", 4, "--temperature", 0) == 0
    prompt = [model.config.bos_token_id, *tokenizer.encode_ordinary("A cat")]
    ids = generate(model, torch.tensor([prompt]), max_new_tokens=4)[0, len(prompt) :].tolist()
    ids = ids[: ids.index(model.config.eos_token_id)] if model.config.eos_token_id in ids else ids
    assert capsys.readouterr().out == f"A cat{tokenizer.decode_bytes(ids).decode()}\n"


def test_prompts_begin_as_the_rows_of_the_training_did(trained, tmp_path, capsys):
    """What `train` saves says so to whoever encodes, also of a tokenizer that was given."""
    transformers = pytest.importorskip("transformers")
    folder, out = tmp_path / "t", tmp_path / "o"
    BPETokenizer.train(stories("stories-en", 50, "x"), 300, special_tokens=[END]).save(folder)
    assert not load_tokenizer(folder).add_bos
    assert train(out, "--tokenizer", folder, "--context-length", 512, "--steps", 1, *SMALL) == 0
    for made in (trained, out):
        tokenizer = load_tokenizer(made)
        ids = tokenizer.encode("A cat")
        assert ids == [tokenizer.eos_token_id, *tokenizer.encode_ordinary("A cat")]
        theirs = transformers.AutoTokenizer.from_pretrained(made)
        assert theirs.encode("A cat") == ids and theirs.decode(ids[1:]) == "A cat"
    model, tokenizer = from_pretrained(trained)
    capsys.readouterr()
    options = ["--prompt", "A cat", "--max-new-tokens", 9, "--temperature", 0]
    assert run("generate", trained, *options) == 0
    ids = generate(model, torch.tensor([tokenizer.encode("A cat")]), max_new_tokens=9)[0]
    told = tokenizer.decode(ids, skip_special_tokens=True)
    assert capsys.readouterr().out == f"{told}\n"


def test_a_prompt_begins_as_the_tokenizers_file_asks(trained):
    """Where it asks for no begin token, only an empty prompt gets the model's."""
    model, tokenizer = from_pretrained(trained)
    assert begin_ids(model, tokenizer, "A cat") == tokenizer.encode("A cat")
    tokenizer.add_bos = False
    assert begin_ids(model, tokenizer, "A cat") == tokenizer.encode_ordinary("A cat")
    assert begin_ids(model, tokenizer, "") == [model.config.bos_token_id]


KINDS = ["adds a begin token", "has one and does not add it", "has none", "llama-2", "falcon"]


def begun_from(kind, folder):
    """A folder with a model whose config names no begin token, and a tokenizer of a kind."""
    names = {KINDS[0]: ["<s>", "</s>"], KINDS[1]: ["<s>", "</s>"], KINDS[2]: ["</s>"]}
    if kind in names:
        texts, add_bos = stories("stories-en", 30, "x"), kind == KINDS[0]
        made = BPETokenizer.train(texts, 400, special_tokens=names[kind], add_bos=add_bos)
    else:
        made = load_tokenizer(write(folder.parent, kind))
    config = ModelConfig(made.vocab_size, 32, 1, 2, 48, eos_token_id=made.eos_token_id)
    save_pretrained(CausalLM(config, seed=0), made, folder)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_rows_prompts_and_the_config_begin_alike(kind, tmp_path, monkeypatch):
    """With the tokenizer's begin token if it adds one, else with its end token."""
    transformers = pytest.importorskip("transformers")
    start, out, seen = tmp_path / "start", tmp_path / "out", []
    given = begun_from(kind, start)
    begin = given.bos_token_id if kind in (KINDS[0], "llama-2") else given.eos_token_id
    drawn = DocumentBatches.__next__
    keep = lambda source: (batch := drawn(source), seen.append(batch[0]))[0]  # noqa: E731
    monkeypatch.setattr(DocumentBatches, "__next__", keep)
    options = ["--init-from", start, "--context-length", 2048, "--steps", 2, *SMALL]
    assert train(out, *options) == 0
    assert len(seen) > 1 and all((inputs[:, 0] == begin).all() for inputs in seen)
    assert json.loads((out / "config.json").read_text())["bos_token_id"] == begin
    model, tokenizer = from_pretrained(out)
    ids = [begin, *tokenizer.encode_ordinary("A cat")]
    assert tokenizer.encode("A cat") == begin_ids(model, tokenizer, "A cat") == ids
    assert begin_ids(model, tokenizer, "") == [begin]
    assert transformers.AutoTokenizer.from_pretrained(out).encode("A cat") == ids


@pytest.mark.parametrize("kind", KINDS)
def test_windows_are_of_documents_that_begin_so_too(kind, tmp_path):
    text, start, out = tmp_path / "text.txt", tmp_path / "start", tmp_path / "out"
    text.write_text(END.join(f"the {i} cats\nsat on {i} mats" for i in range(60)))
    given = begun_from(kind, start)
    options = ["--init-from", start, "--corpus", text, "--context-length", 16, "--steps", 1, *SMALL]
    assert train(out, *options) == 0
    end, adds = given.eos_token_id, kind in (KINDS[0], "llama-2")
    data = TokenDataset(out / "tokens.npy", eos_token_id=end)
    found = [data[a:b].tolist() for a, b in data.documents()]
    before = [given.bos_token_id] if adds else []  # else one's end begins the next
    wanted = [f"the {i} cats\nsat on {i} mats" for i in range(60) if i % 10 < 9]
    assert found == [[*before, *given.encode_ordinary(text), end] for text in wanted]
    config = json.loads((out / "config.json").read_text())
    assert config["bos_token_id"] == (given.bos_token_id if adds else end)


def test_a_fresh_models_config_names_the_begin_token(tmp_path):
    folder, out = tmp_path / "t", tmp_path / "o"
    names = ["<s>", "</s>"]
    texts = stories("stories-en", 30, "x")
    BPETokenizer.train(texts, 400, special_tokens=names, add_bos=True).save(folder)
    options = ["--tokenizer", folder, "--context-length", 1024, "--layout", "packed", *SMALL]
    assert train(out, "--steps", 1, *options) == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (398, 399)


def test_training_starts_from_a_saved_model(trained, tmp_path, capsys):
    """With its shape, weights and tokenizer: near rate 0 nothing moves, else the loss goes on."""
    still, moved = tmp_path / "still", tmp_path / "moved"
    options = ["--init-from", trained, *SMALL, "--hidden-size", 64, "--steps", 2]
    assert train(still, *options[:-2], "--steps", 1, "--lr", 1e-9) == 0
    before, after = (load_file(f / "model.safetensors") for f in (trained, still))
    assert all(torch.allclose(before[n], after[n], atol=1e-7) for n in before | after)
    assert (still / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    assert train(moved, *options) == 0
    records = [json.loads(line) for line in (moved / "metrics.jsonl").read_text().splitlines()]
    start = json.loads((trained / "run.json").read_text())
    assert records[-1]["held_out"] < start["held_out"]
    asked = json.loads((moved / "run.json").read_text())["options"]
    assert asked["init_from"] == str(trained)
    assert train(moved, "--resume", *options[2:]) == 1
    assert "init_from" in capsys.readouterr().err


@pytest.fixture(scope="module")
def plain(trained, tmp_path_factory):
    """The weights of four steps on stories as they are."""
    out = tmp_path_factory.mktemp("plain")
    assert train(out, "--tokenizer", trained, "--steps", 4, *SMALL) == 0
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("asked", [["--deck-cards", 4, "--deck-stories", 8], ["--exact-targets"]])
def test_stories_told_otherwise_are_trained_on_and_resumed(trained, plain, asked, tmp_path, capsys):
    """Cut off after two of four steps and resumed: the weights of a run that was not."""
    options = ["--tokenizer", trained, "--checkpoint-interval", 2, "--steps", 4, *SMALL]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(whole, *options, *asked) == 0
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "step-00000004")
    (cut / "model.safetensors").unlink()
    assert train(cut, "--resume", *options, *asked) == 0
    first, again = (load_file(folder / "model.safetensors") for folder in (whole, cut))
    assert all(torch.equal(first[name], again[name]) for name in first | again)
    assert any(not torch.equal(first[name], plain[name]) for name in first)
    capsys.readouterr()
    assert train(cut, "--resume", *options) == 1
    assert asked[0].removeprefix("--").replace("-", "_") in capsys.readouterr().err
    if len(asked) > 2:
        shutil.rmtree(cut / "step-00000004")
        assert train(cut, "--resume", *options, *asked[:-1], 9) == 1
        assert "stories: saved 8, now 9" in capsys.readouterr().err


def test_what_does_not_fit_the_model_to_start_from(trained, tmp_path, capsys):
    options = ["--init-from", trained, "--steps", 1, *SMALL]
    large = tmp_path / "large"
    BPETokenizer.train(stories("stories-en", 300, "x"), 1100, special_tokens=[END]).save(large)
    assert train(tmp_path / "o", "--tokenizer", large, *options) == 1
    assert "1,100 tokens, the model knows 1,000" in capsys.readouterr().err
    gpt2 = tmp_path / "gpt2"
    assert train(gpt2, "--family", "gpt2", "--tokenizer", trained, "--steps", 1, *SMALL) == 0
    options[1] = gpt2
    assert train(tmp_path / "o", "--context-length", 600, *options) == 1
    assert "--context-length 600: the model has 512 positions" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_folder_without_a_tokenizer_is_named(tmp_path, capsys):
    assert train(tmp_path / "o", "--tokenizer", tmp_path, "--steps", 2, *SMALL) == 1
    assert f"{tmp_path} has no tokenizer.json" in capsys.readouterr().err


def test_the_finished_model_can_be_saved_in_16_bits(trained, tmp_path, capsys):
    out = tmp_path / "o"
    shutil.copytree(trained, out)
    before = (out / "step-00000006" / "model.safetensors").read_bytes()
    options = ["--resume", "--steps", 6, "--checkpoint-interval", 3, *SMALL]
    assert train(out, *options, "--save-dtype", "bfloat16") == 0
    ours, theirs = load_file(out / "model.safetensors"), load_file(trained / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == torch.float32 and torch.equal(ours[name], tensor.bfloat16())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((trained / "config.json").read_text())["dtype"] == "float32"
    assert json.loads((out / "run.json").read_text())["options"]["save_dtype"] == "bfloat16"
    assert (out / "step-00000006" / "model.safetensors").read_bytes() == before
    model, _ = from_pretrained(out)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    command = ["--device", "cpu", "--documents", 3, "--samples", 1]
    assert run("eval", out, *command) == 0 == run("eval", trained, *command)
    bits = [float(b) for b in re.findall(r"bits per byte +([\d.]+)", capsys.readouterr().out)]
    assert bits[0] == pytest.approx(bits[1], rel=5e-3)


def test_resume_gives_the_same_model(trained, tmp_path, capsys):
    out = tmp_path / "again"
    shutil.copytree(trained, out)
    shutil.rmtree(out / "step-00000006")
    for name in ("model.safetensors", "run.json", "config.json"):
        (out / name).unlink()
    options = ["--steps", 6, "--checkpoint-interval", 3, *SMALL]
    assert train(out, "--resume", *options) == 0
    assert "resumed at step 3" in capsys.readouterr().err
    ours, theirs = load_file(out / "model.safetensors"), load_file(trained / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert newest_checkpoint(out).name == "step-00000006"


def test_resuming_an_ended_run_keeps_its_results(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "o")
    before = json.loads((tmp_path / "o/run.json").read_text())
    weights = (tmp_path / "o/model.safetensors").read_bytes()
    options = ["--resume", "--steps", 6, "--checkpoint-interval", 3, *SMALL]
    assert train(tmp_path / "o", *options) == 0
    after = json.loads((tmp_path / "o/run.json").read_text())
    folders = [info["options"].pop("output_dir") for info in (before, after)]
    assert folders[0] != folders[1] and after == before
    assert (tmp_path / "o/model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--heads", 8], "heads: saved 4, now 8"),
        (["--rope-theta", 100], r"rope_theta: saved 10000\.0, now 100\.0"),
        (["--corpus", "stories-zh"], "corpus: saved 'stories-en', now 'stories-zh'"),
    ],
)
def test_resume_refuses_another_model_or_corpus(change, message, trained, capsys):
    options = ["--resume", "--steps", 6, "--checkpoint-interval", 3, *SMALL]
    assert train(trained, *options, *change) == 1
    assert re.search(message, capsys.readouterr().err)


def test_what_could_not_be_saved_is_refused_before_the_training(tmp_path, capsys):
    out, folder = tmp_path / "o", tmp_path / "t"
    BPETokenizer.train(["a cat"], 300, special_tokens=[END]).save(folder)
    options = ["--family", "gpt2", "--kv-heads", 2, "--tokenizer", folder, *SMALL]
    assert train(out, *options) == 1
    assert "no place for num_key_value_heads=2" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there(device, trained, capsys):
    assert run("generate", trained, "--device", device) == 1
    assert f"no device '{device}' here: " in capsys.readouterr().err


def test_resume_refuses_other_settings(trained, capsys):
    options = ["--steps", 6, *SMALL, "--lr", "1e-3", "--batch-size", "3"]
    assert train(trained, "--resume", *options) == 1
    assert "max_lr: saved 0.005, now 0.001" in capsys.readouterr().err


def test_resume_without_a_run_begins_one(trained, tmp_path, capsys):
    out = tmp_path / "new"
    assert train(out, "--resume", "--steps", 1, "--tokenizer", trained, *SMALL) == 0
    assert (out / "model.safetensors").exists()
    assert "no whole checkpoint to go on from, so from step 0" in capsys.readouterr().err


def test_a_run_killed_before_its_first_checkpoint_is_not_overwritten(tmp_path, capsys):
    out = tmp_path / "killed"
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step": 90, "loss": 3.5}\n')
    assert train(out, "--steps", 1, *SMALL) == 1
    assert "killed holds a run: give --resume" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["metrics.jsonl"]  # the tokenizer neither
    assert train(out, "--steps", 1, "--resume", *SMALL) == 0
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]


@pytest.mark.parametrize("layout", ["windows", "padded", "packed"])
def test_train_on_a_text_file(tmp_path, layout, capsys):
    text = tmp_path / "text.txt"
    documents = [f"the {i} cats\nsat on {i} mats" for i in range(200)]
    text.write_text(f"\n{END}\n".join(documents[:100]) + END + END.join(documents[100:]))
    out = tmp_path / "out"
    options = [*SMALL, "--layout", layout, "--context-length", 40, "--vocab-size", 290]
    assert train(out, "--steps", 3, "--corpus", text, *options) == 0
    assert "parameters" in capsys.readouterr().out
    _, tokenizer = from_pretrained(out)
    assert tokenizer.add_bos == (layout != "windows")  # a window begins anywhere
    data = TokenDataset(out / "tokens.npy", eos_token_id=tokenizer.eos_token_id)
    texts = [tokenizer.decode(data[a : b - 1].tolist()) for a, b in data.documents()]
    assert texts == [text for i, text in enumerate(documents) if i % 10 < 9]


def test_train_shows_progress_and_early_samples(trained, tmp_path, capsys):
    options = [word for word in SMALL if word != "--quiet"] + ["--tokenizer", trained]
    assert train(tmp_path / "o", "--steps", 2, "--eval-interval", 1, *options) == 0
    shown = capsys.readouterr().err
    assert "tokens/s" in shown and "2/2" in shown
    assert re.search(r"step 1, held out \d\.\d{4}: ", shown)


# A thread that needs the interpreter waits this long for one that computes: so nothing goes right
# at the end of a process by luck alone.
UNHURRIED = """
import runpy, sys
sys.setswitchinterval(1000)
sys.argv[0] = "minillm"
runpy.run_module("minillm", run_name="__main__")
"""


def test_a_sharded_model_shows_early_samples_too(trained, tmp_path):
    """Under torchrun with FSDP: each process has a part, a whole copy in the first one writes.

    Both end well though gloo's threads may still hold the last shards (pytorch issue 190489).
    """
    options = [word for word in SMALL if word != "--quiet"]
    options += ["--tokenizer", trained, "--steps", 2, "--eval-interval", 1, "--parallel", "fsdp"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["--no-python", sys.executable, "-c", UNHURRIED]
    command = [*torchrun, *program, "train", "--output-dir", tmp_path / "o", *options]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "o" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    shown = [json.loads(line)["sample"] for line in lines]
    assert len(shown) == 2 and shown[0] != shown[1]
    assert done.stderr.count("step 1, held out") == 1  # by one process
    model, tokenizer = from_pretrained(tmp_path / "o")
    how = {"sampler": Sampler(seed=0), "max_new_tokens": 60}
    whole = sample_texts(model, tokenizer, [tokenizer.eos_token_id], **how)
    assert whole == [shown[1]] != [""]


def test_chinese_stories_and_another_family(tmp_path):
    options = ["--corpus", "stories-zh", "--family", "qwen3", "--kv-heads", 2]
    options += ["--context-length", 400]
    assert train(tmp_path / "o", "--steps", 1, *SMALL, *options) == 0
    model, _ = from_pretrained(tmp_path / "o")
    assert model.config.model_type == "qwen3" and model.config.num_key_value_heads == 2


def test_generate_prints_texts(trained, capsys):
    command = ["generate", trained, "--device", "cpu", "--max-new-tokens", 12, "--count", 2]
    assert run(*command, "--prompt", "Have you heard") == 0
    first = capsys.readouterr().out
    assert first.count("Have you heard") == 2
    assert run(*command, "--prompt", "Have you heard") == 0
    assert capsys.readouterr().out == first
    assert run(*command, "--prompt", "Have you heard", "--seed", 5) == 0
    assert capsys.readouterr().out != first
    assert run(*command, "--temperature", 0) == 0
    texts = capsys.readouterr().out.removesuffix("\n").split("\n\n")
    assert len(texts) == 2 and texts[0] == texts[1] != ""


def test_eval_prints_what_it_measured(trained, capsys):
    command = ["eval", trained, "--device", "cpu", "--documents", 5, "--samples", 3]
    assert run(*command) == 0
    shown = capsys.readouterr().out
    model, tokenizer = from_pretrained(trained)
    texts = stories("stories-en", 5, "held out")
    measured = evaluate(model, tokenizer, texts)
    assert re.search(r"bits per byte +([\d.]+)", shown)[1] == f"{measured:.4f}"
    floor = StoryLanguage("en").bits_per_byte(texts)
    assert re.search(r"floor +([\d.]+)", shown)[1] == f"{floor:.4f}"
    assert "valid stories  0 of 3" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "RUN", "--steps", 1], "holds a run: give --resume"),
        (["train", "NEW", "--layout", "windows"], "no windows"),
        (["train", "NEW", "--corpus", "nowhere.txt"], "nowhere.txt"),
        (["train", "NEW", "--corpus", __file__, "--deck-cards", 4], "is for stories"),
        (["train", "NEW", "--deck-cards", 2], "--deck-cards must be a whole number from 3"),
        (["train", "NEW", "--corpus", __file__, "--exact-targets"], "is for stories"),
        (["train", "NEW", "--deck-cards", 4, "--exact-targets"], "told with all cards"),
        (["train", "NEW", "--context-length", 20], "does not fit rows of 20"),
        (["train", "NEW", "--family", "mamba"], "mamba"),
        (["train", "NEW", "--steps", 0], "--steps must be a whole number from 1 to"),
        (["generate", "NEW"], "there is no folder"),
        (["eval", "NEW"], "there is no folder"),
    ],
)
def test_mistakes_are_one_line(trained, tmp_path, words, message, capsys):
    places = {"RUN": trained, "NEW": tmp_path / "new"}
    command, *options = [places.get(word, word) for word in words]
    extra = SMALL if command == "train" else ["--device", "cpu"]
    assert (train if command == "train" else partial(run, command))(*options, *extra) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not places["NEW"].exists()


def test_help_is_quick_and_complete():
    code = """
import sys
from minillm.cli.main import main
for command in ([], ["train"], ["generate"], ["chat"], ["eval"]):
    try:
        main([*command, "--help"])
    except SystemExit as stop:
        assert stop.code == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    words = ("train", "generate", "chat", "eval", "--resume", "--parallel", "--top-p", "--system")
    for word in (*words, "--documents"):
        assert word in done.stdout


def test_the_module_runs():
    command = [sys.executable, "-m", "minillm", "generate", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "error: there is no folder nowhere\n"
    done = subprocess.run([sys.executable, "-m", "minillm"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage" in done.stderr


def test_an_unknown_option_is_answered_with_the_options_of_its_command(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--model", "A", "--max_new_tokens", "3"])
    said = capsys.readouterr().err
    assert said.startswith("usage: python -m minillm generate ") and "--max-new-tokens" in said
    assert said.endswith("error: unrecognized arguments: --model --max_new_tokens 3\n")


def test_documents_of_a_text_file_are_read_without_empty_ones(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("<|endoftext|>one\nmore<|endoftext|>\n\n<|endoftext|>two\n", encoding="utf-8")
    assert list(documents(str(path))) == ["one\nmore", "two"]


# Numbers out of range


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train", "--batch-size", 0],
            "--batch-size must be a whole number from 1 to 1000000000, not 0",
        ),
        (["train", "--steps", -5], "--steps must be a whole number from 1 to 1000000000, not -5"),
        (
            ["train", "--weight-decay", -0.1],
            "--weight-decay must be a number from 0 to 1,000,000,000, not -0.1",
        ),
        (
            ["train", "--init-range", -1],
            "--init-range must be a number from 0 to 1,000,000,000, not -1.0",
        ),
        (
            ["train", "--lr", "nan"],
            "--lr must be a number above 0 and at most 1,000,000,000, not nan",
        ),
        (["train", "--min-lr", 1], "--min-lr 1.0 is above --lr 0.005"),
        (["train", "--rope-theta", 0], "--rope-theta must be a number above 0, not 0.0"),
        (
            ["train", "--vocab-size", 256],
            "--vocab-size must be a whole number from 257 to 1000000000: the bytes and",
        ),
        (
            ["train", "--gradient-accumulation-steps", 0],
            "--gradient-accumulation-steps must be a whole number from 1",
        ),
        (["train", "--eval-interval", -1], "--eval-interval must be a whole number from 0"),
        (["train", "--held-out", -1], "--held-out must be a whole number from 0 to 100000, not -1"),
        (["train", "--seed", -1], "--seed must be a whole number from 0"),
        (["train", "--heads", 3], "--family llama --hidden-size 32 --heads 3: hidden_size 32"),
        (["train", "--kv-heads", 3], "--family llama --hidden-size 32 --heads 4 --kv-heads 3: 4"),
        (["train", "--device", "meta"], "no device 'meta' here: it may be cpu, cuda or mps"),
        (
            ["generate", "--temperature", -1],
            "--temperature must be a number from 0 to 1,000,000,000, not -1.0",
        ),
        (
            ["generate", "--temperature", "nan"],
            "--temperature must be a number from 0 to 1,000,000,000, not nan",
        ),
        (["generate", "--top-k", 0], "--top-k must be a whole number from 1"),
        (["generate", "--top-p", 1.5], "--top-p must be a number above 0 and at most 1, not 1.5"),
        (["generate", "--count", 0], "--count must be a whole number from 1"),
        (
            ["generate", "--count", 10**9],
            "--count must be a whole number from 1 to 100000, not 1000000000",
        ),
        (
            ["generate", "--max-new-tokens", 10**9],
            "--max-new-tokens 1000000000: the prompt's length is 1, and this model can read 512",
        ),
        (
            ["generate", "--prompt", "a cat " * 300],
            "the prompt's length is 902, and this model can read 512",
        ),
        (
            ["train", "--batch-size", 10**9],
            "--batch-size 1000000000 --context-length 256 are 256,000,000,000 tokens in a batch",
        ),
        (
            ["train", "--context-length", 10**9],
            "--batch-size 2 --context-length 1000000000 are 2,000,000,000 tokens in a batch, of",
        ),
        (["generate", "--max-new-tokens", -3], "--max-new-tokens must be a whole number from 0"),
        (["generate", "--device", "meta"], "no device 'meta' here: it may be cpu, cuda or mps"),
        (["generate", "--device", "cpu:1"], "no device 'cpu:1' here: of cpu there are 1"),
        (["eval", "--documents", 0], "--documents must be a whole number from 1"),
        (["eval", "--samples", -1], "--samples must be a whole number from 0"),
    ],
)
def test_a_number_out_of_range_is_named_as_the_option_that_was_typed(
    trained, tmp_path, words, message, capsys
):
    command, *options = words
    out = tmp_path / "new"
    small = [word for word in SMALL if word not in ("--device", "cpu")]
    options = [*small, "--tokenizer", trained, *options] if command == "train" else options
    assert (train(out, *options) if command == "train" else run(command, trained, *options)) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
    assert not out.exists()


def test_a_mistake_is_found_before_torch_is_imported():
    code = """
import sys
from minillm.cli.main import main
assert main(["generate", "x", "--top-p", "2"]) == 1
assert main(["train", "--output-dir", "x", "--lr", "-1"]) == 1
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_a_model_too_large_for_the_memory_is_one_line(trained, tmp_path, capsys):
    options = ["--tokenizer", trained, *SMALL, "--hidden-size", 2**24]
    assert train(tmp_path / "o", *options) == 1
    error = capsys.readouterr().err
    assert "a model of --hidden-size 16777216 --layers 1 cannot be made here" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 512 GB"),
    ],
)
def test_more_memory_than_there_is_is_one_line(error, monkeypatch, capsys):
    def greedy(a):
        raise error

    monkeypatch.setattr(cli, "generate_texts", greedy)
    assert run("generate", "x") == 1
    told = capsys.readouterr().err
    assert told.startswith("error: this needs more memory than there is: ")
    assert told.count("\n") == 1 and str(error) in told


def test_another_mistake_of_ours_is_not_hidden(monkeypatch):
    def broken(a):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(cli, "generate_texts", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        run("generate", "x")


INTEGERS = st.sampled_from([-(10**30), -1, 0, 1, 2, 3, 7, 10**30]).map(str)
NUMBERS = st.sampled_from(["-inf", "-1", "-0.0", "0", "1e-300", "0.5", "1", "1e30", "inf", "nan"])
WORDS = st.sampled_from(["", "x", "cpu:9", "meta", "stories-zh", "windows", "\x00", "\udce4", "é"])
SMALL_INTEGERS = st.integers(1, 64).map(str)


@st.composite
def option_sets(draw):
    """A command with up to five of its options, whose values fit or do not."""
    command = draw(st.sampled_from(["train", "generate", "eval"]))
    subparsers = next(a for a in cli.parser()._actions if hasattr(a, "choices") and a.choices)
    costly = ("--help", "--compile", "--device", "--resume", "--output-dir", "--init-from")
    known = [
        action
        for action in subparsers.choices[command]._actions
        if action.option_strings and action.option_strings[-1] not in costly
    ]
    words = []
    for action in draw(st.lists(st.sampled_from(known), max_size=5, unique_by=id)):
        words.append(action.option_strings[-1])
        if action.nargs == 0:
            continue
        if action.choices:
            words.append(draw(st.sampled_from([*action.choices, "other"])))
        elif action.type is int:
            words.append(draw(SMALL_INTEGERS | INTEGERS))
        else:
            words.append(draw(NUMBERS if action.type is float else WORDS))
    return command, words


@given(option_sets())
def test_no_set_of_options_ends_in_a_traceback(trained, tmp_path_factory, asked):
    """What is wrong is one line and code 1, or argparse's usage and code 2."""
    command, words = asked
    small = ["--device", "cpu"]
    if command == "train":
        small = ["--output-dir", tmp_path_factory.mktemp("fuzz") / "o", "--tokenizer", trained]
        small += [*SMALL, "--steps", 1, "--held-out", 1]
    else:
        small += [trained, *(["--max-new-tokens", 2] if command == "generate" else [])]
        small += ["--documents", 1, "--samples", 1] if command == "eval" else []
    errors, shown = io.StringIO(), io.StringIO()
    try:
        with redirect_stderr(errors), redirect_stdout(shown):
            code = run(command, *small, *words)
    except SystemExit as stop:
        assert stop.code == 2
        return
    text = errors.getvalue()
    assert code in (0, 1) and (code == 0 or "error: " in text)
    assert "Traceback" not in text


# Files and pipes


def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "o"
    text.write_bytes(b"a cat\n" * 50_000 + b"na\xefve\n")
    assert train(out, "--corpus", text, "--steps", 1, *SMALL) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"error: {text} is not a text file in UTF-8: line 50001, byte 0xef" in error
    assert not out.exists()


@pytest.mark.parametrize("text", ["", "\n\r\n", f"{END}\r\n{END}\n"])
def test_a_file_without_text_is_refused(tmp_path, text, capsys):
    path, out = tmp_path / "text.txt", tmp_path / "o"
    path.write_bytes(text.encode())
    assert train(out, "--corpus", path, "--steps", 1, *SMALL) == 1
    assert capsys.readouterr().err == f"error: --corpus {path} holds no text\n"
    assert not out.exists()


def test_line_ends_inside_a_document_stay_as_they_are(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(f"one\r\nmore{END}\r\n\r\ntwo\rthree\nfour\r\n{END}five\r\n".encode())
    assert list(documents(path)) == ["one\r\nmore", "two\rthree\nfour", "five"]


@pytest.mark.skipif(os.name == "nt", reason="no such pipes on Windows")
@pytest.mark.parametrize("words", [["--help"], ["generate", "RUN", "--count", "40"]])
def test_whoever_reads_one_line_ends_the_program_quietly(trained, words):
    words = [str(trained) if word == "RUN" else word for word in words]
    read, write = os.pipe()
    os.close(read)  # nobody reads, from the first byte on
    command = [sys.executable, "-m", "minillm", *words]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=env)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", ["train", "generate", "eval"])
def test_an_interrupt_advises_what_helps(command, monkeypatch, capsys):
    def interrupted(a):
        raise KeyboardInterrupt

    names = {"train": "train", "generate": "generate_texts", "eval": "evaluate_folder"}
    monkeypatch.setattr(cli, names[command], interrupted)
    assert (train("x") if command == "train" else run(command, "x")) == 130
    assert capsys.readouterr().err == "interrupted\n"


# What a run left behind


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"options": 3}', '{"options": {"corpus": 1}}'])
def test_a_damaged_run_json_is_named(trained, tmp_path, text, capsys):
    out = tmp_path / "o"
    shutil.copytree(trained, out)
    (out / "run.json").write_text(text, encoding="utf-8")
    assert train(out, "--resume", "--steps", 6, *SMALL) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {out / 'run.json'} ") and error.count("\n") == 1


def test_a_new_start_in_a_folder_writes_its_own_options(trained, tmp_path):
    """A run that was killed before its first checkpoint leaves run.json."""
    out = tmp_path / "o"
    out.mkdir()
    (out / "run.json").write_text('{"options": {"corpus": "stories-zh"}}', encoding="utf-8")
    assert train(out, "--steps", 1, "--tokenizer", trained, *SMALL, "--seed", 3) == 0
    info = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert info["options"]["corpus"] == "stories-en" and info["options"]["seed"] == 3


def test_ids_without_a_token_are_never_drawn(trained, tmp_path, capsys):
    """A vocabulary that is padded, as published ones are: 40 more rows, which all score high."""
    model, tokenizer = from_pretrained(trained)
    config = dataclasses.replace(model.config, vocab_size=1040, tie_word_embeddings=False)
    padded = CausalLM(config)
    with torch.no_grad():
        padded.lm_head.weight.zero_()
        padded.lm_head.bias = torch.nn.Parameter(torch.zeros(1040))
        padded.lm_head.bias[1000:] = 50.0
    begin, sampler = [tokenizer.eos_token_id], Sampler(seed=0)
    how = {"sampler": sampler, "max_new_tokens": 30, "count": 3}
    assert all(sample_texts(padded, tokenizer, begin, **how))
    rows = generate(padded, torch.tensor([begin]), max_new_tokens=3)
    assert not tokenizer.decode_bytes(rows[0, len(begin) :])
