"""The configs of published models, by name; used by `ModelConfig.preset`."""

from __future__ import annotations

from typing import Any

_MLA = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


_YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


_YARN_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def _preset(kind: str, vocab: int, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """`sizes`: C, F, layers, H, G."""
    keys = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    keys += ["num_key_value_heads"]
    return {"model_type": kind, "vocab_size": vocab, **dict(zip(keys, sizes, strict=True)), **more}


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": _preset(
        "gpt2", 50257, (768, 3072, 12, 12, 12), max_position_embeddings=1024,
        bos_token_id=50256, eos_token_id=50256,
    ),
    "gpt2-xl": _preset(
        "gpt2", 50257, (1600, 6400, 48, 25, 25), max_position_embeddings=1024,
        bos_token_id=50256, eos_token_id=50256,
    ),
    "llama-2-7b": _preset(
        "llama", 32000, (4096, 11008, 32, 32, 32), max_position_embeddings=4096, rms_norm_eps=1e-5,
        bos_token_id=1, eos_token_id=2,
    ),
    "llama-3.1-8b": _preset(
        "llama", 128256, (4096, 14336, 32, 32, 8), max_position_embeddings=131072,
        rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=_LLAMA3,
        bos_token_id=128000, eos_token_id=128001,
    ),
    "llama-3.2-1b": _preset(
        "llama", 128256, (2048, 8192, 16, 32, 8), max_position_embeddings=131072, head_dim=64,
        rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling={**_LLAMA3, "factor": 32.0},
        tie_word_embeddings=True, bos_token_id=128000, eos_token_id=128001,
    ),
    "mistral-7b": _preset(
        "mistral", 32000, (4096, 14336, 32, 32, 8), max_position_embeddings=32768,
        rms_norm_eps=1e-5, sliding_window=4096, bos_token_id=1, eos_token_id=2,
    ),
    "qwen2.5-0.5b": _preset(
        "qwen2", 151936, (896, 4864, 24, 14, 2), max_position_embeddings=32768, rope_theta=1e6,
        tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151643,
    ),
    "qwen3-0.6b": _preset(
        "qwen3", 151936, (1024, 3072, 28, 16, 8), max_position_embeddings=40960, rope_theta=1e6,
        head_dim=128, tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151645,
    ),
    "gemma-2b": _preset(
        "gemma", 256000, (2048, 16384, 18, 8, 1), max_position_embeddings=8192, head_dim=256,
        bos_token_id=2, eos_token_id=1, pad_token_id=0,
    ),
    "falcon-7b": _preset(
        "falcon", 65024, (4544, 18176, 32, 71, 1), bos_token_id=11, eos_token_id=11
    ),
    "falcon-40b": _preset(
        "falcon", 65024, (8192, 32768, 60, 128, 8), num_ln_in_parallel_attn=2,
        bos_token_id=11, eos_token_id=11,
    ),
    "deepseek-v3-dense": _preset(  # its first three layers; the other 58 are mixtures of experts
        "deepseek_v3", 129280, (7168, 18432, 3, 128, 128), max_position_embeddings=163840, **_MLA,
        rope_scaling=_YARN, bos_token_id=0, eos_token_id=1,
    ),
    "deepseek-v3": _preset(
        "deepseek_v3", 129280, (7168, 18432, 61, 128, 128), max_position_embeddings=163840, **_MLA,
        rope_scaling=_YARN, bos_token_id=0, eos_token_id=1, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1, n_group=8,
        topk_group=4, routed_scaling_factor=2.5, first_k_dense_replace=3,
    ),
    "mixtral-8x7b": _preset(
        "mixtral", 32000, (4096, 14336, 32, 32, 8), max_position_embeddings=32768, rope_theta=1e6,
        num_experts=8, num_experts_per_tok=2, bos_token_id=1, eos_token_id=2,
    ),
    "qwen3-30b-a3b": _preset(
        "qwen3_moe", 151936, (2048, 6144, 48, 32, 4), max_position_embeddings=40960, rope_theta=1e6,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        norm_topk_prob=True, bos_token_id=151643, eos_token_id=151645,
    ),
    "gemma-3-270m": _preset(
        "gemma3_text", 262144, (640, 2048, 18, 4, 1), head_dim=256, max_position_embeddings=32768,
        sliding_window=512, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    ),
    "qwen3.5-0.8b": _preset(  # its part for texts
        "qwen3_5_text", 248320, (1024, 3584, 24, 8, 2), head_dim=256, rope_theta=1e7,
        max_position_embeddings=262144, linear_num_value_heads=16, tie_word_embeddings=True,
        eos_token_id=248044,
    ),
    "smollm3-3b": _preset(
        "smollm3", 128256, (2048, 11008, 36, 16, 4), max_position_embeddings=65536, rope_theta=5e6,
        eos_token_id=128012,
    ),
    "olmo-2-7b": _preset(
        "olmo2", 100352, (4096, 11008, 32, 32, 32), max_position_embeddings=4096,
        rope_theta=500000.0, rms_norm_eps=1e-6, eos_token_id=100257, pad_token_id=100277,
    ),
    "gpt-oss-20b": _preset(
        "gpt_oss", 201088, (2880, 2880, 24, 64, 8), head_dim=64, max_position_embeddings=131072,
        sliding_window=128, rope_theta=150000.0, num_experts=32, num_experts_per_tok=4,
        rope_scaling=_YARN_OSS, eos_token_id=200002,
    ),
}  # fmt: skip


def keys_of(name: str) -> dict[str, Any]:
    """The keys of a published model's config. Raises: ValueError with the known names."""
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
