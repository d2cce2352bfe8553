"""Families of models: what sets each apart from Llama.

Written by hand; deeper/10_families shows the families, and how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

from minillm.support.checks.config import LLAMA_KEYS, check_llama
from minillm.support.checks.kinds import Kind
from minillm.support.checks.words import said_here


@dataclass(frozen=True)
class Family:
    """What sets a family of models apart from Llama; each part that is not given is Llama's.

    Args:
        config: the class of its configs, if it adds keys or has other defaults.
        norm, attention, embedding, rotary: functions that make a part from a config.
        decoder: the same, for the whole stack (`minillm.model.Decoder`).
        mlp, layer: the same, from config and number of the layer.
        scores: makes from a config a function `(head, inputs, scores) -> scores`, or None: a
            forward hook of torch, which the head gets.
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
        gguf_names: what llama.cpp calls weights, where that is not as Llama's, theirs -> ours.
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
    scores: Callable[..., Any] | None = None
    architecture: str = ""
    spelling: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    reads: str = ""
    usual: Mapping[str, Any] = field(default_factory=dict)
    unwritten: str = ""
    windowed: bool = False
    names: Any = ()
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[dict[str, Any], Mapping[str, Any]], None] | None = None
    write: Callable[..., None] | None = None


_OURS = "minillm.beyond.families"

# A family, or where to find it: those that are not Llama's kind are opened when asked for.
FAMILIES: MutableMapping[str, Family | str] = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "mistral": f"{_OURS}.mistral:MISTRAL",
    "qwen2": f"{_OURS}.qwen:QWEN2",
    "qwen3": f"{_OURS}.qwen:QWEN3",
    "gemma": f"{_OURS}.gemma:GEMMA",
    "gemma3_text": f"{_OURS}.gemma3:GEMMA3",
    "qwen3_5_text": f"{_OURS}.qwen35:QWEN35",
    "smollm3": f"{_OURS}.smollm3:SMOLLM3",
    "olmo2": f"{_OURS}.olmo:OLMO2",
    "olmo3": f"{_OURS}.olmo:OLMO3",
    "gpt_oss": f"{_OURS}.gpt_oss:GPT_OSS",
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
        near = get_close_matches(str(model_type)[:60], FAMILIES, n=1)
        known = f"known are {', '.join(FAMILIES)}" + (f"; nearest is {near[0]}" if near else "")
        raise ValueError(f"unknown model_type {model_type!r:.60}; {known}")
    found = FAMILIES[model_type]
    if isinstance(found, str):
        try:
            found = resolve_name(found)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"no family {found!r} for {model_type}: {error}") from None
    if not isinstance(found, Family):
        raise ValueError(f"FAMILIES[{model_type!r}] must be a Family, not {found!r:.60}")
    return found


class ConfigDoors:
    """The doors of `ModelConfig`, which holds the keys: its family, its files, published sizes.

    The keys decide the class: a family that adds keys, or has other defaults, has one of its own
    that inherits from `ModelConfig`, and `ModelConfig(..., model_type="gpt2")` makes it.
    """

    positions: ClassVar[str] = "rotary"  # in some families "learned", or "none"
    stateful: ClassVar[bool] = False  # in some, layers keep a memory of fixed size
    kinds: ClassVar[Mapping[str, Kind]] = LLAMA_KEYS  # what each key may hold

    model_type: str
    eos_token_id: Any
    rope_scaling: Any

    def __new__(cls, *args: Any, **keys: Any) -> Self:
        """An empty config of the family's class, which `__init__` fills.

        Raises: ValueError for a family that there is not, and for a key that its configs have not.
        """
        if ConfigDoors not in cls.__bases__ or not (args or keys):
            return object.__new__(cls)  # a family's own; a copy, which is filled without arguments
        kind = args[5] if len(args) > 5 else keys.get("model_type", "llama")
        kept: Any = family_of(kind).config or cls
        known = [f.name for f in fields(kept)]
        if strange := sorted(keys.keys() - {*known}):
            raise ValueError(f"a {kind} config has no {said_here(strange, known)}")
        return object.__new__(kept)

    @property
    def family(self) -> Family:
        """Of which parts its models are made, and how its files spell them."""
        return family_of(self.model_type)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text: none, one or several."""
        ids = self.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """The config of a published model, such as "llama-3.1-8b"; see `pretrained.presets`."""
        from minillm.deeper.pretrained.presets import keys_of

        return cls(**{**keys_of(name), **changes})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a `config.json` of transformers; see `pretrained.families` for what is refused."""
        from minillm.deeper.pretrained.families import read_config

        return cls(**read_config(data))

    def to_dict(self) -> dict[str, Any]:
        """A `config.json` that transformers reads; the inverse of `from_dict`."""
        from minillm.deeper.pretrained.families import write_config

        return write_config(self)  # type: ignore[arg-type]

    def fill_in(self, follows: Mapping[str, Any]) -> None:
        """What was not given: what follows from other keys, or the family's default."""
        for f in fields(self):  # type: ignore[arg-type]  # all heirs are dataclasses
            if (value := getattr(self, f.name)) is None:
                value = follows.get(f.name, getattr(type(self), f.name, None))
            elif isinstance(value, list) and f.name in self.kinds:
                value = tuple(value)
            object.__setattr__(self, f.name, value)  # frozen, but not finished yet

    def scaled_rotation(self, *sizes: Any, **options: Any) -> Any:
        """The rotation that `rope_scaling` asks for."""
        from minillm.deeper.attention import rope_scaling

        return rope_scaling.RotaryEmbedding(*sizes, **options, scaling=self.rope_scaling)

    def check(self) -> None:
        """Raises: ValueError for keys that are lacking, or contradict each other."""
        check_llama(self)


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
