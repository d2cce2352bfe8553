"""The training loop: any model from ids to logits; survives a kill and resumes bit for bit.

Explained in notebook 09 (training). Its pieces are in `minillm.optim`, `minillm.data`,
`minillm.documents`, `minillm.checkpoint` and `minillm.metrics`; it passes their main names on.
"""

# Built from notebooks/09_training.ipynb: edit there, then make build.

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minillm import checkpoint, distributed
from minillm.checkpoint import CheckpointError as CheckpointError
from minillm.data import BatchSource, check_settings
from minillm.data import TokenDataset as TokenDataset
from minillm.data import WindowBatches as WindowBatches
from minillm.data import get_batch as get_batch
from minillm.documents import DocumentBatches as DocumentBatches
from minillm.documents import FileDocuments as FileDocuments
from minillm.documents import StoryDocuments as StoryDocuments
from minillm.evaluation import evaluate as evaluate
from minillm.evaluation import token_byte_lengths as token_byte_lengths
from minillm.loss import accumulate_gradients
from minillm.loss import cross_entropy as cross_entropy
from minillm.metrics import Meter, check_free, look_at
from minillm.optim import AdamW as AdamW
from minillm.optim import clip_grad_norm as clip_grad_norm
from minillm.optim import cosine_schedule as cosine_schedule
from minillm.recipe import TrainConfig as TrainConfig
from minillm.rng import rng_state, set_rng_state

__all__ = [
    "AdamW",
    "CheckpointError",
    "DocumentBatches",
    "FileDocuments",
    "StoryDocuments",
    "TokenDataset",
    "TrainConfig",
    "Trainer",
    "WindowBatches",
    "clip_grad_norm",
    "cosine_schedule",
    "cross_entropy",
    "evaluate",
    "get_batch",
    "token_byte_lengths",
]


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
