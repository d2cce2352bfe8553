"""python -m minillm chat: lines in, answers out, and what ends an answer or the chat."""

import builtins
import io
import os
import re
import select
import signal
import subprocess
import sys

import pytest
import torch

from minillm.bpe import BPETokenizer
from minillm.cli import main as cli
from minillm.cli.main import main
from minillm.config import ModelConfig
from minillm.deeper.generation import conversation as conversations
from minillm.deeper.generation.conversation import Conversation
from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.model import CausalLM
from minillm.sampling import Sampler

CHATML = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length > 3 %}"
    "{{ raise_exception('three turns at most') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES = ("<|im_start|>", "<|im_end|>")
TEXTS = ["the cat sat on the mat, the dog ate the hat, user, assistant, system"] * 4
LINES = ("Where is the cat?", "And the dog?", "the mat")
PROMPT = re.compile(r"\[prompt of (\d+) tokens, (\d+) of them computed; answer of (\d+),")


def save(folder, template=CHATML, more_rows=0, **changes):
    """A model of random weights whose tokenizer has that chat template."""
    plain = BPETokenizer.train(TEXTS, 302, special_tokens=NAMES)
    options = {"eos_token": "<|im_end|>", "chat_template": template}
    tokenizer = ForeignTokenizer(plain.ranks, plain.pattern, plain.special_tokens, **options)
    changes = {"initializer_range": 0.3, "max_position_embeddings": 512, **changes}
    rows = tokenizer.vocab_size + more_rows
    config = ModelConfig(rows, 32, 2, 4, 48, eos_token_id=tokenizer.eos_token_id, **changes)
    save_pretrained(CausalLM(config, seed=4), tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def talk(monkeypatch, capsys):
    """The program with these lines in its pipe: code, output, errors."""

    def run(folder, lines, *options):
        text = lines if isinstance(lines, str) else "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        words = ["chat", folder, "--device", "cpu", "--max-new-tokens", 12, *options]
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def kept(monkeypatch):
    """The conversations that the program begins."""
    found = []

    class Kept(Conversation):
        def __init__(self, *args):
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(conversations, "Conversation", Kept)
    return found


def answers(folder, lines, begin=(), sampler=None):
    """What the same conversation answers in Python, and the conversation."""
    model, tokenizer = from_pretrained(folder)
    chat = Conversation(model, tokenizer, begin)
    options = {"max_new_tokens": 12, "sampler": sampler or Sampler(temperature=0)}
    return ["".join(chat.ask(line, **options)) for line in lines], chat


def test_lines_of_a_pipe_are_turns(folder, talk):
    code, shown, errors = talk(folder, ["", *LINES, "   "], "--temperature", 0)
    expected, _ = answers(folder, LINES)
    assert (code, shown) == (0, "".join(f"{answer}\n" for answer in expected))
    assert ">" not in errors and len(set(expected)) == 3


def test_system_sampler_and_seed_are_those_of_the_options(folder, talk):
    given = {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.001, "seed": 3}
    given |= {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": -0.1}
    words = [word for k, v in given.items() for word in (f"--{k.replace('_', '-')}", v)]
    code, shown, _ = talk(folder, LINES, *words, "--system", "the hat")
    system = [{"role": "system", "content": "the hat"}]
    expected, _ = answers(folder, LINES, system, Sampler(**given))
    assert (code, shown) == (0, "".join(f"{answer}\n" for answer in expected))
    others = [talk(folder, LINES, *words, *more)[1] for more in (["--seed", 4], [])]
    assert len({shown, *others}) == 3


def test_ids_without_a_token_are_never_drawn(tmp_path, talk):
    """Some published models have more rows than their tokenizers have tokens."""
    place = save(tmp_path, more_rows=200)
    code, shown, errors = talk(place, LINES, "--temperature", 1.5)
    assert code == 0 and len(shown.splitlines()) >= 3 and "no token" not in errors


def test_what_goes_wrong_in_an_answer_is_told_and_the_chat_goes_on(folder, talk, monkeypatch):
    passes, run = [], CausalLM.run

    def damaged(self, *args):
        passes.append(1)
        return run(self, *args) * (float("nan") if len(passes) == 3 else 1)

    monkeypatch.setattr(CausalLM, "run", damaged)
    code, shown, errors = talk(folder, LINES[:2], "--plain", "--temperature", 1)
    assert code == 0 and len(shown.splitlines()) >= 2
    assert errors.count("error: ") == 1 and "nan" in errors.lower()


def test_verbose_tells_what_was_computed(folder, talk, kept):
    _, _, errors = talk(folder, LINES, "--temperature", 0, "--verbose")
    told = [[int(n) for n in found] for found in PROMPT.findall(errors)]
    _, chat = answers(folder, [])
    for line, (prompt, computed, new) in zip(LINES, told, strict=True):
        list(chat.stream(line, max_new_tokens=12))
        assert prompt == chat.prompt_length and computed == prompt - chat.reused
        assert new == len(chat.ids) - prompt
    assert told[2][0] > 2 * told[2][1]  # most of the third prompt was there
    assert f"{len(chat.ids) / 512:.1%} of the context]" in errors


def test_reset_and_quit(folder, talk, kept):
    lines = ["the cat", "/reset", "the cat", "/rset", "/quit", "the dog"]
    code, shown, errors = talk(folder, lines, "--temperature", 0, "--verbose")
    question, answer = (m["content"] for m in kept[0].messages)
    assert code == 0 and question == "the cat" and shown == f"{answer}\n" * 2
    assert "there is no command /rset: /reset begins a new conversation, /quit" in errors
    assert "1 of them computed" in errors  # nothing new but the scores after the last token


def test_a_line_that_begins_with_a_stroke_may_be_a_question(folder, talk, kept):
    talk(folder, ["/the cat", "/ ?"])
    assert [m["content"] for m in kept[0].messages[::2]] == ["/the cat", "/ ?"]


def test_a_special_token_in_a_line_is_refused_and_the_chat_goes_on(folder, talk):
    lines = [LINES[0], "Hi<|im_end|>", LINES[1]]
    code, shown, errors = talk(folder, lines, "--temperature", 0)
    expected, _ = answers(folder, LINES[:2])
    assert (code, shown) == (0, "".join(f"{answer}\n" for answer in expected))
    assert "error: a message spells the special token '<|im_end|>'" in errors


def test_a_special_token_in_the_system_message_is_refused_at_once(folder, talk):
    code, shown, errors = talk(folder, LINES, "--system", "Be<|im_end|>kind.")
    assert (code, shown) == (1, "")
    assert errors == "error: --system spells the special token '<|im_end|>'\n"


def test_a_template_that_refuses_is_quoted_and_the_chat_goes_on(folder, talk):
    code, shown, errors = talk(folder, [*LINES, "the hat", "/reset", LINES[0]], "--temperature", 0)
    expected, _ = answers(folder, LINES)
    expected.append(expected[0])
    assert (code, shown) == (0, "".join(f"{answer}\n" for answer in expected))
    assert "the chat template refuses these messages: three turns at most" in errors


def test_a_full_context_asks_for_a_reset(tmp_path, talk):
    place = save(tmp_path, max_position_embeddings=60)
    options = ["--temperature", 0, "--max-new-tokens", 500]
    code, shown, errors = talk(place, [*LINES, "/reset", LINES[0]], *options)
    (first,), _ = answers(place, LINES[:1])
    assert code == 0 and shown.startswith(first) and len(shown) > 2 * len(first)
    assert "[the context of 60 tokens is full: /reset begins a new conversation]" in errors
    assert "and this model can read 60: /reset begins a new conversation" in errors


def test_an_answer_that_is_cut_is_told(folder, talk):
    _, _, errors = talk(folder, LINES[:1], "--temperature", 0, "--max-new-tokens", 2)
    assert "[cut off after --max-new-tokens 2]" in errors


def test_a_model_that_cannot_chat_is_told_what_it_can(tmp_path, talk):
    for template, lacks in ((None, "chat template"), (CHATML, "tokenizer")):
        place = save(tmp_path / lacks, template)
        if lacks == "tokenizer":
            (place / "tokenizer.json").unlink()
        code, shown, errors = talk(place, LINES)
        assert (code, shown) == (1, "")
        assert f"a model without a {lacks} cannot chat" in errors
        assert "python -m minillm generate NAME --prompt" in errors


def test_the_quick_form_is_used_where_it_serves(folder, tmp_path, talk, kept, monkeypatch):
    packable = type(kept_model(talk, kept, folder)).__name__
    assert packable == "PackedLM"
    for options in (["--plain"], ["--dtype", "bfloat16"]):
        model = kept_model(talk, kept, folder, *options)
        assert type(model) is CausalLM
    assert model.lm_head.weight.dtype == torch.bfloat16
    other = save(tmp_path, model_type="gpt2", num_key_value_heads=None)
    assert type(kept_model(talk, kept, other)) is CausalLM


def kept_model(talk, kept, folder, *options):
    assert talk(folder, ["the cat"], *options)[0] == 0
    return kept[-1].model


# Ctrl-C


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_stops_the_answer_and_not_the_chat(presses, folder, talk, kept, monkeypatch):
    passes, before = [], signal.getsignal(signal.SIGINT)
    run = CausalLM.run

    def interrupted(self, *args):
        passes.append(1)
        if len(passes) == 4:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        return run(self, *args)

    monkeypatch.setattr(CausalLM, "run", interrupted)
    options = ["--plain", "--temperature", 0]
    code, shown, errors = talk(folder, [LINES[0], LINES[1]], *options)
    first, second = kept[0].messages[1]["content"], kept[0].messages[3]["content"]
    assert (code, shown) == (0, f"{first}\n{second}\n") and errors.count("[stopped]") == 1
    (whole,), _ = answers(folder, LINES[:1])
    assert whole.startswith(first) and len(first) < len(whole)
    # what follows is the answer in the conversation as it was shown
    begin = [{"role": "user", "content": LINES[0]}, {"role": "assistant", "content": first}]
    expected, other = answers(folder, LINES[1:2], begin)
    assert expected == [second] and other.ids == kept[0].ids
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_between_answers_and_ctrl_d(folder, kept, monkeypatch, capsys):
    typed = iter(["the cat", KeyboardInterrupt(), "the dog", EOFError()])
    prompts = []

    def typing(prompt):
        prompts.append(prompt)
        text = next(typed)
        if isinstance(text, BaseException):
            raise text
        return text

    monkeypatch.setattr(builtins, "input", typing)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert main(["chat", str(folder), "--device", "cpu", "--max-new-tokens", "3"]) == 0
    assert prompts == ["> "] * 4 and len(kept[0].messages) == 4
    errors = capsys.readouterr().err
    assert "context of 512 tokens. /reset begins a new conversation" in errors


def start(folder, *options, **streams):
    command = [sys.executable, "-m", "minillm", "chat", str(folder), "--device", "cpu", *options]
    return subprocess.Popen(command, **streams)


def test_a_real_pipe_may_hold_anything(folder):
    pipe = subprocess.PIPE
    streams = {"stdin": pipe, "stdout": pipe, "stderr": pipe}
    options = ("--max-new-tokens", "3", "--temperature", "0")
    shown, errors = start(folder, *options, **streams).communicate(
        b"\xef\xbb\xbfthe cat\r\n\xff\xfe\x00\n\n" + "the été".encode()
    )
    assert len(shown.decode("utf-8").split(os.linesep)) >= 4 and b"Traceback" not in errors
    plain, _ = start(folder, *options, **streams).communicate(b"the cat")
    assert shown.startswith(plain)  # the mark at a file's beginning is not read


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal (POSIX)")
def test_in_a_terminal(folder):
    ours, theirs = os.openpty()
    # what runs in a shell's background ignores Ctrl-C, and so would the program that it starts
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = start(folder, "--max-new-tokens", "3", stdin=theirs, stdout=theirs, stderr=theirs)
    finally:
        signal.signal(signal.SIGINT, before)
    os.close(theirs)
    shown = b""

    def wait_for(count):
        nonlocal shown
        while shown.count(b"> ") < count:
            ready, _, _ = select.select([ours], [], [], 900)
            assert ready, shown
            shown += os.read(ours, 1024)

    wait_for(1)
    os.write(ours, b"the cat\n")
    wait_for(2)
    tries = iter(range(450))
    while b"stops an answer)" not in shown:  # one before the reading begins waits for a key
        next(tries)
        process.send_signal(signal.SIGINT)
        if select.select([ours], [], [], 2)[0]:
            shown += os.read(ours, 1024)
    wait_for(3)
    os.write(ours, b"the dog\n")
    wait_for(shown.count(b"> ") + 1)
    os.write(ours, b"\x04")  # Ctrl-D
    assert process.wait(900) == 0 and b"Traceback" not in shown
    os.close(ours)


def test_an_interrupt_while_the_model_is_opened_ends_the_program(monkeypatch, capsys):
    def interrupted(a):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "chat", interrupted)
    assert main(["chat", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", 0], "--max-new-tokens must be a whole number from 1"),
        (["--temperature", -1], "--temperature must be a number from 0 to 1,000,000,000, not -1.0"),
        (["--min-p", 2], "--min-p must be a number from 0 to 1, not 2.0"),
        (["--repetition-penalty", 0], "--repetition-penalty must be a number above 0, not 0.0"),
        (
            ["--presence-penalty", "nan"],
            "--presence-penalty must be a number that is finite, not nan",
        ),
        (
            ["--frequency-penalty", "inf"],
            "--frequency-penalty must be a number that is finite, not inf",
        ),
        (["--device", "meta"], "no device 'meta' here"),
        ([], "no folder './nowhere'"),
    ],
)
def test_mistakes_are_one_line(options, message, talk):
    code, shown, errors = talk("./nowhere", LINES, *options)
    if "--device" not in options and options:
        assert "nowhere" not in errors  # before anything is opened
    assert (code, shown) == (1, "") and errors.count("\n") == 1
    assert errors.startswith("error: ") and message in errors
