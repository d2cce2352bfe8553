"""train --corpus FILE: defaults of its own, the best look is kept, texts that teach nothing."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from minillm.cli import main as cli
from minillm.cli.best import Best
from minillm.cli.options import BYTES_A_STEP, OF_A_FILE
from minillm.config import ModelConfig
from minillm.model import CausalLM

TINY = ["--hidden-size", "32", "--layers", "1", "--heads", "2", "--device", "cpu", "--quiet"]
TINY += ["--context-length", "16", "--vocab-size", "270"]


def train(folder, *words):
    return cli.main(["train", "--output-dir", str(folder), *map(str, words)])


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The options that a command line comes to, and no training."""

    def options(*words):
        found = []
        monkeypatch.setattr(cli, "train", found.append)
        assert train(tmp_path / "out", *words) == 0
        return vars(found[0])

    return options


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("x" * 10**6, encoding="utf-8")
    return path


def test_a_file_has_defaults_of_its_own_and_stories_have_theirs(asked, text):
    stories, file = asked(), asked("--corpus", text)
    changed = {name for name in file if file[name] != stories[name]} - {"corpus", "command"}
    assert changed == {*OF_A_FILE, "eval_interval"}
    assert OF_A_FILE.items() <= file.items()
    assert (stories["family"], stories["steps"], stories["lr"]) == ("llama", 500, 2e-3)


def test_what_is_typed_or_stands_in_the_config_goes_before_them(asked, text, tmp_path):
    config = tmp_path / "options.json"
    config.write_text(json.dumps({"corpus": str(text), "max-lr": 1e-3}), encoding="utf-8")
    found = asked("--config", config, "--optimizer", "adamw", "--steps", 500)
    assert (found["lr"], found["optimizer"], found["steps"]) == (1e-3, "adamw", 500)
    assert found["family"] == OF_A_FILE["family"]


@pytest.mark.parametrize(
    "words", [["--init-from", "m"], ["--parallel", "fsdp"], ["--layout", "padded"]]
)
def test_what_they_were_not_measured_for_stays_as_it_was(words, asked, text):
    found, usual = asked("--corpus", text, *words), asked()
    assert all(found[name] == usual[name] for name in OF_A_FILE)


@pytest.mark.parametrize(
    ("size", "steps", "warmup", "looks"),
    [(100, 1, 0, 1), (20_000, 40, 6, 10), (400_000, 660, 50, 5), (10**7, 660, 50, 1)],
)
def test_a_short_text_takes_fewer_steps_and_more_looks(size, steps, warmup, looks, asked, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"x" * size)
    found = asked("--corpus", path)
    assert found["steps"] == steps == max(1, min(OF_A_FILE["steps"], size // BYTES_A_STEP))
    assert (found["warmup"], -(-steps // found["eval_interval"])) == (warmup, looks)


def noise(count):
    """Letters without a rule: all that can be learned of them is by heart."""
    draw = random.Random(0)
    return "".join(draw.choice("abcdefgh \n") for _ in range(count))


def test_a_text_learned_by_heart_is_said_and_the_best_look_is_saved(tmp_path, capsys):
    path, out = tmp_path / "text.txt", tmp_path / "out"
    path.write_text(noise(600), encoding="utf-8")
    options = [*TINY, "--corpus", path, "--steps", 160, "--eval-interval", 20, "--lr", 3e-2]
    assert train(out, *options) == 0
    said = capsys.readouterr().out
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    looks = {r["step"]: r["held_out"] for r in map(json.loads, lines) if "held_out" in r}
    best = min(looks, key=looks.get)
    assert len(looks) == 8 and best < 160 and looks[160] > 1.02 * looks[best]
    sentence = f"held out: best at step {best}, {looks[best]:.4f}, {looks[160]:.4f} at the end; "
    sentence += f"model.safetensors is of step {best}, the newest checkpoint of step 160\n"
    assert said.endswith(sentence)
    info = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert info["best"] == {"step": best, "held_out": looks[best]}
    assert [p.name for p in out.glob("best-*")] == [f"best-{best}.safetensors"]

    assert cli.main(["eval", str(out)]) == 0  # the model that was saved is the one of that step
    saved = (out / "model.safetensors").read_bytes()
    assert train(out, *options, "--resume") == 0  # ended: nothing changes
    assert (out / "model.safetensors").read_bytes() == saved
    assert capsys.readouterr().out.endswith(sentence)


def test_where_the_last_look_is_the_best_it_is_the_last_step_that_is_saved(tmp_path, capsys):
    path, out = tmp_path / "text.txt", tmp_path / "out"
    path.write_text("the cat sat on the mat\n" * 200, encoding="utf-8")
    assert train(out, *TINY, "--corpus", path, "--steps", 20, "--eval-interval", 10) == 0
    assert capsys.readouterr().out.endswith("held out: best at step 20, the last\n")
    kept, saved = load_file(out / "best-20.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(kept[name], saved[name]) for name in kept)


def test_stories_keep_no_best_look(tmp_path, capsys):
    sizes = ["--hidden-size", 32, "--layers", 1, "--batch-size", 2, "--held-out", 2, "--quiet"]
    assert train(tmp_path / "out", *sizes, "--steps", 2, "--device", "cpu") == 0
    assert "held out: best" not in capsys.readouterr().out
    assert not [*(tmp_path / "out").glob("best-*")]


def test_a_resumed_run_goes_on_with_the_best_look_it_has_come_to(tmp_path):
    model = CausalLM(ModelConfig(20, 8, 1, 2, intermediate_size=16), seed=0)
    records = [(10, 3.0), (20, 2.0), (30, 2.5), (40, 1.0)]
    first, lines = Best(tmp_path), []
    for step, held_out in records[:3]:
        first.look({"step": step, "held_out": held_out}, model)
        lines.append(json.dumps({"step": step, "held_out": held_out}))
    lines.append(json.dumps({"step": 35, "loss": 1.0}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    again = Best(tmp_path)
    again.resume(35)
    assert (again.step, again.held_out) == (20, 2.0)
    assert again.tensors(35) is not None and again.tensors(20) is None
    earlier = Best(tmp_path)  # the newest checkpoint is of step 10: step 20 comes again
    earlier.resume(10)
    assert (earlier.step, earlier.held_out) == (10, 3.0)
    assert not [*tmp_path.glob("best-*")] and earlier.tensors(30) is None
    assert "model.safetensors is of step 30" in earlier.said(30, 5.0)


TEACHES_NOTHING = [
    (b"a" * 5000, "holds nothing but 'a', from which nothing is learned"),
    ("中".encode() * 50, "holds nothing but '中', from which nothing is learned"),
    (b"", "holds no text"),
    (b"to be or not", "tokens to learn from; --context-length 16 takes 17"),
    (b"to be\nor not \xff to be", "is not a text file in UTF-8: line 2, byte 0xff"),
]


@pytest.mark.parametrize(("content", "message"), TEACHES_NOTHING)
def test_a_text_that_teaches_nothing_is_one_sentence_and_leaves_nothing(
    content, message, tmp_path, capsys
):
    path, out = tmp_path / "text.txt", tmp_path / "out"
    path.write_bytes(content)
    assert train(out, *TINY, "--corpus", path, "--steps", 2) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1
    assert str(path) in said and not out.exists()


def test_a_run_whose_text_went_bad_is_not_resumed_and_keeps_its_files(tmp_path, capsys):
    path, out = tmp_path / "text.txt", tmp_path / "out"
    path.write_text(noise(400), encoding="utf-8")
    options = [*TINY, "--corpus", path, "--steps", 2]
    assert train(out, *options) == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    for content, message in TEACHES_NOTHING:
        path.write_bytes(content)
        assert train(out, *options, "--resume") == 1
        assert message in capsys.readouterr().err
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_a_window_that_just_fits_is_trained_on(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(noise(40), encoding="utf-8")
    assert train(tmp_path / "out", *TINY, "--corpus", path, "--steps", 1, "--held-out", 0) == 0
