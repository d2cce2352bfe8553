"""Small random models of many families, for tests of `beyond.export.step` and `small`."""

import torch

from minillm.config import ModelConfig
from minillm.model import CausalLM

SMALL = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
SMALL |= {"intermediate_size": 40, "head_dim": 10, "initializer_range": 0.1}
FAMILIES = {
    "llama": {},
    "shared keys": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "gpt2": {"model_type": "gpt2", "head_dim": 8},
    "gemma": {"model_type": "gemma"},
    "falcon": {"model_type": "falcon", "head_dim": 8},
    "window": {"model_type": "mistral", "sliding_window": 4},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "max_position_embeddings": 64,
    },
    "experts": {"model_type": "mixtral", "num_experts": 3, "num_experts_per_tok": 2},
    "latent": {
        "model_type": "deepseek_v3",
        "head_dim": 6,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 8,
    },
}


def made(kind, seed=0):
    model = CausalLM(ModelConfig(**{**SMALL, **FAMILIES[kind]}), seed=seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn(p.shape, generator=draw))
    return model.eval()


def prompts(rows=2, length=5):
    return torch.randint(31, (rows, length), generator=torch.Generator().manual_seed(7))
