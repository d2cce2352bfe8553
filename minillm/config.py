"""The config: which model, of which family, of which sizes; all families in one dataclass.

Explained in deeper/10_families. Keys follow Hugging Face; how the families spell them in
their files is in `minillm.pretrained.families`.
"""

# Built from notebooks/deeper/10_families.ipynb: edit there, then make build.

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pkgutil import resolve_name
from typing import Any

from minillm.nn.layers import ACTIVATIONS

__all__ = ["FAMILIES", "Family", "ModelConfig"]


@dataclass(frozen=True)
class Family:
    """What sets a family of models apart, beyond the numbers in its config.

    `norm`, `attention`, `mlp` and `layer` are functions that make a part from the config (`mlp` and
    `layer` from config and number of the layer), or where to find one, "module:function"; without
    them the part is Llama's.
    """

    layer_norm: bool = False  # LayerNorm with a bias instead of RMSNorm
    norm_eps: float = 1e-6  # where the config gives none
    norm_offset: float = 0.0  # Gemma's RMSNorm multiplies by 1 + weight
    gated: bool = True  # a gate in the feed-forward block (SwiGLU, GeGLU)
    activation: str = "silu"  # where the config gives none
    rotary: bool = True  # else a learned vector for each position, or none
    scaled_embeddings: bool = False  # times the square root of the hidden size
    qk_norm: bool = False
    qkv_bias: bool = False  # biases on q, k and v, whatever the config says
    bias: bool = False  # biases on all linear layers, where the config gives none
    parallel_residual: bool = False  # attention and feed-forward side by side
    tied: bool = False  # head and embedding share a matrix, where the config does not say
    mla: bool = False  # a latent instead of per-head keys and values
    experts: str = ""  # some layers are mixtures of experts, whose router's scores are of this kind
    state: str = ""  # layers keep a state of this kind, "mamba" or "mamba2", and need no positions
    norm: Callable[..., Any] | str | None = None
    attention: Callable[..., Any] | str | None = None
    mlp: Callable[..., Any] | str | None = None
    layer: Callable[..., Any] | str | None = None

    def maker(self, part: str) -> Callable[..., Any] | None:
        """The function that makes the family's "norm", "attention", "mlp" or "layer", if any.

        Raises: ValueError for a name under which none is found.
        """
        found = getattr(self, part)
        if isinstance(found, str):
            try:
                found = resolve_name(found)
            except (ImportError, AttributeError, ValueError) as error:
                raise ValueError(f"no function {found!r} for {part}: {error}") from None
        return found

    @property
    def may_attend(self) -> bool:
        """Whether its layers may have attention: all do, or those that the config names."""
        return self.rotary or not self.state

    @property
    def learned_positions(self) -> bool:
        """Whether each position has a vector of its own."""
        return not self.rotary and not self.state


_TANH = "gelu_pytorch_tanh"

_OURS = "minillm.models.families"

_EXPERTS, _STATE = f"{_OURS}.experts:mlp", f"{_OURS}.state:layer"

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "gemma": Family(norm_offset=1.0, activation=_TANH, scaled_embeddings=True, tied=True),
    "gpt2": Family(
        True, 1e-5, gated=False, activation="gelu_new", rotary=False, bias=True, tied=True
    ),
    "falcon": Family(
        *(True, 1e-5),
        gated=False,
        activation="gelu",
        parallel_residual=True,
        tied=True,
        layer=f"{_OURS}.falcon:layer",
    ),
    "deepseek_v3": Family(
        mla=True, experts="sigmoid", attention=f"{_OURS}.deepseek_v3:attention", mlp=_EXPERTS
    ),
    "mixtral": Family(norm_eps=1e-5, experts="softmax", mlp=_EXPERTS),
    "qwen3_moe": Family(qk_norm=True, experts="softmax", mlp=_EXPERTS),
    "mamba": Family(norm_eps=1e-5, rotary=False, tied=True, state="mamba", layer=_STATE),
    "mamba2": Family(norm_eps=1e-5, rotary=False, state="mamba2", layer=_STATE),
    "bamba": Family(norm_eps=1e-5, state="mamba2", layer=_STATE),
}

_UNSET: Any = None  # the default of keys that the family fills in, or that only some families have


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes a model's shape and arithmetic, under Hugging Face's keys.

    None means: what the family does (`FAMILIES`), or what follows from the other keys.
    Raises: ValueError, with key and value, for a wrong type, a value out of range, an unknown
        family, and keys that contradict each other.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int = _UNSET
    intermediate_size: int = _UNSET
    model_type: str = "llama"
    num_key_value_heads: int = _UNSET
    head_dim: int = _UNSET
    hidden_act: str = _UNSET
    max_position_embeddings: int = 2048
    rms_norm_eps: float = _UNSET  # also the epsilon of LayerNorm
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rope_interleave: bool = _UNSET
    attention_bias: bool = _UNSET
    mlp_bias: bool = _UNSET
    attention_dropout: float = 0.0
    sliding_window: int | None = None
    tie_word_embeddings: bool = _UNSET
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    parallel_attn: bool = _UNSET  # Falcon: attention and feed-forward side by side,
    num_ln_in_parallel_attn: int = _UNSET  # under one norm (7B) or two (40B, 180B)
    q_lora_rank: int | None = None  # MLA: ranks of the latents, sizes of the parts of a head
    kv_lora_rank: int = _UNSET
    qk_nope_head_dim: int = _UNSET
    qk_rope_head_dim: int = _UNSET
    v_head_dim: int = _UNSET
    num_experts: int = _UNSET  # experts of a sparse layer; 0: no layer is sparse
    num_experts_per_tok: int = _UNSET
    moe_intermediate_size: int = _UNSET  # of one expert
    n_shared_experts: int = _UNSET  # for all tokens, as one block
    norm_topk_prob: bool = _UNSET  # how choices and weights are made: see `minillm.nn.moe`
    routed_scaling_factor: float = _UNSET
    router_aux_loss_coef: float = _UNSET  # of the loss that balances experts, for training
    n_group: int = _UNSET
    topk_group: int = _UNSET
    first_k_dense_replace: int = _UNSET  # sparse are layers from this one on,
    decoder_sparse_step: int = _UNSET  # each whose number, counted from 1, this divides,
    mlp_only_layers: tuple[int, ...] = _UNSET  # and which is not one of these
    state: Any = _UNSET  # the `StateSizes` of `minillm.nn.mamba`, for layers with a state,
    attn_layer_indices: tuple[int, ...] = _UNSET  # which are all but these, which attend,
    partial_rotary_factor: float = 1.0  # rotating this part of each head

    def __post_init__(self) -> None:
        if not isinstance(self.model_type, str) or self.model_type not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ValueError(f"unknown model_type {self.model_type!r}; known are {known}")
        needed = {f.name for f in fields(self) if f.default is not None}
        if self.family.may_attend:
            needed.add("num_attention_heads")
        _check_values(vars(self), needed=needed)
        for key in ("eos_token_id", "mlp_only_layers", "attn_layer_indices"):
            if isinstance(getattr(self, key), list):
                object.__setattr__(self, key, tuple(getattr(self, key)))
        if isinstance(self.state, Mapping):
            object.__setattr__(self, "state", _read_state(self.state))
        for key, value in _defaults(self).items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        _check_together(self)

    @property
    def family(self) -> Family:
        """What the family does that no key says."""
        return FAMILIES[self.model_type]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text: none, one or several."""
        ids = self.eos_token_id
        return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

    def is_sparse(self, layer: int) -> bool:
        """Whether experts, of which each token uses a few, are this layer's feed-forward block."""
        return (
            bool(self.num_experts)
            and layer >= self.first_k_dense_replace
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    def has_state(self, layer: int) -> bool:
        """Whether a memory of fixed size stands in this layer where others have attention."""
        return bool(self.family.state) and layer not in self.attn_layer_indices

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


def _read_state(given: Mapping[str, Any]) -> Any:
    """The `StateSizes` of a table. Raises: ValueError for keys that it does not have."""
    from minillm.nn.mamba import StateSizes

    known = {f.name for f in fields(StateSizes)}
    if strange := sorted(set(given) - known):
        raise ValueError(f"state has no {', '.join(map(repr, strange))}, but {sorted(known)}")
    return StateSizes(**given)


def _defaults(c: ModelConfig) -> dict[str, Any]:
    """What stands for None: the family's habit, or what follows from other keys."""
    family = c.family
    heads = c.num_attention_heads
    if not family.mla and c.head_dim is None and heads and c.hidden_size % heads:
        raise ValueError(
            f"hidden_size {c.hidden_size} does not divide into {heads} heads: give head_dim"
        )
    return {
        "num_key_value_heads": c.num_attention_heads,
        "head_dim": c.qk_rope_head_dim if family.mla else heads and c.hidden_size // heads,
        "intermediate_size": None if family.gated else 4 * c.hidden_size,
        "hidden_act": family.activation,
        "rms_norm_eps": family.norm_eps,
        "rope_interleave": family.mla,
        "attention_bias": family.bias,
        "mlp_bias": family.bias,
        "tie_word_embeddings": family.tied,
        "parallel_attn": family.parallel_residual,
        "num_ln_in_parallel_attn": 1 if family.parallel_residual else None,
        "attn_layer_indices": () if family.state else None,
        **(_expert_defaults(c) if c.num_experts else {}),
    }


def _expert_defaults(c: ModelConfig) -> dict[str, Any]:
    return {
        "moe_intermediate_size": c.intermediate_size if c.model_type == "mixtral" else None,
        "n_shared_experts": 0,
        "norm_topk_prob": c.model_type != "qwen3_moe",
        "routed_scaling_factor": 1.0,
        "router_aux_loss_coef": 0.001 if c.family.experts == "softmax" else None,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    }


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:  # neither NaN nor infinite, nor too long for a float
    return (_is_int(x) or isinstance(x, float)) and abs(x) <= sys.float_info.max


_SIZES = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "intermediate_size max_position_embeddings sliding_window q_lora_rank kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim num_experts_per_tok moe_intermediate_size "
    "n_group topk_group decoder_sparse_step"
)

_COUNTS = "num_experts n_shared_experts first_k_dense_replace"

# What is asked, in words: the test, and the keys that must pass it. (What else files may hold is
# checked where they are read, in `minillm.pretrained.families`.)
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "a table": (lambda x: isinstance(x, Mapping), "rope_scaling"),
    "a positive integer": (lambda x: _is_int(x) and x > 0, _SIZES),
    "an integer from 0": (lambda x: _is_int(x) and x >= 0, _COUNTS),
    "below 2**31": (lambda x: x < 2**31, f"{_SIZES} {_COUNTS}"),
    "numbers of layers": (
        lambda x: isinstance(x, list | tuple) and all(_is_int(i) and i >= 0 for i in x),
        "mlp_only_layers attn_layer_indices",
    ),
    "an integer": (_is_int, "bos_token_id pad_token_id"),
    "an integer or several": (
        lambda x: all(map(_is_int, x if isinstance(x, list | tuple) else [x])),
        "eos_token_id",
    ),
    "1 or 2": (lambda x: _is_int(x) and x in (1, 2), "num_ln_in_parallel_attn"),
    "a positive number": (
        lambda x: _is_number(x) and x > 0,
        "rms_norm_eps routed_scaling_factor rope_theta rope_scaling.rope_theta "
        "rope_scaling.factor rope_scaling.original_max_position_embeddings "
        "rope_scaling.beta_fast rope_scaling.beta_slow",
    ),
    "a number": (
        _is_number,
        "rope_scaling.low_freq_factor rope_scaling.high_freq_factor "
        "rope_scaling.attention_factor rope_scaling.mscale rope_scaling.mscale_all_dim",
    ),
    "a number, not negative": (
        lambda x: _is_number(x) and x >= 0,
        "initializer_range router_aux_loss_coef",
    ),
    "a number above 0, at most 1": (
        lambda x: _is_number(x) and 0 < x <= 1,
        "partial_rotary_factor",
    ),
    "a number from 0 to below 1": (lambda x: _is_number(x) and 0 <= x < 1, "attention_dropout"),
    "True or False": (
        lambda x: isinstance(x, bool),
        "rope_interleave attention_bias mlp_bias tie_word_embeddings parallel_attn norm_topk_prob "
        "rope_scaling.truncate",
    ),
}


def _check_values(given: Mapping[str, Any], needed: Collection[str] = ()) -> None:
    """Raises: ValueError for a value that its key may not hold; None only where it is needed."""
    for words, (fits, keys) in _VALUES.items():
        for key in keys.split():
            table, _, inner = key.rpartition(".")
            value = (given.get(table) or {}).get(inner) if table else given.get(key)
            if (value is not None or key in needed) and not fits(value):
                raise ValueError(f"{key} must be {words}, not {value!r}")


def _check_together(c: ModelConfig) -> None:
    """Raises: ValueError for keys that lack, or contradict each other."""
    H, G, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    _check_states(c)
    latent = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    needed = () if H is None else ("intermediate_size", *(latent if c.family.mla else ()))
    missing = [key for key in needed if getattr(c, key) is None]
    if c.family.experts or c.num_experts:
        missing += _check_experts(c)
    if missing:
        raise ValueError(f"a {c.model_type} config lacks {', '.join(missing)}")
    if c.family.mla and c.attention_bias:
        raise ValueError("deepseek_v3 with attention_bias=True is not supported")
    if c.family.mla and (c.attention_dropout or c.qk_rope_head_dim != D):
        given = f"dropout {c.attention_dropout}, head_dim {D}, qk_rope_head_dim"
        rule = "deepseek_v3 drops nothing, and its head_dim is what rotates"
        raise ValueError(f"{rule}: {given} {c.qk_rope_head_dim}")
    if c.family.mla and H != G:
        raise ValueError(f"deepseek_v3 has a key and a value for each of its {H} heads, not {G}")
    if H is not None and H % G:
        raise ValueError(f"{H} query heads do not share {G} key/value heads evenly")
    if c.family.rotary and ((turned := int(D * c.partial_rotary_factor)) % 2 or not turned):
        part = "" if turned == D else f" of which {turned} rotate"
        raise ValueError(f"rotary positions turn pairs: head_dim {D}{part} is odd")
    if c.family.rotary and c.rope_scaling is not None:
        _check_scaling(c)
    if not isinstance(c.hidden_act, str) or c.hidden_act not in ACTIVATIONS:
        raise ValueError(f"unknown hidden_act {c.hidden_act!r}; known are {', '.join(ACTIVATIONS)}")
    for key in ("bos_token_id", "pad_token_id", "eos_token_id"):
        ids = c.eos_token_ids if key == "eos_token_id" else (getattr(c, key),)
        if any(i is not None and not 0 <= i < c.vocab_size for i in ids):
            raise ValueError(f"{key} {getattr(c, key)} is outside a vocabulary of {c.vocab_size}")


def _check_experts(c: ModelConfig) -> list[str]:
    """The keys that lack. Raises: ValueError for experts that no router can choose so."""
    if not c.family.experts:
        raise ValueError(f"{c.model_type} has no experts: num_experts {c.num_experts}")
    if not c.num_experts:  # DeepSeek's files and Qwen's may say so
        known = c.family.mla or (c.model_type == "qwen3_moe" and c.num_experts == 0)
        return [] if known else ["num_experts"]
    if not any(map(c.is_sparse, range(c.num_hidden_layers))):
        return []
    missing = [k for k in ("num_experts_per_tok", "moe_intermediate_size") if not getattr(c, k)]
    if not missing:
        from minillm.nn.moe import check_experts

        check_experts(c.num_experts, c.num_experts_per_tok, c.n_group, c.topk_group)
    return missing


def _check_states(c: ModelConfig) -> None:
    """Raises: ValueError for states that the family does not have, or that cannot be computed."""
    kind, given, layers = c.model_type, c.state, c.attn_layer_indices
    if not c.family.state:
        if given is not None or layers is not None:
            raise ValueError(f"{kind} has no states: state {given}, attn_layer_indices {layers}")
        if c.partial_rotary_factor != 1:
            raise ValueError(f"partial_rotary_factor {c.partial_rotary_factor}: {kind} has 1")
        return
    from minillm.nn.mamba import StateSizes, check_heads

    if not isinstance(given, StateSizes):
        raise ValueError(f"a {kind} config needs state, a StateSizes or a table, not {given!r}")
    if c.family.state == "mamba2":
        check_heads(c.hidden_size, given)
    if not c.family.may_attend:
        keys = ("num_attention_heads", "intermediate_size", "attn_layer_indices")
        if wrong := [f"{key} {getattr(c, key)}" for key in keys if getattr(c, key)]:
            raise ValueError(f"{kind} has neither attention nor MLP: {', '.join(wrong)}")
    if strange := [i for i in layers if i >= c.num_hidden_layers]:
        raise ValueError(f"attn_layer_indices {strange}: there are {c.num_hidden_layers} layers")


def _check_scaling(c: ModelConfig) -> None:
    """Raises: ValueError if the rotation cannot be computed."""
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
        given = f"rope_scaling {dict(c.rope_scaling or {})} with rope_theta {c.rope_theta}"
        raise ValueError(f"{given} cannot be computed: {error}") from None
