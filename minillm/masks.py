"""Masks: which keys a query may read, stated about positions (notebook 03).

Masks are bool, True where a query may read. `minillm.attention` passes both functions on.
"""

# Built from notebooks/03_attention.ipynb: edit there, then make build.

import torch
from torch import Tensor

__all__ = ["build_mask", "causal_mask"]


def causal_mask(
    num_queries: int, num_keys: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Which keys each query may read: itself and all before it, aligned to the end.

    Shape: -> (T, S) bool, True where query t may attend to key s, i.e. s <= t + (S - T).
    Raises: ValueError if there are fewer keys than queries.
    Source: Vaswani et al. 2017, section 3.2.3; bottom-right alignment as FlashAttention 2.1.
    """
    if num_queries > num_keys:
        raise ValueError(
            f"causal: fewer keys than queries ({num_queries} queries, {num_keys} keys)"
        )
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return ones.tril(diagonal=num_keys - num_queries)


def build_mask(
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    key_valid: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Which keys each query may read: not later than itself, not empty, not padding, not too far.

    Args:
        key_positions: the position that each key slot holds, -1 where the slot is empty.
        key_valid: False where a key is padding.
        window: how many positions a query reads, its own included; None for all.
    Shape: (T,) or (B, T), (S,) or (B, S), key_valid (B, S) -> bool (T, S), or (B, 1, T, S) if
        any of them has a batch.
    Raises: ValueError if the window is not positive or the shapes do not fit.
    """
    if window is not None and window < 1:
        raise ValueError(f"window must be positive, got {window}")
    given = [query_positions, key_positions] + ([] if key_valid is None else [key_valid])
    batches = {x.shape[0] for x in given if x.ndim == 2}
    fits = key_valid is None or key_valid.shape[1:] == key_positions.shape[-1:]
    if not fits or len(batches - {1}) > 1 or any(x.ndim not in (1, 2) for x in given):
        shapes = ", ".join(str(tuple(x.shape)) for x in given)
        raise ValueError(f"positions of queries, of keys, key_valid do not fit: {shapes}")
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    mask = (distance >= 0) & (key_positions >= 0)[..., None, :]
    if window is not None:
        mask = mask & (distance < window)
    if key_valid is not None:
        mask = mask & key_valid[:, None, :].bool()
    return mask if mask.ndim == 2 else mask[:, None]
