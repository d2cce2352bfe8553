"""Everything that decides the numbers of a training run, as one record.

Explained in notebook 09 (training).
"""

# Built from notebooks/09_training.ipynb: edit there, then make build.

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from minillm.optim import AdamW, MuonAdamW, cosine_schedule, decay_groups

__all__ = ["TrainConfig"]


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
