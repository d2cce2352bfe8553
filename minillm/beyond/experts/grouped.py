"""The products of experts: groups of rows, each with a matrix of its own.

Written by hand; beyond/11_experts shows it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class GroupedLinear(torch.autograd.Function):
    """Each group of rows times the transpose of its own matrix; the first `counts[0]` rows are one.

    Autograd alone would make the gradient of each matrix somewhere and then copy all into one
    tensor; here each is made in its place.

    Shape: x (N, in), weight (E, out, in), counts: E numbers that add up to N -> (N, out).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        y = x.new_empty(len(x), weight.shape[1])
        for rows, matrix, out in zip(x.split(counts), weight, y.split(counts), strict=True):
            torch.mm(rows, matrix.t(), out=out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        groups = (tensor.split(ctx.counts) for tensor in (x, grad, grad_x))
        for rows, g, g_x, matrix, g_w in zip(*groups, weight, grad_weight, strict=True):
            torch.mm(g, matrix, out=g_x)
            torch.mm(g.t(), rows, out=g_w)  # of a group without rows: zeros
        return grad_x, grad_weight, None


def grouped_linear(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """`GroupedLinear`, under autocast in its dtype. Shape: (N, in), (E, out, in) -> (N, out)."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    return GroupedLinear.apply(x, weight, counts)


def every_expert(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Every expert on every token, most times a weight of 0: no shape depends on the choice.

    For a compiler and the meta device, which cannot be asked how many tokens an expert has.
    Shape: x (N, C), indices and weights (N, k), gate_up (E, 2F, C), down (E, C, F) -> (N, C).
    """
    dense = weights.new_zeros(len(x), len(gate_up)).scatter(1, indices, weights)  # (N, E)
    gate, up = torch.matmul(x, gate_up.mT).chunk(2, -1)  # (E, N, F)
    y = torch.matmul(activation(gate) * up, down.mT)  # (E, N, C)
    return (y * dense.t()[..., None]).sum(0).to(x.dtype)
