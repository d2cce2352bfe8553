"""Keys of a config.json: what transformers passes over is passed over by name, what would change
its numbers is computed alike or refused, and a key that lacks means what it means there."""

import json
import warnings

import pytest
import torch
import transformers
from family_checkpoints import CONFIGS

from minillm.config import ModelConfig
from minillm.deeper.pretrained.load import from_pretrained
from minillm.support.family import family_of

NAMES = ["gpt2", "llama-2", "mistral", "qwen2", "qwen3", "gemma", "falcon-new", "deepseek"]
NAMES += ["deepseek-experts", "mixtral", "qwen3-moe-raw-window", "mamba", "mamba2", "bamba"]

# Keys that some family reads, with a value that would change what it computes.
KEYS = {
    **dict.fromkeys(["attention_bias", "mlp_bias", "bias", "alibi", "add_cross_attention"], True),
    **dict.fromkeys(["scale_attn_by_inverse_layer_idx", "use_bidirectional_attention"], True),
    **dict.fromkeys(["rope_interleaved", "use_mrope", "is_encoder_decoder"], True),
    **dict.fromkeys(["scale_attn_weights", "rope_interleave", "use_conv_bias"], False),
    **dict.fromkeys(["head_dim", "state_size", "qk_nope_head_dim", "v_head_dim"], 6),
    **dict.fromkeys(["rms_norm_eps", "layer_norm_epsilon", "attention_dropout"], 0.1),
    **dict.fromkeys(["hidden_act", "activation_function", "activation"], "relu"),
    **dict.fromkeys(["intermediate_size", "ffn_hidden_size", "n_inner"], 40),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "n_shared_experts"], 1),
    **dict.fromkeys(["n_embd", "n_embed"], 16),
    "partial_rotary_factor": 0.75,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "sliding_window": 5,
}
SCALINGS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
IN_THE_TABLE = {
    **{"attn_factor": 0.8, "attention_factor": 0.8, "mscale": 0.7, "mscale_all_dim": 0.6},
    **{"beta_fast": 20, "truncate": False, "low_freq_factor": 1.5, "finetuned": True},
    **{"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5, "long_factor": [1.0] * 4},
    "original_max_position_embeddings": 16,
}
IDS = torch.randint(2, 97, (1, 40), generator=torch.Generator().manual_seed(2))


class Checkpoint:
    """A random checkpoint of transformers, whose config.json is changed again and again."""

    @torch.no_grad()
    def __init__(self, name, folder):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
        for p in model.parameters():
            p.add_(0.15 * torch.randn(p.shape))
        model.save_pretrained(folder)
        self.folder, self.weights = folder, model.state_dict()
        self.file = folder / "config.json"
        self.said = json.loads(self.file.read_text())

    @torch.no_grad()
    def theirs(self, changes):
        """Their logits; None if there are none."""
        self.file.write_text(json.dumps({**self.said, **changes}))
        try:
            config = transformers.AutoConfig.from_pretrained(self.folder)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model.load_state_dict(self.weights)
            return model.eval()(IDS).logits
        except Exception:  # of many kinds: weights that do not fit, positions, their own checks
            return None

    @torch.no_grad()
    def ours(self, changes):
        """Our logits, or the sentence of the refusal, and what was warned of."""
        self.file.write_text(json.dumps({**self.said, **changes}))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                return from_pretrained(self.folder)[0](IDS), str([str(w.message) for w in warned])
            except ValueError as error:
                return str(error), ""

    def compare(self, before, key, changes):
        """What is wrong with our reading of a key (`before`: their logits without it); or None."""
        after, (found, warned) = self.theirs(changes), self.ours(changes)
        passed = after is not None and torch.allclose(before, after, rtol=0, atol=1e-6)
        if isinstance(found, str):
            return f"{key}: passed over there, here {found}" if passed else None
        if after is None or not torch.allclose(found, after, rtol=0, atol=2e-3):
            return f"{key}: other numbers, or none there"
        same_config = self.said.get(key) == changes.get(key) or changes.get(key) == 1.0
        if passed and not same_config and key in KEYS and key not in warned and key not in READ:
            return f"{key}: passed over in silence"
        return None


# What changes these 40 positions in no family, or only while training.
READ = {"attention_dropout", "sliding_window", "intermediate_size"}


@pytest.mark.parametrize("name", NAMES)
def test_a_key_is_computed_passed_over_by_name_or_refused(name, tmp_path):
    checkpoint = Checkpoint(name, tmp_path)
    before = checkpoint.theirs({})
    wrong = [checkpoint.compare(before, key, {key: value}) for key, value in KEYS.items()]
    # properties of Falcon's config without a setter: transformers stops, and no file has them
    known = {"head_dim: other numbers, or none there"} if name == "falcon-new" else set()
    assert {*filter(None, wrong)} <= known


@pytest.mark.parametrize("name", ["llama-2", "deepseek", "bamba"])
@pytest.mark.parametrize("old", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_a_key_of_the_rotation_is_computed_passed_over_or_refused(name, old, kind, tmp_path):
    checkpoint = Checkpoint(name, tmp_path)

    def table(**more):
        given = {"type" if old else "rope_type": kind, **SCALINGS[kind], **more}
        both = {"rope_parameters": None if old else {"rope_theta": 1e4, **given}}
        if old:
            both |= {"rope_scaling": given, "rope_theta": 1e4}
        return {**both, "max_position_embeddings": 32}

    assert not isinstance(checkpoint.ours(table())[0], str)
    before = checkpoint.theirs(table())
    wrong = [checkpoint.compare(before, k, table(**{k: v})) for k, v in IN_THE_TABLE.items()]
    assert not [*filter(None, wrong)]
    _, warned = checkpoint.ours(table(attn_factor=0.8))
    assert f"attn_factor (rope_type '{kind}' does not read it)" in warned


@pytest.mark.parametrize(
    ("name", "key", "theirs"),
    [
        ("qwen3", "head_dim", 128),
        ("gemma", "head_dim", 256),
        ("qwen2-window", "sliding_window", 4096),
        ("deepseek", "q_lora_rank", 1536),
        ("gpt2", "n_positions", 1024),
        ("mistral", "max_position_embeddings", 131072),
        ("mixtral", "num_key_value_heads", 8),
        ("bamba", "num_key_value_heads", 8),
        ("qwen3-moe", "num_key_value_heads", 4),
    ],
)
def test_a_key_that_lacks_means_what_transformers_takes_it_to_mean(name, key, theirs, tmp_path):
    config = CONFIGS[name]()
    config.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    heads = {"num_attention_heads": 8} if "heads" in key else {}
    data = {k: v for k, v in {**data, **heads}.items() if k != key}
    (tmp_path / "config.json").write_text(json.dumps(data))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    spelling = {v: k for k, v in family_of(data["model_type"]).spelling.items()}
    assert getattr(read, key) == theirs
    assert getattr(ModelConfig.from_dict(data), spelling.get(key, key)) == theirs


def test_a_qwen3_without_head_dim_computes_what_transformers_does(tmp_path):
    """Its heads have 128 numbers, whatever hidden_size and their number are."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 24, "num_key_value_heads": 2}
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**sizes)).eval()
    model.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data.pop("head_dim") == 128
    (tmp_path / "config.json").write_text(json.dumps(data))
    with torch.no_grad():
        torch.testing.assert_close(
            from_pretrained(tmp_path)[0](IDS), model(IDS).logits, rtol=0, atol=1e-5
        )
