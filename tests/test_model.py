"""The config and the model: what is refused, what is counted; no position sees the future."""

import json
import warnings

import pytest
import torch
import transformers
from family_checkpoints import CONFIGS
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from minillm.config import FAMILIES, ModelConfig
from minillm.model import CausalLM
from minillm.pretrained.presets import PRESETS

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 24}
MLA = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
DEEPSEEK = {"model_type": "deepseek_v3", **MLA}


def model(seed=0, **changes):
    return CausalLM(ModelConfig(**{**LLAMA, **changes}), seed=seed).eval()


def ids(rows=2, length=9, seed=0):
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt5"}, "unknown model_type 'gpt5'; known are llama, mistral"),
        ({"hidden_size": 18}, "hidden_size 18 does not divide into 4 heads"),
        ({"num_key_value_heads": 3}, "4 query heads do not share 3"),
        ({"intermediate_size": None}, "lacks intermediate_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"vocab_size": "64"}, "vocab_size must be a positive integer, not '64'"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"hidden_act": "softmax"}, "unknown hidden_act 'softmax'"),
        ({"eos_token_id": 64}, "eos_token_id 64 is outside a vocabulary of 64"),
        ({"eos_token_id": (1, 99)}, r"eos_token_id \(1, 99\) is outside"),
        ({"model_type": "deepseek_v3"}, "lacks kv_lora_rank, qk_nope_head_dim"),
        ({**DEEPSEEK, "head_dim": 16}, "head_dim 16, qk_rope_head_dim 4"),
        ({**DEEPSEEK, "attention_dropout": 0.1}, r"drops nothing.*dropout 0\.1"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_theta": 0.0}, r"rope_theta must be a positive number, not 0\.0"),
        ({"rms_norm_eps": -1.0}, r"rms_norm_eps must be a positive number, not -1\.0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number, not '1e-5'"),
        ({"hidden_act": ["silu"]}, r"unknown hidden_act \['silu'\]"),
        ({**DEEPSEEK, "num_key_value_heads": 2}, "each of its 4 heads, not 2"),
    ],
)
def test_contradictions_are_errors_that_name_the_values(changes, message):
    with pytest.raises(ValueError, match=message):
        CausalLM(ModelConfig(**{**LLAMA, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "unknown model_type 'mamba'"),
        ({"model_type": ["llama"]}, r"unknown model_type \['llama'\]"),
        ({"rope_parameters": "x"}, "rope_parameters must be a table, not 'x'"),
        ({"rope_theta": "x"}, "rope_theta must be a positive number, not 'x'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "part of each"),
        ({"rope_parameters": {"a": {"rope_theta": 1.0}}}, "differ by layer"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "by layer"),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 8, "first_k_dense_replace": 1},
            "layers 1 to 1 are mixtures of experts",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
             "layer_types": ["full_attention", "sliding_attention"]},
            "some of the layers",
        ),
    ],
)  # fmt: skip
def test_files_that_ask_for_what_we_do_not_compute_are_refused(changes, message):
    data = {"model_type": "llama", "rope_theta": 1e4, **LLAMA, **changes}
    if data["model_type"] == "gpt2":
        data |= {"n_embd": 16, "n_layer": 2, "n_head": 4}
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(data)


def test_rope_is_read_from_old_and_new_files():
    scaling = {"rope_type": "linear", "factor": 4.0}
    old = ModelConfig.from_dict(
        {"model_type": "llama", **LLAMA, "rope_theta": 5e5, "rope_scaling": scaling}
    )
    new = ModelConfig.from_dict(
        {"model_type": "llama", **LLAMA, "rope_parameters": {"rope_theta": 5e5, **scaling}}
    )
    typed = {"type": "linear", "factor": 4.0}
    older = ModelConfig.from_dict(
        {"model_type": "llama", **LLAMA, "rope_theta": 5e5, "rope_scaling": typed}
    )
    assert old == new == older and old.rope_theta == 5e5
    assert old.rope_scaling == scaling


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_an_original_length_outside_counts_as_in_transformers(kind):
    """Long heads, where it shows."""
    scaling = {"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": 4.0}
    data = {**LLAMA, "head_dim": 64, "max_position_embeddings": 64}
    data |= {"rope_parameters": {"rope_theta": 1e4, **scaling}}
    data["original_max_position_embeddings"] = 16
    theirs = transformers.LlamaModel(transformers.LlamaConfig(**data)).rotary_emb
    ours = CausalLM(ModelConfig.from_dict({"model_type": "llama", **data}))
    torch.testing.assert_close(ours.model.rotary.inv_freq, theirs.inv_freq)


@pytest.mark.parametrize("first", [None, 2, 28])
def test_qwens_first_layers_have_no_window(first):
    """In files without layer_types, as transformers 4 wrote them; both have two layers."""
    data = {"model_type": "qwen2", "rope_theta": 1e4, **LLAMA, "max_window_layers": first}
    data |= {"use_sliding_window": True, "sliding_window": 4}
    assert ModelConfig.from_dict(data).sliding_window is None
    theirs = transformers.Qwen2Config(**{k: v for k, v in data.items() if v is not None})
    assert set(theirs.layer_types) == {"full_attention"}
    assert ModelConfig.from_dict({**data, "max_window_layers": 0}).sliding_window == 4


def test_whole_numbers_are_written_as_transformers_takes_them():
    data = ModelConfig(**LLAMA, rope_theta=10000, initializer_range=1).to_dict()
    assert transformers.LlamaConfig(**data).initializer_range == 1.0


def test_keys_of_other_families_are_not_read():
    data = {"model_type": "llama", "rope_theta": 1e4, **LLAMA, "sliding_window": 4}
    with pytest.warns(UserWarning, match="not used: rope_interleave, sliding_window"):
        config = ModelConfig.from_dict({**data, "rope_interleave": True})
    assert config.sliding_window is None and not config.rope_interleave


def test_no_key_is_taken_for_granted_or_dropped_in_silence():
    with pytest.warns(UserWarning, match="no rope_theta"):
        ModelConfig.from_dict({"model_type": "llama", **LLAMA})
    with pytest.warns(UserWarning, match="not used: logit_softcap"):
        ModelConfig.from_dict(
            {"model_type": "llama", "rope_theta": 1e4, **LLAMA, "logit_softcap": 30}
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_make_the_round_trip_through_transformers(name, tmp_path):
    file = tmp_path / "config.json"
    CONFIGS[name]().save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = ModelConfig.from_dict(json.loads(file.read_text()))
        file.write_text(json.dumps(ours.to_dict()))
        transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
        assert ModelConfig.from_dict(json.loads(file.read_text())) == ours
        assert ModelConfig.from_dict(ours.to_dict()) == ours


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("gemma-2b", 2_506_172_416),
        ("falcon-7b", 6_921_720_704),
    ],
)
def test_presets_have_the_published_sizes(name, count):
    with torch.device("meta"):
        assert CausalLM(ModelConfig.preset(name)).num_parameters() == count


def test_every_preset_has_the_size_that_transformers_gives_it():
    for name in PRESETS:
        config = ModelConfig.preset(name)
        data = config.to_dict()
        theirs = transformers.AutoConfig.for_model(**data)
        with torch.device("meta"):
            expected = transformers.AutoModelForCausalLM.from_config(theirs).num_parameters()
            assert CausalLM(config).num_parameters() == expected, name
    with pytest.raises(ValueError, match="no preset 'gpt-5'; there are gpt2"):
        ModelConfig.preset("gpt-5")


def test_deepseek_v3s_attention_has_its_size():
    with torch.device("meta"):
        attention = CausalLM(ModelConfig.preset("deepseek-v3-dense")).model.layers[0].self_attn
    parts = [
        7168 * 1536,
        1536,
        1536 * 128 * 192,
        7168 * 576,
        512,
        512 * 128 * 256,
        128 * 128 * 7168,
    ]
    assert sum(p.numel() for p in attention.parameters()) == sum(parts) == 187_107_328


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "mistral"])
@given(position=st.integers(0, 8))
def test_no_position_sees_the_future(family, position):
    m = model(model_type=family, sliding_window=4 if family == "mistral" else None)
    a = ids()
    b = a.clone()
    b[:, position] = (b[:, position] + 1) % 64
    with torch.no_grad():
        moved = (m(a) - m(b)).abs().amax(-1)
    assert not moved[:, :position].any() and moved[:, position].all()
    if family == "mistral":  # two layers of window 4 reach 6 back
        assert not moved[:, position + 7 :].any()


@torch.no_grad()
def test_padding_is_never_read():
    m = model()
    a, mask = ids(), torch.ones(2, 9, dtype=torch.long)
    mask[:, :3] = 0
    expected = m(a[:, 3:])
    torch.testing.assert_close(m(a, attention_mask=mask)[:, 3:], expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_static_cache_gives_a_prompt_no_empty_slots_and_a_step_all_of_them():
    m, a = model(), ids()
    cache = m.make_cache("static", batch_size=2, max_length=40)
    pieces = []
    for start, end, read in ((0, 5, 5), (5, 8, 8), (8, 9, 40)):
        _, mask, is_causal = m.model.prepare(a[:, start:end], None, None, cache)
        assert (mask is None and is_causal) if start == 0 else mask.shape == (end - start, read)
        pieces.append(m(a[:, start:end], cache=cache))
    torch.testing.assert_close(torch.cat(pieces, 1), m(a), atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="32 new positions after 9 exceed max_length=40"):
        m.model.prepare(torch.zeros(2, 32, dtype=torch.long), None, None, cache)


@torch.no_grad()
def test_logits_to_keep():
    m = model()
    full = m(ids())
    for n in (1, 4, 9):
        torch.testing.assert_close(m(ids(), logits_to_keep=n), full[:, -n:])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.zeros(3, dtype=torch.long)), r"int32 \(B, T\)"),
        (lambda m: m(torch.zeros(0, 3, dtype=torch.long)), r"int32 \(B, T\)"),
        (lambda m: m(torch.zeros(2, 3)), "torch.float32"),
        (lambda m: m(ids().to(torch.int16)), "int64 or int32 .* not torch.int16"),
        (lambda m: m(ids(), logits_to_keep=-1), "must not be negative: -1"),
        (
            lambda m: model(model_type="gpt2")(ids(), position_ids=torch.arange(9)[None] - 1),
            "position -1",
        ),
        (lambda m: m(ids(), attention_mask=torch.ones(2, 8)), r"\(2, 8\) should be .*\(2, 9\)"),
        (lambda m: m(ids(), position_ids=torch.zeros(2, 8)), r"position_ids \(2, 8\)"),
        (lambda m: m.make_cache("sliding", batch_size=2), "sliding_window"),
        (
            lambda m: m(ids(), cache=m.make_cache("static", batch_size=2, max_length=8)),
            "max_length=8",
        ),
        (lambda m: model(model_type="gpt2", max_position_embeddings=8)(ids()), "learned only 8"),
    ],
)
def test_calls_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call(model())


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a = model(seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    b, c = model(seed=3), model(seed=4)
    for x, y, z in zip(a.parameters(), b.parameters(), c.parameters(), strict=True):
        assert torch.equal(x, y) and (x.dim() == 1 or not torch.equal(x, z))


def test_initial_sizes_of_the_weights():
    m = CausalLM(ModelConfig(1000, 256, 8, 4, 512, initializer_range=0.05))
    layer = m.model.layers[3]
    assert abs(layer.self_attn.q_proj.weight.std().item() - 0.05) < 1e-3
    assert abs(layer.mlp.down_proj.weight.std().item() - 0.05 / 4) < 1e-3
    assert abs(m.lm_head.weight.std().item() - 0.05) < 1e-3


def test_flops_are_those_that_torch_counts():
    for m in (model(), model(tie_word_embeddings=True), model(model_type="gpt2")):
        math = sdpa_kernel(SDPBackend.MATH)  # the CPU's flash kernel is not counted
        with FlopCounterMode(display=False) as counter, torch.no_grad(), math:
            m(ids(1, 9))
        assert counter.get_total_flops() == 9 * m.flops_per_token(context_length=9)


def test_gradients_reach_every_parameter():
    for family in FAMILIES:
        m = model(model_type=family, **(MLA if family == "deepseek_v3" else {}))
        m(ids()).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in m.parameters()), family
