"""multihead: equal to transformers' attention modules and torch's own, cached and uncached."""

import math
from functools import partial

import pytest
import torch
from attention_layers import (
    CACHES,
    CLOSE,
    STEPS,
    B,
    C,
    D,
    G,
    H,
    HalfSplit,
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
    hugging_face,
    inputs,
    randomize,
)
from torch import nn

from minillm.heads import MultiHeadAttention, merge_heads, split_heads
from minillm.layers import RMSNorm

KINDS = ["llama", "llama_bias", "llama_head_dim", "qwen2", "qwen3", "mistral"]
ALL = [pytest.param(partial(hugging_face, kind), id=kind) for kind in KINDS]


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


def test_mistral_sliding_window():
    """The window is in the mask alone: ours equals theirs with the mask they make."""
    from transformers.masking_utils import create_sliding_window_causal_mask

    modules, x = hugging_face("mistral"), inputs()
    config = modules[0].config
    theirs = create_sliding_window_causal_mask(
        config=config,
        inputs_embeds=x,
        attention_mask=torch.ones(B, T, dtype=torch.long),
        past_key_values=None,
        position_ids=torch.arange(T)[None],
    )
    position = torch.arange(T)
    age = position[:, None] - position
    mask = ((age >= 0) & (age < config.sliding_window))[None, None]
    assert torch.equal(mask.expand_as(theirs), theirs == 0)
    got, expected = both(modules, x, mask, position[None])
    torch.testing.assert_close(got, expected, **CLOSE)
    assert not torch.allclose(
        got, modules[1](x, rope=HalfSplit(*modules[2](x, position[None])), is_causal=True)
    )


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_multihead_attention(heads, causal):
    ours, x = randomize(MultiHeadAttention(C, heads, bias=True, out_bias=True)), inputs()
    theirs = nn.MultiheadAttention(C, heads, batch_first=True).eval()
    for name in ("weight", "bias"):
        stacked = torch.cat([getattr(p, name) for p in (ours.q_proj, ours.k_proj, ours.v_proj)])
        getattr(theirs, f"in_proj_{name}").data = stacked.data
    theirs.out_proj.load_state_dict(ours.o_proj.state_dict())
    forbidden = torch.ones(T, T).triu(1).bool() if causal else None
    expected, _ = theirs(x, x, x, attn_mask=forbidden, need_weights=False)
    torch.testing.assert_close(ours(x, is_causal=causal), expected, **CLOSE)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_shared_heads_equal_repeated_heads(kv_heads):
    """GQA is MHA whose key and value heads are repeated: head h reads group h // (H / G)."""
    shared, x = randomize(MultiHeadAttention(C, H, num_kv_heads=kv_heads, head_dim=D)), inputs()
    full = MultiHeadAttention(C, H, head_dim=D)
    weights = shared.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        weights[name] = (
            weights[name].view(kv_heads, D, C).repeat_interleave(H // kv_heads, 0).view(H * D, C)
        )
    full.load_state_dict(weights)
    torch.testing.assert_close(shared(x, is_causal=True), full(x, is_causal=True), **CLOSE)


def test_scale_is_a_factor_on_queries():
    x = inputs()
    given = randomize(MultiHeadAttention(C, H, scale=0.1))
    usual = MultiHeadAttention(C, H)
    weights = given.state_dict()
    weights["q_proj.weight"] = weights["q_proj.weight"] * 0.1 * math.sqrt(C // H)
    usual.load_state_dict(weights)
    torch.testing.assert_close(given(x), usual(x), **CLOSE)


def test_is_causal_equals_mask():
    check_is_causal_equals_mask(MultiHeadAttention(C, H, num_kv_heads=G))


def test_gradients_reach_every_parameter():
    module = MultiHeadAttention(C, H, num_kv_heads=G, bias=True, qk_norm=nn.RMSNorm)
    check_gradients_reach_every_parameter(module)


def test_dropout_only_while_training():
    module, x = MultiHeadAttention(C, H, dropout=0.5), inputs()
    torch.manual_seed(0)
    noisy = module(x)
    assert not torch.allclose(noisy, module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    plain = MultiHeadAttention(C, H)
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), plain(x), **CLOSE)


def test_split_and_merge_heads(generator):
    x = torch.randn(B, T, C, generator=generator)
    heads = split_heads(x, H)
    assert heads.shape == (B, H, T, C // H)
    assert heads.data_ptr() == x.data_ptr()  # a view
    assert torch.equal(heads[:, 2], x[:, :, 2 * C // H : 3 * C // H])
    assert torch.equal(merge_heads(heads), x)
    with pytest.raises(ValueError, match="48 features cannot be cut into 5"):
        split_heads(x, 5)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # nn.RMSNorm says that it is not fused
@pytest.mark.parametrize("norm", [nn.RMSNorm, RMSNorm], ids=["torch", "ours"])
def test_autocast(norm):
    check_autocast(MultiHeadAttention(C, H, num_kv_heads=G, qk_norm=norm), {})


@pytest.mark.parametrize("shape", [(2, 0, C), (0, 5, C)], ids=["no-positions", "no-texts"])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_in_nothing_out(shape, masked):
    x, (_, T, _) = torch.ones(shape), shape
    mask = torch.ones(T, T, dtype=torch.bool) if masked else None
    for is_causal in (False, True):
        module = MultiHeadAttention(C, H, num_kv_heads=G)
        assert module(x, is_causal=is_causal, mask=mask).shape == shape


def test_compiled_decoding_is_one_graph():
    check_compiled_decoding(MultiHeadAttention(C, H, num_kv_heads=G), (G, C // H, C // H))


@pytest.mark.parametrize(
    ("module", "per_token"),
    [
        (MultiHeadAttention(C, H), 2 * C),
        (MultiHeadAttention(C, H, num_kv_heads=G), 2 * G * C // H),
        (MultiHeadAttention(C, H, num_kv_heads=1), 2 * C // H),
    ],
    ids=["mha", "gqa", "mqa"],
)
def test_cached_values_per_token(module, per_token):
    assert cached_per_token(module) == per_token


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((48, 6), dict(num_kv_heads=4), "6 query heads cannot share 4 key heads"),
        ((48, 6), dict(num_kv_heads=0), "num_kv_heads must be at least 1, not 0"),
        ((48, 6), dict(num_kv_heads=12), "6 query heads cannot share 12 key heads"),
        ((48, 5), dict(), "hidden_size=48 is no multiple of num_heads=5"),
        ((48, 0), dict(), "num_heads must be at least 1, not 0"),
        ((48, 6), dict(dropout=1.0), "dropout must lie in"),
    ],
)
def test_sizes_that_do_not_fit(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(*arguments, **settings)


def test_input_that_does_not_fit():
    check_input_that_does_not_fit(MultiHeadAttention(C, H))


@pytest.mark.parametrize("groups", [H, G, 1])
def test_on_a_device(groups):
    module = MultiHeadAttention(C, H, num_kv_heads=groups, bias=True, qk_norm=RMSNorm)
    check_on_a_device(module, (groups, C // H, C // H, C // H))
