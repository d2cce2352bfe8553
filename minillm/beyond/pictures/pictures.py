"""Language models that read pictures: placeholders in the text, or attention through a gate.

Explained in notebooks/beyond/16_pictures.ipynb. `PictureLM` computes what Hugging Face's LLaVA
does, `GatedCrossAttentionLayer` is the layer of Llama 3.2 Vision (Mllama).
"""

# Built from notebooks/beyond/16_pictures.ipynb: edit there, then make build.

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minillm.beyond.pictures.picture_parts import (
    PictureConfig,
    Prompt,
    check_features,
    check_keys_values,
)
from minillm.beyond.pictures.vision import VisionTransformer
from minillm.beyond.pictures.vision_parts import check_floats
from minillm.beyond.two_sequences.cross import CrossAttention
from minillm.cache import KVCache
from minillm.generation import generate
from minillm.layers import ACTIVATIONS, GatedMLP, RMSNorm
from minillm.model import CausalLM
from minillm.support.checks.attention import check_input
from minillm.support.checks.kinds import check_one_of, check_sizes
from minillm.support.modes import EvalMode
from minillm.support.saved import SavedModel

__all__ = ["GatedCrossAttentionLayer", "PictureLM", "Projector", "put_pictures"]


def put_pictures(
    embeddings: Tensor, ids: Tensor, placeholder: int, features: Tensor | None
) -> Tensor:
    """Vectors of a text with features of pictures in the place of its placeholders, in order.

    Shape: embeddings (B, T, C), ids (B, T), features (..., C) -> (B, T, C)
    Raises: ValueError that names both counts, if there are not as many features as placeholders
        or, with features (P, N, C), if a row's placeholders are no multiple of N; both sizes, if
        features are no vectors of the text's size.
    """
    check_floats("embeddings", embeddings)
    if not isinstance(ids, Tensor) or ids.shape != embeddings.shape[:-1]:
        given = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"ids should be {tuple(embeddings.shape[:-1])}, not {given}")
    here = ids == placeholder
    if features is None:
        if ids.is_cpu and (count := int(here.sum())):
            raise ValueError(f"{count} placeholders (id {placeholder}) in the text and no pictures")
        return embeddings
    check_features(embeddings, ids, placeholder, features)
    return embeddings.masked_scatter(here[..., None], features.to(embeddings.dtype))


class Projector(nn.Module):
    """Features of a picture as vectors among those of words: linear, activation, linear.

    Shape: (..., vision size) -> (..., C)
    Source: Liu et al. 2023, Improved baselines with visual instruction tuning (LLaVA-1.5).
    """

    def __init__(
        self, vision_size: int, hidden_size: int, *, activation: str = "gelu", bias: bool = True
    ) -> None:
        super().__init__()
        check_sizes(vision_size=vision_size, hidden_size=hidden_size)
        check_one_of("activation", activation, list(ACTIVATIONS))
        self.activation = ACTIVATIONS[activation]
        self.linear_1 = nn.Linear(vision_size, hidden_size, bias=bias)
        self.linear_2 = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear_2(self.activation(self.linear_1(features)))


class PictureLM(SavedModel):
    """A language model whose placeholders are filled with what a vision tower saw.

    Weights are drawn with `seed`.
    Source: Liu et al. 2023, Visual instruction tuning (LLaVA); parts named as in Hugging Face's.
    """

    files = "vision.LLAVA"

    def __init__(self, config: PictureConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = VisionTransformer(config.vision_config, seed=seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.multi_modal_projector = Projector(
                config.vision_config.hidden_size * len(config.feature_layers),
                config.text_config.hidden_size,
                activation=config.projector_hidden_act,
                bias=config.multimodal_projector_bias,
            )
        self.language_model = CausalLM(config.text_config, seed=seed)

    def picture_features(self, pixels: Tensor) -> Tensor:
        """What stands in for the placeholders. Shape: (P, channels, height, width) -> (P, N, C)."""
        states = self.vision_tower.hidden_states(pixels)
        chosen = torch.cat([states[i] for i in self.config.feature_layers], dim=-1)
        if self.config.vision_feature_select_strategy == "default":
            chosen = chosen[:, 1:]
        return self.multi_modal_projector(chosen)

    def forward(
        self,
        input_ids: Tensor,
        *,
        pixels: Tensor | None = None,
        features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Scores as `CausalLM` gives them; pictures fill the placeholders in order.

        Give `pixels`, or the `features` that `picture_features` made of them.
        Shape: (B, T) ids, (P, channels, height, width) pixels -> (B, T, V)
        Raises: ValueError if placeholders and features do not match, or as `CausalLM`.
        """
        if pixels is not None and features is not None:
            raise ValueError("give pixels or features, not both")
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must not be negative: {logits_to_keep}")
        decoder = self.language_model.model
        positions, mask, is_causal = decoder.prepare(input_ids, attention_mask, position_ids, cache)
        if pixels is not None:
            features = self.picture_features(pixels)
        x = decoder.embed(input_ids, positions)
        x = put_pictures(x, input_ids, self.config.image_token_index, features)
        x = decoder(x, positions, mask, is_causal, cache)  # (B, T, C)
        return self.language_model.lm_head(x[:, -logits_to_keep:])

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, *, pixels: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Continue texts with pictures in them; the pictures are read once.

        `options` are those of `minillm.generate`, without compile. A placeholder is never written.
        Shape: (B, T) -> (B, T + new)
        Raises: ValueError for compile=True, or as `forward` and `minillm.generate`.
        """
        if options.get("compile"):
            raise ValueError("compile=True: a step of a PictureLM cannot be compiled")
        with EvalMode(self):
            features = None if pixels is None else self.picture_features(pixels)
        return generate(Prompt(self, features), input_ids, **options)


class GatedCrossAttentionLayer(nn.Module):
    """A layer between two decoder layers, through which the text may look at a picture.

    Attention to the picture and a feed-forward block, each added through a gate, tanh of one
    learned number. The gates begin at 0: with new layers the model is exactly the text model.
    Where `mask` lets a token read nothing, its vector stays as it is. transformers' Mllama lets
    such a token read the whole picture in the attention, the original code of Llama 3.2 does not.

    Raises: ValueError if the sizes do not fit each other, or the mask does not.
    Source: Alayrac et al. 2022 (Flamingo), section 2.2; names as in Hugging Face's Mllama.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
        *,
        num_kv_heads: int | None = None,
        activation: str = "silu",
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_sizes(hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.input_layernorm = RMSNorm(hidden_size, eps=eps)
        self.cross_attn = CrossAttention(
            hidden_size,
            num_heads,
            num_kv_heads=num_kv_heads,
            bias=False,
            qk_norm=partial(RMSNorm, eps=eps),
        )
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1))
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=eps)
        self.mlp = GatedMLP(hidden_size, intermediate_size, activation=activation)
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1))

    def keys_values(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the text will read, to be kept while it grows. Shape: (B, S, C) -> (B, G, S, D)."""
        check_floats("features", features)
        return self.cross_attn.keys_values(features)

    def forward(
        self, x: Tensor, keys_values: tuple[Tensor, Tensor], *, mask: Tensor | None = None
    ) -> Tensor:
        """One step of the text through the layer.

        Shape: x (B, T, C), mask bool (B or 1, T or 1, S), True = may read -> (B, T, C).
        """
        check_floats("x", x)
        check_input(x, self.cross_attn.hidden_size)
        check_keys_values(keys_values, mask, x)
        heads = None if mask is None else mask[:, None]
        read = self.cross_attn(self.input_layernorm(x), keys_values, mask=heads)
        x = x + self.cross_attn_attn_gate.tanh() * read
        block = self.mlp(self.post_attention_layernorm(x))
        if mask is not None:
            block = block * mask.any(-1, keepdim=True)
        return x + self.cross_attn_mlp_gate.tanh() * block
