"""Attention: three backends against a formula in numpy; edges, gradients, kernels."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    BACKENDS,
    BIASES,
    MASKS,
    TOLERANCE,
    check_softmax_edges,
    make_bias,
    make_mask,
    oracle,
    scattered,
    tensors,
)
from hypothesis import given
from hypothesis import strategies as st
from meta_device import MetaDevice
from torch.nn.attention import SDPBackend, sdpa_kernel

from minillm.attention import (
    attention,
    attention_weights,
    build_mask,
    causal_mask,
    repeat_kv,
    softmax,
)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("T, S", [(1, 1), (1, 9), (5, 5), (4, 9), (9, 4), (130, 300)])
def test_backends_agree_with_the_formula(T, S, dtype, generator):
    """Every mask kind x bias kind x head grouping x causal, on each backend; of several tiles every
    mask without a bias, and every bias with one mask."""
    heads = [(4, 4), (4, 2), (6, 1)] if S < 100 else [(2, 1)]
    for (H, G), mask_kind, bias_kind, is_causal in itertools.product(
        heads, MASKS, BIASES, (False, True)
    ):
        if is_causal and T > S:
            continue
        if S >= 100 and mask_kind != "empty_rows" and bias_kind != "none":
            continue
        q, k, v = tensors(generator, (2, H, T, 8), (2, G, S, 8), (2, G, S, 8), dtype=dtype)
        mask = make_mask(mask_kind, 2, H, T, S, generator)
        bias = make_bias(bias_kind, H, T, S, generator, dtype)
        options = {"mask": mask, "bias": bias, "is_causal": is_causal}
        expected = oracle(q, k, v, **options)
        for backend in BACKENDS:
            out = attention(q, k, v, backend=backend, **options)
            assert out.dtype == dtype
            error = (out.double() - expected).abs() / (1 + expected.abs())
            where = (backend, H, G, mask_kind, bias_kind, is_causal, error.max().item())
            assert error.max() <= TOLERANCE[dtype], where


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value_size", [3, 12])
def test_values_of_another_size_and_a_scale(backend, value_size, generator):
    q, k, v = tensors(generator, (2, 4, 6, 8), (2, 2, 7, 8), (2, 2, 7, value_size))
    out = attention(q, k, v, is_causal=True, scale=0.3, backend=backend)
    expected = oracle(q, k, v, is_causal=True, scale=0.3)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_contiguous_inputs(backend, generator):
    q, k, v = tensors(generator, (2, 6, 4, 8), (2, 9, 2, 8), (2, 2, 5, 9))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.mT
    mask = (torch.rand(9, 6, generator=generator) > 0.4).mT | (torch.arange(9) == 0)
    assert not any(x.is_contiguous() for x in (q, k, v))
    out = attention(q, k, v, mask=mask, backend=backend)
    torch.testing.assert_close(out, oracle(q, k, v, mask=mask), atol=1e-12, rtol=0)
    one = attention(q[:, :, -1:], k, v, mask=mask[-1:], backend=backend)
    torch.testing.assert_close(one, out[:, :, -1:], atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_rows_alone_equal_the_full_square(backend, generator):
    """What makes caching right: T new queries see what they would have seen in one go."""
    q, k, v = tensors(generator, (1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4))
    full = attention(q, k, v, is_causal=True, backend=backend)
    for T in range(1, 9):
        last = attention(q[:, :, -T:], k, v, is_causal=True, backend=backend)
        torch.testing.assert_close(last, full[:, :, -T:], atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_row_that_reads_nothing_gives_zeros_and_no_gradient(backend, dtype, groups, generator):
    shapes = (2, 4, 5, 8), (2, groups, 6, 8), (2, groups, 6, 8)
    q, k, v = tensors(generator, *shapes, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 1, 5, 6, dtype=torch.bool)
    mask[0, :, 3] = False  # this query reads nothing
    mask[:, :, :, 2] = False  # nobody reads this key
    mask[1] = False  # and here nobody reads at all
    out = attention(q, k, v, mask=mask, backend=backend)
    out.float().square().sum().backward()
    assert out[0, :, 3].abs().max() == 0 and out[1].abs().max() == 0
    assert q.grad[0, :, 3].abs().max() == 0 and k.grad[:, :, 2].abs().max() == 0
    for x in (q, k, v):
        assert torch.isfinite(x.grad).all() and x.grad[1].abs().max() == 0
        assert x.grad[0].abs().max() > 0
    if backend == "eager":
        weights = attention_weights(q, k, mask=mask)
        expected = mask.any(-1).expand(2, 4, 5).to(dtype)
        torch.testing.assert_close(weights.sum(-1), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_of_minus_infinity_forbids(backend, generator):
    q, k, v = tensors(generator, (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), requires_grad=True)
    bias = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~causal_mask(4, 4), -torch.inf)
    bias[2] = -torch.inf
    out = attention(q, k, v, bias=bias, backend=backend)
    expected = oracle(q, k, v, mask=bias == 0)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias_dtype", TOLERANCE)
def test_bias_of_another_type(backend, dtype, bias_dtype, generator):
    """A bias of hundreds, as ALiBi has, keeps its own precision under bf16 queries."""
    q, k, v = tensors(generator, (1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8), dtype=dtype)
    bias = (500.5 + torch.randn(4, 9, 9, generator=generator)).to(bias_dtype).requires_grad_()
    out = attention(q, k, v, bias=bias, backend=backend)
    error = (out.double() - oracle(q, k, v, bias=bias)).abs().max()
    assert error <= max(TOLERANCE[dtype], 1e-4 if dtype == torch.float32 else 0)
    (gradient,) = torch.autograd.grad(out.float().sum(), bias)
    assert gradient.dtype == bias_dtype and gradient.shape == bias.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keys_and_no_queries(backend):
    q, k = torch.ones(1, 2, 3, 4, requires_grad=True), torch.ones(1, 2, 0, 4)
    out = attention(q, k, k, backend=backend)
    assert out.shape == (1, 2, 3, 4) and out.abs().max() == 0
    out = attention(k, q, q, backend=backend)
    assert out.shape == (1, 2, 0, 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_do_not_overflow(backend):
    q = torch.full((1, 1, 3, 4), 200.0, dtype=torch.float16)
    k = torch.tensor([200.0, -200.0, 100.0], dtype=torch.float16)[None, None, :, None]
    v = torch.eye(3, dtype=torch.float16)[None, None]
    out = attention(q, k.expand(1, 1, 3, 4), v, backend=backend)
    torch.testing.assert_close(out, v[:, :, :1].expand_as(out))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [(5, 5), (3, 6), (130, 140)])
def test_gradients(backend, lengths, generator):
    T, S = lengths
    shapes = (1, 4, T, 3), (1, 2, S, 3), (1, 2, S, 2)
    q, k, v = tensors(generator, *shapes, requires_grad=True)
    mask = (torch.rand(T, S, generator=generator) > 0.3).logical_and(torch.arange(T)[:, None] != 1)
    (bias,) = tensors(generator, (4, 1, S), requires_grad=True)

    def function(q, k, v, bias):
        return attention(q, k, v, mask=mask, bias=bias, is_causal=True, backend=backend)

    fast = T > 100
    assert torch.autograd.gradcheck(function, (q, k, v, bias), fast_mode=fast)


def test_gradients_agree_between_backends(generator):
    shapes = (2, 4, 260, 8), (2, 2, 260, 8), (2, 2, 260, 8)
    inputs = tensors(generator, *shapes, requires_grad=True)
    (bias,) = tensors(generator, (2, 1, 260, 1), requires_grad=True)
    (weight,) = tensors(generator, (2, 4, 260, 8))
    found = {}
    for backend in BACKENDS:
        out = attention(*inputs, bias=bias * 2, is_causal=True, backend=backend)
        found[backend] = torch.autograd.grad((out * weight).sum(), (*inputs, bias))
    for backend in ("sdpa", "tiled"):
        for ours, expected in zip(found[backend], found["eager"], strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_gradients(backend, generator):
    shapes = (1, 2, 40, 16), (1, 1, 40, 16), (1, 1, 40, 16)
    exact = tensors(generator, *shapes, dtype=torch.bfloat16, requires_grad=True)
    wide = [x.detach().double().requires_grad_() for x in exact]
    for inputs, name in ((exact, backend), (wide, "eager")):
        attention(*inputs, is_causal=True, backend=name).sum().backward()
    for ours, expected in zip(exact, wide, strict=True):
        assert ours.grad.dtype == torch.bfloat16
        error = (ours.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert error < 0.01


def test_autocast(generator):
    q, k, v = tensors(generator, *[(1, 2, 20, 8)] * 3, dtype=torch.float32, requires_grad=True)
    for backend in BACKENDS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attention(q, k, v, is_causal=True, backend=backend)
        torch.autograd.grad(out.float().sum(), (q, k, v))
        error = (out.double() - oracle(q, k, v, is_causal=True)).abs().max()
        assert error < 2**-5


# masks


def test_causal_mask():
    assert causal_mask(2, 5).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert torch.equal(causal_mask(4, 4), torch.ones(4, 4).tril().bool())
    with pytest.raises(ValueError, match="5 queries, 4 keys"):
        causal_mask(5, 4)


@given(
    st.integers(1, 3), st.integers(1, 6), st.integers(1, 8), st.none() | st.integers(1, 9),
    st.integers(0, 2**31), st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_build_mask_key_by_key(B, T, S, window, seed, query_rows, key_rows, padded):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randint(0, 10, (B, T) if query_rows else (T,), generator=generator)
    key = torch.randint(-1, 10, (B, S) if key_rows else (S,), generator=generator)
    valid = torch.rand(B, S, generator=generator) > 0.3 if padded else None
    mask = build_mask(query, key, key_valid=valid, window=window)
    assert mask.dtype == torch.bool
    assert mask.shape == ((B, 1, T, S) if query_rows or key_rows or padded else (T, S))
    for b, t, s in itertools.product(range(B), range(T), range(S)):
        i, j = query.expand(B, T)[b, t].item(), key.expand(B, S)[b, s].item()
        reads = 0 <= j <= i and (window is None or i - j < window)
        reads = reads and (valid is None or valid[b, s].item())
        assert mask.expand(B, 1, T, S)[b, 0, t, s].item() == reads


def test_build_mask_of_a_plain_sequence_is_causal():
    assert torch.equal(build_mask(torch.arange(3, 7), torch.arange(7)), causal_mask(4, 7))


def test_build_mask_agrees_with_transformers_sliding_window():
    masking = pytest.importorskip("transformers.masking_utils")
    overlay = masking.sliding_window_overlay(3)
    mask = build_mask(torch.arange(6), torch.arange(6), window=3)
    for t, s in itertools.product(range(6), range(6)):
        expected = bool(overlay(0, 0, torch.tensor(t), torch.tensor(s))) and s <= t
        assert mask[t, s].item() == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 0}, "window must be positive, got 0"),
        ({"key_valid": torch.ones(2, 4, dtype=torch.bool)}, r"\(2, 4\)"),
        ({"key_valid": torch.ones(5, dtype=torch.bool)}, r"\(5,\)"),
        ({"query_positions": torch.zeros(3, 2)}, r"\(3, 2\)"),
        ({"query_positions": torch.zeros(3, 2, 1)}, r"\(3, 2, 1\)"),
    ],
)
def test_build_mask_errors(options, message):
    given = {"query_positions": torch.arange(2), "key_positions": torch.zeros(2, 5), **options}
    with pytest.raises(ValueError, match=message):
        build_mask(given.pop("query_positions"), given.pop("key_positions"), **given)


# softmax


@given(st.integers(0, 2**31), st.integers(1, 40), st.floats(0.1, 300))
def test_softmax_agrees_with_torch(seed, size, spread):
    x = scattered(seed, size, spread)
    expected = torch.softmax(x, -1)
    torch.testing.assert_close(softmax(x, -1), expected, atol=1e-14, rtol=1e-12)
    torch.testing.assert_close(softmax(x.mT, 0), expected.mT, atol=1e-14, rtol=1e-12)


def test_softmax_edges():
    check_softmax_edges(lambda x: softmax(x, -1))


def test_softmax_of_nothing():
    assert softmax(torch.empty(2, 0), -1).shape == (2, 0)
    assert softmax(torch.empty(0, 3), -1).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_formula_rounds_half_precision_once_at_the_end(dtype, generator):
    q, k, v = tensors(generator, (2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8), dtype=dtype)
    exact = attention(q.float(), k.float(), v.float(), is_causal=True, backend="eager")
    rounded = attention(q, k, v, is_causal=True, backend="eager")
    assert torch.equal(rounded, exact.to(dtype))


def test_repeat_kv():
    x = torch.arange(2)[None, :, None, None].expand(1, 2, 3, 4)
    assert repeat_kv(x, 3)[0, :, 0, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert repeat_kv(x, 1) is x
    with pytest.raises(ValueError, match="got 0"):
        repeat_kv(x, 0)


# weights, dropout, errors


def test_weights_times_values_are_the_output(generator):
    q, k, v = tensors(generator, (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    options = {"is_causal": True, "scale": 0.2, "bias": torch.randn(5, 7, generator=generator)}
    options["mask"] = torch.rand(2, 1, 5, 7, generator=generator) > 0.3
    weights = attention_weights(q, k, **options)
    assert weights.shape == (2, 4, 5, 7)
    expected = attention(q, k, v, **options)
    torch.testing.assert_close(weights @ repeat_kv(v, 2), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_dropout_keeps_the_mean(backend):
    torch.manual_seed(0)
    q, k, v = torch.zeros(1, 1, 400, 4), torch.zeros(1, 1, 400, 4), torch.ones(1, 1, 400, 1)
    out = attention(q, k, v, dropout_p=0.25, backend=backend)
    assert abs(out.mean() - 1) < 4 * math.sqrt(0.25 / 0.75 / 400 / 400)
    assert out.std() > 0.01


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": (1, 3, 5, 8), "v": (1, 3, 5, 8)}, r"k \(1, 3, 5, 8\)"),
        ({"k": (2, 2, 5, 8), "v": (2, 2, 5, 8)}, r"k \(2, 2, 5, 8\)"),
        ({"k": (1, 2, 5, 6)}, r"k \(1, 2, 5, 6\)"),
        ({"v": (1, 2, 6, 8)}, r"v \(1, 2, 6, 8\)"),
        ({"q": (4, 4, 8)}, r"q \(4, 4, 8\)"),
        ({"k": (1, 2, 3, 8), "v": (1, 2, 3, 8)}, "4 queries, 3 keys"),
        ({"mask": torch.ones(4, 5)}, "torch.float32"),
        ({"mask": torch.ones(5, 4, dtype=torch.bool)}, r"mask \(5, 4\)"),
        ({"bias": torch.ones(3, 4, 5)}, r"bias \(3, 4, 5\)"),
        ({"bias": torch.ones(4, 5, dtype=torch.long)}, "torch.int64"),
        ({"k": (1, 0, 5, 8), "v": (1, 0, 5, 8)}, r"k \(1, 0, 5, 8\)"),
        ({"dropout_p": 1.0}, "dropout_p must be"),
        ({"backend": "flash"}, "'flash'"),
    ],
)
def test_errors(backend, change, message):
    given = {"q": (1, 4, 4, 8), "k": (1, 2, 5, 8), "v": (1, 2, 5, 8), "is_causal": True}
    given = {"backend": backend, **given, **change}
    q, k, v = (torch.zeros(given.pop(name)) for name in "qkv")
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, **given)


def test_more_errors():
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match=r"torch.float32, torch.float64"):
        attention(q, q.double(), q.double())
    with pytest.raises(ValueError, match=r"one float dtype, got torch.int64"):
        attention(q.long(), q.long(), q.long())
    with pytest.raises(ValueError, match="the tiled backend has no dropout"):
        attention(q, q, q, dropout_p=0.5, backend="tiled")


def test_more_queries_than_keys_may_cross(generator):
    q, k, v = tensors(generator, (1, 2, 7, 4), (1, 2, 3, 4), (1, 2, 3, 4))
    for backend in BACKENDS:
        out = attention(q, k, v, backend=backend)
        torch.testing.assert_close(out, oracle(q, k, v), atol=1e-12, rtol=0)


# what PyTorch is asked for


class Asked:
    """Stands in for PyTorch's function and notes what it was given."""

    def __init__(self, monkeypatch):
        self.real = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", self)

    def __call__(self, q, k, v, **options):
        self.options = options
        return self.real(q, k, v, **options)


def test_no_mask_is_passed_when_none_is_needed(monkeypatch):
    asked = Asked(monkeypatch)
    k = torch.zeros(1, 2, 6, 8)
    for T, is_causal, passed in [(6, True, True), (6, False, False), (1, True, False)]:
        attention(torch.zeros(1, 4, T, 8), k, k, is_causal=is_causal)
        assert asked.options["attn_mask"] is None and asked.options["is_causal"] is passed
    attention(torch.zeros(1, 4, 3, 8), k, k, is_causal=True)
    assert torch.equal(asked.options["attn_mask"], causal_mask(3, 6)[None, None].squeeze(0, 1))
    assert not asked.options["is_causal"]


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_kernels_of_the_cpu_agree(backend, generator):
    q, k, v = tensors(generator, (2, 4, 33, 16), (2, 2, 33, 16), (2, 2, 33, 16))
    with sdpa_kernel(backend):
        out = attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, oracle(q, k, v, is_causal=True), atol=1e-12, rtol=0)


def test_compiled_without_a_graph_break(generator):
    """The plan is traced with the `eager` compiler, which needs none."""
    q, k, v = tensors(generator, (1, 4, 6, 8), (1, 2, 9, 8), (1, 2, 9, 8))
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    out = compiled(q, k, v, is_causal=True)
    torch.testing.assert_close(out, oracle(q, k, v, is_causal=True), atol=1e-12, rtol=0)


def flex_arguments(generator, device="cpu"):
    """Queries at the end of longer keys, heads in groups, and a window, as tensors and function."""
    from torch.nn.attention.flex_attention import create_block_mask

    T, S, window = 40, 130, 16

    def mask_mod(b, h, query, key):
        distance = query + (S - T) - key
        return (distance >= 0) & (distance < window)

    shapes = (1, 4, T, 16), (1, 2, S, 16), (1, 2, S, 16)
    q, k, v = (x.to(device) for x in tensors(generator, *shapes, dtype=torch.float32))
    mask = build_mask(torch.arange(S - T, S), torch.arange(S), window=window).to(device)
    return (q, k, v), mask, create_block_mask(mask_mod, None, None, T, S, device=device)


@pytest.mark.filterwarnings("ignore")
def test_flex_attention_with_the_same_mask(generator):
    from torch.nn.attention.flex_attention import flex_attention

    (q, k, v), mask, block_mask = flex_arguments(generator)
    flexible = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    torch.testing.assert_close(flexible, attention(q, k, v, mask=mask), atol=1e-6, rtol=1e-6)


@pytest.mark.gpu
def test_compiled_flex_attention_with_the_same_mask(generator):
    from torch.nn.attention.flex_attention import flex_attention

    (q, k, v), mask, block_mask = flex_arguments(generator, "cuda")
    flexible = torch.compile(flex_attention)(q, k, v, block_mask=block_mask, enable_gqa=True)
    expected = attention(q, k, v, mask=mask)
    torch.testing.assert_close(flexible, expected, atol=2e-3, rtol=2e-3)


def kernels(function):
    """Names of the operators and kernels that ran."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for _ in range(2):  # the first profile of a process may miss what ran
        with torch.profiler.profile(activities=activities) as profile:
            function()
            torch.cuda.synchronize()
    return " ".join(event.key for event in profile.key_averages())


@pytest.mark.gpu
@pytest.mark.parametrize("T, S", [(256, 256), (1, 256)])
@pytest.mark.parametrize("groups", [8, 2])
def test_flash_kernels_run_on_a_gpu(T, S, groups):
    q = torch.randn(2, 8, T, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, groups, S, 64, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # an error if flash cannot take it
        expected = attention(q, k, v, is_causal=True)
    names = kernels(lambda: attention(q, k, v, is_causal=True))
    assert "flash_attention" in names or "cudnn_attention" in names, names
    wanted = oracle(q.cpu(), k.cpu(), v.cpu(), is_causal=True)
    error = (expected.cpu().double() - wanted).abs() / wanted.abs().clamp(min=1)
    assert error.max() < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [8, 2])
def test_masked_attention_on_a_gpu_avoids_the_plain_formula(groups):
    q = torch.randn(2, 8, 128, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, groups, 192, 64, device="cuda", dtype=torch.bfloat16)
    mask = torch.rand(2, 1, 128, 192, device="cuda") > 0.3
    names = kernels(lambda: attention(q, k, v, mask=mask))
    assert "efficient_attention" in names or "cudnn_attention" in names, names


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [4, 2])
def test_backends_agree_on_a_gpu_fully_masked_rows_included(dtype, groups):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 65, 32), (2, groups, 80, 32), (2, groups, 80, 32)
    inputs = tensors(generator, *shapes, dtype=dtype)
    mask = make_mask("empty_rows", 2, 4, 65, 80, generator)
    expected = oracle(*inputs, mask=mask)
    for backend in BACKENDS:
        q, k, v = (x.detach().cuda().requires_grad_() for x in inputs)
        out = attention(q, k, v, mask=mask.cuda(), backend=backend)
        out.float().sum().backward()
        assert (out.cpu().double() - expected).abs().max() < max(TOLERANCE[dtype], 1e-5)
        assert q.grad[0, :, 65 // 2].abs().max() == 0
        assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


# on another device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_device_nothing_is_asked_and_nothing_left_behind(backend, dtype):
    """Masks, biases, shared heads, one query or many, values of any width, there and back."""
    E = 8 if dtype == torch.float32 else 5
    kinds = itertools.product(
        [(1, 9), (7, 7), (4, 9)],
        [(4, 4), (4, 2)],
        ["none", "full"],
        ["none", "keys"],
        [False, True],
    )
    longer = ((130, 200), (2, 1), "keys", "heads", True)
    for (T, S), (H, G), mask_kind, bias_kind, is_causal in [*kinds, longer]:
        q, k, v = (
            torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
            for shape in ((2, H, T, 8), (2, G, S, 8), (2, G, S, E))
        )
        generator = torch.Generator().manual_seed(0)
        mask = make_mask(mask_kind, 2, H, T, S, generator)
        bias = make_bias(bias_kind, H, T, S, generator, torch.float32)
        options = {"is_causal": is_causal, "mask": mask, "bias": bias}
        options = {n: x.to("meta") if torch.is_tensor(x) else x for n, x in options.items()}
        with MetaDevice():
            out = attention(q, k, v, backend=backend, **options)
            weights = attention_weights(q, k, **options)
            gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert out.shape == (2, H, T, E) and out.is_meta and out.dtype == dtype
        assert weights.shape == (2, H, T, S) and weights.is_meta and weights.dtype == dtype
        assert all(g.is_meta and g.dtype == dtype for g in gradients)


def test_masks_on_a_device():
    places = torch.arange(6, device="meta")
    with MetaDevice():
        assert causal_mask(2, 6, device="meta").is_meta
        valid = torch.empty(3, 6, dtype=torch.bool, device="meta")
        assert build_mask(places, places, window=3).is_meta
        assert build_mask(places[None], places, key_valid=valid).shape == (3, 1, 6, 6)


def test_the_stand_in_for_a_device_refuses():
    with pytest.raises(TypeError, match="no float64"), MetaDevice():
        torch.ones(2, device="meta").double()
    with pytest.raises(TypeError, match=r"\[\(1,\)\] were left on the CPU"), MetaDevice():
        torch.ones(2, device="meta")[torch.tensor([0])]
    with pytest.raises(RuntimeError, match="item"), MetaDevice():
        int(torch.ones(2, device="meta").sum())
