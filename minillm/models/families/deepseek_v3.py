"""DeepSeek-V3's attention, made from a config. Its experts are in `experts`.

Written by hand; deeper/04_latent_attention explains the attention.
"""

from functools import partial

from torch import nn

from minillm.config import ModelConfig
from minillm.nn.layers import RMSNorm
from minillm.nn.mla import MultiHeadLatentAttention
from minillm.nn.rope_scaling import yarn_mscale

__all__ = ["attention"]


def attention(c: ModelConfig) -> nn.Module:
    """Attention whose keys and values come from one latent."""
    scaling = c.rope_scaling or {}
    mscale = yarn_mscale(scaling.get("factor") or 1.0, scaling.get("mscale_all_dim") or 0.0)
    return MultiHeadLatentAttention(
        c.hidden_size,
        c.num_attention_heads,
        kv_lora_rank=c.kv_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim,
        qk_rope_head_dim=c.qk_rope_head_dim,
        v_head_dim=c.v_head_dim,
        q_lora_rank=c.q_lora_rank,
        norm=partial(RMSNorm, eps=1e-6),  # as published, whatever rms_norm_eps says
        scale=(c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * mscale**2,
    )
