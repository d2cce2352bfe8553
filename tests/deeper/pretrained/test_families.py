"""Config files of eight families: what is damaged is refused by name, whatever stands there."""

import json
import warnings

import pytest
from family_checkpoints import CONFIGS
from hypothesis import given
from hypothesis import strategies as st

from minillm.config import ModelConfig
from minillm.deeper.pretrained.families import _KINDS
from minillm.deeper.pretrained.load import from_pretrained
from minillm.deeper.pretrained.presets import PRESETS
from minillm.support.checks.config import SCALING
from minillm.support.family import FAMILIES, family_of

FILES = [ModelConfig.preset(name).to_dict() for name in PRESETS]
FILES += [make().to_dict() for make in CONFIGS.values()]  # as transformers writes them
SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 48, "model_type": "llama", "rope_theta": 1e4}

KEYS = {
    *_KINDS,
    *SCALING,
    *(key for kind in FAMILIES for key in (family_of(kind).config or ModelConfig).kinds),
    *(theirs for kind in FAMILIES for theirs in family_of(kind).spelling.values()),
}
KEYS |= {key for file in FILES for key in file}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
SCALARS |= st.sampled_from([0, 1, 2, 64, 2**31, 10**30, 5000 * "9", "linear", "dynamic", "llama3"])
SCALARS |= st.sampled_from(["yarn", "default", "silu", "full_attention", "sliding_attention"])
TABLES = st.dictionaries(st.sampled_from(sorted(SCALING)) | st.text(max_size=4), SCALARS)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | TABLES
VALUES |= st.sampled_from([*FAMILIES, [[1]], {"a": {"b": []}}, [{}]])
CHANGES = st.dictionaries(st.sampled_from(sorted(KEYS)), VALUES, max_size=4)


@given(st.sampled_from(FILES), CHANGES, st.sets(st.sampled_from(sorted(KEYS)), max_size=2))
def test_a_damaged_config_is_a_config_or_a_value_error(file, changes, without):
    data = {k: v for k, v in {**file, **changes}.items() if k not in without}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = ModelConfig.from_dict(data)
        except ValueError:
            return
        assert json.dumps(config.to_dict())


@pytest.mark.parametrize("file", FILES)
def test_what_was_written_is_read_as_the_same(file):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = ModelConfig.from_dict(file)
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": True}, "vocab_size must be a whole number from 1 to 2147483647, not True"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a whole number .*, not 'two'"),
        ({"hidden_size": 32.0}, r"hidden_size must be a whole number .*, not 32\.0"),
        ({"initializer_range": -0.1}, r"initializer_range must be .* at least 0, not -0\.1"),
        ({"initializer_range": float("inf")}, "initializer_range must be .* not inf"),
        ({"eos_token_id": "x"}, r"eos_token_id must be a whole .* or a list, .*, not 'x'"),
        ({"eos_token_id": [1, 2.5]}, r"eos_token_id must be .*, not \[1, 2\.5\]"),
        ({"eos_token_id": [1, None]}, r"eos_token_id must be .*, not \[1, None\]"),
        ({"layer_types": 5}, "layer_types must be a list, each a string, not 5"),
        ({"layer_types": [["full_attention"]]}, "layer_types must be a list, each a string"),
        ({"architectures": "Llama"}, "architectures must be a list, each a string, not 'Llama'"),
        ({"rope_theta": "10000"}, "rope_theta must be a number above 0, not '10000'"),
        ({"rope_scaling": [1]}, r"rope_scaling must be a table, not \[1\]"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be .* above 0, not '2'"),
        ({"rope_parameters": {"rope_type": 5}}, "rope_parameters: rope_type must be a string"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta must be a number .* not True"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, not 'no'"),
        ({"model_type": "gpt2", "n_inner": "x"}, "n_inner must be a whole number"),
        ({"model_type": "falcon", "multi_query": 2}, "multi_query must be true or false, not 2"),
        ({"model_type": "qwen2", "max_window_layers": "x"}, "max_window_layers must be a whole"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": []}, "first_k_dense_replace must"),
        ({"model_type": ["llama"]}, r"unknown model_type \['llama'\]"),
    ],
)
def test_values_of_the_wrong_kind_are_named(change, message, tmp_path):
    names = family_of("gpt2").spelling if "n_inner" in change else {}
    data = {names.get(k, k): v for k, v in SMALL.items()} | change
    (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("ends", ["x", 1.5, [1, "x"], {"a": 1}, True, [[1]], 10**30])
def test_end_tokens_of_the_wrong_kind_for_generation(ends, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    content = json.dumps({"eos_token_id": ends})
    (tmp_path / "generation_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id must be a whole"):
        from_pretrained(tmp_path)
