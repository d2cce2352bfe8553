"""Bits per byte: all nats over all bytes."""

import math

import pytest
import torch
from torch import nn
from training_runs import Letters

from minillm.training import evaluate


def test_evaluate_counts_all_nats_over_all_bytes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(257, 8), nn.Linear(8, 257))
    texts = ["a", "", "héé", "stories" * 9, "中文"]
    nats = 0.0
    for text in texts:  # one by one, in float64, no padding
        ids = torch.tensor([256, *text.encode(), 256])
        logits = model(ids[None, :-1])[0].detach().double().log_softmax(-1)
        nats -= float(logits[torch.arange(len(ids) - 1), ids[1:]].sum())
    expected = nats / math.log(2) / sum(len(t.encode()) for t in texts)
    for batch_tokens in (1, 20, 10000):
        assert evaluate(model, Letters(), texts, batch_tokens=batch_tokens) == pytest.approx(
            expected, rel=1e-6
        )
    assert model.training
    uniform = nn.Sequential(nn.Embedding(257, 1), nn.Linear(1, 257, bias=False))
    nn.init.zeros_(uniform[1].weight)
    one = evaluate(uniform, Letters(), ["abc"])
    assert one == pytest.approx(4 * math.log2(257) / 3)  # three letters and the end, three bytes
    with pytest.raises(ValueError, match="0 texts"):
        evaluate(model, Letters(), [])


def test_evaluate_says_that_an_end_token_is_missing():
    tokenizer, model = Letters(), nn.Sequential(nn.Embedding(257, 8), nn.Linear(8, 257))
    expected = evaluate(model, tokenizer, ["abc"])
    tokenizer.eos_token_id = None
    with pytest.raises(ValueError, match="no end token: say with eos_token_id which"):
        evaluate(model, tokenizer, ["abc"])
    assert evaluate(model, tokenizer, ["abc"], eos_token_id=256) == expected


def test_evaluate_counts_the_bytes_that_were_encoded():
    model = nn.Sequential(nn.Embedding(257, 8), nn.Linear(8, 257))
    expected = evaluate(model, Letters(), ["a\ufffd"])  # as our tokenizers write half a character
    assert evaluate(model, Letters(), ["a\ud800"]) == expected


def test_nothing_is_dropped_while_a_model_is_judged():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(257, 8), nn.Dropout(0.5), nn.Linear(8, 257)).eval()
    expected = evaluate(model, Letters(), ["abc"])
    model.train()
    model[2].eval()
    assert evaluate(model, Letters(), ["abc"]) == expected
    assert [part.training for part in model.modules()] == [True, True, True, False]
    with pytest.raises(IndexError):  # an id that the model does not know
        evaluate(model, Letters(), ["abc"], eos_token_id=300)
    assert [part.training for part in model.modules()] == [True, True, True, False]


def test_one_text_is_not_judged_letter_by_letter():
    model = nn.Sequential(nn.Embedding(257, 8), nn.Linear(8, 257))
    with pytest.raises(ValueError, match=r"texts must be several texts, not one, 'a story'"):
        evaluate(model, Letters(), "a story")


def test_the_old_order_of_arguments_is_named():
    model = nn.Sequential(nn.Embedding(257, 8), nn.Linear(8, 257))
    with pytest.raises(ValueError, match=r"\['a story'\] is no tokenizer: the order is model, tok"):
        evaluate(model, ["a story"], Letters())
