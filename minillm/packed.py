"""The same model for decoding: matrices fused and laid out as a CPU reads them, norms folded in.

Explained in notebooks/10_minillm.ipynb.
"""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.attention import attention
from minillm.cache import KVCache
from minillm.model import CausalLM

__all__ = ["PACKABLE", "PackedLM", "PackedLayer", "lay_out"]

PACKABLE = ("llama", "mistral", "qwen2")


def lay_out(weight: Tensor) -> Tensor:
    """The same matrix with its longer side contiguous: what CPU libraries read fastest.

    Shape: (out, in) -> (out, in).
    """
    longer_first = weight.shape[0] >= weight.shape[1]
    return weight.t().contiguous().t() if longer_first else weight.contiguous()


class PackedLayer(nn.Module):
    """One decoder layer in four products: q, k and v at once, out, gate and up at once, down.

    The weight of a norm multiplies its output, so it can as well multiply the next matrix.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        a, m = layer.self_attn, layer.mlp
        self.heads, self.groups, self.dim = a.num_heads, a.num_kv_heads, a.head_dim
        self.scale = a.scale
        qkv, gate_up = [a.q_proj, a.k_proj, a.v_proj], [m.gate_proj, m.up_proj]
        first, second = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        pieces = {
            "qkv": torch.cat([p.weight for p in qkv]) * first,
            "out": a.o_proj.weight,
            "gate_up": torch.cat([p.weight for p in gate_up]) * second,
            "down": m.down_proj.weight,
        }
        for name, weight in pieces.items():
            self.register_buffer(name, lay_out(weight))
        biases = {"qkv_bias": qkv, "out_bias": [a.o_proj], "gate_up_bias": gate_up}
        for name, linears in {**biases, "down_bias": [m.down_proj]}.items():
            given = linears[0].bias is not None
            self.register_buffer(name, torch.cat([p.bias for p in linears]) if given else None)

    def forward(
        self, x: Tensor, normed: Any, turn: Any, mask: Tensor | None, is_causal: bool, cache: Any
    ) -> Tensor:
        """Shape: x (B, T, C) -> (B, T, C)."""
        B, T, _ = x.shape
        H, G = self.heads, self.groups
        qkv = F.linear(normed(x), self.qkv, self.qkv_bias).view(B, T, H + 2 * G, self.dim)
        qk, v = turn(qkv[:, :, : H + G]), qkv[:, :, H + G :].transpose(1, 2)
        k = qk[:, :, H:].transpose(1, 2)  # (B, G, T, D)
        if cache is not None:
            k, v = cache.update(k, v)
        if T == 1:  # the queries that share a key become rows of one product
            q = qk[:, 0, :H].view(B, G, H // G, self.dim)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        else:
            q = qk[:, :, :H].transpose(1, 2)
            y = attention(q, k, v, mask=mask, is_causal=is_causal, scale=self.scale).transpose(1, 2)
        x = x + F.linear(y.reshape(B, T, -1), self.out, self.out_bias)
        gate, up = F.linear(normed(x), self.gate_up, self.gate_up_bias).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down, self.down_bias)


class PackedLM(CausalLM):
    """A `CausalLM` for generation only: a packed copy of the weights, same interface and numbers.

    Raises: ValueError for a family whose layers are built otherwise.
    """

    @torch.no_grad()
    def __init__(self, model: CausalLM) -> None:
        nn.Module.__init__(self)
        c = self.config = model.config
        if c.model_type not in PACKABLE or c.hidden_act != "silu":
            raise ValueError(f"{c.model_type} cannot be packed; {', '.join(PACKABLE)} can")
        self.model = model.model  # for masks, positions and embeddings; its layers are not used
        self.packed = nn.ModuleList(PackedLayer(layer) for layer in model.model.layers)
        self.lm_head = nn.Linear(1, 1, bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(
            lay_out(model.lm_head.weight * model.model.norm.weight), requires_grad=False
        )
        self.eval()

    def run(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """As `CausalLM.run`."""
        size, eps = (self.config.hidden_size,), self.config.rms_norm_eps
        rotation = self.model.rotary(position_ids)
        cos, sin = rotation.cos[:, :, None], rotation.sin[:, :, None]  # (B, T, 1, D)
        half = self.config.head_dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        x = self.model.embed_tokens(input_ids)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)

        def normed(x: Tensor) -> Tensor:
            return F.rms_norm(x, size, None, eps)

        def turn(x: Tensor) -> Tensor:
            return torch.addcmul(x * cos, x.roll(half, -1), sin)

        for i, layer in enumerate(self.packed):
            x = layer(x, normed, turn, mask, is_causal, None if cache is None else cache[i])
        return F.linear(normed(x[:, -logits_to_keep:]), self.lm_head.weight)
