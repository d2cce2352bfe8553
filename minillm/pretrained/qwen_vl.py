"""Checkpoints of Qwen2-VL in Hugging Face's format: read them, write them.

Used by `QwenVL`, shown in notebooks/deeper/16_real_readers.ipynb; written by hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.files import read_json, resolve
from minillm.models.qwen_vl import QwenVisionConfig, QwenVL, QwenVLConfig
from minillm.pretrained.changes import check_unchanged
from minillm.pretrained.families import ACTIVATION_NAMES
from minillm.pretrained.load import (
    LOST,
    ShapesAlone,
    check_savable,
    check_shapes,
    local_place,
    read_dtype,
    read_tensors,
    write_checkpoint,
)

__all__ = ["load", "read_config", "save"]

_KIND = "qwen2_vl"

# What a config.json without the key means to transformers, where ModelConfig means something else.
_TEXT: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

# Keys of the tower that say nothing new: older spellings, which transformers does not look at.
_SAME = {"in_chans": "in_channels", "spatial_patch_size": "patch_size"}
_SILENT = {"model_type", "initializer_range", "dtype", "torch_dtype", "rope_parameters"}
_SILENT |= {"_attn_implementation", "_attn_implementation_autoset", "transformers_version"}


def read_config(data: Mapping[str, Any]) -> QwenVLConfig:
    """The config that a `config.json` describes, flat as in Qwen's files or in two parts.

    Raises: ValueError for another family, or for what is not computed.
    """
    if data.get("model_type") != _KIND:
        raise ValueError(f"model_type is {data.get('model_type')!r}, and not {_KIND}")
    apart = {"text_config", "vision_config", "vision_token_id", *_TOKENS}  # one says nothing new
    whole = {k: v for k, v in data.items() if k not in apart}
    parts = data.get("text_config")
    if parts is None:
        text = whole
    else:  # what stands outside is of the whole: only a tied head counts
        text = {**parts, "tie_word_embeddings": bool(whole.get("tie_word_embeddings", False))}
        text["tie_word_embeddings"] |= bool(parts.get("tie_word_embeddings", False))
    text = {**_TEXT, **{k: v for k, v in text.items() if v is not None}, "model_type": "qwen2"}
    section = None
    for key in ("rope_scaling", "rope_parameters"):
        table = dict(text.get(key) or {})
        section = table.pop("mrope_section", section)
        for name in ("type", "rope_type"):
            if table.get(name) == "mrope":
                table[name] = "default"
        text[key] = table
    tokens = {key: data[key] for key in _TOKENS if data.get(key) is not None}
    if section is not None:
        tokens["mrope_section"] = section
    vision = data.get("vision_config") or {}
    return QwenVLConfig(ModelConfig.from_dict(text), _read_vision(vision), **tokens)


def _read_vision(data: Mapping[str, Any]) -> QwenVisionConfig:
    """The tower's sizes. Raises: ValueError for a key that is not known, or not computed."""
    found = {"hidden_size": 3584, **{k: v for k, v in data.items() if v is not None}}
    for old, new in _SAME.items():
        usual = found.get(new, getattr(QwenVisionConfig, new))
        if found.pop(old, usual) != usual:
            raise ValueError(f"vision_config: {old}={data[old]!r} is not {new}={usual!r}")
    rope = found.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") != "axial":
        raise ValueError(f"vision_config: rope_type={rope['rope_type']!r} is not computed: axial")
    found["rope_theta"] = rope.get("rope_theta", 10000.0)
    known = {f.name for f in fields(QwenVisionConfig)}
    if strange := sorted(found.keys() - known - _SILENT):
        raise ValueError(f"vision_config holds what is not computed: {', '.join(strange)}")
    return QwenVisionConfig(**{k: v for k, v in found.items() if k in known})


# Our names of weights and those of the files: prefixes first, then parts within the tower.
_NEWER = {"model.visual.": "visual.", "model.language_model.": "model."}
_TOWER = {
    ".attn.o_proj.": ".attn.proj.",
    ".mlp.up_proj.": ".mlp.fc1.",
    ".mlp.down_proj.": ".mlp.fc2.",
    "patch_embed.": "patch_embed.proj.",
}


def _file_name(name: str) -> str:
    """What Qwen's files call a weight of ours; q, k and v have one name, as one matrix."""
    if name.startswith("language."):
        return name.removeprefix("language.")
    name = re.sub(r"\.attn\.[qkv]_proj\.", ".attn.qkv.", name)
    if ".merger." in name:
        return name
    for ours, theirs in _TOWER.items():
        name = name.replace(ours, theirs)
    return name


def _shapes(config: QwenVLConfig, model: QwenVL) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that a file of this config holds."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        if name == "language.lm_head.weight" and config.text.tie_word_embeddings:
            continue
        shape, key = tuple(tensor.shape), _file_name(name)
        if ".qkv." in key:
            shape = (3 * shape[0], *shape[1:])
        if key == "visual.patch_embed.proj.weight":
            shape = _kernel(config.vision)
        shapes[key] = shape
    return shapes


def _kernel(c: QwenVisionConfig) -> tuple[int, ...]:
    """The shape in which files hold the first matrix: a convolution over time, height, width."""
    return (c.embed_dim, c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size)


def load(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> QwenVL:
    """The model of a folder or of a repository, in evaluation mode.

    Weights keep the file's dtype unless `dtype` says otherwise.
    Raises: ValueError if a weight is missing, unexpected or of another shape, each named, or if the
        config says what is not computed; FileNotFoundError if there is no such folder.
    """
    dtype, folder = read_dtype(dtype), local_place(name, revision)
    data = read_json(folder / "config.json")
    config = read_config({**data, **_ends(folder, data)})
    tensors = _older_names(read_tensors(folder), folder)
    _check_layers(tensors, config, folder)
    with torch.device("meta"), ShapesAlone():
        model = QwenVL(config)
    if config.text.tie_word_embeddings:
        embedding = tensors.get("model.embed_tokens.weight")
        head = tensors.pop("lm_head.weight", embedding)
        if embedding is not None and head is not None and not torch.equal(head, embedding):
            both = "lm_head.weight, model.embed_tokens.weight"
            raise ValueError(f"{folder}: tie_word_embeddings is true, and these differ: {both}")
    check_shapes(tensors, _shapes(config, model), folder)
    dtype = dtype or tensors["model.embed_tokens.weight"].dtype
    state = {}
    for ours in model.state_dict():
        key = _file_name(ours)
        if key not in tensors:  # the tied head
            continue
        tensor = tensors[key]
        if ".qkv." in key:
            tensor = tensor.chunk(3)["qkv".index(ours.split(".attn.")[1][0])]
        if key == "visual.patch_embed.proj.weight":
            tensor = tensor.flatten(1)
        state[ours] = tensor.to(device=device, dtype=dtype, copy=True)
    model.load_state_dict(state, strict=False, assign=True)
    model.language.tie_weights()
    model.language.model.rotary = model.language.model.make_rotary()
    if device is not None:
        model.language.model.rotary.to(device)
    return model.eval()


def _ends(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """The end tokens for generation, in the part of the config where they belong."""
    path = folder / "generation_config.json"
    ends = read_json(path).get("eos_token_id") if resolve(path).exists() else None
    if ends is None:
        return {}
    if data.get("text_config") is None:
        return {"eos_token_id": ends}
    return {"text_config": {**data["text_config"], "eos_token_id": ends}}


def _older_names(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The tensors under the names of Qwen's own files, whichever layout they came in.

    Raises: ValueError for a weight that is there under both names.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        older = name
        for newer, prefix in _NEWER.items():
            if name.startswith(newer):
                older = prefix + name.removeprefix(newer)
        if older in found:
            raise ValueError(f"{folder} holds {older} under two names, one of them {name}")
        found[older] = tensor
    return found


def _check_layers(tensors: Mapping[str, Tensor], config: QwenVLConfig, folder: Path) -> None:
    """Raises: ValueError, before a model is made, if the config has layers without any weight."""
    wanted = {"model.layers": config.text.num_hidden_layers, "visual.blocks": config.vision.depth}
    for place, number in wanted.items():
        pattern = re.compile(rf"{re.escape(place)}\.([0-9]{{1,9}})\.")
        layers = {int(match[1]) for match in map(pattern.match, tensors) if match}
        if number > len(layers):
            first = next(i for i in range(number) if i not in layers)
            there = f"{number} by the config, and weights of {len(layers)}"
            message = f"missing: {place}.{first}. ({there})"
            raise ValueError(f"{folder} does not fit its config: {message}")


def _write_config(config: QwenVLConfig) -> dict[str, Any]:
    """A flat `config.json`, as Qwen's own."""
    text = config.text.to_dict()
    scaling = text.pop("rope_scaling") or {"rope_type": "default"}
    theta = text.pop("rope_theta")
    section = list(config.mrope_section)
    text["rope_parameters"] = {**scaling, "rope_theta": theta, "mrope_section": section}
    vision = asdict(config.vision)
    act = vision["hidden_act"]
    vision["hidden_act"] = ACTIVATION_NAMES.get(act, act)
    theta = vision.pop("rope_theta")
    vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": float(theta)}
    vision["model_type"] = "qwen2_vl_vision"
    tokens = {key: getattr(config, key) for key in _TOKENS}
    kind = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": _KIND}
    return {**text, **kind, **tokens, "vision_config": vision}


def save(model: QwenVL, folder: str | os.PathLike[str]) -> None:
    """Write `config.json` and `model.safetensors`, all at once, in the place of an older model.

    Raises: ValueError for a config that the files cannot hold; OSError if the disk is too small.
    """
    config = model.config
    check_savable(config.text)
    with torch.device("meta"), ShapesAlone():
        check_unchanged(model, QwenVL(config), LOST)
    tensors: dict[str, Tensor] = {}
    for ours, tensor in model.state_dict().items():
        if ours == "language.lm_head.weight" and config.text.tie_word_embeddings:
            continue
        key, tensor = _file_name(ours), tensor.detach().cpu()
        if ".qkv." in key:  # q, k and v come in this order
            tensor = torch.cat([tensors[key], tensor]) if key in tensors else tensor
        if key == "visual.patch_embed.proj.weight":
            tensor = tensor.reshape(_kernel(config.vision))
        tensors[key] = tensor
    data = _write_config(config)
    data["dtype"] = str(model.language.lm_head.weight.dtype).removeprefix("torch.")
    write_checkpoint(folder, data, tensors)
