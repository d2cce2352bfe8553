"""RECIPES.md: each program runs, other libraries agree with it; the list of names is whole."""

import argparse
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minillm

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "RECIPES.md").read_text(encoding="utf-8")
PARTS = [part.partition("\n") for part in PAGE.split("\n## ")[1:]]
RECIPES = {
    title: code[1]
    for title, _, text in PARTS
    if (code := re.search(r"```python\n(.*?)```", text, re.S))
}
PAIRS = [
    {"prompt": f"Who lives in the {place}?", "completion": f" A {animal} lives there."}
    for place, animal in (("pond", "frog"), ("barn", "cow"), ("tree", "owl"), ("den", "fox"))
]


def messages(pair):
    roles = {"user": pair["prompt"], "assistant": pair["completion"]}
    return [{"role": role, "content": content} for role, content in roles.items()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder as the recipes expect it, and we are in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").symlink_to(ROOT / "assets", target_is_directory=True)
    text = Path(argparse.__file__).read_text(encoding="utf-8")
    (tmp_path / "my.txt").write_text(text, encoding="utf-8")
    lines = [json.dumps({"messages": messages(p)}) for p in PAIRS[:2]]
    lines += [json.dumps(p) for p in PAIRS[2:]]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)), encoding="utf-8")
    return tmp_path


def run(name, capsys):
    """What a recipe has defined, and what it has printed."""
    found = {}
    exec(compile(RECIPES[name], name, "exec"), found)
    return found, capsys.readouterr().out


def hf_model():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained("assets/stories-en", dtype="float32")


def test_they_use_public_names_only():
    assert len(RECIPES) == 12
    for code in RECIPES.values():
        imported = re.search(r"from minillm import (\([^)]*\)|.*)", code)[1]
        assert set(re.findall(r"\w+", imported)) <= {*minillm.__all__}
        assert "minillm." not in code and len(code.splitlines()) <= 30


def test_a_text_of_your_own(folder, capsys):
    found, _ = run("A text of your own", capsys)
    assert found["after"] < found["before"] - 1


def test_several_prompts(folder, capsys):
    found, out = run("Several prompts at once", capsys)
    model, tokenizer = found["model"], found["tokenizer"]
    for prompt, row in zip(found["prompts"], found["ids"], strict=True):
        alone = torch.tensor([tokenizer.encode(prompt)])
        wanted = minillm.generate(model, alone, max_new_tokens=12)[0]
        assert torch.equal(row[-12:], wanted[-12:]) and prompt in out
        assert tokenizer.decode(wanted, skip_special_tokens=True) in out


def test_each_call_of_the_table_for_users_of_other_libraries_runs(tmp_path, capsys):
    shutil.copytree(ROOT / "assets" / "stories-en", tmp_path / "model")
    model, tokenizer = minillm.from_pretrained(tmp_path / "model", dtype="float32")
    given = {name: getattr(minillm, name) for name in minillm.__all__}
    given |= {"model": model, "tokenizer": tokenizer, "folder": tmp_path / "model"}
    given |= {"texts": ["One day", "Once upon a time"], "prompt": "One day"}
    given["ids"] = given["x"] = given["y"] = torch.tensor([tokenizer.encode("One day a fox")])
    given |= {"tokens": torch.arange(99), "batches": [(given["ids"][:, :-1], given["ids"][:, 1:])]}
    rows = PAGE.partition("## If you know")[2].partition("## All")[0].split("|---|---|\n")[1]
    rows = [row.split(" | ")[1] for row in rows.splitlines() if row]
    assert len(rows) == 15
    for row in rows:
        for call in re.findall(r"`(.+?)`", row):
            exec(call, given)


def test_log_probabilities(folder, capsys):
    found, out = run("Log-probabilities of what was generated", capsys)
    with torch.no_grad():
        wanted = hf_model()(found["ids"]).logits.log_softmax(-1)[0]
    new = found["ids"][0, -12:]
    wanted = wanted[-13:-1].gather(-1, new[:, None])[:, 0]
    torch.testing.assert_close(found["log_probs"], wanted, rtol=0, atol=1e-4)
    assert len(out.splitlines()) == 12


def test_beams(folder, capsys):
    found, _ = run("Beams", capsys)
    prompt, end = found["prompt"], found["tokenizer"].eos_token_id
    wanted = hf_model().generate(
        prompt, num_beams=4, num_return_sequences=2, max_new_tokens=10, do_sample=False,
        early_stopping=False, eos_token_id=end, pad_token_id=end, attention_mask=prompt * 0 + 1,
    )  # fmt: skip
    ours = [prompt[0].tolist() + h.ids for h in found["found"]]
    assert ours == wanted.tolist()


def test_fine_tuning(folder, capsys):
    _, out = run("Fine-tuning on conversations or pairs", capsys)
    assert "frog lives there" in out


def test_lora(folder, capsys):
    found, out = run("LoRA", capsys)
    learn, whole = (int(x.replace(",", "")) for x in re.findall(r"[\d,]+\d", out)[:2])
    assert 0 < learn < whole / 10
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    theirs = peft.PeftModel.from_pretrained(hf_model(), "adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged", dtype="float32")
    ids = torch.tensor([found["examples"][0].ids])
    with torch.no_grad():
        ours = found["model"].eval()(ids)
        for other in (theirs, merged):
            torch.testing.assert_close(ours, other(ids).logits, rtol=0, atol=1e-3)


def test_maps(folder, capsys):
    transformers = pytest.importorskip("transformers")
    found, _ = run("Attention maps", capsys)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        "assets/stories-en", dtype="float32", attn_implementation="eager"
    )
    with torch.no_grad():
        wanted = theirs(found["ids"], output_attentions=True).attentions
    for a, b in zip(found["maps"], wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_batches(folder, capsys):
    found, _ = run("Batches from a generator, from a DataLoader", capsys)
    assert found["from_generator"][-1]["loss"] < 1 and found["from_loader"][-1]["loss"] < 1


def test_an_optimizer_and_a_loss(folder, capsys):
    found, _ = run("An optimizer and a loss of your own", capsys)
    assert found["history"][-1]["loss"] < found["history"][0]["loss"] - 1
    assert found["history"][-1]["lr"] == pytest.approx(3e-3 / 60)


def test_a_finished_run(folder, capsys):
    found, _ = run("Going on with a finished run", capsys)
    assert found["history"][0]["loss"] < 2 and (folder / "runs" / "second").is_dir()
    model, longer = minillm.CausalLM(found["config"]), minillm.TrainConfig(60, 1e-2, None, 5)
    trainer = minillm.Trainer(model, found["batches"], longer, run=minillm.Run("runs/first"))
    with pytest.raises(ValueError, match="to train its model further is a new Run"):
        trainer.resume()


def test_a_loop(folder, capsys):
    found, _ = run("A loop of your own", capsys)
    assert found["loss"].item() < 1


def test_two_processes(folder):
    (folder / "train.py").write_text(RECIPES["Two processes"], encoding="utf-8")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "train.py"],
        capture_output=True, text=True, env=environment, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    alone = RECIPES["Two processes"].replace('torch.distributed.init_process_group("gloo")', "")
    found = {}
    exec(compile(alone.partition("if torch")[0], "alone", "exec"), found)
    together = float(re.search(r"loss (\d+\.\d+)", done.stdout)[1])
    assert together == pytest.approx(found["history"][-1]["loss"], abs=2e-3)


VALUES = {  # what is no class and no function has no docstring of its own
    "ACTIVATIONS": "Names of activations and their functions; one of your own goes in: "
    '`ACTIVATIONS["mine"] = f`.',
    "GREEDY": "The `Sampler` that always takes the likeliest token.",
}


def test_the_index_has_every_public_name_with_the_first_line_of_its_docstring():
    lines = re.findall(r"^- `(\w+)`: (.*)$", PAGE.partition("## All public names")[2], re.M)
    assert [name for name, _ in lines] == minillm.__all__
    for name, line in lines:
        part = getattr(minillm, name)
        assert line == VALUES.get(name, (inspect.getdoc(part) or "").split("\n")[0]), name


@pytest.mark.parametrize("name", minillm.__all__)
def test_help_says_what_it_is_for_and_nothing_of_torchs(name):
    """No docstring that a class has only from its base, such as `nn.Module.forward`'s."""
    part = getattr(minillm, name)
    if name in VALUES:
        return
    assert part.__doc__ and not part.__doc__.startswith(f"{name}(")  # that of a dataclass
    if inspect.isclass(part):
        assert part.__doc__ != part.__mro__[1].__doc__
        if issubclass(part, torch.nn.Module):
            known = {base.forward.__doc__ for base in (torch.nn.Module, torch.nn.Linear)}
            assert inspect.getdoc(part.forward) and part.forward.__doc__ not in {*known, None}
