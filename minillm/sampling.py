"""Choosing the next token: penalties, temperature, top-k, top-p, min-p, and the draw.

The logits processors are pure functions (B, V) -> (B, V) in which a forbidden token has the logit
-inf; `Sampler` chains them and draws, and its rows do not disturb each other. Notebook 09.
"""

# Built from notebooks/09_sampling.ipynb: edit there, then make build.

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from minillm.support.checks.kinds import check_number
from minillm.support.checks.sampling import (
    check_logits,
    check_previous_ids,
    check_rows,
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
    "frequency_penalty",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
]


def temperature(logits: Tensor, t: float) -> Tensor:
    """Sharpen (t < 1) or flatten (t > 1) a distribution; t = 1 leaves it. Shape: (B, V) -> (B, V).

    Raises: ValueError unless t > 0 (for the limit t -> 0 take the argmax, as `Sampler` does).
    """
    if not t > 0:
        raise ValueError(f"temperature must be > 0, got {t}")
    return logits / t


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k largest logits, exactly k also when there are ties. Shape: (B, V) -> (B, V).

    Raises: ValueError unless k >= 1.
    """
    if k < 1:
        raise ValueError(f"top_k must be >= 1, got {k}")
    best, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return torch.full_like(logits, -math.inf).scatter(-1, ids, best)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches p; the one that crosses p
    is kept (nucleus sampling). Shape: (B, V) -> (B, V).

    Raises: ValueError unless 0 < p <= 1.
    Source: Holtzman et al. 2020, section 3.1.
    """
    if not 0 < p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {p}")
    p = max(p, 1e-30)  # in float32 a smaller p is 0, and no token would stay
    if p == 1:
        return logits
    if logits.device.type == "cpu" and logits.shape[-1] >= 5000:  # too many to sort them there
        from minillm.deeper.generation.fast_sampling import bucket_top_p

        return bucket_top_p(logits, p)
    best, ids = logits.float().sort(descending=True, dim=-1)
    shares = best.softmax(-1)
    before = shares.cumsum(-1) - shares  # what the tokens before it have together
    keep = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, before < p)
    return logits.masked_fill(~keep, -math.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as probable as the best one. Shape: (B, V) -> (B, V).

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
    """How often each token occurs in `previous_ids` (B, T); negative ids count nothing."""
    check_previous_ids(previous_ids, logits)
    counts = torch.zeros_like(logits, dtype=torch.float32)
    return counts.scatter_add_(-1, previous_ids.clamp(min=0), (previous_ids >= 0).float())


def repetition_penalty(logits: Tensor, previous_ids: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of tokens that occurred by `penalty`.

    Shape: logits (B, V), previous_ids (B, T) with -1 for "no token" -> (B, V).
    Raises: ValueError unless penalty > 0, or if shapes or ids do not fit.
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


@our_words
@dataclass
class Sampler:
    """Chooses one token a row from logits: penalties, temperature, top-k, top-p, min-p, draw.

    Called with logits (B, V) and optionally previous_ids (B, T), which the penalties count, it
    returns ids (B,). `temperature=0` is greedy. `steps` are functions of your own, (logits,
    previous_ids) -> logits, between penalties and temperature.

        ids = generate(model, prompt, max_new_tokens=40, sampler=Sampler(temperature=0.7, seed=1))

    Args:
        top_k: draw from so many of the likeliest; None for all.
        top_p: from the likeliest that have this share of the probability, above 0 to 1.
        min_p: leave out what has less than this share of the likeliest one's probability.
        repetition_penalty: positive logits of tokens seen before are divided by it, others
            multiplied: 1 does nothing.
        presence_penalty, frequency_penalty: taken from their logits once, or as often as seen.

    With `seed` an int, row b draws from a stream of its own, seeded with `seed + 1_000_003 * b`;
    with a sequence, with `seed[b]`; with None, all draw from torch's generator. When rows have left
    the batch, `rows` says which ones the logits belong to. A subclass may override `process` or
    `probabilities`: what they return is what is drawn from.

    Raises: ValueError for parameters out of range, an empty batch, `rows` that are not B different
        numbers, and NaN, +inf or a row of -inf only, given or made by the processors.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | Sequence[int] | None = None
    steps: Sequence[Callable[[Tensor, Tensor], Tensor]] = ()

    def __post_init__(self) -> None:
        for name in ["temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"]:
            check_number(name, getattr(self, name))
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        probe = torch.zeros(1, 2)  # each processor knows its own range
        repetition_penalty(probe, probe.long(), self.repetition_penalty)
        cuts: dict[str, Callable[..., Tensor]] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        for name, cut in cuts.items():
            if (value := getattr(self, name)) is not None:
                check_number(name, value, whole=name == "top_k")
                cut(probe, value)
        self.reset()

    def reset(self) -> None:
        """Start every row's stream anew."""
        self._streams: dict[int, torch.Generator] = {}

    def stream(self, row: int) -> torch.Generator | None:
        """What row `row` draws with; without a seed None, torch's own."""
        if self.seed is None:
            return None
        if row not in self._streams:
            if isinstance(self.seed, int | Integral):
                seed = int(self.seed) + 1_000_003 * row  # so that near seeds share no row
            elif row < len(self.seed):
                seed = int(self.seed[row])
            else:
                raise ValueError(f"{row + 1} rows but only {len(self.seed)} seeds")
            self._streams[row] = torch.Generator().manual_seed(seed)
        return self._streams[row]

    def process(self, logits: Tensor, previous_ids: Tensor | None = None) -> Tensor:
        """Processed logits in float32, -inf where a token is out. Shape: (B, V) -> (B, V)."""
        check_logits(logits)
        x, ids = logits.float(), previous_ids
        if ids is None:
            ids = torch.empty(len(x), 0, dtype=torch.long, device=x.device)
        if self.repetition_penalty != 1:  # a penalty that would change nothing is left out
            x = repetition_penalty(x, ids, self.repetition_penalty)
        if self.presence_penalty:
            x = presence_penalty(x, ids, self.presence_penalty)
        if self.frequency_penalty:
            x = frequency_penalty(x, ids, self.frequency_penalty)
        for step in self.steps:
            x = step(x, ids)
            check_logits(x, like=logits, made_by=step)
        if self.temperature == 0:  # no cut removes the best token
            return x
        x = temperature(x, self.temperature)
        kept, places = x, None
        if self.top_k is not None and self.top_k < x.shape[-1]:
            kept, places = x.topk(self.top_k, dim=-1)  # the other cuts need to look at these only
        if self.top_p is not None:
            kept = top_p(kept, self.top_p)
        if self.min_p is not None:
            kept = min_p(kept, self.min_p)
        return kept if places is None else torch.full_like(x, -math.inf).scatter(-1, places, kept)

    def probabilities(self, logits: Tensor, previous_ids: Tensor | None = None) -> Tensor:
        """The distribution drawn from. Shape: (B, V) -> (B, V), rows sum to 1."""
        x = self.process(logits, previous_ids)
        finite_maximum(x)  # here it sees what was wrong from the start and what has overflowed
        if self.temperature == 0:  # the best token has it all
            return torch.zeros_like(x).scatter(-1, x.argmax(-1, keepdim=True), 1.0)
        return x.softmax(-1)

    def __call__(
        self,
        logits: Tensor,
        previous_ids: Tensor | None = None,
        *,
        rows: Sequence[int] | None = None,
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
    """The tokens that end a text; a config or a caller names none, one or several."""
    if eos_token_id is None:
        return ()
    return (eos_token_id,) if isinstance(eos_token_id, int | Integral) else tuple(eos_token_id)


def enforce_min_new_tokens(
    logits: Tensor, ends: Collection[int], num_new: int, minimum: int
) -> Tensor:
    """Forbid the end tokens while there are fewer new ones than `minimum`. (B, V) -> (B, V)."""
    if num_new >= minimum or not ends:
        return logits
    forbidden = torch.tensor(sorted(ends), device=logits.device)
    return logits.index_fill(-1, forbidden, -math.inf)
