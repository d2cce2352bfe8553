"""Optimizer, schedule and clipping: torch as oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from training_runs import Tiny

from minillm.training import AdamW, clip_grad_norm, cosine_schedule, decay_groups


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adamw_equals_torch(decay, generator):
    shapes = [(5, 7), (3,), ()]
    start = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    ours, theirs = ([nn.Parameter(p.clone()) for p in start] for _ in range(2))
    settings = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": decay}
    mine, reference = AdamW(ours, **settings), torch.optim.AdamW(theirs, **settings)
    for i in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            q.grad = p.grad.clone()
        if i == 7:  # a parameter without gradient stays where it is, its state too
            ours[1].grad = theirs[1].grad = None
        mine.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    mine.zero_grad()
    assert all(p.grad is None for p in ours)


def test_adamw_takes_groups_and_refuses_bad_settings():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = AdamW([{"params": [p], "weight_decay": 0.5}, {"params": [q]}], lr=0.1)
    p.grad, q.grad = torch.zeros(2), torch.zeros(2)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((2,), 0.95))
    torch.testing.assert_close(q.detach(), torch.full((2,), 0.999))
    with pytest.raises(ValueError, match="lr -1"):
        AdamW([p], lr=-1)
    with pytest.raises(ValueError, match="betas"):
        AdamW([p], betas=(1.0, 0.9))


def test_only_matrices_decay():
    groups = decay_groups(Tiny(), 0.1)
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert sorted(p.dim() for p in groups[0]["params"]) == [2, 2]  # tied weights once
    assert sorted(p.dim() for p in groups[1]["params"]) == [1, 1, 1]


def test_schedule_equals_torchs_schedulers():
    total, warmup, high, low = 50, 10, 2e-3, 1e-4
    ours = [cosine_schedule(i, high, low, warmup, total) for i in range(total + 5)]
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=high)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - warmup, eta_min=low)
    theirs = []
    for _ in range(total - warmup):
        theirs.append(cosine.get_last_lr()[0])
        optimizer.step()
        cosine.step()
    np.testing.assert_allclose(ours[warmup:total], theirs, rtol=1e-9)
    np.testing.assert_allclose(ours[:warmup], high * np.arange(1, warmup + 1) / warmup)
    assert ours[total:] == [low] * 5
    assert cosine_schedule(0, high, low, 0, 1) == high


@pytest.mark.parametrize(
    "arguments", [(0, 1.0, 0.1, 11, 10), (0, 0.1, 1.0, 1, 10), (-1, 1.0, 0.1, 1, 10)]
)
def test_schedule_refuses_values_out_of_order(arguments):
    with pytest.raises(ValueError, match="warm-up"):
        cosine_schedule(*arguments)


@given(scale=st.floats(1e-4, 1e4), max_norm=st.floats(1e-3, 1e3))
def test_clipping_equals_torch(scale, max_norm):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), ()]
    ours, theirs = ([nn.Parameter(torch.zeros(s)) for s in shapes] for _ in range(2))
    for p, q in zip(ours, theirs, strict=True):
        p.grad = scale * torch.randn(p.shape, generator=generator)
        q.grad = p.grad.clone()
    norm = clip_grad_norm(ours, max_norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, max_norm))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_clipping_needs_a_positive_norm_and_no_gradient_is_norm_0():
    assert float(clip_grad_norm([nn.Parameter(torch.ones(2))], 1.0)) == 0
    with pytest.raises(ValueError, match="not 0"):
        clip_grad_norm([], 0)
