"""`config.json` of every family and age: read to the arguments of `ModelConfig`, and written back.

What a family spells in its own way stands in its `Family`, in `minillm.beyond.families`. Used by
`ModelConfig.from_dict` and `ModelConfig.to_dict`; written by hand, not built.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from minillm.config import ModelConfig
from minillm.support.checks.config import SCALING, USUAL_IF_NONE
from minillm.support.checks.kinds import (
    SWITCH,
    TABLE,
    TEXT,
    Kind,
    any_of,
    check_kind,
    list_of,
    whole,
)
from minillm.support.family import FAMILIES, Family, family_of

# Keys that change what some families compute: the values that we compute, and what others mean.
# A family that does not read one (`Family.reads`) passes it over, as transformers does.
_SUPPORTED = {
    "alibi": ((False,), "ALiBi positions"),
    "scale_attn_weights": ((True,), "unscaled attention scores"),
    "scale_attn_by_inverse_layer_idx": ((False,), "attention scores scaled by layer"),
    "add_cross_attention": ((False,), "cross-attention"),
    "rope_interleaved": ((False,), "weights stored for the interleaved rotation"),
    "use_mrope": ((False,), "positions of several axes"),
    "is_encoder_decoder": ((False,), "an encoder beside the decoder"),
    "use_bidirectional_attention": ((False,), "attention to later tokens"),
    "quantization_config": ((), "quantized weights"),
    "scoring_func": (("sigmoid",), "scores of experts that are no sigmoids"),
    "topk_method": (("noaux_tc",), "groups of experts judged in another way"),
}


# Hugging Face's names of activations that have another with us.
ACTIVATION_NAMES = {
    "gelu_tanh": "gelu_pytorch_tanh",
    "gelu_sigmoid": "quick_gelu",
    "relu_squared": "relu2",
}


_AUTO: Kind = "'auto'", lambda x: x == "auto"

# What a config.json may hold under keys that a config has not; null stands for "not said".
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(["original_max_position_embeddings", "conv_kernel", "expand"], whole(1)),
    **dict.fromkeys(["state_size", "num_heads", "n_groups", "chunk_size"], whole(1)),
    **dict.fromkeys(["mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_n_heads"], whole(1)),
    **dict.fromkeys(["mamba_n_groups", "mamba_chunk_size"], whole(1)),
    **dict.fromkeys(["time_step_rank", "mamba_d_head"], any_of(_AUTO, whole(1))),
    **dict.fromkeys(["max_window_layers", "num_local_experts"], whole(0)),
    **dict.fromkeys(["use_bias", "use_conv_bias", "residual_in_fp32"], SWITCH),
    **dict.fromkeys(["mamba_proj_bias", "mamba_conv_bias", "use_sliding_window"], SWITCH),
    **dict.fromkeys(["new_decoder_architecture", "multi_query"], SWITCH),
    "hidden_act": TEXT,
    **dict.fromkeys(["architectures", "layer_types"], list_of(TEXT)),
    "rope_parameters": TABLE,
}


def check_value(key: str, value: Any) -> None:
    """Raises: ValueError for a value that no config may hold under that key."""
    if value is not None:
        check_kind(key, value, ModelConfig.kinds[key])


# Keys without effect on the logits of a finished model.
_SILENT = {
    *"_name_or_path architectures auto_map dtype torch_dtype transformers_version".split(),
    *"use_cache pretraining_tp task_specific_params gradient_checkpointing return_dict".split(),
    *"resid_pdrop embd_pdrop hidden_dropout reorder_and_upcast_attn n_ctx qk_head_dim".split(),
    *"summary_activation summary_type summary_use_proj summary_proj_to_labels".split(),
    *"summary_first_dropout apply_residual_connection_post_layernorm output_past".split(),
    *"num_nextn_predict_layers output_router_logits router_jitter_noise ep_size".split(),
    *"aux_loss_alpha seq_aux num_mtp_layers rope_parameters model_max_length".split(),
    # how layers with a state begin, and by which of several equal ways they are computed
    *"time_step_min time_step_max time_step_floor time_step_scale time_step_init_scheme".split(),
    *"rescale_prenorm_residual use_mambapy use_associative_scan num_logits_to_keep".split(),
    "z_loss_coefficient",
    # who made the file and with what; the ids of further tokens
    *"_model_name_or_path _commit_hash _attn_implementation _num_labels is_llama_config".split(),
    *"is_decoder tokenizer_class transformers.js_config unsloth_version unsloth_fixed".split(),
    *"hidden_activation chunk_size_feed_forward unk_token_id sep_token_id cls_token_id".split(),
    *"mask_token_id decoder_start_token_id _sliding_window_pattern cache_implementation".split(),
    # what a call returns, what another task would name its classes
    *"output_hidden_states output_attentions return_dict_in_generate torchscript".split(),
    *"id2label label2id problem_type finetuning_task classifier_dropout".split(),
    # older files say here how to generate; we read of generation_config.json the end tokens only
    *"do_sample temperature top_k top_p typical_p repetition_penalty max_length min_length".split(),
    *"num_beams num_return_sequences length_penalty no_repeat_ngram_size".split(),
    *"early_stopping max_new_tokens".split(),
}


_HEADS, _GROUPS = "num_attention_heads", "num_key_value_heads"


def read_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `ModelConfig` from a `config.json` of whatever family and age.

    Raises: ValueError if the model computes something that we do not, or if a size is missing.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a config is a table of keys and values, not {data!r}")
    data = _text_part(data)
    family = family_of(data.get("model_type"))
    config = family.config or ModelConfig
    known = {f.name for f in fields(config)}
    if not family.architecture:  # a family that was added to `FAMILIES`: its files have our keys
        _warn_of(data.keys() - known - _SILENT)
        return {key: value for key, value in data.items() if key in known}
    strange = _check_computed(data, family)
    found = _spelled(data, family, config, strange)
    _pass_over_outside(found)
    for key, value in found.items():
        if kind := {**_KINDS, **config.kinds}.get(key):
            check_kind(family.spelling.get(key, key), value, kind)
    spelled = {key: family.spelling.get(key, key) for key in family.usual.keys() - found.keys()}
    usual = {key: family.usual[key] for key, name in spelled.items() if name not in data}
    _check_sizes(usual | found, family, config)
    if config.positions != "none" and (usual | found)[_HEADS] % usual.get(_GROUPS, 1):
        del usual[_GROUPS]  # no model has so many: as many as there are queries
    found |= usual
    if config.positions == "rotary":
        _read_ropes(found, data, family)
    _read_window(found, family)
    foreign = {*family.unwritten.split(), *([] if family.windowed else ["sliding_window"])}
    passed = {}
    if config.positions != "none":  # a state's sizes have names that attention's have elsewhere
        passed = {key: found.pop(key) for key in foreign & found.keys()}
    if family.read is not None:
        family.read(found, data)
    if config.positions == "none":
        passed = {key: found.pop(key) for key in foreign & found.keys()}
    strange |= found.keys() - known - _SILENT
    _warn_of(strange | {key for key, value in passed.items() if _matters(config, key, value)})
    return {k: v for k, v in found.items() if k in known}


def _text_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that also sees pictures, the part for texts; special ids may stand outside it."""
    inner, kind = data.get("text_config"), f"{data.get('model_type')}_text"
    if kind not in FAMILIES or not isinstance(inner, Mapping):
        return data
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"model_type": kind, **inner, **{key: data[key] for key in ids if key in data}}


def _spelled(
    data: Mapping[str, Any], family: Family, config: type[ModelConfig], strange: set[str]
) -> dict[str, Any]:
    """What a file says, under our names; what it says under ours that are not its own is strange.

    Raises: ValueError for two values under two names of a key.
    """
    theirs = {**{v: k for k, v in family.spelling.items()}, **family.aliases}
    found: dict[str, Any] = {}
    for key in sorted(data, key=lambda key: key in family.aliases):
        if (value := data[key]) is None or key in _SUPPORTED:
            continue
        if key in family.spelling and key not in theirs:
            strange |= {key} if _matters(config, key, value) else set()
            continue
        ours = theirs.get(key, key)
        if found.setdefault(ours, value) != value:
            first = family.spelling.get(ours, ours)
            raise ValueError(f"{first} {found[ours]}, {key} {value}")
    return found


def _matters(config: type[ModelConfig], key: str, value: Any) -> bool:
    """Whether a key that is passed over says something else than what is done anyway."""
    return value != (getattr(config, key) if key in USUAL_IF_NONE else False)


def _pass_over_outside(found: dict[str, Any]) -> None:
    """Take out ids of special tokens that no vocabulary of this size has, with a warning."""
    size = found.get("vocab_size")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        listed = isinstance(found.get(key), list | tuple)
        ids = found.get(key, ()) if listed else [found.get(key)]
        left = [i for i in ids if type(i) is not int or type(size) is not int or 0 <= i < size]
        if len(left) == len(ids):
            continue
        if (key, found[key]) != ("pad_token_id", -1):  # early files of Llama's say so
            what = f"{key} {found[key]} is outside a vocabulary of {size}, and passed over"
            warnings.warn(what, stacklevel=4)
        if left:
            found[key] = left
        else:
            del found[key]


def _warn_of(strange: set[str]) -> None:
    if strange:
        names = ", ".join(sorted(strange))
        warnings.warn(f"config keys that are not used: {names}", stacklevel=4)


def _check_computed(data: Mapping[str, Any], family: Family) -> set[str]:
    """Keys that the family does not read, though they speak of another arithmetic than ours.

    Raises: ValueError for one that it does read.
    """
    strange = set()
    for key, (ours, meaning) in _SUPPORTED.items():
        if data.get(key) is None or data[key] in ours:
            continue
        if key in ("quantization_config", *family.reads.split()):
            raise ValueError(f"{key}={data[key]!r:.60} is not supported: {meaning}")
        strange.add(key)
    return strange


def _check_sizes(found: Mapping[str, Any], family: Family, config: type[ModelConfig]) -> None:
    """Raises: ValueError, with the keys as the file spells them, for sizes that lack."""
    sizes = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
    if config.positions == "none":
        sizes.remove("num_attention_heads")
    if missing := [family.spelling.get(key, key) for key in sizes if key not in found]:
        raise ValueError(f"a {found['model_type']} config lacks {', '.join(missing)}")


def _read_ropes(found: dict[str, Any], data: Mapping[str, Any], family: Family) -> None:
    """The rotation, and that of layers with a window where a family gives them one of their own."""
    theta = getattr(family.config, "local_theta", None)
    if theta is None:
        return _read_rope(found, data, family)
    tables = {key: table or {} for key, table in (data.get("rope_parameters") or {}).items()}
    for key, table in tables.items():
        if key not in ("full_attention", "sliding_attention"):
            raise ValueError(f"rope_parameters of {found['model_type']} go by layer: no {key!r}")
        check_kind(f"rope_parameters: {key}", table, TABLE)
    base = found.pop("rope_local_base_freq", theta)
    near = {"rope_theta": base, **tables.get("sliding_attention", {})}
    local, one = {**found}, {**data, "rope_parameters": None}
    _read_rope(local, {**one, "rope_scaling": near, "rope_theta": None}, family)
    found["rope_local"] = {"rope_theta": local["rope_theta"], **(local["rope_scaling"] or {})}
    all_past = {**tables.get("full_attention", {}), **(data.get("rope_scaling") or {})}
    return _read_rope(found, {**one, "rope_scaling": all_past}, family)


def _read_rope(found: dict[str, Any], data: Mapping[str, Any], family: Family) -> None:
    """One base and one scaling, from `rope_theta` and `rope_scaling` or from `rope_parameters`."""
    from minillm.deeper.attention.rope_scaling import scaling_keys

    both, config = (
        dict(data.get("rope_scaling") or data.get("rope_parameters") or {}),
        family.config,
    )
    if any(isinstance(v, dict) for v in both.values()):
        raise ValueError(f"rope_parameters that differ by layer are not supported: {both}")
    for key, value in both.items():
        if value is not None and key in SCALING:
            check_kind(f"rope_parameters: {key}", value, SCALING[key])
    both = {key: value for key, value in both.items() if value is not None}
    if found["model_type"].endswith("_text"):  # the three axes of pictures are one in a text
        both = {k: v for k, v in both.items() if k not in ("mrope_section", "mrope_interleaved")}
    outer = data.get("rope_theta")
    theta = both.pop("rope_theta", outer)
    if theta is None:
        theta = family.usual.get("rope_theta", 1e4)
        warnings.warn(
            f"the config gives no rope_theta: {theta}, as transformers does", stacklevel=4
        )
    elif outer not in (None, theta):
        _warn_of({f"rope_theta {outer} (it is {theta} in the table)"})
    kind = both.pop("rope_type", both.pop("type", "default"))
    both.pop("type", None)
    part = both.pop("partial_rotary_factor", data.get("partial_rotary_factor"))
    if config is not None and "partial_rotary_factor" in config.__dataclass_fields__:
        found |= {} if part is None else {"partial_rotary_factor": float(part)}
    elif part not in (None, 1.0) and kind != "default":  # which transformers reads there only
        raise ValueError("rope_parameters: rotating only a part of each head is not supported")
    elif part not in (None, 1.0):
        _warn_of({"partial_rotary_factor"})
    found["rope_theta"] = float(theta)
    found["rope_scaling"] = None
    if strange := both.keys() - scaling_keys(kind):
        _warn_of({f"{key} (rope_type {kind!r} does not read it)" for key in strange})
    if kind != "default":
        if kind in ("llama3", "yarn"):
            key = "original_max_position_embeddings"
            inside = both.get(key, data.get("max_position_embeddings"))
            both[key] = found.pop(key, inside)  # one outside counts, as in transformers
        kept = {key: value for key, value in both.items() if key not in strange}
        found["rope_scaling"] = {"rope_type": kind, **kept}


def _read_window(found: dict[str, Any], family: Family) -> None:
    """A window that the file does not use goes. Raises: ValueError for one of some layers only."""
    if "layer_types" in (family.config or ModelConfig).__dataclass_fields__:
        windows = hasattr(family.config, "has_window")
        kinds = found.get("layer_types", ["sliding_attention"] if windows else [])
        if found.get("sliding_window") is None and "sliding_attention" in kinds:
            raise ValueError("layers read a window, but sliding_window is not given")
        return
    types = set(found.pop("layer_types", ()))
    first, usual = found.pop("max_window_layers", None), family.usual.get("max_window_layers")
    if usual is None or first is None:
        first = usual or 0  # so many layers have none
    if not found.pop("use_sliding_window", family.usual.get("use_sliding_window", True)):
        found.pop("sliding_window", None)
    if found.get("sliding_window") is None:
        if "sliding_attention" in types:
            raise ValueError("layer_types say sliding_attention, but sliding_window is not given")
        return
    if types == {"full_attention"} or (not types and first >= found["num_hidden_layers"]):
        del found["sliding_window"]
    elif len(types) > 1 or (not types and first > 0):
        raise ValueError("a sliding window for some of the layers only is not supported")


# Keys under which transformers 5 takes no whole number.
_FLOATS = {
    *"rms_norm_eps rope_theta attention_dropout initializer_range".split(),
    *"routed_scaling_factor router_aux_loss_coef final_logit_softcapping".split(),
}


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A `config.json` that transformers 4 and 5 read."""
    family = config.family
    data = {f.name: _plain(getattr(config, f.name)) for f in fields(config)}
    if not family.architecture:  # a family that was added to `FAMILIES`: our keys as they are
        return data
    for key in _FLOATS & {key for key, value in data.items() if value is not None}:
        data[key] = float(data[key])
    data["hidden_act"] = ACTIVATION_NAMES.get(data["hidden_act"], data["hidden_act"])
    drop = set(family.unwritten.split())
    if config.sliding_window is None and "sliding_window" not in family.usual:
        drop.add("sliding_window")
    data = {family.spelling.get(k, k): v for k, v in data.items() if k not in drop}
    if family.write is not None:
        family.write(config, data)
    return {"architectures": [family.architecture], **data}


def _plain(value: Any) -> Any:
    """A value of a config as JSON has it."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
