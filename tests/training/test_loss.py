"""The loss and its gradient: torch as oracle; accumulation is exact."""

import math

import pytest
import torch
import torch.nn.functional as F
from training_runs import V, tiny

from minillm.training.loss import accumulate_gradients, cross_entropy


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_is_torchs_in_value_and_gradient(dtype, reduction, generator):
    logits = (10 * torch.randn(4, 5, V, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(V, (4, 5), generator=generator)
    targets[0, 2:] = -100
    ours = cross_entropy(logits, targets, reduction=reduction)
    (gradient,) = torch.autograd.grad(ours, logits)
    wide = logits.detach().double().requires_grad_()
    theirs = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction=reduction)
    (expected,) = torch.autograd.grad(theirs, wide)
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6)
    rounding = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    torch.testing.assert_close(gradient.double(), expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_half_precision_logits_are_taken_in_slices(dtype, generator):
    logits = (3 * torch.randn(30_000, V, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(V, (30_000,), generator=generator)
    targets[::7] = -100
    (2 * cross_entropy(logits, targets)).backward()
    wide = logits.detach().float().requires_grad_()
    (2 * F.cross_entropy(wide, targets)).backward()
    expected = cross_entropy(wide, targets)
    torch.testing.assert_close(cross_entropy(logits, targets), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.grad.float(), wide.grad, rtol=1e-2, atol=1e-7)
    assert (logits.grad[::7] == 0).all()


def test_cross_entropy_honours_ignore_index_and_an_empty_batch():
    logits, targets = torch.zeros(3, V), torch.tensor([1, 2, 2])
    assert float(cross_entropy(logits, targets, ignore_index=2)) == pytest.approx(math.log(V))
    nothing = cross_entropy(logits, torch.full((3,), -100))
    assert float(nothing) == 0
    assert cross_entropy(logits, targets.int()) == cross_entropy(logits, targets)


def test_cross_entropy_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"\(2, 23\) do not fit targets \(3,\)"):
        cross_entropy(torch.zeros(2, V), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"targets 0\.\.23 outside the vocabulary of 23"):
        cross_entropy(torch.zeros(2, V), torch.tensor([0, V]))
    with pytest.raises(ValueError, match=r"-1\.\.4"):
        cross_entropy(torch.zeros(2, V), torch.tensor([-1, 4]))


def test_accumulated_gradients_equal_the_big_batch_with_unequal_counts(generator):
    model = tiny(dropout=0.0).double()
    x = torch.randint(V, (6, 10), generator=generator)
    y = torch.randint(V, (6, 10), generator=generator)
    y[0, 1:] = -100  # 1, 10 x 4 and 2 targets
    y[5, 2:] = -100
    count = int((y != -100).sum())

    def gradients(batches):
        model.zero_grad()
        total = accumulate_gradients(model, batches, count)
        return total, [p.grad.clone() for p in model.parameters()]

    whole, expected = gradients([(x, y)])
    for cuts in ([1, 5], [2, 2, 2], [1] * 6):
        total, found = gradients(list(zip(x.split(cuts), y.split(cuts), strict=True)))
        torch.testing.assert_close(total, whole)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    model.zero_grad()
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    for p, b in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, b, rtol=1e-12, atol=1e-14)
