"""Checkpoints of language models in Hugging Face's format: read them, write them.

deeper/10_families shows both directions; written by hand. What every kind of model has in common is
in `deeper.pretrained.folder`; how the families spell their configs and name their weights is in
`minillm.deeper.pretrained.families` and `minillm.deeper.pretrained.weights`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.deeper.pretrained.folder import (
    WEIGHTS,
    Layout,
    fill,
    fitting_model,
    local_place,
    read_dtype,
    read_folder,
    state_of,
    tensors_of,
    with_ends,
    write_folder,
)
from minillm.deeper.pretrained.weights import read_weights, write_weights
from minillm.deeper.tokenizer.beside import TOKENIZER_FILES
from minillm.deeper.tokenizer.wrapped import load_tokenizer, warn_of_unread
from minillm.layers import ACTIVATIONS
from minillm.model import CausalLM
from minillm.support.checks.model import check_model
from minillm.support.checks.texts import check_tokenizer
from minillm.support.checks.words import our_words
from minillm.support.files import read_json, resolve


@our_words
def from_pretrained(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
    weights: str | None = None,
) -> tuple[CausalLM, Any]:
    """The model and the tokenizer of a folder, a GGUF file or a repository.

    The tokenizer is None if there is none, and also, with a warning that says why, if it cannot be
    read.

        model, tokenizer = from_pretrained("runs/first", dtype="float32")
        ids = model.generate(torch.tensor([tokenizer.encode("The")]), max_new_tokens=20)

    Of a run's folder that holds no finished model, the newest whole checkpoint is read.

    Weights keep the file's dtype unless `dtype` says otherwise; where a file mixes them, the
    config's decides, else the embedding's; a GGUF file's become float32. What
    `generation_config.json` says of end tokens holds. The model is in evaluation mode. A save of
    the folder that was interrupted is completed first, or read where it lies if the folder cannot
    be written.

    With `weights="as stored"` those of a GGUF file keep the few bits that they have there (of types
    other than Q4_0, Q4_1, Q4_K and Q8_0 they get 8 bits, with a warning; 8 bits become bfloat16 on
    processors where that is quicker): a `PackedLM` on the CPU, for generation only. Where torch has
    no product for them, they become float32, with a warning.
    Raises: ValueError if a weight is missing, unexpected or of another shape, each named, if the
        family is unknown, or for weights="as stored" of what is no GGUF file, or elsewhere than in
        float32 on the CPU; FileNotFoundError if there is no such folder and no hub to ask.
    """
    wanted, place = read_dtype(dtype), local_place(name, revision)
    model = _model_at(place, wanted, device, weights)
    try:
        tokenizer = tokenizer_of(place)
    except (ValueError, ImportError, OSError) as error:
        warnings.warn(f"the model comes without a tokenizer: {error}", stacklevel=3)
        return model, None
    if tokenizer is None and place.is_dir() and not Path(name).exists():
        warn_of_unread(name, _names_at_the_hub(name, revision))
    return model, tokenizer


@our_words
def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
    weights: str | None = None,
) -> CausalLM:
    """The model alone, as `from_pretrained` reads it; no tokenizer is opened, whatever it is."""
    wanted, place = read_dtype(dtype), local_place(name, revision)
    return _model_at(place, wanted, device, weights)


def _model_at(
    place: Path, wanted: torch.dtype | None, device: torch.device | str | None, weights: str | None
) -> CausalLM:
    if weights not in (None, "as stored"):
        raise ValueError(f"unknown weights={weights!r:.60}: 'as stored', or None for float ones")
    if weights and not place.is_file():
        raise ValueError(f"weights='as stored' is for a GGUF file, and {place} is none")
    if weights and (wanted or torch.float32, torch.device(device or "cpu").type) != _STORED:
        found = f"{wanted or torch.float32} on {device or 'cpu'}"
        raise ValueError(f"weights='as stored' are multiplied in float32 on cpu, not in {found}")
    if place.is_file():
        return _from_gguf(place, wanted, device, weights is not None)
    if checkpoint := _checkpoint(place):
        return _from_checkpoint(checkpoint, wanted, device)
    if resolve(place / "adapter_config.json").exists() and not (place / "config.json").exists():
        road = f"load_adapter(model, {str(place)!r}) puts it onto its model"
        raise FileNotFoundError(f"{place} has no config.json, it holds an adapter: {road}")
    return read_folder(LAYOUT, place, dtype=wanted, device=device)


def tokenizer_of(place: Path) -> Any:
    """The tokenizer of what `local_place` has found, None if there is none.

    Raises: ValueError if it is damaged or of a kind that we do not read; ImportError for a library.
    """
    if place.is_file():
        from minillm.deeper.pretrained import gguf

        return gguf.read_tokenizer(gguf.read_header(place))
    return _load_tokenizer(place.parent if _checkpoint(place) == place else place)


def _names_at_the_hub(name: Any, revision: str | None) -> list[str]:
    with suppress(ImportError, OSError, ValueError):
        from huggingface_hub import list_repo_files

        return list_repo_files(name, revision=revision)
    return []


_STORED = (torch.float32, "cpu")


def _from_gguf(
    path: Path, wanted: torch.dtype | None, device: torch.device | str | None, as_stored: bool
) -> CausalLM:
    from minillm.deeper.pretrained import gguf

    header = gguf.read_header(path)
    config = gguf.read_config(header)
    shapes = {k: torch.empty(v, device="meta") for k, v in gguf.shapes(header).items()}
    try:
        _check_heads(shapes, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    model = fitting_model(LAYOUT, config, shapes, path)
    if not as_stored:
        return fill(model, gguf.read_weights(header, config), wanted, device)
    from minillm.deeper.fast.four_bits import SIZES
    from minillm.deeper.fast.stored import four_bit_products, take_rows

    kinds = {s.kind for s in header.tensors.values() if len(s.shape) > 1}
    odd = [name for name, s in header.tensors.items() if len(s.shape) > 1 and s.shape[-1] % 32]
    why = four_bit_products() or (f"{odd[0]!r:.80} has rows of no multiple of 32" if odd else None)
    if why is not None:
        warnings.warn(f"{path}: {why}, so the weights become float32", stacklevel=5)
        return fill(model, gguf.read_weights(header, config), wanted, device).packed()
    if others := sorted(kinds - SIZES.keys()):
        loss = "each number moves by at most 1/220 of the largest of its 32 neighbours"
        warnings.warn(f"{path}: {', '.join(others)} become 8 bits: {loss}", stacklevel=5)
    model = fill(model, gguf.read_weights(header, config, matrices=False), wanted, device)
    return take_rows(model, gguf.read_rows(header, config, SIZES)).packed()


def _checkpoint(folder: Path) -> Path | None:
    """The checkpoint of a run that a folder is, or the newest whole one in it; else None."""
    from minillm.deeper.training.checkpoint import checkpoints, newest_checkpoint

    if resolve(folder / "config.json").exists():
        return None
    if (folder / "state.json").exists():
        return folder
    found = newest_checkpoint(folder)
    if found is None and checkpoints(folder):
        raise ValueError(f"{folder} holds a run, and no checkpoint of it is whole")
    return found


def config_of(name: str | os.PathLike[str]) -> ModelConfig:
    """The config of what `from_pretrained` opens there; weights and tokenizer stay unread."""
    place = local_place(name)
    if place.is_file():
        from minillm.deeper.pretrained import gguf

        return gguf.read_config(gguf.read_header(place))
    if found := _checkpoint(place):
        return _config_of_checkpoint(found)
    return ModelConfig.from_dict(read_json(place / "config.json"))


def _config_of_checkpoint(path: Path) -> ModelConfig:
    from minillm.deeper.training.checkpoint import CheckpointError, read_state

    try:
        data = read_state(path).get("model")
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    if not isinstance(data, dict):
        road = "Trainer(model, ..., run=Run(folder)).resume() reads it into a model"
        raise ValueError(f"{path} cannot be opened by itself ({data}): {road}")
    return ModelConfig.from_dict(data)


def _from_checkpoint(
    path: Path, dtype: torch.dtype | None, device: torch.device | str | None
) -> CausalLM:
    config, tensors = _config_of_checkpoint(path), dict(tensors_of(path / WEIGHTS))
    model = fitting_model(LAYOUT, config, tensors, path)
    return fill(model, tensors.items(), dtype, device)


def described(model: Any) -> dict[str, Any] | str:
    """For a checkpoint: the model's `config.json`, or why weights and config do not make it."""
    try:
        if not isinstance(model, CausalLM):
            raise ValueError(f"its model is not a CausalLM but {type(model).__name__}")
        state_of(LAYOUT, model)
        return write_config(model.config)
    except ValueError as error:
        return str(error)


def save_pretrained(
    model: CausalLM,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write `config.json`, the weights (in several files if they are large) and the tokenizer.

    Saved over an older model, the new one takes its place as a whole (see
    `support.files.transaction`): if the save is interrupted at whatever moment, `from_pretrained`
    finds the older model or the new one, and never parts of both. The older one's weights and
    `generation_config.json` go, and its tokenizer if a new one is given; other files stay.
    Of a `PackedLM` the model is saved that it was made from; adapters (`beyond.lora.lora`) must be
    merged.
    Raises: ValueError, before anything is written, for a model that its family's files cannot hold
        or in which a part is not as its config makes it (forward hooks may be there, and are not
        saved), for adapters that are not merged, and for a folder that holds an adapter;
        OSError if the disk is too small, before anything is written where that can be known.
    """
    check_model(model)
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    write_folder(LAYOUT, model, folder, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes)


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
    places = {name: resolve(folder / name) for name in TOKENIZER_FILES}
    if all(path == folder / name for name, path in places.items()):
        return load_tokenizer(folder)
    with tempfile.TemporaryDirectory() as gathered:
        for name, path in places.items():
            if path.exists():
                shutil.copyfile(path, Path(gathered, name))
        return load_tokenizer(gathered)


def _read_config(data: Mapping[str, Any], generation: Mapping[str, Any] | None) -> ModelConfig:
    return ModelConfig.from_dict(with_ends(data, generation))


def write_config(config: ModelConfig) -> dict[str, Any]:
    """A `config.json`. Raises: ValueError if what it would say is another model."""
    check_savable(config)
    return config.to_dict()


def _read_weights(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    _check_heads(tensors, config)
    return read_weights(tensors, config)


def _check_heads(tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Raises: ValueError for heads of any size, before the angles of a rotation are made."""
    if (config.head_dim or 0) > (largest := max(t.numel() for t in tensors.values())):
        message = f"head_dim is {config.head_dim}, the largest weight has {largest} numbers"
        raise ValueError(f"the weights do not fit their config: {message}")


LAYOUT = Layout(
    model=CausalLM,
    read_config=_read_config,
    write_config=write_config,
    read_weights=_read_weights,
    write_weights=write_weights,
    layers=lambda config: {"model.layers": config.num_hidden_layers},
    first="model.embed_tokens.weight",
)
