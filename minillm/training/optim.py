"""What moves the weights: AdamW, the learning rate's schedule, gradient clipping (notebook 07)."""

# Built from notebooks/07_training.ipynb: edit there, then make build.

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["AdamW", "Optimizer", "clip_grad_norm", "cosine_schedule", "decay_groups", "is_matrix"]


def _adamw_step(p: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """One step of one parameter, in place; `state` holds m, v and how many steps were taken."""
    beta1, beta2 = group["betas"]
    state["step"] += 1
    t = float(state["step"])
    m = state["exp_avg"].lerp_(grad, 1 - beta1)
    v = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    p.mul_(1 - group["lr"] * group["weight_decay"])
    scale = (v / (1 - beta2**t)).sqrt_().add_(group["eps"])
    p.addcdiv_(m, scale, value=-group["lr"] / (1 - beta1**t))


class AdamW:
    """Adam with decoupled weight decay, for parameters or groups of them, as `torch.optim.AdamW`.

        optimizer = AdamW(decay_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95))
        loss.backward(), optimizer.step(), optimizer.zero_grad()

    Source: Loshchilov and Hutter 2019, algorithm 2, with the decay multiplied by the learning rate
    as torch does.
    Raises: ValueError for a rate, eps or decay below 0, and for betas that are not from 0 to below
        1.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr {lr}, betas {betas}, eps {eps} or weight decay {weight_decay}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        groups: list[Any] = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        self.param_groups = [{**defaults, **g, "params": list(g["params"])} for g in groups]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if p not in self.state:
                        zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                        self.state[p] = {"step": torch.zeros(()), **zeros}
                    _adamw_step(p, p.grad, self.state[p], group)


class Optimizer(Protocol):
    """What the trainer needs of an optimizer: `AdamW`, and each of torch's, has it."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None: ...

    def step(self) -> Any: ...


def is_matrix(name: str, p: Tensor) -> bool:
    """Whether a parameter is a matrix of weights: no vector, and no logarithms (`..._log`)."""
    return p.dim() >= 2 and not name.endswith("_log")


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices decay, vectors (norms and biases) do not.

    Logarithms do not either: what they stand for would go to 1, not to 0.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if is_matrix(name, p)]
    others = [p for name, p in named if not is_matrix(name, p)]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def cosine_schedule(
    step: int, max_lr: float, min_lr: float, warmup_steps: int, total_steps: int
) -> float:
    """The rate of step 0, 1, ...: linear up to `max_lr`, half a cosine down to `min_lr`.

    Step `warmup_steps` - 1 is the first with `max_lr`, step `total_steps` the first with `min_lr`.

    Raises: ValueError for a step below 0, a warm-up longer than the training, rates out of order.
    """
    if not 0 <= warmup_steps <= total_steps or not 0 <= min_lr <= max_lr or step < 0:
        raise ValueError(
            f"step {step}, warm-up {warmup_steps} of {total_steps}, rates {min_lr}..{max_lr}"
        )
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    if step >= total_steps:
        return min_lr
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before.

    Raises: ValueError if `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norm = torch.stack([torch.linalg.vector_norm(g) for g in grads]).norm()
    if hasattr(norm, "full_tensor"):  # sharded gradients: sum over the shards
        norm = norm.full_tensor()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return norm
