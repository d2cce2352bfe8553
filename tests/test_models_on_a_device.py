"""Decoders of every family on a pretended GPU: the numbers of the CPU, no wait in a forward pass."""

import itertools

import pytest
import torch
from family_checkpoints import FAMILY_CONFIGS
from pretended_device import PretendedDevice, same_there

from minillm.cache.base import CACHE_KINDS
from minillm.fast.packed import PACKABLE
from minillm.generation import decoding
from minillm.generation.decoding import generate
from minillm.generation.sampling import Sampler
from minillm.generation.search import beam_search, exhaustive_search
from minillm.generation.speculative import speculative_generate
from minillm.model import CausalLM

IDS = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, :3] = 0
DIALS = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": [3, 8]}
DIALS |= {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1}


def model_of(family, **changes):
    config = FAMILY_CONFIGS[family]
    for name, value in changes.items():
        setattr(config, name, value)
    return CausalLM(config).eval()


def counts_of_experts(m, passes=1):
    """The only waits of a forward pass: each layer with experts asks how many tokens each has."""
    config = m.config
    layers = sum(config.is_sparse(i) for i in range(config.num_hidden_layers))
    return {"tolist": layers * passes} if layers else {}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_forward_and_backward(family, masked):
    def run(m, ids, mask):
        logits = m(ids, attention_mask=mask)
        return [logits, *torch.autograd.grad(logits.square().mean(), list(m.parameters()))]

    m = model_of(family).train()
    device = same_there(run, m, IDS, MASK if masked else None)
    assert device.waits == counts_of_experts(m) and not device.sent


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_every_cache_in_pieces(family, masked):
    m = model_of(family)
    for kind in CACHE_KINDS:
        if kind == "sliding" and m.config.sliding_window is None:
            continue

        def run(m, ids, mask, kind=kind):
            cache, pieces = m.make_cache(kind, batch_size=2, max_length=16), []
            for start, end in itertools.pairwise((0, 5, 8, 9)):
                seen = None if mask is None else mask[:, :end]
                pieces.append(m(ids[:, start:end], attention_mask=seen, cache=cache))
            return torch.cat(pieces, 1)

        with torch.no_grad():
            device = same_there(run, m, IDS, MASK if masked else None)
        assert device.waits == counts_of_experts(m, passes=3)
        tables = m.config.num_hidden_layers if kind == "paged" and m.config.attends else 0
        assert device.sent["to"] <= tables  # of a paged cache, when a block is full


@pytest.mark.parametrize("cache", [*CACHE_KINDS, None])
@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_generation_writes_the_same_and_asks_once_a_step(family, cache):
    m = model_of(family)
    if cache == "sliding" and m.config.sliding_window is None:
        pytest.skip("this family reads all the past")

    def waits(new):
        def run(m, ids, mask):
            options = {"attention_mask": mask, "cache": cache, "eos_token_id": None}
            return generate(m, ids, max_new_tokens=new, sampler=Sampler(**DIALS), **options)

        return same_there(run, m, IDS[:, :5], MASK[:, :5]).waits

    steps = waits(4) - waits(1)
    assert steps == {"item": 3, **counts_of_experts(m, 3)}  # item: are the logits finite?
