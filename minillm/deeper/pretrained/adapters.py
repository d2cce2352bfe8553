"""Adapters in files, as the library peft stores them: read them, write them.

Used in notebooks/beyond/14_lora.ipynb; written by hand. An adapter is a folder with
`adapter_config.json` and `adapter_model.safetensors`, A and B of each layer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minillm.beyond.lora.adapters import (
    adapted_layers,
    insert_adapters,
    linear_layers,
    meant_layers,
)
from minillm.deeper.pretrained.folder import tensors_of
from minillm.deeper.pretrained.weights import join_qkv, layer_name, split_qkv
from minillm.support.checks.adapters import check_adapter
from minillm.support.files import (
    read_json,
    recover,
    resolve,
    transaction,
    write_json,
    write_tensors,
)

_PREFIX = "base_model.model."  # before every name in peft's files

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Settings that change no number of an adapter once it is trained.
# (fan_in_fan_out is how the base stores its matrix: peft corrects it too.)
_IGNORED_KEYS = """
    auto_mapping base_model_name_or_path inference_mode peft_version revision task_type
    megatron_core qalora_group_size ensure_weight_tying fan_in_fan_out
""".split()

# Settings that choose among the layers that target_modules names.
_NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")


def save_adapter(
    model: nn.Module, folder: str | os.PathLike[str], *, base: str | None = None
) -> None:
    """Write the adapters, and nothing else of the model, as peft does; peft and we can read them.

    `base` is the folder or the repository of the model that they belong to, for peft to find. Saved
    over an older adapter, the new one takes its place as a whole (`support.files.transaction`).

    Raises: ValueError, before anything is written, if there are no adapters, if peft's files cannot
        hold them, if one is NaN or infinite, or if the folder holds a model.
    """
    folder, layers = Path(folder), adapted_layers(model)
    config: Any = getattr(model, "config", None)
    keys = ("rank", "alpha", "use_rslora")
    settings = {(*(getattr(m, key) for key in keys), m.dropout.p) for m in layers.values()}
    if len(settings) > 1:
        raise ValueError(f"one adapter, one (rank, alpha, use_rslora, dropout): {settings}")
    rank, alpha, use_rslora, dropout = settings.pop()
    tensors: dict[str, Tensor] = {}
    names = {n: parts for n, parts in linear_layers(model).items() if parts[0] in layers}
    for name, parts in names.items():
        if strange := [part for part in parts if part not in layers]:
            raise ValueError(f"{name} is one matrix in a file, and {strange[0]} has no adapter")
        if ".mlp." in name and hasattr(config, "is_sparse"):
            raise ValueError(f"{name}: in a {config.model_type} peft takes it for the experts'")
        first = layers[parts[0]].lora_A
        if any(layers[part].lora_A is not first for part in parts):
            raise ValueError(
                f"{name} is one matrix in a file: {', '.join(parts)} must share lora_A"
            )
        pieces = [layers[part].lora_B.weight.detach().cpu() for part in parts]
        whole = join_qkv(pieces, config) if len(pieces) > 1 else pieces[0]
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = first.weight.detach().cpu().contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = whole.contiguous()
    _check_finite(tensors)
    if any(resolve(folder / name).exists() for name in ("config.json", "model.safetensors")):
        message = f"{folder} holds a model: an adapter beside it would be taken for a part of it"
        raise ValueError(message)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "use_rslora": use_rslora,
        "target_modules": _written_targets(model, list(names)),
        "fan_in_fan_out": getattr(config, "model_type", None) == "gpt2",
        "bias": "none",
        "inference_mode": True,
    }
    size = sum(t.nbytes for t in tensors.values())
    with transaction(folder, remove=["adapter_model.bin"], num_bytes=size) as staging:
        write_json(staging / _CONFIG, content)
        write_tensors(staging / _WEIGHTS, tensors)


def _written_targets(model: nn.Module, names: list[str]) -> list[str]:
    """The last parts of the names if they mean these layers and no others, else whole names."""
    short = sorted({name.rpartition(".")[2] for name in names})
    meant = meant_layers(linear_layers(model), short)
    return short if sorted(meant) == sorted(names) else sorted(names)


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises: ValueError that names what is NaN or infinite."""
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(f"NaN or infinite: {', '.join(bad[:5])}")


def load_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> list[str]:
    """Put the adapter of a folder onto its base model, as `add_lora` does; returns the layers.

    Reads what `save_adapter` and peft write. The model must be the one that the adapter was trained
    on: shapes are compared, and numbers cannot be.

    Raises: ValueError, before anything is changed, for a setting that we do not compute, layers
        that are not those that the settings choose in this model, another shape, weights that are
        missing, unexpected, NaN or integers, a model that has adapters; FileNotFoundError if the
        folder holds no adapter.
    """
    folder = Path(folder)
    with suppress(OSError):  # not ours to write, or in use: then read where it lies
        recover(folder)
    settings, targets, narrowing = _read_settings(folder)
    if not resolve(folder / _WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder} has no {_WEIGHTS}")
    pairs = _read_pairs(model, dict(tensors_of(folder / _WEIGHTS)), folder)
    layers = linear_layers(model)
    meant = _narrowed(meant_layers(layers, targets), targets, narrowing)
    if missing := [name for name in meant if name not in pairs]:
        which = f"{len(missing)} of {len(meant)} layers that its settings choose in this model"
        raise ValueError(f"{folder}: no weights for {which}, the first {missing[0]}: another base?")
    for name, (a, b) in pairs.items():
        if name not in meant:
            raise ValueError(f"{folder}: weights of {name}, which its target_modules do not name")
        modules = [model.get_submodule(part) for part in layers[name]]
        for module in modules:
            values = (settings["rank"], settings["alpha"], settings["dropout"])
            check_adapter(name, module, *values)
        rows = sum(module.out_features for module in modules)  # type: ignore[misc]
        wanted = ((settings["rank"], modules[0].in_features), (rows, settings["rank"]))
        if (found := (tuple(a.shape), tuple(b.shape))) != wanted:
            raise ValueError(f"{folder}: A and B of {name} are {found}, not {wanted}")
    insert_adapters(model, list(pairs), settings, seed=0)
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            found_layers: list[Any] = [model.get_submodule(part) for part in layers[name]]
            config: Any = getattr(model, "config", None)
            pieces = split_qkv(b, config) if len(found_layers) > 1 else [b]
            for layer, piece in zip(found_layers, pieces, strict=True):
                layer.lora_A.weight.copy_(a)
                layer.lora_B.weight.copy_(piece)
    return list(pairs)


def _narrowed(
    names: Sequence[str], targets: str | Collection[str], narrowing: Mapping[str, Any]
) -> list[str]:
    """Of the layers that targets mean, those that the further settings leave, as in peft.

    A whole name among the targets means its layer, whatever number that has.
    """
    excluded, numbers, parents = (narrowing[key] for key in _NARROWING)
    without = {*meant_layers(names, excluded)} if excluded else set()
    kept = [name for name in names if name not in without]
    if not numbers or isinstance(targets, str):
        return kept
    found = [re.compile(rf"(?:^|.*?\.){re.escape(parent)}\.([0-9]+)\.") for parent in parents]
    found = found or [re.compile(r".*?\.[^.]*\.([0-9]+)\.")]
    of_layer = {name: next(filter(None, (p.match(name) for p in found)), None) for name in kept}
    chosen = {name for name, match in of_layer.items() if match and int(match[1]) in numbers}
    return [name for name in kept if name in targets or name in chosen]


def _read_narrowing(content: dict[str, Any]) -> dict[str, Any]:
    """Takes the settings that choose among layers out of a config, numbers and names as lists.

    Raises: ValueError for one of another kind.
    """
    found = {key: content.pop(key, None) or [] for key in _NARROWING}
    excluded, numbers, parents = found.values()
    found["layers_to_transform"] = numbers = [numbers] if type(numbers) is int else numbers
    found["layers_pattern"] = parents = [parents] if isinstance(parents, str) else parents
    names = {"exclude_modules": excluded, "layers_pattern": parents}
    for key, given in names.items():
        if key == "exclude_modules" and isinstance(given, str):
            continue  # a pattern
        if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
            raise ValueError(f"{key} must be names, not {given!r:.60}")
    if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"layers_to_transform must be numbers of layers, not {numbers!r:.60}")
    return found


def _read_settings(folder: Path) -> tuple[dict[str, Any], str | list[str], dict[str, Any]]:
    """Rank, alpha and the like, the targets, and what chooses among them, of an adapter's config.

    Raises: ValueError that names each setting that we do not compute or that makes no sense;
        FileNotFoundError if there is no config.
    """
    content, where = read_json(folder / _CONFIG), folder / _CONFIG
    if (kind := content.pop("peft_type", None)) != "LORA":
        raise ValueError(f"{where}: peft_type is {kind!r:.60}, only 'LORA' is read")
    settings = {
        "rank": content.pop("r", 8),  # what is not there has peft's default
        "alpha": content.pop("lora_alpha", 8),
        "use_rslora": content.pop("use_rslora", None) or False,
        "dropout": content.pop("lora_dropout", 0.0),
    }
    targets = content.pop("target_modules", None)
    named = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    if not targets or not (named or isinstance(targets, str)):
        raise ValueError(f"{where}: target_modules must be names or a pattern, not {targets!r:.60}")
    try:
        narrowing = _read_narrowing(content)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(settings["use_rslora"], bool):
        raise ValueError(f"{where}: use_rslora is {settings['use_rslora']!r:.60}")
    bias, init = content.pop("bias", "none"), content.pop("init_lora_weights", True)
    refused = [f"{k:.60}={v!r:.60}" for k, v in content.items() if v and k not in _IGNORED_KEYS]
    if bias not in ("none", None):
        refused.append(f"bias={bias!r:.60}")
    if init not in (True, False, None, "gaussian", "orthogonal"):  # others change the base, too
        refused.append(f"init_lora_weights={init!r:.60}")
    if refused:
        raise ValueError(f"{where}: we do not compute {', '.join(sorted(refused))}")
    return settings, targets, narrowing


def _read_pairs(
    model: nn.Module, tensors: dict[str, Tensor], folder: Path
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each layer.

    Raises: ValueError for weights that are missing, unexpected, NaN, integers or another base's.
    """
    known, config = linear_layers(model), getattr(model, "config", None)
    embedding = layer_name("model.embed_tokens", config)
    bases = {"lm_head": "lm_head", embedding: "model.embed_tokens"}
    for key in list(tensors):  # beside an adapter of the head peft writes the head itself
        name = re.sub(r"(\.base_layer)?\.weight$", "", key.removeprefix(_PREFIX))
        if name in bases:
            ours = model.get_submodule(bases[name]).get_parameter("weight")
            if not torch.equal(tensors[key].to(ours), ours):
                raise ValueError(f"{folder}: {key} is not the model's: it has another base")
            del tensors[key]
    pattern = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_[AB]\.weight")
    found = {key: pattern.fullmatch(key) for key in tensors}
    if strange := [key for key, match in found.items() if match is None]:
        raise ValueError(f"{folder}: unexpected: {', '.join(sorted(strange)[:5])}")
    names = sorted({match[1] for match in found.values() if match})
    if absent := [name for name in names if name not in known]:
        which = f"{len(absent)} of {len(names)} layers, the first {absent[0]}"
        raise ValueError(f"{folder}: an adapter for linear layers that are not there: {which}")
    keys = [f"{_PREFIX}{name}.lora_{part}.weight" for name in names for part in "AB"]
    if missing := [key for key in keys if key not in tensors]:
        raise ValueError(f"{folder}: missing: {', '.join(missing[:5])}")
    if not names:
        raise ValueError(f"{folder / _WEIGHTS} holds no adapter")
    if other := [f"{key} is {t.dtype}" for key, t in tensors.items() if t.dtype not in _DTYPES]:
        raise ValueError(f"{folder}: no numbers of 16 to 64 bits: {', '.join(other[:5])}")
    _check_finite(tensors)
    it = iter(tensors[key] for key in keys)
    return dict(zip(names, zip(it, it, strict=True), strict=True))
