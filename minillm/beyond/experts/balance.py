"""Keeps experts in use while a model trains: a loss for softmax routers, a bias for sigmoid ones.

Written by hand; beyond/11_experts shows it.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minillm.beyond.experts.moe import TopKRouter, expert_load, load_balancing_loss, update_bias


class RouterBalance:
    """Keeps the experts of a model in use while it trains: `Trainer(..., balance=...)`.

    `loss` times the load balancing loss is added to the loss of each batch: the mean over layers
    or, with `pooled`, that of all layers' tokens in one heap, as in transformers. Of a step's
    batches, and of several processes, each has a loss by its own load, and the mean of these losses
    counts: not the loss of all tokens together. `rate` is how far the routers' biases move after a
    step, by the load of all its batches and processes. What follows a row's last target is padding
    and does not count.

    Raises: ValueError for a model without routers, numbers that do nothing or are negative, a loss
        for sigmoid scores, a rate for softmax scores; in training, for that of another model.
    """

    def __init__(
        self, model: nn.Module, *, loss: float = 0.0, rate: float = 0.0, pooled: bool = False
    ) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        if not self.routers:
            raise ValueError(f"{type(model).__name__} has no router: no layer has experts")
        if not (0 <= loss < math.inf and 0 <= rate < math.inf and loss + rate > 0):
            raise ValueError(f"loss {loss}, rate {rate}: both from 0, and one of them above")
        for router in self.routers:
            if loss and router.scoring == "sigmoid":
                raise ValueError(f"loss {loss} for routers with sigmoid scores: they take a rate")
            if rate and router.scoring == "softmax":
                raise ValueError(f"rate {rate} for routers without a bias: they take a loss")
        self.loss, self.rate, self.pooled = loss, rate, pooled
        self.settings = {"balance": {"loss": loss, "rate": rate, "pooled": pooled}}
        self.found: list[Any] = [None] * len(self.routers)  # what each returned last
        for i, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._keep, i))
        self.forget()

    def _keep(self, i: int, _router: nn.Module, _inputs: Any, found: Any) -> None:
        self.found[i] = found

    def __call__(self, targets: Tensor) -> Tensor:
        """The loss of the batch whose forward pass has just ended; its load is counted."""
        if any(found is None for found in self.found):
            raise ValueError("a router saw no batch: is it that of the model in training?")
        counts = targets.sum(-1) != 0 if targets.is_floating_point() else targets != -100
        mask = counts.flip(-1).cumsum(-1).flip(-1).flatten() > 0  # a target is here or follows
        logits = [found[0] for found in self.found]
        if self.rate:
            for i, (scores, _, indices) in enumerate(self.found):
                self.loads[i] += expert_load(indices, scores.shape[-1], mask=mask)
        self.found = [None] * len(self.routers)
        if not self.loss or (mask.device.type == "cpu" and not mask.any()):
            return torch.zeros((), device=targets.device)
        if self.pooled:
            logits, mask = [torch.cat(logits)], mask.repeat(len(logits))
        each = [
            load_balancing_loss(rows, router.num_experts_per_tok, mask=mask)
            for rows, router in zip(logits, self.routers, strict=False)
        ]
        return self.loss * torch.stack(each).mean()

    def after_step(self) -> None:
        """Move the biases."""
        if self.rate:
            if dist.is_available() and dist.is_initialized():
                for load in self.loads:
                    dist.all_reduce(load)
            for router, load in zip(self.routers, self.loads, strict=True):
                update_bias(router, load, rate=self.rate)
        self.forget()

    def forget(self) -> None:
        """As if no batch had been seen since the last step."""
        self.loads: list[Any] = [0.0] * len(self.routers)
