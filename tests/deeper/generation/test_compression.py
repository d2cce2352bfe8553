"""Arithmetic coding: the text comes back to the byte, and the file is as long as its surprise."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.generation.compression import (
    TOTAL,
    ArithmeticDecoder,
    arithmetic_encode,
    compress,
    decompress,
    shares,
)
from minillm.deeper.training.scoring import evaluate_text, token_log_probs
from minillm.model import CausalLM

END = "<|endoftext|>"
TEXT = "The cat sat on the mat. The dog sat on the cat, and the cat ran to the house.\n" * 4


@pytest.fixture(scope="module")
def small():
    tokenizer = BPETokenizer.train([TEXT], 280, special_tokens=[END])
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 48}
    config = ModelConfig(tokenizer.vocab_size, **sizes, eos_token_id=tokenizer.eos_token_id)
    return CausalLM(config, seed=0), tokenizer


def coded(starts, symbols):
    return arithmetic_encode((int(starts[i]), int(starts[i + 1] - starts[i])) for i in symbols)


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=12),
    st.lists(st.integers(0, 10**6), max_size=60),
)
def test_any_symbols_come_back_and_cost_their_surprise(weights, drawn):
    counts = np.maximum(1, np.array(weights) * (TOTAL // 2) // sum(weights))
    counts[0] += TOTAL - counts.sum()
    starts = np.concatenate([[0], counts.cumsum()])
    symbols = [i % len(weights) for i in drawn]
    data = coded(starts, symbols)
    decoder = ArithmeticDecoder(data)
    assert [decoder.next(starts) for _ in symbols] == symbols
    exact = math.prod(Fraction(int(counts[i]), TOTAL) for i in symbols)
    bits = math.log2(exact.denominator) - math.log2(exact.numerator)
    assert bits <= 8 * len(data) + 1e-4 and 8 * len(data) < bits + 9


def test_the_interval_of_a_text_in_exact_fractions():
    """a 1/2, b 1/4, c 1/4: "bac" is [19/32, 20/32), so the five bits 10011."""
    starts = np.array([0, TOTAL // 2, TOTAL * 3 // 4, TOTAL])
    assert coded(starts, [1, 0, 2]) == bytes([0b10011000])
    assert coded(starts, []) == b""


@pytest.mark.parametrize("window", [2, 3, 16, 33, 48, None])
def test_a_text_comes_back_from_a_file_as_long_as_its_loss(small, window):
    model, tokenizer = small
    data = compress(model, tokenizer, TEXT, window=window)
    assert decompress(model, tokenizer, data, window=window) == TEXT
    bits = evaluate_text(model, tokenizer, TEXT, window=window) * len(TEXT.encode())
    assert bits / 8 < len(data) < 1.01 * bits / 8 + 3  # the end token costs a byte or two


@pytest.mark.parametrize("text", ["", "a", "\n" * 60, "naïve 中文 \U0001f600", "x\r\n\x00", END])
def test_odd_texts_come_back(small, text):
    model, tokenizer = small
    assert decompress(model, tokenizer, compress(model, tokenizer, text)) == text


def test_the_length_is_the_sum_of_the_surprises(small):
    """Of every token, that of the end too, as one pass of the model has them."""
    model, tokenizer = small
    text, end = TEXT[:60], tokenizer.eos_token_id
    ids = torch.tensor([[end, *tokenizer.encode_ordinary(text), end]])
    bits = -float(token_log_probs(model, ids).double().sum()) / math.log(2)
    assert bits - 0.1 <= 8 * len(compress(model, tokenizer, text)) < bits + 9


def test_every_token_has_a_share_and_they_fill_the_whole():
    starts = shares(torch.tensor([0.0, 5.0, -1000.0, 5.0]))
    assert starts[0] == 0 and starts[-1] == TOTAL and (np.diff(starts) > 0).all()
    p = torch.tensor([0.0, 5.0, -1000.0, 5.0]).double().softmax(-1).numpy()
    assert np.abs(np.diff(starts) - p * TOTAL).max() < 8
    with pytest.raises(ValueError, match="logits are not finite"):
        shares(torch.tensor([0.0, math.nan]))


def test_a_last_digit_that_differs_spoils_the_text(small):
    """Another machine adds up in another order: here the weights are off by a millionth."""
    model, tokenizer = small
    data = compress(model, tokenizer, TEXT)
    other = CausalLM(model.config, seed=0)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1 + 1e-6)
    try:
        found = decompress(other, tokenizer, data)
    except ValueError as error:
        found = str(error)
    assert found != TEXT
    assert decompress(CausalLM(model.config, seed=0), tokenizer, data) == TEXT  # the very same


def test_a_file_cut_short_is_an_error_or_another_text(small):
    model, tokenizer = small
    data = compress(model, tokenizer, TEXT)
    with pytest.raises(ValueError, match="20 bytes end before their text"):
        decompress(model, tokenizer, data[:20])


def test_what_cannot_be_compressed_is_refused(small):
    model, tokenizer = small
    with pytest.raises(ValueError, match="window 1 must be from 2 to the model's context, 48"):
        compress(model, tokenizer, "a", window=1)
    with pytest.raises(ValueError, match="window 49"):
        decompress(model, tokenizer, b"", window=49)
    with pytest.raises(ValueError, match="no end token"):
        compress(model, BPETokenizer.train([TEXT], 270), "a")
    with pytest.raises(ValueError):
        compress(model, tokenizer, ["a", "b"])
    half = b"a\xff".decode(errors="surrogateescape")  # a byte that is no UTF-8
    with pytest.raises(ValueError, match="back changed"):
        compress(model, tokenizer, half)
