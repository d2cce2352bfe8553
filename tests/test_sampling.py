"""Logits processors against transformers', draws against chi-square."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from minillm import sampling
from minillm.deeper.generation import fast_sampling
from minillm.sampling import GREEDY, Sampler

B, V = 6, 211


def random_logits(seed: int, *, holes: bool = True) -> torch.Tensor:
    """Logits of very different scales, some of them -inf, one row extreme."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, V, generator=g) * torch.tensor([0.1, 1.0, 3.0, 10.0, 1.0, 1.0])[:, None]
    if holes:
        x[4, torch.rand(V, generator=g) < 0.5] = -math.inf
        x[5, 7] = 3e4
        x[5, 8] = -3e38
    return x


def previous(seed: int) -> torch.Tensor:
    return torch.randint(V, (B, 13), generator=torch.Generator().manual_seed(seed))


CASES = [
    (lambda x, ids: sampling.temperature(x, 0.7), hf.TemperatureLogitsWarper(0.7)),
    (lambda x, ids: sampling.top_k(x, 20), hf.TopKLogitsWarper(20)),
    (lambda x, ids: sampling.top_k(x, 10_000), hf.TopKLogitsWarper(10_000)),
    (lambda x, ids: sampling.top_p(x, 0.9), hf.TopPLogitsWarper(0.9)),
    (lambda x, ids: sampling.top_p(x, 0.3), hf.TopPLogitsWarper(0.3)),
    (lambda x, ids: sampling.min_p(x, 0.05), hf.MinPLogitsWarper(0.05)),
    (
        lambda x, ids: sampling.penalties(x, ids, repetition=1.3),
        hf.RepetitionPenaltyLogitsProcessor(1.3),
    ),
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("seed", range(5))
def test_processor_equals_transformers(case, seed):
    ours, theirs = CASES[case]
    x, ids = random_logits(seed), previous(seed)
    torch.testing.assert_close(ours(x, ids), theirs(ids, x.clone()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("k", [None, 30])
def test_chain_equals_transformers_in_order(k):
    for seed in range(5):
        x, ids = random_logits(seed), previous(seed)
        sampler = Sampler(temperature=0.8, top_k=k, top_p=0.92, min_p=0.01, repetition_penalty=1.2)
        chain = hf.LogitsProcessorList(
            [hf.RepetitionPenaltyLogitsProcessor(1.2), hf.TemperatureLogitsWarper(0.8)]
            + ([hf.TopKLogitsWarper(k)] if k else [])
            + [hf.TopPLogitsWarper(0.92), hf.MinPLogitsWarper(0.01)]
        )
        torch.testing.assert_close(
            sampler.process(x, ids), chain(ids, x.clone()), rtol=1e-6, atol=0
        )


def test_a_sampler_is_processors_and_a_draw():
    options = {"temperature": 0.7, "top_k": 90, "top_p": 0.9, "min_p": 0.01}
    options |= {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    x, ids = random_logits(3), previous(3)
    chain, sampler = Sampler(**options), Sampler(**options, seed=5)
    assert torch.equal(chain.process(x, ids), sampler.process(x, ids))
    shares = chain.probabilities(x, ids)
    torch.testing.assert_close(shares.sum(-1), torch.ones(B))
    twin = Sampler(**options, seed=5)
    uniform = torch.cat(
        [torch.rand(1, generator=twin.stream(b), dtype=torch.float64) for b in range(B)]
    )
    assert torch.equal(sampler(x, ids), sampling.draw(shares, uniform))


@pytest.mark.parametrize("ends", [7, [7, 30], None])
def test_minimum_length_equals_transformers(ends):
    x, ids = random_logits(1), previous(1)
    for num_new in range(5):  # theirs counts what follows a prompt
        ours = sampling.enforce_min_new_tokens(x, sampling.end_ids(ends), num_new, 3)
        if ends is None:
            assert ours is x
            continue
        theirs = hf.MinNewTokensLengthLogitsProcessor(13 - num_new, 3, ends)
        assert torch.equal(ours, theirs(ids, x.clone()))
        assert torch.equal(x, random_logits(1))  # a pure function


def test_end_ids_are_none_one_or_several():
    assert sampling.end_ids(None) == () and sampling.end_ids(0) == (0,)
    assert sampling.end_ids(np.int64(3)) == (3,)
    assert sampling.end_ids([5, 2]) == (5, 2) and set(sampling.end_ids({5, 2})) == {2, 5}


def test_penalties_against_numpy():
    x, ids = random_logits(3, holes=False), previous(3)
    want_presence, want_frequency = x.numpy().copy(), x.numpy().copy()
    for row, tokens in enumerate(ids.numpy()):
        counts = np.bincount(tokens, minlength=V)
        want_presence[row] -= 0.6 * (counts > 0)
        want_frequency[row] -= 0.6 * counts
    np.testing.assert_allclose(sampling.penalties(x, ids, presence=0.6), want_presence, rtol=1e-6)
    np.testing.assert_allclose(sampling.penalties(x, ids, frequency=0.6), want_frequency, rtol=1e-6)
    sampler = Sampler(presence_penalty=0.6, frequency_penalty=0.6)
    both = want_presence + want_frequency - x.numpy()
    np.testing.assert_allclose(sampler.process(x, ids), both, rtol=1e-5, atol=1e-6)


def test_negative_ids_are_no_tokens():
    x, ids = random_logits(0), previous(0)
    padded = torch.cat([torch.full((B, 4), -1), ids], dim=1)
    for one in ({"repetition": 1.5}, {"presence": 1.5}, {"frequency": 1.5}):
        of_both = (sampling.penalties(x, some, **one) for some in (padded, ids))
        torch.testing.assert_close(*of_both)


def test_processors_keep_the_dtype():
    ids = previous(0)
    for dtype in (torch.bfloat16, torch.float64):
        x = random_logits(0, holes=False).to(dtype)
        for name in ("repetition", "presence", "frequency"):
            assert sampling.penalties(x, ids, **{name: 1.5}).dtype == dtype
        for name, value in (("temperature", 0.5), ("top_k", 3), ("top_p", 0.5), ("min_p", 0.5)):
            assert getattr(sampling, name)(x, value).dtype == dtype
    empty = ids[:, :0]
    assert torch.equal(sampling.penalties(x, empty, 1.5, 1.5, 1.5), x)


def test_one_token_is_always_drawn():
    sampler = Sampler(temperature=2.0, top_k=5, top_p=1e-9, min_p=1.0, seed=0)
    assert sampler(torch.tensor([[-7.0], [3e38]])).tolist() == [0, 0]


def test_top_k_keeps_exactly_k_with_ties():
    x = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 2.0, 1.0]])
    assert sampling.top_k(x, 2).isfinite().sum(-1).tolist() == [2, 2]


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=40), st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_sufficient_set(values, p):
    x = torch.tensor([values], dtype=torch.float64).float()
    kept = sampling.top_p(x, p)[0] > -math.inf
    probabilities = x.double().softmax(-1)[0]
    mass = probabilities[kept].sum()
    assert mass >= p - 1e-5
    assert mass - probabilities[kept].min() < p + 1e-5
    if not kept.all():
        assert probabilities[kept].min() >= probabilities[~kept].max()


@pytest.mark.parametrize("p", [1e-300, 1e-46, 1e-20])
def test_a_tiny_p_keeps_the_best_token(p):
    """A p that float32 cannot hold would keep none."""
    logits = torch.tensor([[0.5, 2.0, -1.0], [3.0, 2.9, 0.0]])
    kept = sampling.top_p(logits, p) > -math.inf
    assert kept.tolist() == [[False, True, False], [True, False, False]]


def fewest(x: torch.Tensor, p: float) -> list[int]:
    sums = x.double().softmax(-1).sort(descending=True).values.cumsum(-1)
    return ((sums < p).sum(-1) + 1).tolist()


@pytest.mark.parametrize("p", [0.5, 0.99, 0.999, 0.9999, 0.999999])
@pytest.mark.parametrize("size", [4_900, 151_936])
def test_top_p_counts_a_long_tail(size, p):
    """Below 5,000 tokens it sorts, above it does not."""
    x = torch.randn(2, size, generator=torch.Generator().manual_seed(0)) * 3
    x[1] /= 30
    kept = sampling.top_p(x, p).isfinite()
    assert kept.sum(-1).tolist() == fewest(x, p)
    for row, stay in zip(x, kept, strict=True):
        assert row[stay].min() >= row.masked_fill(stay, -math.inf).max()


def test_top_p_of_one_sure_token_and_a_tail_of_equals():
    x = torch.zeros(1, 100_001)
    x[0, 70_000] = math.log(0.99 / 1e-7)  # it has 0.99, the 100,000 others share 0.01
    kept = sampling.top_p(x, 0.995).isfinite()
    assert int(kept.sum()) == 50_001 and kept[0, 70_000]
    sorted_in_full = sampling.top_p(x[:, 70_000 - 2_000 : 70_000 + 2_000], 0.99999)
    assert int(sorted_in_full.isfinite().sum()) == fewest(x[:, 68_000:72_000], 0.99999)[0]


def test_top_p_that_with_all_logits_equal():
    x = torch.zeros(2, 3000)
    x[0, :10] = 12.0
    kept = (sampling.top_p(x, 0.9) > -math.inf).sum(-1)
    assert kept[0] == 10 and abs(int(kept[1]) - 2700) <= 1  # 0.9 itself is rounded


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: sampling.temperature(x, 0), "temperature must be > 0, got 0"),
        (lambda x: sampling.top_k(x, 0), "top_k must be >= 1, got 0"),
        (lambda x: sampling.top_p(x, 0.0), "top_p must be in"),
        (lambda x: sampling.min_p(x, 1.5), "min_p must be in"),
        (lambda x: sampling.penalties(x, previous(0), 0), "repetition_penalty must be"),
        (lambda x: sampling.penalties(x, previous(0)[:2], 2), "previous_ids"),
        (lambda x: Sampler(temperature=-1), "temperature must be >= 0, got -1"),
        (lambda x: Sampler(top_k=0), "top_k must be >= 1"),
        (lambda x: Sampler()(x[0]), r"logits must be \(B, V\)"),
        (lambda x: Sampler(seed=[1, 2])(x), "only 2 seeds"),
        (lambda x: GREEDY(x * math.nan), "NaN"),
        (lambda x: GREEDY(torch.where(x == x[1, 1], math.nan, x)), "NaN"),
        (lambda x: Sampler()(torch.full_like(x, -math.inf)), "-inf"),
        (lambda x: Sampler()(torch.full_like(x, math.inf)), r"\+inf"),
        (lambda x: Sampler(temperature=1e-39)(x), r"\+inf"),
        (lambda x: Sampler(presence_penalty=math.nan)(x, previous(0)), "NaN"),
        (lambda x: Sampler(repetition_penalty=0.1)(x * 1e38, previous(0)), r"\+inf"),
        (lambda x: Sampler()(x[:0]), r"not empty, got \(0, 211\)"),
        (lambda x: sampling.penalties(x, previous(0) + V, 2), "the vocabulary 211 tokens"),
    ],
)
def test_errors_say_what_was_given(call, message):
    with pytest.raises(ValueError, match=message):
        call(random_logits(0, holes=False))


def chi_square(ids: torch.Tensor, p: torch.Tensor) -> float:
    """Pearson's statistic; impossible tokens must not occur at all."""
    counts = torch.bincount(ids, minlength=len(p)).double()
    assert counts[p == 0].sum() == 0
    expected = p[p > 0].double() * len(ids)
    return float(((counts[p > 0] - expected) ** 2 / expected).sum())


P = torch.tensor([0.3, 0.0, 0.25, 0.2, 0.1, 0.1, 0.05, 0.0])
LIMIT = 20.5  # chi-square with 5 degrees of freedom exceeds it with probability 0.001


@pytest.mark.parametrize("way", ["inverse", "exponential", "gumbel", "sampler"])
def test_draws_follow_the_distribution(way, generator):
    n = 30_000
    many = P.expand(n, -1)
    ids = {
        "inverse": lambda: sampling.draw(many, torch.rand(n, generator=generator)),
        "exponential": lambda: fast_sampling.draw_exponential(many, generator=generator),
        "gumbel": lambda: fast_sampling.draw_gumbel(many.log(), generator=generator),
        "sampler": lambda: Sampler(seed=range(n))(many.log()),
    }[way]()
    assert chi_square(ids, P) < LIMIT


def test_draw_never_reaches_an_impossible_token():
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0]])
    assert sampling.draw(p, torch.tensor([0.0])).tolist() == [1]
    assert sampling.draw(p, torch.tensor([1.0 - 1e-16], dtype=torch.float64)).tolist() == [2]
    assert sampling.draw(p, torch.tensor([1.0])).tolist() == [2]  # some generators give (0, 1]


def test_rows_do_not_depend_on_their_neighbours():
    x = random_logits(1)
    sampler = Sampler(seed=11, top_p=0.9)
    batch = torch.stack([sampler(x) for _ in range(20)])
    for row in range(B):
        alone = Sampler(seed=11, top_p=0.9)
        own = [int(alone(x[row : row + 1], rows=[row])) for _ in range(20)]
        assert own == batch[:, row].tolist()
        alone = Sampler(seed=11 + 1_000_003 * row, top_p=0.9)  # what its stream is seeded with
        assert [int(alone(x[row : row + 1])) for _ in range(20)] == own
    sampler.reset()
    assert torch.equal(torch.stack([sampler(x) for _ in range(20)]), batch)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
def test_rows_keep_their_streams_when_others_end(lengths, own_seeds):
    """Rows end at different times; each writes what it writes alone."""
    logits = random_logits(1)
    seeds = [31 * row + 7 for row in range(len(lengths))] if own_seeds else 11
    sampler = Sampler(seed=seeds, top_p=0.9)
    together: list[list[int]] = [[] for _ in lengths]
    for step in range(max(lengths)):
        rows = [row for row, length in enumerate(lengths) if step < length]
        drawn = sampler(logits[[row % B for row in rows]], rows=rows)
        for row, token in zip(rows, drawn.tolist(), strict=True):
            together[row].append(token)
    for row, length in enumerate(lengths):
        alone = Sampler(seed=seeds, top_p=0.9)
        own = logits[row % B : row % B + 1]
        assert [int(alone(own, rows=[row])) for _ in range(length)] == together[row]


def test_near_seeds_share_no_row():
    """Batches of 100 with seeds 5 and 6 shared 99 rows when row b was seeded with seed + b."""
    flat = torch.zeros(100, 1000)
    batches = []
    for seed in range(5, 11):
        sampler = Sampler(seed=seed)
        batches.append(torch.stack([sampler(flat) for _ in range(4)], dim=1).tolist())
    rows = [tuple(row) for batch in batches for row in batch]
    assert len(set(rows)) == len(rows) == 600


@pytest.mark.parametrize("rows", [[0, 1], [0, 1, 1, 2, 3, 4], [-1, 0, 1, 2, 3, 4]])
@pytest.mark.parametrize("sampler", [Sampler(seed=0), GREEDY])
def test_rows_are_as_many_different_numbers_as_logits(rows, sampler):
    with pytest.raises(ValueError, match=r"rows \[.* are not 6 different numbers"):
        sampler(random_logits(0), rows=rows)


def test_the_order_in_which_rows_are_seen_does_not_matter():
    x, one, other = random_logits(1)[:3], Sampler(seed=4), Sampler(seed=4)
    assert torch.equal(one(x, rows=[0, 1, 2]), other(x.flip(0), rows=[2, 1, 0]).flip(0))


# On a device that is not the CPU (more in test_models_on_a_device)


@pytest.mark.parametrize("p", [1e-300, 0.1, 0.5, 0.9, 0.999])
def test_sorted_and_in_buckets_top_p_keeps_the_same_tokens(p):
    """Below 5,000 tokens it sorts, above not; the rows hold no ties at the border."""
    x = random_logits(2)
    assert torch.equal(sampling.top_p(x, p), fast_sampling.bucket_top_p(x, p))
    padded = torch.full((B, 6000), -math.inf)
    padded[:, 100 : 100 + V] = x
    wide = sampling.top_p(padded, p)
    assert torch.equal(wide[:, 100 : 100 + V], sampling.top_p(x, p))
    assert int(wide.isfinite().sum()) == int(sampling.top_p(x, p).isfinite().sum())
    for rows in (x, padded):
        assert sampling.top_p(rows.bfloat16(), p).dtype == torch.bfloat16


def test_sampling_is_in_float32():
    x = torch.tensor([[10.0, 10.03125, 0.0]], dtype=torch.bfloat16)
    processed = Sampler(temperature=0.3).process(x)
    assert processed.dtype == torch.float32
    torch.testing.assert_close(processed, x.float() / 0.3)


def test_greedy_is_argmax_after_penalties():
    x, ids = random_logits(2), previous(2)
    assert torch.equal(GREEDY(x), x.argmax(-1))
    sampler = Sampler(temperature=0, repetition_penalty=5.0)
    assert torch.equal(sampler(x, ids), sampling.penalties(x, ids, 5.0).argmax(-1))


# Steps of one's own


def test_a_step_stands_after_the_penalties_and_before_the_temperature():
    x, ids, seen = random_logits(2, holes=False), previous(2), []

    def note(logits, previous_ids):
        seen.append((logits, previous_ids))
        return logits + torch.arange(V)

    sampler = Sampler(temperature=0.5, top_k=3, repetition_penalty=2.0, steps=[note, note])
    found = sampler.process(x, ids)
    first = sampling.penalties(x, ids, 2.0)
    assert torch.equal(seen[0][0], first) and torch.equal(seen[0][1], ids)
    assert torch.equal(seen[1][0], first + torch.arange(V))
    want = sampling.top_k((first + torch.arange(V) + torch.arange(V)) / 0.5, 3)
    assert torch.equal(found, want)
    greedy = Sampler(temperature=0, steps=[note])
    assert torch.equal(greedy(x), (x + torch.arange(V)).argmax(-1))
    assert seen[-1][1].shape == (B, 0)  # nothing was said before
    assert len(seen) == 3 and Sampler().steps == ()  # made without a call of the steps


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda x, ids: x[:1], r"must return logits \(6, 211\), not \(1, 211\)"),
        (lambda x, ids: None, r"must return logits \(6, 211\), not None"),
        (lambda x, ids: x * math.nan, "NaN"),
    ],
)
def test_a_step_that_returns_something_else_is_told(step, message):
    with pytest.raises(ValueError, match=message):
        Sampler(steps=[step])(random_logits(0))


# What a subclass brings

FORBIDDEN = 3


class Forbidding(Sampler):
    """Never draws one token; whatever the settings, the ban comes last."""

    def process(self, logits, previous_ids=None):
        x = super().process(logits, previous_ids)
        return x.index_fill(-1, torch.tensor([FORBIDDEN]), -math.inf)


class Swapping(Sampler):
    """What would be the share of the first two tokens, the other gets."""

    def probabilities(self, logits, previous_ids=None):
        p = super().probabilities(logits, previous_ids)
        return torch.cat([p[:, [1, 0]], p[:, 2:]], dim=1)


SETTINGS = [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.99}, {"min_p": 0.001}]


@pytest.mark.parametrize("options", SETTINGS)
def test_what_a_subclass_forbids_is_never_drawn(options):
    logits = torch.zeros(50, 8)
    logits[:, FORBIDDEN], logits[:, 5] = 9.0, 8.0
    assert (Sampler(**options, seed=0)(logits) == FORBIDDEN).any()
    ids = Forbidding(**options, seed=0)(logits)
    assert not (ids == FORBIDDEN).any() and (ids == 5).any()


@pytest.mark.parametrize("options", SETTINGS)
def test_probabilities_of_a_subclass_are_drawn_from(options):
    logits = torch.full((50, 8), -20.0)
    logits[:, 0] = 20.0
    assert Sampler(**options, seed=0)(logits).eq(0).all()
    assert Swapping(**options, seed=0)(logits).eq(1).all()


def test_a_subclass_that_leaves_no_token_is_told():
    logits = torch.full((1, 8), -math.inf)
    logits[0, FORBIDDEN] = 0.0
    for options in SETTINGS:
        with pytest.raises(ValueError, match="a row has nothing but -inf"):
            Forbidding(**options)(logits)


def test_greedy_takes_the_first_of_the_best_and_no_random_number():
    tied = torch.tensor([[0.0, 5.0, 1.0, 5.0, 5.0]])
    before = torch.get_rng_state()
    assert GREEDY(tied).tolist() == [1]
    assert GREEDY.probabilities(tied).tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0]]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "1"}, "temperature must be a number, not '1'"),
        ({"temperature": None}, "temperature must be a number, not None"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"top_k": "50"}, "top_k must be a whole number, not '50'"),
        ({"top_k": 2.5}, "top_k must be a whole number, not 2.5"),
        ({"top_p": [0.9]}, r"top_p must be a number, not \[0.9\]"),
        ({"min_p": "x" * 60_000}, r"min_p must be a number, not 'x+'\.\.\.'x+' \(60,000 long\)"),
        ({"repetition_penalty": "1"}, "repetition_penalty must be a number"),
        ({"presence_penalty": "1"}, "presence_penalty must be a number"),
        ({"frequency_penalty": None}, "frequency_penalty must be a number"),
    ],
)
def test_settings_that_are_no_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**options)


def test_numbers_of_numpy_are_numbers():
    numbers = {"temperature": np.float32(0.5), "top_k": np.int64(3), "top_p": np.float64(0.9)}
    mine = Sampler(temperature=0.5, top_k=3, top_p=0.9, seed=0)
    x = random_logits(0)
    assert torch.equal(Sampler(**numbers, seed=0)(x), mine(x))
