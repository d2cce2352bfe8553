"""LoRA: a change of low rank beside a matrix; the matrix itself stays as it is.

Explained in notebooks/beyond/14_lora.ipynb; adapters of a whole model: `beyond.lora.adapters`, in
files: `minillm.deeper.pretrained.adapters`.
"""

# Built from notebooks/beyond/14_lora.ipynb: edit there, then make build.

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.support.checks.adapters import check_adapter

__all__ = ["LoRALinear"]


class LoRALinear(nn.Linear):
    """A linear layer with an adapter: y = W x + b + s B A x, where only A and B are trained.

    `weight` and `bias` are those of `base`, not copies. s is alpha / rank, or alpha / sqrt(rank)
    with `use_rslora`. A is drawn, B begins as zeros: at first the layer computes what `base` does.
    The adapter is float32 beside weights of 16 bits. `lora_A` may be another layer's, to share it.

    Shape: x (..., in) -> (..., out); A (rank, in), B (out, rank).
    Raises: ValueError for a rank below 1 or above the smaller side of W, an alpha that is no number
        or beyond a million, a dropout outside 0 to 1.
    Source: Hu et al. 2021, section 4.1; Kalajdzievski 2023 for alpha / sqrt(rank).
    """

    unmerged_weight: Tensor  # W, while `weight` holds W + s B A

    def __init__(
        self,
        base: nn.Linear,
        rank: int,
        alpha: float,
        *,
        use_rslora: bool = False,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
        lora_A: nn.Linear | None = None,
    ) -> None:
        check_adapter("a linear layer", base, rank, alpha, dropout)
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.rank, self.alpha, self.use_rslora = rank, alpha, use_rslora
        self.scale = alpha / (math.sqrt(rank) if use_rslora else rank)
        self.merged, self.enabled, self.tied = False, True, False
        self.dropout = nn.Dropout(dropout)
        dtype = torch.promote_types(base.weight.dtype, torch.float32)
        options: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": dtype}
        self.lora_A = lora_A or nn.utils.skip_init(nn.Linear, self.in_features, rank, **options)
        self.lora_B = nn.utils.skip_init(nn.Linear, rank, self.out_features, **options)
        with torch.no_grad():
            if lora_A is None:
                bound = self.in_features**-0.5
                drawn = torch.empty(rank, self.in_features)
                self.lora_A.weight.copy_(drawn.uniform_(-bound, bound, generator=generator))
            self.lora_B.weight.zero_()
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), with the adapter's change unless it is switched off."""
        y = F.linear(x, self.weight, self.bias)
        if self.merged or not self.enabled:
            return y
        low = self.lora_A(self.dropout(x).to(self.lora_A.weight.dtype))  # (..., rank)
        return (y + self.lora_B(low * self.scale)).to(y.dtype)

    def change(self) -> Tensor:
        """What the adapter adds to the matrix: s B A. Shape: -> (out, in)."""
        return self.lora_B.weight @ self.lora_A.weight * self.scale

    def matrix(self) -> Tensor:
        """The matrix that x is multiplied with, the adapter (but not its dropout) included."""
        if self.merged or not self.enabled:
            return self.weight
        return (self.weight + self.change()).to(self.weight.dtype)

    def merged_matrix(self, name: str = "this layer") -> Tensor:
        """W + s B A. Raises: ValueError if it is merged already, or NaN or infinite."""
        if self.merged:
            raise ValueError(f"{name} is merged already: its change would be added twice")
        change, dtype = self.change(), self.weight.dtype
        if not change.isfinite().all():
            raise ValueError(f"the adapter of {name} is NaN or infinite")
        matrix = (self.weight + change).to(dtype)
        if not matrix.isfinite().all():
            raise ValueError(f"{name} would be NaN or infinite in {dtype}")
        return matrix

    @torch.no_grad()
    def merge(self) -> None:
        """Put W + s B A in the place of W, which is kept. Of a model's layers, use `merge`.

        Raises: ValueError if it is merged, or if the matrix would be NaN or infinite.
        """
        merged = self.merged_matrix()
        self.register_buffer("unmerged_weight", self.weight.detach(), persistent=False)
        self.weight = nn.Parameter(merged, requires_grad=self.weight.requires_grad)
        self.merged = True

    def unmerge(self) -> None:
        """Put W back, bit for bit. Raises: ValueError if it is not merged."""
        if not self.merged:
            raise ValueError("this layer is not merged: there is nothing to take back")
        self.weight = nn.Parameter(self.unmerged_weight, requires_grad=self.weight.requires_grad)
        del self.unmerged_weight
        self.merged = False

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha}"
