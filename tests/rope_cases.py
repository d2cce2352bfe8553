"""What the tests of rotary embedding share: scalings, and the same in transformers."""

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}

DEEPSEEK = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}

SCALINGS = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, older spelling": {"type": "linear", "factor": 2},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 256},
    "llama3, length from the config": LLAMA3,
    "llama3, wide band": {**LLAMA3, "factor": 32.0, "high_freq_factor": 16.0},
    "yarn": YARN,
    "yarn, length from the config": {"rope_type": "yarn", "factor": 8.0},
    "yarn, factor from the lengths": {**YARN, "factor": None},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn, betas not truncated": {**YARN, "beta_fast": 64.0, "beta_slow": 0.5, "truncate": False},
    "yarn, attention factor": {**YARN, "attention_factor": 0.7},
    "yarn, mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn, mscale alone": {**YARN, "mscale": 0.707},
    "yarn, mscale of 0": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.0},
    "yarn, factor 1": {**YARN, "factor": 1.0},
    "deepseek_v3": DEEPSEEK,
}


def config_of(scaling, head_dim, base, trained):
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=trained,
        rope_parameters={"rope_theta": base, **(scaling or {"rope_type": "default"})},
    )


def theirs(scaling, head_dim, base, trained, length=None):
    config = config_of(scaling, head_dim, base, trained)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=length)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
