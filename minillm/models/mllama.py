"""Llama 3.2 Vision's way of reading: the text model as it was, and layers between that look.

Explained in notebooks/deeper/16_real_readers.ipynb. Computes what the text model of Hugging Face's
Mllama does with features of pictures, where their mask is right (see `MllamaText`).
"""

# Built from notebooks/deeper/16_real_readers.ipynb: edit there, then make build.

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from minillm.cache.base import KVCache
from minillm.config import ModelConfig
from minillm.generation.decoding import generate
from minillm.model import CausalLM, count_parameters
from minillm.models.pictures import GatedCrossAttentionLayer
from minillm.models.vision import check_floats
from minillm.modes import EvalMode

__all__ = ["EXTRA_TOKENS", "MllamaConfig", "MllamaPrompt", "MllamaText", "picture_mask"]

EXTRA_TOKENS = 8  # ids that have a vector and no score: the model may read them and not write them


def picture_mask(input_ids: Tensor, image_token_id: int) -> Tensor:
    """Which pictures each token may look at: the last one up to it, and those joined to that one.

    A picture stands where its one token stands. Text before the first may look at none; pictures
    side by side are seen together by the text that follows.
    Shape: (B, T) -> (B, T, pictures) bool, as many pictures as the row that has most.
    Source: the processor of Llama 3.2 Vision.
    """
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids must be a tensor, not {input_ids!r:.60}")
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must be (B, T), not {tuple(input_ids.shape)}")
    rows = [(row == image_token_id).nonzero().flatten().tolist() for row in input_ids]
    mask = torch.zeros(*input_ids.shape, max(map(len, rows)), dtype=torch.bool)
    for row, places in enumerate(rows):
        end = input_ids.shape[1]
        for number, place in reversed(list(enumerate(places))):
            following = places[number + 1 : number + 2]
            if following and following[0] != place + 1:
                end = following[0]
            mask[row, place:end, number] = True
    return mask.to(input_ids.device)


@dataclass(frozen=True)
class MllamaConfig:
    """A language model of the llama family, and where layers that look stand among its own.

    Args:
        text: `num_hidden_layers` counts all layers, those that look included, as in the files.
        cross_attention_layers: their numbers, from 0.
    Raises: ValueError, with the values, for parts that do not fit each other.
    """

    text: ModelConfig
    cross_attention_layers: Sequence[int] = (3, 8, 13, 18, 23, 28, 33, 38)

    def __post_init__(self) -> None:
        places, number = tuple(self.cross_attention_layers), self.text.num_hidden_layers
        object.__setattr__(self, "cross_attention_layers", places)
        if self.text.model_type != "llama":
            raise ValueError(f"text must be of the family llama, not {self.text.model_type}")
        if any(type(i) is not int or not 0 <= i < number for i in places):
            raise ValueError(f"cross_attention_layers={places}, but layers are 0 to {number - 1}")
        if list(places) != sorted(set(places)) or len(places) == number:
            raise ValueError(
                f"cross_attention_layers={places} must ascend, and leave some of {number} layers"
            )
        if self.text.tie_word_embeddings:
            extra = f"it has {EXTRA_TOKENS} ids that the head has not"
            raise ValueError(f"tie_word_embeddings=True: the embedding cannot be the head, {extra}")
        for name in ("attention_bias", "mlp_bias"):
            if getattr(self.text, name):
                raise ValueError(f"{name}=True is not computed by the layers that look")
        if self.text.head_dim * self.text.num_attention_heads != self.text.hidden_size:
            sizes = f"{self.text.num_attention_heads} heads of {self.text.head_dim}"
            raise ValueError(f"{sizes} are not hidden_size={self.text.hidden_size}")


class MllamaText(nn.Module):
    """A language model between whose layers others look at pictures.

    `language` is a text model like any other; `looks` are the layers put between. A token that may
    look at no picture passes through them unchanged. In transformers 5.23 it does not: its
    attention there reads every picture (issue 39379).
    Source: Grattafiori et al. 2024, The Llama 3 herd of models, section 7.
    """

    def __init__(self, config: MllamaConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        c, number = config.text, len(config.cross_attention_layers)
        self.language = CausalLM(
            replace(c, num_hidden_layers=c.num_hidden_layers - number), seed=seed
        )
        with torch.random.fork_rng(devices=[]):  # torch's own initial values leave no trace
            embedding = nn.Embedding(c.vocab_size + EXTRA_TOKENS, c.hidden_size)
            self.language.model.embed_tokens = embedding
            self.looks = nn.ModuleList(
                GatedCrossAttentionLayer(
                    c.hidden_size,
                    c.num_attention_heads,
                    c.intermediate_size,
                    num_kv_heads=c.num_key_value_heads,
                    activation=c.hidden_act,
                    eps=c.rms_norm_eps,
                )
                for _ in range(number)
            )
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Draw all matrices anew; gates 0, so that the model is the text model alone."""
        self.language.reset_parameters(seed)
        device = self.language.lm_head.weight.device
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        for name, weight in self.looks.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, self.config.text.initializer_range, generator=generator)
            elif name.endswith("gate"):
                weight.zero_()

    def look(self, features: Tensor | None = None, mask: Tensor | None = None) -> "MllamaPrompt":
        """What the layers between read of the pictures, computed once, for as long as text grows.

        Shape: features (B, S, C), mask (B, T, S) bool, True where a token of the prompt may look.
        Raises: ValueError for features of another width, or a mask that does not fit.
        """
        self._check_pictures(features, mask)
        if features is None:
            return MllamaPrompt(self, None, None)
        layers: Any = self.looks
        return MllamaPrompt(self, [layer.keys_values(features) for layer in layers], mask)

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Scores for the next token after each one; without features those of the text alone.

        Shape: ids and attention_mask (B, T), the others as `look` -> (B, T or logits_to_keep, V).
        Raises: ValueError as `look`, or for features and a mask of other rows than the ids.
        """
        self._check_rows(input_ids, features, mask, attention_mask)
        prompt = self.look(features, mask)
        return prompt(input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep)

    def _check_pictures(self, features: Tensor | None, mask: Tensor | None) -> None:
        """Raises: ValueError for features of another width, or a mask that does not fit."""
        if mask is not None and not isinstance(mask, Tensor):
            raise ValueError(f"mask must be a tensor, not {mask!r:.60}")
        if features is None:
            if mask is not None:
                raise ValueError(f"a mask {tuple(mask.shape)} of pictures, and no pictures")
            return
        check_floats("features", features)
        wanted = ("B", "S", self.config.text.hidden_size)
        if features.ndim != 3 or features.shape[2] != wanted[2] or not features.numel():
            raise ValueError(f"features must be {wanted}, not {tuple(features.shape)}")
        B, S = features.shape[:2]
        if mask is None:
            return
        if mask.dtype != torch.bool or mask.ndim != 3 or mask.shape[::2] != (B, S):
            found = f"{mask.dtype} {tuple(mask.shape)}"
            raise ValueError(f"mask must be bool ({B}, T, {S}), not {found}")

    def _check_rows(
        self,
        input_ids: Tensor,
        features: Tensor | None,
        mask: Tensor | None,
        attention_mask: Tensor | None,
    ) -> None:
        """Raises: ValueError for features of other texts, or a mask that has not a row a token."""
        self._check_pictures(features, mask)
        if input_ids is None:
            raise ValueError("input_ids must be a tensor, not None")
        self.language.model.prepare(input_ids, attention_mask, None, None)  # refuses other ids
        if features is not None and len(features) != len(input_ids):
            shapes = f"{tuple(features.shape)} for ids {tuple(input_ids.shape)}"
            raise ValueError(f"features must belong to the rows of ids, not {shapes}")
        if mask is not None and mask.shape[:2] != input_ids.shape:
            shapes = f"{tuple(mask.shape)} for ids {tuple(input_ids.shape)}"
            raise ValueError(f"the mask of pictures must have a row a token, not {shapes}")

    def generate(
        self,
        input_ids: Tensor,
        features: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Continue each row; new tokens look where the last of the prompt looks.

        `options` are those of `minillm.generate`, but for `compile`.
        Shape: as `forward` -> (B, T + new).
        Raises: ValueError as `forward` and `minillm.generate`.
        """
        if options.get("compile"):
            raise ValueError("compile=True is for CausalLM: a MllamaText is not compiled")
        self._check_rows(input_ids, features, mask, attention_mask)
        with torch.inference_mode(), EvalMode(self):
            prompt: Any = self.look(features, mask)
        return generate(
            prompt,
            input_ids,
            max_new_tokens=max_new_tokens,
            attention_mask=attention_mask,
            **options,
        )

    def num_parameters(
        self, *, only_trainable: bool = False, exclude_embeddings: bool = False
    ) -> int:
        """Numbers in the weights, frozen ones included; see `minillm.model.count_parameters`."""
        return count_parameters(self, only_trainable, exclude_embeddings)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **options: Any) -> "MllamaText":
        """The text model of a checkpoint; see `minillm.pretrained.mllama`."""
        from minillm.pretrained.mllama import load

        return load(name, **options)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write files that transformers reads; see `minillm.pretrained.mllama`."""
        from minillm.pretrained.mllama import save

        save(self, folder)


class MllamaPrompt:
    """Texts with the pictures they look at: for `generate`, a language model like any other."""

    def __init__(
        self,
        model: MllamaText,
        keys_values: Sequence[tuple[Tensor, Tensor]] | None,
        mask: Tensor | None,
    ) -> None:
        self.model, self.keys_values, self.mask = model, keys_values, mask
        text = model.config.text
        self.config = replace(text, vocab_size=text.vocab_size + EXTRA_TOKENS)
        self.make_cache = model.language.make_cache

    def __call__(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Scores after each of the new tokens, which belong to the prompt or follow it.

        Shape: (B, T) ids, (B, past + T) mask -> (B, T or logits_to_keep, V).
        """
        language, decoder = self.model.language, self.model.language.model
        past, T = 0 if cache is None else cache.length, input_ids.shape[1]
        positions, mask, is_causal = decoder.prepare(input_ids, attention_mask, None, cache)
        rotary: Any = decoder.rotary  # the family has one
        rope = rotary(positions)
        reads = self.mask
        if reads is not None:  # what follows the prompt looks where its last token does
            rows = torch.arange(past, past + T, device=reads.device)
            reads = reads[:, rows.clamp(max=reads.shape[1] - 1)]
        x = decoder.embed(input_ids, positions)
        own = iter(enumerate(decoder.layers))
        looks = iter(zip(self.model.looks, self.keys_values or (), strict=False))
        for place in range(self.model.config.text.num_hidden_layers):
            if place not in self.model.config.cross_attention_layers:
                number, layer = next(own)
                kept = None if cache is None else cache[number]
                x = layer(x, rope=rope, mask=mask, is_causal=is_causal, cache=kept)
            elif self.keys_values is not None:
                look, seen = next(looks)
                x = look(x, seen, mask=reads)
        return language.lm_head(decoder.norm(x)[:, -logits_to_keep:])
