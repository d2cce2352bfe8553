"""Checkpoints of Mllama's text model (Llama 3.2 Vision) in Hugging Face's format.

Used by `MllamaText`, shown in notebooks/deeper/16_real_readers.ipynb; written by hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.files import read_json, resolve
from minillm.models.mllama import MllamaConfig, MllamaText
from minillm.pretrained.changes import check_unchanged
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

_KIND, _WHOLE = "mllama_text_model", "mllama"

# What a config.json without the key means to transformers, where ModelConfig means something else.
_TEXT: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "pad_token_id": 128004,
}

# The weights of what sees, and the names under which the text model lies beside it.
_VISION = re.compile(r"(model\.)?(vision_model|multi_modal_projector)\.")
_NAMES = {"language_model.": "", "model.language_model.": "model."}


def read_config(data: Mapping[str, Any]) -> MllamaConfig:
    """The config of the text model that a `config.json` describes, alone or beside a tower.

    Raises: ValueError for another family, or for what is not computed.
    """
    kind = data.get("model_type")
    if kind not in (_KIND, _WHOLE):
        raise ValueError(f"model_type is {kind!r}, and neither {_KIND} nor {_WHOLE}")
    found = data.get("text_config") or {} if kind == _WHOLE else data
    text = {**_TEXT, **{k: v for k, v in found.items() if v is not None}, "model_type": "llama"}
    if text.pop("dropout", 0) != 0:
        raise ValueError(f"dropout={found['dropout']!r} of a {kind} config is not computed")
    places = text.pop("cross_attention_layers", MllamaConfig.cross_attention_layers)
    return MllamaConfig(ModelConfig.from_dict(text), places)


def _file_names(config: MllamaConfig) -> dict[str, str]:
    """The name of each weight in a file, for the beginnings of ours."""
    names = {"language.lm_head.": "lm_head.", "language.model.embed": "model.embed"}
    names["language.model.norm."] = "model.norm."
    own, looks = 0, 0
    for place in range(config.text.num_hidden_layers):
        if place in config.cross_attention_layers:
            names[f"looks.{looks}."], looks = f"model.layers.{place}.", looks + 1
        else:
            names[f"language.model.layers.{own}."], own = f"model.layers.{place}.", own + 1
    return names


def _named(model: MllamaText) -> Iterator[tuple[str, str, Tensor]]:
    """Our name of each weight, the files' name, and the weight."""
    names = _file_names(model.config)
    for ours, tensor in model.state_dict().items():
        start = next(start for start in names if ours.startswith(start))
        yield ours, names[start] + ours.removeprefix(start), tensor


def load(
    name: str | os.PathLike[str],
    *,
    text_only: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> MllamaText:
    """The text model of a folder or of a repository, in evaluation mode.

    `text_only` leaves the weights of the tower unread, where there are some: it is not computed.
    Weights keep the file's dtype unless `dtype` says otherwise.
    Raises: ValueError if a weight is missing, unexpected or of another shape, each named, or if the
        config says what is not computed; FileNotFoundError if there is no such folder.
    """
    dtype, folder = read_dtype(dtype), local_place(name, revision)
    data = dict(read_json(folder / "config.json"))
    path = folder / "generation_config.json"
    ends = read_json(path).get("eos_token_id") if resolve(path).exists() else None
    if ends is not None:
        part = data.get("text_config") if data.get("model_type") == _WHOLE else data
        if isinstance(part, dict):
            part["eos_token_id"] = ends
    config = read_config(data)
    tensors = _text_alone(read_tensors(folder), text_only, folder)
    layers = {m[1] for m in (re.match(r"model\.layers\.([0-9]{1,9})\.", k) for k in tensors) if m}
    if config.text.num_hidden_layers > len(layers):
        there = f"{config.text.num_hidden_layers} by the config, and weights of {len(layers)}"
        raise ValueError(f"{folder} does not fit its config: layers are missing: {there}")
    with torch.device("meta"), ShapesAlone():
        model = MllamaText(config)
    named = list(_named(model))
    check_shapes(tensors, {theirs: tuple(t.shape) for _, theirs, t in named}, folder)
    dtype = dtype or tensors["model.embed_tokens.weight"].dtype
    state = {
        ours: tensors[theirs].to(device=device, dtype=dtype, copy=True) for ours, theirs, _ in named
    }
    model.load_state_dict(state, assign=True)
    model.language.model.rotary = model.language.model.make_rotary()
    if device is not None:
        model.language.model.rotary.to(device)
    return model.eval()


def _text_alone(tensors: Mapping[str, Tensor], text_only: bool, folder: Path) -> dict[str, Tensor]:
    """The text model's tensors, under the names that they have where nothing is beside it.

    Raises: ValueError for weights of the tower, unless they are to be left.
    """
    tower = sorted(name for name in tensors if _VISION.match(name))
    if tower and not text_only:
        raise ValueError(
            f"{folder} holds a vision tower, which is not computed: {len(tower)} weights, first "
            f"{tower[0]}; text_only=True reads the text model without it"
        )
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _VISION.match(name):
            continue
        start = next((start for start in _NAMES if name.startswith(start)), "")
        shorter = _NAMES.get(start, "") + name.removeprefix(start)
        if shorter in found:
            raise ValueError(f"{folder} holds {shorter} under two names, one of them {name}")
        found[shorter] = tensor
    return found


def save(model: MllamaText, folder: str | os.PathLike[str]) -> None:
    """Write `config.json` and `model.safetensors`, all at once, in the place of an older model.

    Raises: ValueError for a config that the files cannot hold; OSError if the disk is too small.
    """
    config = model.config
    check_savable(config.text)
    if config.text.bos_token_id is None:
        raise ValueError("bos_token_id=None: the files of Mllama hold a number there")
    with torch.device("meta"), ShapesAlone():
        check_unchanged(model, MllamaText(config), LOST)
    tensors = {theirs: t.detach().cpu() for _, theirs, t in _named(model)}
    data = config.text.to_dict()
    for key in ("attention_bias", "mlp_bias", "attention_dropout", "head_dim"):
        data.pop(key, None)
    scaling = data.pop("rope_scaling") or {"rope_type": "default"}
    data["rope_parameters"] = {**scaling, "rope_theta": data.pop("rope_theta")}
    data |= {"model_type": _KIND, "architectures": ["MllamaForCausalLM"]}
    data["cross_attention_layers"] = list(config.cross_attention_layers)
    data["dtype"] = str(tensors["lm_head.weight"].dtype).removeprefix("torch.")
    write_checkpoint(folder, data, tensors)
