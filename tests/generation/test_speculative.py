"""Speculative generation: the large model's own text, however good the guesses are."""

import math

import numpy as np
import pytest
import torch

from minillm.config import ModelConfig
from minillm.generation.decoding import generate
from minillm.generation.sampling import Sampler
from minillm.generation.speculative import speculative_generate
from minillm.model import CausalLM


def model(seed=0, vocab_size=300, layers=2):
    more = {"num_key_value_heads": 2, "initializer_range": 0.3}
    return CausalLM(ModelConfig(vocab_size, 32, layers, 4, 48, **more), seed=seed).eval()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: speculative_generate(m, m, x - 6, max_new_tokens=1), "id -1, the vocabulary"),
        (lambda m, x: speculative_generate(m, m, x.repeat(2, 1), max_new_tokens=1), "2 rows"),
        (
            lambda m, x: speculative_generate(m, model(vocab_size=301), x, max_new_tokens=1),
            "300 and 301",
        ),
        (lambda m, x: speculative_generate(m, m, x, max_new_tokens=1, num_draft=-1), "-1"),
    ],
)
def test_calls_that_make_no_sense(call, message):
    with pytest.raises(ValueError, match=message):
        call(model(), torch.tensor([[5, 7]]))


@pytest.mark.parametrize("num_draft", [1, 4, 9])
@pytest.mark.parametrize("draft_seed", [0, 1])
def test_speculation_is_exact_when_greedy(num_draft, draft_seed):
    m, draft, rounds = model(), model(seed=draft_seed), []
    prompt = torch.tensor([[5, 7, 11]])
    found = speculative_generate(
        m, draft, prompt, max_new_tokens=25, num_draft=num_draft,
        on_round=lambda *counts: rounds.append(counts),
    )  # fmt: skip
    assert torch.equal(found, generate(m, prompt, max_new_tokens=25))
    if draft_seed == 0:  # the draft is the model: every guess stands
        assert all(guessed == accepted for guessed, accepted in rounds)
        assert len(rounds) == math.ceil(25 / (num_draft + 1))
    eos = found[0, 12].item()
    ended = speculative_generate(m, draft, prompt, max_new_tokens=25, eos_token_id=eos)
    assert torch.equal(ended, generate(m, prompt, max_new_tokens=25, eos_token_id=eos))


def test_speculation_keeps_the_distribution():
    """Chi-square of the pair of next two tokens against the large model's own probabilities."""
    m, draft = (
        model(vocab_size=6, layers=1),
        model(seed=9, vocab_size=6, layers=1),
    )
    sampler, prompt, n = Sampler(temperature=0.7, top_p=0.95), torch.tensor([[1, 2]]), 1500
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(6, 6)
    for _ in range(n):
        found = speculative_generate(
            m, draft, prompt, max_new_tokens=2, num_draft=2, sampler=sampler, generator=generator
        )
        counts[found[0, 2], found[0, 3]] += 1
    with torch.no_grad():
        first = sampler.probabilities(m(prompt)[:, -1])[0]
        rows = [torch.cat([prompt, torch.tensor([[i]])], 1) for i in range(6)]
        second = torch.cat([sampler.probabilities(m(row)[:, -1]) for row in rows])
    expected = n * first[:, None] * second
    assert not counts[expected == 0].any()
    likely = expected > 5
    chi = ((counts - expected)[likely] ** 2 / expected[likely]).sum().item()
    freedom = likely.sum().item() - 1
    assert chi < freedom + 4 * math.sqrt(2 * freedom)


def test_speculation_draws_from_the_samplers_seed():
    m, draft, prompt = model(), model(seed=1), torch.tensor([[5, 7, 11]])
    found = []
    for seed in (3, np.int64(3), [3], 4):
        sampler = Sampler(temperature=1.0, seed=seed)
        found.append(speculative_generate(m, draft, prompt, max_new_tokens=12, sampler=sampler))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])


def test_a_round_reads_its_tokens_once(monkeypatch):
    """On a GPU each reading waits: one a round, and one of the prompt."""
    m, prompt, reads, rounds = model(), torch.tensor([[5, 7, 11]]), [], []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(1) or tolist(x))
    note = lambda *counts: rounds.append(counts)  # noqa: E731
    speculative_generate(m, model(seed=1), prompt, max_new_tokens=12, on_round=note)
    assert len(reads) == len(rounds) > 2
