"""Log-probabilities and bits per byte by windows: those of transformers, and of one pass."""

import math

import pytest
import torch

from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.pretrained.load import save_pretrained
from minillm.deeper.training.scoring import evaluate_text, token_log_probs
from minillm.model import CausalLM
from minillm.training import evaluate

TEXT = "the cat sat on the mat and the dog sat on the log, 猫 and dog. " * 4


@pytest.fixture(scope="module", params=[True, False], ids=["with an end token", "without"])
def tokenizer(request):
    ends = ["<|endoftext|>"] if request.param else []
    return BPETokenizer.train(TEXT, 280, special_tokens=ends)


@pytest.fixture(scope="module")
def model(tokenizer):
    return CausalLM(ModelConfig(280, 32, 2, 4, 48, initializer_range=0.3), seed=1)


def test_log_probabilities_are_those_of_transformers(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_pretrained(model, None, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(280, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        loss = theirs(ids, labels=ids).loss
        scores = theirs(ids).logits.log_softmax(-1)
    found = token_log_probs(model.train(), ids)
    assert found.shape == (2, 8) and not found.requires_grad and model.training
    torch.testing.assert_close(-found.mean(), loss)
    torch.testing.assert_close(found[1, 3], scores[1, 3, ids[1, 4]])
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.ones_like(ids)], dim=1)
    again = token_log_probs(model, padded, attention_mask=mask)[:, 3:]
    torch.testing.assert_close(again, found)


@pytest.mark.parametrize(("window", "stride"), [(16, 16), (16, 8), (16, 1), (7, 3), (500, None)])
def test_windows_as_the_recipe_of_transformers_counts_them(model, tokenizer, window, stride):
    """Each token once, with at least window - stride before it where the text has them."""
    ids = tokenizer.encode_ordinary(TEXT)
    begin = tokenizer.eos_token_id
    ids = ids if begin is None else [begin, *ids]
    step, nats, done = stride or window // 2, 0.0, 1
    for first in range(0, len(ids), step):
        last = min(first + window, len(ids) - 1)
        with torch.no_grad():
            logits = model.eval()(torch.tensor([ids[first:last]]))[0]
        for place in range(done, last + 1):
            row = logits[place - 1 - first].double().log_softmax(-1)
            nats -= row[ids[place]].item()
        done = last + 1
        if done == len(ids):
            break
    num_bytes = len(TEXT.encode())
    num_bytes -= 0 if begin is not None else len(tokenizer.decode_bytes(ids[:1]))
    found = evaluate_text(model, tokenizer, TEXT, window=window, stride=stride)
    assert found == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def test_one_window_is_a_document_without_its_end(model, tokenizer):
    if tokenizer.eos_token_id is None:
        with pytest.raises(ValueError, match="no end token"):
            evaluate(model, tokenizer, [TEXT])
        return
    end = tokenizer.eos_token_id
    ids = torch.tensor([[end, *tokenizer.encode_ordinary(TEXT), end]])
    last = -token_log_probs(model, ids)[0, -1].item() / math.log(2) / len(TEXT.encode())
    whole = evaluate(model, tokenizer, [TEXT])
    assert evaluate_text(model, tokenizer, TEXT, window=400) == pytest.approx(whole - last)


def test_no_pass_is_longer_than_the_window(model, tokenizer):
    lengths = []
    hook = model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    evaluate_text(model, tokenizer, TEXT, window=16, stride=4)
    hook.remove()
    assert max(lengths) == 16 and len(lengths) <= len(TEXT) / 4


@pytest.mark.parametrize(
    ("text", "sizes", "message"),
    [
        ([TEXT], {}, "must be one text"),
        (b"abc", {}, "not bytes"),
        ("", {}, "nothing to measure"),
        (TEXT, {"window": 4, "stride": 5}, "stride 5 must be from 1 to the window, 4"),
        (TEXT, {"window": 0}, "must be from 1 to the window, 0"),
    ],
)
def test_bad_input(model, tokenizer, text, sizes, message):
    with pytest.raises(ValueError, match=message):
        evaluate_text(model, tokenizer, text, **sizes)


def test_a_tokenizer_of_another_library(model, tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    if tokenizer.eos_token_id is None:
        return
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"save_pretrained\(folder\), and BPETokenizer.load"):
        evaluate_text(model, theirs, TEXT)
    with pytest.raises(ValueError, match=r"a tokenizers\.Tokenizer is no tokenizer of minillm"):
        evaluate(model, theirs.backend_tokenizer, [TEXT])
