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
from minillm.documents import evaluate as evaluate
from minillm.documents import token_byte_lengths as token_byte_lengths
from minillm.metrics import Meter
from minillm.optim import AdamW as AdamW
from minillm.optim import accumulate_gradients
from minillm.optim import clip_grad_norm as clip_grad_norm
from minillm.optim import cosine_schedule as cosine_schedule
from minillm.optim import cross_entropy as cross_entropy
from minillm.recipe import TrainConfig as TrainConfig

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


class _Stepper:
    """A model, its optimizer and its data: takes one step, and saves where it stands."""

    def __init__(
        self,
        model: nn.Module,
        source: BatchSource,
        config: TrainConfig,
        token_bytes: Tensor | None,
    ) -> None:
        self.model, self.source, self.config = model, source, config
        self.token_bytes, self.device = token_bytes, next(model.parameters()).device
        self.step, self.tokens, self.world = 0, 0, distributed.world()
        with torch.random.fork_rng():
            torch.manual_seed(config.seed + self.world.rank)
            self.rng = checkpoint.rng_state(self.device)
        self.forward = distributed.wrap(model, config.parallel)
        if config.compile:
            self.forward = torch.compile(self.forward)
        self.optimizer = config.optimizer(model)

    def one_step(self) -> tuple[float, int, int, float]:
        """One update; returns summed loss in nats, targets, bytes and the gradient's norm."""
        before, self.rng = self.source.state_dict(), checkpoint.rng_state(self.device)
        whole = [next(self.source) for _ in range(self.config.accumulation)]
        counts = [_count(targets, self.token_bytes) for _, targets in whole]
        targets, num_bytes = (sum(column) for column in zip(*counts, strict=True))
        loss = accumulate_gradients(
            self.forward,
            [self._share(batch) for batch in whole],
            targets,
            precision=self.config.precision,
            world_size=self.world.size,
        )
        loss = float(distributed.sum_over_ranks(loss))
        norm = float(clip_grad_norm(self.model.parameters(), self.config.max_norm))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.zero_grad()
            where = self.save(before) if self.config.folder else "nowhere: no folder was given"
            raise FloatingPointError(
                f"step {self.step}: loss {loss}, gradient norm {norm}; state before it: {where}"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step, self.tokens = self.step + 1, self.tokens + targets
        return loss, targets, num_bytes, norm

    def _share(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows of a batch that belong to this process."""
        rank, size = self.world.rank, self.world.size
        if len(batch[0]) < size:
            raise ValueError(f"a batch of {len(batch[0])} rows for {size} processes")
        inputs, targets = (x[rank::size].to(self.device) for x in batch)
        return inputs, targets

    def save(self, source: dict[str, Any] | None = None) -> Path:
        """Write a checkpoint; `source` is the state of the data, if not the present one."""
        state = {"config": self.config.numbers(), "tokens": self.tokens}
        state["source"] = source or self.source.state_dict()
        where = (self.config.folder, self.step, self.config.keep)
        return distributed.save(*where, self.model, self.optimizer, self.rng, state)


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
        super().__init__(model, source, config, token_bytes)
        self.validate, self.sample, self.on_log = validate, sample, on_log
        self.progress = progress
        self.history: list[dict[str, Any]] = []

    def train(self, until: int | None = None) -> list[dict[str, Any]]:
        """Take steps until `config.steps` (or `until`), then save; returns the records of the log.

        Raises: FloatingPointError with the step if its loss or gradient is not finite; the state
            before that step is saved.
        """
        last = self.config.steps if until is None else min(until, self.config.steps)
        checkpoint.set_rng_state(self.rng, self.device)
        self.model.train()
        meter = Meter(self, last)
        while self.step < last:
            meter.add(*self.one_step())
            done = self.step == last
            due = done or _due(self.step, self.config.log_every)
            if done or _due(self.step, self.config.validate_every):
                meter.extra |= self._look()
                due = True
            if due:
                meter.write()
            if done or _due(self.step, self.config.checkpoint_every):
                self._save_or_warn(must=done)
        meter.bar.close()
        self.rng = checkpoint.rng_state(self.device)
        return self.history

    def _look(self) -> dict[str, Any]:
        """Validation and a sample text, in evaluation mode, the random state untouched."""
        found, rng = {}, checkpoint.rng_state(self.device)
        self.model.eval()
        with torch.no_grad():
            if self.validate is not None:
                value = self.validate(self.model)
                value = value if isinstance(value, dict) else {"validation": value}
                found |= {name: float(number) for name, number in value.items()}
            if self.sample is not None:
                found["sample"] = self.sample(self.model)
        self.model.train()
        checkpoint.set_rng_state(rng, self.device)
        return found

    def _save_or_warn(self, *, must: bool) -> None:
        """Save; a disk that is full for now is a warning, at the end an error."""
        if self.config.folder is None:
            return
        self.rng = checkpoint.rng_state(self.device)
        try:
            self.save()
        except checkpoint.CheckpointError as error:
            if must:
                raise
            warnings.warn(f"{error}; training goes on", stacklevel=2)

    def resume(self, path: str | Path | None = None) -> bool:
        """Continue from `path`, or from the newest whole checkpoint of the run; False if none is.

        Raises: CheckpointError or ValueError for one that is damaged, foreign or of another run.
        """
        if path is None:
            path = checkpoint.newest_checkpoint(self.config.folder) if self.config.folder else None
            if path is None:
                return False
        state = checkpoint.read_state(path)
        check_settings(state.get("config", {}), self.config.numbers())
        self.rng, state = distributed.load(path, self.model, self.optimizer)
        self.source.load_state_dict(state["source"])
        self.step, self.tokens = state["step"], state["tokens"]
        return True


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _count(targets: Tensor, token_bytes: Tensor | None) -> list[int]:
    """Targets that count, and the bytes of text they stand for."""
    counted = targets[targets != -100]
    return [len(counted), 0 if token_bytes is None else int(token_bytes[counted].sum())]
