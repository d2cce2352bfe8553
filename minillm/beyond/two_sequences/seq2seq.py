"""Encoder and decoder: a model that writes one text while it reads another.

Shown in notebooks/beyond/15_two_sequences.ipynb. Computes what Hugging Face's BART and Marian
do; `minillm.deeper.pretrained.seq2seq` reads and writes their files.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.attention import build_mask
from minillm.beyond.two_sequences.cross import CrossAttention
from minillm.cache import KVCache
from minillm.generation import generate
from minillm.heads import MultiHeadAttention, SupportsUpdate
from minillm.layers import ACTIVATIONS, LayerNorm
from minillm.sampling import GREEDY, end_ids
from minillm.support.checks.kinds import (
    NOT_NEGATIVE,
    NULL,
    SHARE,
    SWITCH,
    any_of,
    check_one_of,
    check_values,
    whole,
)
from minillm.support.checks.model import check_mask, check_prompt
from minillm.support.device import product_dtype
from minillm.support.modes import EvalMode, make_cache
from minillm.support.saved import SavedModel


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Sizes and switches of an `EncoderDecoder`, named as in Hugging Face's BART and Marian.

    Args:
        model_type: "bart" learns its positions and normalises the embeddings; "marian" computes
            positions with sines and does not.
        decoder_vocab_size: the target's vocabulary where the two texts have one each
            (share_encoder_decoder_embeddings=False, Marian only); else it is vocab_size.
        tie_word_embeddings: one matrix for the decoder's embedding and the head, and for the
            encoder's embedding too if the two texts share their vocabulary.
        decoder_start_token_id: what the target begins with, before its first token.
        forced_bos_token_id: what `generate` writes first, whatever the model says.
        forced_eos_token_id: what it writes last where the room ends.
    Raises: ValueError, with the value, for what cannot be or is not computed.
    """

    vocab_size: int
    model_type: str = "bart"
    decoder_vocab_size: int | None = None
    max_position_embeddings: int = 1024
    d_model: int = 64
    encoder_layers: int = 2
    decoder_layers: int = 2
    encoder_attention_heads: int = 4
    decoder_attention_heads: int = 4
    encoder_ffn_dim: int = 128
    decoder_ffn_dim: int = 128
    activation_function: str = "gelu"
    scale_embedding: bool = False
    tie_word_embeddings: bool = True
    share_encoder_decoder_embeddings: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    init_std: float = 0.02
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | Sequence[int] | None = 2
    decoder_start_token_id: int | None = 2
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_one_of("model_type", self.model_type, ("bart", "marian"))
        check_one_of("activation_function", self.activation_function, list(ACTIVATIONS))
        check_values(self, _KINDS)
        d_model = self.d_model
        for side in ("encoder", "decoder"):
            heads = getattr(self, f"{side}_attention_heads")
            if d_model % heads:
                raise ValueError(f"{side}_attention_heads={heads} do not divide {d_model=}")
        if not self.share_encoder_decoder_embeddings and self.model_type == "bart":
            raise ValueError("share_encoder_decoder_embeddings=False is Marian's; bart has one")
        for name in ("eos_token_id", "forced_eos_token_id"):  # JSON has lists
            ids = getattr(self, name)
            object.__setattr__(self, name, tuple(ids) if isinstance(ids, list) else ids)
        self._check_ids()

    def _check_ids(self) -> None:
        """Raises: ValueError for a special token that is no id of the target's vocabulary."""
        size = self.target_vocab_size
        for name in ("pad", "decoder_start", "forced_bos", "eos", "forced_eos"):
            given = getattr(self, f"{name}_token_id")
            if given is None:
                continue
            for i in given if isinstance(given, tuple) and name.endswith("eos") else (given,):
                if type(i) is not int or not 0 <= i < size:
                    raise ValueError(f"{name}_token_id={i!r}, but target ids are 0 to {size - 1}")
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            last = self.vocab_size - 1
            raise ValueError(f"pad_token_id={self.pad_token_id}, but source ids are 0 to {last}")

    @property
    def target_vocab_size(self) -> int:
        """How many tokens the target is made of."""
        if self.share_encoder_decoder_embeddings or self.decoder_vocab_size is None:
            return self.vocab_size
        return self.decoder_vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a target."""
        return end_ids(self.eos_token_id)


_SIZES = """
    vocab_size decoder_vocab_size max_position_embeddings d_model encoder_layers
    encoder_attention_heads encoder_ffn_dim decoder_layers decoder_attention_heads decoder_ffn_dim
"""
_KINDS = {
    **dict.fromkeys(_SIZES.split(), whole(1)),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), SHARE),
    **dict.fromkeys(("scale_embedding", "tie_word_embeddings"), SWITCH),
    "share_encoder_decoder_embeddings": SWITCH,
    "init_std": NOT_NEGATIVE,
    "bos_token_id": any_of(whole(), NULL),
}


class EncoderLayer(nn.Module):
    """Attention of a text to itself, in both directions, then the feed-forward block.

    Each is added to its input, and the sum is normalised (post-norm).
    Shape: x (B, S, C), mask bool broadcastable to (B, H, S, S) -> (B, S, C).
    """

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        c, C = config, config.d_model
        self.self_attn = MultiHeadAttention(
            C, c.encoder_attention_heads, bias=True, out_bias=True, dropout=c.attention_dropout
        )
        self.self_attn_layer_norm = LayerNorm(C)
        self.fc1, self.fc2 = nn.Linear(C, c.encoder_ffn_dim), nn.Linear(c.encoder_ffn_dim, C)
        self.final_layer_norm = LayerNorm(C)
        self.activation = ACTIVATIONS[c.activation_function]
        self.dropout = nn.Dropout(c.dropout)
        self.activation_dropout = nn.Dropout(c.activation_dropout)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        x = self.self_attn_layer_norm(x + self.dropout(self.self_attn(x, mask=mask)))
        hidden = self.activation_dropout(self.activation(self.fc1(x)))
        return self.final_layer_norm(x + self.dropout(self.fc2(hidden)))


class DecoderLayer(nn.Module):
    """Attention to what has been written, then to the source, then the feed-forward block.

    Shape: x (B, T, C), keys and values of the source (B, H, S, D) -> (B, T, C).
    """

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        c, C, H = config, config.d_model, config.decoder_attention_heads
        self.self_attn = MultiHeadAttention(
            C, H, bias=True, out_bias=True, dropout=c.attention_dropout
        )
        self.self_attn_layer_norm = LayerNorm(C)
        self.encoder_attn = CrossAttention(C, H, dropout=c.attention_dropout)
        self.encoder_attn_layer_norm = LayerNorm(C)
        self.fc1, self.fc2 = nn.Linear(C, c.decoder_ffn_dim), nn.Linear(c.decoder_ffn_dim, C)
        self.final_layer_norm = LayerNorm(C)
        self.activation = ACTIVATIONS[c.activation_function]
        self.dropout = nn.Dropout(c.dropout)
        self.activation_dropout = nn.Dropout(c.activation_dropout)

    def forward(
        self,
        x: Tensor,
        keys_values: tuple[Tensor, Tensor],
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        source_mask: Tensor | None = None,
        cache: SupportsUpdate | None = None,
    ) -> Tensor:
        written = self.self_attn(x, mask=mask, is_causal=is_causal, cache=cache)
        x = self.self_attn_layer_norm(x + self.dropout(written))
        read = self.encoder_attn(x, keys_values, mask=source_mask)
        x = self.encoder_attn_layer_norm(x + self.dropout(read))
        hidden = self.activation_dropout(self.activation(self.fc1(x)))
        return self.final_layer_norm(x + self.dropout(self.fc2(hidden)))


def sinusoids(num_positions: int, size: int) -> Tensor:
    """Positions as waves: sines in the first half of the columns, cosines in the second.

    Column j of either half turns by 10000^(-2j / size) a position. The paper puts sine and cosine
    of a frequency side by side; this order is Marian's.

    Shape: -> (num_positions, size) float32
    Source: Vaswani et al. 2017, section 3.5.
    """
    frequencies = 10000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.sin(), angles[:, : size // 2].cos()], dim=1).float()


def _check_tensor(name: str, x: object) -> None:
    """Raises: ValueError for a list, an array or whatever else is no tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, not a {type(x).__name__}: {x!r:.60}")


class Stack(nn.Module):
    """The encoder or the decoder: embeddings of tokens and positions, and layers above them."""

    def __init__(self, config: Seq2SeqConfig, vocab_size: int, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        C, N, learned = config.d_model, config.max_position_embeddings, config.model_type == "bart"
        self.scale = math.sqrt(C) if config.scale_embedding else 1.0
        self.offset = 2 if learned else 0  # BART's first two positions are never used
        self.num_positions = N
        self.embed_tokens = nn.Embedding(vocab_size, C, padding_idx=config.pad_token_id)
        self.embed_positions = nn.Embedding(N + self.offset, C)
        if not learned:
            self.embed_positions = nn.Embedding.from_pretrained(sinusoids(N, C), freeze=True)
        self.layernorm_embedding = LayerNorm(C) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(layers)

    def embed(self, ids: Tensor, start: int = 0) -> Tensor:
        """Vectors of tokens, the first of them at position `start`. Shape: (B, T) -> (B, T, C)."""
        positions = torch.arange(start, start + ids.shape[1], device=ids.device) + self.offset
        x = self.embed_tokens(ids) * self.scale + self.embed_positions(positions)
        return self.dropout(x if self.layernorm_embedding is None else self.layernorm_embedding(x))

    def check(self, name: str, ids: Tensor, mask: Tensor | None, past: int = 0) -> None:
        """Raises: ValueError for ids or a mask that do not fit; numbers are looked at on a CPU."""
        _check_tensor(name, ids)
        if ids.ndim != 2 or not ids.numel() or ids.dtype not in (torch.int64, torch.int32):
            shape = f"{ids.dtype} {tuple(ids.shape)}"
            raise ValueError(f"{name} must be int64 or int32 (B, T), at least one id, not {shape}")
        length = past + ids.shape[1]
        if length > self.num_positions:
            raise ValueError(f"{name} reach {length} positions, there are {self.num_positions}")
        if mask is not None:
            _check_tensor(f"the mask of {name}", mask)
        if mask is not None and mask.shape != (len(ids), length):
            wanted = (len(ids), length)
            raise ValueError(f"the mask of {name} is {tuple(mask.shape)}, it should be {wanted}")
        check_mask(mask, f"the mask of {name}")
        if ids.device.type != "cpu":
            return
        low, high, size = int(ids.min()), int(ids.max()), len(self.embed_tokens.weight)
        if low < 0 or high >= size:
            wrong = low if low < 0 else high
            raise ValueError(f"{name} hold {wrong}, the vocabulary has ids 0 to {size - 1}")
        if mask is not None and not ((mask == 0) | (mask == 1)).all():
            strange = mask[(mask != 0) & (mask != 1)][0].item()
            raise ValueError(f"the mask of {name} holds {strange}: 1 is a token, 0 is padding")


class EncodedSource(NamedTuple):
    """A source that has been read: for each decoder layer its keys and values, and the mask.

    Shape: keys and values (B, H, S, D); mask (B, 1, 1, S) bool, None if there is no padding.
    """

    keys_values: list[tuple[Tensor, Tensor]]
    mask: Tensor | None


def shift_right(labels: Tensor, config: Seq2SeqConfig) -> Tensor:
    """What the decoder is given to predict `labels`: the start token, then all but the last.

    Labels of -100, which no loss counts, become padding.

    Shape: (B, T) -> (B, T)
    Raises: ValueError for labels of another shape; if the config has no start token or no padding.
    """
    _check_tensor("labels", labels)
    if labels.ndim != 2 or not labels.shape[1]:
        raise ValueError(f"labels must be (B, T), at least one each, not {tuple(labels.shape)}")
    start, pad = config.decoder_start_token_id, config.pad_token_id
    if start is None or pad is None:
        raise ValueError(f"a target needs decoder_start_token_id={start} and pad_token_id={pad}")
    shifted = F.pad(labels[:, :-1], (1, 0), value=start)
    return shifted.masked_fill(shifted == -100, pad)


class EncoderDecoder(SavedModel):
    """An encoder that reads the source, a decoder that writes the target and looks at both.

    Weights are drawn with `seed`: normal with `init_std`, biases zero.
    Source: Vaswani et al. 2017; Lewis et al. 2019 (BART); Junczys-Dowmunt et al. 2018 (Marian).
    """

    files = "seq2seq.LAYOUT"

    def __init__(self, config: Seq2SeqConfig, *, seed: int = 0) -> None:
        super().__init__()
        c = self.config = config
        with torch.random.fork_rng(devices=[]):  # torch's own initial values leave no trace
            layers = (EncoderLayer(c) for _ in range(c.encoder_layers))
            self.encoder = Stack(c, c.vocab_size, layers)
            written = (DecoderLayer(c) for _ in range(c.decoder_layers))
            self.decoder = Stack(c, c.target_vocab_size, written)
            self.lm_head = nn.Linear(c.d_model, c.target_vocab_size, bias=False)
        self.register_buffer("final_logits_bias", torch.zeros(1, c.target_vocab_size))
        self.tie_weights()
        self.reset_parameters(seed)

    def tie_weights(self) -> None:
        """Let embeddings and head be one matrix, as far as the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.decoder.embed_tokens.weight
            if self.config.share_encoder_decoder_embeddings:
                self.encoder.embed_tokens.weight = self.decoder.embed_tokens.weight

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Draw all matrices anew; biases and the vector of padding zero."""
        device = self.lm_head.weight.device
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() > 1 and weight.requires_grad:
                weight.normal_(0.0, self.config.init_std, generator=generator)
            elif name.endswith(("_proj.bias", "fc1.bias", "fc2.bias")):
                weight.zero_()
        if self.config.pad_token_id is not None:
            for stack in (self.encoder, self.decoder):
                stack.embed_tokens.weight[self.config.pad_token_id] = 0.0

    def encode(self, input_ids: Tensor, *, attention_mask: Tensor | None = None) -> EncodedSource:
        """Read a source: everything that the decoder will need of it, computed once.

        `attention_mask` is 1 for tokens and 0 for padding, on either side. Positions count from
        the first column, padding included, as in transformers.
        Shape: (B, S) ids and mask.
        Raises: ValueError for ids that are not in the vocabulary, a source that is empty or longer
            than there are positions, a mask of another shape.
        """
        self.encoder.check("input_ids", input_ids, attention_mask)
        mask = None
        if attention_mask is not None:
            mask = attention_mask.bool()[:, None, None, :]
            if input_ids.device.type == "cpu":
                if empty := (~mask.any(-1)).flatten().nonzero().flatten().tolist():
                    raise ValueError(f"the sources of rows {empty} are empty: all is padding")
                mask = None if mask.all() else mask
        x = self.encoder.embed(input_ids)
        for layer in self.encoder.layers:
            x = layer(x, mask=mask)
        layers: Any = self.decoder.layers
        return EncodedSource([layer.encoder_attn.keys_values(x) for layer in layers], mask)

    def decode(
        self,
        input_ids: Tensor,
        memory: EncodedSource,
        *,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Scores for the next token of the target after each of the new ones.

        `cache` holds what was written before and takes in the new tokens; `memory` stays as it is.
        Shape: (B, T) ids, (B, past + T) mask -> (B, T or logits_to_keep, V).
        Raises: ValueError as `encode`; if target and memory have different numbers of rows.
        """
        past = 0 if cache is None else cache.length
        self.decoder.check("decoder_input_ids", input_ids, attention_mask, past)
        T = input_ids.shape[1]
        rows = len(memory.keys_values[0][0])
        if len(input_ids) != rows:
            raise ValueError(f"{len(input_ids)} targets for a memory of {rows} sources")
        if len(memory.keys_values) != len(self.decoder.layers):
            sizes = f"{len(memory.keys_values)} layers for {len(self.decoder.layers)}"
            raise ValueError(f"a memory of {sizes}: another model has made it")
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must not be negative: {logits_to_keep}")
        slots = torch.arange(past, past + T, device=input_ids.device)
        keys = slots if cache is None else cache.key_positions(T)
        mask, is_causal = None, T > 1
        # is_causal alone can say neither padding, nor empty slots, nor several tokens after others
        if attention_mask is not None or len(keys) != past + T or (past and T > 1):
            valid = None if attention_mask is None else attention_mask[:, keys.clamp(min=0)]
            mask, is_causal = build_mask(slots, keys, key_valid=valid), False
        x = self.decoder.embed(input_ids, past)
        for i, layer in enumerate(self.decoder.layers):
            x = layer(
                x,
                memory.keys_values[i],
                mask=mask,
                is_causal=is_causal,
                source_mask=memory.mask,
                cache=None if cache is None else cache[i],
            )
        return self.lm_head(x[:, -logits_to_keep:]) + self.final_logits_bias

    def forward(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Scores for each next token of the target, all positions at once, for training.

        Shape: source (B, S), target (B, T), masks alike -> (B, T, V).
        Raises: ValueError as `encode` and `decode`, before any work is done.
        """
        self.decoder.check("decoder_input_ids", decoder_input_ids, decoder_attention_mask)
        memory = self.encode(input_ids, attention_mask=attention_mask)
        return self.decode(decoder_input_ids, memory, attention_mask=decoder_attention_mask)

    def make_cache(
        self, kind: str = "dynamic", *, batch_size: int, max_length: int | None = None
    ) -> KVCache:
        """An empty cache of what the decoder has written; kinds as in `minillm.make_cache`."""
        c, weight = self.config, self.lm_head.weight
        heads = c.decoder_attention_heads
        return make_cache(
            kind,
            num_layers=c.decoder_layers,
            batch_size=batch_size,
            num_kv_heads=heads,
            key_dim=c.d_model // heads,
            value_dim=c.d_model // heads,
            max_length=max_length,
            dtype=product_dtype(weight),
            device=weight.device,
        )

    def generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        sampler: Callable[[Tensor, Tensor], Tensor] = GREEDY,
        **options: Any,
    ) -> Tensor:
        """Write a target for each source: the start token and up to `max_new_tokens` more.

        Without `attention_mask` pad tokens of the source are padding, unless padding and end are
        one token, as in transformers. `decoder_input_ids` is a beginning that is continued, padded
        on the left if at all. `options` are those of `minillm.generate`: `min_new_tokens`,
        `eos_token_id`, `stop`, `tokenizer`, `cache`, `on_token`.
        Shape: (B, S) ids -> (B, 1 + new), rows that ended filled with the pad (or end) token.
        Raises: ValueError as `encode` and `minillm.generate`; for a beginning without the start
            token, or more positions than there are.
        """
        c = self.config
        if options.get("compile"):
            raise ValueError("compile=True is for CausalLM: an EncoderDecoder is not compiled")
        if c.decoder_start_token_id is None:
            raise ValueError("decoder_start_token_id is None: a target has nothing to begin with")
        self.encoder.check("input_ids", input_ids, attention_mask)
        start, begun = c.decoder_start_token_id, decoder_input_ids
        if begun is None:
            begun = input_ids.new_full((len(input_ids), 1), start)
        self.decoder.check("decoder_input_ids", begun, decoder_attention_mask)
        check_prompt(begun, decoder_attention_mask, max_new_tokens, c.target_vocab_size)
        first = torch.zeros_like(begun[:, 0])
        if decoder_attention_mask is not None:
            first = decoder_attention_mask.long().argmax(1)
        if (wrong := begun.gather(1, first[:, None])[:, 0].ne(start)).any():
            which = wrong.nonzero()[:, 0].tolist()
            raise ValueError(f"the targets of rows {which} do not begin with {start}, the start")
        total, room = begun.shape[1] + max_new_tokens, c.max_position_embeddings
        if total - 1 > room:  # the last token is written, and not read again
            raise ValueError(f"{total} target tokens are asked for, there are {room} positions")
        pad = c.pad_token_id
        if attention_mask is None and pad is not None and pad not in c.eos_token_ids:
            attention_mask = input_ids.ne(pad).long()
        with torch.inference_mode(), EvalMode(self):
            memory = self.encode(input_ids, attention_mask=attention_mask)

        def choose(logits: Tensor, previous_ids: Tensor) -> Tensor:
            length = previous_ids.shape[1]
            forced = end_ids(c.forced_bos_token_id) if length == 1 else ()
            if length == total - 1:
                forced = end_ids(c.forced_eos_token_id) or forced
            if forced:
                only = torch.full_like(logits, -torch.inf)
                only[:, list(forced)] = 0.0
                logits = only
            return sampler(logits, previous_ids)

        return generate(
            Prompt(self, memory),
            begun,
            max_new_tokens=max_new_tokens,
            sampler=choose,
            attention_mask=decoder_attention_mask,
            **options,
        )


class Prompt:
    """A decoder with its memory: for `generate`, a language model like any other."""

    def __init__(self, model: EncoderDecoder, memory: EncodedSource) -> None:
        self.model, self.memory, self.make_cache = model, memory, model.make_cache
        self.config = replace(model.config, vocab_size=model.config.target_vocab_size)

    def __call__(self, input_ids: Tensor, **options: Any) -> Tensor:
        return self.model.decode(input_ids, self.memory, **options)
