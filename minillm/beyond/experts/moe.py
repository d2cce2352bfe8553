"""Mixture of experts: many feed-forward blocks in a layer, of which each token uses a few.

Explained in notebooks/beyond/11_experts.ipynb. Parameters are named and laid out as in Hugging
Face's Mixtral, Qwen3-MoE and DeepSeek-V3.
"""

# Built from notebooks/beyond/11_experts.ipynb: edit there, then make build.

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.beyond.experts.grouped import every_expert, grouped_linear
from minillm.beyond.experts.routing import (
    check_experts,
    check_router_logits,
    flat_mask,
    without_worst_groups,
)
from minillm.layers import ACTIVATIONS, GatedMLP
from minillm.support.checks.kinds import check_one_of, check_sizes
from minillm.support.modes import without_autocast

__all__ = [
    "Experts",
    "SparseMoeBlock",
    "TopKRouter",
    "expert_load",
    "load_balancing_loss",
    "update_bias",
]


class Experts(nn.Module):
    """E gated feed-forward blocks in two tensors; each token goes through those chosen for it.

    Tokens are sorted by expert, so that an expert computes all of its tokens in one product, and
    one that nobody chose costs nothing. A GPU is asked once how many tokens each expert has.

    Shape: x (N, C), indices (N, k), weights (N, k) -> (N, C).
    Raises: ValueError for sizes below 1, an unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        E, F_, C = num_experts, intermediate_size, hidden_size
        check_sizes(num_experts=E, intermediate_size=F_, hidden_size=C)
        check_one_of("activation", activation, list(ACTIVATIONS))
        self.activation = ACTIVATIONS[activation]
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F_, C))  # gates first, then values
        self.down_proj = nn.Parameter(torch.empty(E, C, F_))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The outputs of each token's experts, weighted and summed: (N, C) -> (N, C)."""
        gate_up, down = self.gate_up_proj, self.down_proj
        if torch.compiler.is_compiling() or x.is_meta:  # no shape may depend on the choice
            return every_expert(x, indices, weights, gate_up, down, self.activation)
        chosen = indices.flatten()  # token 0's choices, token 1's, ...
        order = chosen.argsort(stable=True)
        tokens = order // indices.shape[1]  # whose choice each is, expert by expert
        load = chosen.new_zeros(len(gate_up))  # bincount makes a GPU wait twice more
        counts = load.index_add(0, chosen, torch.ones_like(chosen)).tolist()
        gate, up = grouped_linear(x.index_select(0, tokens), gate_up, counts).chunk(2, -1)
        y = grouped_linear(self.activation(gate) * up, down, counts)  # (N k, C)
        y = y * weights.flatten().index_select(0, order)[:, None]
        return torch.zeros_like(x, dtype=y.dtype).index_add(0, tokens, y).to(x.dtype)

    def extra_repr(self) -> str:
        E, C, F_ = self.down_proj.shape
        return f"{C}, {F_}, {E}"


class TopKRouter(nn.Module):
    """Which experts each token goes to, and how much each of them counts.

    Scores are a softmax over the experts or, with `scoring="sigmoid"`, each expert's own. The best
    `num_experts_per_tok` are chosen; their scores are the weights, divided by their sum if
    `norm_topk_prob`, times `routed_scaling_factor`. Sigmoid scores come with DeepSeek-V3's bias
    (see `update_bias`): it takes part in the choice and not in the weights. With `n_group` > 1 only
    experts of the `topk_group` best groups are chosen, a group counting as much as its best two.

    Shape: (N, C) -> logits (N, E), weights (N, k) in float32 or wider, indices (N, k).
    Raises: ValueError for more choices than experts or groups; on the CPU for logits that are
        NaN or infinite.
    Source: Shazeer et al. 2017, section 2; DeepSeek-AI 2024 (V3), equations 12 to 16.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        norm_topk_prob: bool = True,
        routed_scaling_factor: float = 1.0,
        n_group: int = 1,
        topk_group: int = 1,
    ) -> None:
        super().__init__()
        check_experts(num_experts, num_experts_per_tok, n_group, topk_group)
        check_one_of("scoring", scoring, ["softmax", "sigmoid"])
        self.num_experts, self.num_experts_per_tok = num_experts, num_experts_per_tok
        self.scoring, self.norm_topk_prob = scoring, norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor
        self.n_group, self.topk_group = n_group, topk_group
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.uniform_(self.weight, -(hidden_size**-0.5), hidden_size**-0.5)
        bias = torch.zeros(num_experts) if scoring == "sigmoid" else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (N, E), weights (N, k) and indices (N, k) of each token's experts. x: (N, C)."""
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        sigmoid = self.scoring == "sigmoid"
        dtype = wide if sigmoid else dtype  # as published
        with without_autocast(x):  # rounded logits send tokens elsewhere
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
        check_router_logits(logits)
        scores = logits.to(wide).sigmoid() if sigmoid else logits.to(wide).softmax(-1)
        indices = self.choose(scores.detach())
        weights = scores.gather(1, indices)
        if self.norm_topk_prob:  # the small number: sigmoids can all be 0
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, indices

    def choose(self, scores: Tensor) -> Tensor:
        """The experts of each token. Shape: (N, E) -> (N, k)."""
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.topk_group < self.n_group:
            scores = without_worst_groups(scores, self.n_group, self.topk_group)
        return scores.topk(self.num_experts_per_tok).indices

    def extra_repr(self) -> str:
        shape = f"{self.weight.shape[1]}, {self.num_experts}, {self.num_experts_per_tok}"
        return f"{shape}, scoring={self.scoring!r}, norm_topk_prob={self.norm_topk_prob}"


def expert_load(indices: Tensor, num_experts: int, *, mask: Tensor | None = None) -> Tensor:
    """How many tokens chose each expert; those where `mask` is 0 do not count.

    Shape: (N, k) [, mask of N numbers] -> (E,) float32
    Raises: ValueError for a mask of another size.
    """
    N, k = indices.shape
    counted = torch.ones(N, device=indices.device) if mask is None else flat_mask(mask, N).float()
    load = torch.zeros(num_experts, device=indices.device)
    return load.index_add(0, indices.flatten(), counted.repeat_interleave(k))


def load_balancing_loss(
    logits: Tensor, num_experts_per_tok: int, *, mask: Tensor | None = None
) -> Tensor:
    """E times the sum over experts of (share of tokens that chose it) x (mean probability of it).

    For one layer; shares sum to k, and k is also what a balanced layer costs, as in transformers
    (Switch's loss, for k = 1, costs 1). Gradients come through the probabilities alone. Tokens
    where `mask` is 0, padding, do not count.

    Shape: logits (N, E), mask of N numbers -> ()
    Raises: ValueError for more choices than experts, a mask of another size or without any token,
        logits that are NaN or infinite (on the CPU).
    Source: Fedus et al. 2021, equations 4 to 6.
    """
    N, E = logits.shape
    check_experts(E, num_experts_per_tok)
    counted = torch.ones(N, device=logits.device) if mask is None else flat_mask(mask, N).float()
    probs = logits.float().softmax(-1)
    check_router_logits(logits)
    if logits.device.type == "cpu" and not counted.any():
        raise ValueError(f"none of {N} tokens counts: a load cannot be balanced")
    indices = probs.detach().topk(num_experts_per_tok).indices
    total = counted.sum().clamp(min=1)
    share = expert_load(indices, E, mask=counted) / total
    prob = (probs * counted[:, None]).sum(0) / total
    return E * (share * prob).sum()


@torch.no_grad()
def update_bias(router: TopKRouter, load: Tensor, *, rate: float = 1e-3) -> None:
    """Move each expert's bias one step: up if fewer tokens than the mean chose it, else down.

    `load` (E,) is what `expert_load` counted in the last batch. The weights of the chosen experts
    do not see the bias, so the loss has no part in this.

    Raises: ValueError for a router without a bias, a load of another size or (on the CPU) NaN, a
        negative rate.
    Source: DeepSeek-AI 2024 (V3), section 2.1.2.
    """
    bias = router.e_score_correction_bias
    if bias is None:
        raise ValueError(f"a router with {router.scoring} scores has no bias")
    looked_at = load.device.type == "cpu"  # asking a GPU means waiting
    if load.shape != bias.shape or (looked_at and load.isnan().any()) or not rate >= 0:
        raise ValueError(f"load {load.tolist()} at rate {rate}, for {len(bias)} experts")
    load = load.to(bias)
    bias += rate * (load.mean() - load).sign()


class SparseMoeBlock(nn.Module):
    """A router and its experts in the place of one feed-forward block.

    With `shared_intermediate_size` one more block, of that size, computes every token.
    Options of the router are those of `TopKRouter`.

    Shape: (..., C) -> (..., C)
    Raises: ValueError as `TopKRouter` and `Experts` do.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        activation: str = "silu",
        shared_intermediate_size: int = 0,
        **router: Any,
    ) -> None:
        super().__init__()
        self.gate = TopKRouter(hidden_size, num_experts, num_experts_per_tok, **router)
        self.experts = Experts(hidden_size, intermediate_size, num_experts, activation=activation)
        self.shared_experts = None
        if shared_intermediate_size:
            self.shared_experts = GatedMLP(
                hidden_size, shared_intermediate_size, activation=activation
            )

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C), each token by itself."""
        rows = x.reshape(-1, x.shape[-1])
        _, weights, indices = self.gate(rows)
        y = self.experts(rows, indices, weights).view(x.shape)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def active_weights(self) -> int:
        """Numbers of router and experts that one token is multiplied with."""
        E, k = self.gate.num_experts, self.gate.num_experts_per_tok
        return self.gate.weight.numel() + sum(w.numel() for w in self.experts.parameters()) // E * k
