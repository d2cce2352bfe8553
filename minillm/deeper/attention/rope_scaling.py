"""Rotary embedding stretched to longer contexts, and ALiBi. Explained in deeper/05_long_context."""

# Built from notebooks/deeper/05_long_context.ipynb: edit there, then make build.

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import minillm.rope
from minillm.deeper.attention.rope_layouts import InterleavedRotation
from minillm.rope import Rotation, rope_periods
from minillm.support.checks.attention import warn_beyond

__all__ = [
    "RotaryEmbedding",
    "alibi_bias",
    "alibi_slopes",
    "covered_length",
    "read_scaling",
    "rope_frequencies",
    "scaling_keys",
    "yarn_mscale",
]

_ORIGINAL = "original_max_position_embeddings"

_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", _ORIGINAL),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
}

_YARN = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}


def scaling_keys(kind: str) -> set[str]:
    """The keys that a table of this rope_type may hold. Raises: ValueError for an unknown type."""
    if kind not in _NEEDS:
        raise ValueError(f"unknown rope_type {kind!r}; known are {', '.join(_NEEDS)}")
    return {"rope_type", "rope_theta", *_NEEDS[kind], *(_YARN if kind == "yarn" else ())}


def read_scaling(
    scaling: Mapping[str, Any] | None, base: float, max_position_embeddings: int | None
) -> dict[str, Any]:
    """Hugging Face's rope_scaling or rope_parameters, checked; type and base are filled in.

    Raises: ValueError for unknown types, and for missing, unknown or contradictory keys, by name.
    """
    given = dict(scaling or {})
    given["rope_theta"] = given.get("rope_theta") or base
    kind = given.pop("type", None)  # the older spelling
    kind = given["rope_type"] = given.get("rope_type") or kind or "default"
    known = scaling_keys(kind)
    if base not in (10000.0, given["rope_theta"]):
        raise ValueError(f"base {base} contradicts rope_theta {given['rope_theta']} in the scaling")
    if given.get("partial_rotary_factor") in (None, 1.0):
        given.pop("partial_rotary_factor", None)
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"rope_type {kind!r} does not know {', '.join(unknown)}; given: {scaling}")
    if _ORIGINAL in _NEEDS[kind]:
        given.setdefault(_ORIGINAL, max_position_embeddings)
    if kind == "yarn" and given.get("factor", 0) is None and max_position_embeddings:
        given["factor"] = max_position_embeddings / given[_ORIGINAL]
    missing = [key for key in _NEEDS[kind] if given.get(key) is None]
    if kind == "dynamic" and not max_position_embeddings:
        missing.append("max_position_embeddings")
    if missing:
        raise ValueError(f"rope_type {kind!r} needs {', '.join(missing)}; given: {scaling}")
    if given.get("factor", 1.0) < 1:
        raise ValueError(f"factor must be at least 1, got {given['factor']}")
    return given


def _dynamic_base(
    given: Mapping[str, Any], head_dim: int, trained: int, length: int | Tensor | None
) -> float | Tensor:
    """A base that grows once the sequence is longer than in training. Source: u/emozilla 2023."""
    if head_dim == 2:
        raise ValueError("dynamic scaling divides by head_dim - 2, so head_dim must not be 2")
    if isinstance(length, Tensor):
        longest: int | Tensor = length.clamp(min=trained)
    else:
        longest = max(length or trained, trained)
    factor = given["factor"]
    growth = factor * longest / trained - (factor - 1)
    return given["rope_theta"] * growth ** (head_dim / (head_dim - 2))


def _llama3(frequencies: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Keep the fast pairs, slow the slow ones by the factor. Source: Llama 3.1's published code."""
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    if low >= high:
        raise ValueError(f"low_freq_factor {low} must be below high_freq_factor {high}")
    turns = given[_ORIGINAL] * frequencies / (2 * math.pi)  # within the trained context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / given["factor"] + kept * frequencies


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much YaRN sharpens attention: 0.1 mscale ln(factor) + 1, for q and for k.

    Source: Peng et al. 2023, equation 22; mscale is DeepSeek's addition.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(periods: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, float]:
    """As Llama 3's, but the blend is linear in the pair's index. Source: Peng et al. 2023."""
    D, factor = 2 * len(periods), given["factor"]

    def pair_that_turns(times: float) -> float:  # so often, within the trained context
        wavelength = given[_ORIGINAL] / times
        return D * math.log(wavelength / (2 * math.pi)) / (2 * math.log(given["rope_theta"]))

    first = pair_that_turns(given.get("beta_fast") or 32)
    last = pair_that_turns(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, D - 1)
    pairs = torch.arange(D // 2, device=periods.device).float()
    slowed = ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
    frequencies = slowed / (factor * periods) + (1 - slowed) / periods

    attention, top, bottom = (
        given.get(k) for k in ("attention_factor", "mscale", "mscale_all_dim")
    )
    if attention is None:
        attention = yarn_mscale(factor)
        if top and bottom:
            attention = yarn_mscale(factor, top) / yarn_mscale(factor, bottom)
    return frequencies, float(attention)


def rope_frequencies(
    head_dim: int,
    *,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    max_position_embeddings: int | None = None,
    length: int | Tensor | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, float]:
    """The angle by which each pair of a head turns from one position to the next.

    Args:
        scaling: Hugging Face's `rope_scaling` or `rope_parameters`; its `rope_theta` is the base.
        max_position_embeddings: the trained length, where the scaling does not give it.
        length: how long the sequence is; only "dynamic" asks.

    Shape: -> frequencies (D/2,) in float32, and YaRN's factor on cos and sin (1.0 for the others)
    Raises: ValueError for an odd head_dim, an unknown type, missing, unknown or contradictory keys.
    Source: Su et al. 2021, section 3.2.2; the extensions as `transformers` computes them.
    """
    given = read_scaling(scaling, base, max_position_embeddings)
    kind, theta = given["rope_type"], given["rope_theta"]
    periods = rope_periods(head_dim, theta, device=device)
    if kind == "dynamic":  # read_scaling has made sure of the trained length
        grown = _dynamic_base(given, head_dim, max_position_embeddings or 0, length)
        periods = rope_periods(head_dim, grown, device=device)
    if kind == "yarn":
        return _yarn(periods, given)
    frequencies = 1.0 / periods
    if kind == "linear":
        frequencies = frequencies / given["factor"]
    elif kind == "llama3":
        frequencies = _llama3(frequencies, given)
    return frequencies, 1.0


def covered_length(given: Mapping[str, Any], trained: int | None) -> float:
    """How many positions training and scaling cover; no limit for dynamic, or if nobody says.

    Args:
        given: what `read_scaling` gave back.
        trained: the trained length (max_position_embeddings).
    """
    if given["rope_type"] == "dynamic":
        return math.inf
    scaled = given.get("factor", 1.0) * given.get(_ORIGINAL, trained or 0)
    return max(trained or 0, scaled) or math.inf


class RotaryEmbedding(minillm.rope.RotaryEmbedding):
    """Turns positions into rotations, as trained or for longer texts, in either layout of pairs.

    Args:
        base: pair i turns by base^(-2i / D) radians per position: a larger base, slower pairs.
        scaling: Hugging Face's `rope_scaling` or `rope_parameters`, see `rope_frequencies`.
        interleaved: the pairs are (0, 1), (2, 3), ... instead of (0, D/2), (1, D/2 + 1), ...
        max_position_embeddings: the trained length; positions that it and the scaling do not cover
            warn, once.

    Shape: position_ids (B, T) or (1, T) -> Rotation
    Raises: ValueError as `rope_frequencies` does.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        scaling: Mapping[str, Any] | None = None,
        interleaved: bool = False,
        max_position_embeddings: int | None = None,
    ) -> None:
        given = read_scaling(scaling, base, max_position_embeddings)
        self.scaling, self.interleaved = dict(scaling) if scaling else None, interleaved
        self.max_position_embeddings = max_position_embeddings  # asked for by `frequencies`
        super().__init__(head_dim, base=base, max_position_embeddings=max_position_embeddings)
        self.max_length = covered_length(given, max_position_embeddings)
        self.dynamic, self.attention_factor = given["rope_type"] == "dynamic", self.stretched()[1]

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        return self.stretched(device)[0]

    def stretched(
        self, device: torch.device | None = None, length: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """Frequencies (D/2,) for a text of that length, and the factor on cosines and sines."""
        return rope_frequencies(
            self.head_dim,
            base=self.base,
            scaling=self.scaling,
            max_position_embeddings=self.max_position_embeddings,
            length=length,
            device=device,
        )

    def forward(self, position_ids: Tensor) -> Rotation:
        """The rotation of these positions, to be called on queries and keys. Shape: (B, T)."""
        if warn_beyond(position_ids, self.max_length):
            self.max_length = math.inf
        frequencies, device = self.inv_freq, position_ids.device
        if self.dynamic:
            frequencies, _ = self.stretched(device, position_ids.amax(-1)[..., None, None] + 1)
        elif frequencies.device != device:  # built on "meta" and never moved
            frequencies = self.frequencies(device)
        rotation = InterleavedRotation if self.interleaved else Rotation
        angles = position_ids.unsqueeze(-1) * rotation.spread(frequencies)  # (B, T, D), float32
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return rotation(cos, sin)


def alibi_slopes(num_heads: int) -> Tensor:
    """How fast each head forgets: 2^(-8/H), 2^(-16/H), ..., 2^-8.

    If H is no power of two: the slopes of the power below, then every other one of the power above.

    Shape: -> (H,) float32
    Source: Press, Smith, Lewis 2021, section 3, and its published code.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    power = 2 ** (num_heads.bit_length() - 1)
    exponents = [8 * h / power for h in range(1, power + 1)]
    exponents += [4 * h / power for h in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor([2.0**-e for e in exponents])


def alibi_bias(
    num_heads: int, num_queries: int, num_keys: int | None = None, *, device: Any = None
) -> Tensor:
    """Minus slope times distance, to be added to the scores; queries are the last of the keys.

    Shape: -> (H, T, S) float32
    Source: Press, Smith, Lewis 2021, figure 3.
    """
    S = num_queries if num_keys is None else num_keys
    if num_queries > S:
        raise ValueError(f"{num_queries} queries cannot be the last of {S} keys")
    keys = torch.arange(S, device=device)
    distance = (keys[S - num_queries :, None] - keys).abs()  # (T, S)
    return -alibi_slopes(num_heads).to(device)[:, None, None] * distance
