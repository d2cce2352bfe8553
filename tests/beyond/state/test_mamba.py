"""Layers with a state: their three forms, transformers' classes, the memory, and bad input."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mamba.modeling_mamba import MambaBlock
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, segment_sum

from minillm.beyond.families.state import MambaLayer
from minillm.beyond.state.mamba import (
    GatedRMSNorm,
    Mamba2Mixer,
    causal_conv,
    segment_decay,
    ssm_chunked,
    ssm_quadratic,
    ssm_recurrent,
)
from minillm.beyond.state.mamba_parts import StateSizes
from minillm.beyond.state.selective_scan import MambaMixer, selective_scan
from minillm.beyond.state.state_cache import StateCache, StateLayer
from minillm.cache import KVCache
from minillm.layers import RMSNorm
from minillm.support.modes import make_cache

transformers.logging.set_verbosity_error()


def inputs(batch=2, T=13, H=6, D=5, G=3, N=4, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, T, H, D, generator=g, dtype=dtype)
    dt = torch.rand(batch, T, H, generator=g, dtype=dtype)
    A = -4 * torch.rand(H, generator=g, dtype=dtype)
    B, C = (torch.randn(batch, T, G, N, generator=g, dtype=dtype) for _ in "BC")
    return x, dt, A, B, C


def by_hand(x, dt, A, B, C):
    """Number by number, as the equations stand."""
    batch, T, H, D = x.shape
    G, N = B.shape[2:]
    y = torch.zeros_like(x)
    for b in range(batch):
        for h in range(H):
            group, state = h // (H // G), torch.zeros(D, N, dtype=x.dtype)
            for t in range(T):
                keep = math.exp(dt[b, t, h] * A[h])
                state = keep * state + dt[b, t, h] * torch.outer(x[b, t, h], B[b, t, group])
                y[b, t, h] = state @ C[b, t, group]
    return y


def test_all_forms_are_the_equations():
    a = inputs()
    expected = by_hand(*a)
    y, state = ssm_recurrent(*a)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(ssm_quadratic(*a), expected)
    for size in (1, 4, 5, 13, 64):
        chunked, last = ssm_chunked(*a, chunk_size=size)
        torch.testing.assert_close(chunked, expected)
        torch.testing.assert_close(last, state)


@given(
    T=st.integers(1, 20), cut=st.integers(1, 19), size=st.integers(1, 8), G=st.sampled_from([1, 2])
)
@settings(max_examples=30, deadline=None)
def test_a_state_carries_over_wherever_the_text_is_cut(T, cut, size, G):
    x, dt, A, B, C = inputs(T=T, H=2, G=G)
    cut = min(cut, T)
    expected, last = ssm_recurrent(x, dt, A, B, C)
    state, found = None, []
    for part in (slice(0, cut), slice(cut, T)):
        if x[:, part].shape[1]:
            a = (x[:, part], dt[:, part], A, B[:, part], C[:, part])
            y, state = ssm_chunked(*a, chunk_size=size, state=state)
            found.append(y)
    torch.testing.assert_close(torch.cat(found, 1), expected)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("chunk_size", [4, 13, 32])
def test_chunks_and_their_gradients_are_those_of_transformers(chunk_size):
    a = [m.requires_grad_() for m in inputs(dtype=torch.float32)]
    start = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for scan in ("theirs", "ours"):
        state = start.clone().requires_grad_()
        if scan == "theirs":
            options = {"initial_states": state, "return_final_states": True}
            y, last = mamba2_chunk_scan(*a, chunk_size=chunk_size, **options)
        else:
            y, last = ssm_chunked(*a, chunk_size=chunk_size, state=state)
        (y.sin().sum() + last.cos().sum()).backward()
        found.append([y, last, state.grad, *(m.grad for m in a)])
        for m in a:
            m.grad = None
    for expected, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_segments_are_those_of_transformers_and_of_float64():
    a = -3 * torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(segment_decay(a), segment_sum(a).exp(), atol=1e-7, rtol=1e-6)
    a = torch.cat([torch.tensor([-3e4]), -0.01 * torch.ones(400)])  # long sums, short segments
    exact = segment_decay(a.double())
    torch.testing.assert_close(segment_decay(a).double(), exact, atol=1e-6, rtol=1e-5)
    cut = a.cumsum(-1)
    assert ((cut[:, None] - cut).exp().tril() - exact).abs().max() > 1e-3


def test_long_texts_with_any_steps_stay_finite():
    x, dt, A, B, C = inputs(batch=1, T=400, dtype=torch.float32)
    for scale in (1e-6, 1.0, 1e4):
        a = (x, (dt * scale).requires_grad_(), A, B, C)
        y, state = ssm_chunked(*a, chunk_size=256)
        y.sum().backward()
        assert y.isfinite().all() and state.isfinite().all() and a[1].grad.isfinite().all()
        assert ssm_quadratic(*a).isfinite().all()


def test_the_convolution_is_causal_and_continues_from_its_window():
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=g) for s in ((2, 9, 3), (3, 1, 4), (3,)))
    y, window = causal_conv(x, weight, bias)
    expected = F.conv1d(F.pad(x.mT, (3, 0)), weight, bias, groups=3).mT
    torch.testing.assert_close(y, expected)
    assert torch.equal(window, x[:, -3:])
    first, window = causal_conv(x[:, :1], weight, bias)
    rest, _ = causal_conv(x[:, 1:], weight, bias, window)
    torch.testing.assert_close(torch.cat([first, rest], 1), y)
    changed = x.clone()
    changed[:, 5:] += 1
    assert torch.equal(causal_conv(changed, weight, bias)[0][:, :5], y[:, :5])


def test_mambas_scan_is_its_equation():
    g = torch.Generator().manual_seed(0)
    x, dt = (torch.rand(2, 7, 3, generator=g, dtype=torch.float64) for _ in "xd")
    A = -torch.rand(3, 5, generator=g, dtype=torch.float64)
    B, C = (torch.randn(2, 7, 5, generator=g, dtype=torch.float64) for _ in "BC")
    y, last = selective_scan(x, dt, A, B, C)
    for b in range(2):
        for e in range(3):
            h = torch.zeros(5, dtype=torch.float64)
            for t in range(7):
                h = (dt[b, t, e] * A[e]).exp() * h + dt[b, t, e] * x[b, t, e] * B[b, t]
                torch.testing.assert_close(y[b, t, e], h @ C[b, t])
            torch.testing.assert_close(last[b, e], h)
    # Mamba-2 is the case in which all rates of a channel are one
    A = A[:, :1]
    two, _ = ssm_recurrent(x[..., None], dt, A[:, 0], B[:, :, None], C[:, :, None])
    one, _ = selective_scan(x, dt, A.expand(3, 5), B, C)
    torch.testing.assert_close(two[..., 0], one)


def test_the_gated_norm_is_transformers():
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    g = torch.Generator().manual_seed(0)
    theirs, ours = MambaRMSNormGated(12, 4, eps=1e-3), GatedRMSNorm(12, 3, eps=1e-3)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(12, generator=g))
    ours.load_state_dict(theirs.state_dict())
    x, gate = (torch.randn(2, 3, 12, generator=g) for _ in "xg")
    torch.testing.assert_close(ours(x, gate), theirs(x, gate))


# ---- mixers ----

MIXERS = {
    "mamba": lambda: MambaMixer(16, StateSizes(3, use_bias=True)),
    "mamba2": lambda: Mamba2Mixer(16, StateSizes(3, 4, 2, chunk_size=4, use_bias=True)),
    "mamba2-limits": lambda: Mamba2Mixer(16, StateSizes(3, 2, time_step_limit=(0.02, 0.05))),
    "mamba2-no-window": lambda: Mamba2Mixer(16, StateSizes(3, 2, conv_kernel=1)),
}
each = pytest.mark.parametrize("name", MIXERS)


def mixer(name):
    torch.manual_seed(0)
    made = MIXERS[name]()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return made, torch.randn(3, 11, 16)


def test_layers_and_all_their_gradients_are_those_of_transformers():
    from transformers.models.mamba.modeling_mamba import MambaMixer as TheirMamba
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as TheirMamba2

    config = transformers.MambaConfig(hidden_size=24, state_size=5, conv_kernel=3, use_bias=True)
    sizes = {"state_size": 5, "num_heads": 6, "n_groups": 3, "time_step_limit": (0.01, 0.5)}
    config2 = transformers.Mamba2Config(hidden_size=24, head_dim=8, chunk_size=8, **sizes)
    pairs = (
        (TheirMamba(config, 0), MambaMixer(24, StateSizes(5, conv_kernel=3, use_bias=True))),
        (TheirMamba2(config2, 0), Mamba2Mixer(24, StateSizes(**sizes, chunk_size=4))),
    )
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 21, 24, generator=g)
    for theirs, ours in pairs:
        with torch.no_grad():
            for p in theirs.parameters():
                p.add_(0.2 * torch.randn(p.shape, generator=g))
        ours.load_state_dict(theirs.state_dict())
        expected, found = theirs(x), ours(x)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        for output in (expected, found):
            output.square().mean().backward()
        for key, p in ours.named_parameters():
            torch.testing.assert_close(p.grad, theirs.get_parameter(key).grad, atol=1e-5, rtol=1e-5)


@each
@torch.no_grad()
def test_steps_and_pieces_are_one_shot(name):
    m, x = mixer(name)
    expected = m(x)
    for sizes in ([11], [5, 6], [1] * 11, [4, 1, 1, 5]):
        cache, found, start = m.make_cache(3), [], 0
        for size in sizes:
            found.append(m(x[:, start : start + size], cache=cache))
            start += size
        torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-5, rtol=1e-5)
        assert cache.length == 11


@each
@torch.no_grad()
def test_no_output_sees_a_later_input(name):
    m, x = mixer(name)
    changed = x.clone()
    changed[:, 6:] += 1
    torch.testing.assert_close(m(changed)[:, :6], m(x)[:, :6], atol=1e-6, rtol=1e-6)


@each
@torch.no_grad()
def test_padding_is_no_input_wherever_it_stands(name):
    m, x = mixer(name)
    mask = torch.ones(3, 11, dtype=torch.bool)
    mask[1, :4], mask[2, :9] = False, False
    y, cache = m(x, mask=mask), m.make_cache(3)
    m(x, mask=mask, cache=cache)
    for row in range(3):
        alone, one = m(x[row : row + 1, mask[row]]), m.make_cache(1)
        torch.testing.assert_close(y[row, mask[row]], alone[0], atol=1e-5, rtol=1e-5)
        m(x[row : row + 1, mask[row]], cache=one)
        torch.testing.assert_close(cache.read(1, 3)[1][row], one.read(1, 1)[1][0])


@each
def test_the_first_steps_lie_where_the_paper_puts_them(name):
    m = MIXERS[name]()
    steps = F.softplus(m.time_step_bias())
    assert steps.min() > 0.001 * 0.999 and steps.max() < 0.1 * 1.001
    rates = m.A_log.exp()
    torch.testing.assert_close(rates[..., -1], torch.full(rates.shape[:-1], float(rates.shape[-1])))


@each
@torch.no_grad()
def test_16_bit_weights_keep_a_wide_state(name):
    m, x = mixer(name)
    expected = m(x)
    m, x, cache = m.bfloat16(), x.bfloat16(), m.make_cache(3, dtype=torch.bfloat16)
    y = m(x, cache=cache)
    window, state = cache.read(1, 3)
    assert (y.dtype, window.dtype, state.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert (y.float() - expected).abs().max() < 0.05 * expected.abs().max()


@each
def test_autocast_trains_it(name):
    m, x = mixer(name)
    with torch.autocast("cpu", torch.bfloat16):
        y = m(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())


# ---- the memory ----


def test_a_memory_has_one_size_and_cannot_go_back():
    m, x = mixer("mamba2")
    cache = m.make_cache(3)
    size = cache.nbytes
    assert size == 4 * 3 * (3 * (32 + 2 * 2 * 3) + 4 * 8 * 3)
    m(x, cache=cache)
    assert cache.nbytes == size and cache.length == 11
    with pytest.raises(ValueError, match="cannot crop 11 positions to 7: a state cannot go back"):
        KVCache([cache]).crop(7)
    cache.crop(11)
    with pytest.raises(ValueError, match="cannot crop 11 positions to 12"):
        cache.crop(12)
    assert cache.length == 11
    cache.crop(0)
    window, state = cache.read(1, 3)
    assert cache.length == 0 and not window.any() and not state.any()


@torch.no_grad()
def test_forks_and_rows_go_their_own_ways():
    m, x = mixer("mamba2")
    whole = m(x)
    memory = KVCache([m.make_cache(3)])
    m(x[:, :6], cache=memory[0])
    twin = memory.fork()
    m(-x[:, 6:], cache=twin[0])
    memory.reorder([2, 0])
    rows = x[[2, 0]]
    torch.testing.assert_close(m(rows[:, 6:], cache=memory[0]), whole[[2, 0], 6:])


def test_a_memory_outlives_inference_mode_and_holds_no_gradients():
    m, x = mixer("mamba2")
    cache = m.make_cache(3)
    with torch.inference_mode():
        m(x[:, :4], cache=cache)
    y = m(x[:, 4:], cache=cache)
    y.sum().backward()
    assert not any(buffer.requires_grad for buffer in cache.read(1, 3))


def test_what_does_not_fit_a_memory_is_named_and_changes_nothing():
    m, x = mixer("mamba2")
    cache = m.make_cache(3, max_length=5)
    with pytest.raises(ValueError, match="11 new positions after 0 exceed max_length=5"):
        m(x, cache=cache)
    with pytest.raises(ValueError, match="2 rows do not fit a cache of 3 rows"):
        m(x[:2, :2], cache=cache)
    assert cache.length == 0
    assert isinstance(cache, StateLayer)


# ---- bad input ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state_size": 0}, "state_size must be a whole number from 1 to 2147483647, not 0"),
        ({"state_size": 2.0}, "state_size must be a whole number from 1 to 2147483647, not 2.0"),
        ({"chunk_size": -4}, "chunk_size must be a whole number from 1 to 2147483647, not -4"),
        (
            {"conv_kernel": True},
            "conv_kernel must be a whole number from 1 to 2147483647, not True",
        ),
        ({"expand": None}, "expand must be a whole number from 1 to 2147483647, not None"),
        (
            {"time_step_rank": 0},
            "time_step_rank must be a whole number from 1 to 2147483647, not 0",
        ),
        ({"use_bias": 1}, "use_bias must be true or false, not 1"),
        ({"num_heads": 4, "n_groups": 3}, "num_heads 4 do not share n_groups 3"),
        ({"time_step_limit": (0.1, 0.05)}, "time_step_limit must be two numbers"),
        ({"time_step_limit": (math.nan, 1.0)}, "time_step_limit must be two numbers"),
        ({"time_step_limit": (0.0, math.nan)}, "time_step_limit must be two numbers"),
        ({"time_step_limit": (-1.0, 1.0)}, "time_step_limit must be two numbers"),
        ({"time_step_limit": 0.1}, "time_step_limit must be two numbers"),
    ],
)
def test_sizes_that_cannot_be_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        StateSizes(**change)


def test_mixers_refuse_what_they_cannot_compute():
    with pytest.raises(ValueError, match="num_heads 5, 32 channels"):
        Mamba2Mixer(16, StateSizes(num_heads=5))
    with pytest.raises(ValueError, match="num_heads None, 32 channels"):
        Mamba2Mixer(16, StateSizes())
    with pytest.raises(ValueError, match="activation 'step' is unknown"):
        MambaMixer(16, StateSizes(), activation="step")
    m, x = mixer("mamba")
    with pytest.raises(ValueError, match=r"x has shape \(3, 11, 15\), expected \(B, T, 16\)"):
        m(x[..., :15])


@pytest.mark.parametrize("wide", [True, False])
def test_a_16_bit_layer_adds_up_in_float32_if_told(wide):
    config = transformers.MambaConfig(hidden_size=24, state_size=5, residual_in_fp32=wide)
    theirs = MambaBlock(config, 0)
    layer = MambaLayer(
        MambaMixer(24, StateSizes(5)), norm=lambda: RMSNorm(24, eps=1e-5), residual_in_fp32=wide
    )
    with torch.no_grad():
        layer.mamba.out_proj.weight.mul_(20)  # or the sum is nearly x
    theirs.mixer.load_state_dict(layer.mamba.state_dict())
    x = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        wanted, found = theirs.bfloat16()(x), layer.bfloat16()(x)
    assert found.dtype == wanted.dtype == (torch.float32 if wide else torch.bfloat16)
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.01)
    assert (found - x).abs().max() > 1


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("order", ["kks", "ksk", "skk"])
def test_layers_with_keys_and_states_count_alike(kind, order):
    """Static layers share a position, which one of them moves on, wherever the states stand."""
    sizes = {"batch_size": 2, "num_kv_heads": 1, "key_dim": 3, "value_dim": 3, "max_length": 12}
    keys = make_cache(kind, num_layers=2, **sizes).layers
    layers = [keys.pop() if x == "k" else StateLayer(2, (3, 4), (4, 2)) for x in order]

    def feed(cache, num):
        told = cache.query_positions(num).tolist(), cache.key_positions(num)
        for layer in cache.layers:
            if isinstance(layer, StateLayer):
                layer.write(*layer.read(num, 2), num)
            else:
                layer.update(*torch.ones(2, 2, 1, num, 3))
        return told[0], told[1][told[1] >= 0].tolist()

    cache = StateCache(layers)
    assert feed(cache, 3) == ([0, 1, 2], [0, 1, 2])
    twin = cache.fork()
    for one in (cache, twin, twin.fork()):
        for t in range(one.length, one.length + 2):
            assert feed(one, 1) == ([t], list(range(t + 1)))
    assert cache.length == twin.length == 5
    with pytest.raises(ValueError, match="a state cannot go back"):
        cache.crop(4)
    assert [layer.length for layer in cache.layers] == [5, 5, 5]
