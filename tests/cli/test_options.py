"""Options: one help text and one default each, a config file, a file's held-out tenth, Ctrl-C."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from minillm.bpe import BPETokenizer
from minillm.cli import main as cli
from minillm.cli.corpus import END, documents_to_learn, held_out_texts
from minillm.cli.main import main
from minillm.cli.options import check_training, words_of
from minillm.deeper.pretrained.load import from_pretrained
from minillm.deeper.training.scoring import evaluate_text
from minillm.deeper.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--device", "cpu", "--hidden-size", "16", "--num-hidden-layers", "1", "--quiet"]
TINY += ["--num-attention-heads", "2", "--batch-size", "2", "--context-length", "32"]
TINY += ["--warmup-steps", "2", "--vocab-size", "300"]


def options():
    commands = next(a for a in cli.parser()._actions if hasattr(a, "choices") and a.choices)
    for name, command in commands.choices.items():
        for action in command._actions:
            yield pytest.param(command, action, id=f"{name} {action.dest}")


@pytest.mark.parametrize(("command", "action"), [*options()])
def test_an_option_has_a_help_text_and_one_default(command, action):
    shown = command._get_formatter()._expand_help(action)
    assert len(shown) >= 4 and "None" not in shown and "False" not in shown
    assert shown.count("default:") <= 1
    free = action.default is None or action.default is False or action.required
    if action.option_strings and action.dest != "help" and not free:
        assert shown.count("default:") == 1, shown


def test_a_config_file_is_what_one_would_type_and_typing_goes_before_it(tmp_path):
    asked = {"hidden_size": 32, "max-lr": 1e-3, "layers": 1, "quiet": True, "min_lr": None}
    (tmp_path / "c.json").write_text(json.dumps(asked))
    words = ["train", *words_of(tmp_path / "c.json"), "--output-dir", "x", "--layers", "2"]
    found = cli.parser().parse_args(words)
    assert (found.hidden_size, found.lr, found.layers, found.quiet) == (32, 1e-3, 2, True)
    (tmp_path / "d.json").write_text('{"wings": 2}')
    with pytest.raises(SystemExit):
        main(["train", "--output-dir", "x", "--config", str(tmp_path / "d.json")])


def test_a_config_file_that_is_none(tmp_path, capsys):
    (tmp_path / "c.json").write_text('{"steps": [1]}')
    assert main(["train", "--output-dir", "x", "--config", str(tmp_path / "c.json")]) == 1
    assert "steps must be one value, not [1]" in capsys.readouterr().err


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "my.txt"
    path.write_text(" ".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(400)), "utf-8")
    return path


@pytest.fixture(scope="module")
def trained(words, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    more = ["--steps", "4", "--dropout", "0.1", "--head-dim", "4"]
    assert main(["train", "--output-dir", str(out), "--corpus", str(words), *TINY, *more]) == 0
    return out


def test_a_text_file_is_held_out_by_a_tenth_and_both_losses_have_names(trained, words):
    model, tokenizer = from_pretrained(trained)
    assert model.config.head_dim == 4 and model.config.attention_dropout == 0.1
    text = words.read_text("utf-8")
    rest = text[len(text) * 9 // 10 :]
    record = json.loads((trained / "run.json").read_text())
    measured = evaluate_text(model, tokenizer, rest, window=32)
    assert record["held_out"] == pytest.approx(measured, rel=1e-5)
    assert record["bits_per_byte"] > 0
    import numpy as np

    learned = tokenizer.decode(np.load(trained / "tokens.npy").tolist(), skip_special_tokens=True)
    assert learned == text[: len(text) * 9 // 10]


def test_of_ten_documents_every_tenth_is_held_out(tmp_path):
    texts = [f"document {i}" for i in range(25)]
    path = tmp_path / "t.txt"
    path.write_text(END.join(texts), "utf-8")
    given = cli.parser().parse_args(["train", "--output-dir", "x", "--corpus", str(path)])
    assert held_out_texts(given) == ["document 9", "document 19"]
    learned = list(documents_to_learn(given))
    assert sorted([*learned, "document 9", "document 19"]) == sorted(texts)
    given.held_out = 0
    assert held_out_texts(given) == [] and list(documents_to_learn(given)) == texts


def test_eval_measures_what_the_run_held_out_and_judges_no_grammar(trained, words, capsys):
    capsys.readouterr()
    assert main(["eval", str(trained), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "held-out part of" in shown and "floor" not in shown and "stories" not in shown
    assert main(["eval", str(trained), "--device", "cpu", "--corpus", str(words)]) == 0
    whole = capsys.readouterr().out
    model, tokenizer = from_pretrained(trained)
    bits = evaluate_text(model, tokenizer, words.read_text("utf-8"))
    assert f"{bits:.4f}" in whole and "held-out" not in whole


def test_a_tokenizer_without_an_end_token(words, tmp_path, capsys):
    BPETokenizer.train(words.read_text("utf-8"), 270).save(tmp_path / "plain")
    out, tokenizer = str(tmp_path / "run"), ["--tokenizer", str(tmp_path / "plain")]
    loud = [word for word in TINY if word != "--quiet"]  # a sample is shown, too
    command = ["train", "--output-dir", out, *tokenizer, *loud, "--steps", "2"]
    for layout in ([], ["--corpus", str(words), "--layout", "packed"]):
        assert main([*command, *layout]) == 1
        assert "no end token, where documents end: a text file" in capsys.readouterr().err
    assert main([*command, "--corpus", str(words)]) == 0
    assert "step 2, held out" in capsys.readouterr().err
    assert main(["eval", out, "--device", "cpu"]) == 0
    assert main(["generate", out, "--device", "cpu", "--prompt", "1", "--max-new-tokens", "3"]) == 0
    assert main(["generate", out, "--device", "cpu"]) == 1
    assert "give a --prompt" in capsys.readouterr().err


def test_a_run_that_was_interrupted_is_a_model(words, tmp_path, monkeypatch, capsys):
    step, out = Trainer.one_step, str(tmp_path / "run")

    def one_step(self):
        if self.step == 2:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Trainer, "one_step", one_step)
    command = ["train", "--corpus", str(words), *TINY, "--steps", "4", "--output-dir"]
    assert main([*command, out]) == 130
    assert not (tmp_path / "run" / "config.json").exists()
    monkeypatch.setattr(Trainer, "one_step", step)
    assert main(["generate", out, "--device", "cpu", "--max-new-tokens", "3"]) == 0
    assert main(["eval", out, "--device", "cpu"]) == 0
    assert main([*command, str(tmp_path / "on"), "--init-from", out]) == 0
    assert from_pretrained(tmp_path / "on")[0].config == from_pretrained(out)[0].config


def test_stop_ends_a_text(trained, capsys):
    common = ["generate", str(trained), "--device", "cpu", "--prompt", "1 and", "--count", "2"]
    assert main([*common, "--max-new-tokens", "60"]) == 0
    free = capsys.readouterr().out.strip().split("\n\n")
    stop = free[0][len("1 and") + 3]
    assert main([*common, "--max-new-tokens", "60", "--stop", stop, "--dtype", "bfloat16"]) == 0
    for text in capsys.readouterr().out.strip("\n").split("\n\n"):
        assert stop not in text[len("1 and") :]


def test_ctrl_c_keeps_a_checkpoint_and_says_how_to_go_on(words, tmp_path, monkeypatch, capsys):
    step, out = Trainer.one_step, tmp_path / "run"

    def interrupt(after):
        def one_step(self):
            if self.step == after:
                raise KeyboardInterrupt
            return step(self)

        monkeypatch.setattr(Trainer, "one_step", one_step)

    command = ["train", "--output-dir", str(out), "--corpus", str(words), *TINY, "--steps", "4"]
    interrupt(0)
    assert main(command) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"  # there is nothing to resume
    interrupt(2)
    assert main([*command, "--resume"]) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "interrupted; train --resume goes on from step-00000002"
    monkeypatch.setattr(Trainer, "one_step", step)
    assert main([*command, "--resume"]) == 0
    assert "resumed at step 2" in capsys.readouterr().err


EXAMPLES = re.findall(r"^    (?:torchrun .*?-m|python -m) minillm (.*)", cli.__doc__, re.M)
PACKAGE = (ROOT / "PACKAGE.md").read_text("utf-8")
EXAMPLES += re.findall(r"^(?:python -m )minillm (.*?)(?:  #.*)?$", PACKAGE, re.M)


@pytest.mark.parametrize("line", sorted(set(EXAMPLES)))
def test_the_examples_of_help_and_package_are_commands(line, capsys):
    found = cli.parser().parse_args(shlex.split(line))
    if line.startswith("train"):
        check_training(found)


def test_the_commands_of_package_run_in_order(trained, words, tmp_path, monkeypatch, capsys):
    """As they stand there, but with a small model and few steps."""
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_bytes(words.read_bytes())
    lines = re.findall(r"^python -m minillm (.*?)(?:  #.*)?$", PACKAGE, re.M)
    assert len(lines) >= 3
    for line in lines:
        typed = shlex.split(line)
        if typed[0] == "train":
            typed += [*TINY, "--steps", "3"]
        elif typed[0] == "generate":
            typed += ["--max-new-tokens", "20"]
        assert main(typed) == 0, line
    assert capsys.readouterr().out and sys.stdout
