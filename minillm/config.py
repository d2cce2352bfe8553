"""The config: which model, of which family, of which sizes; eight families in one dataclass.

Explained in notebooks/10_minillm.ipynb. Keys follow Hugging Face; how the
families spell them in their files is in `minillm.families`.
"""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minillm.nn.layers import ACTIVATIONS

__all__ = ["FAMILIES", "Family", "ModelConfig"]


@dataclass(frozen=True)
class Family:
    """What sets a family of models apart, beyond the numbers in its config."""

    layer_norm: bool = False  # LayerNorm with a bias instead of RMSNorm
    norm_eps: float = 1e-6  # where the config gives none
    norm_offset: float = 0.0  # Gemma's RMSNorm multiplies by 1 + weight
    gated: bool = True  # a gate in the feed-forward block (SwiGLU, GeGLU)
    activation: str = "silu"  # where the config gives none
    rotary: bool = True  # else a learned vector for each position
    scaled_embeddings: bool = False  # times the square root of the hidden size
    qk_norm: bool = False
    qkv_bias: bool = False  # biases on q, k and v, whatever the config says
    bias: bool = False  # biases on all linear layers, where the config gives none
    parallel: bool = False  # attention and feed-forward side by side
    tied: bool = False  # head and embedding share a matrix, where the config does not say
    latent: bool = False  # MLA instead of per-head keys and values


_TANH = "gelu_pytorch_tanh"

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "gemma": Family(norm_offset=1.0, activation=_TANH, scaled_embeddings=True, tied=True),
    "gpt2": Family(
        True, 1e-5, gated=False, activation="gelu_new", rotary=False, bias=True, tied=True
    ),
    "falcon": Family(True, 1e-5, gated=False, activation="gelu", parallel=True, tied=True),
    "deepseek_v3": Family(latent=True),
}


@dataclass(frozen=True)
class _Keys:
    """The numbers of a config, and the family that reads them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int | None = None
    model_type: str = "llama"
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float | None = None  # also the epsilon of LayerNorm
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rope_interleave: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    attention_dropout: float = 0.0
    sliding_window: int | None = None
    tie_word_embeddings: bool | None = None
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    parallel_attn: bool | None = None  # Falcon: attention and feed-forward side by side,
    num_ln_in_parallel_attn: int | None = None  # under one norm (7B) or two (40B, 180B)
    q_lora_rank: int | None = None  # MLA: ranks of the latents, sizes of the parts of a head
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

    @property
    def family(self) -> Family:
        """What the family does that no key says."""
        return FAMILIES[self.model_type]


def _defaults(c: _Keys) -> dict[str, Any]:
    """What stands for None: the family's habit, or what follows from other keys."""
    family = c.family
    return {
        "num_key_value_heads": c.num_attention_heads,
        "head_dim": c.qk_rope_head_dim if family.latent else c.hidden_size // c.num_attention_heads,
        "intermediate_size": None if family.gated else 4 * c.hidden_size,
        "hidden_act": family.activation,
        "rms_norm_eps": family.norm_eps,
        "rope_interleave": family.latent,
        "attention_bias": family.bias,
        "mlp_bias": family.bias,
        "tie_word_embeddings": family.tied,
        "parallel_attn": family.parallel,
        "num_ln_in_parallel_attn": 1 if family.parallel else None,
    }


def _check_sizes(c: _Keys) -> None:
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    optional = (
        "intermediate_size",
        "num_key_value_heads",
        "head_dim",
        "sliding_window",
        "kv_lora_rank",
    )
    optional += ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for key in (*sizes, *optional, "max_position_embeddings"):
        value = getattr(c, key)
        if (value is None and key in optional) or (isinstance(value, int) and value > 0):
            continue
        raise ValueError(f"{key} must be a positive integer, not {value!r}")
    for key, value in (("rms_norm_eps", c.rms_norm_eps), ("rope_theta", c.rope_theta)):
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise ValueError(f"{key} must be a positive number, not {value!r}")
    if c.head_dim is None and not c.family.latent and c.hidden_size % c.num_attention_heads:
        heads = f"{c.num_attention_heads} heads"
        raise ValueError(f"hidden_size {c.hidden_size} does not divide into {heads}: give head_dim")


def _check_config(c: _Keys) -> None:
    H, G, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    latent = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    needed = ("intermediate_size", *(latent if c.family.latent else ()))
    missing = [key for key in needed if getattr(c, key) is None]
    if missing:
        raise ValueError(f"a {c.model_type} config lacks {', '.join(missing)}")
    if c.family.latent and c.attention_bias:
        raise ValueError("deepseek_v3 with attention_bias=True is not supported")
    if c.family.latent and (c.attention_dropout or c.qk_rope_head_dim != D):
        given = f"dropout {c.attention_dropout}, head_dim {D}, qk_rope_head_dim"
        rule = "deepseek_v3 drops nothing, and its head_dim is what rotates"
        raise ValueError(f"{rule}: {given} {c.qk_rope_head_dim}")
    if c.family.latent and H != G:
        raise ValueError(f"deepseek_v3 has a key and a value for each of its {H} heads, not {G}")
    if H % G:
        raise ValueError(f"{H} query heads do not share {G} key/value heads evenly")
    if c.family.rotary and D % 2:
        raise ValueError(f"rotary positions turn pairs: head_dim {D} is odd")
    if not isinstance(c.hidden_act, str) or c.hidden_act not in ACTIVATIONS:
        raise ValueError(f"unknown hidden_act {c.hidden_act!r}; known are {', '.join(ACTIVATIONS)}")
    for key in ("bos_token_id", "pad_token_id", "eos_token_id"):
        ids = c.eos_token_ids if key == "eos_token_id" else (getattr(c, key),)
        if any(i is not None and not 0 <= i < c.vocab_size for i in ids):
            raise ValueError(f"{key} {getattr(c, key)} is outside a vocabulary of {c.vocab_size}")


@dataclass(frozen=True)
class ModelConfig(_Keys):
    """Everything that fixes a model's shape and arithmetic, under Hugging Face's keys.

    None means: what the family does (`FAMILIES`), or what follows from the other keys.
    Raises: ValueError, with the values, if they contradict each other or the family is unknown.
    """

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ValueError(f"unknown model_type {self.model_type!r}; known are {known}")
        _check_sizes(self)
        for key, value in _defaults(self).items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        _check_config(self)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text: none, one or several."""
        ids = self.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

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

        return cls(**read_config(data))

    def to_dict(self) -> dict[str, Any]:
        """A `config.json` that transformers reads; the inverse of `from_dict`."""
        from minillm.pretrained.families import write_config

        return write_config(self)
