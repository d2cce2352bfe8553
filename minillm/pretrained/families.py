"""How the families of models spell their `config.json`: tables, and code to read and write them.

Used by `ModelConfig.from_dict` and `ModelConfig.to_dict`; written by hand, not built.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from minillm.config import FAMILIES, ModelConfig

__all__ = ["read_config", "write_config"]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "falcon": "FalconForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "bamba": "BambaForCausalLM",
}


# Keys that two families spell in their own way: ours -> theirs.
_SPELLING = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
        "attention_dropout": "attn_pdrop",
    },
    "falcon": {
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
        "rms_norm_eps": "layer_norm_epsilon",
        "attention_bias": "bias",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "deepseek_v3": {"num_experts": "n_routed_experts"},
    "mamba": {"rms_norm_eps": "layer_norm_epsilon"},
    "mamba2": {"rms_norm_eps": "layer_norm_epsilon"},
}


# Keys of layers with a state: ours -> theirs, and what transformers takes a file without the key to
# mean.
_STATE: dict[str, dict[str, tuple[str, Any]]] = {
    "mamba": {
        "state_size": ("state_size", 16),
        "conv_kernel": ("conv_kernel", 4),
        "expand": ("expand", 2),
        "time_step_rank": ("time_step_rank", None),
        "use_bias": ("use_bias", False),
        "use_conv_bias": ("use_conv_bias", True),
        "residual_in_fp32": ("residual_in_fp32", True),
    },
    "mamba2": {
        "state_size": ("state_size", 128),
        "num_heads": ("num_heads", 128),
        "n_groups": ("n_groups", 8),
        "chunk_size": ("chunk_size", 256),
        "conv_kernel": ("conv_kernel", 4),
        "expand": ("expand", 2),
        "time_step_limit": ("time_step_limit", (0.0, math.inf)),
        "use_bias": ("use_bias", False),
        "use_conv_bias": ("use_conv_bias", True),
        "residual_in_fp32": ("residual_in_fp32", True),
    },
    "bamba": {
        "state_size": ("mamba_d_state", 256),
        "num_heads": ("mamba_n_heads", 128),
        "n_groups": ("mamba_n_groups", 1),
        "chunk_size": ("mamba_chunk_size", 256),
        "conv_kernel": ("mamba_d_conv", 4),
        "expand": ("mamba_expand", 2),
        "time_step_limit": ("time_step_limit", (0.0, math.inf)),
        "use_bias": ("mamba_proj_bias", False),
        "use_conv_bias": ("mamba_conv_bias", True),
    },
}


# Keys that change what a model computes: the values that we compute, and what others mean.
_ONLY = {
    "alibi": ((False,), "ALiBi positions"),
    "scale_attn_weights": ((True,), "unscaled attention scores"),
    "scale_attn_by_inverse_layer_idx": ((False,), "attention scores scaled by layer"),
    "add_cross_attention": ((False,), "cross-attention"),
    "partial_rotary_factor": ((1.0,), "rotating only a part of each head"),
    "rope_interleaved": ((False,), "weights stored for the interleaved rotation"),
    "use_mrope": ((False,), "positions of several axes"),
    "is_encoder_decoder": ((False,), "an encoder beside the decoder"),
    "use_bidirectional_attention": ((False,), "attention to later tokens"),
    "quantization_config": ((), "quantized weights"),
    "scoring_func": (("sigmoid",), "scores of experts that are no sigmoids"),
    "topk_method": (("noaux_tc",), "groups of experts judged in another way"),
}


# Keys of mixtures of experts: which families have them, and what transformers takes a file without
# the key to mean where that is not our default.
_EXPERT_KEYS = {
    "num_experts": ("mixtral", "qwen3_moe", "deepseek_v3"),
    "num_experts_per_tok": ("mixtral", "qwen3_moe", "deepseek_v3"),
    **dict.fromkeys(("moe_intermediate_size", "norm_topk_prob"), ("qwen3_moe", "deepseek_v3")),
    "router_aux_loss_coef": ("mixtral", "qwen3_moe"),
    **dict.fromkeys(("decoder_sparse_step", "mlp_only_layers"), ("qwen3_moe",)),
    **dict.fromkeys(("n_shared_experts", "routed_scaling_factor"), ("deepseek_v3",)),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), ("deepseek_v3",)),
}
_DEEPSEEK = {"first_k_dense_replace": 3, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
_DEEPSEEK |= {"n_group": 8, "topk_group": 4}


# Keys that only these families' files have; in those of others transformers does not look at them.
_OWN = {
    "sliding_window": ("mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"),
    "rope_interleave": ("deepseek_v3",),
    "state": ("mamba", "mamba2", "bamba"),
    "attn_layer_indices": ("bamba",),
    **_EXPERT_KEYS,
}


# Keys that no file of a model without attention has; its layers have no feed-forward block either.
_OF_ATTENTION = {"num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias"}
_OF_ATTENTION |= {"attention_dropout", "intermediate_size", "mlp_bias"}


# Hugging Face's names of activations that have another with us.
ACTIVATION_NAMES = {
    "gelu_tanh": "gelu_pytorch_tanh",
    "gelu_sigmoid": "quick_gelu",
    "relu_squared": "relu2",
}


_Kind = tuple[str, Callable[[Any], bool]]  # in words; whether a value is of that kind


def _whole(least: int, most: int = 2**31 - 1) -> _Kind:
    words = f"a whole number from {least} to {most}"
    return words, lambda x: type(x) is int and least <= x <= most


def _number(words: str, fits: Callable[[float], bool]) -> _Kind:
    def check(x: Any) -> bool:
        return type(x) in (int, float) and abs(x) < 1e300 and fits(x)  # neither NaN nor infinite

    return f"a number {words}", check


def _any_of(*kinds: _Kind) -> _Kind:
    words = " or ".join(words for words, _ in kinds)
    return words, lambda x: any(fits(x) for _, fits in kinds)


def _list_of(kind: _Kind) -> _Kind:
    words, fits = kind
    return f"a list, each {words}", lambda x: isinstance(x, list | tuple) and all(map(fits, x))


_SWITCH: _Kind = "true or false", lambda x: type(x) is bool
_AUTO: _Kind = "'auto'", lambda x: x == "auto"
_TEXT: _Kind = "a string", lambda x: isinstance(x, str)
_TABLE: _Kind = "a table", lambda x: isinstance(x, Mapping) and all(isinstance(k, str) for k in x)
_POSITIVE = _number("above 0", lambda x: x > 0)
_NOT_NEGATIVE = _number("of at least 0", lambda x: x >= 0)
_SHARE = _number("from 0 to 1", lambda x: 0 <= x <= 1)


# What a config.json may hold, under our names; null stands everywhere for "not said".
_KINDS: dict[str, _Kind] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers"), _whole(1)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), _whole(1)),
    **dict.fromkeys(("intermediate_size", "sliding_window"), _whole(1)),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), _whole(1)),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), _whole(1)),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), _whole(1)),
    **dict.fromkeys(("max_window_layers", "first_k_dense_replace", "num_experts"), _whole(0)),
    **dict.fromkeys(("num_local_experts", "n_shared_experts"), _whole(0)),
    **dict.fromkeys(("num_experts_per_tok", "moe_intermediate_size"), _whole(1)),
    **dict.fromkeys(("n_group", "topk_group", "decoder_sparse_step"), _whole(1)),
    **dict.fromkeys(("mlp_only_layers", "attn_layer_indices"), _list_of(_whole(0))),
    **dict.fromkeys(("state_size", "conv_kernel", "expand", "num_heads"), _whole(1)),
    **dict.fromkeys(("n_groups", "chunk_size", "mamba_d_state", "mamba_d_conv"), _whole(1)),
    **dict.fromkeys(("mamba_expand", "mamba_n_heads", "mamba_n_groups"), _whole(1)),
    "mamba_chunk_size": _whole(1),
    **dict.fromkeys(("time_step_rank", "mamba_d_head"), _any_of(_AUTO, _whole(1))),
    **dict.fromkeys(("use_bias", "use_conv_bias", "residual_in_fp32"), _SWITCH),
    **dict.fromkeys(("mamba_proj_bias", "mamba_conv_bias"), _SWITCH),
    "routed_scaling_factor": _POSITIVE,
    "norm_topk_prob": _SWITCH,
    "num_ln_in_parallel_attn": _whole(1, 2),
    "bos_token_id": _whole(0),
    "eos_token_id": _any_of(_whole(0), _list_of(_whole(0))),
    "pad_token_id": _whole(-1),  # early files of Llama's say -1
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), _POSITIVE),
    **dict.fromkeys(("initializer_range", "router_aux_loss_coef"), _NOT_NEGATIVE),
    "attention_dropout": _SHARE,
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), _SWITCH),
    **dict.fromkeys(("rope_interleave", "parallel_attn", "use_sliding_window"), _SWITCH),
    **dict.fromkeys(("new_decoder_architecture", "multi_query"), _SWITCH),
    "hidden_act": _TEXT,
    "architectures": _list_of(_TEXT),
    "layer_types": _list_of(_TEXT),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _TABLE),
}


# What the tables rope_scaling and rope_parameters may hold.
_ROPE_KINDS: dict[str, _Kind] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    "original_max_position_embeddings": _whole(1),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), _POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), _POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _NOT_NEGATIVE),
    **dict.fromkeys(("long_factor", "short_factor"), _list_of(_POSITIVE)),
    "truncate": _SWITCH,
    "partial_rotary_factor": _POSITIVE,
}


def check_value(
    key: str, value: Any, kinds: Mapping[str, _Kind] = _KINDS, *, spelling: str | None = None
) -> None:
    """Raises: ValueError, with the key as the file spells it, for a value of another kind."""
    words, fits = kinds.get(key, ("", lambda _: True))
    if value is not None and not fits(value):
        given = repr(value) if len(repr(value)) < 200 else f"{repr(value)[:200]}..."
        raise ValueError(f"{spelling or key} must be {words}, not {given}")


# Keys without effect on the logits of a finished model.
_SILENT = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype"),
    "transformers_version",
    *(
        "use_cache",
        "pretraining_tp",
        "task_specific_params",
        "gradient_checkpointing",
        "return_dict",
    ),
    *("resid_pdrop", "embd_pdrop", "hidden_dropout", "reorder_and_upcast_attn", "n_ctx"),
    *("qk_head_dim", "summary_activation"),
    # how layers with a state begin, and by which of several equal ways they are computed
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_scale"),
    *("time_step_init_scheme", "rescale_prenorm_residual", "use_mambapy"),
    *("use_associative_scan", "num_logits_to_keep", "z_loss_coefficient"),
    *("summary_type", "summary_use_proj", "summary_proj_to_labels"),
    *("summary_first_dropout", "apply_residual_connection_post_layernorm", "output_past"),
    *("num_nextn_predict_layers", "output_router_logits", "router_jitter_noise"),
    *("ep_size", "aux_loss_alpha", "seq_aux"),
    *("num_mtp_layers", "rope_parameters", "model_max_length"),
    # who made the file and with what; the ids of further tokens
    *("_model_name_or_path", "_commit_hash", "_attn_implementation", "_num_labels"),
    *("is_llama_config", "is_decoder", "tokenizer_class", "transformers.js_config"),
    *("unsloth_version", "unsloth_fixed", "hidden_activation", "chunk_size_feed_forward"),
    *("unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id"),
    # what a call returns, what another task would name its classes
    *("output_hidden_states", "output_attentions", "return_dict_in_generate", "torchscript"),
    *("id2label", "label2id", "problem_type", "finetuning_task", "classifier_dropout"),
    # older files say here how to generate; we read of generation_config.json the end tokens only
    *("do_sample", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
    *("max_length", "min_length", "num_beams", "num_return_sequences", "length_penalty"),
    *("no_repeat_ngram_size", "early_stopping", "max_new_tokens"),
}


def read_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `ModelConfig` from a `config.json` of whatever family and age.

    Raises: ValueError if the model computes something that we do not, or if a size is missing.
    """
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"unknown model_type {kind!r}; known are {', '.join(FAMILIES)}")
    if kind not in ARCHITECTURES:
        return _read_own(data)
    for key, (ours, meaning) in _ONLY.items():
        if key == "partial_rotary_factor" and kind == "bamba":
            ours = (0.5,)  # transformers takes it to be that, whatever is said here
        if data.get(key) is not None and data[key] not in ours:
            raise ValueError(f"{key}={data[key]!r} is not supported: {meaning}")
    theirs = {v: k for k, v in _SPELLING.get(kind, {}).items()}
    found = {theirs.get(k, k): v for k, v in data.items() if k not in _ONLY and v is not None}
    for key, value in found.items():
        check_value(key, value, spelling=_SPELLING.get(kind, {}).get(key))
    sizes = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
    if kind in ("mamba", "mamba2"):
        sizes.remove("num_attention_heads")
    missing = [_SPELLING.get(kind, {}).get(k, k) for k in sizes if k not in found]
    if missing:
        raise ValueError(f"a {kind} config lacks {', '.join(missing)}")
    _read_rope(found, data)
    if kind == "mistral" and "sliding_window" not in data:
        found["sliding_window"] = 4096  # what transformers takes it to mean; null means none
    _read_window(found)
    if found.get("pad_token_id") == -1:
        del found["pad_token_id"]  # early files of Llama's say so
    if kind == "falcon":
        _read_falcon(found)
    if kind == "gemma" and found.get("hidden_act") == "gelu":
        found["hidden_act"] = "gelu_pytorch_tanh"  # early files say "gelu" and mean this
    if FAMILIES[kind].experts:
        _read_experts(found, data)
    if FAMILIES[kind].state:
        _read_states(found)
    if kind == "deepseek_v3":
        found.pop("head_dim", None)  # the rotated part of a key, which has a key of its own
    known = {f.name for f in fields(ModelConfig)}
    foreign = {key for key, kinds in _OWN.items() if kind not in kinds}
    if FAMILIES[kind].state and not FAMILIES[kind].rotary:
        foreign |= _OF_ATTENTION
    strange = sorted((set(found) - known - _SILENT) | (set(found) & foreign))
    if strange:
        warnings.warn(f"config keys that are not used: {', '.join(strange)}", stacklevel=3)
    return {k: v for k, v in found.items() if k in known - foreign}


def _read_own(data: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a family that was added to `FAMILIES`: its files have our keys."""
    known = {f.name for f in fields(ModelConfig)}
    if strange := sorted(data.keys() - known - _SILENT):
        warnings.warn(f"config keys that are not used: {', '.join(strange)}", stacklevel=4)
    return {key: value for key, value in data.items() if key in known}


def _read_rope(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    """One base and one scaling, from `rope_theta` and `rope_scaling` or from `rope_parameters`."""
    if not FAMILIES[data["model_type"]].rotary:
        return
    both = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    if any(isinstance(v, dict) for v in both.values()):
        raise ValueError(f"rope_parameters that differ by layer are not supported: {both}")
    for key, value in both.items():
        check_value(key, value, _ROPE_KINDS, spelling=f"rope_parameters: {key}")
    bamba = data["model_type"] == "bamba"  # transformers asks its files for no part elsewhere
    part = both.pop("partial_rotary_factor", None)
    part = part if part is not None else 0.5 if bamba else 1.0
    if bamba:
        found["partial_rotary_factor"] = float(part)
    elif part != 1.0:
        raise ValueError("rope_parameters: rotating only a part of each head is not supported")
    theta = both.pop("rope_theta", data.get("rope_theta"))
    if theta is None:
        theta = 1e6 if data["model_type"] == "mixtral" else 1e4
        what = f"no rope_theta: {theta}, as transformers does"
        warnings.warn(f"the config gives {what}", stacklevel=4)
    kind = both.pop("rope_type", both.pop("type", "default"))
    both.pop("type", None)
    found["rope_theta"] = float(theta)
    found["rope_scaling"] = None
    if kind != "default":
        if kind in ("llama3", "yarn"):
            key = "original_max_position_embeddings"
            inside = both.get(key, data.get("max_position_embeddings"))
            both[key] = found.pop(key, inside)  # one outside counts, as in transformers
        found["rope_scaling"] = {"rope_type": kind, **both}


def _read_window(found: dict[str, Any]) -> None:
    """Qwen names a window that it may not use; one for some layers only is refused."""
    types = set(found.pop("layer_types", ()))
    first = found.pop("max_window_layers", 28)  # so many layers have none; transformers' default
    if found["model_type"] == "qwen3_moe":
        first = 0  # a window there is for all layers
    qwen = found["model_type"].startswith("qwen")
    if not found.pop("use_sliding_window", not qwen):
        found.pop("sliding_window", None)
    if found.get("sliding_window") is None:
        return
    whole = qwen and not types and first >= found["num_hidden_layers"]
    if types == {"full_attention"} or whole:
        del found["sliding_window"]
    elif len(types) > 1 or (qwen and not types and first > 0):
        raise ValueError("a sliding window for some of the layers only is not supported")


def _read_experts(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    """How many experts there are decides whether what else is said of them counts."""
    kind = found["model_type"]
    if kind == "qwen3_moe" and "num_local_experts" in found:  # as transformers 5 writes it
        num = found.pop("num_local_experts")
        if found.setdefault("num_experts", num) != num:
            raise ValueError(f"num_experts {found['num_experts']}, num_local_experts {num}")
    if "num_experts" not in found and not FAMILIES[kind].mla:
        key = "num_local_experts" if kind == "mixtral" else "num_experts"
        raise ValueError(f"a {kind} config lacks {key}")
    if found.get("moe_layer_freq") == 1:  # others transformers does not look at: a warning says so
        del found["moe_layer_freq"]
    if not found.get("num_experts"):
        for key in _without_experts(kind):
            found.pop(key, None)
    elif kind == "deepseek_v3":
        found |= {k: v for k, v in _DEEPSEEK.items() if k not in data}


def _without_experts(kind: str) -> set[str]:
    """The keys that mean nothing in a file without experts; Qwen's say so by num_experts 0."""
    return _EXPERT_KEYS.keys() - ({"num_experts"} if kind == "qwen3_moe" else set())


def _read_states(found: dict[str, Any]) -> None:
    """The sizes of layers with a state, as one table; heads that do not fit are refused."""
    kind = found["model_type"]
    state = {ours: found.pop(key, usual) for ours, (key, usual) in _STATE[kind].items()}
    if state.get("time_step_rank") == "auto":
        state["time_step_rank"] = None
    if kind == "mamba2":
        found.pop("time_step_rank", None)  # which only Mamba has
    if "time_step_limit" in state:  # transformers 5 writes infinity as a table
        limit = state["time_step_limit"]
        words = {"Infinity": math.inf}
        if isinstance(limit, list):
            limit = [
                words.get(str(x.get("__float__"))) if isinstance(x, Mapping) else x for x in limit
            ]
        state["time_step_limit"] = limit
    channels = state["expand"] * found["hidden_size"]
    given = {"mamba": "intermediate_size", "mamba2": "head_dim", "bamba": "mamba_d_head"}[kind]
    size, heads = found.pop(given, None), state.get("num_heads", 1)
    if size not in (None, "auto") and size * heads != channels:
        what = f"{given} {size}" + (f" times {heads} heads" if heads > 1 else "")
        raise ValueError(f"{what} is not expand times hidden_size, {channels}")
    found["state"] = state
    if kind == "bamba":
        found.setdefault("attn_layer_indices", ())


def _read_falcon(found: dict[str, Any]) -> None:
    """How many keys and norms a Falcon has follows from three switches."""
    new = found.pop("new_decoder_architecture", False)
    if not found.setdefault("parallel_attn", True) and new:
        raise ValueError("falcon: new_decoder_architecture without parallel_attn is not supported")
    if not new:
        multi_query = found.pop("multi_query", True)
        found["num_key_value_heads"] = 1 if multi_query else found["num_attention_heads"]
        found.pop("num_ln_in_parallel_attn", None)
    found.pop("multi_query", None)
    if new:
        found.setdefault("num_ln_in_parallel_attn", 2)
    found["mlp_bias"] = found.setdefault("attention_bias", False)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A `config.json` that transformers 4 and 5 read."""
    kind, family = config.model_type, config.family
    data = {f.name: getattr(config, f.name) for f in fields(config)}
    if kind not in ARCHITECTURES:  # a family that was added to `FAMILIES`: our keys as they are
        return {key: _plain(value) for key, value in data.items()}
    for key in ("rms_norm_eps", "rope_theta", "attention_dropout", "initializer_range"):
        data[key] = float(data[key])  # transformers 5 takes no whole number there
    data["hidden_act"] = ACTIVATION_NAMES.get(data["hidden_act"], data["hidden_act"])
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    drop = {"parallel_attn", "num_ln_in_parallel_attn", "rope_interleave"}
    drop |= set() if family.mla else set(latent)
    drop |= {key for key, kinds in _EXPERT_KEYS.items() if kind not in kinds}
    if not config.num_experts:
        drop |= _without_experts(kind)
    drop |= {"rope_theta", "rope_scaling"} if not family.rotary else set()
    drop |= {"state", "attn_layer_indices", "partial_rotary_factor"}
    drop |= {"mlp_bias"} if kind not in ("llama", "bamba") else set()
    drop |= {"attention_bias"} if kind in ("gpt2", "qwen2", "mistral", "mixtral") else set()
    drop |= {"num_key_value_heads"} if kind == "gpt2" else set()
    drop |= {"head_dim"} if kind in ("gpt2", "qwen2", "falcon", "deepseek_v3") else set()
    drop |= {"sliding_window"} if config.sliding_window is None and kind != "mistral" else set()
    extra: dict[str, Any] = {}
    if kind == "deepseek_v3":
        extra = {"rope_interleave": config.rope_interleave}
        if not config.num_experts:
            extra |= {"first_k_dense_replace": config.num_hidden_layers}
    elif kind == "falcon":
        extra = _write_falcon(config)
    if kind.startswith("qwen") and config.sliding_window is not None:
        extra |= {"use_sliding_window": True, "max_window_layers": 0}
    if family.state:
        extra = _write_states(config)
        drop |= {"rope_scaling"} if family.rotary else _OF_ATTENTION
    theirs = _SPELLING.get(kind, {})
    data = {theirs.get(k, k): v for k, v in data.items() if k not in drop}
    for key in ("eos_token_id", "mlp_only_layers"):
        if isinstance(data.get(key), tuple):
            data[key] = list(data[key])
    for key in data.keys() & {"routed_scaling_factor", "router_aux_loss_coef"}:
        data[key] = float(data[key])
    if data.get("rope_scaling") is not None:
        data["rope_scaling"] = dict(data["rope_scaling"])
    return {"architectures": [ARCHITECTURES[kind]], **data, **extra}


def _plain(value: Any) -> Any:
    """A value of a config as JSON has it."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _write_states(config: ModelConfig) -> dict[str, Any]:
    state, extra = config.state, {}
    for ours, (key, _) in _STATE[config.model_type].items():
        value = getattr(state, ours)
        extra[key] = list(value) if isinstance(value, tuple) else value
    if config.model_type == "mamba":
        extra["time_step_rank"] = state.time_step_rank or "auto"
        extra["intermediate_size"] = state.expand * config.hidden_size
    else:
        size = state.expand * config.hidden_size // state.num_heads
        extra["mamba_d_head" if config.model_type == "bamba" else "head_dim"] = size
    if config.family.rotary:
        scaling = {"rope_type": "default", **(config.rope_scaling or {})}
        extra["rope_parameters"] = {
            **scaling,
            "rope_theta": float(config.rope_theta),
            "partial_rotary_factor": config.partial_rotary_factor,
        }
        extra["attn_layer_indices"] = list(config.attn_layer_indices)
    return extra


def _write_falcon(config: ModelConfig) -> dict[str, Any]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    new = config.parallel_attn and (
        config.num_ln_in_parallel_attn == 2 or kv_heads not in (1, heads)
    )
    return {
        "alibi": False,
        "parallel_attn": config.parallel_attn,
        "new_decoder_architecture": new,
        "multi_query": kv_heads == 1,
        "num_ln_in_parallel_attn": config.num_ln_in_parallel_attn if new else None,
    }
