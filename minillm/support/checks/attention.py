"""Refusals of queries, keys, values, positions and masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def check_input(x: Tensor, hidden_size: int) -> None:
    """Raises: ValueError unless x is (B, T, hidden_size)."""
    if x.ndim != 3 or x.shape[-1] != hidden_size:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (B, T, {hidden_size})")


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


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    dropout_p: float = 0.0,
) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bias with the four dimensions of the scores, the bias in at least float32.

    Raises: ValueError with the offending values if shapes or types do not fit.
    """
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
    if mask is None and bias is None:
        return None, None
    import torch  # who checks a text needs none

    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool, True where a query may read, got {mask.dtype}")
        mask = _four_dimensions("mask", mask, (B, H, T, S))
    if bias is not None:
        if not bias.is_floating_point():
            raise ValueError(f"bias must be floating point, got {bias.dtype}")
        bias = _four_dimensions("bias", bias, (B, H, T, S))
        bias = bias.to(torch.promote_types(q.dtype, torch.float32))
    return mask, bias


def _four_dimensions(name: str, x: Tensor, target: tuple[int, ...]) -> Tensor:
    sizes = zip(reversed(x.shape), reversed(target), strict=False)
    if x.ndim > 4 or not all(size in (1, wanted) for size, wanted in sizes):
        raise ValueError(f"{name} {tuple(x.shape)} does not broadcast to {target}")
    return x if x.ndim == 4 else x[(None,) * (4 - x.ndim)]


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
