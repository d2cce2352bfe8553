"""Attention without the (T, S) matrix: softmax in one pass, and attention in tiles, both ways.

Memory is linear in the length, forward and backward. Explained in deeper/03_flash_attention.
"""

# Built from notebooks/deeper/03_flash_attention.ipynb: edit there, then make build.

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from minillm.attention import build_mask, upcast
from minillm.deeper.attention.fused import fold_heads

__all__ = ["online_softmax", "tiled_attention"]


def online_softmax(x: Tensor, *, block_size: int = 1) -> Tensor:
    """Softmax along the last dimension; maximum and sum come from a single pass over blocks.

    Raises: ValueError if the block size is not positive.
    Source: Milakov and Gimelshein 2018, algorithm 3; by blocks, as FlashAttention does.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be positive, got {block_size}")
    scores = upcast(x)
    row_max = scores.new_full((*x.shape[:-1], 1), torch.finfo(scores.dtype).min)
    row_sum = torch.zeros_like(row_max)
    for block in scores.split(block_size, dim=-1):
        previous = row_max
        row_max = torch.maximum(previous, block.amax(-1, keepdim=True))
        row_sum = row_sum * torch.exp(previous - row_max)  # the old terms under the new maximum
        row_sum = row_sum + torch.exp(block - row_max).sum(-1, keepdim=True)
    return (torch.exp(scores - row_max) / row_sum.masked_fill(row_sum == 0, 1.0)).to(x.dtype)


def _slices(stop: int, size: int = 128) -> list[slice]:
    return [slice(i, min(i + size, stop)) for i in range(0, stop, size)]


def _tile(x: Tensor, rows: slice, columns: slice) -> Tensor:
    """A tile of a mask or bias, whose last two dimensions may be 1: a view."""
    rows = rows if x.shape[2] > 1 else slice(None)
    return x[:, :, rows, columns if x.shape[3] > 1 else slice(None)]


class _Scores(NamedTuple):
    """The scores (B, H, T, S), never held whole but made a tile at a time."""

    q: Tensor
    k: Tensor
    mask: Tensor | None
    bias: Tensor | None
    is_causal: bool
    scale: float

    def columns(self, rows: slice) -> list[slice]:
        """The tiles of keys that these queries read; what is all future is never computed."""
        T, S = self.q.shape[2], self.k.shape[2]
        return _slices(rows.stop + S - T if self.is_causal else S)

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """The scores of a tile, in at least float32, -inf where a query may not read."""
        first = rows.start + self.k.shape[2] - self.q.shape[2]  # its first query among the keys
        q, k = upcast(self.q[:, :, rows]), upcast(self.k[:, :, columns])
        scores = (fold_heads(q, k.shape[1]) @ k.mT).view(*q.shape[:3], k.shape[2]) * self.scale
        if self.bias is not None:
            scores = scores + _tile(self.bias, rows, columns)
        if self.mask is not None:
            scores = scores.masked_fill(~_tile(self.mask, rows, columns), -torch.inf)
        if self.is_causal and columns.stop > first + 1:  # some keys are after some query
            queries = torch.arange(first, first + q.shape[2], device=q.device)
            keys = torch.arange(columns.start, columns.stop, device=q.device)
            scores = scores.masked_fill(~build_mask(queries, keys), -torch.inf)
        return scores


def _weighted_sum(probs: Tensor, v: Tensor) -> Tensor:
    """Values mixed by their weights: (B, H, T, S) times (B, G, S, E) -> (B, H, T, E)."""
    mixed = fold_heads(probs, v.shape[1]) @ upcast(v)
    return mixed.view(*probs.shape[:3], v.shape[3])


def _forward_tiles(lazy: _Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and each query's log-sum-exp: (B, H, T, E) and (B, H, T, 1)."""
    out = lazy.q.new_empty(*lazy.q.shape[:3], v.shape[3])
    lse = upcast(lazy.q.new_empty(*lazy.q.shape[:3], 1))
    for rows in _slices(out.shape[2]):
        row_max = torch.full_like(lse[:, :, rows], torch.finfo(lse.dtype).min)
        row_sum, mixed = torch.zeros_like(row_max), torch.zeros_like(upcast(out[:, :, rows]))
        for columns in lazy.columns(rows):
            scores = lazy.tile(rows, columns)
            previous, row_max = row_max, torch.maximum(row_max, scores.amax(-1, keepdim=True))
            probs, shrink = torch.exp(scores - row_max), torch.exp(previous - row_max)
            row_sum = row_sum * shrink + probs.sum(-1, keepdim=True)
            mixed = mixed * shrink + _weighted_sum(probs, v[:, :, columns])
        out[:, :, rows] = mixed / row_sum.masked_fill(row_sum == 0, 1.0)
        unread = row_sum == 0  # their log-sum-exp is infinite, because exp(s - inf) is 0
        lse[:, :, rows] = (row_max + torch.log(row_sum)).masked_fill(unread, torch.inf)
    return out, lse


def _backward_tiles(
    grad: Tensor, lazy: _Scores, v: Tensor, out: Tensor, lse: Tensor, grad_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each tile of probabilities made again; `grad_bias` is added to."""
    q, k, G, grad = lazy.q, lazy.k, v.shape[1], upcast(grad)
    grad_q, grad_k, grad_v = (torch.zeros_like(upcast(x)) for x in (q, k, v))
    inner = (grad * upcast(out)).sum(-1, keepdim=True)
    for rows in _slices(q.shape[2]):
        for columns in lazy.columns(rows):
            probs = torch.exp(lazy.tile(rows, columns) - lse[:, :, rows])
            grad_probs = _weighted_sum(grad[:, :, rows], v[:, :, columns].mT)
            grad_scores = probs * (grad_probs - inner[:, :, rows])
            if grad_bias is not None:
                part = _tile(grad_bias, rows, columns)
                part += grad_scores.sum_to_size(part.shape)
            grad_scores *= lazy.scale
            folded_q, folded_grad = (fold_heads(upcast(x[:, :, rows]), G) for x in (q, grad))
            grad_q[:, :, rows] += _weighted_sum(grad_scores, k[:, :, columns])
            grad_k[:, :, columns] += fold_heads(grad_scores, G).mT @ folded_q
            grad_v[:, :, columns] += fold_heads(probs, G).mT @ folded_grad
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


class _TiledAttention(Function):
    """Attention that holds one tile of scores at a time, forward and backward.

    Source: Dao 2023, FlashAttention-2, algorithms 1 and 2; a tile is a few PyTorch calls here.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
        """`options` are mask, bias, is_causal and scale."""
        mask, bias, ctx.is_causal, ctx.scale = options
        out, lse = _forward_tiles(_Scores(q, k, *options), v)
        ctx.save_for_backward(q, k, v, out, lse, mask, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mask, bias = ctx.saved_tensors
        lazy = _Scores(q, k, mask, bias, ctx.is_causal, ctx.scale)
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[4] else None
        gradients = _backward_tiles(grad, lazy, v, out, lse, grad_bias)
        return *gradients, None, grad_bias, None, None


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """Attention without the (T, S) matrix. Raises: ValueError if asked for dropout."""
    if dropout_p:
        raise ValueError(f"the tiled backend has no dropout, got dropout_p={dropout_p}")
    return _TiledAttention.apply(q, k, v, mask, bias, is_causal, scale)
