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
    Kind,
    any_of,
    check_kind,
    list_of,
    whole,
)
from minillm.support.family import check_given, check_rotation, check_shared

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


def check_keys(c: Any, usual: type) -> None:
    """Raises: ValueError for a value of the wrong kind, and for a class that is not the family's.

    `usual` is the class of families that add no keys.
    """
    kind: Any = type(c)
    if kind is not (c.family.config or usual):
        raise ValueError(f"a {kind.__name__} cannot be of the family {c.model_type}")
    for f in fields(c):
        value = getattr(c, f.name)
        if f.name in c.kinds and (value is not None or f.default is not None):
            check_kind(f.name, value, c.kinds[f.name])


def check_llama(c: Any) -> None:
    """Raises: ValueError for keys that are lacking, or contradict each other."""
    check_given(c, "num_attention_heads intermediate_size")
    H, G = c.num_attention_heads, c.num_key_value_heads
    if H % G:
        raise ValueError(f"{H} query heads do not share {G} key/value heads evenly")
    if c.positions == "rotary":
        check_rotation(c)
    check_shared(c)
