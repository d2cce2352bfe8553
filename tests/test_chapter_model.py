"""The model of chapter 07 that later chapters open."""

import sys
from pathlib import Path

import pytest
import torch

from minillm.deeper.pretrained.load import from_pretrained
from minillm.stories.language import StoryLanguage
from minillm.training import evaluate

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "assets" / "chapter-07"
sys.path.insert(0, str(ROOT / "tools"))
import chapter_model  # noqa: E402


@pytest.fixture(scope="module")
def held_out():
    return StoryLanguage("en").corpus(100, seed=99)


@pytest.fixture(scope="module")
def kept():
    return from_pretrained(FOLDER)


def test_it_is_small_and_a_llama(kept):
    model, tokenizer = kept
    assert (FOLDER / "model.safetensors").stat().st_size < 7e5
    assert model.config.model_type == "llama" and model.lm_head.weight.dtype == torch.float32
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (2, 64)
    assert tokenizer.vocab_size == model.config.vocab_size == 1024
    assert tokenizer.encode("Once")[0] == tokenizer.eos_token_id == model.config.eos_token_id


def test_the_page_trains_it_again(tmp_path, kept, held_out):
    """From the page's own cells. Other processors arrive at other weights of the same loss."""
    again = chapter_model.make(tmp_path)
    assert evaluate(*kept, held_out) == pytest.approx(again, rel=0.05)
    assert evaluate(*from_pretrained(tmp_path), held_out) == pytest.approx(again, rel=1e-4)
    ours, theirs = ((folder / "tokenizer.json").read_bytes() for folder in (FOLDER, tmp_path))
    assert ours == theirs


def test_others_open_it_too(kept):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = kept
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    ids = torch.tensor([tokenizer.encode("Once upon a time")])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=1e-4, atol=1e-4)
