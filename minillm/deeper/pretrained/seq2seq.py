"""Checkpoints of BART and Marian in Hugging Face's format: read them, write them.

Used by `EncoderDecoder`, shown in notebooks/beyond/15_two_sequences.ipynb; written by hand.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from minillm.beyond.two_sequences.seq2seq import EncoderDecoder, Seq2SeqConfig, sinusoids
from minillm.deeper.pretrained.families import ACTIVATION_NAMES
from minillm.deeper.pretrained.folder import Layout, check_computed
from minillm.deeper.pretrained.weights import check_apart
from minillm.support.checks.words import quoted

_ARCHITECTURES = {"bart": "BartForConditionalGeneration", "marian": "MarianMTModel"}

# What a config.json without the key means, where that is not our default.
_SIZES = {"d_model": 1024, "encoder_layers": 12, "decoder_layers": 12}
_SIZES |= {"encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096}
_SIZES |= {"encoder_attention_heads": 16, "decoder_attention_heads": 16}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "bart": {**_SIZES, "dropout": 0.1, "forced_eos_token_id": 2, "vocab_size": 50265},
    "marian": {
        **_SIZES,
        "dropout": 0.1,
        "vocab_size": 58101,
        "pad_token_id": 58100,
        "decoder_start_token_id": 58100,
        "bos_token_id": None,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
    },
}

# Keys that change what a model computes: the values that we compute, None where it is the family's.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (True,),
    "is_decoder": (False,),
    "encoder_layerdrop": (0, 0.0),
    "decoder_layerdrop": (0, 0.0),
    "normalize_before": (False,),
    "add_final_layer_norm": (False,),
    "quantization_config": (),
}

# How to search, which the caller of `generate` decides, and the values that ask for nothing.
_SEARCH: dict[str, Any] = {
    "num_beams": 1,
    "do_sample": False,
    "repetition_penalty": 1.0,
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("min_new_tokens", "bad_words_ids", "suppress_tokens")),
}

_MOST_POSITIONS = 1 << 20  # Marian's table of waves is in no file: the config decides on its size

# What a generation_config.json says better than the config.json beside it.
_FORCED = ("forced_bos_token_id", "forced_eos_token_id")
_ENDS = ("eos_token_id", "decoder_start_token_id")


def read_config(
    data: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> Seq2SeqConfig:
    """The config that a `config.json` and, before it, a `generation_config.json` describe.

    Raises: ValueError for another family, or for a switch whose effect is not computed.
    """
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        known = ", ".join(_DEFAULTS)
        raise ValueError(f"unknown model_type {quoted(kind)} of an encoder and a decoder: {known}")
    learned = kind == "bart"
    switches = {"normalize_embedding": (learned,), "static_position_embeddings": (not learned,)}
    check_computed(data, {**_SUPPORTED, **switches}, kind)
    asked = {**data, **(generation or {})}
    asks = {key: asked[key] for key in _SEARCH if asked.get(key) not in (None, _SEARCH[key])}
    if asks:
        which = ", ".join(f"{key}={value!r}" for key, value in asks.items())
        warnings.warn(f"generate takes no notice of the files' {which}", stacklevel=3)
    found = {**_DEFAULTS[kind], **data}
    if generation is not None:  # what it does not force is not forced, whatever config.json says
        found |= {name: generation.get(name) for name in _FORCED}
        found |= {k: v for k, v in generation.items() if k in _ENDS and v is not None}
    keys = {f.name: found[f.name] for f in fields(Seq2SeqConfig) if f.name in found}
    config = Seq2SeqConfig(**keys)
    if (positions := config.max_position_embeddings) > _MOST_POSITIONS:
        message = f"max_position_embeddings={positions:,} of a {kind} config is not computed"
        raise ValueError(f"{message}: {_MOST_POSITIONS:,}")
    return config


def _file_name(name: str, config: Seq2SeqConfig) -> str:
    """What Hugging Face calls a weight of ours."""
    name = name.replace(".o_proj.", ".out_proj.")
    return name if name.startswith(("lm_head", "final")) else f"model.{name}"


def _embeddings(config: Seq2SeqConfig) -> list[str]:
    """The matrices of tokens that a file may hold beside the first, all the same one."""
    if not config.tie_word_embeddings:
        return []
    tied = ["decoder.embed_tokens.weight", "lm_head.weight"]
    if config.share_encoder_decoder_embeddings:
        return ["encoder.embed_tokens.weight", *tied]
    return tied


def _read_weights(tensors: Mapping[str, Tensor], config: Seq2SeqConfig) -> dict[str, Tensor]:
    """The tensors of a file under our names; what it may leave out is put in.

    Raises: ValueError for tied matrices that differ.
    """
    own = {k: k.removeprefix("model.").replace(".out_proj.", ".o_proj.") for k in tensors}
    check_apart(own.items())
    found = {own[k]: v for k, v in tensors.items()}
    for side in ("encoder", "decoder"):
        found.pop(f"{side}.version", None)  # of old files
    shared = found.pop("shared.weight", None)
    names = _embeddings(config)
    there = [found[name] for name in names if name in found]
    if shared is not None and config.share_encoder_decoder_embeddings and names:
        there.append(shared)
    if any(t.shape != there[0].shape or not torch.equal(t, there[0]) for t in there[1:]):
        twins = [_file_name(name, config) for name in names if name in found]
        both = ", ".join(["model.shared.weight", *twins])
        raise ValueError(f"tie_word_embeddings is true, and the weights differ: {both}")
    if there:
        found |= dict.fromkeys(names, there[0])
    if "final_logits_bias" not in found:
        found["final_logits_bias"] = torch.zeros(1, config.target_vocab_size)
    if config.model_type == "marian":
        table = sinusoids(config.max_position_embeddings, config.d_model)
        for side in ("encoder", "decoder"):
            found.setdefault(f"{side}.embed_positions.weight", table)
    return found


def _write_weights(state: Mapping[str, Tensor], config: Seq2SeqConfig) -> dict[str, Tensor]:
    """A file's tensors: waves and the twins of a matrix are in no file."""
    if config.model_type == "marian":
        state = {k: v for k, v in state.items() if "embed_positions" not in k}
    tied = _embeddings(config)
    shares = config.share_encoder_decoder_embeddings
    first = "model.shared.weight" if shares else "model.decoder.embed_tokens.weight"
    tensors = {_file_name(k, config): v for k, v in state.items() if k not in tied}
    tensors[first] = state["decoder.embed_tokens.weight"]
    if not tied:  # transformers then has a shared matrix that nobody uses, and asks for it
        tensors[first] = tensors[first].clone()
    return tensors


def _write_config(config: Seq2SeqConfig) -> dict[str, Any]:
    data = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items()}
    name = config.activation_function
    data["activation_function"] = ACTIVATION_NAMES.get(name, name)
    data |= {"is_encoder_decoder": True, "architectures": [_ARCHITECTURES[config.model_type]]}
    if config.model_type == "bart":
        for key in ("decoder_vocab_size", "share_encoder_decoder_embeddings"):
            del data[key]
    return data


LAYOUT = Layout(
    model=EncoderDecoder,
    read_config=read_config,
    write_config=_write_config,
    read_weights=_read_weights,
    write_weights=_write_weights,
    layers=lambda c: {"encoder.layers": c.encoder_layers, "decoder.layers": c.decoder_layers},
    first="encoder.embed_tokens.weight",
    file_name=_file_name,
)
