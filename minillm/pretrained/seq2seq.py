"""Checkpoints of BART and Marian in Hugging Face's format: read them, write them.

Used by `EncoderDecoder`, shown in notebooks/beyond/15_two_sequences.ipynb; written by hand.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.files import read_json, resolve
from minillm.models.seq2seq import EncoderDecoder, Seq2SeqConfig, sinusoids
from minillm.pretrained.changes import check_unchanged
from minillm.pretrained.families import ACTIVATION_NAMES
from minillm.pretrained.load import (
    LOST,
    ShapesAlone,
    check_shapes,
    local_place,
    read_dtype,
    read_tensors,
    write_checkpoint,
)
from minillm.pretrained.weights import check_apart

__all__ = ["load", "read_config", "save"]

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
_ONLY: dict[str, tuple[Any, ...]] = {
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
    if kind not in _DEFAULTS:
        known = ", ".join(_DEFAULTS)
        raise ValueError(f"unknown model_type {kind!r} of an encoder and a decoder: {known}")
    for key, allowed in _ONLY.items():
        if data.get(key) is not None and data[key] not in allowed:
            raise ValueError(f"{key}={data[key]!r} of a {kind} config is not computed")
    learned = kind == "bart"
    for key, ours in (
        ("normalize_embedding", learned),
        ("static_position_embeddings", not learned),
    ):
        if data.get(key) is not None and data[key] != ours:
            raise ValueError(f"{key}={data[key]!r} of a {kind} config is not computed")
    asked = {**data, **(generation or {})}
    asks = {key: asked[key] for key in _SEARCH if asked.get(key) not in (None, _SEARCH[key])}
    if asks:
        which = ", ".join(f"{key}={value!r}" for key, value in asks.items())
        warnings.warn(f"generate takes no notice of the files' {which}", stacklevel=3)
    found = {**_DEFAULTS[kind], **data}
    if generation is not None:  # what it does not force is not forced, whatever config.json says
        found |= {name: generation.get(name) for name in _FORCED}
        found |= {k: v for k, v in generation.items() if k in _ENDS and v is not None}
    return Seq2SeqConfig(
        **{f.name: found[f.name] for f in fields(Seq2SeqConfig) if f.name in found}
    )


def _file_name(name: str) -> str:
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


def load(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> EncoderDecoder:
    """The model of a folder or of a repository, in evaluation mode.

    Weights keep the file's dtype unless `dtype` says otherwise.
    Raises: ValueError if a weight is missing, unexpected or of another shape, each named, or if the
        config says what is not computed; FileNotFoundError if there is no such folder.
    """
    dtype, folder = read_dtype(dtype), local_place(name, revision)
    path = folder / "generation_config.json"
    generation = read_json(path) if resolve(path).exists() else None
    config = read_config(read_json(folder / "config.json"), generation)
    tensors = _ours(read_tensors(folder), config, folder)
    _check_layers(tensors, config, folder)
    with torch.device("meta"), ShapesAlone():
        model = EncoderDecoder(config)
    wanted = {_file_name(k): tuple(v.shape) for k, v in model.state_dict().items()}
    check_shapes({_file_name(k): v for k, v in tensors.items()}, wanted, folder)
    dtype = dtype or tensors["encoder.embed_tokens.weight"].dtype
    state = {k: v.to(device=device, dtype=dtype, copy=True) for k, v in tensors.items()}
    model.load_state_dict(state, strict=False, assign=True)
    if config.model_type == "marian":
        for stack in (model.encoder, model.decoder):
            stack.embed_positions.requires_grad_(False)
    model.tie_weights()
    return model.eval()


def _ours(tensors: Mapping[str, Tensor], config: Seq2SeqConfig, folder: Path) -> dict[str, Tensor]:
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
        both = ", ".join(["model.shared.weight", *(_file_name(n) for n in names if n in found)])
        raise ValueError(f"{folder}: tie_word_embeddings is true, and the weights differ: {both}")
    if there:
        found |= dict.fromkeys(names, there[0])
    if "final_logits_bias" not in found:
        found["final_logits_bias"] = torch.zeros(1, config.target_vocab_size)
    if config.model_type == "marian":
        table = sinusoids(config.max_position_embeddings, config.d_model)
        for side in ("encoder", "decoder"):
            found.setdefault(f"{side}.embed_positions.weight", table)
    return found


def _check_layers(tensors: Mapping[str, Tensor], config: Seq2SeqConfig, folder: Path) -> None:
    """Raises: ValueError, before a model is made, if the config has layers without any weight."""
    for side in ("encoder", "decoder"):
        found = (re.match(rf"{side}\.layers\.([0-9]{{1,9}})\.", name) for name in tensors)
        layers = {int(match[1]) for match in found if match}
        wanted = getattr(config, f"{side}_layers")
        if wanted > len(layers):
            first = next(i for i in range(wanted) if i not in layers)
            there = f"{wanted} by the config, and weights of {len(layers)}"
            message = f"missing: model.{side}.layers.{first}. ({there})"
            raise ValueError(f"{folder} does not fit its config: {message}")


def save(model: EncoderDecoder, folder: str | os.PathLike[str]) -> None:
    """Write `config.json` and `model.safetensors`, all at once, in the place of an older model.

    Raises: OSError if the disk is too small.
    """
    c = model.config
    with torch.device("meta"), ShapesAlone():
        check_unchanged(model, EncoderDecoder(c), LOST)
    state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
    if c.model_type == "marian":
        state = {k: v for k, v in state.items() if "embed_positions" not in k}
    tied = _embeddings(c)
    shares = c.share_encoder_decoder_embeddings
    first = "model.shared.weight" if shares else "model.decoder.embed_tokens.weight"
    tensors = {_file_name(k): v for k, v in state.items() if k not in tied}
    tensors[first] = state["decoder.embed_tokens.weight"]
    if not tied:  # transformers then has a shared matrix that nobody uses, and asks for it
        tensors = {k: v.clone() if k == first else v for k, v in tensors.items()}
    config = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(c).items()}
    name = c.activation_function
    config["activation_function"] = ACTIVATION_NAMES.get(name, name)
    config |= {"is_encoder_decoder": True, "architectures": [_ARCHITECTURES[c.model_type]]}
    config["dtype"] = str(model.lm_head.weight.dtype).removeprefix("torch.")
    if c.model_type == "bart":
        for key in ("decoder_vocab_size", "share_encoder_decoder_embeddings"):
            del config[key]
    write_checkpoint(folder, config, tensors)
