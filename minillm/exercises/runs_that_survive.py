"""Graders of 07_runs_that_survive: a snapshot, a file whole or not at all, what a kill leaves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minillm.exercises import Unsolved, as_given, check_table, exercise


def _begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    x = torch.arange(24.0).view(8, 3).sin()
    losses = []
    for _ in range(4):
        loss = (model(x)[:, 0] - x[:, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names under which two states differ."""
    return [name for name in a if not torch.equal(a[name], b[name])]


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    parameters = optimizer.param_groups[0]["params"]
    items = [(i, optimizer.state.get(p, {})) for i, p in enumerate(parameters)]
    return {f"{i}/{key}": value.clone() for i, state in items for key, value in state.items()}


@exercise(
    "07_runs_that_survive.1",
    "keep what the next step depends on, so that training on and going back can be repeated",
    "a snapshot is copies of weights, buffers and moments, and the state of the random numbers",
)
def _snapshot(answer: Callable[..., Any]) -> str | None:
    before = torch.get_rng_state()
    try:
        return _snapshot_of(answer)
    finally:
        torch.set_rng_state(before)


def _snapshot_of(answer: Callable[..., Any]) -> str | None:
    model, optimizer = _begin(0)
    _train(model, optimizer)
    weights, moments, place = _copy(model), _moments(optimizer), torch.get_rng_state()
    snapshot = answer(model, optimizer)
    if getattr(snapshot, "__dict__", None) == {}:  # nothing was kept: the stub
        raise Unsolved
    if _equal(weights, _copy(model)) or not torch.equal(place, torch.get_rng_state()):
        return "making a snapshot changes the run: weights or random numbers are not as before"
    expected, after = _train(model, optimizer), _copy(model)
    for attempt in ("first", "second"):
        other, its_optimizer = _begin(1)
        snapshot.put_back(other, its_optimizer)
        if wrong := _equal(weights, _copy(other)):
            if attempt == "second":
                return "put back a second time, the weights are others: the first run changed them"
            if all(torch.equal(_copy(other)[name], after[name]) for name in wrong):
                return (
                    f"{wrong[0]} is that of the end of the training: you kept the tensor itself, "
                    "which trains on; keep a copy"
                )
            buffers = [name for name in wrong if "running" in name or "num_batches" in name]
            if len(buffers) == len(wrong):
                return f"parameters are not all: {buffers[0]} is a buffer, and was not put back"
            return f"{wrong[0]} was not put back"
        found = _moments(its_optimizer)
        if found.keys() != moments.keys():
            return "the optimizer was not put back: its moments are missing, or of another model"
        if _equal(moments, found):
            if attempt == "second":
                return (
                    "put back a second time, the moments are others: the optimizer took your "
                    "tensors and trained on in them; give it copies"
                )
            return "the optimizer's moments are those of another step: keep copies"
        if not torch.equal(place, torch.get_rng_state()):
            return "the random numbers do not stand where they stood: dropout drops other numbers"
        if _train(other, its_optimizer) != expected:
            return "the losses after putting back are others"
    return None


class _Unplugged(BaseException):
    """The power is gone."""


class _Disk:
    """Watches what a function does to the disk around one file."""

    def __init__(self, path: Path, old: bytes | None, new: bytes, unplug: bool) -> None:
        self.path, self.old, self.new, self.unplug = path, old, new, unplug
        self.on_disk: dict[int, int] = {}  # inode -> bytes that were there at the last fsync
        self.finding: str | None = None
        self.renamed = False
        self.real = {name: getattr(os, name) for name in ("fsync", "replace", "rename")}

    def content(self) -> bytes | None:
        return self.path.read_bytes() if self.path.exists() else None

    def look(self) -> None:
        if not self.renamed and self.content() != self.old:
            self.finding = self.finding or (
                "before the new content is safe, the file itself is changed: after a power cut "
                "there, the old content is gone"
            )

    def fsync(self, handle: Any) -> None:
        self.look()
        number = handle if isinstance(handle, int) else handle.fileno()
        self.real["fsync"](number)
        found = os.fstat(number)
        self.on_disk[found.st_ino] = found.st_size

    def rename(self, source: Any, target: Any, **more: Any) -> None:
        source, target = Path(source), Path(target)
        self.look()
        if target == self.path:
            if not source.resolve().is_relative_to(self.path.parent.resolve()):
                self.finding = self.finding or (
                    f"the new file lies in {source.parent.name}, which may be another disk: there, "
                    "a rename is refused or copies; write beside the old one"
                )
            size = self.on_disk.get(os.stat(source).st_ino)
            if size is None:
                self.finding = self.finding or (
                    "the rename comes before the bytes are forced to the disk: after a power cut "
                    "the name may stand for an empty file"
                )
            elif size != len(self.new):
                self.finding = self.finding or (
                    f"at fsync {size} of {len(self.new)} bytes were there: Python still kept the "
                    "rest in its own buffer, which flush empties"
                )
            if self.unplug:
                raise _Unplugged
            self.renamed = True
        self.real["replace"](source, target, **more)


@exercise(
    "07_runs_that_survive.2",
    "replace a file's content so that a power cut at any moment leaves the old or the new",
    "beside, flush, fsync, rename: only the rename touches the name, and it is one step",
)
def _replace_file(answer: Any) -> str | None:
    function = getattr(answer, "function", answer)  # it may return nothing
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "state"
        for old, new, unplug in (
            (b"old", b"the new content", False),
            (b"old", b"the new content", True),
            (None, b"first" * 50_000, False),
        ):
            for present in Path(name).iterdir():
                present.unlink()
            if old is not None:
                path.write_bytes(old)
            disk = _Disk(path, old, new, unplug)
            patches: dict[str, Any] = {
                "fsync": disk.fsync,
                "replace": disk.rename,
                "rename": disk.rename,
            }
            returned: Any = None
            try:
                with patch.multiple(os, **patches):
                    returned = function(path, new)
            except _Unplugged:
                disk.look()
            if disk.finding:
                return disk.finding
            if unplug:
                continue
            left = sorted(p.name for p in Path(name).iterdir())
            if disk.content() == old:
                if left in ([], ["state"]) and (returned is None or returned is ...):
                    raise Unsolved
                return f"afterwards the file holds {old!r}, as before"
            if disk.content() != new:
                return "afterwards the file does not hold the content"
            if not disk.renamed:
                return "the file itself is written: while that lasts, neither old nor new is whole"
            if left != ["state"]:
                return f"something is left beside the file: {', '.join(set(left) - {'state'})}"
    return None


KILLED: dict[str, Any] = {
    "checkpoints": [16, 24],
    "first step taken again": 25,
    "steps finished twice": 6,
    "records kept": [10, 20],
}
_WHY = {
    "checkpoints": "one is written after every 8th step that was finished, and 2 are kept",
    "first step taken again": "the newest checkpoint is the state after a step: which one is next?",
    "steps finished twice": "from the first step taken again to the last one that was finished",
    "records kept": "a record of a step that is taken again would stand there twice",
}
_SLIPS = [
    ("checkpoints", [8, 16, 24], "2 are kept, so the oldest was removed"),
    ("first step taken again", 24, "step 24 is in the checkpoint of step 24"),
    ("first step taken again", 31, "steps after the checkpoint are nowhere but in the log"),
    ("steps finished twice", 7, "step 31 was not finished before the kill"),
    ("records kept", [10, 20, 30], "step 30 is taken again, and writes its record again"),
]


def _slip(question: str, value: Any) -> str | None:
    return next((why for name, slip, why in _SLIPS if (name, slip) == (question, value)), None)


@exercise(
    "07_runs_that_survive.3",
    "write down where the newest checkpoint stands, then what lies after it",
    "a kill costs the steps since the last checkpoint, and their records, and nothing else",
)
def _killed(answer: Any) -> str | None:
    if (given := as_given(answer, KILLED)) is not None:
        answer = {q: sorted(x) if isinstance(x, list | tuple) else x for q, x in given.items()}
        for question, value in answer.items():
            if isinstance(KILLED[question], list) and not isinstance(value, list | type(...)):
                return f"{question}: write a list of steps, not {value!r}"
    return check_table(answer, KILLED, _WHY, _slip, fits=lambda value: True)
