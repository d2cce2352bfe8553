"""The config: what is read, what is refused and how; what transformers makes of it."""

import copy
import json
import math
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from family_checkpoints import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.config import ModelConfig
from minillm.deeper.pretrained.presets import PRESETS
from minillm.layers import ACTIVATIONS
from minillm.model import CausalLM
from minillm.support.family import FAMILIES, family_of

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 24}
MLA = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
DEEPSEEK = {"model_type": "deepseek_v3", **MLA}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt5"},
            "unknown model_type 'gpt5'; known .*; nearest is gpt2$",
        ),
        ({"model_type": "olmo"}, "; nearest is olmo[23]$"),
        ({"hidden_size": 18}, "hidden_size 18 does not divide into 4 heads"),
        ({"num_key_value_heads": 3}, "4 query heads do not share 3"),
        ({"intermediate_size": None}, "lacks intermediate_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1 .*, not 0"),
        ({"vocab_size": "64"}, "vocab_size must be a whole number from 1 .*, not '64'"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"hidden_act": "softmax"}, "unknown hidden_act 'softmax'"),
        ({"eos_token_id": 64}, "eos_token_id 64 is outside a vocabulary of 64"),
        ({"eos_token_id": (1, 99)}, r"eos_token_id \(1, 99\) is outside"),
        ({"model_type": "deepseek_v3"}, "lacks kv_lora_rank, qk_nope_head_dim"),
        ({**DEEPSEEK, "head_dim": 16}, "head_dim 16, qk_rope_head_dim 4"),
        ({**DEEPSEEK, "attention_dropout": 0.1}, r"drops nothing.*dropout 0\.1"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_theta": 0.0}, r"rope_theta must be a number above 0, not 0\.0"),
        ({"rms_norm_eps": -1.0}, r"rms_norm_eps must be a number above 0, not -1\.0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number above 0, not '1e-5'"),
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
        ({"model_type": "rwkv"}, "unknown model_type 'rwkv'"),
        ({"model_type": ["llama"]}, r"unknown model_type \['llama'\]"),
        ({"rope_parameters": "x"}, "rope_parameters must be a table, not 'x'"),
        ({"rope_theta": "x"}, "rope_theta must be a number above 0, not 'x'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "part of each head",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4,
                                 "partial_rotary_factor": 0.25}},
            "part of each",
        ),
        ({"rope_parameters": {"a": {"rope_theta": 1.0}}}, "differ by layer"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "by layer"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "attention to later tokens"),
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
    assert config.sliding_window is None and not hasattr(config, "rope_interleave")


def test_no_key_is_taken_for_granted_or_dropped_in_silence():
    with pytest.warns(UserWarning, match="no rope_theta"):
        ModelConfig.from_dict({"model_type": "llama", **LLAMA})
    with pytest.warns(UserWarning, match="not used: logit_softcap"):
        ModelConfig.from_dict(
            {"model_type": "llama", "rope_theta": 1e4, **LLAMA, "logit_softcap": 30}
        )


def test_a_real_config_opens_without_a_word():
    """SmolLM2-135M-Instruct's, as published, and what transformers adds when it reads GGUF."""
    data = {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1}
    data |= {"attention_dropout": 0.0, "eos_token_id": 2, "pad_token_id": 2, "hidden_act": "silu"}
    data |= {"hidden_size": 576, "initializer_range": 0.041666666666666664, "mlp_bias": False}
    data |= {"intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192}
    data |= {"model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30}
    data |= {"num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05}
    data |= {"rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000}
    data |= {"tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True}
    data |= {"transformers.js_config": {"kv_cache_dtype": {}}, "transformers_version": "4.42.3"}
    data |= {"_name_or_path": "here", "_model_name_or_path": "there", "unk_token_id": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = ModelConfig.from_dict({**data, "vocab_size": 49152})
    assert (config.rope_theta, config.pad_token_id, config.head_dim) == (100000.0, 2, 64)


@pytest.mark.parametrize("key", ["rope_interleaved", "use_mrope", "is_encoder_decoder"])
def test_keys_that_transformers_passes_over_are_passed_over_by_name(key):
    """`tests/deeper/pretrained/test_keys_passed_over.py` asks transformers itself."""
    data = {"model_type": "llama", "rope_theta": 1e4, **LLAMA}
    with pytest.warns(UserWarning, match=f"not used: {key}"):
        assert ModelConfig.from_dict({**data, key: True}) == ModelConfig.from_dict(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ModelConfig.from_dict({**data, key: False}) == ModelConfig.from_dict(data)


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


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": True}, "vocab_size must be a whole number from 1 .*, not True"),
        ({"vocab_size": None}, "vocab_size must be a whole number from 1 .*, not None"),
        ({"hidden_size": 16.0}, r"hidden_size must be a whole number from 1 .*, not 16\.0"),
        (
            {"hidden_size": 2**31},
            r"hidden_size must be a whole number .* to 2147483647, not 2147483648",
        ),
        ({"head_dim": False}, "head_dim must be a whole number from 1 .*, not False"),
        ({"max_position_embeddings": None}, "max_position_embeddings must be .* not None"),
        ({"rope_theta": None}, "rope_theta must be a number above 0, not None"),
        ({"rope_theta": math.nan}, "rope_theta must be a number above 0, not nan"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a number above 0, not inf"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a number above 0, not True"),
        ({"initializer_range": -0.1}, r"initializer_range must be .* at least 0, not -0\.1"),
        ({"initializer_range": "0.02"}, r"initializer_range must be .* not '0\.02'"),
        ({"attention_dropout": 1.0}, r"attention_dropout must be a number from 0 .* not 1\.0"),
        ({"attention_bias": 1}, "attention_bias must be true or false, not 1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, not 'no'"),
        ({"bos_token_id": "1"}, "bos_token_id must be a whole number .*, not '1'"),
        ({"pad_token_id": 1.0}, r"pad_token_id must be a whole number .*, not 1\.0"),
        ({"pad_token_id": -1}, "pad_token_id -1 is outside a vocabulary of 64"),
        ({"eos_token_id": "2"}, "eos_token_id must be a whole number .*, not '2'"),
        ({"eos_token_id": (1, None)}, r"eos_token_id must be .* not \(1, None\)"),
        ({"eos_token_id": True}, "eos_token_id must be a whole number .*, not True"),
        ({"model_type": ["llama"]}, r"unknown model_type \['llama'\]"),
        (
            {"model_type": "falcon", "num_ln_in_parallel_attn": 3},
            "must be a whole number from 1 to 2, not 3",
        ),
        ({"rope_scaling": [1]}, r"rope_scaling must be a table, not \[1\]"),
        ({"rope_scaling": {**LINEAR, "factor": "2"}}, r"rope_scaling\.factor must be .* not '2'"),
        ({"rope_scaling": {**LINEAR, "factor": True}}, r"rope_scaling\.factor must be .* not True"),
        ({"rope_scaling": {**LINEAR, "factor": 0.5}}, r"factor must be at least 1, got 0\.5"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
        (
            {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            r"rope_scaling \{'rope_type': 'yarn'.* with rope_theta 1\.0 cannot be computed",
        ),
    ],
)
def test_values_of_a_wrong_type_or_size_are_errors_with_key_and_value(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**LLAMA, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": 5}, "layer_types must be a list, each a string, not 5"),
        ({"layer_types": [["full_attention"]]}, "layer_types must be a list, each a string"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number from 1 .*, not '2'"),
        ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false, not 'yes'"),
        (
            {"max_window_layers": "28"},
            "max_window_layers must be a whole number from 0 .*, not '28'",
        ),
        ({"rope_theta": True}, "rope_theta must be a number above 0, not True"),
        ({"rope_theta": 10**400}, "rope_theta must be a number above 0, not 1000"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_parameters: rope_theta must be"),
        ({"rope_parameters": {**LINEAR, "factor": []}}, "rope_parameters: factor must be"),
        (
            {"model_type": "deepseek_v3", "first_k_dense_replace": "2"},
            "first_k_dense_replace must be",
        ),
    ],
)
def test_values_of_files_are_checked_before_they_are_read(changes, message):
    data = {"model_type": "qwen2", "rope_theta": 1e4, "sliding_window": 4, **LLAMA, **changes}
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(data)


def test_a_config_file_must_hold_a_table():
    with pytest.raises(ValueError, match=r"a table of keys and values, not \[1\]"):
        ModelConfig.from_dict([1])


FAMILY_KEYS = ("hidden_act", "rms_norm_eps", "tie_word_embeddings")


@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt2", "falcon", "mamba", "mamba2"])
def test_what_is_not_said_is_the_familys_default_as_in_transformers(kind):
    """Also where None stands in its place; a copy keeps the family's class."""
    theirs = transformers.AutoConfig.for_model(kind)
    spelled = family_of(kind).spelling
    keys = {**SIZES, "model_type": kind, **({"intermediate_size": 24} if kind != "gpt2" else {})}
    if "mamba" in kind:
        del keys["num_attention_heads"], keys["intermediate_size"]
        keys["state"] = {"num_heads": 4} if kind == "mamba2" else {}
    config = ModelConfig(**keys)
    assert config == ModelConfig(**keys, **dict.fromkeys(FAMILY_KEYS))
    act, eps, tied = (getattr(theirs, spelled.get(key, key)) for key in FAMILY_KEYS)
    assert ACTIVATIONS[config.hidden_act] == ACTIVATIONS[act]
    assert (config.rms_norm_eps, config.tie_word_embeddings) == (eps, tied)
    for copied in (copy.copy(config), pickle.loads(pickle.dumps(config)), replace(config)):
        assert copied == config and type(copied) is type(config)
    with pytest.raises(ValueError, match=r"max_position_embeddings must be .*, not None"):
        ModelConfig(**keys, max_position_embeddings=None)


def test_a_list_of_end_tokens_becomes_a_tuple():
    config = ModelConfig(**LLAMA, eos_token_id=[3, 5])
    assert config.eos_token_ids == config.eos_token_id == (3, 5) and hash(config)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.sampled_from([10**12, 10**400, -(10**20)])
    | st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from(["", "x", "silu", "yarn"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta"]), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
SCALINGS = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "dynamic", "yarn", "llama3", "default", "spiral"])},
    optional=dict.fromkeys(
        ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale",
         "mscale_all_dim", "attention_factor", "truncate", "original_max_position_embeddings"),
        JSON | st.floats(0.5, 64),
    ),
)  # fmt: skip
FILE_KEYS = (
    "layer_types max_window_layers use_sliding_window first_k_dense_replace n_routed_experts "
    "new_decoder_architecture multi_query rope_parameters alibi n_embd n_layer n_head num_kv_heads"
)
CONFIG_KEYS = {key for kind in FAMILIES for key in (family_of(kind).config or ModelConfig).kinds}
KEYS = sorted({*ModelConfig.__dataclass_fields__, *CONFIG_KEYS, *FILE_KEYS.split()})


@settings(max_examples=100)
@given(
    family=st.sampled_from(list(FAMILIES)),
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4),
    scaling=st.none() | SCALINGS,
)
def test_any_config_file_makes_a_config_or_a_value_error(family, changes, scaling):
    """And a config that was accepted makes a model, here on a device without memory."""
    data = {**LLAMA, **MLA, "head_dim": None, "n_embd": 16, "n_layer": 2, "n_head": 4}
    data |= {"model_type": family, "rope_theta": 1e4, "rope_scaling": scaling, **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = ModelConfig.from_dict(data)
        except ValueError as error:
            assert str(error)
            return
        assert ModelConfig.from_dict(config.to_dict()).vocab_size == config.vocab_size
    if config.num_hidden_layers < 100:
        with torch.device("meta"):
            assert CausalLM(config).num_parameters() > 0
