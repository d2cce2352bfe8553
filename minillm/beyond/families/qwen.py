"""Qwen2 and Qwen3: Llama with biases on q, k and v, or with norms on q and k.

Written by hand; deeper/10_families compares them with transformers.
"""

from functools import partial
from typing import Any

from minillm.config import ModelConfig
from minillm.model import llama_attention
from minillm.support.family import Family


def write_window(config: ModelConfig, data: dict[str, Any]) -> None:
    """Qwen's files name a window that they may not use, and from which layer on."""
    if config.sliding_window is not None:
        data |= {"use_sliding_window": True, "max_window_layers": 0}


# What transformers takes a file without the key to mean.
USUAL = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
USUAL |= {"num_key_value_heads": 32, "max_position_embeddings": 32768}

QWEN2 = Family(
    attention=partial(llama_attention, qkv_bias=True),
    architecture="Qwen2ForCausalLM",
    unwritten="mlp_bias attention_bias",
    windowed=True,
    usual=USUAL,
    write=write_window,
)
QWEN3 = Family(
    attention=partial(llama_attention, qk_norm=True),
    architecture="Qwen3ForCausalLM",
    unwritten="mlp_bias",
    windowed=True,
    usual={**USUAL, "head_dim": 128},
    write=write_window,
)
