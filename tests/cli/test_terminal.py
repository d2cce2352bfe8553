"""Text of a strange model or file on a terminal: seen, never obeyed; in a pipe, unchanged."""

import errno
import io
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
from tqdm import tqdm

from minillm.bpe import BPETokenizer
from minillm.cli import terminal, train
from minillm.cli.main import main
from minillm.cli.terminal import show, tell, visible
from minillm.config import ModelConfig
from minillm.deeper.pretrained.load import save_pretrained
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.model import CausalLM

CLIPBOARD = "\x1b]52;c;cm0=\x07"
TITLE = "\x1b]0;root\x07"
PIECES = ["\x1b[2J", CLIPBOARD, TITLE, "\r", "\b", "\x00", "\x7f", "\x9b", "\u202e", "\u2066"]
STAYS = ["\n", "\t", "é", "👩\u200d🚀", "❤\ufe0f", "e\u0301", "从前", "\u200c"]
SEEN = [
    *(r"\x1b[2J", r"\x1b]52;c;cm0=\x07", r"\x1b]0;root\x07"),
    *(r"\r", r"\x08", r"\x00", r"\x7f", r"\x9b", r"\u202e", r"\u2066"),
]
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
RAISES = "{{ raise_exception('no \x1b[2J" + "\u202e') }}"
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'raise' %}" + RAISES + "{% endif %}"
    "{{ m.content }}{% endfor %}{{ '\n' }}"
)


def test_what_commands_a_terminal_is_shown_as_python_writes_it():
    assert [visible(piece) for piece in PIECES] == SEEN
    assert [visible(piece) for piece in STAYS] == STAYS
    for i in [*range(0x250), *range(0x600, 0x700), *range(0x2000, 0x2100), 0xFE0F]:
        stays = not OBEYED.match(chr(i))
        assert visible(chr(i)) == (chr(i) if stays else ascii(chr(i))[1:-1])
    whole = "".join([*PIECES, *STAYS])
    assert visible(whole) == "".join(map(visible, whole))  # pieces may be cut anywhere


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that writes all pieces after a line end, one token after the other."""
    texts, wanted = [*PIECES, *STAYS[2:]] * 20, PIECES + STAYS[1:]
    plain = BPETokenizer.train(texts, 360, pattern=r"[\s\S]+", special_tokens=["<|end|>"])
    options = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    tokenizer = ForeignTokenizer(plain.ranks, plain.pattern, plain.special_tokens, **options)
    chain = [tokenizer.encode_ordinary(piece) for piece in wanted]
    ids = [*tokenizer.encode_ordinary("\n"), *(i for piece in chain for i in piece)]
    assert len({*ids}) == len(ids)
    end = tokenizer.eos_token_id
    config = ModelConfig(tokenizer.vocab_size, 64, 1, 2, 8, eos_token_id=end)
    model = CausalLM(config, seed=0)
    rows = torch.nn.functional.normalize(model.model.embed_tokens.weight.detach(), dim=1)
    with torch.no_grad():
        for layer in model.model.layers:  # what comes next depends on the last token alone
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[[*ids[1:], end]] = rows[ids]
    folder = tmp_path_factory.mktemp("strange")
    save_pretrained(model, tokenizer, folder)
    return folder, "".join(wanted)


def on_a_terminal(words, typed=b""):
    """What the program writes to a terminal. Windows has no pseudo-terminals of this kind."""
    if not hasattr(os, "openpty"):
        pytest.skip("needs a pseudo-terminal (POSIX)")
    ours, theirs = os.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    command = [sys.executable, "-m", "minillm", *map(str, words), "--device", "cpu"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONUTF8": "1"}, **streams)
    os.close(theirs)
    os.write(ours, typed)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError as error:  # Linux says so at the end
        assert error.errno == errno.EIO
    process.wait(900)
    os.close(ours)
    return shown.decode("utf-8").replace("\r\n", "\n"), process.returncode


def test_generate_shows_controls_on_a_terminal(folder):
    words = ["generate", folder[0], "--prompt", "\n", "--temperature", 0]
    shown, code = on_a_terminal(words)
    assert (code, shown) == (0, f"\n{visible(folder[1])}\n")
    assert all(text in shown for text in (*SEEN, *STAYS)) and not OBEYED.search(shown)


def test_generate_writes_controls_unchanged_into_a_pipe(folder):
    words = ["generate", folder[0], "--prompt", "\n", "--temperature", 0, "--device", "cpu"]
    command = [sys.executable, "-m", "minillm", *map(str, words)]
    done = subprocess.run(command, env={**os.environ, "PYTHONUTF8": "1"}, capture_output=True)
    assert done.stdout.replace(os.linesep.encode(), b"\n").decode() == f"\n{folder[1]}\n"


def test_chat_shows_controls_of_answers_and_of_errors_on_a_terminal(folder):
    words = ["chat", folder[0], "--temperature", 0, "--verbose"]
    shown, code = on_a_terminal(words, b"tell\nraise\n/quit\n")
    assert code == 0 and not OBEYED.search(shown)
    assert visible(folder[1]) in shown
    assert r"refuses these messages: no \x1b[2J\u202e" in shown


def test_chat_writes_answers_unchanged_into_a_pipe_and_errors_visibly(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("tell\nraise\n"))
    assert main(["chat", str(folder[0]), "--temperature", "0", "--device", "cpu"]) == 0
    shown, errors = capsys.readouterr()
    assert shown == f"{folder[1]}\n"
    assert r"no \x1b[2J\u202e" in errors and not OBEYED.search(errors)


def test_an_error_that_quotes_a_name_is_visible(tmp_path, capsys):
    assert main(["generate", str(tmp_path / "x\x1b[2J\u202e")]) == 1
    assert capsys.readouterr().err == f"error: there is no folder {tmp_path / 'x'}" + (
        r"\x1b[2J\u202e" + "\n"
    )


def test_a_sample_of_the_training_is_visible(monkeypatch, capsys):
    monkeypatch.setattr(tqdm, "write", lambda text, file: file.write(text))
    train._show({"step": 3, "sample": "".join(PIECES)})
    assert capsys.readouterr().err == "step 3: " + "".join(SEEN)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_output_is_unchanged_unless_it_is_a_terminal_and_errors_are_visible(monkeypatch):
    for stream, expected in ((Terminal(), SEEN), (io.StringIO(), PIECES)):
        monkeypatch.setattr(sys, "stdout", stream)
        show("".join(PIECES), end="")
        assert stream.getvalue() == "".join(expected)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    tell("".join(PIECES))
    assert sys.stderr.getvalue() == "".join(SEEN) + "\n"


def test_warnings_and_tracebacks_of_the_program_are_visible():
    code = """
import warnings
from minillm.cli.terminal import prepare
prepare()
warnings.warn("w \\x1b[2J")
raise RuntimeError("e \\x1b[2J")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert b"\x1b" not in done.stderr and done.returncode == 1
    for told in (rb"UserWarning: w \x1b[2J", rb"RuntimeError: e \x1b[2J", b"Traceback"):
        assert told in done.stderr


def test_a_terminal_that_lacks_a_character_gets_a_mark_and_no_error():
    code = "from minillm.cli.terminal import *; prepare(); show('从 \\u202e'); tell('从 \\ud800')"
    env = {**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    assert done.returncode == 0 and done.stdout.strip() == b"? ?"
    assert done.stderr.strip() == b"? ?"


def test_a_program_that_only_imports_the_module_keeps_its_own_ways():
    assert sys.excepthook is sys.__excepthook__ or sys.excepthook.__module__ != terminal.__name__
    assert warnings.formatwarning.__module__ != terminal.__name__
