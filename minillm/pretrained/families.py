"""How eight families of models spell their `config.json`: tables, and code to read and write them.

Used by `ModelConfig.from_dict` and `ModelConfig.to_dict`; written by hand, not built.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from minillm.config import FAMILIES, ModelConfig

__all__ = ["ARCHITECTURES", "read_config", "write_config"]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "falcon": "FalconForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
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
}


# Keys that change what a model computes: the values that we compute, and what others mean.
_ONLY = {
    "alibi": ((False,), "ALiBi positions"),
    "scale_attn_weights": ((True,), "unscaled attention scores"),
    "scale_attn_by_inverse_layer_idx": ((False,), "attention scores scaled by layer"),
    "add_cross_attention": ((False,), "cross-attention"),
    "partial_rotary_factor": ((1.0,), "rotating only a part of each head"),
    "use_bidirectional_attention": ((False,), "attention to later tokens"),
    "quantization_config": ((), "quantized weights"),
}


# Keys that only these families' files have; in those of others transformers does not look at them.
_OWN = {"sliding_window": ("mistral", "qwen2", "qwen3"), "rope_interleave": ("deepseek_v3",)}


# Hugging Face's names of activations that have another with us.
_ACTIVATIONS = {
    "gelu_tanh": "gelu_pytorch_tanh",
    "gelu_sigmoid": "quick_gelu",
    "relu_squared": "relu2",
}


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
    *("summary_type", "summary_use_proj", "summary_proj_to_labels"),
    *("summary_first_dropout", "apply_residual_connection_post_layernorm", "output_past"),
    *("moe_intermediate_size", "n_group", "n_shared_experts", "norm_topk_prob"),
    *("num_experts_per_tok", "qk_head_dim"),
    *("num_nextn_predict_layers", "output_router_logits", "routed_scaling_factor", "topk_group"),
    *("topk_method", "scoring_func", "moe_layer_freq", "ep_size", "aux_loss_alpha", "seq_aux"),
    *("num_mtp_layers", "rope_parameters", "model_max_length"),
}


def read_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `ModelConfig` from a `config.json` of whatever family and age.

    Raises: ValueError if the model computes something that we do not, or if a size is missing.
    """
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"unknown model_type {kind!r}; known are {', '.join(FAMILIES)}")
    for key, (ours, meaning) in _ONLY.items():
        if data.get(key) is not None and data[key] not in ours:
            raise ValueError(f"{key}={data[key]!r} is not supported: {meaning}")
    theirs = {v: k for k, v in _SPELLING.get(kind, {}).items()}
    found = {theirs.get(k, k): v for k, v in data.items() if k not in _ONLY and v is not None}
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
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
    dense = found.pop("first_k_dense_replace", found["num_hidden_layers"])
    if found.pop("n_routed_experts", None) and dense < found["num_hidden_layers"]:
        layers = found["num_hidden_layers"]
        raise ValueError(f"layers {dense} to {layers - 1} are mixtures of experts: not supported")
    if isinstance(found.get("eos_token_id"), list):
        found["eos_token_id"] = tuple(found["eos_token_id"])
    if kind == "deepseek_v3":
        found.pop("head_dim", None)  # the rotated part of a key, which has a key of its own
    known = {f.name for f in fields(ModelConfig)}
    foreign = {key for key, kinds in _OWN.items() if kind not in kinds}
    strange = sorted((set(found) - known - _SILENT) | (set(found) & foreign))
    if strange:
        warnings.warn(f"config keys that are not used: {', '.join(strange)}", stacklevel=3)
    return {k: v for k, v in found.items() if k in known - foreign}


def _read_rope(found: dict[str, Any], data: Mapping[str, Any]) -> None:
    """One base and one scaling, from `rope_theta` and `rope_scaling` or from `rope_parameters`."""
    if not FAMILIES[data["model_type"]].rotary:
        return
    given = [data.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(part, Mapping) for part in given):
        raise ValueError(f"rope_scaling and rope_parameters are tables, not {given}")
    both = {**given[0], **given[1]}
    if any(isinstance(v, dict) for v in both.values()):
        raise ValueError(f"rope_parameters that differ by layer are not supported: {both}")
    if both.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rope_parameters: rotating only a part of each head is not supported")
    theta = both.pop("rope_theta", data.get("rope_theta"))
    if theta is None:
        theta = 10000.0
        warnings.warn("the config gives no rope_theta: 10000.0, as transformers does", stacklevel=4)
    kind = both.pop("rope_type", both.pop("type", "default"))
    both.pop("type", None)
    if not isinstance(theta, int | float):
        raise ValueError(f"rope_theta must be a number, not {theta!r}")
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
    for key in ("rms_norm_eps", "rope_theta", "attention_dropout", "initializer_range"):
        data[key] = float(data[key])  # transformers 5 takes no whole number there
    data["hidden_act"] = _ACTIVATIONS.get(config.hidden_act, config.hidden_act)
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    drop = {"parallel_attn", "num_ln_in_parallel_attn", "rope_interleave"}
    drop |= set() if family.mla else set(latent)
    drop |= {"rope_theta", "rope_scaling"} if not family.rotary else set()
    drop |= {"mlp_bias"} if kind != "llama" else set()
    drop |= {"attention_bias"} if kind in ("gpt2", "qwen2", "mistral") else set()
    drop |= {"num_key_value_heads"} if kind == "gpt2" else set()
    drop |= {"head_dim"} if kind in ("gpt2", "qwen2", "falcon", "deepseek_v3") else set()
    drop |= {"sliding_window"} if config.sliding_window is None and kind != "mistral" else set()
    if kind == "deepseek_v3":
        extra = {"rope_interleave": config.rope_interleave}
        extra |= {"first_k_dense_replace": config.num_hidden_layers}
    elif kind == "falcon":
        extra = _write_falcon(config)
    else:
        extra = {}
    if kind.startswith("qwen") and config.sliding_window is not None:
        extra |= {"use_sliding_window": True, "max_window_layers": 0}
    theirs = _SPELLING.get(kind, {})
    data = {theirs.get(k, k): v for k, v in data.items() if k not in drop}
    if isinstance(data.get("eos_token_id"), tuple):
        data["eos_token_id"] = list(data["eos_token_id"])
    if data.get("rope_scaling") is not None:
        data["rope_scaling"] = dict(data["rope_scaling"])
    return {"architectures": [ARCHITECTURES[kind]], **data, **extra}


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
