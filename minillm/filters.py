"""Filters on logits: temperature, top-k, top-p, min-p, three penalties, and their chain.

All are pure functions (B, V) -> (B, V) in which a forbidden token has the logit -inf.
Explained in notebooks/08_sampling.ipynb; `minillm.sampling` passes these names on.
"""

# Built from notebooks/08_sampling.ipynb: edit there, then make build.

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Filters",
    "frequency_penalty",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
]


def temperature(logits: Tensor, t: float) -> Tensor:
    """Sharpen (t < 1) or flatten (t > 1) a distribution; t = 1 leaves it.

    Shape: (B, V) -> (B, V).
    Raises: ValueError unless t > 0 (for the limit t -> 0 take the argmax, as `Sampler` does).
    """
    if not t > 0:
        raise ValueError(f"temperature must be > 0, got {t}")
    return logits / t


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k largest logits, exactly k also when there are ties.

    Shape: (B, V) -> (B, V).
    Raises: ValueError unless k >= 1.
    """
    if k < 1:
        raise ValueError(f"top_k must be >= 1, got {k}")
    best, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return _scatter(best, ids, logits)


def _scatter(values: Tensor, ids: Tensor, like: Tensor) -> Tensor:
    """Logits of the shape of `like` that are -inf except for `values` at `ids`."""
    return torch.full_like(like, -math.inf).scatter(-1, ids, values)


def _finite_maximum(logits: Tensor) -> Tensor:
    """The maximum of each row (B, 1); one NaN in a row makes it NaN, and that is an error."""
    top = logits.amax(-1, keepdim=True)
    if bool((top - top).any()):  # 0 for every finite number, NaN for all else
        raise ValueError("logits hold NaN or +inf, or a row has nothing but -inf")
    return top


def _bucket(x: Tensor) -> Tensor:
    """Which of 16,384 buckets, by distance from the best logit of a row; 0 holds the best."""
    return ((_finite_maximum(x) - x) * 1024).clamp(max=16_383).long()


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches p (nucleus sampling).

    The token that crosses p is kept. Instead of sorting the vocabulary, tokens are counted into
    16,384 buckets by logit; only the bucket in which p is crossed is sorted.

    Shape: (B, V) -> (B, V).
    Raises: ValueError unless 0 < p <= 1, and for a row without a finite maximum.
    Source: Holtzman et al. 2020, section 3.1.
    """
    if not 0 < p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {p}")
    if p == 1:
        return logits
    x = logits.float()
    bucket = _bucket(x)
    probabilities = x.softmax(-1)
    mass = x.new_zeros(len(x), 16_384).scatter_add_(-1, bucket, probabilities)
    above = mass.cumsum(-1) - mass
    crossed = (above < p).sum(-1, keepdim=True) - 1
    keep, inside = bucket < crossed, bucket == crossed
    size = int(inside.sum(-1).amax())
    best, ids = x.masked_fill(~inside, -math.inf).topk(size, dim=-1)
    shares = probabilities.gather(-1, ids).masked_fill(best == -math.inf, 0)
    before = above.gather(-1, crossed) + shares.cumsum(-1) - shares
    keep.scatter_(-1, ids, torch.where(best == -math.inf, keep.gather(-1, ids), before < p))
    return logits.masked_fill(~keep, -math.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as probable as the most probable one.

    Shape: (B, V) -> (B, V).
    Raises: ValueError unless 0 <= p <= 1.
    Source: Nguyen et al. 2024, "Turning up the heat: min-p sampling".
    """
    if not 0 <= p <= 1:
        raise ValueError(f"min_p must be in [0, 1], got {p}")
    if p == 0:
        return logits
    floor = logits.amax(-1, keepdim=True) + math.log(p)
    return logits.masked_fill(logits < floor, -math.inf)


def _counts(logits: Tensor, previous_ids: Tensor) -> Tensor:
    """How often each token occurs in `previous_ids` (B, T); negative ids count nothing.

    Raises: ValueError if the shapes do not fit, or for an id outside the vocabulary.
    """
    if previous_ids.ndim != 2 or previous_ids.shape[0] != logits.shape[0]:
        have, want = tuple(previous_ids.shape), tuple(logits.shape)
        raise ValueError(f"previous_ids {have} must be (B, T) for logits {want}")
    if previous_ids.numel() and (largest := int(previous_ids.amax())) >= logits.shape[-1]:
        raise ValueError(f"previous_ids hold {largest}, the vocabulary {logits.shape[-1]} tokens")
    real = previous_ids >= 0
    counts = torch.zeros_like(logits, dtype=torch.float32)
    return counts.scatter_add_(-1, previous_ids.clamp(min=0), real.float())


def repetition_penalty(logits: Tensor, previous_ids: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of tokens that occurred by `penalty`.

    Shape: logits (B, V), previous_ids (B, T) with -1 for "no token" -> (B, V).
    Raises: ValueError unless penalty > 0, or if the shapes do not fit.
    Source: Keskar et al. 2019 (CTRL), section 4.1; for negative logits as Hugging Face does.
    """
    if not penalty > 0:
        raise ValueError(f"repetition_penalty must be > 0, got {penalty}")
    seen = _counts(logits, previous_ids) > 0
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def presence_penalty(logits: Tensor, previous_ids: Tensor, penalty: float) -> Tensor:
    """Subtract `penalty` once from each token that occurred. Shapes as `repetition_penalty`."""
    return logits - penalty * (_counts(logits, previous_ids) > 0).to(logits.dtype)


def frequency_penalty(logits: Tensor, previous_ids: Tensor, penalty: float) -> Tensor:
    """Subtract `penalty` per occurrence of each token. Shapes as `repetition_penalty`."""
    return logits - penalty * _counts(logits, previous_ids).to(logits.dtype)


def _penalise(
    x: Tensor, previous_ids: Tensor, repetition: float, presence: float, frequency: float
) -> Tensor:
    """The three penalties, in this order; one that would change nothing is left out."""
    if repetition != 1:
        x = repetition_penalty(x, previous_ids, repetition)
    if presence:
        x = presence_penalty(x, previous_ids, presence)
    if frequency:
        x = frequency_penalty(x, previous_ids, frequency)
    return x


@dataclass
class Filters:
    """Penalties, temperature, top-k, top-p, min-p, in this order; temperature 0 keeps the best."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be > 0, got {self.repetition_penalty}")
        probe = torch.zeros(1, 2)
        for value, cut in ((self.top_k, top_k), (self.top_p, top_p), (self.min_p, min_p)):
            if value is not None:
                cut(probe, value)

    def process(self, logits: Tensor, previous_ids: Tensor | None = None) -> Tensor:
        """Filtered logits in float32, -inf where a token is out. Shape: (B, V) -> (B, V)."""
        x = self.penalise(logits, previous_ids)
        return top_k(x, 1) if self.temperature == 0 else self._cut(x)

    def penalise(self, logits: Tensor, previous_ids: Tensor | None = None) -> Tensor:
        """After penalties and temperature, in float32, checked. Shape: (B, V) -> (B, V)."""
        if logits.ndim != 2 or not logits.numel():
            raise ValueError(f"logits must be (B, V), not empty, got {tuple(logits.shape)}")
        x = logits.float()
        if previous_ids is not None:
            penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
            x = _penalise(x, previous_ids, *penalties)
        if self.temperature != 0:
            x = temperature(x, self.temperature)
        _finite_maximum(x)  # here it sees what was wrong from the start and what has overflowed
        return x

    def _cut(self, x: Tensor) -> Tensor:
        """Top-k, top-p and min-p; after top-k the others need to look at its k survivors only."""
        values, ids = x, None
        if self.top_k is not None and self.top_k < x.shape[-1]:
            values, ids = x.topk(self.top_k, dim=-1)
        if self.top_p is not None:
            values = top_p(values, self.top_p)
        if self.min_p is not None:
            values = min_p(values, self.min_p)
        return values if ids is None else _scatter(values, ids, x)

    def probabilities(self, logits: Tensor, previous_ids: Tensor | None = None) -> Tensor:
        """The distribution drawn from. Shape: (B, V) -> (B, V), rows sum to 1."""
        return self.process(logits, previous_ids).softmax(-1)
