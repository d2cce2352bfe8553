"""Flash: softmax in one pass, memory of tiles, and the products that train in bfloat16 on a CPU.

That tiles give the same numbers and gradients as the other backends is shown in test_attention.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_cases import PeakMemory, check_softmax_edges, oracle, scattered, tensors
from hypothesis import given
from hypothesis import strategies as st
from meta_device import MetaDevice

from minillm.attention import attention
from minillm.deeper.attention.flash import online_softmax


@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 45), st.floats(0.1, 300))
def test_online_softmax_agrees_with_torch(seed, size, block_size, spread):
    x = scattered(seed, size, spread)
    expected = torch.softmax(x, -1)
    ours = online_softmax(x, block_size=block_size)
    torch.testing.assert_close(ours, expected, atol=1e-14, rtol=1e-12)


def test_online_softmax_edges():
    check_softmax_edges(online_softmax)


def test_online_softmax_errors():
    with pytest.raises(ValueError, match="got 0"):
        online_softmax(torch.zeros(2), block_size=0)


def peaks(backend, T, generator):
    shapes = (1, 2, T, 16), (1, 1, T, 16), (1, 1, T, 16)
    q, k, v = tensors(generator, *shapes, dtype=torch.float32, requires_grad=True)
    with PeakMemory() as forward:
        out = attention(q, k, v, is_causal=True, backend=backend)
    with PeakMemory() as backward:
        out.sum().backward()
    return forward, backward


def test_tiled_memory_grows_linearly_and_never_holds_the_square(generator):
    small, large = peaks("tiled", 1024, generator), peaks("tiled", 2048, generator)
    for a, b in zip(small, large, strict=True):
        assert b.peak < 2.05 * a.peak
        assert b.largest <= 2 * 2048 * 16 * 4  # the output or a gradient, no (T, S)
    for a, b in zip(peaks("eager", 512, generator), peaks("eager", 1024, generator), strict=True):
        assert b.peak > 3.5 * a.peak and b.largest >= 2 * 1024 * 1024 * 4  # the check can fail


# bfloat16 on a CPU: two products instead of flash while training


@pytest.fixture
def no_flash(monkeypatch):
    """A processor that multiplies bfloat16, whatever this one is, and no kernel of PyTorch's."""

    def refuse(*args, **options):
        raise AssertionError("PyTorch's kernel was asked")

    monkeypatch.setattr("minillm.deeper.attention.fused._MULTIPLIES_BFLOAT16", True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("lengths", [(1, 1), (40, 40), (9, 40), (512, 512)])
def test_products_in_bfloat16(no_flash, is_causal, groups, lengths, generator):
    """Values and gradients, of heads in groups, narrow values and strided inputs."""
    T, S = lengths
    if is_causal and 1 < T < S:
        return
    shapes = (2, T, 4, 16), (2, S, groups, 16), (2, S, groups, 12), (2, 4, T, 12)
    *inputs, weight = tensors(generator, *shapes, dtype=torch.bfloat16)
    exact = [x.transpose(1, 2).requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in exact]
    options = {"is_causal": is_causal, "scale": 0.3}
    found = []
    for inputs, backend in ((exact, "sdpa"), (wide, "eager")):
        out = attention(*inputs, backend=backend, **options)
        assert out.dtype == inputs[0].dtype
        found.append((out, *torch.autograd.grad(out, inputs, weight.to(out.dtype))))
    for ours, expected in zip(*found, strict=True):
        assert ours.shape == expected.shape
        error = (ours.double() - expected).norm() / expected.norm().clamp(min=1e-3)
        assert error < 2**-7, error


def test_products_of_no_keys_and_a_single_wanted_gradient(no_flash, generator):
    q, k, v = tensors(generator, (1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8), dtype=torch.bfloat16)
    empty = attention(q, k[:, :, :0].requires_grad_(), v[:, :, :0])
    assert empty.shape == q.shape and empty.abs().max() == 0
    for wanted in (q, k, v):
        wanted.requires_grad_()
        (gradient,) = torch.autograd.grad(attention(q, k, v, is_causal=True).sum(), wanted)
        assert gradient.shape == wanted.shape and torch.isfinite(gradient).all()
        wanted.requires_grad_(False)


def test_products_can_be_derived_twice(no_flash, generator):
    """Flash cannot; the second derivative agrees with the formula's in float64."""
    exact = tensors(generator, *[(1, 2, 12, 8)] * 3, dtype=torch.bfloat16, requires_grad=True)
    wide = [x.detach().double().requires_grad_() for x in exact]
    found = []
    for inputs, backend in ((exact, "sdpa"), (wide, "eager")):
        out = attention(*inputs, is_causal=True, backend=backend).square().sum()
        (first,) = torch.autograd.grad(out, inputs[0], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), inputs))
    for ours, expected in zip(*found, strict=True):
        assert (ours.double() - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_under_autocast(no_flash, dtype, generator):
    """What projections give under autocast is bfloat16, and softmax must not widen it again."""
    x, weight = tensors(generator, (2, 30, 32), (32, 96), dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), PeakMemory() as memory:
        q, k, v = (x @ weight / 32**0.5).view(2, 30, 3, 4, 8).permute(2, 0, 3, 1, 4)
        out = attention(q, k, v, is_causal=True)
    assert out.dtype == torch.bfloat16
    assert memory.largest == 2 * 4 * 30 * 30 * 2  # the weights in two bytes each
    error = (out.double() - oracle(q, k, v, is_causal=True)).abs().max()
    assert error < 2**-6


def test_products_compiled_without_a_graph_break(no_flash, generator):
    inputs = tensors(generator, *[(1, 2, 20, 8)] * 3, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*inputs, is_causal=True), attention(*inputs, is_causal=True))


NEARLY = {
    "a mask": {"mask": torch.ones(8, 8, dtype=torch.bool)},
    "a bias": {"bias": torch.zeros(8, 8)},
    "dropout": {"dropout_p": 0.1},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "more keys than queries": {"S": 9},
    "long rows": {"T": 513, "S": 513},
    "nothing to train": {"requires_grad": False},
}


@pytest.mark.parametrize("case", NEARLY)
def test_all_else_is_left_to_pytorch(case, no_flash, generator):
    given = {"T": 8, "S": 8, "dtype": torch.bfloat16, "requires_grad": True} | NEARLY[case]
    T, S, dtype, requires_grad = (given.pop(n) for n in ("T", "S", "dtype", "requires_grad"))
    inputs = tensors(
        generator, (1, 2, T, 8), *[(1, 2, S, 8)] * 2, dtype=dtype, requires_grad=requires_grad
    )
    with pytest.raises(AssertionError, match="PyTorch's kernel was asked"):
        attention(*inputs, is_causal=True, **given)


def test_products_only_where_the_processor_multiplies_bfloat16(no_flash, monkeypatch, generator):
    inputs = tensors(generator, *[(1, 2, 8, 8)] * 3, dtype=torch.bfloat16, requires_grad=True)
    attention(*inputs, is_causal=True)
    with torch.no_grad(), pytest.raises(AssertionError):
        attention(*inputs, is_causal=True)
    monkeypatch.setattr("minillm.deeper.attention.fused._MULTIPLIES_BFLOAT16", False)
    with pytest.raises(AssertionError):
        attention(*inputs, is_causal=True)


def test_online_softmax_on_a_device():
    with MetaDevice():
        assert online_softmax(torch.empty(2, 9, device="meta").half(), block_size=4).is_meta
