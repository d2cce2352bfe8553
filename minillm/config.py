"""The config: which model, of which family, of which sizes (notebook 10)."""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minillm.support.checks.config import check_division, check_keys
from minillm.support.family import ConfigDoors

__all__ = ["UNSET", "ModelConfig"]

UNSET: Any = None  # the default of keys that follow from others, or that only some families need


@dataclass(frozen=True)
class ModelConfig(ConfigDoors):
    """Everything that fixes a model's shape and arithmetic, under Hugging Face's keys.

    Raises: ValueError, with key and value, for what is unknown, out of range or contradictory.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int = UNSET
    intermediate_size: int = UNSET
    model_type: str = "llama"  # the family
    num_key_value_heads: int = UNSET  # as many as there are query heads
    head_dim: int = UNSET  # hidden_size / num_attention_heads
    hidden_act: str = "silu"  # a name in `minillm.ACTIVATIONS`
    max_position_embeddings: int = 2048  # positions that the model is trained for
    rms_norm_eps: float = 1e-6  # also the epsilon of LayerNorm
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None  # how rotation goes beyond the trained length
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0  # share of attention weights dropped while training
    sliding_window: int | None = None  # positions that a query reads, its own included; None: all
    tie_word_embeddings: bool = False  # whether head and embedding are one matrix
    initializer_range: float = 0.02  # standard deviation of fresh weights
    bos_token_id: int | None = None  # begins a text
    eos_token_id: int | tuple[int, ...] | None = None  # ends it: one id or several
    pad_token_id: int | None = None  # fills rows

    def __post_init__(self) -> None:
        check_keys(self, ModelConfig)
        self.fill_in(self.follows())
        self.check()

    def follows(self) -> dict[str, Any]:
        """What a key is that was not given, by the others."""
        check_division(self)
        C, H = self.hidden_size, self.num_attention_heads
        return {"num_key_value_heads": H, "head_dim": H and C // H}
