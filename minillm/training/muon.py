"""Muon for the matrices of the layers and AdamW for the rest, as one optimizer (notebook 09)."""

# Built from notebooks/09_training.ipynb: edit there, then make build.

from typing import Any

import torch
from torch import Tensor, nn

from minillm.training import distributed

__all__ = ["MuonAdamW"]


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
        tables = {id(p) for p in _tables(model)}
        matrices, others = [], []
        for group in groups:
            chosen = [p for p in group["params"] if p.dim() == 2 and id(p) not in tables]
            rest = [p for p in group["params"] if p.dim() != 2 or id(p) in tables]
            matrices += [{**group, "params": chosen}] if chosen else []
            others += [{**group, "params": rest}] if rest else []
        if not matrices or not others:
            raise ValueError("muon needs a model with matrices between its embedding and its head")
        self.muon = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
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
