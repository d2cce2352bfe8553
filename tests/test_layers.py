"""Norms, activations and feed-forward blocks against torch, transformers and formulas."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from meta_device import MetaDevice
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.falcon.configuration_falcon import FalconConfig
from transformers.models.falcon.modeling_falcon import FalconMLP
from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from minillm.layers import ACTIVATIONS, MLP, GatedMLP, LayerNorm, RMSNorm, gelu_sigmoid

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def close(actual, expected, dtype=None):
    tolerance = TOLERANCE[dtype or actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def draw(*shape, dtype=torch.float32, seed=0, scale=1.0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * scale).to(dtype)


# Norms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_equals_torch(dtype, bias):
    ours = LayerNorm(24, eps=1e-4, bias=bias).to(dtype)
    theirs = nn.LayerNorm(24, eps=1e-4, bias=bias).to(dtype)
    for i, p in enumerate(ours.parameters()):
        p.data = draw(24, dtype=dtype, seed=i)
    theirs.load_state_dict(ours.state_dict())
    x = draw(3, 5, 24, dtype=dtype, seed=9, scale=7)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_is_its_formula(dtype):
    norm = LayerNorm(24).to(dtype)
    norm.weight.data, norm.bias.data = draw(24, dtype=dtype, seed=1), draw(24, dtype=dtype, seed=2)
    x = draw(3, 24, dtype=dtype, scale=4)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)  # biased: divided by C, not C - 1
    expected = centred / (variance + norm.eps).sqrt() * norm.weight.double() + norm.bias.double()
    close(norm(x), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_equals_torch_and_its_formula(dtype):
    norm = RMSNorm(24, eps=1e-5).to(dtype)
    norm.weight.data = draw(24, dtype=dtype, seed=1)
    x = draw(3, 5, 24, dtype=dtype, scale=5)
    close(norm(x), F.rms_norm(x, (24,), norm.weight, 1e-5))
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    close(norm(x), expected.to(dtype))


@pytest.mark.parametrize("theirs", [LlamaRMSNorm, Qwen2RMSNorm, DeepseekV3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_llamas_to_the_last_bit_in_16_bits(theirs, dtype):
    ours, theirs = RMSNorm(96, eps=1e-5).to(dtype), theirs(96, eps=1e-5).to(dtype)
    ours.weight.data = draw(96, dtype=dtype, seed=1)
    theirs.load_state_dict(ours.state_dict())
    x = draw(2, 7, 96, dtype=dtype, scale=3)
    assert ours(x).dtype == dtype
    if dtype == torch.float32:
        close(ours(x), theirs(x))
    else:
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_with_offset_is_gemmas(dtype):
    ours, theirs = RMSNorm(96, offset=1.0).to(dtype), GemmaRMSNorm(96, eps=1e-6).to(dtype)
    assert torch.equal(ours.weight, theirs.weight)  # both start at zero: a scale of one
    ours.weight.data = draw(96, dtype=dtype, seed=1, scale=0.2)
    theirs.load_state_dict(ours.state_dict())
    x = draw(2, 7, 96, dtype=dtype, scale=3)
    assert ours(x).dtype == dtype
    if dtype == torch.float32:
        close(ours(x), theirs(x))
    else:  # one bit of the last place at the most, where the float32 results straddle a midpoint
        assert (ours(x) != theirs(x)).float().mean() < 0.01
        close(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RMSNorm(96, eps=1e-5), LlamaRMSNorm(96, eps=1e-5)),
        (RMSNorm(96, offset=1.0), GemmaRMSNorm(96)),
    ],
    ids=["llama", "gemma"],
)
def test_rms_norm_of_float64_is_theirs_and_keeps_its_precision(ours, theirs):
    ours, theirs = ours.double(), theirs.double()
    ours.weight.data = draw(96, dtype=torch.float64, seed=1)
    theirs.load_state_dict(ours.state_dict())
    x = draw(2, 7, 96, dtype=torch.float64, scale=3)
    torch.testing.assert_close(ours(x), theirs(x).double(), rtol=2e-6, atol=2e-6)  # theirs: float32
    exact = x / (x.pow(2).mean(-1, keepdim=True) + ours.eps).sqrt() * (ours.offset + ours.weight)
    close(ours(x), exact)


def test_llama_and_gemma_cast_at_different_places():
    x, weight = draw(64, 96, dtype=torch.bfloat16, scale=3), draw(96, seed=1, scale=0.2)
    llama, gemma = RMSNorm(96), RMSNorm(96, offset=1.0)
    gemma.weight.data = weight.bfloat16().float()
    llama.weight.data = 1 + gemma.weight.data
    llama, gemma = llama.bfloat16(), gemma.bfloat16()
    assert (llama(x) != gemma(x)).float().mean() > 0.05
    close(llama(x), gemma(x), torch.bfloat16)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("value", [300.0, 60000.0])
def test_large_fp16_inputs_survive(offset, value):
    assert torch.tensor(300.0).half().square().isinf()
    x = torch.tensor([[value, -value, value / 2, 0.0]]).half()
    out = RMSNorm(4, offset=offset).half()(x)
    expected = x.double() / x.double().pow(2).mean().sqrt()
    assert out.dtype == torch.float16
    close(out, expected.half())
    close(LayerNorm(4).half()(x), F.layer_norm(x.double(), (4,)).half())


def test_a_float32_weight_on_a_16_bit_input_promotes_as_llamas_does():
    ours, theirs = RMSNorm(8), LlamaRMSNorm(8)
    x = draw(3, 8, dtype=torch.bfloat16)
    assert ours(x).dtype == theirs(x).dtype == torch.float32
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize(
    "module",
    [LayerNorm(6), LayerNorm(6, bias=False), RMSNorm(6), RMSNorm(6, offset=1.0)]
    + [MLP(6, 8, activation=name) for name in ("gelu", "gelu_tanh", "gelu_sigmoid")]
    + [GatedMLP(6, 8, activation=name) for name in ("silu", "gelu_tanh", "sigmoid")],
    ids=lambda module: f"{type(module).__name__}({module.extra_repr()})",
)
def test_gradients(module):
    module = module.double()
    for i, p in enumerate(module.parameters()):
        p.data = draw(*p.shape, dtype=torch.float64, seed=i)
    x = draw(3, 6, dtype=torch.float64).requires_grad_()
    inputs = (x, *module.parameters())
    names = [name for name, _ in module.named_parameters()]

    def call(x, *values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, inputs)


@given(st.floats(0.05, 50), st.integers(0, 10**6))
def test_norms_do_not_see_the_scale_of_their_input(scale, seed):
    x = draw(2, 32, dtype=torch.float64, seed=seed)
    for norm in (LayerNorm(32, eps=0.0).double(), RMSNorm(32, eps=0.0).double()):
        torch.testing.assert_close(norm(scale * x), norm(x), rtol=1e-9, atol=1e-9)


@given(st.floats(-20, 20), st.integers(0, 10**6))
def test_layer_norm_does_not_see_a_shift_and_is_rms_norm_of_the_centred(shift, seed):
    x = draw(2, 32, dtype=torch.float64, seed=seed)
    layer, rms = LayerNorm(32, eps=1e-6).double(), RMSNorm(32, eps=1e-6).double()
    torch.testing.assert_close(layer(x + shift), layer(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(layer(x), rms(x - x.mean(-1, keepdim=True)), rtol=1e-9, atol=1e-9)


def test_state_names_and_repr():
    assert list(LayerNorm(4).state_dict()) == ["weight", "bias"]
    assert list(LayerNorm(4, bias=False).state_dict()) == ["weight"]
    assert list(RMSNorm(4).state_dict()) == ["weight"]
    assert list(MLP(4, 8, bias=False).state_dict()) == ["up_proj.weight", "down_proj.weight"]
    gated = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    assert list(GatedMLP(4, 8).state_dict()) == gated
    assert repr(RMSNorm(4, offset=1.0)) == "RMSNorm(4, eps=1e-06, offset=1.0)"
    assert repr(LayerNorm(4)) == "LayerNorm(4, eps=1e-05, bias=True)"


# Activations

THEIRS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "gelu_sigmoid": "quick_gelu",
    "silu": "silu",
    "sigmoid": "sigmoid",
    "relu_squared": "relu2",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_equal_transformers(name, dtype):
    theirs = ACT2FN[name if name in ACT2FN else THEIRS[name]]
    x = torch.cat([torch.linspace(-12, 12, 401), torch.tensor([0.0, -0.0, 1e-8])]).to(dtype)
    actual, expected = ACTIVATIONS[name](x), theirs(x)
    assert actual.dtype == dtype
    if (
        dtype == torch.bfloat16
    ):  # theirs may round after each step of the formula: ask the exact value
        close(actual, theirs(x.double()).to(dtype))
    elif name == "gelu_fast":  # its constant sqrt(2/pi) is cut after ten digits
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    else:
        close(actual, expected)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_survive_extreme_inputs(name):
    x = torch.tensor([-1e38, -1e4, 1e4, 1e38])
    out = ACTIVATIONS[name](x)
    assert not out.isnan().any()
    if name not in ("sigmoid", "relu2", "relu_squared"):
        assert torch.equal(out.abs(), torch.tensor([0, 0, 1e4, 1e38]))


def test_gelu_and_its_two_approximations():
    x = torch.linspace(-8, 8, 160_001, dtype=torch.float64)
    exact = x * torch.tensor([0.5 * math.erfc(-v / math.sqrt(2)) for v in x.tolist()])
    close(ACTIVATIONS["gelu"](x), exact.double(), torch.float32)
    tanh = (ACTIVATIONS["gelu_tanh"](x) - ACTIVATIONS["gelu"](x)).abs().max()
    sigmoid = (gelu_sigmoid(x) - ACTIVATIONS["gelu"](x)).abs().max()
    assert 4.7e-4 < tanh < 4.8e-4
    assert 0.0202 < sigmoid < 0.0204


def test_an_unknown_activation_is_named_with_the_known():
    for block in (MLP, GatedMLP):
        with pytest.raises(ValueError, match=r"unknown activation 'gleu'; known are relu, gelu, "):
            block(4, 8, activation="gleu")
        with pytest.raises(ValueError, match=r"unknown activation \['silu'\]; known are relu, "):
            block(4, 8, activation=["silu"])


# Feed-forward blocks


@pytest.mark.parametrize("dtype", DTYPES)
def test_mlp_is_gpt2s(dtype):
    config = GPT2Config(n_embd=16, activation_function="gelu_new", resid_pdrop=0.0)
    theirs, ours = GPT2MLP(64, config).to(dtype), MLP(16, 64).to(dtype)
    for mine, other in ((ours.up_proj, theirs.c_fc), (ours.down_proj, theirs.c_proj)):
        other.bias.data = draw(*other.bias.shape, dtype=dtype)
        mine.weight.data, mine.bias.data = other.weight.T.clone(), other.bias.clone()
    x = draw(3, 5, 16, dtype=dtype)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mlp_is_falcons(dtype):
    config = FalconConfig(hidden_size=16, ffn_hidden_size=64, bias=False)
    theirs = FalconMLP(config).to(dtype)
    ours = MLP(16, 64, activation=config.activation, bias=False).to(dtype)
    ours.up_proj.weight.data = theirs.dense_h_to_4h.weight.data.clone()
    ours.down_proj.weight.data = theirs.dense_4h_to_h.weight.data.clone()
    x = draw(3, 5, 16, dtype=dtype)
    close(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("theirs", "config", "activation"),
    [
        (
            LlamaMLP,
            LlamaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=40),
            "silu",
        ),
        (
            LlamaMLP,
            LlamaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=40, mlp_bias=True),
            "silu",
        ),
        (GemmaMLP, GemmaConfig(hidden_size=16, intermediate_size=40), "gelu_pytorch_tanh"),
    ],
    ids=["llama", "llama with biases", "gemma"],
)
def test_gated_mlp_is_llamas_and_gemmas(theirs, config, activation, dtype):
    theirs = theirs(config).to(dtype)
    bias = getattr(config, "mlp_bias", False)
    ours = GatedMLP(16, 40, activation=activation, bias=bias).to(dtype)
    ours.load_state_dict(theirs.state_dict())  # the same names: nothing to rename
    x = draw(3, 5, 16, dtype=dtype)
    assert torch.equal(ours(x), theirs(x))


SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
NORMS = {  # what chapter 06 says of these models: the norm, and how many a layer has on the stream
    "gpt2": ("LayerNorm", 2),
    "bloom": ("LayerNorm", 2),
    "falcon": ("LayerNorm", 1),
    "llama": ("RMSNorm", 2),
    "mistral": ("RMSNorm", 2),
    "qwen2": ("RMSNorm", 2),
    "qwen3": ("RMSNorm", 2),
    "gemma": ("RMSNorm", 2),
    "gemma2": ("RMSNorm", 4),
    "gemma3_text": ("RMSNorm", 4),
    "olmo2": ("RMSNorm", 2),
}
ACTIVATION = {"gpt2": "gelu_new", "falcon": "gelu", "llama": "silu", "qwen2": "silu"}


@pytest.mark.parametrize("kind", NORMS)
def test_models_have_the_norms_and_activations_that_chapter_06_names(kind):
    head = {"head_dim": 8} if kind in ("qwen3", "gemma3_text") else {}
    config = AutoConfig.for_model(kind, **SMALL, **head, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    norms = {
        name: module for name, module in model.named_modules() if "Norm" in type(module).__name__
    }
    what, count = NORMS[kind]
    assert all(type(norm).__name__.endswith(what) for norm in norms.values())
    assert all(
        (getattr(n, "bias", None) is not None) == (what == "LayerNorm") for n in norms.values()
    )
    of_a_layer = [name for name in norms if re.search(r"\.0\.", name)]
    on_q_and_k = [name for name in of_a_layer if re.search(r"[qk]_norm$", name)]
    assert len(of_a_layer) - len(on_q_and_k) == count
    assert len(on_q_and_k) == (2 if kind in ("qwen3", "gemma3_text", "olmo2") else 0)
    if kind in ("qwen3", "gemma3_text"):  # of one head
        assert all(norms[name].weight.numel() == 8 for name in on_q_and_k)
    before = [name for name in of_a_layer if name.endswith("input_layernorm")]
    assert not before if kind == "olmo2" else before or kind == "gpt2"
    if kind in ACTIVATION:
        name = getattr(config, "hidden_act", None) or getattr(config, "activation_function", None)
        assert (name or config.activation) == ACTIVATION[kind]


def test_the_weights_are_those_of_a_key_value_memory():
    mlp = MLP(6, 10, activation="relu").double()
    x = draw(6, dtype=torch.float64)
    keys, values = mlp.up_proj.weight, mlp.down_proj.weight.T
    strength = F.relu(keys @ x + mlp.up_proj.bias)
    expected = mlp.down_proj.bias + sum(s * v for s, v in zip(strength, values, strict=True))
    close(mlp(x), expected)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_on_a_gpu_are_llamas_and_gemmas(dtype):
    x = draw(64, 1024, dtype=dtype, scale=3).cuda()
    for ours, theirs in (
        (RMSNorm(1024), LlamaRMSNorm(1024)),
        (RMSNorm(1024, offset=1.0), GemmaRMSNorm(1024, eps=1e-6)),
    ):
        ours, theirs = ours.cuda().to(dtype), theirs.cuda().to(dtype)
        ours.weight.data = draw(1024, dtype=dtype, seed=1, scale=0.2).cuda()
        theirs.load_state_dict(ours.state_dict())
        close(ours(x), theirs(x))
        if dtype != torch.float32:
            assert (ours(x) != theirs(x)).float().mean() < 0.01
    large = torch.tensor([[300.0, -60000.0, 150.0, 0.0]], device="cuda").half()
    assert RMSNorm(4).cuda().half()(large).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "module",
    [LayerNorm(8), LayerNorm(8, bias=False), RMSNorm(8), RMSNorm(8, offset=1.0)]
    + [MLP(8, 12, activation=name) for name in ACTIVATIONS]
    + [GatedMLP(8, 12, activation=name) for name in ACTIVATIONS],
    ids=lambda m: f"{type(m).__name__}",
)
def test_on_a_device_nothing_is_asked_and_nothing_left_behind(module, dtype):
    module = module.to("meta", dtype)
    x = torch.empty(2, 3, 8, device="meta", dtype=dtype, requires_grad=True)
    with MetaDevice():
        y = module(x)
        y.sum().backward()
    assert y.is_meta and y.dtype == dtype and y.shape == x.shape
    assert all(p.grad.is_meta and p.grad.dtype == dtype for p in module.parameters())
