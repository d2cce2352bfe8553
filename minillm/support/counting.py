"""What a model costs, and what the steps of a training add up to. Written by hand."""

from __future__ import annotations

import math
import time
from typing import Any

from torch import Tensor, nn


def count_parameters(
    model: nn.Module, *, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Numbers in the weights of any model; a matrix that serves in two places counts once.

    `only_trainable` leaves out what is frozen, as LoRA freezes all but its adapters;
    `exclude_embeddings` the tables of tokens and positions, with a head that is one of them.
    """
    tables = [part.weight for part in model.modules() if isinstance(part, nn.Embedding)]
    left_out = set(tables) if exclude_embeddings else set()
    counted = (p for p in model.parameters() if p.requires_grad or not only_trainable)
    return sum(p.numel() for p in counted if p not in left_out)


def count_operations(model: Any, context_length: int = 0) -> int:
    """Operations of a `CausalLM`'s forward pass for one token that reads `context_length` keys.

    Two for each weight of a matrix product, two for each number of a key and of a value that is
    read; norms, activations and the embedding's look-up are left out. Training costs three times as
    much.
    """
    c, products = model.config, (nn.Linear, nn.Conv1d)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, products))
    parts: list[Any] = [*model.modules()]
    linear += sum(part.active_weights() for part in parts if hasattr(part, "active_weights"))
    read = 0
    for layer in model.model.layers:
        if hasattr(layer, "state_numbers"):  # each number of a state decays and is read
            linear += 2 * layer.state_numbers
        else:  # of each key and value; some attentions compare with more than they cache
            usual = 2 * c.head_dim * c.num_attention_heads
            read += getattr(layer.self_attn, "numbers_read", usual)
    return 2 * (linear + read * context_length)


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


def count_targets(targets: Tensor, token_bytes: Tensor | None) -> list[int]:
    """Targets that count, and the bytes of text they stand for, or are expected to."""
    if targets.is_floating_point():
        from minillm.deeper.training.expected_loss import count_expected

        return count_expected(targets, token_bytes)
    counted = targets[targets != -100]
    if token_bytes is None:
        return [len(counted), 0]
    return [len(counted), int(token_bytes[counted.to(token_bytes.device)].sum())]


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
    if clash := ", ".join(sorted((record.keys() | {"loss"}) & found.keys())):
        raise ValueError(f"validate returned {clash}: the run records that itself, rename it")
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
