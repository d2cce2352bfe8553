"""What a training must survive: its folder, checkpoints and records, and how it is resumed.

Explained in deeper/07_runs_that_survive.
"""

# Built from notebooks/deeper/07_runs_that_survive.ipynb: edit there, then make build.

import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minillm.deeper.training import checkpoint, distributed
from minillm.deeper.training.run_folder import FolderLock, append_record, check_free, forget_after
from minillm.deeper.training.trainer import RunConfig, Trainer
from minillm.support.checks.kinds import check_settings
from minillm.support.checks.texts import check_tokenizer
from minillm.support.device import rng_state

__all__ = ["Run"]


class Run:
    """The folder of a training, a part of its `Trainer(model, batches, config, run=Run(folder))`.

    A checkpoint is written every `checkpoint_interval` steps (0: only at the end), the newest
    `keep` stay, and each record is a line of `metrics.jsonl`. A folder that holds a run is refused
    unless that run was resumed. `from_pretrained(folder)` opens the newest checkpoint of a
    `CausalLM`, with `tokenizer` if it was given.

    Raises: ValueError for values out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        checkpoint_interval: int = 0,
        keep: int = 2,
        tokenizer: Any = None,
    ) -> None:
        if not folder:
            raise ValueError(f"the folder of a run must have a name, not {folder!r}")
        if checkpoint_interval < 0 or checkpoint_interval % 1:
            steps = f"checkpoint_interval {checkpoint_interval!r}"
            raise ValueError(f"{steps} is no count of steps (0: only at the end)")
        if keep < 1 or keep % 1:
            raise ValueError(f"keep {keep!r}: checkpoints are counts from 1")
        if tokenizer is not None:
            check_tokenizer(tokenizer)
        self.folder, self.checkpoint_interval, self.keep = Path(folder), checkpoint_interval, keep
        self.metrics, self.tokenizer = self.folder / "metrics.jsonl", tokenizer
        self.lock: FolderLock | None = None  # while we work in the folder
        self.failed: list[str] = []  # checkpoints, since the last record
        self.begun_by: Any = lambda: None  # a weak reference: whose the folder's content is

    @contextmanager
    def at_work(self, trainer: Trainer) -> Iterator[None]:
        """Hold the folder while `trainer` takes steps.

        Raises: ValueError if it holds a run that was not resumed, or another process works in it.
        """
        self._own_folder()
        try:
            if self.begun_by() is not trainer:
                check_free(self.folder)
            if trainer.processes.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)  # if it cannot be, tell it now
                forget_after(self.metrics, trainer.step)
                if self.tokenizer is not None:
                    self.tokenizer.save(self.folder)
            self.begun_by = weakref.ref(trainer)
            yield
        finally:
            self._let_go()

    def _own_folder(self) -> None:
        """Lock the folder, or go on holding it: process 0 does, for all."""
        if self.lock is None:
            self.lock = FolderLock(self.folder)
        distributed.in_first(self.lock.acquire)

    def _let_go(self, *, forget: bool = False) -> None:
        """Let other processes have the folder; unless we forget it, we notice if they had it."""
        if self.lock is not None:
            self.lock.release()
        self.lock = None if forget else self.lock

    def after_step(self, trainer: Trainer, last: bool) -> None:
        """Save if a checkpoint is due."""
        every = self.checkpoint_interval
        if last or (every and trainer.step % every == 0):
            trainer.rng = rng_state(trainer.device)
            self.save(trainer, must=last)

    def save(self, trainer: Trainer, *, must: bool = True) -> Path | None:
        """Write a checkpoint. If it need not be, a disk that is full for now is but a warning.

        It is a line above the bar, each time, and stands in the next record's `failed_checkpoints`.
        What would fail the next time too, such as a state that is no JSON, is told at once.
        """
        from minillm.deeper.pretrained.load import described

        state = {"config": _settings(trainer), "tokens": trainer.tokens}
        state |= {"source": trainer.batches.state_dict(), "meter": trainer.meter.state_dict()}
        state["model"] = described(trainer.model)  # for from_pretrained
        parts = (trainer.model, trainer.optimizer, trainer.rng)
        try:
            return distributed.save(self.folder, trainer.step, self.keep, *parts, state)
        except checkpoint.CheckpointError as error:
            if must or error.permanent:
                raise
            self.failed.append(str(error))
            if trainer.progress and trainer.processes.rank == 0:
                tqdm.write(f"{error}; training goes on", sys.stderr)
            else:
                warnings.warn(f"{error}; training goes on", stacklevel=2)
            return None

    def failures(self) -> dict[str, Any]:
        """For the next record: the checkpoints that could not be written since the last."""
        failed, self.failed = self.failed, []
        return {"failed_checkpoints": failed} if failed else {}

    def write(self, record: dict[str, Any]) -> None:
        """Add a record to the log."""
        if distributed.world().rank == 0:
            append_record(self.metrics, record)

    def resume(self, trainer: Trainer, path: str | Path | None = None) -> bool:
        """Continue from `path`, or from the newest whole checkpoint of the run; False if none is.

        Raises: CheckpointError or ValueError for one that is damaged, foreign or of another run;
            ValueError if another process works in the folder.
        """
        self._let_go(forget=True)
        try:
            self._own_folder()
            if path is None:
                path = checkpoint.newest_checkpoint(self.folder, of_run=True)
            if path is not None:
                _load(trainer, Path(path))
        except BaseException:
            self._let_go(forget=True)
            raise
        self.begun_by = weakref.ref(trainer)  # from here on the folder is this run's
        return path is not None


def _load(trainer: Trainer, path: Path) -> None:
    """Take the state of a checkpoint, or none of it."""
    state = checkpoint.read_state(path, of_run=True)
    saved, now = state["config"], _settings(trainer)
    if {**saved, "steps": 0} == {**now, "steps": 0} != now != saved:
        ended = f"a run of {saved.get('steps')} steps has no {now['steps']}"
        raise ValueError(f"{ended}: to train its model further is a new Run, with its own rate")
    check_settings(saved, now)
    before = trainer.batches.state_dict()
    trainer.batches.load_state_dict(state["source"])  # if it refuses, nothing has been loaded
    try:
        trainer.rng = distributed.load(path, trainer.model, trainer.optimizer)[0]
    except BaseException:
        trainer.batches.load_state_dict(before)
        raise
    trainer.step, trainer.tokens, trainer.step_incomplete = state["step"], state["tokens"], False
    trainer.meter.load_state_dict(state["meter"])
    trainer.optimizer.zero_grad()


def _settings(trainer: Trainer) -> dict[str, Any]:
    """What a resumed run must share."""
    config = trainer.config
    settings = {field.name: field.default for field in fields(RunConfig)}
    settings |= asdict(config)
    settings["min_lr"] = config.learning_rate(config.steps)
    settings["betas"] = list(config.betas)  # as JSON has it
    del settings["log_interval"], settings["eval_interval"]  # they decide no number
    balance = {} if trainer.balance is None else trainer.balance.settings
    parts = {name: _called(part) for name, part in trainer.handed_in.items() if part is not None}
    return {**settings, **parts, **balance}


def _called(part: Any) -> str:
    """The name of a function or of an object's class: all that a later run can compare."""
    return getattr(part, "__qualname__", type(part).__qualname__)
