"""Any sequence of calls against a list of tokens; cached decoders against uncached ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from minillm.cache.base import CACHE_KINDS, KVCache, make_cache
from minillm.cache.quantized import quantize_int8
from minillm.nn.attention import build_mask
from minillm.nn.layers import GatedMLP, RMSNorm
from minillm.nn.mla import MultiHeadLatentAttention
from minillm.nn.multihead import MultiHeadAttention
from minillm.nn.rope import RotaryEmbedding

WINDOW, BLOCK, MAX = 5, 4, 40
KINDS = list(CACHE_KINDS)
EXACT = [kind for kind in KINDS if kind != "quantized"]


def new(kind: str, batch_size=2, layers=2, heads=3, key_dim=4, value_dim=6, **options) -> KVCache:
    options = {"max_length": MAX, "window": WINDOW, "block_size": BLOCK} | options
    return make_cache(
        kind,
        num_layers=layers,
        batch_size=batch_size,
        num_kv_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        **options,
    )


def tokens(num: int, seed=0, batch_size=2, heads=3, layers=2, dims=(4, 6)) -> list:
    """Random keys and values for each layer: [(B, G, T, key_dim), (B, G, T, value_dim)]."""
    g = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(batch_size, heads, num, dim, generator=g) for dim in dims)
        for _ in range(layers)
    ]


def feed(cache: KVCache, new_tokens: list) -> list:
    return [layer.update(k, v) for layer, (k, v) in zip(cache.layers, new_tokens, strict=True)]


def state(cache: KVCache) -> tuple:
    """All that a later step could notice, without disturbing it."""
    twin = cache.fork()
    read = feed(twin, tokens(1, seed=99, batch_size=cache.batch_size)) if cache.length < MAX else []
    return cache.length, cache.nbytes, [t.clone() for pair in read for t in pair]


def assert_same(one: tuple, other: tuple) -> None:
    assert one[:2] == other[:2] and len(one[2]) == len(other[2])
    for a, b in zip(one[2], other[2], strict=True):
        assert torch.equal(a, b)


class Listed:
    """The oracle: a cache that is a list of tokens, copied whenever in doubt."""

    def __init__(self, cache: KVCache, past: list | None = None) -> None:
        self.cache, self.past = cache, past or []  # past[p][layer] = (key, value), (B, G, dim)

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
        read = feed(cache, given_tokens)
        self.check(positions, read, start)

    def check(self, positions: torch.Tensor, read: list, start: int) -> None:
        filled = positions >= 0
        held = positions[filled].tolist()
        assert len(set(held)) == len(held) and max(held) == len(self.past) - 1
        sliding = self.cache.layers[0].__class__.__name__ == "SlidingLayer"
        needed = range(max(0, start - WINDOW + 1) if sliding else 0, len(self.past))
        assert set(needed) <= set(held)
        for i, pair in enumerate(read):
            for j, found in enumerate(pair):
                assert found.shape[2] == len(positions)
                expected = torch.stack([self.past[p][i][j] for p in held], dim=2)
                torch.testing.assert_close(found[:, :, filled], expected, rtol=0, atol=0)

    def crop(self, length: int) -> None:
        try:
            self.cache.crop(length)
        except ValueError as error:
            assert "ring" in str(error) and len(self.past) > WINDOW and length < len(self.past) - 1
        else:
            self.past = self.past[:length]
        assert self.cache.length == len(self.past)

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
            twins.append(Listed(one.cache.fork(), list(one.past)))
        elif call == "reset":
            one.cache.reset()
            one.past = []
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


def test_a_fork_of_pages_copies_one_block():
    base = new("paged", batch_size=1, layers=1)
    feed(base, tokens(10, batch_size=1, layers=1))  # blocks of 4: two full ones, one half full
    pool = base[0].pool
    used = len(pool.ref_counts) - len(pool.free)
    twin = base.fork()
    assert used == 3 and len(pool.ref_counts) - len(pool.free) == used
    feed(twin, tokens(1, 1, batch_size=1, layers=1))
    assert len(pool.ref_counts) - len(pool.free) == used + 1
    assert twin[0].block_table[0][:2] == base[0].block_table[0][:2]
    assert twin[0].block_table[0][2] != base[0].block_table[0][2]
    feed(base, tokens(1, 2, batch_size=1, layers=1))  # now the only holder: writes in place
    assert len(pool.ref_counts) - len(pool.free) == used + 1
    del twin
    assert len(pool.ref_counts) - len(pool.free) == used
    base.reset()
    assert len(pool.free) == len(pool.ref_counts)


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


def test_a_ring_goes_back_as_far_as_it_remembers():
    cache = new("sliding")
    feed(cache, tokens(9))
    with pytest.raises(ValueError, match=r"9 positions to 7: the ring of 5 has overwritten .* 4"):
        cache.crop(7)
    assert cache.length == 9
    cache.crop(8)  # a query at 8 reads 4 to 8, and 4 is still there
    assert cache.key_positions(1).sort().values.tolist() == [4, 5, 6, 7, 8]


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
    with pytest.raises(ValueError, match="batch_size=0 is below 1"):
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


def test_int8_is_off_by_half_a_step_at_most():
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) * 10
    numbers, scale = quantize_int8(x)
    error, largest = (numbers * scale - x).abs(), x.abs().amax(-1, keepdim=True)
    assert numbers.dtype == torch.int8 and numbers.min() >= -127
    assert (error <= largest / 254 * (1 + 1e-5)).all()
    assert (error > 0.9 * largest / 254).any()  # the bound is no wider than it must be
    zero, scale = quantize_int8(torch.zeros(2, 8))
    assert torch.equal(zero * scale, torch.zeros(2, 8))
    large, scale = quantize_int8(torch.full((1, 4), 60000.0, dtype=torch.float16))
    torch.testing.assert_close(large * scale, torch.full((1, 4), 60000.0))


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

HEADS = {"MHA": 4, "GQA": 2, "MQA": 1, "MLA": None}
MLA = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


class Block(nn.Module):
    def __init__(self, heads: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([RMSNorm(32), RMSNorm(32)])
        if heads == "MLA":
            self.attention = MultiHeadLatentAttention(32, 4, **MLA)
        else:
            self.attention = MultiHeadAttention(32, 4, num_kv_heads=HEADS[heads])
        self.mlp = GatedMLP(32, 48)

    def forward(self, x, **options):
        x = x + self.attention(self.norms[0](x), **options)
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """Two layers; its mask comes from positions, whatever the cache."""

    def __init__(self, heads: str, window: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.window = heads, window
        self.embed = nn.Embedding(50, 32)
        self.rotary = RotaryEmbedding(4 if heads == "MLA" else 8)
        self.layers = nn.ModuleList([Block(heads), Block(heads)])
        self.double().requires_grad_(False)

    def make_cache(self, kind: str, batch_size: int) -> KVCache:
        mla = self.heads == "MLA"
        sizes = {"heads": 1 if mla else HEADS[self.heads]}
        sizes |= {"key_dim": 12, "value_dim": 4} if mla else {"key_dim": 8, "value_dim": 8}
        return new(kind, batch_size, dtype=torch.float64, **sizes)

    def forward(self, ids, *, real=None, cache=None):
        T = ids.shape[1]
        queries = keys = torch.arange(T)
        if cache is not None:
            queries, keys = cache.query_positions(T), cache.key_positions(T)
        valid = None if real is None else real[:, keys.clamp(min=0)]
        mask = build_mask(queries, keys, key_valid=valid, window=self.window)
        at = queries[None] if real is None else (real.cumsum(1) - 1).clamp(min=0)[:, queries]
        x, rope = self.embed(ids), self.rotary(at)
        for i, layer in enumerate(self.layers):
            x = layer(x, rope=rope, mask=mask, cache=None if cache is None else cache[i])
        return x @ self.embed.weight.T


CHUNKS = {"one shot": [14, *[1] * 6], "chunked": [4, 5, 1, 6, 1, 1, 2], "step by step": [1] * 20}
PADDING = {"no padding": [0, 0, 0], "left padding": [0, 3, 9]}
IDS = torch.randint(1, 50, (3, 20), generator=torch.Generator().manual_seed(1))


def cached(model: Decoder, kind: str, chunks: list[int], padding: list[int], cache=None):
    """Logits of padded rows, chunk by chunk through a cache; and of each row alone, uncached."""
    real = torch.arange(20) >= torch.tensor(padding)[:, None]
    ids = IDS.masked_fill(~real, 0)
    real = None if not any(padding) else real
    cache = cache or model.make_cache(kind, 3)
    found = [
        model(
            part,
            real=None if real is None else real[:, : cache.length + part.shape[1]],
            cache=cache,
        )
        for part in ids.split(chunks, dim=1)
    ]
    alone = [model(ids[i : i + 1, pad:])[0] for i, pad in enumerate(padding)]
    found = torch.cat(found, dim=1)
    return [found[i, pad:] for i, pad in enumerate(padding)], alone


GRID = [(kind, w) for kind in ("dynamic", "static") for w in (None, WINDOW)] + [("sliding", WINDOW)]


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("kind", "window"), GRID)
def test_cached_equals_uncached(kind, window, heads, chunks, padding):
    found, alone = cached(Decoder(heads, window), kind, CHUNKS[chunks], PADDING[padding])
    for one, expected in zip(found, alone, strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("heads", ["GQA", "MLA"])
def test_paged_equals_uncached_past_block_edges(heads, chunks, padding):
    found, alone = cached(Decoder(heads), "paged", CHUNKS[chunks], PADDING[padding])
    for one, expected in zip(found, alone, strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("heads", ["GQA", "MLA"])
def test_quantized_stays_within_two_percent_of_the_largest_logit(heads, padding):
    results = [cached(Decoder(heads), "quantized", CHUNKS[c], PADDING[padding]) for c in CHUNKS]
    for one, expected in zip(*results[0], strict=True):
        assert 0 < (one - expected).abs().max() < 0.02 * expected.abs().max()
    for found, _ in results[1:]:  # and the chunks make no difference
        for one, other in zip(found, results[0][0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


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


@pytest.mark.parametrize(
    ("heads", "backend"), [("GQA", "eager"), ("MLA", "eager"), ("GQA", "aot_eager")]
)
def test_static_decoding_is_compiled_once(heads, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = Decoder(heads)
    real = torch.arange(20) >= torch.tensor([0, 3, 9])[:, None]
    real_all = nn.functional.pad(real, (0, MAX - 20), value=True)
    step = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    expected = model(IDS, real=real)
    cache = model.make_cache("static", 3)
    for conversation in (cache, cache, model.make_cache("static", 3), cache.fork()):
        conversation.reset()
        model(IDS[:, :12], real=real_all, cache=conversation)  # the prompt, as it is
        for t in range(12, 20):
            logits = step(IDS[:, t : t + 1], real=real_all, cache=conversation)
            torch.testing.assert_close(logits[:, 0], expected[:, t], rtol=0, atol=1e-10)
        assert conversation.length == 20
        with pytest.raises(ValueError, match="21 new positions after 20 exceed max_length=40"):
            conversation.key_positions(21)
    assert counter.frame_count == 1
    twin = cache.fork()  # a copy at the first write, then the same compiled step
    for conversation in (twin, cache):
        conversation.crop(12)
        for t in range(12, 16):
            logits = step(IDS[:, t : t + 1], real=real_all, cache=conversation)
            torch.testing.assert_close(logits[:, 0], expected[:, t], rtol=0, atol=1e-10)
    assert counter.frame_count == 2
