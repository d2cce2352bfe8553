"""What a router of experts refuses, and its choice among groups.

Written by hand; beyond/11_experts shows it.
"""

import torch
from torch import Tensor


def check_experts(
    num_experts: int, num_experts_per_tok: int, n_group: int = 1, topk_group: int = 1
) -> None:
    """Raises: ValueError, with the numbers, if a router cannot choose so."""
    E, k = num_experts, num_experts_per_tok
    if E < 1 or not 1 <= k <= E:
        raise ValueError(f"num_experts_per_tok {k} of num_experts {E}: choose 1 to all of them")
    if n_group < 1 or E % n_group or not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group {topk_group} of n_group {n_group}, for {E} experts")
    size = E // n_group
    if n_group > 1 and size < 2:
        raise ValueError(f"n_group {n_group} of {E} experts: a group is judged by its best two")
    if k > topk_group * size:
        groups = f"topk_group {topk_group} groups hold {topk_group * size} experts"
        raise ValueError(f"num_experts_per_tok {k}: {groups}")


def check_router_logits(logits: Tensor) -> None:
    """Raises: ValueError if one is NaN or infinite; looked for on the CPU alone."""
    if logits.device.type != "cpu" or torch.compiler.is_compiling():
        return
    finite = logits.isfinite().all(-1)
    if not finite.all():
        rows = (~finite).nonzero()[:, 0].tolist()
        which = f"{len(rows)} of {len(finite)} tokens, the first at row {rows[0]}"
        raise ValueError(f"the router's logits are NaN or infinite for {which}")


def flat_mask(mask: Tensor, rows: int) -> Tensor:
    """Raises: ValueError unless the mask has a number for each row."""
    if mask.numel() != rows:
        raise ValueError(f"a mask of {tuple(mask.shape)} for {rows} tokens")
    return mask.flatten()


def without_worst_groups(scores: Tensor, n_group: int, topk_group: int) -> Tensor:
    """Scores with -inf in all but the best groups of experts, a group counting as its best two.

    Shape: (N, E) -> (N, E)
    Source: DeepSeek-AI 2024 (V3), section 2.1.2, node-limited routing.
    """
    groups = scores.unflatten(-1, (n_group, -1))  # (N, groups, experts of a group)
    best = groups.topk(2).values.sum(-1).topk(topk_group).indices
    kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
    return groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
