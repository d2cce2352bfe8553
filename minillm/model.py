"""The model: decoder layers in a stack, and a causal language model on top (notebook 10).

Modules are named as in Hugging Face's Llama, so that Llama-like checkpoints load with no renaming.
"""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minillm.attention import build_mask
from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.heads import MultiHeadAttention
from minillm.layers import DecoderLayer, GatedMLP, RMSNorm
from minillm.rope import RotaryEmbedding, Rotation
from minillm.support.checks.model import check_config, check_inputs, check_kept, look_up
from minillm.support.doors import Doors
from minillm.support.modes import cache_for

__all__ = [
    "LLAMA",
    "CausalLM",
    "Decoder",
    "llama_attention",
    "llama_layer",
    "llama_mlp",
    "llama_norm",
    "llama_rotary",
    "make_part",
]


def llama_norm(c: ModelConfig) -> nn.Module:
    """Llama's normalisation of hidden states."""
    return RMSNorm(c.hidden_size, eps=c.rms_norm_eps)


def llama_attention(c: ModelConfig, *, qkv_bias: bool = False, qk_norm: bool = False) -> nn.Module:
    """Llama's attention; Qwen2 has biases on q, k and v, Qwen3 norms on q and k."""
    return MultiHeadAttention(
        c.hidden_size,
        c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        bias=c.attention_bias or qkv_bias,
        out_bias=c.attention_bias,
        qk_norm=partial(RMSNorm, eps=c.rms_norm_eps) if qk_norm else None,
        dropout=c.attention_dropout,
    )


def llama_mlp(c: ModelConfig, layer: int) -> nn.Module:
    """Llama's feed-forward block."""
    return GatedMLP(c.hidden_size, c.intermediate_size, activation=c.hidden_act, bias=c.mlp_bias)


def llama_layer(c: ModelConfig, layer: int) -> nn.Module:
    """Chapter 06's layer, of the family's parts."""
    attention, mlp = make_part("attention", c), make_part("mlp", c, layer)
    return DecoderLayer(attention, mlp, make_part("norm", c), make_part("norm", c))


def llama_rotary(c: ModelConfig) -> RotaryEmbedding:
    """Chapter 05's rotation, or the one for texts beyond the trained length."""
    made: Any = RotaryEmbedding if c.rope_scaling is None else c.scaled_rotation
    return made(c.head_dim, base=c.rope_theta, max_position_embeddings=c.max_position_embeddings)


LLAMA: dict[str, Any] = {"norm": llama_norm, "attention": llama_attention, "mlp": llama_mlp}

LLAMA |= {"layer": llama_layer, "rotary": llama_rotary, "embedding": lambda c: None}


def make_part(part: str, c: ModelConfig, *layer: int) -> Any:
    """That part (the "mlp" or "layer" of that number), as the family makes it, or else Llama."""
    return (getattr(c.family, part) or LLAMA[part])(c, *layer)


class Decoder(nn.Module):
    """The embedding, the layers, a last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.embedding = make_part("embedding", c)
        self.layers = nn.ModuleList(make_part("layer", c, i) for i in range(c.num_hidden_layers))
        self.norm = make_part("norm", c)
        self.rotary: RotaryEmbedding | None = make_part("rotary", c)

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Vectors for the ids, and what the family does to them. Shape: (B, T) -> (B, T, C)."""
        x = look_up(self.embed_tokens, input_ids, "token id")
        return x if self.embedding is None else self.embedding(x, position_ids)

    def layer_mask(
        self, layer: int, mask: Tensor | None, position_ids: Tensor, cache: KVCache | None
    ) -> Tensor | None:
        """What that layer may read, if not the same as all; asked before any layer is run."""
        return mask

    def layer_rotation(self, layer: int, rope: Rotation | None, position_ids: Tensor) -> Any:
        """How that layer turns queries and keys, if not as all do."""
        return rope

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        cache: KVCache | None = None,
        rope: Rotation | None = None,
    ) -> Tensor:
        """Layers and last norm; `rope` is the rotation if it is not that of the positions.

        Shape: (B, T, C), positions (B or 1, T), mask (T, S) or (B, 1, T, S) -> (B, T, C).
        """
        if rope is None and self.rotary is not None:
            rope = self.rotary(position_ids)
        numbers = range(len(self.layers))
        masks = [self.layer_mask(i, mask, position_ids, cache) for i in numbers]
        ropes = [self.layer_rotation(i, rope, position_ids) for i in numbers]
        for i, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache[i]
            x = layer(x, rope=ropes[i], mask=masks[i], is_causal=is_causal, cache=layer_cache)
        return self.norm(x).to(self.norm.weight.dtype)

    def prepare(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor | None, bool]:
        """Positions in the text, the mask (None if none is needed) and whether causality suffices.

        Shape: -> (B, T) or (1, T); (T, S) or (B, 1, T, S) bool. Raises: ValueError.
        """
        past = 0 if cache is None else cache.length
        check_inputs(input_ids, attention_mask, position_ids, past, self.rotary)
        T = input_ids.shape[1]
        slots = torch.arange(past, past + T, device=input_ids.device)
        keys = slots if cache is None else cache.key_positions(T)
        if position_ids is None:
            position_ids = slots[None]
            if attention_mask is not None:  # padding on the left does not count
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        window = self.config.sliding_window
        within_reach = len(keys) == past + T and (window is None or past + T <= window)
        if attention_mask is None and within_reach and (past == 0 or T == 1):
            return position_ids, None, T > 1
        valid = None if attention_mask is None else attention_mask.bool()[:, keys.clamp(min=0)]
        return position_ids, build_mask(slots, keys, key_valid=valid, window=window), False


class CausalLM(Doors):
    """The whole model: ids in, a score for every possible next token out.

    model = CausalLM(ModelConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2,
                                 num_attention_heads=4, intermediate_size=176))
    logits = model(torch.tensor([[1, 2, 3]]))  # (1, 3, 512)
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        with torch.random.fork_rng(devices=[]):  # torch's own initial values leave no trace
            self.model: Decoder = (config.family.decoder or Decoder)(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        self.reset_parameters(seed)

    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Scores for the next token after each of the new ones, or after the last `logits_to_keep`.

        `attention_mask` is 1 for real tokens and 0 for padding, past tokens included; scores at
        padding mean nothing. `cache` holds the past and takes in the new tokens.
        Shape: (B, T) ids, (B, past + T) mask, (B, T) positions -> (B, T, V).
        Raises: ValueError for shapes that do not fit, a full cache, ids (on a CPU) beyond V.
        """
        check_kept(logits_to_keep)
        inputs = self.model.prepare(input_ids, attention_mask, position_ids, cache)
        return self.run(input_ids, *inputs, cache, logits_to_keep)

    def run(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Embedding, layers, head, once positions and mask are known; compilers take it whole."""
        x = self.model.embed(input_ids, position_ids)  # (B, T, C)
        x = self.model(x, position_ids, mask, is_causal, cache)
        return self.lm_head(x[:, -logits_to_keep:])

    def make_cache(self, kind: str = "dynamic", *, batch_size: int, **options: Any) -> KVCache:
        """An empty cache (08) for that many rows. Raises: ValueError as `minillm.make_cache`."""
        c = self.config
        sizes = {"num_layers": c.num_hidden_layers, "num_kv_heads": c.num_key_value_heads}
        sizes |= {"key_dim": c.head_dim, "value_dim": c.head_dim, "batch_size": batch_size}
        return cache_for(self, kind, **sizes | {"window": c.sliding_window} | options)

    def tie_weights(self) -> None:
        """Let head and embedding be one matrix, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Draw all matrices anew, summed ones smaller (GPT-2); biases zero; norms stay."""
        c, device = self.config, self.lm_head.weight.device
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        for name, weight in self.model.named_parameters():
            if weight.dim() > 1:
                last = any(part in name for part in (".o_proj", ".down_proj", ".out_proj"))
                size = c.initializer_range / (math.sqrt(2 * c.num_hidden_layers) if last else 1)
                weight.normal_(0.0, size, generator=generator)
            elif name.endswith("_proj.bias"):
                weight.zero_()
        for part in self.model.modules():
            draw: Any = getattr(part, "draw", None)
            if draw is not None:  # a part that begins in its own way
                draw(generator)
        if not c.tie_word_embeddings:
            self.lm_head.weight.normal_(0.0, c.initializer_range, generator=generator)
