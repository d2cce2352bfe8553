"""Mixture of experts: many feed-forward blocks in a layer, of which each token uses a few.

Explained in notebooks/beyond/11_experts.ipynb. Parameters are named and laid out as in Hugging
Face's Mixtral, Qwen3-MoE and DeepSeek-V3.
"""

# Built from notebooks/beyond/11_experts.ipynb: edit there, then make build.

import math
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minillm.nn.layers import ACTIVATIONS, GatedMLP

__all__ = [
    "Experts",
    "GroupedLinear",
    "RouterBalance",
    "SparseMoeBlock",
    "TopKRouter",
    "check_experts",
    "expert_load",
    "load_balancing_loss",
    "update_bias",
]


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


class Experts(nn.Module):
    """E gated feed-forward blocks in two tensors; each token goes through those chosen for it.

    Tokens are sorted by expert, so that an expert computes all of its tokens in one product, and
    one that nobody chose costs nothing. A GPU is asked once how many tokens each expert has; where
    nothing can be asked (a compiler, the meta device), every expert computes every token.

    Shape: x (N, C), indices (N, k), weights (N, k) -> (N, C).
    Raises: ValueError for no experts, sizes below 1, an unknown activation.
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
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        for name, size in {**sizes, "num_experts": num_experts}.items():
            if size < 1:
                raise ValueError(f"experts need a {name} of at least 1, not {size}")
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"unknown activation {activation!r}; known are {known}")
        self.activation = ACTIVATIONS[activation]
        E, F_, C = num_experts, intermediate_size, hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F_, C))  # gates first, then values
        self.down_proj = nn.Parameter(torch.empty(E, C, F_))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or x.is_meta:
            return self.compute_all(x, indices, weights)
        chosen = indices.flatten()  # token 0's choices, token 1's, ...
        order = chosen.argsort(stable=True)
        tokens = order // indices.shape[1]  # whose choice each is, expert by expert
        load = chosen.new_zeros(len(self.gate_up_proj))  # bincount makes a GPU wait twice more
        counts = load.index_add(0, chosen, torch.ones_like(chosen)).tolist()
        gate_up: Tensor = self.gate_up_proj
        down: Tensor = self.down_proj
        rows = x.index_select(0, tokens)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            rows, gate_up, down = rows.to(dtype), gate_up.to(dtype), down.to(dtype)
        gate, up = GroupedLinear.apply(rows, gate_up, counts).chunk(2, -1)
        y = GroupedLinear.apply(self.activation(gate) * up, down, counts)  # (N k, C)
        y = y * weights.flatten().index_select(0, order)[:, None]
        return torch.zeros_like(x, dtype=y.dtype).index_add(0, tokens, y).to(x.dtype)

    def compute_all(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Every expert on every token, most times a weight of 0: no shape depends on the choice."""
        E = len(self.gate_up_proj)
        dense = weights.new_zeros(len(x), E).scatter(1, indices, weights)  # (N, E)
        gate, up = torch.matmul(x, self.gate_up_proj.mT).chunk(2, -1)  # (E, N, F)
        y = torch.matmul(self.activation(gate) * up, self.down_proj.mT)  # (E, N, C)
        return (y * dense.t()[..., None]).sum(0).to(x.dtype)

    def extra_repr(self) -> str:
        E, C, F_ = self.down_proj.shape
        return f"{C}, {F_}, {E}"


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
        if scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"unknown scoring {scoring!r}; known are softmax, sigmoid")
        self.num_experts, self.num_experts_per_tok = num_experts, num_experts_per_tok
        self.scoring, self.norm_topk_prob = scoring, norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor
        self.n_group, self.topk_group = n_group, topk_group
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.uniform_(self.weight, -(hidden_size**-0.5), hidden_size**-0.5)
        bias = torch.zeros(num_experts) if scoring == "sigmoid" else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        sigmoid = self.scoring == "sigmoid"
        dtype = wide if sigmoid else dtype  # as published
        full = nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
        with full:  # rounded logits send tokens elsewhere
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
        scores = logits.to(wide).sigmoid() if sigmoid else logits.to(wide).softmax(-1)
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_logits(logits)
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
            groups = scores.unflatten(-1, (self.n_group, -1))  # (N, groups, experts of a group)
            best = groups.topk(2).values.sum(-1).topk(self.topk_group).indices
            kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
            scores = groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        return scores.topk(self.num_experts_per_tok).indices

    def extra_repr(self) -> str:
        shape = f"{self.weight.shape[1]}, {self.num_experts}, {self.num_experts_per_tok}"
        return f"{shape}, scoring={self.scoring!r}, norm_topk_prob={self.norm_topk_prob}"


def _check_logits(logits: Tensor) -> None:
    """Raises: ValueError if one is NaN or infinite."""
    finite = logits.isfinite().all(-1)
    if not finite.all():
        rows = (~finite).nonzero()[:, 0].tolist()
        which = f"{len(rows)} of {len(finite)} tokens, the first at row {rows[0]}"
        raise ValueError(f"the router's logits are NaN or infinite for {which}")


def expert_load(indices: Tensor, num_experts: int, *, mask: Tensor | None = None) -> Tensor:
    """How many tokens chose each expert; those where `mask` is 0 do not count.

    Shape: (N, k) [, mask of N numbers] -> (E,) float32
    Raises: ValueError for a mask of another size.
    """
    N, k = indices.shape
    counted = torch.ones(N, device=indices.device) if mask is None else _flat(mask, N).float()
    load = torch.zeros(num_experts, device=indices.device)
    return load.index_add(0, indices.flatten(), counted.repeat_interleave(k))


def _flat(mask: Tensor, rows: int) -> Tensor:
    """Raises: ValueError unless the mask has a number for each row."""
    if mask.numel() != rows:
        raise ValueError(f"a mask of {tuple(mask.shape)} for {rows} tokens")
    return mask.flatten()


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
    counted = torch.ones(N, device=logits.device) if mask is None else _flat(mask, N).float()
    probs = logits.float().softmax(-1)
    if logits.device.type == "cpu":
        _check_logits(logits)
        if not counted.any():
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
        rows = x.reshape(-1, x.shape[-1])
        _, weights, indices = self.gate(rows)
        y = self.experts(rows, indices, weights).view(x.shape)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def active_weights(self) -> int:
        """Numbers of router and experts that one token is multiplied with."""
        E, k = self.gate.num_experts, self.gate.num_experts_per_tok
        return self.gate.weight.numel() + sum(w.numel() for w in self.experts.parameters()) // E * k


class RouterBalance:
    """Keeps the experts of a model in use while it trains: `Trainer(..., balance=...)`.

    `loss` times the load balancing loss is added to the loss of each batch: the mean over layers
    or, with `pooled`, that of all layers' tokens in one heap, as in transformers. Of a step's
    batches, and of several processes, each has a loss by its own load, and the mean of these losses
    counts: not the loss of all tokens together. `rate` is how far the routers' biases move after a
    step, by the load of all its batches and processes. What follows a row's last target is padding
    and does not count.

    Raises: ValueError for a model without routers, numbers that do nothing or are negative, a loss
        for sigmoid scores, a rate for softmax scores; in training, for that of another model.
    """

    def __init__(
        self, model: nn.Module, *, loss: float = 0.0, rate: float = 0.0, pooled: bool = False
    ) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
        if not self.routers:
            raise ValueError(f"{type(model).__name__} has no router: no layer has experts")
        if not (0 <= loss < math.inf and 0 <= rate < math.inf and loss + rate > 0):
            raise ValueError(f"loss {loss}, rate {rate}: both from 0, and one of them above")
        for router in self.routers:
            if loss and router.scoring == "sigmoid":
                raise ValueError(f"loss {loss} for routers with sigmoid scores: they take a rate")
            if rate and router.scoring == "softmax":
                raise ValueError(f"rate {rate} for routers without a bias: they take a loss")
        self.loss, self.rate, self.pooled = loss, rate, pooled
        self.settings = {"balance": {"loss": loss, "rate": rate, "pooled": pooled}}
        self.found: list[Any] = [None] * len(self.routers)  # what each returned last
        for i, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._keep, i))
        self.forget()

    def _keep(self, i: int, _router: nn.Module, _inputs: Any, found: Any) -> None:
        self.found[i] = found

    def __call__(self, targets: Tensor) -> Tensor:
        """The loss of the batch whose forward pass has just ended; its load is counted."""
        if any(found is None for found in self.found):
            raise ValueError("a router saw no batch: is it that of the model in training?")
        counts = targets.sum(-1) != 0 if targets.is_floating_point() else targets != -100
        mask = counts.flip(-1).cumsum(-1).flip(-1).flatten() > 0  # a target is here or follows
        logits = [found[0] for found in self.found]
        if self.rate:
            for i, (scores, _, indices) in enumerate(self.found):
                self.loads[i] += expert_load(indices, scores.shape[-1], mask=mask)
        self.found = [None] * len(self.routers)
        if not self.loss or (mask.device.type == "cpu" and not mask.any()):
            return torch.zeros((), device=targets.device)
        if self.pooled:
            logits, mask = [torch.cat(logits)], mask.repeat(len(logits))
        each = [
            load_balancing_loss(rows, router.num_experts_per_tok, mask=mask)
            for rows, router in zip(logits, self.routers, strict=False)
        ]
        return self.loss * torch.stack(each).mean()

    def after_step(self) -> None:
        """Move the biases."""
        if self.rate:
            if dist.is_available() and dist.is_initialized():
                for load in self.loads:
                    dist.all_reduce(load)
            for router, load in zip(self.routers, self.loads, strict=True):
                update_bias(router, load, rate=self.rate)
        self.forget()

    def forget(self) -> None:
        """As if no batch had been seen since the last step."""
        self.loads: list[Any] = [0.0] * len(self.routers)
