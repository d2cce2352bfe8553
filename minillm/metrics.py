"""What a training run says of itself: a progress bar, and one JSON record a line.

Explained in notebook 09 (training).
"""

# Built from notebooks/09_training.ipynb: edit there, then make build.

import json
import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from minillm.checkpoint import checkpoints
from minillm.rng import rng_state, set_rng_state

__all__ = ["Meter", "check_free", "look_at"]


def _append(path: Path, record: dict[str, Any]) -> None:
    """Write a record at the end of a file, as one line; warn if that is not possible."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    except OSError as error:
        warnings.warn(f"metrics not written: {error}", stacklevel=3)


def _forget_after(path: Path, step: int) -> None:
    """Drop records of steps that a resumed run takes again, and a line that a kill cut short."""
    kept, old = [], path.read_bytes() if path.exists() else b""
    for line in old.split(b"\n"):  # bytes: the cut may go through a character
        with suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line + b"\n")
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)


class Meter:
    """Counts what a run does, shows it on a progress bar and writes it to `metrics.jsonl`."""

    def __init__(self, trainer: Any, last: int) -> None:
        self.trainer, self.extra, self.grad_norm = trainer, {}, 0.0
        self.nats = self.targets = self.bytes = 0
        self.start, self.tokens_at_start = time.perf_counter(), trainer.tokens
        self.main = trainer.world.rank == 0
        self.path = None
        if trainer.config.folder is not None and self.main:
            self.path = Path(trainer.config.folder) / "metrics.jsonl"
            self.path.parent.mkdir(parents=True, exist_ok=True)  # if it cannot be, tell it now
            _forget_after(self.path, trainer.step)
        hidden = not (trainer.progress and self.main)
        self.bar = tqdm(total=last, initial=trainer.step, unit="step", disable=hidden)

    def add(self, nats: float, targets: int, num_bytes: int, norm: float) -> None:
        """Count one step."""
        self.nats, self.targets = self.nats + nats, self.targets + targets
        self.bytes, self.grad_norm = self.bytes + num_bytes, norm
        self.bar.update()

    def write(self) -> None:
        """Record the mean since the last record."""
        trainer, seconds = self.trainer, time.perf_counter() - self.start
        record = {"step": trainer.step, "tokens": trainer.tokens}
        record["loss"] = self.nats / max(1, self.targets)
        if self.bytes:
            record["bits_per_byte"] = self.nats / math.log(2) / self.bytes
        record["lr"] = trainer.optimizer.param_groups[0]["lr"]
        record |= {"grad_norm": self.grad_norm, "seconds": seconds}
        record["tokens_per_second"] = (trainer.tokens - self.tokens_at_start) / seconds
        if clash := ", ".join(sorted(record.keys() & self.extra.keys())):
            raise ValueError(f"validate returned {clash}: the run records that itself, rename it")
        record |= self.extra
        self.nats, self.targets, self.bytes, self.extra = 0.0, 0, 0, {}
        trainer.history.append(record)
        speed = f"{record['tokens_per_second']:,.0f} tokens/s"
        self.bar.set_postfix_str(f"loss {record['loss']:.3f}, {speed}")
        if self.path is not None:
            _append(self.path, record)
        if trainer.on_log is not None and self.main:
            trainer.on_log(record)


def check_free(folder: str | Path, advice: str = "resume it, or give another folder") -> None:
    """Raise a ValueError if `folder` holds a run already: checkpoints, or records of its steps."""
    found = [path.name for path in checkpoints(folder)[-1:]]
    metrics = Path(folder) / "metrics.jsonl"
    if metrics.is_file() and metrics.stat().st_size:
        found.append(metrics.name)
    if found:
        raise ValueError(f"{folder} holds a run: {advice} (found {' and '.join(found)})")


def look_at(
    model: nn.Module,
    device: torch.device,
    validate: Callable[[nn.Module], float | dict[str, float]] | None,
    sample: Callable[[nn.Module], str] | None,
) -> dict[str, Any]:
    """Validation and a sample text; the training goes on as if nobody had looked."""
    found, rng = {}, rng_state(device)
    model.eval()
    try:
        with torch.no_grad():
            if validate is not None:
                value = validate(model)
                value = value if isinstance(value, dict) else {"validation": value}
                found |= {name: float(number) for name, number in value.items()}
            if sample is not None:
                found["sample"] = sample(model)
    finally:
        model.train()
        set_rng_state(rng, device)
    return found
