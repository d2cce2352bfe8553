"""Mistral: Llama whose files may say a window.

Written by hand; deeper/10_families compares it with transformers.
"""

from minillm.support.family import Family

MISTRAL = Family(
    architecture="MistralForCausalLM",
    # what transformers takes a file to mean; null as a window means none
    usual={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    unwritten="mlp_bias attention_bias",
    windowed=True,
)
