"""The config: which model, of which family, of which sizes.

Explained in notebooks/10_minillm. `ModelConfig` has Llama's keys, under Hugging Face's names; a
family that needs more adds them in a class of its own (`minillm.support.family`).
"""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from minillm.support.checks.config import LLAMA_KEYS, check_keys, check_llama
from minillm.support.checks.kinds import Kind
from minillm.support.family import Family, config_class, family_of

__all__ = ["UNSET", "ModelConfig"]

UNSET: Any = None  # the default of keys that the family fills in, or that follow from others


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes a model's shape and arithmetic, under Hugging Face's keys.

    None means: what the family does (`habits`), or what follows from the other keys. A config of a
    family that adds keys has a class of its own: `ModelConfig(..., model_type="gpt2")` makes it.

    Args:
        num_key_value_heads: None for as many as there are query heads.
        head_dim: size of a head; None for hidden_size / num_attention_heads.
        hidden_act: a name in `minillm.ACTIVATIONS`.
        max_position_embeddings: positions that the model is trained for.
        rope_scaling: how the rotation goes beyond them (deeper/05_long_context).
        attention_dropout: share of attention weights dropped while training.
        sliding_window: how many positions a query reads, its own included; None for all.
        tie_word_embeddings: whether head and embedding are one matrix.
        initializer_range: standard deviation of fresh weights.
        bos_token_id, eos_token_id, pad_token_id: what begins, ends (one id or several), fills rows.
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

    positions: ClassVar[str] = "rotary"  # in some families "learned", or "none"
    stateful: ClassVar[bool] = False  # in some, layers keep a memory of fixed size
    habits: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    kinds: ClassVar[Mapping[str, Kind]] = LLAMA_KEYS  # what each key may hold

    def __new__(cls, *args: Any, **keys: Any) -> "ModelConfig":
        """An empty config of the family's class, which `__init__` fills."""
        given = cls is ModelConfig and (args or keys)  # a copy is filled without arguments
        return object.__new__(config_class(cls, args, keys) if given else cls)

    def __post_init__(self) -> None:
        check_keys(self, ModelConfig)
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), list) and f.name in self.kinds:
                object.__setattr__(self, f.name, tuple(value))  # frozen, but not finished yet
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
        check_llama(self)

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
    def preset(cls, name: str, **changes: Any) -> "ModelConfig":
        """The config of a published model, such as "llama-3.1-8b"; see `pretrained.presets`."""
        from minillm.deeper.pretrained.presets import keys_of

        return cls(**{**keys_of(name), **changes})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ModelConfig":
        """Read a `config.json` of transformers; see `pretrained.families` for what is refused."""
        from minillm.deeper.pretrained.families import read_config

        return cls(**read_config(data))

    def to_dict(self) -> dict[str, Any]:
        """A `config.json` that transformers reads; the inverse of `from_dict`."""
        from minillm.deeper.pretrained.families import write_config

        return write_config(self)
