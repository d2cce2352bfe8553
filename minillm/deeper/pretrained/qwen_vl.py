"""Checkpoints of Qwen2-VL in Hugging Face's format: read them, write them.

Used by `QwenVL`, shown in notebooks/deeper/16_real_readers.ipynb; written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.deeper.pictures.qwen_vl import QwenVisionConfig, QwenVL, QwenVLConfig
from minillm.deeper.pretrained.families import ACTIVATION_NAMES
from minillm.deeper.pretrained.folder import Layout, table, with_ends
from minillm.deeper.pretrained.load import check_savable
from minillm.deeper.pretrained.weights import check_apart, read_weights, write_weights

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
    "max_window_layers": 80,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

# Keys of the tower that say nothing new: older spellings, which transformers does not look at.
_SAME = {"in_chans": "in_channels", "spatial_patch_size": "patch_size"}
_SILENT = """
    model_type initializer_range dtype torch_dtype rope_parameters _attn_implementation
    _attn_implementation_autoset transformers_version
""".split()


def read_config(
    data: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> QwenVLConfig:
    """The config that a `config.json` describes, flat as in Qwen's files or in two parts.

    Raises: ValueError for another family, or for what is not computed.
    """
    if data.get("model_type") != _KIND:
        raise ValueError(f"model_type is {data.get('model_type')!r:.60}, and not {_KIND}")
    apart = {"text_config", "vision_config", "vision_token_id", *_TOKENS}  # one says nothing new
    whole = {k: v for k, v in data.items() if k not in apart}
    text = whole
    if data.get("text_config") is not None:  # what stands outside is of the whole: only a tied
        text = table(data, "text_config")  # head counts
        if not text.get("tie_word_embeddings"):
            text["tie_word_embeddings"] = whole.get("tie_word_embeddings") or False
    text = {**_TEXT, **{k: v for k, v in text.items() if v is not None}, "model_type": "qwen2"}
    section = None
    for key in ("rope_scaling", "rope_parameters"):
        rope = table(text, key)
        section = rope.pop("mrope_section", section)
        for name in ("type", "rope_type"):
            if rope.get(name) == "mrope":
                rope[name] = "default"
        text[key] = rope
        if rope.get("rope_theta") is not None:
            text.setdefault("rope_theta", rope["rope_theta"])  # what one table says, the file says
    text.setdefault("rope_theta", 1e6)
    tokens = {key: data[key] for key in _TOKENS if data.get(key) is not None}
    if section is not None:
        tokens["mrope_section"] = section
    language = ModelConfig.from_dict(with_ends(text, generation))
    return QwenVLConfig(language, _read_vision(table(data, "vision_config")), **tokens)


def _read_vision(data: Mapping[str, Any]) -> QwenVisionConfig:
    """The tower's sizes. Raises: ValueError for a key that is not known, or not computed."""
    found = {"hidden_size": 3584, **{k: v for k, v in data.items() if v is not None}}
    for old, new in _SAME.items():
        usual = found.get(new, getattr(QwenVisionConfig, new))
        if found.pop(old, usual) != usual:
            raise ValueError(f"vision_config: {old}={data[old]!r:.60} is not {new}={usual!r}")
    rope = table(found, "rope_parameters")
    if rope.get("rope_type", "axial") != "axial":
        given = f"rope_type={rope['rope_type']!r:.60}"
        raise ValueError(f"vision_config: {given} is not computed: axial")
    found["rope_theta"] = rope.get("rope_theta", 10000.0)
    known = {f.name for f in fields(QwenVisionConfig)}
    if strange := sorted(found.keys() - known - {*_SILENT}):
        raise ValueError(f"vision_config holds what is not computed: {', '.join(strange)}")
    sizes = {k: v for k, v in found.items() if k in known}
    return QwenVisionConfig(**sizes)


# Our names of weights and those of the files: prefixes first, then parts within the tower.
_NEWER = {"model.visual.": "visual.", "model.language_model.": "model."}
_TOWER = {
    ".attn.o_proj.": ".attn.proj.",
    ".mlp.up_proj.": ".mlp.fc1.",
    ".mlp.down_proj.": ".mlp.fc2.",
    "patch_embed.": "patch_embed.proj.",
}
_QKV = re.compile(r"\.attn\.qkv\.")
_LANGUAGE = "language."


def _file_name(name: str, config: QwenVLConfig) -> str:
    """What Qwen's files call a weight of ours; q, k and v have one name, as one matrix."""
    if name.startswith(_LANGUAGE):
        return name.removeprefix(_LANGUAGE)
    name = re.sub(r"\.attn\.[qkv]_proj\.", ".attn.qkv.", name)
    if ".merger." in name:
        return name
    for ours, theirs in _TOWER.items():
        name = name.replace(ours, theirs)
    return name


def _our_name(name: str) -> str:
    """The inverse, for whichever of the two layouts a file has."""
    for newer, older in _NEWER.items():
        if name.startswith(newer):
            name = older + name.removeprefix(newer)
    if not name.startswith("visual."):
        return _LANGUAGE + name
    if ".merger." in name:
        return name
    for ours, theirs in _TOWER.items():
        name = name.replace(theirs, ours)
    return name


def _read_weights(tensors: Mapping[str, Tensor], config: QwenVLConfig) -> dict[str, Tensor]:
    """The tensors of a file under our names. Raises: ValueError if two are one to us."""
    check_apart((name, _our_name(name)) for name in tensors)
    ours = {_our_name(name): tensor for name, tensor in tensors.items()}
    text = {k.removeprefix(_LANGUAGE): v for k, v in ours.items() if k.startswith(_LANGUAGE)}
    found = {_LANGUAGE + k: v for k, v in read_weights(text, config.text).items()}
    for name, tensor in ours.items():
        if name.startswith(_LANGUAGE):
            continue
        if name == "visual.patch_embed.weight" and tensor.dim() > 2:
            tensor = tensor.flatten(1)
        pieces = tensor.tensor_split(3) if _QKV.search(name) and tensor.dim() else []
        for part, piece in zip("qkv", pieces, strict=False):
            found[_QKV.sub(f".attn.{part}_proj.", name)] = piece
        if not pieces:
            found[name] = tensor
    return found


def _write_weights(state: Mapping[str, Tensor], config: QwenVLConfig) -> dict[str, Tensor]:
    """The inverse; the first matrix is a convolution over time, height and width."""
    text = {k.removeprefix(_LANGUAGE): v for k, v in state.items() if k.startswith(_LANGUAGE)}
    tensors = write_weights(text, config.text)
    for ours, tensor in state.items():
        if ours.startswith(_LANGUAGE):
            continue
        key, c = _file_name(ours, config), config.vision
        if _QKV.search(key):  # q, k and v come in this order
            tensor = torch.cat([tensors[key], tensor]) if key in tensors else tensor
        if key == "visual.patch_embed.proj.weight":
            side = c.patch_size
            tensor = tensor.reshape(-1, c.in_channels, c.temporal_patch_size, side, side)
        tensors[key] = tensor
    return tensors


def _write_config(config: QwenVLConfig) -> dict[str, Any]:
    """A flat `config.json`, as Qwen's own. Raises: ValueError if it has no place for a key."""
    check_savable(config.text)
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


LAYOUT = Layout(
    model=QwenVL,
    read_config=read_config,
    write_config=_write_config,
    read_weights=_read_weights,
    write_weights=_write_weights,
    layers=lambda config: {
        "language.model.layers": config.text.num_hidden_layers,
        "visual.blocks": config.vision.depth,
    },
    first="language.model.embed_tokens.weight",
    file_name=_file_name,
)
