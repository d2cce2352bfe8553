"""Exact targets: what enumerating all stories of a small language gives, and what sampling does."""

import math
from collections import defaultdict

import pytest
import torch

from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.training.documents import DocumentBatches, StoryDocuments
from minillm.deeper.training.trainer import Trainer, token_byte_lengths
from minillm.model import CausalLM
from minillm.stories.curriculum import ExactBatches, draws
from minillm.stories.language import StoryLanguage
from minillm.training import TrainConfig, cross_entropy

END = "<|endoftext|>"
GRAMMAR = """
pool animals: a | it
a fox | fox
an owl | owl
an ox | ox
a red panda | red panda

pool words: is
hop
jump off
hip

rule story
- {^kind:animals} (met|saw) {friend:animals}. <more>
2- "Look!" {friend:animals} said. {^one:words}, {two:words}: {friend.it}.

rule more
- Then the {kind.it} liked {other:animals}.
- Now the {friend.it} liked {word:words}!
"""


@pytest.fixture(scope="module")
def small():
    language = StoryLanguage("en", grammar=GRAMMAR)
    return language, BPETokenizer.train(language.corpus(300, 1), 300, special_tokens=[END])


def batches(small, layout="padded", rows=4):
    language, tokenizer = small
    documents = StoryDocuments(language, tokenizer.encode_ordinary, seed=3)
    sizes = {"eos_token_id": tokenizer.eos_token_id, "layout": layout, "shuffle_buffer": 4}
    return DocumentBatches(documents, rows, 60, **sizes)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_probabilities_are_those_of_the_enumerated_language(small, layout):
    """Of every prefix of tokens, the share of all stories that go on with a token."""
    language, tokenizer = small
    after = defaultdict(lambda: defaultdict(float))
    total = 0.0
    for text, _, log_prob in language.grammar.root.every({}):
        ids = (*tokenizer.encode_ordinary(text), tokenizer.eos_token_id)
        total += math.exp(log_prob)
        for k, token in enumerate(ids):
            after[ids[:k]][token] += math.exp(log_prob)
    assert total == pytest.approx(1)
    plain, exact = batches(small, layout), ExactBatches(batches(small, layout), *small)
    seen, known = 0, 0
    for _ in range(6):
        (inputs, targets), (same, probs) = next(plain), next(exact)
        assert torch.equal(inputs, same)
        torch.testing.assert_close(probs.sum(-1), (targets != -100).float())
        for row, ids in zip(probs, targets.tolist(), strict=True):
            prefix = ()
            for p, token in zip(row, ids, strict=True):
                if token == -100:
                    break
                seen += 1
                share = after[prefix]
                truth = {t: share[t] / sum(share.values()) for t in share}
                if (p > 0).sum() > 1:
                    known += 1
                    found = {t: float(p[t]) for t in p.nonzero()[:, 0].tolist()}
                    assert found == pytest.approx(truth, rel=1e-5)
                else:  # certain, or a choice between ways to tell, which stays a sample
                    assert p[token] == 1
                prefix = () if token == tokenizer.eos_token_id else (*prefix, token)
    assert known > seen / 10


def test_draws_are_found_with_all_that_might_have_been(small):
    language = small[0]
    text = "A fox met an owl. Then the fox liked an ox."
    found = [(text[a:b], options) for a, b, options in draws(language, text)]
    assert found == [
        ("A fox", ["A fox", "An owl", "An ox", "A red panda"]),
        ("an owl", ["an owl", "an ox", "a red panda"]),
        ("an ox", ["an ox", "a red panda"]),
    ]
    for wrong in ("A fox met a fox. Now the fox liked hip!", text + " ", text[:-1], ""):
        with pytest.raises(ValueError, match="no story of the language"):
            draws(language, wrong)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_real_stories_keep_their_samples_where_cards_have_no_tokens_of_their_own(lang):
    language = StoryLanguage(lang)
    tokenizer = BPETokenizer.train(language.corpus(300, 1), 1200, special_tokens=[END])
    documents = StoryDocuments(language, tokenizer.encode_ordinary)
    rows = {"eos_token_id": tokenizer.eos_token_id, "shuffle_buffer": 1}
    plain, other = (DocumentBatches(documents, 4, 600, **rows) for _ in range(2))
    inputs, targets = next(plain)
    documents.index = 0
    same, probs = next(ExactBatches(other, language, tokenizer))
    counted = targets != -100
    assert torch.equal(inputs, same)
    torch.testing.assert_close(probs.sum(-1), counted.float())
    assert (probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0] > 0)[counted].all()
    stories = int((targets == tokenizer.eos_token_id).sum())
    softened = int(((probs.amax(-1) < 1) & counted).sum()) / stories
    assert softened > (10 if lang == "en" else 2)


def test_a_run_counts_the_same_tokens_and_expects_their_bytes(small):
    tokenizer = small[1]
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    logs = []
    for exact in (False, True):
        source = batches(small)
        source = ExactBatches(source, *small) if exact else source
        trainer = Trainer(
            CausalLM(config, seed=0),
            source,
            TrainConfig(30, max_lr=1e-9, min_lr=0.0, log_interval=30),
            token_bytes=token_byte_lengths(tokenizer),
            progress=False,
        )
        logs.append(trainer.train()[-1])
    sampled, expected = logs
    assert sampled["tokens"] == expected["tokens"]
    # the same up to which cards were drawn
    assert expected["loss"] == pytest.approx(sampled["loss"], rel=0.02)
    assert expected["bits_per_byte"] == pytest.approx(sampled["bits_per_byte"], rel=0.02)
    assert expected["loss"] != sampled["loss"]


def test_resumed_where_it_stood(small):
    source = ExactBatches(batches(small), *small)
    next(source), next(source)
    state = source.state_dict()
    following = next(source)
    again = ExactBatches(batches(small), *small)
    again.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(next(again), following, strict=True))
    with pytest.raises(ValueError, match="batch_size"):
        ExactBatches(batches(small, rows=3), *small).load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_targets_that_are_probabilities(dtype, reduction):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator).to(dtype).requires_grad_()
    probs = torch.randn(2, 5, 7, generator=generator).softmax(-1)
    wide = logits.detach().double().requires_grad_()
    theirs = torch.nn.functional.cross_entropy(
        wide.flatten(0, 1), probs.double().flatten(0, 1), reduction=reduction
    )
    ours = cross_entropy(logits, probs, reduction=reduction)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    ours.backward(), theirs.backward()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=tolerance, atol=1e-6)
    one_hot = torch.nn.functional.one_hot(torch.arange(10) % 7, 7).float().view(2, 5, 7)
    one_hot[0, 3] = 0.0  # does not count
    ids = (torch.arange(10) % 7).view(2, 5)
    ids[0, 3] = -100
    found, expected = (cross_entropy(logits, t, reduction=reduction) for t in (one_hot, ids))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert cross_entropy(logits, torch.zeros(2, 5, 7), reduction=reduction) == 0


@pytest.mark.parametrize("wrong", [[2.0, -1.0, 0.0], [0.5, 0.2, 0.2], [math.nan, 0.5, 0.5]])
def test_what_cannot_be_probabilities(wrong):
    with pytest.raises(ValueError, match="are probabilities"):
        cross_entropy(torch.zeros(1, 3), torch.tensor([wrong]))
