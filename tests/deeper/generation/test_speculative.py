"""Speculative generation: the large model's own text, however good the guesses are."""

import math

import numpy as np
import pytest
import torch

from minillm.config import ModelConfig
from minillm.deeper.generation.speculative import speculative_generate, speculative_step
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.sampling import Sampler, draw


def model(seed=0, vocab_size=300, layers=2, **changes):
    more = {"num_key_value_heads": 2, "initializer_range": 0.3, **changes}
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


def chi_square(ids: torch.Tensor, p: torch.Tensor) -> float:
    """Pearson's statistic; impossible tokens must not occur at all."""
    counts = torch.bincount(ids, minlength=len(p)).double()
    assert counts[p == 0].sum() == 0
    expected = p[p > 0].double() * len(ids)
    return float(((counts[p > 0] - expected) ** 2 / expected).sum())


LIMIT = 20.5  # chi-square with 5 degrees of freedom exceeds it with probability 0.001


@pytest.mark.parametrize("disagree", [False, True])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=0.7, top_p=0.85)])
def test_speculative_step_follows_the_target(disagree, sampler, generator):
    """The first two tokens that come out are distributed as two draws from the target."""
    n, size = 40_000, 4
    g = torch.Generator().manual_seed(4)
    target = torch.randn(
        size + 1, size, generator=g
    )  # row: logits after token (last: at the start)
    scale = 3.0 if disagree else 0.3
    draft = target + scale * torch.randn(size + 1, size, generator=g)
    p, q = sampler.probabilities(target), sampler.probabilities(draft)
    first = draw(q[-1].expand(n, -1), torch.rand(n, generator=generator))
    second = draw(q[first], torch.rand(n, generator=generator))
    ids = torch.stack([first, second], dim=1)
    draft_probs = torch.stack([q[-1].expand(n, -1), q[first]], dim=1)
    target_probs = torch.stack([p[-1].expand(n, -1), p[first], p[second]], dim=1)
    accepted, extra = speculative_step(draft_probs, target_probs, ids, generator=generator)
    assert int(accepted.min()) == 0 and int(accepted.max()) >= 1
    out_first = torch.where(accepted > 0, first, extra)
    assert chi_square(out_first, p[-1]) < LIMIT
    overlap = float(torch.minimum(p[-1], q[-1]).sum())
    error = 4 * math.sqrt(overlap * (1 - overlap) / n) + 1e-9
    assert abs(float((accepted > 0).float().mean()) - overlap) < error
    two = accepted > 0  # the second token, given that the first was accepted
    out_second = torch.where(accepted > 1, second, extra)
    for token in range(size):
        rows = two & (first == token)
        if int(rows.sum()) > 500:
            assert chi_square(out_second[rows], p[token]) < LIMIT


def test_speculative_step_accepts_everything_from_the_target_itself(generator):
    p = torch.rand(1, 3, 5, generator=generator).softmax(-1).expand(64, -1, -1)
    ids = torch.randint(5, (64, 2), generator=generator)
    accepted, _ = speculative_step(p[:, :2], p, ids, generator=generator)
    assert accepted.tolist() == [2] * 64


def test_speculative_step_refuses_wrong_shapes():
    with pytest.raises(ValueError, match="do not fit"):
        speculative_step(torch.ones(1, 2, 3), torch.ones(1, 2, 3), torch.zeros(1, 2).long())
    with pytest.raises(ValueError, match="do not fit"):  # nothing was drafted
        speculative_step(torch.ones(1, 0, 3), torch.ones(1, 1, 3), torch.zeros(1, 0).long())


def test_nothing_is_dropped_while_two_models_speculate():
    target, draft = (model(seed, attention_dropout=0.5) for seed in (0, 1))
    prompt = torch.arange(1, 9)[None]
    expected = speculative_generate(target, draft, prompt, max_new_tokens=12)
    for m in (target, draft):
        m.train()
    assert torch.equal(speculative_generate(target, draft, prompt, max_new_tokens=12), expected)
    assert all(part.training for m in (target, draft) for part in m.modules())
