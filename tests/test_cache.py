"""Any sequence of calls against a list of tokens; cached decoders against uncached ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended_device import same_there
from small_caches import (
    CHUNKS,
    EXACT,
    HEADS,
    IDS,
    KINDS,
    MAX,
    PADDING,
    WINDOW,
    Decoder,
    assert_same,
    cached,
    feed,
    new,
    state,
    tokens,
)

from minillm.cache import KVCache
from minillm.deeper.caches.sliding import SlidingLayer
from minillm.support.modes import make_cache


class Listed:
    """The oracle: a cache that is a list of tokens, copied whenever in doubt."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.past: list = []  # past[p][layer] = (key, value), (B, G, dim)
        self.longest = 0  # how long the past has ever been: what a ring has overwritten stays so

    @property
    def sliding(self) -> bool:
        return isinstance(self.cache[0], SlidingLayer)

    def update(self, num: int, seed: int) -> None:
        cache, rows, start = self.cache, self.cache.batch_size, len(self.past)
        given_tokens = tokens(num, seed, rows)
        if start + num > MAX:
            before = state(cache)
            with pytest.raises(ValueError, match=f"{num} new positions after {start} exceed"):
                cache.key_positions(num)
            assert_same(state(cache), before)
            return
        positions = cache.key_positions(num)
        assert torch.equal(cache.query_positions(num), torch.arange(start, start + num))
        self.past += [[(k[:, :, t], v[:, :, t]) for k, v in given_tokens] for t in range(num)]
        self.longest = max(self.longest, len(self.past))
        read = feed(cache, given_tokens)
        self.check(positions, read, start)

    def check(self, positions: torch.Tensor, read: list, start: int) -> None:
        filled = positions >= 0
        held = positions[filled].tolist()
        assert len(set(held)) == len(held) and max(held) == len(self.past) - 1
        needed = range(max(0, start - WINDOW + 1) if self.sliding else 0, len(self.past))
        assert set(needed) <= set(held)
        for i, pair in enumerate(read):
            for j, found in enumerate(pair):
                assert found.shape[2] == len(positions)
                expected = torch.stack([self.past[p][i][j] for p in held], dim=2)
                torch.testing.assert_close(found[:, :, filled], expected, rtol=0, atol=0)

    def crop(self, length: int) -> None:
        lost = max(0, self.longest - WINDOW) if self.sliding else 0  # positions before this one
        if length < len(self.past) and max(0, length - WINDOW + 1) < lost:
            with pytest.raises(ValueError, match=f"the ring of {WINDOW} has overwritten"):
                self.cache.crop(length)
        else:
            self.cache.crop(length)
            self.past = self.past[:length]
        assert self.cache.length == len(self.past)

    def fork(self) -> "Listed":
        twin = Listed(self.cache.fork())
        twin.past, twin.longest = list(self.past), self.longest
        return twin

    def reset(self) -> None:
        self.cache.reset()
        self.past, self.longest = [], 0

    def reorder(self, rows: list[int]) -> None:
        self.cache.reorder(rows)
        self.past = [[(k[rows], v[rows]) for k, v in layers] for layers in self.past]


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["update", "update", "step", "step", "crop", "fork", "reset", "reorder"]),
        st.integers(0, 9),
        st.integers(0, 3),
    ),
    max_size=25,
)


@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=60)
@given(calls=CALLS)
def test_any_sequence_of_calls_equals_a_list_of_tokens(kind, calls):
    twins = [Listed(new(kind))]
    for seed, (call, number, which) in enumerate(calls):
        one = twins[which % len(twins)]
        if call == "update":
            one.update(number + 1, seed)
        elif call == "step":
            one.update(1, seed)
        elif call == "crop":
            one.crop(max(0, len(one.past) - number))
        elif call == "fork":
            twins.append(one.fork())
        elif call == "reset":
            one.reset()
        else:
            rows = one.cache.batch_size
            one.reorder([(number + i) % rows for i in range(1 + which)])
        assert one.cache.length == len(one.past)
    for seed, one in enumerate(twins):  # and all of them go on, each on its own
        one.update(1, 1000 + seed)
        one.update(2, 2000 + seed)


@pytest.mark.parametrize("kind", KINDS)
def test_forks_share_memory_until_one_writes(kind):
    base = new(kind, layers=1)
    feed(base, tokens(6, layers=1))

    def memory(cache):
        layer = cache[0]
        buffers = layer.pool.buffers if kind == "paged" else layer._buffers
        return [b.data_ptr() for b in buffers]

    one, two = base.fork(), base.fork()
    assert memory(base) == memory(one) == memory(two)
    for seed, twin in ((1, one), (2, two), (3, base)):  # all three write at position 6
        feed(twin, tokens(1, seed, layers=1))
    last = [feed(twin, tokens(1, 7, layers=1))[0] for twin in (one, two, base)]
    for (k, v), seed in zip(last, (1, 2, 3), strict=True):
        slot = 6 % WINDOW if kind == "sliding" else 6
        expected_k, expected_v = tokens(1, seed, layers=1)[0]
        close = {"rtol": 0, "atol": 0.02 if kind == "quantized" else 0}
        torch.testing.assert_close(k[:, :, slot : slot + 1], expected_k, **close)
        torch.testing.assert_close(v[:, :, slot : slot + 1], expected_v, **close)


def test_same_contents_as_transformers_caches():
    """Their ring keeps the past in order, ours as it lies: sorted by position, they are equal."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    pairs = [
        (new("dynamic", layers=1), DynamicLayer()),
        (new("sliding", layers=1), DynamicSlidingWindowLayer(sliding_window=WINDOW)),
    ]
    for cache, theirs in pairs:
        for seed, num in enumerate((3, 1, 1, 1, 1, 4, 1, 8, 1, 1)):
            new_tokens = tokens(num, seed, layers=1)
            order = cache.key_positions(num).argsort()
            ours = feed(cache, new_tokens)[0]
            for mine, other in zip(ours, theirs.update(*new_tokens[0]), strict=True):
                reach = min(other.shape[2], mine.shape[2])  # a chunk gets one key more from us
                assert reach >= min(cache.length, WINDOW - 1 + num)
                assert torch.equal(mine[:, :, order][:, :, -reach:], other[:, :, -reach:])


def test_growth_moves_a_token_less_than_twice_on_average():
    cache, moved, capacity = new("dynamic", layers=1, max_length=None), 0, 0
    steps, one = 3000, tokens(1, layers=1)
    for step in range(steps):
        feed(cache, one)
        if cache[0]._buffers[0].shape[2] != capacity:
            moved, capacity = moved + step, cache[0]._buffers[0].shape[2]
    assert 0 < moved < 2 * steps


@pytest.mark.parametrize("kind", KINDS)
def test_the_ends_of_a_cache(kind):
    cache = new(kind, max_length=8)
    feed(cache, tokens(8))
    before = cache.length, cache.nbytes
    with pytest.raises(ValueError, match="1 new positions after 8 exceed max_length=8"):
        cache.key_positions(1)
    with pytest.raises(ValueError, match="exceed max_length=8"):
        feed(cache, tokens(1))
    assert (cache.length, cache.nbytes) == before
    with pytest.raises(ValueError, match="at least one new position, not 0"):
        cache.key_positions(0)


WRONG = {
    "rows": (
        lambda k, v: (k[:1], v[:1]),
        r"keys \(1, 3, 1, 4\) do not fit a cache of \(2, 3, 1, 4",
    ),
    "heads": (lambda k, v: (k[:, :2], v[:, :2]), r"keys \(2, 2, 1, 4\)"),
    "value size": (lambda k, v: (k, v[..., :5]), r"values \(2, 3, 1, 5\).*\(2, 3, 1, 6\)"),
    "two lengths": (lambda k, v: (k, torch.cat([v, v], 2)), r"values \(2, 3, 2, 6\)"),
    "dimensions": (lambda k, v: (k[0], v[0]), r"keys \(3, 1, 4\)"),
    "dtype": (lambda k, v: (k, v.double()), r"values are torch.float64 .* the cache torch.float32"),
    "device": (lambda k, v: (k.to("meta"), v), r"keys are torch.float32 on meta"),
    "nothing": (lambda k, v: (k[:, :, :0], v[:, :, :0]), "at least one new position, not 0"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mistake", WRONG)
def test_what_does_not_fit_is_refused_and_changes_nothing(kind, mistake):
    cache = new(kind)
    feed(cache, tokens(3))
    before = state(cache)
    spoil, message = WRONG[mistake]
    with pytest.raises(ValueError, match=message):
        cache[0].update(*spoil(*tokens(1)[0]))
    assert_same(state(cache), before)


@pytest.mark.parametrize("kind", KINDS)
def test_crop_is_checked_and_exact(kind):
    cache, plain = new(kind), new(kind)
    feed(cache, tokens(4))
    for bad in (-1, 5):
        with pytest.raises(ValueError, match=f"cannot crop 4 positions to {bad}"):
            cache.crop(bad)
    feed(cache, tokens(1, seed=1))
    cache.crop(4)
    feed(plain, tokens(4))
    assert_same(state(cache), state(plain))


def test_an_interrupted_pass_is_noticed_and_undone():
    cache = new("dynamic")
    feed(cache, tokens(3))
    cache[0].update(*tokens(1)[0])  # layer 1 was never reached
    with pytest.raises(ValueError, match=r"the layers hold \[4, 3\].*crop\(3\)"):
        cache.key_positions(1)
    cache.crop(cache.length)
    assert cache.key_positions(1).tolist() == [0, 1, 2, 3]


def test_a_refused_crop_changes_no_layer():
    cache = new("dynamic")
    feed(cache, tokens(3))
    cache[0].update(*tokens(2)[0])  # layer 1 was never reached
    with pytest.raises(ValueError, match="cannot crop 3 positions to 4"):
        cache.crop(4)
    assert [layer.length for layer in cache.layers] == [5, 3]


def test_bad_arguments():
    sizes = {"num_layers": 1, "batch_size": 1, "num_kv_heads": 1, "key_dim": 4, "value_dim": 4}
    with pytest.raises(ValueError, match="'ring'; there are dynamic, static, sliding"):
        make_cache("ring", **sizes)
    with pytest.raises(ValueError, match="static cache needs max_length"):
        make_cache("static", **sizes)
    with pytest.raises(ValueError, match="sliding cache needs window"):
        make_cache("sliding", **sizes)
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        make_cache("dynamic", **sizes | {"batch_size": 0})
    with pytest.raises(ValueError, match=r"rows \[0, 2\] of a cache with 2 rows"):
        new("dynamic").reorder([0, 2])


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_the_filled_positions(kind):
    cache = new(kind)
    assert cache.nbytes == 0
    feed(cache, tokens(7))
    per_position = 2 * 2 * 3 * ((4 + 6) * 4 if kind != "quantized" else 4 + 6 + 2 * 4)
    assert cache.nbytes == per_position * (WINDOW if kind == "sliding" else 7)
    cache.reset()
    assert cache.nbytes == cache.length == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_a_device_asks_nothing(kind):
    """On a GPU, each number read from a tensor would wait for all work given to it so far."""

    def run(given):
        cache, found = new(kind, device=given.device), []

        def step(cache, num):
            found.extend([cache.query_positions(num), cache.key_positions(num)])
            new_tokens = given[: cache.batch_size, :, len(found) : len(found) + num]
            for layer in cache.layers:
                found.extend(layer.update(new_tokens[..., :4], new_tokens))

        for num in (3, 1, 1, 4):
            step(cache, num)
        twin = cache.fork()
        for one in (twin, cache):
            step(one, 1)
        twin.reorder([1, 0, 0])
        twin.crop(twin.length - 1)
        step(twin, 1)
        cache.reset()
        step(cache, 2)
        assert cache.length == 2 and twin.length == 10 and twin.batch_size == 3
        if kind != "paged":  # whose tables lie on the CPU
            cache.reorder(given.new_zeros(2, dtype=torch.long))
        return found

    given = torch.randn(3, 3, 80, 6, generator=torch.Generator().manual_seed(0))
    assert not same_there(run, given).waits


def test_the_kind_whose_shapes_never_change():
    """`fixed_shapes` says it; a step of one token shows it."""
    for kind in KINDS:
        cache, shapes = new(kind), set()
        for _ in range(9):
            shapes |= {x.shape for pair in feed(cache, tokens(1)) for x in pair}
        fixed = getattr(cache[0], "fixed_shapes", False)
        assert fixed == (len(shapes) == 2) == (kind == "static")


def test_layers_of_two_kinds_in_one_cache():
    """As for a model with a window in some layers: static layers count together, or alone."""
    static, sliding = (lambda: new("static", layers=1)[0]), (lambda: new("sliding", layers=1)[0])
    for kinds in ((static, static, sliding), (static, sliding, static)):
        cache = KVCache([make() for make in kinds])
        for num in (3, 1, 2):
            feed(cache, tokens(num, layers=3))
        assert [layer.length for layer in cache.layers] == [6, 6, 6]
        assert cache.query_positions(2).tolist() == [6, 7]
        assert cache.key_positions(1).tolist()[:7] == list(range(7))


def test_what_is_cached_has_no_gradient_and_outlives_inference_mode():
    for kind in KINDS:
        with torch.inference_mode():
            cache = new(kind, layers=1)
            feed(cache, tokens(3, layers=1))
            forked, reordered = cache.fork(), cache.fork()
            feed(forked, tokens(1, layers=1))
            reordered.reorder([1, 1])
        for one in (cache, forked, reordered):
            for num in (1, 2, 1):
                k, v = (x.requires_grad_() for x in tokens(num, layers=1)[0])
                k_all, v_all = one[0].update(k, v)
                assert not k_all.requires_grad and not v_all.requires_grad


# --- a small decoder: cached equals uncached ---------------------------------------------------

GRID = [(kind, w) for kind in ("dynamic", "static") for w in (None, WINDOW)] + [("sliding", WINDOW)]


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("kind", "window"), GRID)
def test_cached_equals_uncached(kind, window, heads, chunks, padding):
    found, alone = cached(Decoder(heads, window), kind, CHUNKS[chunks], PADDING[padding])
    for one, expected in zip(found, alone, strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", EXACT)
def test_crop_undoes_rejected_tokens(kind):
    model = Decoder("GQA", WINDOW)
    cache = model.make_cache(kind, 3)
    model(IDS[:, :12], cache=cache)
    undo = 1 if kind == "sliding" else 4
    model(torch.flip(IDS, [1])[:, :undo], cache=cache)  # a draft that is then refused
    cache.crop(12)
    found = torch.cat([model(IDS[:, t : t + 1], cache=cache) for t in range(12, 20)], dim=1)
    torch.testing.assert_close(found, model(IDS)[:, 12:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", EXACT)
def test_a_shared_prefix_continued_in_two_ways(kind):
    model = Decoder("GQA", WINDOW)
    base = model.make_cache(kind, 3)
    model(IDS[:, :9], cache=base)
    ways = [
        (base.fork(), IDS[:, 9:]),
        (base.fork(), torch.flip(IDS[:, 9:], [1])),
        (base, IDS[:, 3:14]),
    ]
    found = [[] for _ in ways]
    for t in range(11):  # in turns, so that each could spoil the others
        for (cache, ids), logits in zip(ways, found, strict=True):
            logits.append(model(ids[:, t : t + 1], cache=cache))
    for (_, ids), logits in zip(ways, found, strict=True):
        expected = model(torch.cat([IDS[:, :9], ids], dim=1))[:, 9:]
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=0, atol=1e-10)
