"""Routers, experts and their loss against the classes of transformers; loads, bias, bad input."""

import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import (
    MixtralSparseMoeBlock,
    load_balancing_loss_func,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from minillm.beyond.experts.grouped import GroupedLinear, every_expert
from minillm.beyond.experts.moe import (
    Experts,
    SparseMoeBlock,
    TopKRouter,
    expert_load,
    load_balancing_loss,
    update_bias,
)
from minillm.layers import GatedMLP


def mixtral(hidden, size, experts, chosen, act="silu"):
    config = transformers.MixtralConfig(
        hidden_size=hidden, intermediate_size=size, num_local_experts=experts,
        num_experts_per_tok=chosen, hidden_act=act,
    )  # fmt: skip
    ours = SparseMoeBlock(hidden, size, experts, chosen, activation=act)
    return MixtralSparseMoeBlock(config), ours


def qwen(hidden, size, experts, chosen, norm):
    config = transformers.Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=size, num_experts=experts,
        num_experts_per_tok=chosen, norm_topk_prob=norm,
    )  # fmt: skip
    ours = SparseMoeBlock(hidden, size, experts, chosen, norm_topk_prob=norm)
    return Qwen3MoeSparseMoeBlock(config), ours


def deepseek(hidden, size, experts, chosen, shared=1, norm=True, scale=2.5, groups=(1, 1)):
    options = {"norm_topk_prob": norm, "routed_scaling_factor": scale}
    options |= {"n_group": groups[0], "topk_group": groups[1]}
    config = transformers.DeepseekV3Config(
        hidden_size=hidden, moe_intermediate_size=size, n_routed_experts=experts,
        num_experts_per_tok=chosen, n_shared_experts=shared, **options,
    )  # fmt: skip
    ours = SparseMoeBlock(
        hidden, size, experts, chosen, shared_intermediate_size=shared * size, scoring="sigmoid",
        **options,
    )  # fmt: skip
    return DeepseekV3MoE(config), ours


CASES = {
    "mixtral": lambda: mixtral(24, 20, 8, 2),
    "mixtral-one": lambda: mixtral(24, 20, 3, 1),
    "mixtral-all-gelu": lambda: mixtral(17, 9, 5, 5, "gelu"),
    "mixtral-one-of-one": lambda: mixtral(8, 6, 1, 1),
    "qwen-normalised": lambda: qwen(24, 11, 7, 3, True),
    "qwen-raw": lambda: qwen(24, 11, 7, 3, False),
    "qwen-raw-one": lambda: qwen(24, 11, 4, 1, False),
    "qwen-raw-all": lambda: qwen(13, 32, 6, 6, False),
    "qwen-many": lambda: qwen(16, 4, 64, 8, True),
    "deepseek": lambda: deepseek(24, 20, 8, 2),
    "deepseek-groups": lambda: deepseek(24, 12, 12, 3, groups=(4, 2), scale=1.0),
    "deepseek-one-group": lambda: deepseek(24, 12, 12, 4, groups=(3, 1), shared=2),
    "deepseek-all-groups": lambda: deepseek(24, 12, 8, 5, groups=(2, 2), norm=False),
    "deepseek-raw-one": lambda: deepseek(10, 7, 6, 1, norm=False, scale=0.7, shared=3),
    "deepseek-all": lambda: deepseek(10, 7, 4, 4, groups=(2, 2)),
    "deepseek-nothing-shared": lambda: deepseek(10, 7, 4, 2, shared=0),
}


@torch.no_grad()
def alike(name):
    """A block of transformers and ours with the same random weights, biases that matter too."""
    theirs, ours = CASES[name]()
    generator = torch.Generator().manual_seed(3)
    state = {k: v for k, v in theirs.state_dict().items() if v.numel()}
    for key, tensor in state.items():
        size = 0.3 if "bias" in key else tensor.shape[-1] ** -0.5
        tensor.copy_(size * torch.randn(tensor.shape, generator=generator))
    ours.load_state_dict(state)
    return theirs, ours


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients_are_those_of_transformers(name):
    theirs, ours = alike(name)
    generator = torch.Generator().manual_seed(4)
    size = ours.gate.weight.shape[1]
    x = torch.randn(3, 7, size, generator=generator)
    toward = torch.randn(3, 7, size, generator=generator)
    found = []
    for block in (theirs, ours):
        inputs = x.clone().requires_grad_()
        y = block(inputs)
        (y * toward).sum().backward()
        found.append([y, inputs.grad, *(p.grad for p in ours_order(block, ours))])
    for expected, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def ours_order(block, ours):
    return [block.get_parameter(name) for name, _ in ours.named_parameters()]


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_weights_and_choices_are_those_of_transformers(name):
    theirs, ours = alike(name)
    x = torch.randn(40, ours.gate.weight.shape[1], generator=torch.Generator().manual_seed(5))
    expected, mine = theirs.gate(x), ours.gate(x)
    torch.testing.assert_close(mine[0], expected[0], atol=1e-6, rtol=1e-6)
    dense = [torch.zeros_like(r[0]).scatter(1, r[2], r[1].float()) for r in (expected, mine)]
    torch.testing.assert_close(dense[1], dense[0], atol=1e-6, rtol=1e-6)
    assert torch.equal(mine[2].sort().values, expected[2].sort().values)


@pytest.mark.parametrize("name", ["mixtral", "qwen-raw", "deepseek-groups"])
@torch.no_grad()
def test_all_experts_on_all_tokens_give_the_same(name):
    _, ours = alike(name)
    x = torch.randn(9, ours.gate.weight.shape[1])
    _, weights, indices = ours.gate(x)
    grouped, every = (
        ours.experts(x, indices, weights),
        every_expert(x, indices, weights, *ours.experts.parameters(), ours.experts.activation),
    )
    torch.testing.assert_close(grouped, every, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("counts", [[2, 0, 3], [5, 0, 0], [0, 0, 0]])
def test_a_grouped_product_is_the_products_of_its_groups(counts):
    generator = torch.Generator().manual_seed(0)
    rows, size = sum(counts), {"generator": generator, "dtype": torch.float64}
    x = torch.randn(rows, 4, **size, requires_grad=True)
    weight = torch.randn(3, 6, 4, **size, requires_grad=True)
    found = GroupedLinear.apply(x, weight, counts)
    parts = zip(x.split(counts), weight, strict=True)
    torch.testing.assert_close(found, torch.cat([a @ w.T for a, w in parts]))
    assert torch.autograd.gradcheck(lambda a, w: GroupedLinear.apply(a, w, counts), (x, weight))


@torch.no_grad()
def test_each_token_goes_its_own_way():
    """The rows of a batch do not see each other: order and company change nothing."""
    _, ours = alike("deepseek-groups")
    x = torch.randn(11, 24)
    alone = torch.cat([ours(row[None]) for row in x])
    torch.testing.assert_close(ours(x), alone, atol=1e-6, rtol=1e-5)
    order = torch.randperm(11)
    torch.testing.assert_close(ours(x[order]), alone[order], atol=1e-6, rtol=1e-5)


def test_experts_that_nobody_chose_get_no_gradient_and_no_tokens_are_no_error():
    block = SparseMoeBlock(8, 6, 5, 1)
    with torch.no_grad():
        block.gate.weight.zero_()[3] = 1.0
    x = torch.rand(4, 8)  # positive: expert 3 for all
    block(x).sum().backward()
    moved = block.experts.down_proj.grad.abs().sum((1, 2)) > 0
    assert moved.tolist() == [False, False, False, True, False]
    assert block(torch.empty(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("norm", [True, False])
def test_one_choice_renormalised_leaves_the_router_without_gradient(norm):
    torch.manual_seed(0)
    block = SparseMoeBlock(16, 8, 4, 1, norm_topk_prob=norm)
    block(torch.randn(32, 16)).square().mean().backward()
    size = block.gate.weight.grad.norm().item()
    assert size < 1e-7 if norm else size > 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_sixteen_bits_stay_sixteen_bits(dtype):
    for name in ("mixtral", "qwen-raw", "deepseek-groups"):
        _, ours = alike(name)
        x = torch.randn(9, 24)
        half = ours.to(dtype)(x.to(dtype))
        assert half.dtype == dtype and half.isfinite().all()
        assert ours.gate(x.to(dtype))[1].dtype == torch.float32


@torch.no_grad()
def test_autocast_leaves_the_choice_alone():
    _, ours = alike("mixtral")
    x = torch.randn(200, 24)
    with torch.autocast("cpu", torch.bfloat16):
        found, y = ours.gate(x), ours(x)
    assert torch.equal(found[0], ours.gate(x)[0])
    torch.testing.assert_close(y, ours(x), atol=2e-2, rtol=2e-2)


# ---- the loss ----


def masks(rows):
    return st.lists(st.booleans(), min_size=rows, max_size=rows).filter(any)


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (4, 1), (5, 5), (3, 2)])
def test_the_loss_is_that_of_transformers(experts, chosen):
    logits = torch.randn(30, experts, requires_grad=True)
    mask = (torch.arange(30) % 5 != 0).long()
    for given_mask in (None, mask.view(3, 10)):
        expected = load_balancing_loss_func((logits,), experts, chosen, given_mask)
        mine = load_balancing_loss(logits, chosen, mask=given_mask)
        torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-6)
        (theirs,) = torch.autograd.grad(expected, logits)
        (ours,) = torch.autograd.grad(mine, logits)
        torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-5)


def test_several_layers_at_once_are_one_long_layer_for_transformers():
    layers = tuple(torch.randn(12, 6) for _ in range(3))
    expected = load_balancing_loss_func(layers, 6, 2)
    torch.testing.assert_close(load_balancing_loss(torch.cat(layers), 2), expected)


def test_balance_costs_k_and_collapse_costs_all_experts():
    for chosen in (1, 2, 3):
        even = torch.eye(6).repeat(10, 1) + torch.eye(6).roll(1, 1).repeat(10, 1) * 0.9
        even = (even + torch.eye(6).roll(2, 1).repeat(10, 1) * 0.8) * 1e-3
        assert abs(load_balancing_loss(even, chosen).item() - chosen) < 1e-3
    one = torch.zeros(50, 6).index_fill(1, torch.tensor([2]), 30.0)
    assert abs(load_balancing_loss(one, 1).item() - 6) < 1e-4


@given(mask=masks(8))
def test_tokens_without_a_mark_do_not_count(mask):
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    kept = torch.tensor(mask)
    one, other = load_balancing_loss(logits, 2, mask=kept), load_balancing_loss(logits[kept], 2)
    torch.testing.assert_close(one, other)
    indices = logits.topk(2).indices
    load = expert_load(indices, 4, mask=kept)
    assert load.tolist() == indices[kept].flatten().bincount(minlength=4).tolist()


# ---- the bias ----


def test_the_bias_moves_against_the_load_and_balances():
    torch.manual_seed(0)
    router = TopKRouter(16, 8, 2, scoring="sigmoid")
    update_bias(router, torch.tensor([5.0, 0, 2, 2, 2, 2, 2, 1]), rate=0.5)
    assert router.e_score_correction_bias.tolist() == [-0.5, 0.5, 0, 0, 0, 0, 0, 0.5]
    router.e_score_correction_bias.zero_()
    x = torch.randn(512, 16) + torch.randn(16)  # a common direction: some experts win
    before = expert_load(router(x)[2], 8)
    for _ in range(300):
        update_bias(router, expert_load(router(x)[2], 8), rate=0.01)
    after = expert_load(router(x)[2], 8)
    assert before.max() > 300 and after.max() < 150 and after.sum() == before.sum() == 1024


@torch.no_grad()
def test_the_bias_selects_and_does_not_weigh():
    router = TopKRouter(4, 3, 1, scoring="sigmoid", norm_topk_prob=False)
    x = torch.randn(5, 4)
    router.e_score_correction_bias[1] = 10.0
    logits, weights, indices = router(x)
    assert indices.flatten().tolist() == [1] * 5
    torch.testing.assert_close(weights[:, 0], logits[:, 1].sigmoid())
    assert "e_score_correction_bias" not in dict(router.named_parameters())


# ---- bad input ----


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopKRouter(8, 4, 5), "num_experts_per_tok 5 of num_experts 4"),
        (lambda: TopKRouter(8, 4, 0), "num_experts_per_tok 0 of num_experts 4"),
        (lambda: TopKRouter(8, 0, 1), "num_experts_per_tok 1 of num_experts 0"),
        (lambda: TopKRouter(8, 8, 2, n_group=3), "topk_group 1 of n_group 3, for 8 experts"),
        (lambda: TopKRouter(8, 8, 2, n_group=2, topk_group=3), "topk_group 3 of n_group 2"),
        (lambda: TopKRouter(8, 8, 2, n_group=8, topk_group=4), "n_group 8 of 8 experts"),
        (lambda: TopKRouter(8, 8, 5, n_group=4, topk_group=2), "5: topk_group 2 .* hold 4 experts"),
        (lambda: TopKRouter(8, 8, 2, scoring="tanh"), "scoring 'tanh' is unknown"),
        (lambda: Experts(8, 6, 0), "num_experts must be at least 1, not 0"),
        (lambda: Experts(8, 0, 4), "intermediate_size must be at least 1, not 0"),
        (lambda: Experts(8, 6, 2, activation="tanh"), "activation 'tanh' is unknown"),
        (lambda: SparseMoeBlock(8, 6, 2, 3), "num_experts_per_tok 3 of num_experts 2"),
        (lambda: load_balancing_loss(torch.zeros(4, 2), 3), "num_experts_per_tok 3 of"),
        (lambda: load_balancing_loss(torch.zeros(4, 2), 1, mask=torch.ones(3)), r"\(3,\) for 4"),
        (lambda: load_balancing_loss(torch.zeros(4, 2), 1, mask=torch.zeros(4)), "none of 4"),
        (lambda: load_balancing_loss(torch.full((4, 2), torch.nan), 1), "NaN .* 4 of 4 tokens"),
        (lambda: expert_load(torch.zeros(4, 2).long(), 2, mask=torch.ones(5)), r"\(5,\) for 4"),
        (lambda: update_bias(TopKRouter(8, 4, 1), torch.ones(4)), "softmax scores has no bias"),
        (
            lambda: update_bias(TopKRouter(8, 4, 1, scoring="sigmoid"), torch.ones(3)),
            r"load \[1.0, 1.0, 1.0\] .* for 4 experts",
        ),
    ],
)
def test_what_cannot_be_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_nan_name_the_token(scoring, wrong):
    router = TopKRouter(4, 3, 2, scoring=scoring)
    x = torch.randn(6, 4)
    x[2, 0] = x[4, 1] = wrong
    with pytest.raises(ValueError, match=r"router's logits .* 2 of 6 tokens, the first at row 2"):
        router(x)
    with pytest.raises(ValueError, match="6 of 6 tokens, the first at row 0"):
        SparseMoeBlock(4, 6, 3, 1, scoring=scoring)(torch.full((2, 3, 4), float("nan")))


def test_initial_weights_are_those_of_linear_layers_in_size():
    torch.manual_seed(0)
    block = SparseMoeBlock(64, 48, 4, 2, shared_intermediate_size=48)
    dense = GatedMLP(64, 48)
    for mine, linear in ((block.experts.down_proj, dense.down_proj.weight),
                         (block.experts.gate_up_proj, dense.up_proj.weight),
                         (block.gate.weight, dense.up_proj.weight)):  # fmt: skip
        assert abs(mine.std() / linear.std() - 1) < 0.1
    assert block.active_weights() == 4 * 64 + 2 * 3 * 64 * 48
    assert re.search(r"Experts\(64, 48, 4\)", repr(block)) and F.silu is block.experts.activation
