"""Products and attention for a compiler: plain sums over weights that lie as its loops read them.

For a few rows at a time; explained in deeper/10_fast_decoding.
"""

# Built from notebooks/deeper/10_fast_decoding.ipynb: edit there, then make build.

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["MOST_ROWS", "PANEL", "materialized", "pack_panels", "panel_product", "step_attention"]

PANEL = 16  # outputs in a panel: the float32 numbers in a register of 512 bits

MOST_ROWS = {torch.float32: 32, torch.bfloat16: 16}  # more take long to compile, and win less


def pack_panels(weight: Tensor) -> Tensor:
    """W in panels of 16 outputs, the last one padded with zeros.

    Shape: (out, in) -> (panels, in, 16).
    """
    padded = F.pad(weight, (0, 0, 0, -len(weight) % PANEL))
    return padded.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def materialized(x: Tensor) -> Tensor:
    """x itself; a compiler writes it to memory here, and does not compute it again later."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def panel_product(x: Tensor, panels: Tensor, outputs: int) -> Tensor:
    """`x @ W.T` for the panels of W, with sums in float32.

    Shape: x (B, in), panels (panels, in, 16) -> (B, outputs).
    """
    columns = materialized(x.float().t())  # (in, B): what a weight is multiplied by lies together
    wide = panels.float()
    sums = [(wide * column[:, None]).sum(1) for column in columns.unbind(1)]
    return materialized(torch.cat(sums).view(len(x), -1).to(x.dtype))[:, :outputs]


def step_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of one new token: R queries for each of G keys and values, as sums in float32.

    Shape: q (B, G, R, D), k and v (B, G, S, D), mask (B or 1, 1, 1, S), True = may be read
    -> (B, G, R, D).
    """
    q, k, v, dtype = q.float(), k.float(), v.float(), q.dtype
    scores = torch.stack([(k * row[:, :, None]).sum(-1) for row in q.unbind(2)], 2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = materialized((scores - scores.amax(-1, keepdim=True)).exp())  # (B, G, R, S)
    pieces = v.split(PANEL, -1)
    sums = [(p * w[..., None]).sum(2) for w in weights.unbind(2) for p in pieces]
    total = weights.sum(-1, keepdim=True)
    return (torch.cat(sums, -1).unflatten(-1, q.shape[2:]) / total).to(dtype)
