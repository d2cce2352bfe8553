"""Checkpoints of ViT, SigLIP, CLIP and LLaVA in Hugging Face's format: read them, write them.

Used by `VisionTransformer` and `PictureLM`, shown in notebooks/beyond/16_pictures.ipynb; written
by hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.files import read_json, resolve
from minillm.models.pictures import PictureConfig, PictureLM
from minillm.models.vision import VisionConfig, VisionTransformer
from minillm.pretrained.changes import check_unchanged
from minillm.pretrained.families import ACTIVATION_NAMES
from minillm.pretrained.load import (
    LOST,
    ShapesAlone,
    check_shapes,
    local_place,
    one_dtype,
    read_dtype,
    read_tensors,
    write_checkpoint,
)
from minillm.pretrained.weights import check_apart, read_weights, write_weights

__all__ = ["load", "load_llava", "read_config", "read_llava_config", "save", "save_llava"]

_ARCHITECTURES = {
    "vit": "ViTModel",
    "siglip_vision_model": "SiglipVisionModel",
    "clip_vision_model": "CLIPVisionModel",
}

# Files of a picture tower and a text tower, of which we read the first.
_WHOLE = {"siglip": "siglip_vision_model", "clip": "clip_vision_model"}

# What a config.json without the key means.
_BASE: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
_BASE |= {"num_attention_heads": 12}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "vit": {**_BASE, "layer_norm_eps": 1e-12},
    "siglip_vision_model": {
        **_BASE,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "vision_use_head": True,
    },
    "clip_vision_model": {
        **_BASE,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
        "patch_size": 32,
    },
}
# The same for the text of a LLaVA file, which may say no more than "llama".
_TEXT: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
_TEXT |= {"num_attention_heads": 32, "rope_theta": 10000.0, "max_position_embeddings": 2048}

# Keys that change what a model computes: the values that we compute.
_ONLY: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), (0, 0.0)),
    "attention_dropout": (0, 0.0),
    "quantization_config": (),
}

# Names of weights, ours -> theirs.
_NAMES = {
    "vit": [
        ("patch_embedding.", "embeddings.patch_embeddings.projection."),
        ("class_embedding", "embeddings.cls_token"),
        ("position_embedding.weight", "embeddings.position_embeddings"),
        ("post_layernorm.", "layernorm."),
        ("layers.", "encoder.layer."),
        (".layer_norm1.", ".layernorm_before."),
        (".layer_norm2.", ".layernorm_after."),
        (".self_attn.q_proj.", ".attention.attention.query."),
        (".self_attn.k_proj.", ".attention.attention.key."),
        (".self_attn.v_proj.", ".attention.attention.value."),
        (".self_attn.o_proj.", ".attention.output.dense."),
        (".mlp.up_proj.", ".intermediate.dense."),
        (".mlp.down_proj.", ".output.dense."),
        ("head.", "pooler.dense."),
    ],
    "clip_vision_model": [
        ("patch_embedding.", "embeddings.patch_embedding."),
        ("class_embedding", "embeddings.class_embedding"),
        ("position_embedding.", "embeddings.position_embedding."),
        ("pre_layernorm.", "pre_layrnorm."),  # so in CLIP's files
        ("layers.", "encoder.layers."),
        (".o_proj.", ".out_proj."),
        (".mlp.up_proj.", ".mlp.fc1."),
        (".mlp.down_proj.", ".mlp.fc2."),
    ],
}
_NAMES["siglip_vision_model"] = _NAMES["clip_vision_model"]
_IN_PROJ = re.compile(r"head\.attention\.in_proj_(weight|bias)")


def read_config(data: Mapping[str, Any]) -> VisionConfig:
    """The config that a `config.json` describes, be it of a tower or of a model that has one.

    Raises: ValueError for another family, or for a switch whose effect is not computed.
    """
    kind = data.get("model_type")
    if kind in _WHOLE:
        data, kind = {**(data.get("vision_config") or {}), "model_type": _WHOLE[kind]}, _WHOLE[kind]
    if kind not in _DEFAULTS:
        known = ", ".join([*_DEFAULTS, *_WHOLE])
        raise ValueError(f"unknown model_type {kind!r} of a picture tower; known are {known}")
    _check_switches(data, str(kind))
    found = {**_DEFAULTS[str(kind)], **{k: v for k, v in data.items() if v is not None}}
    heads, size = found["num_attention_heads"], found["hidden_size"]
    if found.get("head_dim", size // heads) != size // heads:
        raise ValueError(f"head_dim={found['head_dim']} of a {kind} config is not computed")
    return VisionConfig(**{f.name: found[f.name] for f in fields(VisionConfig) if f.name in found})


def read_llava_config(data: Mapping[str, Any]) -> PictureConfig:
    """The config that a LLaVA's `config.json` describes.

    Raises: ValueError for another family, or for a switch whose effect is not computed.
    """
    if data.get("model_type") != "llava":
        raise ValueError(f"unknown model_type {data.get('model_type')!r}; known is llava")
    _check_switches(data, "llava")
    vision, text = data.get("vision_config") or {}, data.get("text_config") or {}
    text = {"model_type": "llama", **text}
    if text["model_type"] == "llama":
        theta = {} if "rope_parameters" in text else {"rope_theta": _TEXT["rope_theta"]}
        text = {**{k: v for k, v in _TEXT.items() if k != "rope_theta"}, **theta, **text}
    if data.get("tie_word_embeddings") is not None:
        text["tie_word_embeddings"] = data["tie_word_embeddings"]
    known = {f.name for f in fields(PictureConfig)} - {"vision_config", "text_config"}
    given = {k: v for k, v in data.items() if k in known and v is not None}
    tower = read_config({"model_type": "clip_vision_model", **vision})
    return PictureConfig(tower, ModelConfig.from_dict(text), **given)


def _check_switches(data: Mapping[str, Any], kind: str) -> None:
    for key, allowed in _ONLY.items():
        if data.get(key) is not None and data[key] not in allowed:
            raise ValueError(f"{key}={data[key]!r} of a {kind} config is not computed")


def _file_name(name: str, config: VisionConfig) -> str:
    """What Hugging Face calls a weight of ours."""
    for ours, theirs in _NAMES[config.model_type]:
        if ours.startswith(".") or ours == "head.":
            name = name.replace(ours, theirs)
        elif name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    return name


def _to_file(state: Mapping[str, Tensor], config: VisionConfig) -> dict[str, Tensor]:
    """A checkpoint's tensors from ours."""
    out = {_file_name(k, config): v for k, v in state.items()}
    if config.model_type == "vit":
        C = config.hidden_size
        for name in ("embeddings.cls_token", "embeddings.position_embeddings"):
            out[name] = out[name].reshape(1, -1, C)
    for kind in ("weight", "bias"):  # SigLIP's head holds torch's own attention
        parts = [out.pop(f"head.attention.{p}_proj.{kind}", None) for p in "qkv"]
        found = [part for part in parts if part is not None]
        if found:
            out[f"head.attention.in_proj_{kind}"] = torch.cat(found)
    return out


def _from_file(tensors: Mapping[str, Tensor], config: VisionConfig) -> dict[str, Tensor]:
    """Our tensors from a checkpoint's; names that we do not know stay as they are."""
    with torch.device("meta"), ShapesAlone():
        ours = VisionTransformer(config).state_dict()
    names = {_file_name(k, config): k for k in ours}
    found: dict[str, Tensor] = {}
    read: list[tuple[str, str]] = []  # names, theirs and ours
    for name, tensor in tensors.items():
        if name.endswith("embeddings.position_ids"):
            continue  # a buffer of old files
        if match := _IN_PROJ.fullmatch(name):
            for part, piece in zip("qkv", tensor.chunk(3), strict=False):
                own = f"head.attention.{part}_proj.{match[1]}"
                found[own] = piece
                read.append((name, own))
            continue
        own = names.get(name, name)
        read.append((name, own))
        if name == "embeddings.cls_token":
            tensor = tensor.flatten()
        elif name == "embeddings.position_embeddings":
            tensor = tensor.flatten(0, -2)
        found[own] = tensor
    check_apart(read)
    return found


def _check_layers(tensors: Mapping[str, Tensor], wanted: int, pattern: str, folder: Path) -> None:
    """Raises: ValueError, before a model is made, if the config has layers without any weight."""
    layers = {int(m[1]) for name in tensors if (m := re.match(pattern, name))}
    if wanted > len(layers):
        first = next(i for i in range(wanted) if i not in layers)
        raise ValueError(
            f"{folder} does not fit its config: missing: layer {first} of {pattern.split('(')[0]} "
            f"({wanted} by the config, and weights of {len(layers)})".replace("\\", "")
        )


def load(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> VisionTransformer:
    """The picture tower of a folder or of a repository, in evaluation mode.

    Of a model with a text tower or a classifier, the part that looks at pictures.
    Raises: ValueError if a weight is missing, unexpected or of another shape, each named, or if the
        config says what is not computed; FileNotFoundError if there is no such folder.
    """
    dtype, folder = read_dtype(dtype), local_place(name, revision)
    data, tensors = read_json(folder / "config.json"), read_tensors(folder)
    config = read_config(data)
    for prefix in ("vit.", "vision_model."):  # what stands beside the tower is left out
        inside = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        tensors = inside or tensors
    if config.model_type == "vit":
        config = replace(config, vision_use_head="pooler.dense.weight" in tensors)
    _check_layers(tensors, config.num_hidden_layers, r"encoder\.layers?\.([0-9]{1,9})\.", folder)
    ours = _from_file(tensors, config)
    with torch.device("meta"), ShapesAlone():
        model = VisionTransformer(config)
    check_shapes(ours, {k: tuple(v.shape) for k, v in model.state_dict().items()}, folder)
    dtype = dtype or one_dtype(ours, data, next(iter(model.state_dict())))
    state = {k: v.to(device=device, dtype=dtype, copy=True) for k, v in ours.items()}
    model.load_state_dict(state, assign=True)
    return model.eval()


def load_llava(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> PictureLM:
    """The LLaVA of a folder or of a repository, in evaluation mode.

    Raises: ValueError if a weight is missing, unexpected or of another shape, each named, or if the
        config says what is not computed; FileNotFoundError if there is no such folder.
    """
    dtype, folder = read_dtype(dtype), local_place(name, revision)
    data, tensors = read_json(folder / "config.json"), read_tensors(folder)
    ends = folder / "generation_config.json"
    config = read_llava_config(data)
    if resolve(ends).exists() and (eos := read_json(ends).get("eos_token_id")) is not None:
        eos = tuple(eos) if isinstance(eos, list) else eos
        config = replace(config, text_config=replace(config.text_config, eos_token_id=eos))
    parts = _parts(tensors)
    tower, text = parts.pop("vision_tower."), parts.pop("language_model.")
    vision = config.vision_config
    if vision.model_type == "vit":
        vision = replace(vision, vision_use_head="pooler.dense.weight" in tower)
        config = replace(config, vision_config=vision)
    _check_layers(tower, vision.num_hidden_layers, r"encoder\.layers?\.([0-9]{1,9})\.", folder)
    depth = config.text_config.num_hidden_layers
    _check_layers(text, depth, r"model\.layers\.([0-9]{1,9})\.", folder)
    ours = {f"vision_tower.{k}": v for k, v in _from_file(tower, vision).items()}
    written = read_weights(text, config.text_config)
    ours |= {f"language_model.{k}": v for k, v in written.items()} | parts[""]
    with torch.device("meta"), ShapesAlone():
        model = PictureLM(config)
    wanted = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    if config.text_config.tie_word_embeddings:
        wanted.pop("language_model.lm_head.weight")
    check_shapes(ours, wanted, folder)
    dtype = dtype or one_dtype(ours, data, "language_model.model.embed_tokens.weight")
    state = {k: v.to(device=device, dtype=dtype, copy=True) for k, v in ours.items()}
    model.load_state_dict(state, strict=False, assign=True)
    model.language_model.tie_weights()
    decoder = model.language_model.model
    decoder.rotary = decoder.make_rotary()
    if device is not None and decoder.rotary is not None:
        decoder.rotary.to(device)
    return model.eval()


def _parts(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of tower and text, and what is neither, whichever age the file has."""
    parts: dict[str, dict[str, Tensor]] = {"vision_tower.": {}, "language_model.": {}, "": {}}
    read: list[tuple[str, str]] = []  # names, theirs and ours
    for theirs, tensor in tensors.items():
        name = theirs.removeprefix("model.")
        if name == "lm_head.weight":
            name = "language_model.lm_head.weight"
        elif re.match(r"language_model\.(embed_tokens|layers|norm)\.", name):
            name = name.replace("language_model.", "language_model.model.", 1)
        name = name.replace("vision_tower.vision_model.", "vision_tower.", 1)
        where = next(p for p in parts if name.startswith(p))
        parts[where][name.removeprefix(where)] = tensor
        read.append((theirs, name))
    check_apart(read)
    return parts


def _vision_data(config: VisionConfig) -> dict[str, Any]:
    """The `config.json` of a tower. Raises: ValueError for what transformers does not compute."""
    data: dict[str, Any] = {
        k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items()
    }
    kind = config.model_type
    if kind == "vit":
        del data["vision_use_head"]
        data["pooler_output_size"] = config.pooler_output_size or config.hidden_size
    else:
        for key in ("qkv_bias", "pooler_output_size", "pooler_act"):
            del data[key]
        for name in ("image_size", "patch_size"):
            sides = config.size if name == "image_size" else config.patch
            if sides[0] != sides[1]:
                raise ValueError(f"a {kind} file has no place for {name}={sides}: only squares")
            data[name] = sides[0]
    if kind == "clip_vision_model":
        del data["vision_use_head"]
    for key in ("hidden_act", "pooler_act"):
        if key in data:
            data[key] = ACTIVATION_NAMES.get(data[key], data[key])
    return {**data, "architectures": [_ARCHITECTURES[kind]]}


def save(model: VisionTransformer, folder: str | os.PathLike[str]) -> None:
    """Write `config.json` and `model.safetensors`, all at once, in the place of an older model.

    Raises: ValueError for sizes that the family's files cannot hold; OSError if the disk is too
        small.
    """
    data = _vision_data(model.config)
    with torch.device("meta"), ShapesAlone():
        check_unchanged(model, VisionTransformer(model.config), LOST)
    state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
    data["dtype"] = _dtype_name(state)
    write_checkpoint(folder, data, _to_file(state, model.config))


def save_llava(model: PictureLM, folder: str | os.PathLike[str]) -> None:
    """Write `config.json` and `model.safetensors`, all at once, in the place of an older model.

    Raises: ValueError for sizes that the files cannot hold; OSError if the disk is too small.
    """
    c = model.config
    with torch.device("meta"), ShapesAlone():
        check_unchanged(model, PictureLM(c), LOST)
    vision = _vision_data(c.vision_config)
    layers, act = c.vision_feature_layer, c.projector_hidden_act
    data = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": vision,
        "text_config": c.text_config.to_dict(),
        "image_token_index": c.image_token_index,
        "image_seq_length": c.features_per_picture,
        "vision_feature_layer": list(layers) if isinstance(layers, tuple) else layers,
        "vision_feature_select_strategy": c.vision_feature_select_strategy,
        "projector_hidden_act": ACTIVATION_NAMES.get(act, act),
        "multimodal_projector_bias": c.multimodal_projector_bias,
        "tie_word_embeddings": c.text_config.tie_word_embeddings,
    }
    state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
    parts = _parts(state)
    tensors = {
        f"vision_tower.{k}": v for k, v in _to_file(parts["vision_tower."], c.vision_config).items()
    }
    text = write_weights(parts["language_model."], c.text_config)
    tensors |= {f"language_model.{k}": v for k, v in text.items()} | parts[""]
    data["dtype"] = _dtype_name(tensors)
    write_checkpoint(folder, data, tensors)


def _dtype_name(tensors: Mapping[str, Tensor]) -> str:
    """What a config calls the dtype of the first tensor."""
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")
