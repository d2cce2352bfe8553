"""The model: decoder layers in a stack, and a causal language model on top.

Notebook 10 assembles them from the pieces of notebooks 03 to 08. Modules are named as in Hugging
Face's Llama, so that the weights of Llama-like checkpoints load with no renaming.
"""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minillm.cache.base import KVCache, make_cache
from minillm.checks import check_mask
from minillm.config import ModelConfig
from minillm.nn.attention import build_mask
from minillm.nn.layers import MLP, DecoderLayer, GatedMLP, LayerNorm, RMSNorm
from minillm.nn.multihead import MultiHeadAttention
from minillm.nn.rope import RotaryEmbedding, Rotation

__all__ = [
    "LLAMA",
    "CausalLM",
    "Decoder",
    "count_parameters",
    "llama_attention",
    "llama_layer",
    "llama_mlp",
    "llama_norm",
    "make_part",
    "product_dtype",
]


def llama_norm(c: ModelConfig) -> nn.Module:
    """Llama's normalisation of hidden states; LayerNorm where the family has that."""
    if c.family.layer_norm:
        return LayerNorm(c.hidden_size, eps=c.rms_norm_eps)
    return RMSNorm(c.hidden_size, eps=c.rms_norm_eps, offset=c.family.norm_offset)


def llama_attention(c: ModelConfig) -> nn.Module:
    """Llama's attention: heads with keys of their own, or shared ones."""
    return MultiHeadAttention(
        c.hidden_size,
        c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        bias=c.attention_bias or c.family.qkv_bias,
        out_bias=c.attention_bias,
        qk_norm=partial(RMSNorm, eps=c.rms_norm_eps) if c.family.qk_norm else None,
        dropout=c.attention_dropout,
    )


def llama_mlp(c: ModelConfig, layer: int) -> nn.Module:
    """Llama's feed-forward block; without a gate where the family has none."""
    block = GatedMLP if c.family.gated else MLP
    return block(c.hidden_size, c.intermediate_size, activation=c.hidden_act, bias=c.mlp_bias)


def llama_layer(c: ModelConfig, layer: int) -> nn.Module:
    """Chapter 06's layer, of the family's parts."""
    attention, mlp = make_part("attention", c), make_part("mlp", c, layer)
    return DecoderLayer(attention, mlp, make_part("norm", c), make_part("norm", c))


LLAMA: dict[str, Callable[..., Any]] = {
    "norm": llama_norm,
    "attention": llama_attention,
    "mlp": llama_mlp,
    "layer": llama_layer,
}


def make_part(part: str, c: ModelConfig, *layer: int) -> nn.Module:
    """A "norm", an "attention", the "mlp" or the whole "layer" of that number.

    The family makes it, or if it has no way of its own, Llama does.
    """
    return (c.family.maker(part) or LLAMA[part])(c, *layer)


class Decoder(nn.Module):
    """Embedding, the layers, a last norm: ids in, hidden states out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        if c.family.learned_positions:
            self.embed_positions = nn.Embedding(c.max_position_embeddings, c.hidden_size)
        self.layers = nn.ModuleList(make_part("layer", c, i) for i in range(c.num_hidden_layers))
        self.norm = make_part("norm", c)
        self.rotary = self.make_rotary() if c.family.rotary else None

    def make_rotary(self) -> RotaryEmbedding:
        """The rotation of queries and keys; it has no weights, so loading makes it anew."""
        c = self.config
        return RotaryEmbedding(
            int(c.head_dim * c.partial_rotary_factor),
            base=c.rope_theta,
            scaling=c.rope_scaling,
            interleaved=c.rope_interleave,
            max_position_embeddings=c.max_position_embeddings,
        )

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Vectors for the ids, and for their positions where the family learns these."""
        x = _look_up(self.embed_tokens, input_ids, "token id")
        if self.config.family.scaled_embeddings:  # rounded to x's dtype, as in the original
            x = x * torch.full((), self.config.hidden_size**0.5, dtype=x.dtype, device=x.device)
        if self.config.family.learned_positions:
            x = x + _look_up(self.embed_positions, position_ids, "position")
        return x

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The layers, once positions and mask are known (`prepare`).

        Shape: (B, T) ids, (B or 1, T) positions, mask (T, S) or (B, 1, T, S) -> (B, T, C).
        """
        x = self.embed(input_ids, position_ids)  # (B, T, C)
        rope = None if self.rotary is None else self.rotary(position_ids)
        if rope is not None and self.config.partial_rotary_factor < 1:
            from minillm.nn.rope_layouts import PartialRotation

            rope = PartialRotation(rope)
        return self.transform(x, rope, position_ids, mask, is_causal, cache)

    def transform(
        self,
        x: Tensor,
        rope: Rotation | None,
        position_ids: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Layers and last norm, for vectors of tokens, or of whatever stands in their place.

        Shape: (B, T, C) -> (B, T, C), the others as in `forward`.
        """
        for i, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache[i]
            seen = mask
            if mask is not None and self.config.has_state(i):
                seen = position_ids >= 0  # which positions are no padding: all that a state asks
            x = layer(x, rope=rope, mask=seen, is_causal=is_causal, cache=layer_cache)
        return self.norm(x).to(self.norm.weight.dtype)

    def prepare(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, Tensor | None, bool]:
        """Positions in the text, the mask (None if none is needed) and whether causality suffices.

        Shape: -> (B, T) or (1, T); (T, S) or (B, 1, T, S) bool.
        Raises: ValueError for shapes that do not fit, before any work is done.
        """
        past = 0 if cache is None else cache.length
        _check_inputs(input_ids, attention_mask, position_ids, past)
        T, device = input_ids.shape[-1], input_ids.device
        slots = torch.arange(past, past + T, device=device)
        keys = slots if cache is None else cache.key_positions(T)
        if position_ids is None:
            position_ids = slots[None]
            if attention_mask is not None:  # padding on the left does not count
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
            self._check_learned(position_ids, past + T)
        if self.config.state is not None and attention_mask is not None:  # -1 is no position
            position_ids = torch.where(attention_mask[:, past:] == 0, -1, position_ids)
        if not self.config.attends:
            return position_ids, attention_mask, False
        window = self.config.sliding_window
        within_reach = len(keys) == past + T and (window is None or past + T <= window)
        if attention_mask is None and within_reach and (past == 0 or T == 1):
            return position_ids, None, T > 1
        valid = None if attention_mask is None else attention_mask.bool()[:, keys.clamp(min=0)]
        return position_ids, build_mask(slots, keys, key_valid=valid, window=window), False

    def _check_learned(self, position_ids: Tensor, length: int) -> None:
        """Raises: ValueError for positions beyond those learned.

        On a GPU asking for the last position waits for it, so this is asked only where `length`,
        padding included, leaves it open.
        """
        limit = self.config.max_position_embeddings
        if not self.config.family.learned_positions or length <= limit or position_ids.is_meta:
            return
        if (last := int(position_ids.max())) >= limit:
            raise ValueError(f"position {last}, but this model has learned only {limit} positions")


def _check_inputs(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, past: int
) -> None:
    """Raises: ValueError for shapes that do not fit, before any work is done."""
    for x in (input_ids, attention_mask, position_ids):
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"ids, mask and positions must be tensors, not {x!r:.60}")
    shape = tuple(input_ids.shape)
    whole = input_ids.dtype in (torch.int64, torch.int32)
    if input_ids.dim() != 2 or not input_ids.numel() or not whole:
        raise ValueError(f"input_ids must be int64 or int32 (B, T), not {input_ids.dtype} {shape}")
    if attention_mask is not None and attention_mask.shape != (shape[0], past + shape[1]):
        wanted = f"(B, past + T) = {(shape[0], past + shape[1])}"
        raise ValueError(f"attention_mask {tuple(attention_mask.shape)} should be {wanted}")
    check_mask(attention_mask)
    if position_ids is not None and position_ids.shape not in (shape, (1, shape[1])):
        raise ValueError(f"position_ids {tuple(position_ids.shape)} do not fit input_ids {shape}")


def _look_up(table: nn.Embedding, ids: Tensor, what: str) -> Tensor:
    """The rows of a table. Raises: ValueError, on the CPU, for an id that has none."""
    try:
        return table(ids)
    except IndexError:
        first, last, size = int(ids.min()), int(ids.max()), len(table.weight)
        wrong = f"{what} {first if first < 0 else last}"
        raise ValueError(f"{wrong}, but this model has learned only {size} {what}s") from None


class CausalLM(nn.Module):
    """The whole model: ids in, a score for every possible next token out.

    Weights are drawn with `seed`: normal with `initializer_range`, the layers' output projections
    smaller by sqrt(2 layers), so that the sum over layers keeps its size.
    Source: Radford et al. 2019, section 2.3.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # torch's own initial values leave no trace
            self.model = Decoder(config)
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

        `attention_mask` is 1 for real tokens and 0 for padding, past tokens included. `cache` holds
        the past and takes in the new tokens. Scores at padding positions mean nothing.
        Shape: (B, T) ids, (B, past + T) mask, (B, T) positions -> (B, T, V).
        Raises: ValueError for shapes that do not fit, a full cache, ids and positions that were
            never learned (on a GPU, ids are not asked for: it stops at them by itself).
        """
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must not be negative: {logits_to_keep}")
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
        """Layers and head, once positions and mask are known: what a compiler may take whole."""
        x = self.model(input_ids, position_ids, mask, is_causal, cache)  # (B, T, C)
        return self.lm_head(x[:, -logits_to_keep:])

    def tie_weights(self) -> None:
        """Let head and embedding be one matrix, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Draw all matrices anew; biases zero; norms as they were made."""
        device = self.lm_head.weight.device
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        std, layers = self.config.initializer_range, self.config.num_hidden_layers
        for name, weight in self.model.named_parameters():
            if weight.dim() > 1:
                last = any(part in name for part in (".o_proj", ".down_proj", ".out_proj"))
                size = std / math.sqrt(2 * layers) if last else std
                weight.normal_(0.0, size, generator=generator)
            elif name.endswith("_proj.bias"):
                weight.zero_()
        for part in self.model.modules():
            draw: Any = getattr(part, "draw", None)
            if draw is not None:  # a part that begins in its own way, as a state's decays do
                draw(generator)
        if not self.config.tie_word_embeddings:
            self.lm_head.weight.normal_(0.0, std, generator=generator)

    compiled_run: Callable[..., Tensor]  # `run`, once something has compiled it

    def make_cache(
        self,
        kind: str = "dynamic",
        *,
        batch_size: int,
        max_length: int | None = None,
        **options: Any,
    ) -> KVCache:
        """An empty cache of the model's shape, dtype and device; kinds as in `minillm.cache.base`.

        Inside `torch.autocast` keys and values come in its dtype, so the cache takes that.
        Raises: ValueError for a sliding cache where the model does read all the past.
        """
        c, weight = self.config, self.lm_head.weight
        if kind == "sliding" and c.sliding_window is None:
            raise ValueError("a sliding cache drops keys that a model without sliding_window reads")
        layers: Any = self.model.layers
        attention = next((x.self_attn for x in layers if hasattr(x, "self_attn")), None)
        usual = c.num_key_value_heads, c.head_dim, c.head_dim
        heads, key, value = getattr(attention, "cache_shape", usual)
        shape: dict[str, Any] = {
            "num_layers": c.num_hidden_layers,
            "batch_size": batch_size,
            "num_kv_heads": heads,
            "key_dim": key,
            "value_dim": value,
            "max_length": max_length,
            "window": c.sliding_window,
            "dtype": product_dtype(weight),
            "device": weight.device,
        }
        if c.family.state:
            from minillm.nn.mamba import make_state_cache

            return make_state_cache(self, kind, {**shape, **options})
        return make_cache(kind, **{**shape, **options})

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> "CausalLM":
        """The model of a checkpoint, without its tokenizer; see `minillm.pretrained.load`."""
        from minillm.pretrained.load import from_pretrained

        return from_pretrained(name, **options)[0]

    def packed(self, ways: Any = None) -> "CausalLM":
        """A copy for generation, the same numbers sooner on a CPU; see `minillm.fast.packed`.

        It costs the memory of the weights again (and once more for the products of long prompts),
        and does not follow this model: after more training, pack anew. How it multiplies is
        measured, or said by `ways`: those of another copy, or "linear".
        Raises: ValueError for a family whose layers are built otherwise, and for changed parts.
        """
        from minillm.fast.packed import PackedLM

        return PackedLM(self, ways)

    def before_compiling(self) -> None:
        """Lay out what `run` needs when compiled: here nothing."""

    def __getstate__(self) -> dict[str, Any]:
        # a compiled step reads the weights of this model, not those of its copy
        return {name: value for name, value in vars(self).items() if name != "compiled_run"}

    def num_parameters(
        self, *, only_trainable: bool = False, exclude_embeddings: bool = False
    ) -> int:
        """Numbers in the weights, frozen ones included; see `count_parameters`."""
        return count_parameters(self, only_trainable, exclude_embeddings)

    def flops_per_token(self, context_length: int = 0) -> int:
        """Operations of one forward pass for one token that reads `context_length` keys.

        Two for each weight of a matrix product, two for each number of a key and of a value that is
        read; norms, activations and the embedding's look-up are left out. Training costs three
        times as much.
        """
        c = self.config
        products = (nn.Linear, nn.Conv1d)
        linear = sum(m.weight.numel() for m in self.modules() if isinstance(m, products))
        layers: Any = self.model.layers
        linear += sum(x.mlp.active_weights() for i, x in enumerate(layers) if c.is_sparse(i))
        key, value = c.head_dim, c.head_dim
        if c.family.mla:
            key, value = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
        heads = 0 if c.num_attention_heads is None else c.num_attention_heads * (key + value)
        attending = [i for i in range(c.num_hidden_layers) if not c.has_state(i)]
        state = 0
        if c.state is not None:  # each number of a state decays and is read
            state = 2 * c.state.expand * c.hidden_size * c.state.state_size
        states = (c.num_hidden_layers - len(attending)) * state
        return 2 * (linear + states + len(attending) * heads * context_length)


def count_parameters(
    model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """Numbers in the weights of any model; a matrix that serves in two places counts once.

    `only_trainable` leaves out what is frozen, as LoRA freezes all but its adapters;
    `exclude_embeddings` the tables of tokens and positions, with a head that is one of them.
    """
    tables = [part.weight for part in model.modules() if isinstance(part, nn.Embedding)]
    left_out = set(tables) if exclude_embeddings else set()
    counted = (p for p in model.parameters() if p.requires_grad or not only_trainable)
    return sum(p.numel() for p in counted if p not in left_out)


def product_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of a product with this weight: its own, or that of `torch.autocast` around us."""
    kind = weight.device.type
    if weight.dtype == torch.float64:
        return weight.dtype
    # Torch 2.11 cannot compile the question; who compiles for a device has one that knows autocast.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    if known and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype
