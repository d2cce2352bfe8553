"""The training loop: any model from ids to logits; survives a kill and resumes bit for bit.

Explained in deeper/07_runs_that_survive.
"""

# Built from notebooks/deeper/07_runs_that_survive.ipynb: edit there, then make build.

import dataclasses
import math
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from minillm.checks import check_one_of
from minillm.training.data import BatchSource, check_settings
from minillm.training.loss import accumulate_gradients
from minillm.training.optim import AdamW, Optimizer, clip_grad_norm, cosine_schedule, decay_groups

__all__ = ["Balance", "Meter", "TrainConfig", "Trainer", "rng_state", "set_rng_state"]


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


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the numbers of a run, and where it is kept.

    Raises: ValueError for values out of range.
    """

    steps: int
    max_lr: float = 1e-3
    min_lr: float | None = None  # of the last step; None: a tenth of max_lr
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    gradient_accumulation_steps: int = 1  # batches a step
    # of matrix products; weights stay float32
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    fused: bool = True  # torch's AdamW in one kernel; False: the AdamW of notebook 07, same formula
    seed: int = 0
    parallel: Literal["ddp", "fsdp", "tensor"] = "ddp"  # under torchrun
    output_dir: str | None = None  # of checkpoints and metrics.jsonl; None: keep nothing
    checkpoint_interval: int = 0  # steps; 0: only at the end
    keep: int = 2  # checkpoints
    log_interval: int = 10
    eval_interval: int = 0  # also for sample texts; 0: only at the end

    def __post_init__(self) -> None:
        if self.min_lr is not None and not 0 <= self.min_lr <= self.max_lr:
            raise ValueError(f"min_lr {self.min_lr} must be from 0 to max_lr, {self.max_lr}")
        self.learning_rate(0)  # refuses rates and a warm-up that make no schedule
        for name in ("steps", "gradient_accumulation_steps", "log_interval", "keep"):
            if (n := getattr(self, name)) < 1 or n % 1:
                raise ValueError(f"{name} {n!r}: steps, batches and checkpoints are counts from 1")
        for name in ("checkpoint_interval", "eval_interval"):
            if (n := getattr(self, name)) < 0 or n % 1:
                raise ValueError(f"{name} {n!r} is no count of steps (0: only at the end)")
        for name in ("max_lr", "weight_decay", "eps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number from 0, not {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas}: each from 0, below 1")
        if not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive, not {self.max_norm}")
        check_one_of("precision", self.precision, ("float32", "bfloat16"))
        check_one_of("parallel", self.parallel, ("ddp", "fsdp", "tensor"))
        if self.checkpoint_interval and not self.output_dir:
            every = f"checkpoint_interval {self.checkpoint_interval}"
            raise ValueError(f"{every}: output_dir must say where checkpoints go, it is None")
        if self.parallel == "tensor" and self.compile:
            raise ValueError("compile=True is not for parallel='tensor': choose one of the two")
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer {self.optimizer!r} is neither adamw nor muon")
        if self.optimizer == "muon" and not self.fused:
            raise ValueError("muon goes with torch's AdamW, not with fused=False")

    def learning_rate(self, step: int) -> float:
        """The rate of a step; a warm-up longer than the run is cut."""
        warmup = min(self.warmup_steps, self.steps)
        min_lr = self.max_lr / 10 if self.min_lr is None else self.min_lr
        return cosine_schedule(step, self.max_lr, min_lr, warmup, self.steps)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW over the model's parameters, matrices with weight decay, vectors without.

        With `optimizer="muon"` the matrices of the layers are moved by Muon instead.
        """
        groups = decay_groups(model, self.weight_decay)
        if self.optimizer == "muon":
            from minillm.training.muon import MuonAdamW

            return MuonAdamW(model, groups, self.max_lr, self.betas, self.eps)
        if self.fused:
            return torch.optim.AdamW(
                groups, lr=self.max_lr, betas=self.betas, eps=self.eps, fused=True
            )
        return AdamW(groups, lr=self.max_lr, betas=self.betas, eps=self.eps)

    def fixed_settings(self) -> dict[str, Any]:
        """The settings that a resumed run must share."""
        free = ("output_dir", "checkpoint_interval", "keep", "log_interval", "eval_interval")
        settings = {k: v for k, v in dataclasses.asdict(self).items() if k not in free}
        return {**settings, "min_lr": self.learning_rate(self.steps), "betas": list(self.betas)}


class Meter:
    """Adds up what the steps since the last record did, and makes the record of it."""

    def __init__(self) -> None:
        self.nats, self.targets, self.bytes, self.grad_norm = 0.0, 0, 0, 0.0
        self.start(0)

    def start(self, tokens: int) -> None:
        """From here on time is taken; so many tokens were trained on before."""
        self.began, self.tokens_before = time.perf_counter(), tokens

    def add(self, nats: float, targets: int, num_bytes: int, norm: float) -> None:
        """Count one step."""
        self.nats, self.targets = self.nats + nats, self.targets + targets
        self.bytes, self.grad_norm = self.bytes + num_bytes, norm

    def record(self, step: int, tokens: int, lr: float) -> dict[str, Any]:
        """The mean since the last record."""
        seconds = time.perf_counter() - self.began
        record: dict[str, Any] = {"step": step, "tokens": tokens}
        record["loss"] = self.nats / max(1, self.targets)
        if self.bytes:
            record["bits_per_byte"] = self.nats / math.log(2) / self.bytes
        record |= {"lr": lr, "grad_norm": self.grad_norm, "seconds": seconds}
        return {**record, "tokens_per_second": (tokens - self.tokens_before) / seconds}

    def state_dict(self) -> dict[str, Any]:
        """The sums since the last record."""
        return {"nats": self.nats, "targets": self.targets, "bytes": self.bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these sums; from none if they are not there."""
        self.nats, self.targets = float(state.get("nats", 0.0)), state.get("targets", 0)
        self.bytes = state.get("bytes", 0)


def _share(batch: tuple[Tensor, Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    """The rows of a batch that belong to process `rank` of `size`."""
    if len(batch[0]) < size:
        raise ValueError(f"a batch of {len(batch[0])} rows for {size} processes")
    inputs, targets = (x[rank::size] for x in batch)
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


def _numbers(*values: Tensor) -> list[float]:
    """Tensors as numbers: the one place in a step where we wait for the device."""
    return [float(value) for value in values]


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


class Balance(Protocol):
    """What keeps the experts of a model in use while it trains: see `minillm.nn.moe`."""

    settings: dict[str, Any]  # which a resumed run must share

    def __call__(self, targets: Tensor) -> Tensor: ...  # a loss, after each forward pass

    def after_step(self) -> None: ...  # the optimizer has moved the weights

    def forget(self) -> None: ...  # the step is undone


class Trainer:
    """Trains `model(ids (B, T)) -> logits (B, T, V)` on the batches of `source`.

    `validate(model)` returns a number or a dict of them, `sample(model)` a text; both run every
    `eval_interval` steps and at the end. `token_bytes` (V,) adds the loss in bits per byte.
    `on_log` gets each record that also goes to `metrics.jsonl`; `history` keeps them.
    `balance`, for a model with experts, adds a loss of its own, which the records leave out.
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
        balance: Balance | None = None,
        progress: bool = True,
    ) -> None:
        self.model: nn.Module = getattr(model, "_orig_mod", model)  # torch.compile's shell off
        self.source, self.config = source, config
        self.validate, self.sample, self.on_log = validate, sample, on_log
        self.token_bytes, self.progress, self.balance = token_bytes, progress, balance
        self.device, self.processes = next(model.parameters()).device, _process_group()
        self.rank, self.world_size = (
            (dist.get_rank(), dist.get_world_size()) if self.processes else (0, 1)
        )
        self.step, self.tokens, self.begun, self.step_incomplete = 0, 0, False, False
        self.history: list[dict[str, Any]] = []
        self.failed_checkpoints: list[str] = []  # since the last record
        self.meter = Meter()
        self.lock: Any = None  # of the output_dir, while we work in it
        before = rng_state(self.device)
        torch.manual_seed(config.seed + self.rank)
        self.rng = rng_state(self.device)
        set_rng_state(before, self.device)
        self.forward: Callable[[Tensor], Tensor] = self.model
        # who takes which rows: cut by tensors, all processes work on the same ones
        self.share = (0, 1) if config.parallel == "tensor" else (self.rank, self.world_size)
        if self.processes:
            self.forward = self.processes.wrap(self.model, config.parallel)
        if self.forward is self.model is not model:
            self.forward = model  # compiled already, in the caller's way
        elif config.compile or self.model is not model:
            self.forward = torch.compile(self.forward)
        self.optimizer = config.make_optimizer(self.model)

    def one_step(self) -> tuple[float, int, int, float]:
        """One update; returns summed loss in nats, targets, bytes and the gradient's norm."""
        if self.step_incomplete:
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
            where = self.save() if self.config.output_dir else "nowhere: no output_dir was given"
            raise FloatingPointError(
                f"step {self.step}: loss {loss}, gradient norm {norm}; state before it: {where}"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(self.step)
        self.step_incomplete = True
        self.optimizer.step()
        if self.balance is not None:
            self.balance.after_step()
        self.optimizer.zero_grad()
        self.step, self.tokens, self.step_incomplete = self.step + 1, self.tokens + targets, False
        return loss, targets, num_bytes, norm

    def _gradients(self) -> tuple[float, int, int, float]:
        """Draw the batches of a step; leave their clipped gradient in the parameters."""
        whole = [next(self.source) for _ in range(self.config.gradient_accumulation_steps)]
        counts = [_count(targets, self.token_bytes) for _, targets in whole]
        targets, num_bytes = (sum(column) for column in zip(*counts, strict=True))
        parts = [_share(batch, *self.share) for batch in whole]
        loss = accumulate_gradients(
            self.forward,
            [(x.to(self.device), y.to(self.device)) for x, y in parts],
            targets,
            precision=self.config.precision,
            world_size=self.share[1],
            communicate=partial(self.processes.communicate, self.forward)
            if self.processes
            else nullcontext,
            extra_loss=self.balance,
        )
        if self.processes and self.share[1] > 1:
            loss = self.processes.sum_over_ranks(loss)
        norm = clip_grad_norm(self.model.parameters(), self.config.max_norm)
        return (*_numbers(loss), targets, num_bytes, *_numbers(norm))

    def _undo(self, source: dict[str, Any]) -> None:
        """As if the step had not begun."""
        self.optimizer.zero_grad()
        if self.balance is not None:
            self.balance.forget()
        set_rng_state(self.rng, self.device)
        self.source.load_state_dict(source)

    def save(self, *, must: bool = True) -> Path | None:
        """Write a checkpoint. If it need not be, a disk that is full for now is but a warning.

        It is a line above the bar, each time, and stands in the next record's `failed_checkpoints`.
        What would fail the next time too, such as a state that is no JSON, is told at once.
        """
        from minillm.training import checkpoint, distributed

        state = {"config": self._settings(), "tokens": self.tokens}
        state |= {"source": self.source.state_dict(), "meter": self.meter.state_dict()}
        folder, keep = self.config.output_dir, self.config.keep
        if folder is None:
            raise ValueError("a checkpoint needs an output_dir")
        try:
            return distributed.save(
                folder, self.step, keep, self.model, self.optimizer, self.rng, state
            )
        except checkpoint.CheckpointError as error:
            if must or error.permanent:
                raise
            self.failed_checkpoints.append(str(error))
            if self.progress and self.rank == 0:
                tqdm.write(f"{error}; training goes on", sys.stderr)
            else:
                warnings.warn(f"{error}; training goes on", stacklevel=2)
            return None

    def resume(self, path: str | Path | None = None) -> bool:
        """Continue from `path`, or from the newest whole checkpoint of the run; False if none is.

        Raises: CheckpointError or ValueError for one that is damaged, foreign or of another run;
            ValueError if another process works in the folder.
        """
        from minillm.training import checkpoint

        self._let_go(forget=True)
        try:
            self._own_folder()
            if path is None and self.config.output_dir:
                path = checkpoint.newest_checkpoint(self.config.output_dir, of_run=True)
            if path is not None:
                self._load(Path(path))
        except BaseException:
            self._let_go(forget=True)
            raise
        self.begun = True  # from here on the folder is this run's
        return path is not None

    def _load(self, path: Path) -> None:
        """Take the state of a checkpoint, or none of it."""
        from minillm.training import checkpoint, distributed

        state = checkpoint.read_state(path, of_run=True)
        check_settings(state["config"], self._settings())
        before = self.source.state_dict()
        self.source.load_state_dict(state["source"])  # if it refuses, nothing has been loaded
        try:
            self.rng = distributed.load(path, self.model, self.optimizer)[0]
        except BaseException:
            self.source.load_state_dict(before)
            raise
        self.step, self.tokens, self.step_incomplete = state["step"], state["tokens"], False
        self.meter.load_state_dict(state["meter"])
        self.optimizer.zero_grad()

    def _settings(self) -> dict[str, Any]:
        """What a resumed run must share."""
        settings = self.config.fixed_settings()
        return settings if self.balance is None else settings | self.balance.settings

    def _own_folder(self) -> None:
        """Lock the folder, or go on holding it: process 0 does, for all."""
        if not self.config.output_dir:
            return
        from minillm.training.distributed import in_first
        from minillm.training.run_folder import FolderLock

        if self.lock is None:
            self.lock = FolderLock(self.config.output_dir)
        in_first(self.lock.acquire)

    def _let_go(self, *, forget: bool = False) -> None:
        """Let other processes have the folder; unless we forget it, we notice if they had it."""
        if self.lock is not None:
            self.lock.release()
        self.lock = None if forget else self.lock

    def train(self, until: int | None = None) -> list[dict[str, Any]]:
        """Take steps until `config.steps` (or `until`), then save; returns the records of the log.

        Raises: ValueError if the folder holds a run that was not resumed, or another process works
            in it; FloatingPointError with the step if its loss or gradient is not finite: the state
            before that step is saved.
        """
        config = self.config
        last = config.steps if until is None else min(until, config.steps)
        self._own_folder()
        bar = None
        try:
            metrics = self._prepare_folder()
            self.begun = True
            set_rng_state(self.rng, self.device)
            self.model.train()
            self.meter.start(self.tokens)
            hidden = not (self.progress and self.rank == 0)
            bar = tqdm(total=last, initial=self.step, unit="step", disable=hidden)
            while self.step < last:
                self.meter.add(*self.one_step())
                bar.update()
                done = self.step == last
                look = done or _due(self.step, config.eval_interval)
                found = self._look() if look else {}
                if look or _due(self.step, config.log_interval):
                    self._log(found, bar, metrics)
                if config.output_dir and (done or _due(self.step, config.checkpoint_interval)):
                    self.rng = rng_state(self.device)
                    self.save(must=done)
        finally:  # after an error or Ctrl-C too: the bar ends, and `train` may be called again
            if bar is not None:
                bar.close()
                self.rng = rng_state(self.device)
            self._let_go()
        return self.history

    def _prepare_folder(self) -> Path | None:
        """Make sure that the folder is free or ours; returns where process 0 writes the metrics."""
        if not self.config.output_dir:
            return None
        from minillm.training.run_folder import check_free, forget_after

        if not self.begun:
            check_free(self.config.output_dir)
        if self.rank > 0:
            return None
        metrics = Path(self.config.output_dir) / "metrics.jsonl"
        metrics.parent.mkdir(parents=True, exist_ok=True)  # if it cannot be, tell it now
        forget_after(metrics, self.step)
        return metrics

    def _look(self) -> dict[str, Any]:
        """Validation and a sample text; the training goes on as if nobody had looked."""
        found: dict[str, Any] = {}
        rng = rng_state(self.device)
        self.model.eval()
        try:
            with torch.no_grad():
                if self.validate is not None:
                    value = self.validate(self.model)
                    value = value if isinstance(value, dict) else {"validation": value}
                    found |= {name: float(number) for name, number in value.items()}
                if self.sample is not None:
                    found["sample"] = self.sample(self.model)
        finally:
            self.model.train()
            set_rng_state(rng, self.device)
        return found

    def _log(self, found: dict[str, Any], bar: tqdm, metrics: Path | None) -> None:
        """Record the mean since the last record, and what was found by looking."""
        record = self.meter.record(self.step, self.tokens, self.optimizer.param_groups[0]["lr"])
        if self.failed_checkpoints:
            record["failed_checkpoints"], self.failed_checkpoints = self.failed_checkpoints, []
        if clash := ", ".join(sorted(record.keys() & found.keys())):
            raise ValueError(f"validate returned {clash}: the run records that itself, rename it")
        record |= found
        config = self.config
        due = (
            _due(self.step, every)
            for every in (config.steps, config.log_interval, config.eval_interval)
        )
        if any(due):  # a stop in between changes nothing of the records that are due
            self.meter.load_state_dict({})
        self.history.append(record)
        speed = f"{record['tokens_per_second']:,.0f} tokens/s"
        bar.set_postfix_str(f"loss {record['loss']:.3f}, {speed}")
        if metrics is not None:
            from minillm.training.run_folder import append_record

            append_record(metrics, record)
        if self.on_log is not None and self.rank == 0:
            self.on_log(record)


def _process_group() -> Any:
    """What makes one run of several processes, under torchrun; else None."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from minillm.training import distributed

    return distributed
