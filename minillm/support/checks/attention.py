"""Refusals of queries, keys, values, positions and masks."""

import math
import warnings

import torch
from torch import Tensor

from minillm.support.checks.kinds import check_sizes


def check_input(x: Tensor, hidden_size: int) -> None:
    """Raises: ValueError unless x is (B, T, hidden_size)."""
    if x.ndim != 3 or x.shape[-1] != hidden_size:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (B, T, {hidden_size})")


def check_split(x: Tensor, num_heads: int) -> None:
    """Raises: ValueError unless the last dimension is a multiple of `num_heads`."""
    if x.shape[-1] % num_heads:
        raise ValueError(f"{x.shape[-1]} features cannot be cut into {num_heads} equal heads")


def check_heads(
    hidden_size: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None, dropout: float
) -> None:
    """Raises: ValueError unless heads of these sizes can share keys, and weights be dropped."""
    G = num_heads if num_kv_heads is None else num_kv_heads
    check_sizes(hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=G, head_dim=head_dim)
    if num_heads % G:
        raise ValueError(f"{num_heads} query heads cannot share {G} key heads equally")
    if head_dim is None and hidden_size % num_heads:
        raise ValueError(f"{hidden_size=} is no multiple of {num_heads=}: give head_dim")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must lie in [0, 1), not {dropout}")


def check_causal(num_queries: int, num_keys: int) -> None:
    """Raises: ValueError if there are fewer keys than queries: the first would read nothing."""
    if num_queries > num_keys:
        raise ValueError(
            f"causal: fewer keys than queries ({num_queries} queries, {num_keys} keys)"
        )


def check_positions(
    query_positions: Tensor, key_positions: Tensor, key_valid: Tensor | None, window: int | None
) -> None:
    """Raises: ValueError unless they are (T,) or (B, T), (S,) or (B, S), (B, S), and positive."""
    if window is not None and window < 1:
        raise ValueError(f"window must be positive, got {window}")
    given = [query_positions, key_positions] + ([] if key_valid is None else [key_valid])
    batches = {x.shape[0] for x in given if x.ndim == 2}
    fits = key_valid is None or key_valid.shape[1:] == key_positions.shape[-1:]
    if not fits or len(batches - {1}) > 1 or any(x.ndim not in (1, 2) for x in given):
        shapes = ", ".join(str(tuple(x.shape)) for x in given)
        raise ValueError(f"positions of queries, of keys, key_valid do not fit: {shapes}")


def check_repeats(repeats: int) -> None:
    """Raises: ValueError unless a head is there at least once."""
    if repeats < 1:
        raise ValueError(f"repeats must be positive, got {repeats}")


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    dropout_p: float = 0.0,
) -> None:
    """Raises: ValueError with the offending values if shapes or types do not fit."""
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise ValueError(f"q, k, v must be (batch, heads, positions, size), got {_shapes(q, k, v)}")
    (B, H, T, D), (_, G, S, _) = q.shape, k.shape
    if k.shape != (B, G, S, D) or v.shape[:3] != (B, G, S) or G == 0 or H % G:
        raise ValueError(f"batch, heads, positions or sizes do not fit: {_shapes(q, k, v)}")
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise ValueError(f"q, k, v must have one float dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if is_causal:
        check_causal(T, S)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool, True where a query may read, got {mask.dtype}")
        _check_broadcast("mask", mask, (B, H, T, S))
    if bias is not None:
        if not bias.is_floating_point():
            raise ValueError(f"bias must be floating point, got {bias.dtype}")
        _check_broadcast("bias", bias, (B, H, T, S))


def check_pairs(head_dim: int, base: float | Tensor) -> None:
    """Raises: ValueError unless a head is made of pairs, and they turn slower and slower."""
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and at least 2, got {head_dim}")
    if not isinstance(base, Tensor) and not base > 0:
        raise ValueError(f"rope_theta must be positive, not {base}")


def check_turned(x: Tensor, cos: Tensor) -> None:
    """Raises: ValueError if x has another number of positions or another head size than cos."""
    if x.shape[-2:] != cos.shape[-2:]:
        fits = tuple(cos.shape[-2:])
        raise ValueError(f"input {tuple(x.shape)} does not fit a rotation of (T, D) = {fits}")


def warn_beyond(position_ids: Tensor, covered: float) -> bool:
    """Whether positions lie beyond what training and scaling cover; it warns if they do.

    Only on a CPU, and not while a compiler looks on: elsewhere reading them would wait.
    """
    if torch.compiler.is_compiling() or position_ids.device.type != "cpu" or covered == math.inf:
        return False
    if (last := int(position_ids.max())) < covered:
        return False
    warnings.warn(
        f"position {last} lies beyond the {covered:g} positions that this "
        "rotary embedding is good for: expect the loss to rise, or give it a scaling",
        stacklevel=2,
    )
    return True


def _check_broadcast(name: str, x: Tensor, target: tuple[int, ...]) -> None:
    sizes = zip(reversed(x.shape), reversed(target), strict=False)
    if x.ndim > 4 or not all(size in (1, wanted) for size, wanted in sizes):
        raise ValueError(f"{name} {tuple(x.shape)} does not broadcast to {target}")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
