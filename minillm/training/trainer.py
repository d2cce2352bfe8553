"""The training loop: any model from ids to logits; survives a kill and resumes bit for bit.

Explained in notebook 09.
"""

# Built from notebooks/09_training.ipynb: edit there, then make build.

import dataclasses
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minillm.training import checkpoint, distributed
from minillm.training.checkpoint import CheckpointError, checkpoints
from minillm.training.data import BatchSource, check_settings
from minillm.training.loss import accumulate_gradients
from minillm.training.muon import MuonAdamW
from minillm.training.optim import AdamW, clip_grad_norm, cosine_schedule, decay_groups

__all__ = ["Meter", "TrainConfig", "Trainer", "check_free", "look_at", "rng_state", "set_rng_state"]


@dataclass(frozen=True)
class _Settings:
    """The values, checked."""

    steps: int
    max_lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    accumulation: int = 1  # batches a step
    precision: Literal["float32", "bfloat16"] = (
        "float32"  # of matrix products; weights stay float32
    )
    compile: bool = False
    algorithm: Literal["adamw", "muon"] = "adamw"
    fused: bool = True  # torch's AdamW in one kernel; False: the AdamW of notebook 09, same formula
    seed: int = 0
    parallel: Literal["ddp", "fsdp"] = "ddp"  # under torchrun
    folder: str | None = None  # of checkpoints and metrics.jsonl; None: keep nothing
    checkpoint_every: int = 0  # steps; 0: only at the end
    keep: int = 2  # checkpoints
    log_every: int = 10
    validate_every: int = 0  # also for sample texts; 0: only at the end

    def __post_init__(self) -> None:
        warmup = min(self.warmup_steps, self.steps)
        cosine_schedule(0, self.max_lr, self.min_lr, warmup, self.steps)  # refuses what it must
        counts = (self.steps, self.accumulation, self.log_every, self.keep)
        if any(n < 1 or n % 1 for n in counts):
            raise ValueError(f"steps, accumulation, log_every and keep are counts from 1: {self}")
        if not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive, not {self.max_norm}")
        if self.precision not in ("float32", "bfloat16") or self.parallel not in ("ddp", "fsdp"):
            raise ValueError(f"precision {self.precision!r}, parallel {self.parallel!r}")
        if self.algorithm not in ("adamw", "muon"):
            raise ValueError(f"algorithm {self.algorithm!r} is neither adamw nor muon")
        if self.algorithm == "muon" and not self.fused:
            raise ValueError("muon goes with torch's AdamW, not with fused=False")


@dataclass(frozen=True)
class TrainConfig(_Settings):
    """Everything that decides the numbers of a run, and where it is kept.

    Raises: ValueError for values out of range.
    """

    def learning_rate(self, step: int) -> float:
        """The rate of a step; a warm-up longer than the run is cut."""
        warmup = min(self.warmup_steps, self.steps)
        return cosine_schedule(step, self.max_lr, self.min_lr, warmup, self.steps)

    def optimizer(self, model: nn.Module) -> AdamW | torch.optim.AdamW | MuonAdamW:
        """AdamW over the model's parameters, matrices with weight decay, vectors without.

        With `algorithm="muon"` the matrices of the layers are moved by Muon instead.
        """
        groups = decay_groups(model, self.weight_decay)
        if self.algorithm == "muon":
            return MuonAdamW(model, groups, self.max_lr, self.betas, self.eps)
        settings = {"lr": self.max_lr, "betas": self.betas, "eps": self.eps}
        if self.fused:
            return torch.optim.AdamW(groups, **settings, fused=True)
        return AdamW(groups, **settings)

    def numbers(self) -> dict[str, Any]:
        """The settings that a resumed run must share."""
        free = ("folder", "checkpoint_every", "keep", "log_every", "validate_every")
        settings = {k: v for k, v in dataclasses.asdict(self).items() if k not in free}
        if self.algorithm == "adamw":  # runs that were begun before there was a choice
            del settings["algorithm"]
        return {**settings, "betas": list(self.betas)}


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


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """Where torch's random numbers stand, on the CPU and on the device."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Go back to where `rng_state` was called."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])


def _share(batch: tuple[Tensor, Tensor], world: distributed.World) -> tuple[Tensor, Tensor]:
    """The rows of a batch that belong to this process."""
    if len(batch[0]) < world.size:
        raise ValueError(f"a batch of {len(batch[0])} rows for {world.size} processes")
    inputs, targets = (x[world.rank :: world.size] for x in batch)
    return inputs, targets


def _count(targets: Tensor, token_bytes: Tensor | None) -> list[int]:
    """Targets that count, and the bytes of text they stand for, or are expected to."""
    if targets.is_floating_point():  # probabilities (B, T, V)
        num_bytes = 0 if token_bytes is None else (targets @ token_bytes.to(targets)).sum()
        return [int((targets.sum(-1) != 0).sum()), round(float(num_bytes))]
    counted = targets[targets != -100]
    if token_bytes is None:
        return [len(counted), 0]
    return [len(counted), int(token_bytes[counted.to(token_bytes.device)].sum())]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _Run:
    """Model, data, settings, optimizer and random state of a run: saved, and resumed."""

    def __init__(self, model: nn.Module, source: BatchSource, config: TrainConfig) -> None:
        self.model = getattr(model, "_orig_mod", model)  # without the shell of torch.compile
        self.source, self.config = source, config
        self.device, self.world = next(model.parameters()).device, distributed.world()
        self.step, self.tokens, self.begun, self.torn = 0, 0, False, False
        before = rng_state(self.device)
        torch.manual_seed(config.seed + self.world.rank)
        self.rng = rng_state(self.device)
        set_rng_state(before, self.device)
        self.forward = distributed.wrap(self.model, config.parallel)
        if self.forward is self.model is not model:
            self.forward = model  # compiled already, in the caller's way
        elif config.compile or self.model is not model:
            self.forward = torch.compile(self.forward)
        self.optimizer = config.optimizer(self.model)

    def save(self, *, must: bool = True) -> Path | None:
        """Write a checkpoint. If it need not be, a disk that is full for now is but a warning.

        What would fail the next time too, such as a state that is no JSON, is told at once.
        """
        state = {"config": self.config.numbers(), "tokens": self.tokens}
        state["source"] = self.source.state_dict()
        where = (self.config.folder, self.step, self.config.keep)
        try:
            return distributed.save(*where, self.model, self.optimizer, self.rng, state)
        except CheckpointError as error:
            if must or error.lasting:
                raise
            warnings.warn(f"{error}; training goes on", stacklevel=2)
            return None

    def resume(self, path: str | Path | None = None) -> bool:
        """Continue from `path`, or from the newest whole checkpoint of the run; False if none is.

        Raises: CheckpointError or ValueError for one that is damaged, foreign or of another run.
        """
        if path is None and self.config.folder:
            path = checkpoint.newest_checkpoint(self.config.folder)
        if path is not None:
            state = checkpoint.read_state(path)
            saved = {"algorithm": "adamw", **state.get("config", {})}
            check_settings(saved, {"algorithm": "adamw", **self.config.numbers()})
            before = self.source.state_dict()
            self.source.load_state_dict(state["source"])  # if it refuses, nothing has been loaded
            try:
                self.rng, state = distributed.load(path, self.model, self.optimizer)
            except BaseException:
                self.source.load_state_dict(before)
                raise
            self.step, self.tokens, self.torn = state["step"], state["tokens"], False
            self.optimizer.zero_grad()
        self.begun = True  # from here on the folder is this run's
        return path is not None


class _Stepper(_Run):
    """Takes one step of a run, or leaves everything as it was before it."""

    token_bytes: Tensor | None = None

    def one_step(self) -> tuple[float, int, int, float]:
        """One update; returns summed loss in nats, targets, bytes and the gradient's norm."""
        if self.torn:
            raise RuntimeError(f"step {self.step} was broken off while the weights moved: resume()")
        before, self.rng = self.source.state_dict(), rng_state(self.device)
        try:
            loss, targets, num_bytes, norm = self._gradients()
            sound = math.isfinite(loss) and math.isfinite(norm)
        except BaseException:  # Ctrl-C too
            self._undo(before)
            raise
        if not sound:
            self._undo(before)
            where = self.save() if self.config.folder else "nowhere: no folder was given"
            raise FloatingPointError(
                f"step {self.step}: loss {loss}, gradient norm {norm}; state before it: {where}"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(self.step)
        self.torn = True
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step, self.tokens, self.torn = self.step + 1, self.tokens + targets, False
        return loss, targets, num_bytes, norm

    def _gradients(self) -> tuple[float, int, int, float]:
        """Draw the batches of a step; leave their clipped gradient in the parameters."""
        whole = [next(self.source) for _ in range(self.config.accumulation)]
        counts = [_count(targets, self.token_bytes) for _, targets in whole]
        targets, num_bytes = (sum(column) for column in zip(*counts, strict=True))
        parts = [[x.to(self.device) for x in _share(batch, self.world)] for batch in whole]
        how = {"precision": self.config.precision, "world_size": self.world.size}
        loss = accumulate_gradients(self.forward, parts, targets, **how)
        loss = float(distributed.sum_over_ranks(loss))
        norm = float(clip_grad_norm(self.model.parameters(), self.config.max_norm))
        return loss, targets, num_bytes, norm

    def _undo(self, source: dict[str, Any]) -> None:
        """As if the step had not begun."""
        self.optimizer.zero_grad()
        set_rng_state(self.rng, self.device)
        self.source.load_state_dict(source)


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


class Trainer(_Stepper):
    """Trains `model(ids (B, T)) -> logits (B, T, V)` on the batches of `source`.

    `validate(model)` returns a number or a dict of them, `sample(model)` a text; both run every
    `validate_every` steps and at the end. `token_bytes` (V,) adds the loss in bits per byte.
    `on_log` gets each record that also goes to `metrics.jsonl`; `history` keeps them.
    """

    def __init__(
        self,
        model: nn.Module,
        source: BatchSource,
        config: TrainConfig,
        *,
        validate: Callable[[nn.Module], float | dict[str, float]] | None = None,
        sample: Callable[[nn.Module], str] | None = None,
        token_bytes: Tensor | None = None,
        on_log: Callable[[dict[str, Any]], None] | None = None,
        progress: bool = True,
    ) -> None:
        super().__init__(model, source, config)
        self.validate, self.sample, self.on_log = validate, sample, on_log
        self.token_bytes, self.progress = token_bytes, progress
        self.history: list[dict[str, Any]] = []

    def train(self, until: int | None = None) -> list[dict[str, Any]]:
        """Take steps until `config.steps` (or `until`), then save; returns the records of the log.

        Raises: ValueError if the folder holds a run that was not resumed; FloatingPointError with
            the step if its loss or gradient is not finite: the state before that step is saved.
        """
        config = self.config
        last = config.steps if until is None else min(until, config.steps)
        if config.folder and not self.begun:
            check_free(config.folder)
        self.begun = True
        set_rng_state(self.rng, self.device)
        self.model.train()
        meter = Meter(self, last)
        try:
            while self.step < last:
                meter.add(*self.one_step())
                done = self.step == last
                if look := done or _due(self.step, config.validate_every):
                    meter.extra |= look_at(self.model, self.device, self.validate, self.sample)
                if look or _due(self.step, config.log_every):
                    meter.write()
                if config.folder and (done or _due(self.step, config.checkpoint_every)):
                    self.rng = rng_state(self.device)
                    self.save(must=done)
        finally:  # after an error or Ctrl-C too: the bar ends, and `train` may be called again
            meter.bar.close()
            self.rng = rng_state(self.device)
        return self.history
