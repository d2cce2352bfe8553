"""Checkpoints in Hugging Face's format: read them, write them, refuse what does not fit.

deeper/10_families shows both directions; written by hand. How the families spell their configs and
name their weights is in `minillm.pretrained.families` and `minillm.pretrained.weights`.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minillm.config import ModelConfig
from minillm.model import CausalLM
from minillm.nn.layers import ACTIVATIONS
from minillm.pretrained.families import check_value
from minillm.pretrained.weights import DTYPES, read_weights, write_weights
from minillm.tokenizer.hf_wrapper import load_tokenizer
from minillm.utils import (
    MOST_BYTES,
    parse_json,
    read_json,
    recover,
    resolve,
    transaction,
    write_json,
    write_tensors,
)

__all__ = ["from_pretrained", "save_pretrained"]

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


def local_place(name: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder or the GGUF file of that name, or else where the hub's files of that name lie.

    Of a folder that holds a GGUF file and nothing else of a checkpoint, that file; likewise of the
    hub's. Where there are several, none is fetched. A save of the folder that was interrupted is
    completed first.
    Raises: FileNotFoundError if there is neither, or if the hub cannot be asked; ValueError for
        several GGUF files.
    """
    folder = Path(name)
    if folder.is_file():
        return folder
    if folder.is_dir():
        with suppress(OSError):  # not ours to write, or in use: then read where it lies
            recover(folder)
        return _only_file(folder) or folder
    if folder.suffix == ".gguf":
        raise FileNotFoundError(f"no file {str(name)!r}")
    if not isinstance(name, str) or not _REPOSITORY.fullmatch(name) or name.startswith("."):
        raise FileNotFoundError(f"no folder {str(name)!r} (and no name 'owner/model' of the hub)")
    try:
        from huggingface_hub import hf_hub_download, list_repo_files, snapshot_download
    except ImportError:
        message = f"no folder {name!r}; to ask the hub for it, pip install huggingface_hub"
        raise FileNotFoundError(message) from None
    try:
        fetched = Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
        if any(fetched.glob("*.safetensors")):
            return fetched
        files = [f for f in list_repo_files(name, revision=revision) if f.endswith(".gguf")]
        if len(files) == 1:
            return Path(hf_hub_download(name, files[0], revision=revision))
    except (OSError, ValueError) as error:  # the hub's errors are of these two kinds
        what = name if revision is None else f"{name} at revision {revision}"
        reason = f"{type(error).__name__}: {error}".strip()
        raise FileNotFoundError(
            f"no folder {name!r}, and not from the hub: {what}: {reason}"
        ) from error
    if files:
        how = f"huggingface_hub.hf_hub_download({name!r}, FILE) fetches one and gives its path"
        raise ValueError(f"{name} holds several GGUF files; {how}: {', '.join(sorted(files))}")
    return fetched


def _only_file(folder: Path) -> Path | None:
    """The GGUF file of a folder without a config, if there is one."""
    found = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    if not found or resolve(folder / "config.json").exists():
        return None
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ValueError(f"{folder} holds several GGUF files, name one of them: {names}")
    return found[0]


WEIGHTS = "model.safetensors"


INDEX = "model.safetensors.index.json"


# Rounded to 16 bits it would send tokens to other experts; transformers keeps it as it is, too.
_KEPT = re.compile(r"\.e_score_correction_bias$")


# What a model is read from, as names or patterns, and what its tokenizer: a saved one replaces all.
MODEL_FILES = [WEIGHTS, INDEX, f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"]
MODEL_FILES += ["generation_config.json"]
_TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
_TOKENIZER_FILES += ["special_tokens_map.json", "added_tokens.json"]


def from_pretrained(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> tuple[CausalLM, Any]:
    """The model and the tokenizer, None if there is none, of a folder, a GGUF file or a repository.

    Weights keep the file's dtype unless `dtype` says otherwise; where a file mixes them, the
    config's decides, else the embedding's; a GGUF file's become float32. What
    `generation_config.json` says of end tokens holds. The model is in evaluation mode. A save of
    the folder that was interrupted is completed first, or read where it lies if the folder cannot
    be written.
    Raises: ValueError if a weight is missing, unexpected or of another shape, each named, or if the
        family is unknown; FileNotFoundError if there is no such folder and no hub to ask.
    """
    wanted, place = read_dtype(dtype), local_place(name, revision)
    if place.is_file():
        model, tokenizer = _from_gguf(place, wanted, device)
    else:
        model, tokenizer = _from_folder(place, wanted, device)
    model.tie_weights()
    if model.config.family.rotary:
        model.model.rotary = model.model.make_rotary()
        if device is not None:
            model.model.rotary.to(device)
    return model.eval(), tokenizer


def _from_folder(
    folder: Path, wanted: torch.dtype | None, device: torch.device | str | None
) -> tuple[CausalLM, Any]:
    data = read_json(folder / "config.json")
    config = ModelConfig.from_dict({**data, **_ends(folder)})
    tensors = read_weights(read_tensors(folder), config)
    model = _fitting_model(config, tensors, folder)
    wanted = wanted or one_dtype(tensors, data, "model.embed_tokens.weight")
    tensors = {
        k: v.to(device=device, dtype=None if _KEPT.search(k) else wanted)
        for k, v in tensors.items()
    }
    model.load_state_dict(tensors, strict=False, assign=True)
    return model, _load_tokenizer(folder)


def _from_gguf(
    path: Path, wanted: torch.dtype | None, device: torch.device | str | None
) -> tuple[CausalLM, Any]:
    from minillm.pretrained import gguf

    header = gguf.read_header(path)
    config = gguf.read_config(header)
    shapes = {k: torch.empty(v, device="meta") for k, v in gguf.shapes(header).items()}
    model = _fitting_model(config, shapes, path)
    tokenizer = gguf.read_tokenizer(header)
    weights = gguf.read_weights(header, config)
    tensors = {k: v.to(device=device, dtype=wanted) for k, v in weights}
    model.load_state_dict(tensors, strict=False, assign=True)
    return model, tokenizer


def _fitting_model(config: ModelConfig, tensors: Mapping[str, Tensor], place: Path) -> CausalLM:
    """A model without numbers for these tensors. Raises: ValueError if they do not fit it."""
    _check_sizes(tensors, config, place)
    try:
        model = empty_model(config)
    except (RuntimeError, OverflowError) as error:  # sizes that no tensor can have
        raise ValueError(f"{place} has a config of which no model can be made: {error}") from None
    _check_tensors(tensors, model, place)
    return model


def save_pretrained(
    model: CausalLM,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write `config.json`, the weights (in several files if they are large) and the tokenizer.

    Saved over an older model, the new one takes its place as a whole (see
    `minillm.utils.transaction`): if the save is interrupted at whatever moment, `from_pretrained`
    finds the older model or the new one, and never parts of both. The older one's weights and
    `generation_config.json` go, and its tokenizer if a new one is given; other files stay.
    Of a `PackedLM` the model is saved that it was made from; adapters (`minillm.nn.lora`) must be
    merged.
    Raises: ValueError, before anything is written, for a model that its family's files cannot hold,
        for adapters that are not merged, and for a folder that holds an adapter;
        OSError if the disk is too small, before anything is written where that can be known.
    """
    folder = Path(folder)
    model = getattr(model, "_orig_mod", model)  # of a compiled model, itself
    check_savable(model.config)
    if resolve(folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter, which readers would put onto this model")
    state = {k: v.detach().cpu() for k, v in _state_of(model).items()}
    tensors = write_weights(state, model.config)
    shards = _shards(tensors, max_shard_bytes)
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    size = sum(t.nbytes for t in tensors.values())

    def release() -> None:
        """Let go of the files that the model's weights may lie in."""
        for views in (state, tensors, *shards):
            views.clear()
        _copy_weights(model)

    old = MODEL_FILES + (_TOKENIZER_FILES if tokenizer is not None else [])
    with transaction(folder, remove=old, num_bytes=size, release=release) as staging:
        if tokenizer is not None:
            tokenizer.save(staging)
        write_json(staging / "config.json", {**model.config.to_dict(), "dtype": dtype})
        for name, shard in zip(names, shards, strict=True):
            write_tensors(staging / name, shard)
        if len(shards) > 1:
            places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
            write_json(staging / INDEX, {"metadata": {"total_size": size}, "weight_map": places})


class ShapesAlone(TorchFunctionMode):
    """Tensors have shapes and no numbers inside, but for the angles of the rotation.

    On the meta device alone, drawing weights and computing the angles would give nothing, and
    import torch's compiler for it, which takes two seconds.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function.__name__ in ("normal_", "uniform_", "kaiming_uniform_"):
            return None  # torch.nn.init's and tensors' own, whose value nobody uses
        if function is torch.arange:  # with which every rotation begins
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def empty_model(config: ModelConfig) -> CausalLM:
    """A model whose weights have shapes and no numbers, to be filled from a file."""
    with torch.device("meta"), ShapesAlone():
        return CausalLM(config)


def _state_of(model: CausalLM) -> dict[str, Tensor]:
    """The weights that a checkpoint of the config holds, under our names.

    Raises: ValueError if the model has others: loaded again, it would be another model.
    """
    from minillm.nn.lora import check_merged
    from minillm.training.distributed import is_sharded

    check_merged(model, "only whole models can be saved so")
    state = {k: v for k, v in model.state_dict().items() if ".lora_" not in k}
    if is_sharded(model):
        raise ValueError(
            "the model is sharded: gather it with distributed.whole_tensors, then save"
        )
    if type(model) is not CausalLM:
        from minillm.fast.packed import PackedLM

        if isinstance(model, PackedLM):  # a copy of the weights lies beside the model's own
            state = {k: v for k, v in state.items() if k.startswith(("model.", "lm_head."))}
    wanted = empty_model(model.config).state_dict()
    if state.keys() != wanted.keys():
        strange = _some(sorted(state.keys() - wanted.keys()))
        which = f"{len(state)} weights, its config says {len(wanted)}; not known: {strange}"
        raise ValueError(f"a {type(model).__name__} cannot be saved that has {which}")
    return state


def _copy_weights(model: nn.Module) -> None:
    """Put the weights in memory of their own: loaded ones lie in the file, which is mapped."""
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if key not in copies:  # what shares memory goes on to share it
                copies[key] = storage.clone()
            empty = torch.empty(0, dtype=tensor.dtype)
            shape = (tensor.storage_offset(), tensor.size(), tensor.stride())
            tensor.data = empty.set_(copies[key], *shape)


def read_dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of that name. Raises: ValueError if torch has none."""
    if given in (None, "auto"):
        return None
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if found not in DTYPES:
        wanted = "a torch.dtype of floating-point numbers of 16 to 64 bits, its name, or 'auto'"
        raise ValueError(f"unknown dtype {given!r:.60} for weights: {wanted}")
    return found


def one_dtype(
    tensors: Mapping[str, Tensor], data: Mapping[str, Any], first: str
) -> torch.dtype | None:
    """Where a file mixes dtypes, the config's, else that of its weight `first`; else None."""
    if len({tensor.dtype for tensor in tensors.values()}) == 1:
        return None
    return read_dtype(data.get("dtype") or data.get("torch_dtype")) or tensors[first].dtype


def _ends(folder: Path) -> dict[str, Any]:
    """The end tokens for generation, which chat models have more of than their config says."""
    path = folder / "generation_config.json"
    ends = read_json(path).get("eos_token_id") if resolve(path).exists() else None
    if ends is None:
        return {}
    try:
        check_value("eos_token_id", ends)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return {"eos_token_id": ends}


def check_savable(config: ModelConfig) -> None:
    """Raises: ValueError if what the files would say is another model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = dict(vars(ModelConfig.from_dict(config.to_dict())))
    ours = vars(config)
    if ACTIVATIONS[read["hidden_act"]] is ACTIVATIONS[ours["hidden_act"]]:  # some have two names
        read["hidden_act"] = ours["hidden_act"]
    lost = [f"{k}={v!r}" for k, v in ours.items() if read[k] != v]
    if lost:
        what = f"a {config.model_type} config.json has no place for {', '.join(lost)}"
        raise ValueError(f"{what}: a model read back would be another one")


def _load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, gathered from where its files lie if a save was interrupted."""
    places = {name: resolve(folder / name) for name in _TOKENIZER_FILES}
    if all(path == folder / name for name, path in places.items()):
        return load_tokenizer(folder)
    with tempfile.TemporaryDirectory() as gathered:
        for name, path in places.items():
            if path.exists():
                shutil.copyfile(path, Path(gathered, name))
        return load_tokenizer(gathered)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder, from one file or from the shards that the index names."""
    whole, index = (resolve(folder / name).exists() for name in (WEIGHTS, INDEX))
    if index and not whole:
        places = read_json(folder / INDEX).get("weight_map")
        if not places or not isinstance(places, dict):
            raise ValueError(f"{folder / INDEX} has no weight_map")
        if strange := sorted({str(n) for n in places.values() if not _is_shard(n)}):
            raise ValueError(f"{folder / INDEX} names what is no file of its folder: {strange}")
    elif whole:
        places = None
    else:
        found = sorted(p.name for p in folder.glob("*.bin")) or ["no weights at all"]
        raise ValueError(f"{folder} has no {WEIGHTS}, but {', '.join(found)}")
    files = [WEIGHTS] if places is None else sorted(set(places.values()))
    tensors: dict[str, Tensor] = {}
    held: dict[str, str] = {}
    for name in files:
        for key, tensor in tensors_of(folder / name):
            if key in held:
                raise ValueError(f"{folder} holds {key} twice, in {held[key]} and in {name}")
            tensors[key], held[key] = tensor, name
    if places is not None:
        if absent := sorted(places.keys() - held.keys()):
            message = f"the index of {folder} names tensors that no file holds: {_some(absent)}"
            raise ValueError(message)
        if moved := sorted(key for key in places if places[key] != held[key]):
            which = f"{moved[0]} to be in {places[moved[0]]}, and {held[moved[0]]} holds it"
            raise ValueError(f"the index of {folder} is wrong on {len(moved)} tensors: {which}")
    return tensors


def _is_shard(name: Any) -> bool:
    """Whether an index may name it: a file of weights beside itself."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def tensors_of(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a safetensors file.

    Raises: ValueError if it is none or not there, or names a tensor twice.
    """
    found = resolve(path)
    if not found.is_file():
        raise ValueError(f"{path.parent} lacks {path.name}, which its index names")
    try:
        header = _header(found)
        with safe_open(found, "pt") as file:
            parse_json(header, f"the header of {path}")  # safetensors takes the last of two
            yield from ((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None


def _header(path: Path) -> bytes:
    """What stands before a safetensors file's numbers; the reader says if it is none."""
    with open(path, "rb") as file:
        return file.read(min(int.from_bytes(file.read(8), "little"), MOST_BYTES + 1))


_MOST_LAYERS = 1024  # published models have up to 126; each takes a moment, however small it is


def _check_sizes(tensors: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> None:
    """Raises: ValueError if the config has layers of which no weight is there, or too large heads.

    Before a model is made of the config, which may claim any size.
    """
    found = (re.match(r"model\.layers\.([0-9]{1,9})\.", name) for name in tensors)
    layers = {int(match[1]) for match in found if match}
    absent = (i for i in range(config.num_hidden_layers) if i not in layers)
    if (first := next(absent, None)) is not None:
        total = config.num_hidden_layers
        there = f"there are {total}, and weights of {sum(i < total for i in layers)}"
        message = f"missing: model.layers.{first} (by the config {there})"
        raise ValueError(f"{folder} does not fit its config: {message}")
    if config.num_hidden_layers > _MOST_LAYERS:
        message = f"{config.num_hidden_layers:,} layers, more than {_MOST_LAYERS:,}"
        raise ValueError(f"{folder} is not read: {message}")
    if (config.head_dim or 0) > (largest := max(t.numel() for t in tensors.values())):
        message = f"head_dim is {config.head_dim}, the largest weight has {largest} numbers"
        raise ValueError(f"{folder} does not fit its config: {message}")


def _check_tensors(tensors: Mapping[str, Tensor], model: CausalLM, folder: Path) -> None:
    """Raises: ValueError that names each tensor that is missing, unexpected or mis-shaped."""
    wanted = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    check_shapes(tensors, wanted, folder)


def check_shapes(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """Raises: ValueError that names each tensor that is missing, unexpected or mis-shaped."""
    problems = []
    if missing := sorted(set(wanted) - set(tensors)):
        problems.append(f"missing: {_some(missing)}")
    if extra := sorted(set(tensors) - set(wanted)):
        problems.append(f"unexpected: {_some(extra)}")
    for name in sorted(set(wanted) & set(tensors)):
        if tuple(tensors[name].shape) != wanted[name]:
            shape = tuple(tensors[name].shape)
            problems.append(f"{name} is {shape}, the config wants {wanted[name]}")
        if (dtype := tensors[name].dtype) not in DTYPES:
            problems.append(f"{name} holds {dtype}, not floating-point numbers of 16 to 64 bits")
    if problems:
        raise ValueError(f"{folder} does not fit its config: " + "; ".join(problems))


def write_checkpoint(
    folder: str | os.PathLike[str], config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write `config.json` and `model.safetensors`, all at once, in the place of an older model.

    Raises: OSError if the disk is too small.
    """
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    with transaction(Path(folder), remove=MODEL_FILES, num_bytes=size) as staging:
        write_json(staging / "config.json", config)
        write_tensors(staging / WEIGHTS, tensors)


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
