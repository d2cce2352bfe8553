"""Choosing the next token: a sampler whose rows do not disturb each other, the speculative step.

Explained in notebooks/08_sampling.ipynb. The filters live in `minillm.filters`, the searches in
`minillm.search`; their names are passed on here.
"""

# Built from notebooks/08_sampling.ipynb: edit there, then make build.

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from minillm.filters import Filters as Filters
from minillm.filters import frequency_penalty as frequency_penalty
from minillm.filters import min_p as min_p
from minillm.filters import presence_penalty as presence_penalty
from minillm.filters import repetition_penalty as repetition_penalty
from minillm.filters import temperature as temperature
from minillm.filters import top_k as top_k
from minillm.filters import top_p as top_p
from minillm.search import Hypothesis as Hypothesis
from minillm.search import beam_search as beam_search
from minillm.search import exhaustive_search as exhaustive_search

__all__ = [
    "GREEDY",
    "Filters",
    "Hypothesis",
    "Sampler",
    "beam_search",
    "draw",
    "draw_exponential",
    "draw_gumbel",
    "exhaustive_search",
    "frequency_penalty",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "speculative_step",
    "temperature",
    "top_k",
    "top_p",
]


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution: the first token whose cumulative sum exceeds `uniform`.

    Shape: probabilities (B, V), uniform (B,) in [0, 1) -> ids (B,).
    """
    cumulative = _double(probabilities).cumsum(-1)
    target = uniform.to(cumulative.device, torch.float64)[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True)[:, 0].to(probabilities.device)
    # Rounding must not carry us beyond the last possible token.
    last = (probabilities > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(ids, last)


def _double(x: Tensor) -> Tensor:
    """In float64, which Apple's GPUs do not have: from there, on the CPU."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def draw_exponential(probabilities: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """A race of exponential clocks: argmax of p / E with E ~ Exp(1). Shape: (B, V) -> (B,)."""
    clocks = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / clocks.clamp(min=torch.finfo(clocks.dtype).tiny)).argmax(-1)


def draw_gumbel(logits: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Argmax of logits + Gumbel noise. Shape: (B, V) -> (B,)."""
    clocks = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - clocks.clamp(min=torch.finfo(clocks.dtype).tiny).log()).argmax(-1)


@dataclass
class Sampler(Filters):
    """Chooses one token a row from logits: penalties, temperature, top-k, top-p, min-p, draw.

    `temperature=0` is greedy. With `seed` an int, row b has its own stream seeded with `seed + b`;
    with a sequence, row b's seed is `seed[b]`; with None, torch's default generator is used. A row
    that moves up in a shrinking batch takes over the stream of its new place. Called with logits
    (B, V) and optionally previous_ids (B, T), all counted by the penalties, it returns ids (B,).

    Raises: ValueError for parameters out of range, an empty batch, and NaN, +inf or a row of -inf
        only, be it in the logits or after penalties and temperature (which may overflow).
    """

    seed: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reset()

    def reset(self) -> None:
        """Start every row's stream anew."""
        self._streams: list[torch.Generator] = []

    def stream(self, row: int) -> torch.Generator | None:
        """What row `row` draws with; without a seed None, torch's own."""
        while self.seed is not None and len(self._streams) <= row:
            b, one = len(self._streams), isinstance(self.seed, Integral)
            if not one and b >= len(self.seed):
                raise ValueError(f"{row + 1} rows but only {len(self.seed)} seeds")
            seed = self.seed + b if one else self.seed[b]
            self._streams.append(torch.Generator().manual_seed(int(seed)))
        return None if self.seed is None else self._streams[row]

    def uniform(self, rows: int) -> Tensor:
        """One number in [0, 1) from each row's own stream. Shape: -> (rows,)."""
        if self.seed is None:
            return torch.rand(rows, dtype=torch.float64)
        self.stream(rows - 1)  # which makes all before it
        streams = self._streams[:rows]
        return torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in streams])

    def __call__(self, logits: Tensor, previous_ids: Tensor | None = None) -> Tensor:
        """Shape: logits (B, V), previous_ids (B, T) -> ids (B,)."""
        if self.temperature == 0:  # what top-k would leave is the best token in any case
            return self.penalise(logits, previous_ids).argmax(-1)
        processed = self.process(logits, previous_ids)
        return draw(processed.softmax(-1), self.uniform(logits.shape[0]))


GREEDY = Sampler(temperature=0.0)


def speculative_step(
    draft_probs: Tensor,
    target_probs: Tensor,
    draft_ids: Tensor,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of drafted tokens and give the token after it; distributed as the target.

    Shape: draft_probs (B, K, V), target_probs (B, K + 1, V), draft_ids (B, K)
        -> num_accepted (B,) in 0..K, next_ids (B,).
    Raises: ValueError if the shapes do not fit, or if nothing was drafted (K = 0).
    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023.
    """
    B, K, V = draft_probs.shape
    if K == 0 or target_probs.shape != (B, K + 1, V) or draft_ids.shape != (B, K):
        shapes = [tuple(x.shape) for x in (draft_probs, target_probs, draft_ids)]
        raise ValueError(f"draft_probs, target_probs, draft_ids do not fit: {shapes}")
    draft, target = _double(draft_probs), _double(target_probs)
    ids = draft_ids.to(target.device)[..., None]
    p, q = target[:, :K].gather(-1, ids)[..., 0], draft.gather(-1, ids)[..., 0]  # (B, K)
    chance = torch.rand(B, K, generator=generator, dtype=torch.float64).to(p.device)
    accepted = (chance * q < p).long().cumprod(-1).sum(-1)  # (B,)
    rows = torch.arange(B, device=p.device)
    rest, refused = target[rows, accepted], draft[rows, accepted.clamp(max=K - 1)]
    residual = (rest - refused).clamp(min=0)
    use = (accepted < K)[:, None] & (residual.sum(-1, keepdim=True) > 0)
    uniform = torch.rand(B, generator=generator, dtype=torch.float64)
    next_ids = draw(torch.where(use, residual, rest), uniform)
    return accepted.to(draft_ids.device), next_ids.to(draft_ids.device)
