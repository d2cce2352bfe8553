"""Choosing the next token: penalties, temperature, top-k, top-p, min-p, and the draw.

The logits processors are pure functions (B, V) -> (B, V) in which a forbidden token has the logit
-inf; `Sampler` chains them and draws, and its rows do not disturb each other. Notebook 09.
"""

# Built from notebooks/09_sampling.ipynb: edit there, then make build.

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from minillm.checks import check_number

__all__ = [
    "GREEDY",
    "Sampler",
    "draw",
    "draw_exponential",
    "draw_gumbel",
    "end_ids",
    "enforce_min_new_tokens",
    "finite_maximum",
    "frequency_penalty",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "temperature",
    "to_float64",
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


def _sorted_top_p(logits: Tensor, p: float) -> Tensor:
    """Top-p by its definition: sort, and keep a token if those before it have not reached p."""
    best, ids = logits.float().sort(descending=True, dim=-1)
    shares = best.softmax(-1)
    before = shares.cumsum(-1) - shares
    keep = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, before < p)
    return logits.masked_fill(~keep, -math.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches p (nucleus sampling).

    The token that crosses p is kept. On a CPU `bucket_top_p` finds it without sorting them all.

    Shape: (B, V) -> (B, V).
    Raises: ValueError unless 0 < p <= 1, and, on a CPU, for a row without a finite maximum.
    Source: Holtzman et al. 2020, section 3.1.
    """
    if not 0 < p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {p}")
    p = max(p, 1e-30)  # in float32 a smaller p is 0, and no token would stay
    if p == 1:
        return logits
    if logits.device.type == "cpu":  # where sorting a large vocabulary is slow
        from minillm.generation.fast_top_p import bucket_top_p

        return bucket_top_p(logits, p)
    return _sorted_top_p(logits, p)


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

    Raises: ValueError if the shapes do not fit, or, on a CPU, for an id outside the vocabulary.
    """
    if previous_ids.ndim != 2 or previous_ids.shape[0] != logits.shape[0]:
        have, want = tuple(previous_ids.shape), tuple(logits.shape)
        raise ValueError(f"previous_ids {have} must be (B, T) for logits {want}")
    V, on_cpu = logits.shape[-1], previous_ids.device.type == "cpu"  # asking a GPU means waiting
    if on_cpu and previous_ids.numel() and (largest := int(previous_ids.amax())) >= V:
        raise ValueError(f"previous_ids hold {largest}, the vocabulary {V} tokens")
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


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution: the first token whose cumulative sum exceeds `uniform`.

    Shape: probabilities (B, V), uniform (B,) in [0, 1) -> ids (B,).
    """
    cumulative = to_float64(probabilities).cumsum(-1)
    target = uniform.to(cumulative.device, torch.float64)[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True)[:, 0].to(probabilities.device)
    # Rounding must not carry us beyond the last possible token.
    last = (probabilities > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(ids, last)


_WITHOUT_FLOAT64 = {"mps"}  # Apple's GPUs


def to_float64(x: Tensor) -> Tensor:
    """In float64; what lies on a device that lacks it comes to the CPU (and must be waited for)."""
    return (x.cpu() if x.device.type in _WITHOUT_FLOAT64 else x).double()


def draw_exponential(probabilities: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """A race of exponential clocks: argmax of p / E with E ~ Exp(1). Shape: (B, V) -> (B,)."""
    clocks = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / clocks.clamp(min=torch.finfo(clocks.dtype).tiny)).argmax(-1)


def draw_gumbel(logits: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Argmax of logits + Gumbel noise. Shape: (B, V) -> (B,)."""
    clocks = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - clocks.clamp(min=torch.finfo(clocks.dtype).tiny).log()).argmax(-1)


def finite_maximum(logits: Tensor) -> Tensor:
    """The maximum of each row (B, 1); one NaN in a row makes it NaN, and that is an error."""
    top = logits.amax(-1, keepdim=True)
    # The one question that a `Sampler` asks a GPU at each step: it waits for the answer.
    if bool((top - top).any()):  # 0 for every finite number, NaN for all else
        raise ValueError("logits hold NaN or +inf, or a row has nothing but -inf")
    return top


@dataclass
class Sampler:
    """Chooses one token a row from logits: penalties, temperature, top-k, top-p, min-p, draw.

    `temperature=0` is greedy. With `seed` an int, row b has its own stream seeded with `seed + b`;
    with a sequence, row b's seed is `seed[b]`; with None, torch's default generator is used. Called
    with logits (B, V) and optionally previous_ids (B, T), all counted by the penalties, it returns
    ids (B,). When rows have left the batch, `rows` says which of them the logits belong to, so that
    each goes on drawing from its own stream.

    A subclass may override `process` or `probabilities`: what they return is what is drawn from.

    Raises: ValueError for parameters out of range, an empty batch, `rows` that are not B different
        numbers, and NaN, +inf or a row of -inf only, be it in the logits or after `process`
        (penalties and temperature may overflow).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        cuts = ("top_k", "top_p", "min_p")
        names = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in (*names, *(cut for cut in cuts if getattr(self, cut) is not None)):
            check_number(name, getattr(self, name), whole=name == "top_k")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be > 0, got {self.repetition_penalty}")
        probe = torch.zeros(1, 2)  # each processor knows its own range
        if self.top_k is not None:
            top_k(probe, self.top_k)
        if self.top_p is not None:
            top_p(probe, self.top_p)
        if self.min_p is not None:
            min_p(probe, self.min_p)
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
                seed = int(self.seed) + row
            elif row < len(self.seed):
                seed = int(self.seed[row])
            else:
                raise ValueError(f"{row + 1} rows but only {len(self.seed)} seeds")
            self._streams[row] = torch.Generator().manual_seed(seed)
        return self._streams[row]

    def uniform(self, rows: Sequence[int]) -> Tensor:
        """One number in [0, 1) from the stream of each of these rows. Shape: -> (len(rows),)."""
        if self.seed is None:
            return torch.rand(len(rows), dtype=torch.float64)
        streams = [self.stream(row) for row in rows]
        return torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in streams])

    def process(self, logits: Tensor, previous_ids: Tensor | None = None) -> Tensor:
        """Processed logits in float32, -inf where a token is out. Shape: (B, V) -> (B, V)."""
        x = self._penalize(logits, previous_ids)
        return x if self.temperature == 0 else self._truncate(x)  # no cut removes the best token

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
        if rows is not None and (not len(rows) == len(set(rows)) == len(p) or min(rows) < 0):
            raise ValueError(f"rows {list(rows)} are not {len(p)} different numbers, 0 and up")
        if self.temperature == 0:  # no random number is used up
            return p.argmax(-1)
        return draw(p, self.uniform(range(len(p)) if rows is None else rows))

    def _penalize(self, logits: Tensor, previous_ids: Tensor | None) -> Tensor:
        """After penalties and temperature, in float32. Shape: (B, V) -> (B, V)."""
        if logits.ndim != 2 or not logits.numel():
            raise ValueError(f"logits must be (B, V), not empty, got {tuple(logits.shape)}")
        x = logits.float()
        if previous_ids is not None:  # a penalty that would change nothing is left out
            if self.repetition_penalty != 1:
                x = repetition_penalty(x, previous_ids, self.repetition_penalty)
            if self.presence_penalty:
                x = presence_penalty(x, previous_ids, self.presence_penalty)
            if self.frequency_penalty:
                x = frequency_penalty(x, previous_ids, self.frequency_penalty)
        return x if self.temperature == 0 else temperature(x, self.temperature)

    def _truncate(self, x: Tensor) -> Tensor:
        """Top-k, top-p and min-p; after top-k the others need to look at its k survivors only."""
        values, ids = x, None
        if self.top_k is not None and self.top_k < x.shape[-1]:
            values, ids = x.topk(self.top_k, dim=-1)
        if self.top_p is not None:
            values = top_p(values, self.top_p)
        if self.min_p is not None:
            values = min_p(values, self.min_p)
        return values if ids is None else _scatter(values, ids, x)


GREEDY = Sampler(temperature=0.0)


def end_ids(eos_token_id: int | Iterable[int] | None) -> tuple[int, ...]:
    """The tokens that end a text; a config or a caller names none, one or several."""
    if eos_token_id is None:
        return ()
    return (eos_token_id,) if isinstance(eos_token_id, int | Integral) else tuple(eos_token_id)


def enforce_min_new_tokens(
    logits: Tensor, ends: Collection[int], num_new: int, minimum: int
) -> Tensor:
    """Forbid the end tokens `ends` while `num_new`, the number of new tokens, is below `minimum`.

    Shape: (B, V) -> (B, V).
    """
    if num_new >= minimum or not ends:
        return logits
    forbidden = torch.tensor(sorted(ends), device=logits.device)
    return logits.index_fill(-1, forbidden, -math.inf)
