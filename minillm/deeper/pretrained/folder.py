"""A folder with a checkpoint in Hugging Face's format: found, read, checked, filled, written.

One way for every kind of model; what is particular to a kind stands in its `Layout`, beside this
file. A stranger's folder gives a model or a ValueError that says what is wrong. Written by hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minillm.deeper.pretrained.changes import check_unchanged
from minillm.deeper.pretrained.families import check_value
from minillm.deeper.pretrained.weights import DTYPES
from minillm.deeper.tokenizer.beside import TOKENIZER_FILES
from minillm.model import Decoder, make_part
from minillm.support.files import (
    MOST_BYTES,
    parse_json,
    read_json,
    recover,
    resolve,
    transaction,
    write_json,
    write_tensors,
)

# What we read, and nothing else: many repositories hold the same weights in three more formats.
FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    *TOKENIZER_FILES,
]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# What a model is read from, as names or patterns: a saved one replaces all.
SHARDS = f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"
MODEL_FILES = [WEIGHTS, INDEX, SHARDS, "generation_config.json"]
LOST = "read back from files, the model would be another one"

_MOST_LAYERS = 1024  # published models have up to 126; each takes a moment, however small it is

# Rounded to 16 bits it would send tokens to other experts; transformers keeps it as it is, too.
_FULL_PRECISION = re.compile(r"\.e_score_correction_bias$")

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """How a kind of model lies in files.

    Args:
        model: the class, which is made from a config.
        read_config: the config of `config.json` and `generation_config.json`, None if there is
            none. Raises ValueError.
        write_config: the inverse, to a `config.json`. Raises ValueError for a config that the
            files cannot hold.
        read_weights: a file's tensors under our names. Raises ValueError.
        write_weights: the inverse.
        layers: of a config, our names of the stacks of layers, and how many each should have.
        first: the weight whose dtype counts where a file mixes them and its config says nothing.
        file_name: what the files call a weight of ours, for errors.
        complete: the config with what only the names of the weights tell.
    """

    model: Callable[[Any], nn.Module]
    read_config: Callable[[Mapping[str, Any], Mapping[str, Any] | None], Any]
    write_config: Callable[[Any], dict[str, Any]]
    read_weights: Callable[[Tensors, Any], dict[str, Tensor]]
    write_weights: Callable[[Tensors, Any], dict[str, Tensor]]
    layers: Callable[[Any], dict[str, int]]
    first: str
    file_name: Callable[[str, Any], str] = lambda name, config: name
    complete: Callable[[Any, Collection[str]], Any] = lambda config, names: config


def read_folder(
    layout: Layout,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """The model of a folder, in evaluation mode.

    Weights keep the file's dtype unless `dtype` says otherwise; where a file mixes them, the
    config's decides, else that of the layout's `first`.
    Raises: ValueError if a weight is missing, unexpected or of another shape, each named, or if the
        config says what is not computed; FileNotFoundError if there is no such file.
    """
    data = read_json(folder / "config.json")
    config = layout.read_config(data, _generation(folder))
    stored = read_tensors(folder)
    config = layout.complete(config, stored.keys())
    try:
        tensors = layout.read_weights(stored, config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    model = fitting_model(layout, config, tensors, folder)
    dtype = dtype or _one_dtype(tensors, data, layout.first)
    return fill(model, tensors.items(), dtype, device)


def fitting_model(layout: Layout, config: Any, tensors: Tensors, place: Path) -> Any:
    """A model without numbers for these tensors. Raises: ValueError if they do not fit it."""
    _check_layers(layout, config, tensors, place)
    try:
        model = empty_model(layout.model, config)
    except (RuntimeError, OverflowError) as error:  # sizes that no tensor can have
        raise ValueError(f"{place} has a config of which no model can be made: {error}") from None
    _check_tensors(layout, model, tensors, place)
    return model


def fill(
    model: Any,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Any:
    """An empty model with the numbers of these tensors, ready to be asked."""
    state = {
        name: t.to(device=device, dtype=None if _FULL_PRECISION.search(name) else dtype)
        for name, t in tensors
    }
    model.load_state_dict(state, strict=False, assign=True)
    for part in [*model.modules()]:
        if hasattr(part, "tie_weights"):
            part.tie_weights()
        if isinstance(part, Decoder):
            part.rotary = make_part("rotary", part.config)  # it has no weights
            if part.rotary is not None and device is not None:
                part.rotary.to(device)
    return model.eval()


def write_folder(
    layout: Layout,
    model: Any,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write `config.json`, the weights, in several files if they are large, and a tokenizer.

    All at once, in the place of an older model: see `minillm.support.files.transaction`.
    Raises: ValueError, before anything is written, for a config that the files cannot hold, for a
        part that is not as the config makes it (forward hooks may be there, and are not saved), for
        adapters that are not merged, and for a folder that holds an adapter; OSError if the disk is
        too small.
    """
    folder = Path(folder)
    model = getattr(model, "_orig_mod", model)  # of a compiled model, itself
    data = layout.write_config(model.config)
    if resolve(folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter, which readers would put onto this model")
    state = {k: v.cpu() for k, v in state_of(layout, model).items()}
    tensors = {k: v.contiguous() for k, v in layout.write_weights(state, model.config).items()}
    shards = _shards(tensors, max_shard_bytes)

    def release() -> None:
        """Let go of the files that the model's weights may lie in."""
        for views in (state, tensors, *shards):
            views.clear()
        _copy_weights(model)

    data["dtype"] = str(tensors[next(iter(tensors))].dtype).removeprefix("torch.")
    _write(folder, data, shards, tokenizer, release)


def write_checkpoint(
    folder: str | os.PathLike[str], config: Mapping[str, Any], tensors: Tensors
) -> None:
    """Write `config.json` and `model.safetensors`, all at once, in the place of an older model.

    Raises: OSError if the disk is too small.
    """
    _write(Path(folder), config, [{name: t.contiguous() for name, t in tensors.items()}])


def _write(
    folder: Path,
    config: Mapping[str, Any],
    shards: list[dict[str, Tensor]],
    tokenizer: Any = None,
    release: Callable[[], object] | None = None,
) -> None:
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    old = MODEL_FILES + (TOKENIZER_FILES if tokenizer is not None else [])
    with transaction(folder, remove=old, num_bytes=size, release=release) as staging:
        if tokenizer is not None:
            tokenizer.save(staging)
        write_json(staging / "config.json", config)
        for name, shard in zip(names, shards, strict=True):
            write_tensors(staging / name, shard)
        if len(shards) > 1:
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


def empty_model(model: Callable[[Any], Any], config: Any) -> Any:
    """A model whose weights have shapes and no numbers, to be filled from a file."""
    with torch.device("meta"), ShapesAlone():
        return model(config)


def state_of(layout: Layout, model: nn.Module) -> dict[str, Tensor]:
    """The weights that a checkpoint of the config holds, under our names.

    Raises: ValueError if the model has others: loaded again, it would be another model.
    """
    from minillm.beyond.lora.adapters import check_merged
    from minillm.deeper.training.distributed import is_sharded

    check_merged(model, "only whole models can be saved so")
    if stored := [name for name, part in model.named_modules() if hasattr(part, "stored_kind")]:
        road = "copy that file, or open it without weights='as stored'"
        raise ValueError(f"{stored[0]} holds what a GGUF file stores, which is not saved: {road}")
    if is_sharded(model):
        raise ValueError(
            "the model is sharded: gather it with distributed.whole_tensors, then save"
        )
    built = empty_model(layout.model, model.config)
    wanted = built.state_dict()
    state = {k: v.detach() for k, v in model.state_dict().items() if ".lora_" not in k}
    if hasattr(model, "packed_layers"):  # a copy of the weights lies beside the model's own
        state = {k: v for k, v in state.items() if k in wanted}
    if state.keys() != wanted.keys():
        strange, lacking = (
            sorted(state.keys() - wanted.keys()),
            sorted(wanted.keys() - state.keys()),
        )
        which = f"not known: {_some(strange)}" if strange else f"not there: {_some(lacking)}"
        which = f"{len(state)} weights, its config says {len(wanted)}; {which}"
        raise ValueError(f"a {type(model).__name__} cannot be saved that has {which}")
    # Hooks may stay: they change no weight, and most are there to look. No reader expects them.
    check_unchanged(model, built, LOST)
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


def _one_dtype(tensors: Tensors, data: Mapping[str, Any], first: str) -> torch.dtype | None:
    """Where a file mixes dtypes, the config's, else that of its weight `first`; else None."""
    if len({tensor.dtype for tensor in tensors.values()}) == 1:
        return None
    return read_dtype(data.get("dtype") or data.get("torch_dtype")) or tensors[first].dtype


def _generation(folder: Path) -> dict[str, Any] | None:
    """What `generation_config.json` says, None if there is none.

    Chat models have more end tokens there than their config says.
    """
    path = folder / "generation_config.json"
    if not resolve(path).exists():
        return None
    data = read_json(path)
    try:
        ends = data.get("eos_token_id")
        if not (type(ends) is int and ends < 0):  # passed over, as any outside the vocabulary
            check_value("eos_token_id", ends)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return data


def with_ends(data: Mapping[str, Any], generation: Mapping[str, Any] | None) -> dict[str, Any]:
    """A language model's config with the end tokens of `generation_config.json`, if it has any."""
    ends = (generation or {}).get("eos_token_id")
    return {**data} if ends is None else {**data, "eos_token_id": ends}


def check_computed(
    data: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]], kind: str
) -> None:
    """Raises: ValueError for a key of a config that is there with none of the values known."""
    for key, values in known.items():
        if data.get(key) is not None and data[key] not in values:
            raise ValueError(f"{key}={data[key]!r:.60} of a {kind} config is not computed")


def table(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The table of that name in a config, empty where there is none. Raises: ValueError."""
    found = data.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise ValueError(f"{key} must be a table, not {found!r:.60}")
    return dict(found or {})


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
        reason = " ".join(f"{type(error).__name__}: {error}".split())
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


def _check_layers(layout: Layout, config: Any, tensors: Tensors, folder: Path) -> None:
    """Raises: ValueError if the config has layers of which no weight is there, or too many.

    Before a model is made of the config, which may claim any size.
    """
    for place, total in layout.layers(config).items():
        matches = (re.match(rf"{place}\.([0-9]{{1,9}})\.", name) for name in tensors)
        found = {int(match[1]) for match in matches if match}
        if (first := next((i for i in range(total) if i not in found), None)) is not None:
            name = layout.file_name(f"{place}.{first}.", config).removesuffix(".")
            there = f"there are {total}, and weights of {sum(i < total for i in found)}"
            message = f"missing: {name} (by the config {there})"
            raise ValueError(f"{folder} does not fit its config: {message}")
        if total > _MOST_LAYERS:
            raise ValueError(f"{folder} is not read: {total:,} layers, more than {_MOST_LAYERS:,}")


def _check_tensors(layout: Layout, model: Any, tensors: Tensors, folder: Path) -> None:
    """Raises: ValueError that names each tensor that is missing, unexpected or mis-shaped."""

    def names(ours: Iterable[str]) -> str:
        return _some(sorted({layout.file_name(name, model.config) for name in ours}))

    wanted = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    every = dict(model.named_parameters(remove_duplicate=False))
    tied = every.keys() - dict(model.named_parameters()).keys()  # all but the first of each
    problems = []
    if missing := wanted.keys() - tensors.keys() - tied:
        problems.append(f"missing: {names(missing)}")
    if extra := tensors.keys() - wanted.keys():
        problems.append(f"unexpected: {names(extra)}")
    for name in sorted(wanted.keys() & tensors.keys()):
        tensor, theirs = tensors[name], layout.file_name(name, model.config)
        if (shape := tuple(tensor.shape)) != wanted[name]:
            problems.append(f"{theirs} is {shape}, the config wants {wanted[name]}")
        if tensor.dtype not in DTYPES:
            kind = "not floating-point numbers of 16 to 64 bits"
            problems.append(f"{theirs} holds {tensor.dtype}, {kind}")
    if problems:
        raise ValueError(f"{folder} does not fit its config: {_some(problems, separator='; ')}")


def _some(names: list[str], limit: int = 20, separator: str = ", ") -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more


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
