"""The config: which model, of which family, of which sizes.

Explained in notebooks/10_minillm. `ModelConfig` has Llama's keys, under Hugging Face's names; a
family that needs more adds them in a class of its own, in `minillm.models.families`.
"""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from pkgutil import resolve_name
from typing import Any, ClassVar

from minillm.checks import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    SWITCH,
    TABLE,
    TEXT,
    Kind,
    any_of,
    check_kind,
    list_of,
    whole,
)
from minillm.nn.layers import ACTIVATIONS

__all__ = [
    "FAMILIES",
    "SCALING",
    "UNSET",
    "Family",
    "ModelConfig",
    "check_given",
    "check_rotation",
    "check_shared",
    "family_of",
]

__all__ = ["FAMILIES", "Family", "ModelConfig", "check_given", "check_rotation", "check_shared"]

__all__ += ["UNSET", "family_of"]


@dataclass(frozen=True)
class Family:
    """What sets a family of models apart from Llama; each part that is not given is Llama's.

    Args:
        config: the class of its configs, with the keys that it adds.
        norm, attention, embedding, rotary: functions that make a part from a config.
        mlp, layer: the same, from config and number of the layer.
        architecture: the class in transformers; without it, its files hold our keys.
        spelling: keys that its files spell in their own way, ours -> theirs.
        usual: what a file without the key means, where that is not our default.
        unwritten: keys that its files do not have, with spaces between.
        windowed: whether its files may say sliding_window.
        names: pairs of parts of names of weights, ours and theirs, or a function that gives them
            for a config.
        read: changes what a file says, under our spelling, to what a config holds.
        write: the inverse.
    """

    config: "type[ModelConfig] | None" = None
    norm: Callable[..., Any] | None = None
    attention: Callable[..., Any] | None = None
    mlp: Callable[..., Any] | None = None
    layer: Callable[..., Any] | None = None
    embedding: Callable[..., Any] | None = None
    rotary: Callable[..., Any] | None = None
    architecture: str = ""
    spelling: Mapping[str, str] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    unwritten: str = ""
    windowed: bool = False
    names: Any = ()
    read: Callable[[dict[str, Any], Mapping[str, Any]], None] | None = None
    write: Callable[..., None] | None = None


_OURS = "minillm.models.families"

# A family, or where to find it: those that are not Llama's kind are opened when asked for.
FAMILIES: MutableMapping[str, Family | str] = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "mistral": Family(
        architecture="MistralForCausalLM",
        usual={"sliding_window": 4096},  # what transformers takes it to mean; null means none
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

UNSET: Any = None  # the default of keys that the family fills in, or that follow from others


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes a model's shape and arithmetic, under Hugging Face's keys.

    None means: what the family does (`habits`), or what follows from the other keys. A config of a
    family that adds keys has a class of its own: `ModelConfig(..., model_type="gpt2")` makes it.
    Raises: ValueError, with key and value, for a wrong type, a value out of range, an unknown
        family or key, and keys that contradict each other.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int = UNSET
    intermediate_size: int = UNSET
    model_type: str = "llama"
    num_key_value_heads: int = UNSET
    head_dim: int = UNSET
    hidden_act: str = UNSET
    max_position_embeddings: int = 2048
    rms_norm_eps: float = UNSET  # also the epsilon of LayerNorm
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = UNSET
    mlp_bias: bool = UNSET
    attention_dropout: float = 0.0
    sliding_window: int | None = None
    tie_word_embeddings: bool = UNSET
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    positions: ClassVar[str] = "rotary"  # or "learned", a vector for each, or "none"
    habits: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    kinds: ClassVar[Mapping[str, Kind]] = {  # what each key may hold
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

    def __new__(cls, *args: Any, **keys: Any) -> "ModelConfig":
        """An empty config of the family's class, which `__init__` fills."""
        if cls is not ModelConfig or not (args or keys):  # a copy is filled without arguments
            return object.__new__(cls)
        kind = args[5] if len(args) > 5 else keys.get("model_type", "llama")
        kept = family_of(kind).config or ModelConfig
        if strange := sorted(keys.keys() - {f.name for f in fields(kept)}):
            raise ValueError(f"a {kind} config has no {', '.join(strange)}")
        return object.__new__(kept)

    def __post_init__(self) -> None:
        if type(self) is not (self.family.config or ModelConfig):
            raise ValueError(f"a {type(self).__name__} cannot be of the family {self.model_type}")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in self.kinds and (value is not None or f.default is not None):
                check_kind(f.name, value, self.kinds[f.name])
            if isinstance(value, list) and f.name in self.kinds:
                object.__setattr__(self, f.name, tuple(value))
        for key, value in {**self.habits, **self.follows()}.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        self.check()

    def follows(self) -> dict[str, Any]:
        """What a key is that was not given, by the others. Raises: ValueError if it cannot be."""
        C, H = self.hidden_size, self.num_attention_heads
        if H is not None and self.head_dim is None and C % H:
            raise ValueError(f"hidden_size {C} does not divide into {H} heads: give head_dim")
        return {"num_key_value_heads": H, "head_dim": H and C // H}

    def check(self) -> None:
        """Raises: ValueError for keys that are lacking, or contradict each other."""
        check_given(self, "num_attention_heads intermediate_size")
        H, G = self.num_attention_heads, self.num_key_value_heads
        if H % G:
            raise ValueError(f"{H} query heads do not share {G} key/value heads evenly")
        if self.positions == "rotary":
            check_rotation(self)
        check_shared(self)

    @property
    def family(self) -> Family:
        """Of which parts its models are made, and how its files spell them."""
        return family_of(self.model_type)

    @property
    def rotated(self) -> int:
        """How many numbers of a head turn with the position."""
        return self.head_dim

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text: none, one or several."""
        ids = self.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    def has_state(self, layer: int) -> bool:
        """Whether a memory of fixed size stands in this layer where others have attention."""
        return False

    @property
    def stateful(self) -> bool:
        """Whether any layer has such a memory."""
        return any(map(self.has_state, range(self.num_hidden_layers)))

    @property
    def attends(self) -> bool:
        """Whether any layer has keys and values."""
        return not all(map(self.has_state, range(self.num_hidden_layers)))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "ModelConfig":
        """The config of a published model, such as "llama-3.1-8b".

        Raises: ValueError with the known names.
        """
        from minillm.pretrained.presets import PRESETS

        if name not in PRESETS:
            raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **changes})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ModelConfig":
        """Read a `config.json` of transformers 4 or 5.

        Raises: ValueError if it lacks a size or asks for something that we do not compute.
        """
        from minillm.pretrained.families import read_config

        if not isinstance(data, Mapping):
            raise ValueError(f"a config is a table of keys and values, not {data!r}")
        return cls(**read_config(data))

    def to_dict(self) -> dict[str, Any]:
        """A `config.json` that transformers reads; the inverse of `from_dict`."""
        from minillm.pretrained.families import write_config

        return write_config(self)


def check_given(c: ModelConfig, keys: str) -> None:
    """Raises: ValueError that names those of these keys that lack."""
    if missing := [key for key in keys.split() if getattr(c, key) is None]:
        raise ValueError(f"a {c.model_type} config lacks {', '.join(missing)}")


def check_rotation(c: ModelConfig) -> None:
    """Raises: ValueError if a head cannot be turned as the config says."""
    if c.rotated % 2 or not c.rotated:
        part = "" if c.rotated == c.head_dim else f" of which {c.rotated} rotate"
        raise ValueError(f"rotary positions turn pairs: head_dim {c.head_dim}{part} is odd")
    if c.rope_scaling is None:
        return
    for key in c.rope_scaling.keys() & SCALING.keys():
        if (value := c.rope_scaling[key]) is not None:
            check_kind(f"rope_scaling.{key}", value, SCALING[key])
    from minillm.nn.rope_scaling import rope_frequencies

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


def check_shared(c: ModelConfig) -> None:
    """What every family's config must be. Raises: ValueError."""
    if not isinstance(c.hidden_act, str) or c.hidden_act not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"unknown hidden_act {c.hidden_act!r}; known are {known}")
    for key in ("bos_token_id", "pad_token_id", "eos_token_id"):
        ids = c.eos_token_ids if key == "eos_token_id" else (getattr(c, key),)
        if any(i is not None and not 0 <= i < c.vocab_size for i in ids):
            raise ValueError(f"{key} {getattr(c, key)} is outside a vocabulary of {c.vocab_size}")
