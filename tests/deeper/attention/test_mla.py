"""mla: equal to transformers' DeepSeek-V3, cached and uncached; naive and absorbed agree."""

from functools import partial

import pytest
import torch
from attention_layers import (
    CACHES,
    CLOSE,
    MLA,
    STEPS,
    B,
    C,
    Growing,
    H,
    T,
    both,
    cached_per_token,
    check_autocast,
    check_cached_steps,
    check_cached_steps_with_our_rope_masks_and_caches,
    check_compiled_decoding,
    check_gradients_reach_every_parameter,
    check_input_that_does_not_fit,
    check_is_causal_equals_mask,
    check_left_padding,
    check_on_a_device,
    check_random_masks,
    deepseek,
    inputs,
    random_mask,
    randomize,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from minillm.deeper.attention.mla import (
    MultiHeadLatentAttention,
    latent_attention_absorbed,
    latent_attention_naive,
)
from minillm.layers import RMSNorm

LATENT = [(q_rank, yarn) for q_rank in (None, 20) for yarn in (False, True)]
ALL = [
    pytest.param(partial(deepseek, *setting), id=f"deepseek-{setting[0]}-yarn={setting[1]}")
    for setting in LATENT
]


@pytest.mark.parametrize("make", ALL)
def test_transformers_random_masks(make):
    check_random_masks(make)


@pytest.mark.parametrize("make", ALL)
def test_transformers_left_padding(make):
    check_left_padding(make)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("steps", STEPS)
def test_transformers_cached_steps(make, steps):
    check_cached_steps(make, STEPS[steps])


@pytest.mark.parametrize("cache_kind", CACHES)
@pytest.mark.parametrize("make", ALL)
def test_transformers_cached_steps_with_our_rope_masks_and_caches(make, cache_kind):
    check_cached_steps_with_our_rope_masks_and_caches(make, cache_kind)


def test_deepseek_half_split_layout():
    modules, x = deepseek(20, True, interleave=False), inputs()
    got, expected = both(modules, x, random_mask((B, 1, T, T)), torch.arange(T)[None])
    torch.testing.assert_close(got, expected, **CLOSE)


def test_yarn_scale_matters():
    """The parity test above would notice a forgotten factor."""
    theirs, ours, rotary, rotation = deepseek(20, True)
    ours.scale = (MLA["qk_nope_head_dim"] + MLA["qk_rope_head_dim"]) ** -0.5
    got, expected = both(
        (theirs, ours, rotary, rotation), inputs(), random_mask((B, 1, T, T)), torch.arange(T)[None]
    )
    assert (got - expected).abs().max() > 1e-3


def latent_parts(queries, keys, dtype=torch.float64, batch=2, heads=4, seed=3):
    R, N, P, V = 16, 6, 4, 5
    shapes = [
        (batch, heads, queries, N + P),
        (batch, 1, keys, R),
        (batch, 1, keys, P),
    ]
    generator = torch.Generator().manual_seed(seed)
    shapes.append((heads * (N + V), R))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (4, 9), (9, 9)])
def test_absorbed_equals_naive(queries, keys, generator):
    parts = latent_parts(queries, keys)
    for shape in (
        (queries, keys),
        (2, 1, queries, keys),
        (2, 4, queries, keys),
        (1, 4, queries, keys),
        (1, keys),
        (2, 1, 1, keys),
    ):
        mask = torch.rand(shape, generator=generator) < 0.6  # some rows fully masked: zeros in both
        for settings in (
            dict(),
            dict(mask=mask),
            dict(is_causal=True),
            dict(mask=mask, is_causal=True),
        ):
            naive = latent_attention_naive(*parts, scale=0.3, **settings)
            absorbed = latent_attention_absorbed(*parts, scale=0.3, **settings)
            torch.testing.assert_close(absorbed, naive, atol=1e-12, rtol=1e-12)


@given(
    sizes=st.tuples(*[st.integers(1, 5)] * 6),
    extra=st.integers(0, 5),
    how=st.sampled_from(["nothing", "mask", "causal", "both"]),
    seed=st.integers(0, 99),
)
def test_absorbed_equals_naive_for_any_sizes(sizes, extra, how, seed):
    batch, heads, queries, N, P, V = sizes
    R, keys = N + extra, queries + extra
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, queries, N + P), (batch, 1, keys, R), (batch, 1, keys, P)
    parts = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in (*shapes, (heads * (N + V), R))
    ]
    settings = {"is_causal": how in ("causal", "both")}
    if how in ("mask", "both"):
        settings["mask"] = torch.rand(batch, 1, queries, keys, generator=generator) < 0.6
    naive = latent_attention_naive(*parts, scale=0.5, **settings)
    absorbed = latent_attention_absorbed(*parts, scale=0.5, **settings)
    assert naive.shape == (batch, heads, queries, V)
    torch.testing.assert_close(absorbed, naive, atol=1e-11, rtol=1e-11)


def test_absorbed_gradients_equal_naive_gradients(generator):
    parts = [part.requires_grad_() for part in latent_parts(4, 9)]
    mask = torch.rand(2, 1, 4, 9, generator=generator) < 0.7
    naive, absorbed = (
        torch.autograd.grad(attend(*parts, scale=0.3, mask=mask).square().sum(), parts)
        for attend in (latent_attention_naive, latent_attention_absorbed)
    )
    for got, expected in zip(absorbed, naive, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)


def test_absorbed_in_bfloat16_is_as_good_as_naive():
    parts = latent_parts(1, 200, dtype=torch.float32)
    exact = latent_attention_naive(*(part.bfloat16().double() for part in parts), scale=0.3)
    naive, absorbed = (
        (attend(*(part.bfloat16() for part in parts), scale=0.3) - exact).norm() / exact.norm()
        for attend in (latent_attention_naive, latent_attention_absorbed)
    )
    assert naive < 0.02 and absorbed < 0.02


@pytest.mark.parametrize("q_lora_rank", [None, 20])
def test_absorb_is_a_choice_of_cost_not_of_numbers(q_lora_rank):
    module, x = randomize(MultiHeadLatentAttention(C, H, **MLA, q_lora_rank=q_lora_rank)), inputs()
    mask = random_mask((B, 1, T, T))
    expected = module(x, mask=mask, absorb=False)
    torch.testing.assert_close(module(x, mask=mask, absorb=True), expected, **CLOSE)
    torch.testing.assert_close(module(x, mask=mask), expected, rtol=0, atol=0)
    module.absorb = True
    torch.testing.assert_close(
        module(x, mask=mask), module(x, mask=mask, absorb=True), rtol=0, atol=0
    )
    torch.testing.assert_close(module(x, mask=mask, absorb=False), expected, rtol=0, atol=0)


def test_is_causal_equals_mask():
    check_is_causal_equals_mask(MultiHeadLatentAttention(C, H, **MLA))


def test_gradients_reach_every_parameter():
    check_gradients_reach_every_parameter(MultiHeadLatentAttention(C, H, **MLA, q_lora_rank=20))


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # nn.RMSNorm says that it is not fused
@pytest.mark.parametrize("norm", [nn.RMSNorm, RMSNorm], ids=["torch", "ours"])
@pytest.mark.parametrize("absorb", [False, True])
def test_autocast(absorb, norm):
    module = MultiHeadLatentAttention(C, H, **MLA, q_lora_rank=20, norm=norm)
    check_autocast(module, {"absorb": absorb})


@pytest.mark.parametrize("shape", [(2, 0, C), (0, 5, C)], ids=["no-positions", "no-texts"])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_in_nothing_out(shape, masked):
    x, (_, T, _) = torch.ones(shape), shape
    mask = torch.ones(T, T, dtype=torch.bool) if masked else None
    for is_causal in (False, True):
        for absorb in (False, True):
            module = MultiHeadLatentAttention(C, H, **MLA)
            assert module(x, is_causal=is_causal, mask=mask, absorb=absorb).shape == shape


class Largest(TorchDispatchMode):
    """Looks at every tensor that any operation returns: the most elements per key position."""

    def __init__(self, keys):
        super().__init__()
        self.keys, self.per_key = keys, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() % self.keys == 0:
                self.per_key = max(self.per_key, tensor.numel() // self.keys)
        return result


def elements_per_key(module, length, absorb, batch=2):
    """The largest tensor made in one decoding step over `length` keys, per key and row.

    `length` is a prime that no weight shares, so that tensors over the keys can be told by size.
    """
    cache, x = Growing(), inputs(batch=batch, length=length)
    with torch.no_grad():
        module(x[:, :-1], is_causal=True, cache=cache)
        with Largest(length) as seen:
            module(
                x[:, -1:], cache=cache, absorb=absorb, mask=torch.ones(batch, 1, 1, length).bool()
            )
    return seen.per_key / batch


def test_no_key_or_value_per_head_while_decoding_absorbed():
    R = MLA["kv_lora_rank"]
    module = randomize(MultiHeadLatentAttention(C, H, **MLA))
    for absorb in (True, None):  # None: what a warm cache chooses by itself
        assert elements_per_key(module, 101, absorb=absorb) <= max(R, H)  # the latent, or scores
    expanded = MLA["qk_nope_head_dim"] + MLA["v_head_dim"]
    naive = elements_per_key(module, 101, absorb=False)
    assert naive >= H * expanded > max(R, H)  # the naive form does make them


def test_compiled_decoding_is_one_graph():
    check_compiled_decoding(MultiHeadLatentAttention(C, H, **MLA), (1, 24, 8))


def test_cached_values_per_token():
    assert cached_per_token(MultiHeadLatentAttention(C, H, **MLA)) == 24 + 8


def test_latent_is_cached_normalised_and_key_rotated():
    _, ours, rotary, rotation = deepseek(20, False)
    x, cache = inputs(), Growing()
    rope = rotation(*rotary(x, torch.arange(T)[None]))
    ours(x, rope=rope, cache=cache, is_causal=True)
    latent, k_pe = ours.kv_a_proj_with_mqa(x).split([24, 8], dim=-1)
    torch.testing.assert_close(cache.k, ours.kv_a_layernorm(latent)[:, None], **CLOSE)
    torch.testing.assert_close(cache.v, rope(k_pe[:, None]), **CLOSE)


def test_absorbing_pays_counts_multiplications():
    """The rule equals torch's own count of the two forms' products."""
    from torch.utils.flop_counter import FlopCounterMode

    module = MultiHeadLatentAttention(C, H, **MLA)
    R, N, P, V = 24, 12, 8, 10
    for queries, keys in ((1, 1), (1, 2), (1, 50), (5, 50), (30, 50), (50, 50)):
        parts = [
            torch.randn(1, H, queries, N + P, device="meta"),
            torch.randn(1, 1, keys, R, device="meta"),
            torch.randn(1, 1, keys, P, device="meta"),
            torch.randn(H * (N + V), R, device="meta"),
        ]
        flops = []
        for attend in (latent_attention_naive, latent_attention_absorbed):
            with FlopCounterMode(display=False) as counter:
                attend(*parts, scale=1.0)
            flops.append(counter.get_total_flops())
        assert module.absorbing_pays(queries, keys) == (flops[1] < flops[0])


def test_deepseek_v3_sizes():
    """Real sizes on the meta device: what the notebook says about parameters and cache."""
    with torch.device("meta"):
        module = MultiHeadLatentAttention(
            7168,
            128,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            q_lora_rank=1536,
        )
        cache = Growing()
        module(torch.randn(1, 10, 7168), cache=cache, is_causal=True)
        theirs = DeepseekV3Attention(DeepseekV3Config(), layer_idx=0)
    assert (cache.k.numel() + cache.v.numel()) / 10 == 576
    assert {k: v.shape for k, v in module.state_dict().items()} == {
        k: v.shape for k, v in theirs.state_dict().items()
    }


def test_latent_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="kv_lora_rank must be at least 1, not 0"):
        MultiHeadLatentAttention(C, H, **(MLA | dict(kv_lora_rank=0)))
    with pytest.raises(ValueError, match="q_lora_rank must be at least 1, not -2"):
        MultiHeadLatentAttention(C, H, **MLA, q_lora_rank=-2)


def test_input_that_does_not_fit():
    check_input_that_does_not_fit(MultiHeadLatentAttention(C, H, **MLA))


@pytest.mark.parametrize("q_lora_rank", [None, 20])
@pytest.mark.parametrize("absorb", [False, True, None])
def test_on_a_device(absorb, q_lora_rank):
    module = MultiHeadLatentAttention(C, H, **MLA, q_lora_rank=q_lora_rank, norm=RMSNorm)
    check_on_a_device(module, (1, 24, 8, 8), absorb=absorb)
