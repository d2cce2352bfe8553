"""Scaled rotary frequencies against transformers, errors by name, and ALiBi against Falcon's."""

import pytest
import torch
from meta_device import MetaDevice
from rope_cases import LLAMA3, SCALINGS, YARN, config_of, draw, theirs
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import minillm.rope
from minillm.config import ModelConfig
from minillm.deeper.attention.rope_scaling import (
    RotaryEmbedding,
    alibi_bias,
    alibi_slopes,
    rope_frequencies,
    yarn_mscale,
)
from minillm.model import CausalLM


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize(("head_dim", "trained"), [(32, 512), (64, 2048), (128, 131072)])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers(name, head_dim, trained, base):
    settings = {"base": base, "scaling": SCALINGS[name], "max_position_embeddings": trained}
    expected, expected_factor = theirs(SCALINGS[name], head_dim, base, trained)
    actual, factor = rope_frequencies(head_dim, **settings)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=5e-7, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_yarn_with_a_small_base_blends_up_to_the_last_pair_as_transformers_does():
    scaling = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 1000}
    expected, _ = theirs(scaling, 64, 100.0, 131072)
    actual, _ = rope_frequencies(64, base=100.0, scaling=scaling, max_position_embeddings=131072)
    torch.testing.assert_close(actual, expected, rtol=5e-7, atol=0)


@pytest.mark.parametrize("length", [1, 511, 512, 513, 2000, 100_000])
def test_dynamic_frequencies_equal_transformers_at_every_length(length):
    scaling = {"rope_type": "dynamic", "factor": 3.0}
    expected, _ = theirs(scaling, 64, 10000.0, 512, length)
    for given_length in (length, torch.tensor(length)):
        settings = {"scaling": scaling, "max_position_embeddings": 512, "length": given_length}
        actual, _ = rope_frequencies(64, **settings)
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=0)


def test_static_ntk_is_the_default_with_a_larger_base():
    """By bloc97, base * factor^(D / (D - 2)): the slowest pair slows by the factor."""
    base = 10000.0 * 4 ** (64 / 62)
    actual, _ = rope_frequencies(64, base=base)
    expected, _ = theirs(None, 64, base, 512)
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=0)
    plain, _ = rope_frequencies(64)
    assert actual[0] == plain[0] == 1
    assert plain[-1] / actual[-1] == pytest.approx(4, rel=1e-5)


def test_a_rope_theta_in_the_dictionary_is_the_base():
    inside, _ = rope_frequencies(32, scaling={"rope_type": "default", "rope_theta": 500000.0})
    assert torch.equal(inside, rope_frequencies(32, base=500000.0)[0])
    for base in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"rope_theta must be positive, not {base}"):
            rope_frequencies(32, base=base)
    with pytest.raises(ValueError, match=r"base 7\.0 contradicts rope_theta 5"):
        rope_frequencies(32, base=7.0, scaling={"rope_type": "default", "rope_theta": 5})


@pytest.mark.parametrize("factor", [1.0, 2.0, 40.0])
@pytest.mark.parametrize("mscale", [0.707, 1.0])
def test_yarn_mscale_is_deepseeks(factor, mscale):
    assert yarn_mscale(factor, mscale) == pytest.approx(yarn_get_mscale(factor, mscale), rel=1e-12)


@pytest.mark.parametrize(
    ("scaling", "trained", "message"),
    [
        ({"rope_type": "longrope"}, 8, r"unknown rope_type 'longrope'; known are default, linear"),
        ({"type": "su"}, 8, r"unknown rope_type 'su'"),
        ({"rope_type": "linear"}, 8, r"'linear' needs factor; given: \{'rope_type': 'linear'\}"),
        ({"rope_type": "dynamic"}, None, r"'dynamic' needs factor, max_position_embeddings"),
        ({"rope_type": "llama3", "factor": 8.0}, 8, r"needs low_freq_factor, high_freq_factor"),
        (LLAMA3, None, r"'llama3' needs original_max_position_embeddings"),
        ({"rope_type": "yarn", "factor": None}, None, r"needs factor, original_max_position"),
        ({**YARN, "short_factor": [1.0]}, 8, r"'yarn' does not know short_factor"),
        (
            {"rope_type": "linear", "factor": 2.0, "mscale": 1.0},
            8,
            r"'linear' does not know mscale",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, 8, r"partial_rotary_factor"),
        ({"rope_type": "linear", "factor": 0.5}, 8, r"factor must be at least 1, got 0\.5"),
        (
            {**LLAMA3, "low_freq_factor": 4.0},
            8,
            r"low_freq_factor 4\.0 must be below high_freq_fac",
        ),
    ],
)
def test_bad_scalings_are_errors_that_name_what_is_wrong(scaling, trained, message):
    for make in (rope_frequencies, RotaryEmbedding):
        with pytest.raises(ValueError, match=message):
            make(16, scaling=scaling, max_position_embeddings=trained)


def test_dynamic_needs_more_than_one_pair():
    with pytest.raises(ValueError, match="head_dim must not be 2"):
        rope_frequencies(
            2, scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=8
        )


@pytest.mark.parametrize("name", SCALINGS)
def test_a_config_with_a_scaling_takes_the_deeper_one(name):
    sizes = {"vocab_size": 7, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    scaling = SCALINGS[name]
    config = ModelConfig(
        **sizes, intermediate_size=8, rope_scaling=scaling, max_position_embeddings=512
    )
    found = CausalLM(config).model.rotary
    assert type(found) is (minillm.rope.RotaryEmbedding if scaling is None else RotaryEmbedding)
    reference = LlamaRotaryEmbedding(config_of(scaling, 16, 10000.0, 512))
    positions = torch.arange(40)[None] + 300
    cos, sin = reference(draw(1), positions)
    torch.testing.assert_close(found(positions).cos, cos, rtol=0, atol=5e-5)
    torch.testing.assert_close(found(positions).sin, sin, rtol=0, atol=5e-5)


# ALiBi


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16, 20, 32, 71, 112])
def test_alibi_is_falcons_up_to_a_constant_of_each_row(num_heads):
    T = 9
    reference = build_alibi_tensor(
        torch.ones(1, T), num_heads, torch.float32
    )  # (H, 1, T), bf16 slopes
    ours = alibi_bias(num_heads, T)
    slopes = alibi_slopes(num_heads)
    torch.testing.assert_close(slopes.bfloat16().float(), reference[:, 0, 1], rtol=1e-2, atol=0)
    causal = torch.ones(T, T).tril().bool()
    theirs = reference.masked_fill(~causal, -torch.inf).softmax(-1)
    rounded = ours / slopes[:, None, None] * slopes.bfloat16().float()[:, None, None]
    actual = rounded.masked_fill(~causal, -torch.inf).softmax(-1)
    torch.testing.assert_close(actual, theirs, rtol=3e-2, atol=1e-4)


def test_alibi_slopes_are_the_published_ones():
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    torch.testing.assert_close(alibi_slopes(16), 2.0 ** (-torch.arange(1, 17) / 2))
    twelve = torch.cat([alibi_slopes(8), alibi_slopes(16)[0::2][:4]])
    assert torch.equal(alibi_slopes(12), twelve)


def test_alibi_aligns_queries_to_the_end_of_the_keys():
    full = alibi_bias(4, 7)
    assert full.shape == (4, 7, 7)
    assert torch.equal(alibi_bias(4, 2, 7), full[:, -2:])
    assert torch.equal(full.diagonal(dim1=1, dim2=2), torch.zeros(4, 7))
    assert full[0, 6, 4] == -2 * alibi_slopes(4)[0]


def test_alibi_errors():
    with pytest.raises(ValueError, match="3 queries cannot be the last of 2 keys"):
        alibi_bias(4, 3, 2)
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        alibi_slopes(0)


def test_alibi_and_frequencies_on_a_device():
    with MetaDevice():
        assert alibi_bias(6, 2, 5, device="meta").is_meta
        for scaling in SCALINGS.values():
            settings = {"scaling": scaling, "max_position_embeddings": 512, "device": "meta"}
            for length in (None, 600, torch.empty((), dtype=torch.long, device="meta")):
                frequencies, _ = rope_frequencies(16, **settings, length=length)
                assert frequencies.is_meta and frequencies.dtype == torch.float32
