"""Checkpoints in Hugging Face's format: read them, write them, refuse what does not fit.

Notebook 10 shows both directions; written by hand. How the families spell their configs and name
their weights is in `minillm.pretrained.families` and `minillm.pretrained.weights`.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minillm.config import ModelConfig
from minillm.model import CausalLM
from minillm.nn.layers import ACTIVATIONS
from minillm.pretrained.weights import read_weights, write_weights
from minillm.tokenizer.hf_wrapper import load_tokenizer
from minillm.utils import read_json, replacing, write_json

__all__ = [
    "FILES",
    "check_savable",
    "from_pretrained",
    "load_tokenizer",
    "local_folder",
    "save_pretrained",
]

# What we read, and nothing else: many repositories hold the same weights in three more formats.
FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]


_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+|[\w-][\w.-]*")


def local_folder(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of that name, or else where the hub's files of that name lie.

    Raises: FileNotFoundError if there is neither, or if the hub cannot be asked.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if not isinstance(name, str) or not _REPOSITORY.fullmatch(name) or name.startswith("."):
        raise FileNotFoundError(f"no folder {str(name)!r} (and no name 'owner/model' of the hub)")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        message = f"no folder {name!r}; to ask the hub for it, pip install huggingface_hub"
        raise FileNotFoundError(message) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    except (OSError, ValueError) as error:  # the hub's errors are of these two kinds
        what = name if revision is None else f"{name} at revision {revision}"
        reason = f"{type(error).__name__}: {error}".strip()
        raise FileNotFoundError(
            f"no folder {name!r}, and not from the hub: {what}: {reason}"
        ) from error


WEIGHTS = "model.safetensors"


INDEX = "model.safetensors.index.json"


def from_pretrained(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> tuple[CausalLM, Any]:
    """The model and the tokenizer (None if there is none) of a folder or a repository on the hub.

    Weights keep the file's dtype unless `dtype` says otherwise; where a file mixes them, the
    config's decides, else the embedding's. What `generation_config.json` says of end tokens holds.
    The model is in evaluation mode.
    Raises: ValueError if a weight is missing, unexpected or of another shape, each named, or if the
        family is unknown; FileNotFoundError if there is no such folder and no hub to ask.
    """
    wanted = _dtype(dtype)
    folder = local_folder(name, revision)
    data = read_json(folder / "config.json")
    config = ModelConfig.from_dict({**data, **_ends(folder)})
    with torch.device("meta"):
        model = CausalLM(config)
    tensors = read_weights(_read_tensors(folder), config)
    _check_tensors(tensors, model, folder)
    if wanted is None and len({v.dtype for v in tensors.values()}) > 1:
        given = data.get("dtype") or data.get("torch_dtype")
        wanted = _dtype(given) or tensors["model.embed_tokens.weight"].dtype
    tensors = {k: v.to(device=device, dtype=wanted) for k, v in tensors.items()}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    if config.family.rotary:
        model.model.rotary = model.model.make_rotary()
        if device is not None:
            model.model.rotary.to(device)
    return model.eval(), load_tokenizer(folder)


def save_pretrained(
    model: CausalLM,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write `config.json`, the weights (in several files if they are large) and the tokenizer.

    Each file is replaced whole or not at all.
    Raises: ValueError, before anything is written, for a config that its family's files cannot say.
    """
    model, folder = getattr(model, "_orig_mod", model), Path(folder)  # of a compiled model, itself
    check_savable(model.config)
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
    tensors = write_weights(state, model.config)
    shards = _shards(tensors, max_shard_bytes)
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        with replacing(folder / name) as path:
            save_file(shard, path, metadata={"format": "pt"})
    if len(shards) > 1:
        size = sum(t.nbytes for t in tensors.values())
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": places})
    _drop_stale(folder, names)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    write_json(folder / "config.json", {**model.config.to_dict(), "dtype": dtype})
    if tokenizer is not None:
        tokenizer.save(folder)


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of that name. Raises: ValueError if torch has none."""
    if given in (None, "auto"):
        return None
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        wanted = "a torch.dtype of floating-point numbers, its name, or 'auto'"
        raise ValueError(f"unknown dtype {given!r} for weights: {wanted}")
    return found


def _ends(folder: Path) -> dict[str, Any]:
    """The end tokens for generation, which chat models have more of than their config says."""
    path = folder / "generation_config.json"
    ends = read_json(path).get("eos_token_id") if path.exists() else None
    return {} if ends is None else {"eos_token_id": ends}


def check_savable(config: ModelConfig) -> None:
    """Raises: ValueError if what the files would say is another model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = dict(vars(ModelConfig.from_dict(config.to_dict())))
    act = read["hidden_act"]  # some have several names
    if ACTIVATIONS[act] is ACTIVATIONS[config.hidden_act]:
        read["hidden_act"] = config.hidden_act
    lost = [f"{k}={v!r}" for k, v in vars(config).items() if read[k] != v]
    if lost:
        what = f"a {config.model_type} config.json has no place for {', '.join(lost)}"
        raise ValueError(f"{what}: a model read back would be another one")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder, from one file or from the shards that the index names."""
    if (folder / INDEX).exists() and not (folder / WEIGHTS).exists():
        places = read_json(folder / INDEX).get("weight_map")
        if not places or not isinstance(places, dict):
            raise ValueError(f"{folder / INDEX} has no weight_map")
        if strange := sorted({str(n) for n in places.values() if Path(str(n)).name != n}):
            raise ValueError(f"{folder / INDEX} names what is no file of its folder: {strange}")
    elif (folder / WEIGHTS).exists():
        places = None
    else:
        found = sorted(p.name for p in folder.glob("*.bin")) or ["no weights at all"]
        raise ValueError(f"{folder} has no {WEIGHTS}, but {', '.join(found)}")
    files = [WEIGHTS] if places is None else sorted(set(places.values()))
    tensors: dict[str, Tensor] = {}
    for name in files:
        tensors.update(_tensors_of(folder / name))
    absent = sorted(set(places or ()) - set(tensors))
    if absent:
        raise ValueError(f"the index of {folder} names tensors that no file holds: {_some(absent)}")
    return tensors


def _tensors_of(path: Path) -> Iterator[tuple[str, Tensor]]:
    if not path.exists():
        raise ValueError(f"{path.parent} lacks {path.name}, which its index names")
    try:
        with safe_open(path, "pt") as file:
            yield from ((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None


def _check_tensors(tensors: Mapping[str, Tensor], model: CausalLM, folder: Path) -> None:
    """Raises: ValueError that names each tensor that is missing, unexpected or mis-shaped."""
    wanted = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    problems = []
    if missing := sorted(set(wanted) - set(tensors)):
        problems.append(f"missing: {_some(missing)}")
    if extra := sorted(set(tensors) - set(wanted)):
        problems.append(f"unexpected: {_some(extra)}")
    for name in sorted(set(wanted) & set(tensors)):
        if tuple(tensors[name].shape) != wanted[name]:
            shape = tuple(tensors[name].shape)
            problems.append(f"{name} is {shape}, the config wants {wanted[name]}")
        if not tensors[name].is_floating_point():
            problems.append(f"{name} holds {tensors[name].dtype}, not floating-point numbers")
    if problems:
        raise ValueError(f"{folder} does not fit its config: " + "; ".join(problems))


def _some(names: list[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Tensors in order, a new group where the next one would exceed `limit` bytes."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _drop_stale(folder: Path, names: list[str]) -> None:
    """Remove the weights of an earlier save that was cut into other files."""
    keep = {*names, INDEX} if len(names) > 1 else set(names)
    ours = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
    for path in [*folder.glob("model*.safetensors"), folder / INDEX]:
        if path.name not in keep and (ours.fullmatch(path.name) or path.name == INDEX):
            path.unlink(missing_ok=True)
