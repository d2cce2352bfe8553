"""The imitated processor: products are off by little, repeatably, and nothing else is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from jitter import Jitter, aside

SIZE = 3e-7
x, w, b = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0)).split([2, 3, 1], 1)
PRODUCTS = {
    "mm": lambda: x[0] @ w[0].T,
    "bmm": lambda: x @ w.transpose(1, 2),
    "mv and dot": lambda: (x[0] @ b[0, 0]).sum() + w[0, 0] @ b[0, 0],
    "linear": lambda: F.linear(x, w[0], b[0, 0, :3]),
    "einsum": lambda: torch.einsum("btc,bsc->bts", x, w),
    "convolution": lambda: F.conv1d(x, w[:, :2, :3]),
    "attention": lambda: F.scaled_dot_product_attention(x[:, None], w[:, None], w[:, None]),
    "attention with a mask": lambda: F.scaled_dot_product_attention(
        *(x[:, None], w[:, None], w[:, None]), attn_mask=torch.ones(2, 3).bool()
    ),
    "oneDNN": lambda: F.linear(x[0].to_mkldnn(), w[0].to_mkldnn()).to_dense(),
    "float64": lambda: x[0].double() @ w[0].double().T,
}


@pytest.mark.parametrize("gradients", [True, False], ids=["train", "inference"])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_sums_of_products_are_off_by_a_little(kind, gradients):
    if kind == "oneDNN" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without it")
    with torch.inference_mode(not gradients):
        exact = PRODUCTS[kind]()
        with Jitter(SIZE):
            found = PRODUCTS[kind]()
    size = SIZE * (2**-29 if kind == "float64" else 1)  # as many roundings
    rounding = torch.finfo(found.dtype).eps
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=3 * size + rounding, atol=3 * rounding)


def test_a_product_repeats_itself_and_draws_and_shapes_differ():
    found = []
    for draw in (1, 1, 2, 3):
        with Jitter(SIZE, draw):
            found.append(w[0] @ w[1].T)
    assert torch.equal(found[0], found[1])
    assert len({tuple(f.flatten().tolist()) for f in found}) == 3
    with Jitter(SIZE):
        assert not torch.equal(w[0, :2] @ w[1].T, found[0][:2])


def test_gradients_are_off_too():
    leaves = [torch.ones(2, 3, 4, 8, requires_grad=True) for _ in range(3)]

    def gradients():
        torch.manual_seed(0)
        out = F.scaled_dot_product_attention(*(leaf * torch.randn(8) for leaf in leaves))
        return torch.autograd.grad(out, leaves, torch.randn(out.shape))

    exact = gradients()
    with Jitter(SIZE):
        found = gradients()
    for a, e in zip(found, exact, strict=True):
        assert not torch.equal(a, e)
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_what_is_exact_everywhere_stays(dtype):
    whole = torch.arange(-15, 15).reshape(5, 6).to(dtype)
    halves = whole / 2 if dtype.is_floating_point else whole
    exact = halves @ halves.T
    with Jitter(SIZE):
        assert torch.equal(halves @ halves.T, exact)


def test_nothing_else_is_touched():
    with Jitter(1.0):
        assert torch.equal(x * 3 + x.sin(), x * 3 + x.sin())
        torch.manual_seed(0)
        drawn = torch.randn(5)
    torch.manual_seed(0)
    assert torch.equal(torch.randn(5), drawn)


def test_pages_may_compile_inside():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    doubled = torch.compile(lambda x: x + x, backend=backend, fullgraph=True)
    with Jitter(SIZE):
        assert torch.equal(doubled(x), x + x)
    assert len(graphs) == 1


def test_a_program_is_exported_without_it_and_runs_with_it():
    layer = torch.nn.Linear(8, 6)
    exact = layer(x[0])
    with Jitter(SIZE):
        program = aside(torch.export.export)(layer, (x[0],)).module()
        found = program(x[0])
        assert not torch.equal(found, exact)
        torch.testing.assert_close(found, exact, rtol=3 * SIZE, atol=1e-6)
    assert torch.equal(program(x[0]), exact)


@pytest.mark.parametrize("size", ["", "1e-3"], ids=["without the variable", "with it"])
def test_the_variable_starts_it(size):
    code = "import jitter, torch; a = torch.full((3, 3), 0.1); b = a @ a; jitter.start()"
    code += "; print(torch.equal(a @ a, b))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "JITTER": size},
    )
    assert done.stdout.strip() == str(not size), done.stderr
