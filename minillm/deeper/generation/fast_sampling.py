"""Sampling from a large vocabulary: top-p without sorting it, draws without adding it up.

Explained in notebooks/deeper/09_fast_sampling.ipynb.
"""

# Built from notebooks/deeper/09_fast_sampling.ipynb: edit there, then make build.

import math

import torch
from torch import Tensor

from minillm.support.checks.sampling import finite_maximum
from minillm.support.device import to_float64

__all__ = ["bucket_top_p", "draw_exponential", "draw_gumbel"]


def _bucket(x: Tensor) -> Tensor:
    """Which of 16,384 buckets, by distance from the best logit of a row; 0 holds the best."""
    return ((finite_maximum(x) - x) * 1024).clamp(max=16_383).long()


def bucket_top_p(logits: Tensor, p: float) -> Tensor:
    """The tokens of `top_p`, in float64; only the bucket in which p is crossed is sorted.

    Shape: (B, V) -> (B, V).
    Raises: ValueError for a row without a finite maximum.
    """
    x = to_float64(logits)
    bucket, probabilities = _bucket(x), x.softmax(-1)
    mass = x.new_zeros(len(x), 16_384).scatter_add_(-1, bucket, probabilities)
    above = mass.cumsum(-1) - mass
    crossed = (above < p).sum(-1, keepdim=True) - 1
    keep, inside = bucket < crossed, bucket == crossed
    for row, place in enumerate(crossed[:, 0].tolist()):
        ids = inside[row].nonzero()[:, 0]
        ids = ids[x[row, ids].argsort(descending=True)]
        shares = probabilities[row, ids]
        keep[row, ids] = above[row, place] + shares.cumsum(0) - shares < p
    return logits.masked_fill(~keep.to(logits.device), -math.inf)


def draw_exponential(probabilities: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """A race of exponential clocks: argmax of p / E with E ~ Exp(1). Shape: (B, V) -> (B,)."""
    clocks = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / clocks.clamp(min=torch.finfo(clocks.dtype).tiny)).argmax(-1)


def draw_gumbel(logits: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Argmax of logits + Gumbel noise. Shape: (B, V) -> (B,)."""
    clocks = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - clocks.clamp(min=torch.finfo(clocks.dtype).tiny).log()).argmax(-1)
