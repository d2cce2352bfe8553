"""Choosing the next token: penalties, temperature, top-k, top-p, min-p, and the draw.

The logits processors are pure functions (B, V) -> (B, V) in which a forbidden token has the logit
-inf; `Sampler` chains them and draws, and its rows do not disturb each other. Notebook 09.
"""

# Built from notebooks/09_sampling.ipynb: edit there, then make build.

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import Any

import torch
from torch import Tensor

from minillm.support.checks.sampling import (
    check_logits,
    check_previous_ids,
    check_range,
    check_rows,
    check_sampler,
    check_seeds,
    finite_maximum,
)
from minillm.support.checks.words import our_words
from minillm.support.device import to_float64

__all__ = [
    "GREEDY",
    "Sampler",
    "draw",
    "end_ids",
    "enforce_min_new_tokens",
    "min_p",
    "penalties",
    "row_seed",
    "temperature",
    "top_k",
    "top_p",
    "trim",
]


def temperature(logits: Tensor, t: float) -> Tensor:
    """Sharpen (t < 1) or flatten (t > 1) a distribution; t = 1 leaves it. Shape: (B, V) -> (B, V).

    Raises: ValueError unless t > 0 (for the limit t -> 0 take the argmax, as `Sampler` does).
    """
    check_range("temperature", t)
    return logits / t


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k largest logits, exactly k also when there are ties. Shape: (B, V) -> (B, V).

    Raises: ValueError unless k >= 1.
    """
    check_range("top_k", k)
    best, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return torch.full_like(logits, -math.inf).scatter(-1, ids, best)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches p; the one that crosses p
    is kept (nucleus sampling). Shape: (B, V) -> (B, V).

    Raises: ValueError unless 0 < p <= 1.
    Source: Holtzman et al. 2020, section 3.1.
    """
    check_range("top_p", p)
    if p == 1:
        return logits
    if logits.device.type == "cpu" and logits.shape[-1] >= 5000:  # too many to sort them there
        from minillm.deeper.generation.fast_sampling import bucket_top_p

        return bucket_top_p(logits, p)
    best, ids = logits.sort(descending=True, dim=-1)
    shares = to_float64(best).softmax(-1)  # a tail's shares are lost in a sum in float32
    before = shares.cumsum(-1) - shares  # what the tokens before it have together
    keep = torch.zeros_like(ids, dtype=torch.bool).scatter(-1, ids, (before < p).to(ids.device))
    return logits.masked_fill(~keep, -math.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as probable as the best one. Shape: (B, V) -> (B, V).

    Raises: ValueError unless 0 <= p <= 1.
    Source: Nguyen et al. 2024, "Turning up the heat: min-p sampling".
    """
    check_range("min_p", p)
    if p == 0:
        return logits
    floor = logits.amax(-1, keepdim=True) + math.log(p)
    return logits.masked_fill(logits < floor, -math.inf)


def penalties(
    logits: Tensor,
    previous_ids: Tensor,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Tensor:
    """Of tokens that occurred, divide positive logits by `repetition` and multiply negative ones,
    then subtract `presence` once and `frequency` for each time.

    Shape: logits (B, V), previous_ids (B, T) with -1 for "no token" -> (B, V).
    Raises: ValueError unless repetition > 0, or if shapes or ids do not fit.
    Source: Keskar et al. 2019 (CTRL), section 4.1; for negative logits as Hugging Face does.
    """
    check_range("repetition_penalty", repetition)
    if repetition == 1 and not (presence or frequency):
        return logits
    check_previous_ids(previous_ids, logits)
    counts = torch.zeros_like(logits, dtype=torch.float32)  # (B, V): how often each occurred
    counts.scatter_add_(-1, previous_ids.clamp(min=0), (previous_ids >= 0).float())
    x = torch.where(logits < 0, logits * repetition, logits / repetition)
    x, counts = torch.where(counts > 0, x, logits), counts.to(logits.dtype)
    if presence or frequency:
        x = x - presence * counts.clamp(max=1) - frequency * counts
    return x


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token at which the sum of probabilities exceeds the row's number in `uniform`.

    Shape: probabilities (B, V), uniform (B,) in [0, 1) -> ids (B,).
    """
    cumulative = to_float64(probabilities).cumsum(-1)
    target = uniform.to(cumulative.device, torch.float64)[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True)[:, 0].to(probabilities.device)
    # Rounding must not carry us beyond the last possible token.
    last = (probabilities > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(ids, last)


_Rows = Sequence[int] | None  # which rows of a batch the logits belong to; None: all


def row_seed(seed: int | Sequence[int], row: int) -> int:
    """The seed of a row's own random numbers: `seed[row]`, or of a single `seed` one far away."""
    if isinstance(seed, int | Integral):
        return int(seed) + 1_000_003 * row  # so that near seeds share no row
    check_seeds(seed, row)
    return int(seed[row])


def trim(logits: Tensor, k: int | None, p: float | None, m: float | None) -> Tensor:
    """Top-k, then top-p, then min-p, those that are not None. Shape: (B, V) -> (B, V)."""
    kept, places = logits, None
    if k is not None and k < logits.shape[-1]:
        kept, places = logits.topk(k, dim=-1)  # the other cuts need to look at these only
    kept = kept if p is None else top_p(kept, p)
    kept = kept if m is None else min_p(kept, m)
    return kept if places is None else torch.full_like(logits, -math.inf).scatter(-1, places, kept)


@our_words
@dataclass
class Sampler:
    """Chooses one token a row from logits: penalties, temperature, top-k, top-p, min-p, draw.

    `temperature=0` is greedy. `steps` are functions of your own, (logits, previous_ids) -> logits.
    Raises: ValueError for settings out of range, and for logits from which nothing can be drawn.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | Sequence[int] | None = None  # None: all rows draw from torch's generator
    steps: Sequence[Callable[[Tensor, Tensor], Tensor]] = ()

    def __post_init__(self) -> None:
        check_sampler(self)
        self.reset()

    def reset(self) -> None:
        """Start every row's stream anew."""
        self._streams: dict[int, torch.Generator] = {}

    def stream(self, row: int) -> torch.Generator | None:
        """What row `row` draws with; without a seed None, torch's own."""
        if self.seed is not None and row not in self._streams:
            self._streams[row] = torch.Generator().manual_seed(row_seed(self.seed, row))
        return self._streams.get(row)

    def process(self, logits: Tensor, previous_ids: Tensor | None = None) -> Tensor:
        """Processed logits in float32, -inf where a token is out. Shape: (B, V) -> (B, V)."""
        check_logits(logits)
        ids = logits.new_empty(len(logits), 0).long() if previous_ids is None else previous_ids
        factors = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        x = penalties(logits.float(), ids, *factors)
        for step in self.steps:
            x = step(x, ids)
            check_logits(x, like=logits, made_by=step)
        if self.temperature == 0:  # no cut removes the best token
            return x
        return trim(temperature(x, self.temperature), self.top_k, self.top_p, self.min_p)

    def probabilities(self, logits: Tensor, previous_ids: Tensor | None = None) -> Tensor:
        """The distribution drawn from. Shape: (B, V) -> (B, V), rows sum to 1."""
        x = self.process(logits, previous_ids)
        finite_maximum(x)  # here it sees what was wrong from the start and what has overflowed
        if self.temperature == 0:  # the best token has it all
            return torch.zeros_like(x).scatter(-1, x.argmax(-1, keepdim=True), 1.0)
        return x.softmax(-1)

    def __call__(
        self, logits: Tensor, previous_ids: Tensor | None = None, *, rows: _Rows = None
    ) -> Tensor:
        """Shape: logits (B, V), previous_ids (B, T), B numbers in `rows` -> ids (B,)."""
        p = self.probabilities(logits, previous_ids)
        rows = range(len(p)) if rows is None else rows
        check_rows(rows, len(p))
        if self.temperature == 0:  # no random number is used up
            return p.argmax(-1)
        numbers = [torch.rand(1, generator=self.stream(r), dtype=torch.float64) for r in rows]
        return draw(p, torch.cat(numbers))


GREEDY = Sampler(temperature=0.0)


def end_ids(eos_token_id: int | Iterable[int] | None) -> tuple[int, ...]:
    """The tokens that end a text; a config or a caller names none, one or several, or a tensor."""
    if eos_token_id is None:
        return ()
    ids: Any = eos_token_id.tolist() if hasattr(eos_token_id, "tolist") else eos_token_id
    return tuple(map(index, [ids] if isinstance(ids, int | Integral) else ids))


def enforce_min_new_tokens(
    logits: Tensor, ends: Collection[int], num_new: int, minimum: int
) -> Tensor:
    """Forbid the end tokens while there are fewer new ones than `minimum`. (B, V) -> (B, V)."""
    if num_new >= minimum or not ends:
        return logits
    forbidden = torch.tensor(sorted(ends), device=logits.device)
    return logits.index_fill(-1, forbidden, -math.inf)
