"""Small models of every family: random checkpoints that transformers made, and configs of ours."""

from __future__ import annotations

import torch
import transformers

from minillm.config import ModelConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHARED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 48, "bos_token_id": 0}
SHARED |= {"eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32, "beta_slow": 1}
YARN |= {"mscale": 0.8, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32}
MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
DEEPSEEK = {**SHARED, **MLA, "num_key_value_heads": 4, "first_k_dense_replace": 2}
THETA = {"rope_type": "default", "rope_theta": 5e4}
STATES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 0}
STATES |= {"eos_token_id": 1, "pad_token_id": 0}
HYBRID = {**SHARED, "num_hidden_layers": 3, "mamba_n_heads": 4}
FALCON = {**SMALL, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}

# Layers that differ: four of them, windows of 8, heads whose size is not hidden_size / heads.
DEEP = {**SHARED, "num_hidden_layers": 4}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
# With an epsilon of 1e-6 both programs are 3e-5 off from float64, and 1.1e-5 apart, also if ours
# takes every step of theirs: only their sums over a chunk padded to 64 would give their digits.
DELTA |= {"linear_value_head_dim": 6, "rms_norm_eps": 1e-2}
LAYERED = {**DEEP, "sliding_window": 8, "head_dim": 12}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
FULL, WINDOW = "full_attention", "sliding_attention"
BY_LAYER = {FULL: LINEAR, WINDOW: THETA}
MIXED = [FULL, WINDOW, WINDOW, FULL]

t = transformers
CONFIGS = {
    "gpt2": lambda: t.GPT2Config(**GPT2),
    "gpt2-wide": lambda: t.GPT2Config(**GPT2, n_inner=72, layer_norm_epsilon=1e-3),
    "llama-2": lambda: t.LlamaConfig(**{**SHARED, "num_key_value_heads": 4}, rms_norm_eps=1e-5),
    "llama-3": lambda: t.LlamaConfig(**SHARED, rope_parameters=LLAMA3),
    "llama-biased": lambda: t.LlamaConfig(**SHARED, attention_bias=True, mlp_bias=True, head_dim=6),
    "llama-tied": lambda: t.LlamaConfig(**SHARED, tie_word_embeddings=True),
    "mistral": lambda: t.MistralConfig(**SHARED, sliding_window=8),
    "mistral-open": lambda: t.MistralConfig(**SHARED, sliding_window=None, head_dim=12),
    "qwen2": lambda: t.Qwen2Config(**SHARED, tie_word_embeddings=True),
    "qwen2-window": lambda: t.Qwen2Config(
        **SHARED, use_sliding_window=True, sliding_window=8, max_window_layers=0
    ),
    "qwen3": lambda: t.Qwen3Config(**SHARED, head_dim=16, tie_word_embeddings=True),
    "gemma": lambda: t.GemmaConfig(**SHARED, head_dim=16),
    "gemma3": lambda: t.Gemma3TextConfig(
        **LAYERED, layer_types=MIXED, query_pre_attn_scalar=20, rope_parameters=BY_LAYER,
        tie_word_embeddings=False, attention_bias=True,
    ),
    "gemma3-capped": lambda: t.Gemma3TextConfig(
        **LAYERED, sliding_window_pattern=2, final_logit_softcapping=2.0
    ),
    "qwen3-5": lambda: t.Qwen3_5TextConfig(**DEEP, head_dim=16, **DELTA),
    "qwen3-5-mixed": lambda: t.Qwen3_5TextConfig(
        **DEEP, head_dim=12, **{**DELTA, "linear_num_value_heads": 2}, attention_bias=True,
        layer_types=["full_attention", "linear_attention"] * 2, linear_conv_kernel_dim=2,
        rope_parameters={**THETA, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 0]},
    ),
    "smollm3": lambda: t.SmolLM3Config(**DEEP),
    "smollm3-biased": lambda: t.SmolLM3Config(
        **DEEP, no_rope_layers=[0, 1, 1, 0], attention_bias=True, mlp_bias=True, head_dim=12,
        tie_word_embeddings=False, rope_parameters=LINEAR,
    ),
    "olmo2": lambda: t.Olmo2Config(**DEEP, rope_parameters=THETA),
    "olmo2-biased": lambda: t.Olmo2Config(**DEEP, attention_bias=True, head_dim=12),
    "olmo3": lambda: t.Olmo3Config(**LAYERED),
    "olmo3-yarn": lambda: t.Olmo3Config(
        **LAYERED, layer_types=MIXED, attention_bias=True,
        rope_parameters={FULL: YARN, WINDOW: THETA},
    ),
    "gpt-oss": lambda: t.GptOssConfig(
        **LAYERED, num_local_experts=5, num_experts_per_tok=2, swiglu_limit=0.5
    ),
    "gpt-oss-plain": lambda: t.GptOssConfig(
        **LAYERED, layer_types=MIXED, num_local_experts=3, num_experts_per_tok=3,
        attention_bias=False, rope_parameters=THETA,
    ),
    "falcon-one-key": lambda: t.FalconConfig(**FALCON),
    "falcon-new": lambda: t.FalconConfig(**FALCON, num_kv_heads=2, new_decoder_architecture=True),
    "falcon-new-one-norm": lambda: t.FalconConfig(
        **FALCON, num_kv_heads=2, new_decoder_architecture=True, num_ln_in_parallel_attn=1
    ),
    "falcon-in-turn": lambda: t.FalconConfig(
        **FALCON, multi_query=False, parallel_attn=False, bias=True
    ),
    "deepseek": lambda: t.DeepseekV3Config(**DEEPSEEK, q_lora_rank=12, rope_parameters=YARN),
    "deepseek-plain": lambda: t.DeepseekV3Config(
        **DEEPSEEK, q_lora_rank=None, rope_interleave=False
    ),
    "mixtral": lambda: t.MixtralConfig(**SHARED, num_local_experts=5, rope_parameters=THETA),
    "mixtral-window-all": lambda: t.MixtralConfig(
        **SHARED, num_local_experts=3, num_experts_per_tok=3, sliding_window=8, head_dim=12
    ),
    "mixtral-one-tied": lambda: t.MixtralConfig(
        **SHARED, num_local_experts=4, num_experts_per_tok=1, tie_word_embeddings=True
    ),
    "qwen3-moe": lambda: t.Qwen3MoeConfig(
        **{**SHARED, "num_hidden_layers": 5}, head_dim=16, num_experts=7, num_experts_per_tok=3,
        moe_intermediate_size=20, norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[3],
        attention_bias=True,
    ),
    "qwen3-moe-raw-window": lambda: t.Qwen3MoeConfig(
        **SHARED, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=52,
        use_sliding_window=True, sliding_window=8, tie_word_embeddings=True,
    ),
    "qwen3-moe-dense": lambda: t.Qwen3MoeConfig(**SHARED, num_experts=0),
    "deepseek-experts": lambda: t.DeepseekV3Config(
        **{**DEEPSEEK, "num_hidden_layers": 3, "first_k_dense_replace": 1}, q_lora_rank=12,
        n_routed_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=2,
        moe_intermediate_size=20, rope_parameters=YARN,
    ),
    "deepseek-experts-raw": lambda: t.DeepseekV3Config(
        **{**DEEPSEEK, "first_k_dense_replace": 0}, q_lora_rank=None, n_routed_experts=4,
        num_experts_per_tok=4, n_group=1, topk_group=1, moe_intermediate_size=12,
        norm_topk_prob=False, routed_scaling_factor=0.7,
    ),
    "mamba": lambda: t.MambaConfig(**STATES),
    "mamba2": lambda: t.Mamba2Config(
        **STATES, state_size=8, num_heads=4, head_dim=16, n_groups=2, chunk_size=8
    ),
    "bamba": lambda: t.BambaConfig(**HYBRID, attn_layer_indices=[1], mamba_d_state=8),
    "bamba-quarter": lambda: t.BambaConfig(
        **HYBRID, attn_layer_indices=[2], mamba_expand=3, mamba_d_conv=2, mamba_chunk_size=256,
        rope_parameters={**THETA, "partial_rotary_factor": 0.25, "rope_type": "linear",
                         "factor": 2.0},
    ),
}  # fmt: skip

# More of those with states; some have biases, through which padding enters transformers' states.
STATE_CONFIGS = {
    "mamba-odd": lambda: t.MambaConfig(
        **STATES, state_size=5, use_bias=True, use_conv_bias=False, conv_kernel=2, expand=3,
        time_step_rank=7, tie_word_embeddings=False, layer_norm_epsilon=1e-3, hidden_act="gelu",
    ),
    "mamba-narrow": lambda: t.MambaConfig(
        **STATES, state_size=1, conv_kernel=1, expand=1, time_step_rank=1, residual_in_fp32=False
    ),
    "mamba2-tied-limits": lambda: t.Mamba2Config(
        **STATES, state_size=7, num_heads=8, head_dim=8, n_groups=1, use_bias=True, chunk_size=256,
        use_conv_bias=False, tie_word_embeddings=True, time_step_limit=(0.05, 0.5),
        layer_norm_epsilon=1e-3,
    ),
    "mamba2-each-a-group": lambda: t.Mamba2Config(
        **STATES, state_size=3, num_heads=6, head_dim=16, expand=3, n_groups=6, chunk_size=5,
        conv_kernel=3, hidden_act="gelu", time_step_limit=(0.01, float("inf")),
    ),
    "mamba2-one-head": lambda: t.Mamba2Config(
        **STATES, state_size=16, num_heads=1, head_dim=32, expand=1, n_groups=1, chunk_size=1,
        conv_kernel=1,
    ),
    "bamba-odd": lambda: t.BambaConfig(
        **HYBRID, attn_layer_indices=[0, 2], mamba_n_groups=4, mamba_d_state=5, mamba_chunk_size=6,
        mamba_proj_bias=True, mamba_conv_bias=False, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True, hidden_act="gelu", time_step_limit=(0.1, 1.0), head_dim=12,
        rope_parameters={**THETA, "partial_rotary_factor": 1.0},
    ),
    "bamba-states-only": lambda: t.BambaConfig(**HYBRID, mamba_d_state=4),
    "bamba-attention-only": lambda: t.BambaConfig(**HYBRID, attn_layer_indices=[0, 1, 2]),
}  # fmt: skip


@torch.no_grad()
def make(name: str, folder: str, **save: object) -> transformers.PreTrainedModel:
    """The named model, saved; all weights moved, as biases of 0 and norms of 1 hide mistakes."""
    torch.manual_seed(0)
    config = {**CONFIGS, **STATE_CONFIGS}[name]()
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.add_(0.15 * torch.randn(p.shape, generator=generator))
    for key, buffer in model.named_buffers():
        if key.endswith("correction_bias"):
            buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder, **save)
    return model


def ragged(rows: int = 3, length: int = 21) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, a mask with 0, 6 or 1 tokens of padding on the left, positions. Shape: (B, T)."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(2, 97, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :6], mask[2, :1] = 0, 0
    ids = ids.masked_fill(mask == 0, 0)
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


_OURS = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
_OURS |= {"intermediate_size": 24, "max_position_embeddings": 64}
_MLA = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
_OSS = {"num_experts": 4, "num_experts_per_tok": 2}
_GROUPS = {"n_group": 3, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
_STATES_ONLY = {"num_attention_heads": None, "intermediate_size": None}
FAMILY_CONFIGS = {
    name: ModelConfig(**{**_OURS, **changes})
    for name, changes in {
        "llama": {"num_key_value_heads": 2},
        "llama-dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "mistral": {"model_type": "mistral", "sliding_window": 4},
        "qwen2": {"model_type": "qwen2", "num_key_value_heads": 1},
        "qwen3": {"model_type": "qwen3", "head_dim": 8},
        "gemma": {"model_type": "gemma"},
        "gemma3": {"model_type": "gemma3_text", "sliding_window": 4, "sliding_window_pattern": 2},
        "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
        "olmo2": {"model_type": "olmo2"},
        "olmo3": {"model_type": "olmo3", "sliding_window": 4, "layer_types": (WINDOW, FULL)},
        "gpt_oss": {"model_type": "gpt_oss", **_OSS, "sliding_window": 4},
        "qwen3_5": {"model_type": "qwen3_5_text", "partial_rotary_factor": 0.5, **DELTA},
        "gpt2": {"model_type": "gpt2"},
        "falcon": {"model_type": "falcon", "num_key_value_heads": 1},
        "deepseek_v3": {"model_type": "deepseek_v3", **_MLA},
        "mixtral": {"model_type": "mixtral", "num_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": {"model_type": "qwen3_moe", **_EXPERTS, "decoder_sparse_step": 2},
        "mamba": {"model_type": "mamba", "state": {"state_size": 5}, **_STATES_ONLY},
        "mamba2": {"model_type": "mamba2", "state": {"num_heads": 4}, **_STATES_ONLY},
        "bamba": {"model_type": "bamba", "state": {"num_heads": 2}, "attn_layer_indices": (1,)},
        "deepseek_v3-experts": {"model_type": "deepseek_v3", **_MLA, **_EXPERTS, **_GROUPS},
    }.items()
}
