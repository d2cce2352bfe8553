"""Decoders of every family on a pretended GPU: the numbers of the CPU, and how often they wait."""

import itertools

import pytest
import torch
from family_checkpoints import FAMILY_CONFIGS
from pretended_device import PretendedDevice, PretendedTensor, same_there

from minillm import sampling
from minillm.deeper.caches.kinds import CACHE_KINDS
from minillm.deeper.generation import fast_sampling
from minillm.deeper.generation.search import beam_search, exhaustive_search
from minillm.deeper.generation.speculative import speculative_generate
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.sampling import Sampler

IDS = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, :3] = 0
DIALS = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": [3, 8]}
DIALS |= {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1}

PACKED = ["llama", "mistral", "qwen2", "qwen3"]


def model_of(family):
    return CausalLM(FAMILY_CONFIGS[family]).eval()


def counts_of_experts(m, passes=1):
    """The only waits of a forward pass: each layer with experts asks how many tokens each has."""
    config = m.config
    sparse = getattr(config, "is_sparse", lambda layer: False)
    layers = sum(sparse(i) for i in range(config.num_hidden_layers))
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


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_every_cache_in_pieces(family):
    m = model_of(family)
    for kind, mask in [("dynamic", None), *((kind, MASK) for kind in CACHE_KINDS)]:
        if kind == "sliding" and m.config.sliding_window is None:
            continue

        def run(m, ids, mask, kind=kind):
            cache, pieces = m.make_cache(kind, batch_size=2, max_length=16), []
            for start, end in itertools.pairwise((0, 5, 8, 9)):
                seen = None if mask is None else mask[:, :end]
                pieces.append(m(ids[:, start:end], attention_mask=seen, cache=cache))
            return torch.cat(pieces, 1)

        with torch.no_grad():
            device = same_there(run, m, IDS, mask)
        assert device.waits == counts_of_experts(m, passes=3)
        attends = getattr(m.config, "attends", True)
        tables = m.config.num_hidden_layers if kind == "paged" and attends else 0
        assert device.sent["to"] <= tables  # of a paged cache, when a block is full


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_generation_writes_the_same_and_asks_once_a_step(family):
    m = model_of(family)
    ways = [("cuda", "dynamic", DIALS, MASK), ("mps", None, {"temperature": 0}, None)]
    if family == "mistral":  # those of the others are read in pieces, above
        ways += [("cuda", cache, DIALS, MASK) for cache in [*CACHE_KINDS, None]]
    models = [m, m.packed()] if m.config.model_type in PACKED else [m]
    for lm, (kind, cache, dials, mask) in itertools.product(models, ways):
        asked = []

        def run(lm, ids, mask, cache=cache, dials=dials, asked=asked):
            options = {"attention_mask": mask, "cache": cache, "eos_token_id": None}
            count = lambda ids: asked.append(waits_so_far(ids))  # noqa: E731
            options |= {"sampler": Sampler(**dials), "on_token": count}
            return generate(lm, ids, max_new_tokens=3, **options)

        same_there(run, lm, IDS[:, :5], mask if mask is None else mask[:, :5], kind=kind)
        steps = asked[-1] - asked[-3]
        assert steps == {"item": 2, **counts_of_experts(m, 2)}  # are the logits finite?


def waits_so_far(x):
    return x.home.waits.copy() if isinstance(x, PretendedTensor) else None


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "mamba2"])
def test_rows_that_end_are_read_once_a_step(family):
    m = model_of(family)

    def run(m, ids, mask):
        options = {"max_new_tokens": 6, "min_new_tokens": 3, "attention_mask": mask}
        return generate(m, ids, eos_token_id=list(range(2, 64, 3)), stop=[[5]], **options)

    ids = run(m, IDS, MASK)
    steps = ids.shape[1] - IDS.shape[1]
    assert steps > 3
    waits = same_there(run, m, IDS, MASK).waits
    read = waits["tolist"] - counts_of_experts(m, steps).get("tolist", 0)
    assert read == steps


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_packed_models_write_the_same(family):
    assert family in PACKED

    def run(m, ids, mask):
        return generate(
            m.packed(), ids, max_new_tokens=4, attention_mask=mask, sampler=Sampler(**DIALS)
        )

    same_there(run, model_of(family), IDS, MASK)


def test_what_cannot_be_packed_is_refused_by_name():
    with PretendedDevice(), pytest.raises(ValueError, match="gemma"):
        model_of("gemma").to("cuda").packed()


@pytest.mark.parametrize("sampler", [{"temperature": 0}, {"temperature": 0.8, "seed": 4}])
@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_speculative_decoding(family, sampler):
    draft = CausalLM(FAMILY_CONFIGS["llama"], seed=5).eval()

    def run(m, draft, ids):
        rounds = []
        found = speculative_generate(
            m,
            draft,
            ids,
            max_new_tokens=5,
            num_draft=2,
            sampler=Sampler(**sampler),
            eos_token_id=None,
            on_round=lambda guessed, accepted: rounds.append((guessed, accepted)),
        )
        return [found, rounds]

    same_there(run, model_of(family), draft, IDS[:1, :4])


def test_beam_search_and_exhaustive_search():
    def run(m, prompt):
        step = lambda ids: m(ids)[:, -1].detach()[:, :12]  # noqa: E731
        beams = beam_search(
            step, prompt, num_beams=3, max_new_tokens=4, num_return=2, eos_token_id=5
        )
        best = exhaustive_search(step, prompt, max_new_tokens=2, eos_token_id=5)
        return [h.ids for h in [*beams, best]], [round(h.score, 6) for h in [*beams, best]]

    same_there(run, model_of("llama"), IDS[0])


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_apples_device_which_has_no_float64(family):
    """Without float64 the probabilities come to the CPU, twice a step: for top_p and the draw."""

    def run(m, ids, mask):
        options = {"attention_mask": mask, "eos_token_id": None}
        return generate(m, ids, max_new_tokens=4, sampler=Sampler(**DIALS), **options)

    waits = same_there(run, model_of(family), IDS, MASK, kind="mps").waits
    assert waits["cpu"] == 8


# The sampler


LOGITS = 3 * torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
BEFORE = torch.randint(-1, 50, (3, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "dials",
    [{"temperature": 0}, {}, {**DIALS, "seed": 4}]
    + [{name: value} for name, value in DIALS.items() if name != "seed"],
    ids=lambda dials: "-".join(dials),
)
@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_a_sampler_draws_the_same_and_asks_one_question(dials, kind):
    """Whether the logits are finite; without float64, probabilities (and top-p) come to the CPU."""

    def run(logits, previous):
        sampler = Sampler(**{"seed": [5, 6, 7], **dials})
        first = sampler(logits, previous)
        return [first, sampler(logits[:2], previous[:2], rows=[2, 0])]

    device = same_there(run, LOGITS, BEFORE, kind=kind)
    sums = 1 + ("top_p" in dials)  # of probabilities, in float64
    copies = {"cpu": 2 * sums} if kind == "mps" and dials.get("temperature") != 0 else {}
    assert device.waits == {"item": 2, **copies}


def test_processors_ask_nothing():
    def run(x, ids):
        return [
            sampling.temperature(x, 0.7),
            sampling.top_k(x, 5),
            sampling.top_p(x, 0.8),
            sampling.min_p(x, 0.1),
            sampling.penalties(x, ids, 1.2, 0.5, 0.5),
            sampling.enforce_min_new_tokens(x, {3, 4}, 0, 1),
        ]

    assert not same_there(run, LOGITS, BEFORE).waits


def test_other_ways_to_draw_take_the_devices_generator():
    def run(x):
        generator = torch.Generator(x.device).manual_seed(3)
        return [
            fast_sampling.draw_gumbel(x, generator=generator),
            fast_sampling.draw_exponential(x.softmax(-1), generator=generator),
        ]

    assert not same_there(run, LOGITS).waits


def test_nan_is_refused_there_too():
    with PretendedDevice(), pytest.raises(ValueError, match="logits hold NaN"):
        Sampler()(torch.full((1, 3), torch.nan, device="cuda"))
