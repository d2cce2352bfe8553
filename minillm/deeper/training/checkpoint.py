"""Checkpoints that are there whole or not at all: written aside, forced to disk, then renamed.

Explained in deeper/07_runs_that_survive. Tensors are in safetensors files, everything else is JSON:
nothing is unpickled.
"""

# Built from notebooks/deeper/07_runs_that_survive.ipynb: edit there, then make build.

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minillm.support.files import read_json, sync

__all__ = [
    "FORMAT",
    "RUN_STATE",
    "STATE",
    "CheckpointError",
    "checkpoints",
    "load_checkpoint",
    "load_model_tensors",
    "load_optimizer_tensors",
    "model_tensors",
    "newest_checkpoint",
    "optimizer_tensors",
    "read_state",
    "save_checkpoint",
]

FORMAT = "minillm checkpoint 1"


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message says which one and why."""

    permanent = False  # True: the next one could not be written either


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first; half-written ones have no such name."""
    return sorted(Path(folder).glob("step-" + "[0-9]" * 8))


def _checksum(path: Path) -> list[int]:
    """Size and CRC-32 of a file."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def _write_files(
    folder: Path,
    step: int,
    tensors: dict[str, dict[str, Tensor]],
    state: dict[str, Any],
    extra: Callable[[Path], None] | None,
) -> None:
    """Fill a new folder with the files of a checkpoint, and force them onto the disk."""
    folder.mkdir(parents=True)
    if extra is not None:
        extra(folder)
    for name, values in tensors.items():
        contiguous = {key: value.detach().contiguous() for key, value in values.items()}
        save_file(contiguous, folder / f"{name}.safetensors")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {path.relative_to(folder).as_posix(): _checksum(path) for path in files}
    text = json.dumps({"format": FORMAT, "step": step, "files": sums, **state})
    (folder / "state.json").write_text(text, encoding="utf-8")
    for path in [*files, folder / "state.json", folder]:
        sync(path)


def _put_back(folder: Path) -> None:
    """Undo a replacement that was interrupted between its two renames."""
    for aside in folder.glob(".step-*.replaced"):
        place = aside.with_name(aside.name.removeprefix(".").removesuffix(".replaced"))
        with suppress(OSError):  # another process may have been quicker
            if not place.exists():
                os.rename(aside, place)


def save_checkpoint(
    folder: str | Path,
    step: int,
    tensors: dict[str, dict[str, Tensor]],
    state: dict[str, Any],
    *,
    keep: int = 2,
    extra: Callable[[Path], None] | None = None,
) -> Path:
    """Write `folder/step-00000123`: a safetensors file an entry of `tensors`, and `state` as JSON.

    The folder appears under its name only when every byte is on the disk; only then are older ones
    beyond `keep` removed, and what a killed process left half-written. `extra` may write more files
    into the folder first.

    Raises: CheckpointError if anything could not be written; what was whole before is still there.
    """
    folder = Path(folder)
    final = folder / f"step-{step:08d}"
    temporary, aside = (folder / f".{final.name}.{kind}" for kind in (os.getpid(), "replaced"))
    _put_back(folder)
    try:
        for left in (temporary, aside):  # by a killed process
            shutil.rmtree(left, ignore_errors=True)
        _write_files(temporary, step, tensors, state, extra)
        if final.exists():
            os.rename(final, aside)
        os.rename(temporary, final)
        sync(folder)
    except (OSError, SafetensorError, RuntimeError, TypeError, ValueError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        _put_back(folder)
        failure = CheckpointError(f"could not write {final}: {error}")
        failure.permanent = not isinstance(error, OSError | SafetensorError)  # not the disk's fault
        raise failure from error
    older = [path for path in checkpoints(folder) if path < final]
    for path in [*older[: max(0, len(older) + 1 - keep)], *folder.glob(".step-*")]:
        shutil.rmtree(path, ignore_errors=True)
    return final


# What `state.json` may hold: of every checkpoint, and of a run that is to be resumed.
STATE: dict[str, type] = {"format": str, "step": int, "files": dict}

RUN_STATE: dict[str, type] = {"config": dict, "source": dict, "tokens": int, "processes": int}

RUN_STATE |= {"sharded": bool, "meter": dict}


def _check_state(state: dict[str, Any], of_run: bool) -> None:
    """Raises: ValueError that names what is missing or of another kind than it must be."""
    needed = {**STATE, **RUN_STATE} if of_run else STATE
    if lacking := needed.keys() - state.keys():
        raise ValueError(f"says nothing of {', '.join(sorted(lacking))}")
    for name, kind in needed.items():
        value: Any = state[name]
        fits = type(value) is kind
        if not fits or (kind is int and value < 0):
            raise ValueError(f"{name} is {value!r:.60}, not {kind.__name__}")
    for name, entry in state["files"].items():
        inside = PurePosixPath(name)
        plain = not inside.is_absolute() and not {"..", "\\"} & {*inside.parts, *name}
        sizes = isinstance(entry, list) and [type(n) for n in entry] == [int, int]
        if not plain or not sizes:
            raise ValueError(f"files has {name!r}: {entry!r:.60}")
    if not all(type(n) in (int, float) for n in state.get("meter", {}).values()):
        raise ValueError(f"meter is {state['meter']!r:.60}")
    kinds = ("rng",) if of_run and state["sharded"] else ("rng", "model", "optimizer")
    for name in kinds if of_run else ():
        if f"{name}.safetensors" not in state["files"]:
            raise ValueError(f"files has no {name}.safetensors")


def read_state(path: str | Path, *, of_run: bool = False) -> dict[str, Any]:
    """The state in a checkpoint, after making sure that all its files are as they were written.

    With `of_run` it must hold all that a trainer goes on from.

    Raises: CheckpointError that says what is missing, cut short, changed or foreign.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such checkpoint folder")
    try:
        state = read_json(path / "state.json", nan=True)  # a loss may have been NaN
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint of ours: it has no state.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}/state.json is cut short or damaged: {error}") from None
    if state.get("format") != FORMAT:
        found = f"{state.get('format')!r:.60}"
        raise CheckpointError(f"{path} is in another format: {found}, not {FORMAT!r}")
    try:
        _check_state(state, of_run)
    except ValueError as error:
        raise CheckpointError(f"{path}/state.json {error}") from None
    for name, (size, crc) in state["files"].items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path}: {name} is missing")
        found_size, found_crc = _checksum(path / name)
        if found_size != size:
            raise CheckpointError(f"{path}/{name} has {found_size} bytes instead of {size}")
        if found_crc != crc:
            raise CheckpointError(f"{path}/{name} was changed: its checksum does not fit")
    return state


def load_checkpoint(path: str | Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors and the state that `save_checkpoint` wrote. Raises: as `read_state`."""
    path, state = Path(path), read_state(path)
    names = [n for n in state["files"] if "/" not in n and n.endswith(".safetensors")]
    return {n.removesuffix(".safetensors"): load_file(path / n) for n in names}, state


def newest_checkpoint(folder: str | Path, *, of_run: bool = False) -> Path | None:
    """The newest whole checkpoint in `folder`, or None; a damaged one is passed over, warned of."""
    _put_back(Path(folder))
    for path in reversed(checkpoints(folder)):
        try:
            read_state(path, of_run=of_run)
            return path
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
    return None


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model, each tensor once: of tied weights, the first name."""
    found: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {n: t for n, t in state.items() if found.setdefault(id(t), n) == n}


@torch.no_grad()
def load_model_tensors(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Copy saved tensors into a model.

    Raises: CheckpointError that names missing, unexpected and mis-shaped tensors.
    """
    ours = model_tensors(model)
    wrong = [f"missing {n}" for n in ours.keys() - saved.keys()]
    wrong += [f"unexpected {n}" for n in saved.keys() - ours.keys()]
    wrong += [
        f"{n} is {tuple(saved[n].shape)}, the model's is {tuple(t.shape)}"
        for n, t in ours.items()
        if n in saved and saved[n].shape != t.shape
    ]
    if wrong:
        raise CheckpointError("the weights belong to another model: " + "; ".join(sorted(wrong)))
    for name, tensor in ours.items():
        tensor.copy_(saved[name])


def optimizer_tensors(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The optimizer's state by parameter name: `layers.0.weight/exp_avg`."""
    names = {p: name for name, p in model.named_parameters()}
    items = [(names[p], state) for p, state in optimizer.state.items()]
    return {f"{name}/{key}": value for name, state in items for key, value in state.items()}


def load_optimizer_tensors(model: nn.Module, optimizer: Any, saved: dict[str, Tensor]) -> None:
    """Give each parameter its saved state, and none to one that has none saved.

    Raises: CheckpointError for an unknown parameter.
    """
    parameters = dict(model.named_parameters())
    fused = any(group.get("fused") for group in optimizer.param_groups)  # counts on the device
    if unknown := {full.rpartition("/")[0] for full in saved} - parameters.keys():
        raise CheckpointError(f"optimizer state of {min(unknown)!r}, which the model does not have")
    optimizer.state.clear()
    for full, value in saved.items():
        name, _, key = full.rpartition("/")
        p = parameters[name]
        if value.dim() and value.shape == p.shape:  # laid out like p: fused kernels rely on it
            value = torch.empty_like(p, dtype=value.dtype).copy_(value)
        else:
            value = value.to(p.device if value.dim() or fused else value.device).clone()
        optimizer.state.setdefault(p, {})[key] = value
