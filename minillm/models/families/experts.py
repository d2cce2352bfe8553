"""The feed-forward blocks of Mixtral, Qwen3-MoE and DeepSeek-V3, made from a config.

Written by hand; beyond/11_experts explains the block.
"""

from torch import nn

from minillm.config import ModelConfig
from minillm.model import llama_mlp
from minillm.nn.moe import SparseMoeBlock

__all__ = ["mlp"]


def mlp(c: ModelConfig, layer: int) -> nn.Module:
    """Experts of which each token uses a few, or in a dense layer one block for all tokens."""
    if not c.is_sparse(layer):
        return llama_mlp(c, layer)
    return SparseMoeBlock(
        c.hidden_size,
        c.moe_intermediate_size,
        c.num_experts,
        c.num_experts_per_tok,
        activation=c.hidden_act,
        shared_intermediate_size=c.n_shared_experts * c.moe_intermediate_size,
        scoring=c.family.experts,
        norm_topk_prob=c.norm_topk_prob,
        routed_scaling_factor=c.routed_scaling_factor,
        n_group=c.n_group,
        topk_group=c.topk_group,
    )
