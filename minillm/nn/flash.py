"""Attention without the (T, S) matrix: softmax in one pass, and attention in tiles, both ways.

Memory is linear in the length, forward and backward. Explained in notebook 03.
"""

# Built from notebooks/03_attention.ipynb: edit there, then make build.

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from minillm.nn.attention import Rules, fold_heads, masked_scores, mix_values, precise, rectangle

__all__ = ["online_softmax", "tiled_attention"]


def online_softmax(x: Tensor, *, block_size: int = 1) -> Tensor:
    """Softmax along the last dimension; maximum and sum come from a single pass over blocks.

    Raises: ValueError if the block size is not positive.
    Source: Milakov and Gimelshein 2018, algorithm 3; by blocks, as FlashAttention does.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be positive, got {block_size}")
    scores = precise(x)
    largest = scores.new_full((*x.shape[:-1], 1), torch.finfo(scores.dtype).min)
    total = torch.zeros_like(largest)
    for block in scores.split(block_size, dim=-1):
        previous = largest
        largest = torch.maximum(previous, block.amax(-1, keepdim=True))
        total = total * torch.exp(previous - largest)  # the old terms under the new maximum
        total = total + torch.exp(block - largest).sum(-1, keepdim=True)
    return (torch.exp(scores - largest) / total.masked_fill(total == 0, 1.0)).to(x.dtype)


def _slices(stop: int, size: int = 128) -> list[slice]:
    return [slice(i, min(i + size, stop)) for i in range(0, stop, size)]


def _columns(rows: slice, q: Tensor, k: Tensor, rules: Rules) -> list[slice]:
    """The tiles of keys that these queries read; what is all future is never computed."""
    return _slices(rows.stop + k.shape[2] - q.shape[2] if rules.is_causal else k.shape[2])


def _forward_tiles(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """The output, and each query's log-sum-exp: (B, H, T, E) and (B, H, T, 1)."""
    out = q.new_empty(*q.shape[:3], v.shape[3])
    log_sums = precise(q.new_empty(*q.shape[:3], 1))
    for rows in _slices(q.shape[2]):
        largest = torch.full_like(log_sums[:, :, rows], torch.finfo(log_sums.dtype).min)
        total, mixed = torch.zeros_like(largest), torch.zeros_like(precise(out[:, :, rows]))
        for columns in _columns(rows, q, k, rules):
            scores, previous = masked_scores(q, k, rules, rows, columns), largest
            largest = torch.maximum(previous, scores.amax(-1, keepdim=True))
            shares, shrink = torch.exp(scores - largest), torch.exp(previous - largest)
            total = total * shrink + shares.sum(-1, keepdim=True)
            mixed = mixed * shrink + mix_values(shares, v[:, :, columns])
        out[:, :, rows] = mixed / total.masked_fill(total == 0, 1.0)
        log_sum = largest + torch.log(total)
        log_sums[:, :, rows] = log_sum.masked_fill(total == 0, torch.inf)  # exp(s - inf) is 0
    return out, log_sums


def _backward_tiles(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sums: Tensor,
    rules: Rules,
    grad_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each tile of shares made again; `grad_bias` is added to."""
    G, grad = k.shape[1], precise(grad)
    grad_q, grad_k, grad_v = (torch.zeros_like(precise(x)) for x in (q, k, v))
    inner = (grad * precise(out)).sum(-1, keepdim=True)
    for rows in _slices(q.shape[2]):
        for columns in _columns(rows, q, k, rules):
            scores = masked_scores(q, k, rules, rows, columns)
            shares = torch.exp(scores - log_sums[:, :, rows])
            grad_shares = mix_values(grad[:, :, rows], v[:, :, columns].mT)
            grad_scores = shares * (grad_shares - inner[:, :, rows])
            if grad_bias is not None:
                part = rectangle(grad_bias, rows, columns)
                part += grad_scores.sum_to_size(part.shape)
            grad_scores *= rules.scale
            folded_q, folded_grad = (fold_heads(precise(x[:, :, rows]), G) for x in (q, grad))
            grad_q[:, :, rows] += mix_values(grad_scores, k[:, :, columns])
            grad_k[:, :, columns] += fold_heads(grad_scores, G).mT @ folded_q
            grad_v[:, :, columns] += fold_heads(shares, G).mT @ folded_grad
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


class _TiledAttention(Function):
    """Attention that holds one tile of scores at a time, forward and backward.

    Source: Dao 2023, FlashAttention-2, algorithms 1 and 2; a tile is a few PyTorch calls here.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, rules: Rules
    ) -> Tensor:
        out, log_sums = _forward_tiles(q, k, v, rules)
        ctx.save_for_backward(q, k, v, bias, rules.mask, out, log_sums)
        ctx.rules = rules._replace(mask=None, bias=None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, mask, out, log_sums = ctx.saved_tensors
        rules = ctx.rules._replace(mask=mask, bias=bias)
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        gradients = _backward_tiles(grad, q, k, v, out, log_sums, rules, grad_bias)
        return *gradients, grad_bias, None


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, rules: Rules, dropout_p: float) -> Tensor:
    """Attention without the (T, S) matrix. Raises: ValueError if asked for dropout."""
    if dropout_p:
        raise ValueError(f"the tiled backend has no dropout, got dropout_p={dropout_p}")
    return _TiledAttention.apply(q, k, v, rules.bias, rules)
