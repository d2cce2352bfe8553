"""A training that can be left and taken up again, with all its options.

Explained in deeper/07_runs_that_survive.
"""

# Built from notebooks/deeper/07_runs_that_survive.ipynb: edit there, then make build.

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minillm.deeper.training.records import Meter, count_bytes, due, keep_record
from minillm.support.checks.training import check_run_config, check_shifted, check_training
from minillm.support.checks.words import our_words
from minillm.support.counting import count_targets, named_numbers
from minillm.support.device import (
    forward_of,
    fresh_rng_state,
    processes_of,
    rng_state,
    set_rng_state,
)
from minillm.support.modes import looking
from minillm.support.sources import BatchSource, batch_source
from minillm.training import AdamW, TrainConfig, cross_entropy, decay_groups, gradients

__all__ = ["Optimizer", "RunConfig", "Trainer", "run_setting", "token_byte_lengths"]

if TYPE_CHECKING:
    from minillm.deeper.training.run import Run


class Optimizer(Protocol):
    """What a trainer needs of an optimizer: `AdamW`, and each of torch's, has it."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None: ...

    def step(self) -> Any: ...


@our_words
@dataclass(frozen=True)
class RunConfig(TrainConfig):
    """A `TrainConfig` for a `Trainer`: how products are computed, how steps taken, by how many.

    Args:
        precision: of matrix products (weights are float32): "float32", or "bfloat16" (autocast).
        compile: by torch, which needs a C++ compiler.
        optimizer: "adamw", or "muon" for the layers' matrices.
        fused: torch's AdamW in one kernel; False: ours, the same formula.
        parallel: "ddp", "fsdp" or "tensor", where several processes are (under torchrun).
    Raises: ValueError for values out of range, and for settings that exclude each other.
    """

    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    fused: bool = True
    parallel: Literal["ddp", "fsdp", "tensor"] = "ddp"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_run_config(self)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW, with weight decay for matrices only, or Muon for the matrices of the layers."""
        groups = decay_groups(model, self.weight_decay)
        if self.optimizer == "muon":
            from minillm.deeper.training.muon import MuonAdamW

            return MuonAdamW(model, groups, self.max_lr, self.betas, self.eps)
        if not self.fused:
            return AdamW(groups, lr=self.max_lr, betas=self.betas, eps=self.eps)
        return super().make_optimizer(model)


def run_setting(config: TrainConfig, name: str) -> Any:
    """A setting of a `RunConfig`; of a plain `TrainConfig`, what it is in one by default."""
    return getattr(config, name, getattr(RunConfig, name))


class Trainer:
    """Trains `model(ids (B, T)) -> logits (B, T, V)` on `batches` of (inputs, targets).

    `batches` is any iterable; one without a state (`BatchSource`) begins anew when a run resumes.
    `optimizer`, an object or a function of the model, takes the place of `config`'s, and keeps its
    own rate unless there is a `schedule(step)`; `loss(logits, targets)` takes that of the mean
    cross-entropy over the targets that count.

    `validate(model)` returns a number or a dict of them, `sample(model)` a text; both run every
    `eval_interval` steps and at the end. `token_bytes` (V,) adds the loss in bits per byte.
    `on_log` gets each record, `history` keeps them. `run=Run(folder)` writes records and
    checkpoints, and resumes. `balance`, for experts, adds a loss that the records leave out.
    Losses are in nats a target.

        trainer = Trainer(model, batches, TrainConfig(500), run=Run("runs/first"))
        history = trainer.train()  # or trainer.resume() before it, to go on from a checkpoint

    Raises: ValueError for parts that are none, such as a number of steps for a config.
    """

    @our_words
    def __init__(
        self,
        model: nn.Module,
        batches: BatchSource | Iterable[tuple[Tensor, Tensor]],
        config: TrainConfig,
        *,
        optimizer: Optimizer | Callable[[nn.Module], Optimizer] | None = None,
        schedule: Callable[[int], float] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        run: "Run | None" = None,
        validate: Callable[[nn.Module], float | dict[str, float]] | None = None,
        sample: Callable[[nn.Module], str] | None = None,
        token_bytes: Tensor | None = None,
        on_log: Callable[[dict[str, Any]], None] | None = None,
        balance: Any = None,
        progress: bool = True,
    ) -> None:
        check_training(model, config, optimizer, run)
        self.batches, self.config, self.run = batch_source(batches), config, run
        self.validate, self.sample, self.on_log = validate, sample, on_log
        self.token_bytes, self.progress, self.balance = token_bytes, progress, balance
        self.handed_in = {"optimizer": optimizer, "schedule": schedule, "loss": loss}
        self.loss = loss
        self.device = next(model.parameters()).device
        self.half = run_setting(config, "precision") == "bfloat16"
        self.processes = processes_of(run_setting(config, "parallel"))
        compiled = run_setting(config, "compile")
        self.model, self.forward = forward_of(model, self.processes, compiled)
        self.step, self.tokens, self.step_incomplete = 0, 0, False
        self.history: list[dict[str, Any]] = []
        self.meter = Meter()
        self.rng = fresh_rng_state(config.seed + self.processes.rank, self.device)
        make: Any = config.make_optimizer if optimizer is None else optimizer
        self.optimizer: Optimizer = make if hasattr(make, "step") else make(self.model)
        self.schedule = config.learning_rate if optimizer is schedule is None else schedule

    def one_step(self) -> tuple[float, int, int, float]:
        """One update; returns summed loss in nats, targets, bytes and the gradient's norm.

        What fails before the weights move is undone: the step may be taken again.

        Raises: FloatingPointError for a loss or norm that is not finite; RuntimeError if the last
            step was broken off while the weights moved.
        """
        if self.step_incomplete:
            raise RuntimeError(f"step {self.step} was broken off while the weights moved: resume()")
        before, self.rng = self.batches.state_dict(), rng_state(self.device)
        try:
            loss, targets, num_bytes, norm = self._gradients()
            sound = math.isfinite(loss) and math.isfinite(norm)
        except BaseException:  # Ctrl-C too
            self._undo(before)
            raise
        if not sound:
            self._undo(before)
            where = self.run.save(self) if self.run else "nowhere: Run(folder) was not given"
            raise FloatingPointError(
                f"step {self.step}: loss {loss}, gradient norm {norm}; state before it: {where}"
            )
        if self.schedule is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.schedule(self.step)
        self.step_incomplete = True
        self.optimizer.step()
        if self.balance is not None:
            self.balance.after_step()
        self.optimizer.zero_grad()
        self.step, self.tokens, self.step_incomplete = self.step + 1, self.tokens + targets, False
        return loss, targets, num_bytes, norm

    def _gradients(self) -> tuple[float, int, int, float]:
        """Draw the batches of a step; leave their clipped gradient in the parameters."""
        drawn = [next(self.batches) for _ in range(self.config.gradient_accumulation_steps)]
        if self.step == 0 and self.loss is None:
            check_shifted(self.model, *drawn[0])
        self.left = len(drawn)
        nats, count, norm = gradients(self.model, iter(drawn), self.config, add=self._add)
        num_bytes = sum(count_bytes(targets, self.token_bytes) for _, targets in drawn)
        total = self.processes.total(nats)
        return float(total), count, num_bytes, float(norm)  # here we wait for the device

    def _add(self, _: nn.Module, batch: tuple[Tensor, Tensor], count: int) -> Tensor:
        """Add the gradient of our rows of a batch, in a mean over `count` targets."""
        inputs, targets = (x.to(self.device) for x in self.processes.share(batch))
        self.left -= 1
        with self.processes.communicate(self.forward, self.left == 0):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                logits = self.forward(inputs)
            if self.loss is None:
                loss = cross_entropy(logits, targets, reduction="sum")
            else:
                loss = self.loss(logits, targets) * count_targets(targets)
            mean = loss * (self.processes.size / max(1, count))  # processes average gradients
            if self.balance is not None:
                mean = mean + self.balance(targets) / self.config.gradient_accumulation_steps
            mean.backward()
        return loss.detach()

    def _undo(self, place: dict[str, Any]) -> None:
        """As if the step had not begun."""
        self.optimizer.zero_grad()
        if self.balance is not None:
            self.balance.forget()
        set_rng_state(self.rng, self.device)
        self.batches.load_state_dict(place)

    def train(self, until: int | None = None) -> list[dict[str, Any]]:
        """Take steps until `config.steps` (or `until`); returns the records of the log.

        Raises: FloatingPointError with the step if its loss or gradient is not finite; with a run,
            the state before that step is saved. ValueError for a name in what `validate` returns
            that a record has itself, and as `Run.at_work` says.
        """
        config = self.config
        last = config.steps if until is None else min(until, config.steps)
        hidden = not (self.progress and self.processes.rank == 0)
        with (
            self.run.at_work(self) if self.run else nullcontext(),
            tqdm(total=last, initial=self.step, unit="step", disable=hidden) as bar,
        ):
            set_rng_state(self.rng, self.device)
            self.model.train()
            self.meter.start(self.tokens)
            try:
                while self.step < last:
                    self.meter.add(*self.one_step())
                    bar.update()
                    done = self.step == last
                    look = done or due(self.step, config.eval_interval)
                    if look or due(self.step, config.log_interval):
                        keep_record(self, self._look() if look else {}, bar)
                    if self.run:
                        self.run.after_step(self, done)
            finally:  # after an error or Ctrl-C `train` may be called again
                self.rng = rng_state(self.device)
        return self.history

    def resume(self, path: Any = None) -> bool:
        """Go on from `path`, or the run's newest checkpoint; False if there is none.

        Raises: ValueError without a run: a trainer alone keeps no checkpoints.
        """
        if self.run is None:
            raise ValueError("no run to resume: Trainer(..., run=Run(folder)) names its folder")
        return self.run.resume(self, path)

    def _look(self) -> dict[str, Any]:
        """Validation and a sample text; the training goes on as if nobody had looked."""
        found: dict[str, Any] = {}
        with looking(self.model):
            if self.validate is not None:
                found |= named_numbers(self.validate(self.model))
            if self.sample is not None:
                found["sample"] = self.sample(self.model)
        return found


def token_byte_lengths(tokenizer: Any) -> Tensor:
    """How many bytes of text each token stands for; 0 for special tokens and for ids without one.

    Shape: -> (V,) int64.
    """
    lengths = [0] * tokenizer.vocab_size
    for i in set(range(len(lengths))) - set(tokenizer.special_tokens.values()):
        with suppress(ValueError):  # ids may have gaps, and one's own tokenizer may refuse them
            lengths[i] = len(tokenizer.decode_bytes([i]))
    return torch.tensor(lengths)
