"""The training loop, for any model from ids to logits (notebook 07).

What must survive a kill is a part that is handed in: see `minillm.training.run`.
"""

# Built from notebooks/07_training.ipynb: edit there, then make build.

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minillm.checks import check_shifted, check_train_config, check_training, our_words
from minillm.counting import Meter, count_targets, due, keep_record
from minillm.device import forward_of, fresh_rng_state, processes_of, rng_state, set_rng_state
from minillm.modes import EvalMode
from minillm.training.data import BatchSource, batch_source
from minillm.training.loss import cross_entropy
from minillm.training.optim import AdamW, Optimizer, clip_grad_norm, cosine_schedule, decay_groups

__all__ = ["TrainConfig", "Trainer"]

if TYPE_CHECKING:
    from minillm.training.run import Run


@our_words
@dataclass(frozen=True)
class TrainConfig:
    """What decides the numbers of a training, and how often one looks at it.

    The rate climbs to `max_lr` for `warmup_steps` and falls to `min_lr` (None: a tenth) at `steps`.
    A step adds up `gradient_accumulation_steps` batches; `max_norm` clips their gradient. `seed` is
    that of dropout, `precision` that of matrix products (weights are float32). Records are made
    every `log_interval` steps; every `eval_interval` (0: at the end) one looks.

    Args:
        betas, eps, weight_decay: AdamW's; only matrices decay.
        precision: "float32", or "bfloat16" (autocast).
        compile: by torch, which needs a C++ compiler.
        optimizer: "adamw", or "muon" for the layers' matrices.
        parallel: "ddp", "fsdp" or "tensor", where several processes are.
    Raises: ValueError for values out of range, and for settings that exclude each other.
    """

    steps: int
    max_lr: float = 1e-3
    min_lr: float | None = None
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    gradient_accumulation_steps: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    fused: bool = True  # torch's AdamW in one kernel; False: ours, the same formula
    seed: int = 0
    parallel: Literal["ddp", "fsdp", "tensor"] = "ddp"  # under torchrun
    log_interval: int = 10
    eval_interval: int = 0

    def __post_init__(self) -> None:
        check_train_config(self)

    def learning_rate(self, step: int) -> float:
        """The rate of a step; a warm-up longer than the run is cut."""
        warmup = min(self.warmup_steps, self.steps)
        min_lr = self.max_lr / 10 if self.min_lr is None else self.min_lr
        return cosine_schedule(step, self.max_lr, min_lr, warmup, self.steps)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW, with weight decay for matrices only, or Muon for the matrices of the layers."""
        groups = decay_groups(model, self.weight_decay)
        if self.optimizer == "muon":
            from minillm.training.muon import MuonAdamW

            return MuonAdamW(model, groups, self.max_lr, self.betas, self.eps)
        if not self.fused:
            return AdamW(groups, lr=self.max_lr, betas=self.betas, eps=self.eps)
        return torch.optim.AdamW(groups, lr=self.max_lr, betas=self.betas, eps=self.eps, fused=True)


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
        self.processes = processes_of(config.parallel)
        self.model, self.forward = forward_of(model, self.processes, config.compile)
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
        counts = [count_targets(targets, self.token_bytes) for _, targets in drawn]
        if self.step == 0 and self.loss is None:
            check_shifted(self.model, *drawn[0])
        count, num_bytes = (sum(column) for column in zip(*counts, strict=True))
        losses, half = [], self.config.precision == "bfloat16"
        parts = [self.processes.share(batch) for batch in drawn]
        for i, part in enumerate(parts, 1):
            inputs, targets = (x.to(self.device) for x in part)
            with self.processes.communicate(self.forward, i == len(parts)):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
                    logits = self.forward(inputs)
                if self.loss is None:
                    loss = cross_entropy(logits, targets, reduction="sum")
                else:
                    loss = self.loss(logits, targets) * count_targets(targets, None)[0]
                mean = loss * (self.processes.size / max(1, count))  # processes average gradients
                if self.balance is not None:
                    mean = mean + self.balance(targets) / len(parts)
                mean.backward()
            losses.append(loss.detach())
        total = self.processes.total(torch.stack(losses).sum())
        norm = clip_grad_norm(self.model.parameters(), self.config.max_norm)
        return float(total), count, num_bytes, float(norm)  # here we wait for the device

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
        rng = rng_state(self.device)
        try:
            with EvalMode(self.model), torch.no_grad():
                if self.validate is not None:
                    value = self.validate(self.model)
                    value = value if isinstance(value, dict) else {"validation": value}
                    found |= {name: float(number) for name, number in value.items()}
                if self.sample is not None:
                    found["sample"] = self.sample(self.model)
        finally:
            set_rng_state(rng, self.device)
        return found
