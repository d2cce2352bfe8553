"""A decoder layer: attention and feed-forward block, each on a normalised copy and added back.

Notebook 10 assembles it from the pieces of notebooks 03 to 06. Its parts are named as in Hugging
Face's Llama.
"""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

import math
from typing import Any

from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.layers import MLP, GatedMLP, LayerNorm, RMSNorm
from minillm.multihead import MultiHeadAttention, MultiHeadLatentAttention
from minillm.rope import Rotation

__all__ = ["DecoderLayer", "make_norm"]


def make_norm(c: ModelConfig, size: int | None = None) -> nn.Module:
    """The family's normalisation over `size` numbers (default: the hidden size)."""
    size = c.hidden_size if size is None else size
    if c.family.layer_norm:
        return LayerNorm(size, eps=c.rms_norm_eps)
    return RMSNorm(size, eps=c.rms_norm_eps, offset=c.family.norm_offset)


class _HeadNorm(RMSNorm):
    """RMSNorm within a head: gives back its input's dtype, whatever its weight's (autocast)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


def _latent_scale(c: ModelConfig) -> float:
    """1 / sqrt(key size), times YaRN's second factor where the config asks for it (DeepSeek-V3)."""
    scale = (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
    scaling = c.rope_scaling or {}
    if scaling.get("mscale_all_dim") and (scaling.get("factor") or 1.0) > 1.0:
        scale *= (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0) ** 2
    return scale


def _attention(c: ModelConfig) -> nn.Module:
    """The family's attention: heads with keys of their own, shared keys, or a latent."""
    if c.family.latent:
        return MultiHeadLatentAttention(
            c.hidden_size,
            c.num_attention_heads,
            kv_lora_rank=c.kv_lora_rank,
            qk_nope_head_dim=c.qk_nope_head_dim,
            qk_rope_head_dim=c.qk_rope_head_dim,
            v_head_dim=c.v_head_dim,
            q_lora_rank=c.q_lora_rank,
            norm=lambda size: _HeadNorm(size, eps=1e-6),  # as published, whatever rms_norm_eps says
            scale=_latent_scale(c),
        )
    return MultiHeadAttention(
        c.hidden_size,
        c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        bias=c.attention_bias or c.family.qkv_bias,
        out_bias=c.attention_bias,
        qk_norm=(lambda size: _HeadNorm(size, eps=c.rms_norm_eps)) if c.family.qk_norm else None,
        dropout=c.attention_dropout,
    )


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward block, each on a normalised copy and added back (pre-norm).

    Falcon computes both side by side, from one normalised copy or from one each.
    Shape: (B, T, C) -> (B, T, C).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c, sizes = config, (config.hidden_size, config.intermediate_size)
        self.parallel = c.parallel_attn
        self.input_layernorm = make_norm(c)
        self.self_attn = _attention(c)
        if not self.parallel or c.num_ln_in_parallel_attn == 2:
            self.post_attention_layernorm = make_norm(c)
        block = GatedMLP if c.family.gated else MLP
        self.mlp = block(*sizes, activation=c.hidden_act, bias=c.mlp_bias)

    def forward(
        self,
        x: Tensor,
        *,
        rope: Rotation | None = None,
        mask: Tensor | None = None,
        is_causal: bool = False,
        cache: Any = None,
    ) -> Tensor:
        normed = self.input_layernorm(x)
        attended = self.self_attn(normed, rope=rope, mask=mask, is_causal=is_causal, cache=cache)
        if self.parallel:
            two_norms = hasattr(self, "post_attention_layernorm")
            normed = self.post_attention_layernorm(x) if two_norms else normed
            return x + attended + self.mlp(normed)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))
