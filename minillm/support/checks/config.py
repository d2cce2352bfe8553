"""What the keys of a config may hold, and what they must be together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from minillm.support.checks.kinds import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SWITCH,
    TABLE,
    TEXT,
    Kind,
    any_of,
    check_kind,
    check_known,
    list_of,
    whole,
)

LLAMA_KEYS: Mapping[str, Kind] = {
    **dict.fromkeys(["vocab_size", "hidden_size", "num_hidden_layers", "head_dim"], whole(1)),
    **dict.fromkeys(["num_attention_heads", "num_key_value_heads"], whole(1)),
    **dict.fromkeys(["intermediate_size", "max_position_embeddings"], whole(1)),
    "sliding_window": whole(1),
    **dict.fromkeys(["rms_norm_eps", "rope_theta"], POSITIVE),
    "rope_scaling": TABLE,
    **dict.fromkeys(["attention_bias", "mlp_bias", "tie_word_embeddings"], SWITCH),
    "attention_dropout": SHARE,
    "initializer_range": NOT_NEGATIVE,
    "bos_token_id": whole(0),
    "eos_token_id": any_of(whole(0), list_of(whole(0))),
    "pad_token_id": whole(-1),  # early files of Llama's say -1
}

# None under these keys means what the family usually does.
USUAL_IF_NONE = frozenset(
    "hidden_act rms_norm_eps attention_bias mlp_bias tie_word_embeddings".split()
)

# What the table rope_scaling may hold; in files, rope_parameters too.
SCALING: Mapping[str, Kind] = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    "original_max_position_embeddings": whole(1),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NOT_NEGATIVE),
    **dict.fromkeys(("long_factor", "short_factor"), list_of(POSITIVE)),
    "truncate": SWITCH,
    "partial_rotary_factor": POSITIVE,
}


def check_keys(c: Any, usual: type) -> None:
    """Raises: ValueError for a value of the wrong kind, and for a class that is not the family's.

    `usual` is the class of families that add no keys.
    """
    kind: Any = type(c)
    if kind is not (c.family.config or usual):
        raise ValueError(f"a {kind.__name__} cannot be of the family {c.model_type}")
    for f in fields(c):
        value, may_be_none = getattr(c, f.name), f.default is None or f.name in USUAL_IF_NONE
        if f.name in c.kinds and not (value is None and may_be_none):
            check_kind(f.name, value, c.kinds[f.name])


def check_division(c: Any) -> None:
    """Raises: ValueError for a width of which no head can be an even share."""
    C, H = c.hidden_size, c.num_attention_heads
    if H is not None and c.head_dim is None and C % H:
        raise ValueError(f"hidden_size {C} does not divide into {H} heads: give head_dim")


def check_llama(c: Any) -> None:
    """Raises: ValueError for keys that are lacking, or contradict each other."""
    check_given(c, "num_attention_heads intermediate_size")
    H, G = c.num_attention_heads, c.num_key_value_heads
    if H % G:
        raise ValueError(f"{H} query heads do not share {G} key/value heads evenly")
    if c.positions == "rotary":
        check_rotation(c)
    check_shared(c)


def check_given(c: Any, keys: str) -> None:
    """Raises: ValueError that names those of these keys that lack."""
    if missing := [key for key in keys.split() if getattr(c, key) is None]:
        raise ValueError(f"a {c.model_type} config lacks {', '.join(missing)}")


def check_rotation(c: Any) -> None:
    """Raises: ValueError if a head cannot be turned as the config says."""
    rotated = getattr(c, "rotated", c.head_dim)  # Bamba turns a part of each head
    if rotated % 2 or not rotated:
        part = "" if rotated == c.head_dim else f" of which {rotated} rotate"
        raise ValueError(f"rotary positions turn pairs: head_dim {c.head_dim}{part} is odd")
    if c.rope_scaling is None:
        return
    for key in c.rope_scaling.keys() & SCALING.keys():
        if (value := c.rope_scaling[key]) is not None:
            check_kind(f"rope_scaling.{key}", value, SCALING[key])
    from minillm.deeper.attention.rope_scaling import rope_frequencies

    length = c.max_position_embeddings
    try:
        rope_frequencies(
            min(c.head_dim, 4),  # only to see that it can be done: heads may be claimed of any size
            base=c.rope_theta,
            scaling=c.rope_scaling,
            max_position_embeddings=length,
        )
    except ArithmeticError as error:
        given = f"rope_scaling {dict(c.rope_scaling)} with rope_theta {c.rope_theta}"
        raise ValueError(f"{given} cannot be computed: {error}") from None


def check_shared(c: Any) -> None:
    """What every family's config must be. Raises: ValueError."""
    from minillm.layers import ACTIVATIONS

    check_known("hidden_act", c.hidden_act, ACTIVATIONS)
    for key in ("bos_token_id", "pad_token_id", "eos_token_id"):
        ids = c.eos_token_ids if key == "eos_token_id" else (getattr(c, key),)
        if any(i is not None and not 0 <= i < c.vocab_size for i in ids):
            raise ValueError(f"{key} {getattr(c, key)} is outside a vocabulary of {c.vocab_size}")
