"""What the steps of a training add up to, and the records of it. Written by hand.

Explained in deeper/07_runs_that_survive.
"""

from __future__ import annotations

import math
import time
from typing import Any

from torch import Tensor

from minillm.deeper.training.expected_loss import count_expected
from minillm.support.checks.training import check_found


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
        """The mean since the last record; without a target since then there is no loss to tell."""
        seconds = time.perf_counter() - self.began
        record: dict[str, Any] = {"step": step, "tokens": tokens}
        if self.targets:
            record["loss"] = self.nats / self.targets
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


def count_bytes(targets: Tensor, token_bytes: Tensor | None) -> int:
    """The bytes of text that the targets which count stand for, or are expected to."""
    if token_bytes is None:
        return 0
    if targets.is_floating_point():
        return count_expected(targets, token_bytes)[1]
    counted = targets[targets != -100]
    return int(token_bytes[counted.to(token_bytes.device)].sum())


def due(step: int, interval: int) -> bool:
    """Whether a step ends an interval; an interval of 0 has no end."""
    return interval > 0 and step % interval == 0


def keep_record(trainer: Any, found: dict[str, Any], bar: Any) -> None:
    """Record the mean since the last record, and what was found by looking; all who listen hear it.

    Raises: ValueError where both name one thing.
    """
    run, config, step = trainer.run, trainer.config, trainer.step
    record = trainer.meter.record(step, trainer.tokens, trainer.optimizer.param_groups[0]["lr"])
    if run:
        record |= run.failures()
    check_found(record, found)
    record |= found
    intervals = (config.steps, config.log_interval, config.eval_interval)
    if any(due(step, interval) for interval in intervals):
        trainer.meter.load_state_dict({})  # `until` in between changes no record that is due
    trainer.history.append(record)
    speed = f"{record['tokens_per_second']:,.0f} tokens/s"
    loss = f"loss {record['loss']:.3f}" if "loss" in record else "no targets"
    bar.set_postfix_str(f"{loss}, {speed}")
    if run:
        run.write(record)
    if trainer.on_log is not None and trainer.processes.rank == 0:
        trainer.on_log(record)
