"""The loss and its gradient: torch as oracle."""

import math
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from training_runs import V

from minillm.training import cross_entropy


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
    assert float(nothing) == 0 and nothing.isfinite()
    assert float(cross_entropy(logits, torch.full((3,), -100), reduction="sum")) == 0
    assert cross_entropy(logits, targets.int()) == cross_entropy(logits, targets)


def test_cross_entropy_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"\(2, 23\) do not fit targets \(3,\)"):
        cross_entropy(torch.zeros(2, V), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"targets 0\.\.23 outside the vocabulary of 23"):
        cross_entropy(torch.zeros(2, V), torch.tensor([0, V]))
    with pytest.raises(ValueError, match=r"-1\.\.4"):
        cross_entropy(torch.zeros(2, V), torch.tensor([-1, 4]))


def test_the_rare_losses_are_looked_up_when_they_come():
    code = """
        import sys
        import torch
        from minillm.training import cross_entropy

        rare = {"minillm.deeper.training.expected_loss", "minillm.deeper.training.half_precision"}
        logits = torch.zeros(2, 3)
        cross_entropy(logits, torch.tensor([1, 2]))
        assert not rare & sys.modules.keys()
        cross_entropy(logits.bfloat16(), torch.tensor([1, 2]))
        cross_entropy(logits, logits.softmax(-1))
        assert rare <= sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
