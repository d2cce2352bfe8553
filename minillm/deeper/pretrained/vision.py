"""Checkpoints of ViT, SigLIP, CLIP and LLaVA in Hugging Face's format: read them, write them.

Used by `VisionTransformer` and `PictureLM`, shown in notebooks/beyond/16_pictures.ipynb; written
by hand.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor

from minillm.beyond.pictures.picture_parts import PictureConfig
from minillm.beyond.pictures.pictures import PictureLM
from minillm.beyond.pictures.vision import VisionTransformer
from minillm.beyond.pictures.vision_parts import VisionConfig
from minillm.config import ModelConfig
from minillm.deeper.pretrained.families import ACTIVATION_NAMES
from minillm.deeper.pretrained.folder import Layout, check_computed, table, with_ends
from minillm.deeper.pretrained.weights import check_apart, read_weights, write_weights
from minillm.support.checks.words import quoted

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
_SUPPORTED: dict[str, tuple[Any, ...]] = {
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


def read_config(
    data: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> VisionConfig:
    """The config that a `config.json` describes, be it of a tower or of a model that has one.

    Raises: ValueError for another family, or for a switch whose effect is not computed.
    """
    kind = data.get("model_type")
    if isinstance(kind, str) and kind in _WHOLE:
        data, kind = {**table(data, "vision_config"), "model_type": _WHOLE[kind]}, _WHOLE[kind]
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        known = ", ".join([*_DEFAULTS, *_WHOLE])
        raise ValueError(f"unknown model_type {quoted(kind)} of a picture tower; known are {known}")
    check_computed(data, _SUPPORTED, kind)
    found = {**_DEFAULTS[kind], **{k: v for k, v in data.items() if v is not None}}
    keys = {f.name: found[f.name] for f in fields(VisionConfig) if f.name in found}
    config = VisionConfig(**keys)
    head_dim = config.hidden_size // config.num_attention_heads
    if found.get("head_dim", head_dim) != head_dim:
        raise ValueError(f"head_dim={found['head_dim']!r:.60} of a {kind} config is not computed")
    return config


def read_llava_config(
    data: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> PictureConfig:
    """The config that a LLaVA's `config.json` describes.

    Raises: ValueError for another family, or for a switch whose effect is not computed.
    """
    if data.get("model_type") != "llava":
        raise ValueError(f"unknown model_type {data.get('model_type')!r}; known is llava")
    check_computed(data, _SUPPORTED, "llava")
    text = {"model_type": "llama", **table(data, "text_config")}
    if text["model_type"] == "llama":
        theta = {} if "rope_parameters" in text else {"rope_theta": _TEXT["rope_theta"]}
        text = {**{k: v for k, v in _TEXT.items() if k != "rope_theta"}, **theta, **text}
    if data.get("tie_word_embeddings") is not None:
        text["tie_word_embeddings"] = data["tie_word_embeddings"]
    known = {f.name for f in fields(PictureConfig)} - {"vision_config", "text_config"}
    given = {k: v for k, v in data.items() if k in known and v is not None}
    vision = {"model_type": "clip_vision_model", **table(data, "vision_config")}
    return PictureConfig(
        read_config(vision), ModelConfig.from_dict(with_ends(text, generation)), **given
    )


def _complete(config: VisionConfig, names: Collection[str]) -> VisionConfig:
    """Whether a ViT has a head, only the names of its weights tell."""
    if config.model_type != "vit":
        return config
    return replace(
        config, vision_use_head=any(name.endswith("pooler.dense.weight") for name in names)
    )


def _rename(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A name with each old part new: one that begins with a dot anywhere, others in front."""
    for old, new in pairs:
        if old.startswith("."):
            name = name.replace(old, new)
        elif name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def _file_name(name: str, config: VisionConfig) -> str:
    """What Hugging Face calls a weight of ours."""
    return _rename(name, _NAMES[config.model_type])


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
    """Our tensors from a checkpoint's; of a model with a text tower or a classifier, the tower's.

    Raises: ValueError if two are one to us.
    """
    for prefix in ("vit.", "vision_model."):  # what stands beside the tower is left out
        inside = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        tensors = inside or tensors
    pairs = [(theirs, ours) for ours, theirs in _NAMES[config.model_type]]
    found: dict[str, Tensor] = {}
    read: list[tuple[str, str]] = []  # names, theirs and ours
    for name, tensor in tensors.items():
        if name.endswith("embeddings.position_ids"):
            continue  # a buffer of old files
        if match := _IN_PROJ.fullmatch(name):
            pieces = tensor.tensor_split(3) if tensor.dim() else [tensor]
            for part, piece in zip("qkv", pieces, strict=False):
                own = f"head.attention.{part}_proj.{match[1]}"
                found[own] = piece
                read.append((name, own))
            continue
        own = _rename(name, pairs)
        read.append((name, own))
        if name == "embeddings.cls_token":
            tensor = tensor.flatten()
        elif name == "embeddings.position_embeddings" and tensor.dim() > 2:
            tensor = tensor.flatten(0, -2)
        found[own] = tensor
    check_apart(read)
    return found


def _read_llava_weights(tensors: Mapping[str, Tensor], config: PictureConfig) -> dict[str, Tensor]:
    parts = _parts(tensors)
    tower, text = parts.pop("vision_tower."), parts.pop("language_model.")
    ours = {f"vision_tower.{k}": v for k, v in _from_file(tower, config.vision_config).items()}
    written = read_weights(text, config.text_config)
    return ours | {f"language_model.{k}": v for k, v in written.items()} | parts[""]


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


def _write_config(config: VisionConfig) -> dict[str, Any]:
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


def _write_llava_config(config: PictureConfig) -> dict[str, Any]:
    layers, act = config.vision_feature_layer, config.projector_hidden_act
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": _write_config(config.vision_config),
        "text_config": config.text_config.to_dict(),
        "image_token_index": config.image_token_index,
        "image_seq_length": config.features_per_picture,
        "vision_feature_layer": list(layers) if isinstance(layers, tuple) else layers,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "projector_hidden_act": ACTIVATION_NAMES.get(act, act),
        "multimodal_projector_bias": config.multimodal_projector_bias,
        "tie_word_embeddings": config.text_config.tie_word_embeddings,
    }


def _write_llava_weights(state: Mapping[str, Tensor], config: PictureConfig) -> dict[str, Tensor]:
    parts = _parts(state)
    vision = _to_file(parts["vision_tower."], config.vision_config)
    text = write_weights(parts["language_model."], config.text_config)
    tensors = {f"vision_tower.{k}": v for k, v in vision.items()}
    return tensors | {f"language_model.{k}": v for k, v in text.items()} | parts[""]


TOWER = Layout(
    model=VisionTransformer,
    read_config=read_config,
    write_config=_write_config,
    read_weights=_from_file,
    write_weights=_to_file,
    layers=lambda config: {"layers": config.num_hidden_layers},
    first="position_embedding.weight",
    file_name=_file_name,
    complete=_complete,
)
LLAVA = Layout(
    model=PictureLM,
    read_config=read_llava_config,
    write_config=_write_llava_config,
    read_weights=_read_llava_weights,
    write_weights=_write_llava_weights,
    layers=lambda config: {
        "vision_tower.layers": config.vision_config.num_hidden_layers,
        "language_model.model.layers": config.text_config.num_hidden_layers,
    },
    first="language_model.model.embed_tokens.weight",
    complete=lambda config, names: replace(
        config, vision_config=_complete(config.vision_config, names)
    ),
)
