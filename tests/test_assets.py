"""The shipped model: small, whole, as good as its README says, and on record."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minillm.corpora import stories
from minillm.generation import generate
from minillm.packed import PackedLM
from minillm.pretrained import from_pretrained
from minillm.sampling import Sampler
from minillm.stories import StoryLanguage
from minillm.train import evaluate

FOLDER = Path(__file__).parents[1] / "assets/stories-en"


@pytest.fixture(scope="module")
def shipped():
    model, tokenizer = from_pretrained(FOLDER, dtype=torch.float32)
    return model.eval(), tokenizer


def test_the_file_is_small_and_in_bfloat16():
    assert (FOLDER / "model.safetensors").stat().st_size <= 6e6
    assert {t.dtype for t in load_file(FOLDER / "model.safetensors").values()} == {torch.bfloat16}


def test_it_is_within_two_percent_of_the_floor_on_held_out_stories(shipped):
    """The floor of these very stories, whose exact probabilities we know."""
    model, tokenizer = shipped
    language, texts = StoryLanguage("en"), stories("stories-en", 200, "held out")
    num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    floor = -sum(language.score(text) for text in texts) / math.log(2) / num_bytes
    measured = evaluate(model, texts, tokenizer)
    assert floor < measured <= 1.02 * floor


def test_what_it_tells_are_stories(shipped):
    model, tokenizer = shipped
    begin = torch.full((150, 1), tokenizer.eos_token_id)
    sampler = Sampler(temperature=1.0, seed=7)
    rows = generate(PackedLM(model), begin, max_new_tokens=300, sampler=sampler)[:, 1:].tolist()
    texts = [tokenizer.decode(row[: row.index(tokenizer.eos_token_id)]) for row in rows]
    assert len(set(texts)) == len(texts)
    language = StoryLanguage("en")  # of 1,000, 817 were valid: 4 standard errors below that
    assert sum(language.score(text) > -math.inf for text in texts) >= 0.69 * len(texts)


def test_its_making_is_on_record():
    record = json.loads((FOLDER / "run.json").read_text(encoding="utf-8"))
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    options = record["options"]
    for name in ("hidden_size", "layers", "heads", "vocab_size", "steps", "batch_size"):
        assert f"--{name.replace('_', '-')} {options[name]}" in text
    assert f"{record['parameters']:,} parameters" in text
    assert f"seed {options['seed']}" in text
    assert f"{record['held_out']:.4f}" in text
