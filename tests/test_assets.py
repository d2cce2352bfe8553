"""The shipped model: small, whole, as good as its README says, and on record."""

import json
import math
import shlex
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minillm.cli.corpus import stories
from minillm.cli.main import parser
from minillm.cli.run_info import options, read_run_info
from minillm.deeper.fast.packed import PackedLM
from minillm.deeper.generation.stream import stream_text
from minillm.deeper.pretrained.load import from_pretrained
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.sampling import Sampler
from minillm.stories.language import StoryLanguage
from minillm.training import evaluate

FOLDER = Path(__file__).parents[1] / "assets/stories-en"


@pytest.fixture(scope="module")
def shipped():
    model, tokenizer = from_pretrained(FOLDER, dtype=torch.float32)
    return model.eval(), tokenizer


def test_the_file_is_small_and_in_bfloat16():
    assert (FOLDER / "model.safetensors").stat().st_size <= 6e6
    assert {t.dtype for t in load_file(FOLDER / "model.safetensors").values()} == {torch.bfloat16}


def test_it_loads_as_fast_as_it_is_made(shipped):
    """Once everything is imported; processor time, so that other tests do not count."""

    def seconds(make):
        started = time.process_time()
        make()
        return time.process_time() - started

    loading = min(seconds(lambda: from_pretrained(FOLDER)) for _ in range(5))
    making = min(seconds(lambda: CausalLM(shipped[0].config)) for _ in range(5))
    assert loading < 10 * making


def test_it_is_within_a_thousandth_of_the_floor_on_held_out_stories(shipped):
    """The floor of these very stories, whose exact probabilities we know."""
    model, tokenizer = shipped
    language, texts = StoryLanguage("en"), stories("stories-en", 200, "held out")
    num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    floor = -sum(language.score(text) for text in texts) / math.log(2) / num_bytes
    measured = evaluate(model, tokenizer, texts)
    assert floor < measured <= 1.001 * floor


def test_what_it_tells_are_stories(shipped):
    model, tokenizer = shipped
    begin = torch.full((150, 1), tokenizer.eos_token_id)
    sampler = Sampler(temperature=1.0, seed=7)
    rows = generate(PackedLM(model, "halves"), begin, max_new_tokens=300, sampler=sampler)[
        :, 1:
    ].tolist()
    texts = [tokenizer.decode(row[: row.index(tokenizer.eos_token_id)]) for row in rows]
    assert len(set(texts)) == len(texts)
    language = StoryLanguage("en")  # of 1,000, 986 were valid, and 971 in an earlier count
    assert sum(language.score(text) > -math.inf for text in texts) >= 0.915 * len(texts)


@torch.no_grad()
def test_a_plain_prompt_is_told_to_its_end(shipped):
    """The file says that a text begins with the end token, which `encode` then puts first."""
    model, tokenizer = shipped
    rows = generate(model, torch.tensor([tokenizer.encode("Once upon a time")]), max_new_tokens=300)
    text = tokenizer.decode(rows[0], skip_special_tokens=True)
    assert text.startswith("Once upon a time, ") and StoryLanguage("en").score(text) > -math.inf
    told = stream_text(model, tokenizer, "Once upon a time", max_new_tokens=300)
    assert "Once upon a time" + "".join(told) == text


@torch.no_grad()
def test_transformers_writes_the_words_that_stand_on_page_10():
    transformers = pytest.importorskip("transformers")
    page = json.loads((FOLDER.parents[1] / "notebooks/10_minillm.ipynb").read_text("utf-8"))
    (cell,) = ("".join(c["source"]) for c in page["cells"] if c["id"] == "thirty02")
    exec(cell, stored := {})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    begin = tokenizer("Once upon a time", return_tensors="pt")
    ids = theirs.generate(**begin, max_new_tokens=40, do_sample=False)
    assert len(stored["STORED"]) > 100
    assert tokenizer.decode(ids[0], skip_special_tokens=True).startswith(stored["STORED"])


def test_its_ids_are_those_of_others(shipped):
    _, tokenizer = shipped
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(FOLDER)
    assert theirs.bos_token == theirs.eos_token == tokenizer.bos_token == tokenizer.eos_token
    for text in [*stories("stories-en", 30, "ids"), "Once upon a time", "", " a", "\n", "猫 é"]:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text) == library.encode(text).ids
        assert ids == [tokenizer.eos_token_id, *tokenizer.encode_ordinary(text)]
        alone = tokenizer.encode(text, add_special_tokens=False)
        assert alone == theirs.encode(text, add_special_tokens=False) == ids[1:]
        assert library.encode(text, add_special_tokens=False).ids == alone
        assert tokenizer.decode(alone) == text == tokenizer.decode(ids, skip_special_tokens=True)
        assert theirs.decode(ids, skip_special_tokens=True) == text


def test_its_making_is_on_record():
    """Each command of the README is the one that run-1 to run-3.json and run.json say was run."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    shell = text.split("```sh\n")[1].split("```")[0].replace("\\\n", " ")
    common = shlex.split(shell.split('train="')[1].split('"')[0])[4:]
    runs = [
        shlex.split(line.partition("train ")[2])
        for line in shell.splitlines()
        if line.startswith(("torchrun", "$train"))
    ]
    tokens = 0
    for number, (words, name) in enumerate(
        zip(runs, ("run-1", "run-2", "run-3", "run"), strict=True)
    ):
        record = read_run_info(FOLDER / f"{name}.json")
        asked = parser().parse_args(["train", *(common if number else []), *words])
        wanted = options(asked)
        assert {key: record["options"].get(key, wanted[key]) for key in wanted} == wanted
        tokens += record["tokens"]
        assert f"{record['tokens']:,}" in text
    assert f"{tokens:,} tokens" in text
    assert f"{record['parameters']:,} parameters" in text and f"{record['held_out']:.4f}" in text
