"""Muon for matrices and AdamW for the rest, as one optimizer (deeper/07_optimizers)."""

# Built from notebooks/deeper/07_optimizers.ipynb: edit there, then make build.

import math
from typing import Any

import torch
from torch import Tensor, nn

from minillm.deeper.training import distributed
from minillm.training import is_matrix

__all__ = ["Muon", "MuonAdamW", "equalize"]


def _tables(model: nn.Module) -> list[Tensor]:
    """Weights that hold one row for each token: embeddings, and the head if it is not tied.

    The head is `lm_head`, or else what has as many outputs as an embedding has rows. Blocks are
    not asked: as many positions as channels would make each of their matrices a head.
    """
    modules, head = [*model.modules()], getattr(model, "lm_head", None)
    found = [m for m in modules if isinstance(m, nn.Embedding)]
    weights = [m.weight for m in found]
    if isinstance(head, nn.Linear):
        return [*weights, head.weight]
    rows = {m.num_embeddings for m in found}
    blocks = {m for part in modules if isinstance(part, nn.ModuleList) for m in part.modules()}
    heads = [m for m in modules if isinstance(m, nn.Linear) and m not in blocks]
    return weights + [m.weight for m in heads if m.out_features in rows]


class Muon(torch.optim.Muon):
    """torch's Muon, but on a CPU the new matrix is found in float32.

    torch finds it in bfloat16, everywhere. CPUs without instructions for that take twenty times as
    long as in float32, so that most of a small model's step would go into it. Of torch's options
    there are two; for the rest it takes Nesterov's momentum of 0.95 and five steps to the new
    matrix, and scales moves to the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`).
    """

    def __init__(self, params: Any, lr: float, *, weight_decay: float = 0.1) -> None:
        super().__init__(params, lr, weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move every matrix that has a gradient; with a closure, the loss that it returns."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = equalize(p.grad.lerp(momentum, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))
        return loss


def equalize(matrix: Tensor) -> Tensor:
    """A matrix with the singular vectors of this one and singular values near 1.

    Five times X <- aX + (bA + cA^2)X with A = XX^T: a polynomial of each singular value alone that
    drives it towards 1.
    Source: Jordan et al. 2024, with their a, b, c.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    dtype = torch.float32 if matrix.device.type == "cpu" else torch.bfloat16
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T.to(dtype) if tall else matrix.to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        A = x @ x.T
        x = torch.addmm(x, torch.addmm(A, A, A, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class MuonAdamW:
    """Muon for the matrices of the layers, AdamW for embeddings, output head and vectors, as one.

    Muon replaces a matrix of gradients by the nearest one whose singular values are all equal, so
    that what is rare in the data moves the weights as far as what is frequent. Its steps are
    scaled to the size of AdamW's, so that both share one learning rate.

    Source: Jordan et al. 2024 (torch.optim.Muon); the scale: Liu et al. 2025.
    Raises: ValueError if there is no such matrix, or if the model is sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        if distributed.is_sharded(model):
            raise ValueError("muon needs whole matrices, fsdp has shards of them: use ddp")
        left = {id(p) for p in _tables(model)}
        left |= {id(p) for name, p in model.named_parameters() if not is_matrix(name, p)}
        matrices, others = [], []
        for group in groups:
            chosen = [p for p in group["params"] if p.dim() == 2 and id(p) not in left]
            rest = [p for p in group["params"] if p.dim() != 2 or id(p) in left]
            matrices += [{**group, "params": chosen}] if chosen else []
            others += [{**group, "params": rest}] if rest else []
        if not matrices or not others:
            raise ValueError("muon needs a model with matrices between its embedding and its head")
        self.muon = Muon(matrices, lr)
        self.adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)
        self.muon.state = self.adamw.state  # one record of both, by parameter
        self.state = self.adamw.state
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.muon.zero_grad()
        self.adamw.zero_grad()

    def step(self) -> None:
        """Move every parameter that has a gradient."""
        self.muon.step()
        self.adamw.step()
