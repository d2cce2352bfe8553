"""Families of models: what sets each apart from Llama.

Written by hand; deeper/10_families shows the families, and how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields
from pkgutil import resolve_name
from typing import Any

from minillm.support.checks.words import said_here


@dataclass(frozen=True)
class Family:
    """What sets a family of models apart from Llama; each part that is not given is Llama's.

    Args:
        config: the class of its configs, with the keys that it adds.
        norm, attention, embedding, rotary: functions that make a part from a config.
        decoder: the same, for the whole stack (`minillm.model.Decoder`).
        mlp, layer: the same, from config and number of the layer.
        architecture: the class in transformers; without it, its files hold our keys.
        spelling: keys that its files spell in their own way, ours -> theirs.
        aliases: more names that its files may use for a key, theirs -> ours.
        reads: keys that would change what it computes, with spaces between: other values than ours
            are refused (`minillm.deeper.pretrained.families`).
        usual: what a file without the key means, where that is not our default.
        unwritten: keys that its files do not have, with spaces between; one that has them is
            read without.
        windowed: whether its files may say sliding_window.
        names: pairs of parts of names of weights, ours and theirs, or a function that gives them
            for a config.
        read: changes what a file says, under our spelling, to what a config holds.
        write: the inverse.
    """

    config: Any = None  # a `ModelConfig` with more keys
    norm: Callable[..., Any] | None = None
    attention: Callable[..., Any] | None = None
    mlp: Callable[..., Any] | None = None
    layer: Callable[..., Any] | None = None
    embedding: Callable[..., Any] | None = None
    rotary: Callable[..., Any] | None = None
    decoder: Callable[..., Any] | None = None
    architecture: str = ""
    spelling: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    reads: str = ""
    usual: Mapping[str, Any] = field(default_factory=dict)
    unwritten: str = ""
    windowed: bool = False
    names: Any = ()
    read: Callable[[dict[str, Any], Mapping[str, Any]], None] | None = None
    write: Callable[..., None] | None = None


_OURS = "minillm.beyond.families"

# A family, or where to find it: those that are not Llama's kind are opened when asked for.
FAMILIES: MutableMapping[str, Family | str] = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "mistral": Family(
        architecture="MistralForCausalLM",
        # what transformers takes a file to mean; null as a window means none
        usual={
            "sliding_window": 4096,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        unwritten="mlp_bias attention_bias",
        windowed=True,
    ),
    "qwen2": f"{_OURS}.qwen:QWEN2",
    "qwen3": f"{_OURS}.qwen:QWEN3",
    "gemma": f"{_OURS}.gemma:GEMMA",
    "gpt2": f"{_OURS}.gpt2:GPT2",
    "falcon": f"{_OURS}.falcon:FALCON",
    "deepseek_v3": f"{_OURS}.deepseek_v3:DEEPSEEK_V3",
    "mixtral": f"{_OURS}.experts:MIXTRAL",
    "qwen3_moe": f"{_OURS}.experts:QWEN3_MOE",
    "mamba": f"{_OURS}.state:MAMBA",
    "mamba2": f"{_OURS}.state:MAMBA2",
    "bamba": f"{_OURS}.state:BAMBA",
}


def family_of(model_type: Any) -> Family:
    """The family of that name.

    Raises: ValueError, with the known names, if there is none, or if it is not where it should be.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"unknown model_type {model_type!r:.60}; known are {', '.join(FAMILIES)}")
    found = FAMILIES[model_type]
    if isinstance(found, str):
        try:
            found = resolve_name(found)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"no family {found!r} for {model_type}: {error}") from None
    if not isinstance(found, Family):
        raise ValueError(f"FAMILIES[{model_type!r}] must be a Family, not {found!r:.60}")
    return found


def config_class(usual: Any, args: Sequence[Any], keys: Mapping[str, Any]) -> Any:
    """The class of the configs of the family that a config's arguments name; `usual` for most.

    Raises: ValueError for a family that there is not, and for a key that its configs have not.
    """
    kind = args[5] if len(args) > 5 else keys.get("model_type", "llama")
    kept = family_of(kind).config or usual
    known = [f.name for f in fields(kept)]
    if strange := sorted(keys.keys() - {*known}):
        raise ValueError(f"a {kind} config has no {said_here(strange, known)}")
    return kept


# Names that Hugging Face's files have for activations with another name here.
ACTIVATION_SPELLINGS: Mapping[str, str] = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
    "quick_gelu": "gelu_sigmoid",
    "swish": "silu",
    "relu2": "relu_squared",
}
