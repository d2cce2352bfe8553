"""What a model that reads pictures is made of besides its layers: sizes, a prompt, checks.

Written by hand; beyond/16_pictures shows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm.beyond.pictures.vision_parts import VisionConfig, check_floats
from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.layers import ACTIVATIONS
from minillm.support.checks.kinds import SWITCH, check_kind, check_one_of


@dataclass(frozen=True)
class PictureConfig:
    """A vision tower, a language model, and how the first speaks to the second, as in LLaVA.

    Args:
        image_token_index: the placeholder, an id of the text's vocabulary.
        vision_feature_layer: which of the tower's `hidden_states` become words; several are laid
            side by side.
        vision_feature_select_strategy: "default" leaves the first vector of each picture out (the
            class token), "full" keeps all.
    Raises: ValueError, with the value, for what cannot be or is not computed.
    """

    vision_config: VisionConfig
    text_config: ModelConfig
    image_token_index: int = 32000
    vision_feature_layer: int | tuple[int, ...] = -2
    vision_feature_select_strategy: str = "default"
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = True

    def __post_init__(self) -> None:
        kinds = ("llama", "mistral", "qwen2", "qwen3")
        check_one_of("text_config of model_type", self.text_config.model_type, kinds)
        size, token = self.text_config.vocab_size, self.image_token_index
        if type(token) is not int or not 0 <= token < size:
            raise ValueError(f"image_token_index={token!r}, but ids are 0 to {size - 1}")
        layers = self.vision_feature_layer
        if isinstance(layers, list):
            object.__setattr__(self, "vision_feature_layer", tuple(layers))
        depth = self.vision_config.num_hidden_layers + 1
        known = (type(i) is int and -depth <= i < depth for i in self.feature_layers)
        if not self.feature_layers or not all(known):
            raise ValueError(f"vision_feature_layer={layers!r}, there are {depth} states")
        strategy = self.vision_feature_select_strategy
        check_one_of("vision_feature_select_strategy", strategy, ("default", "full"))
        check_one_of("projector_hidden_act", self.projector_hidden_act, list(ACTIVATIONS))
        check_kind("multimodal_projector_bias", self.multimodal_projector_bias, SWITCH)
        if self.features_per_picture < 1:
            raise ValueError("no vector of a picture is left by vision_feature_select_strategy")

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The chosen states, one or several."""
        layers = self.vision_feature_layer
        return tuple(layers) if isinstance(layers, Sequence) else (layers,)

    @property
    def features_per_picture(self) -> int:
        """How many placeholders a picture fills."""
        dropped = self.vision_feature_select_strategy == "default"
        return self.vision_config.num_positions - dropped


class Prompt:
    """A model with the pictures it looks at: for `generate`, a language model like any other."""

    def __init__(self, model: Any, features: Tensor | None) -> None:
        self.model, self.features = model, features
        self.config, self.make_cache = model.config.text_config, model.language_model.make_cache

    def __call__(
        self, input_ids: Tensor, *, cache: KVCache | None = None, **options: Any
    ) -> Tensor:
        first = cache is None or cache.length == 0  # later steps hold no placeholder
        features = self.features if first else None
        logits = self.model(input_ids, features=features, cache=cache, **options)
        logits[..., self.model.config.image_token_index] = -torch.inf
        return logits


def check_features(embeddings: Tensor, ids: Tensor, placeholder: int, features: Tensor) -> None:
    """Raises: ValueError unless features are vectors as words are, as many as placeholders, and
    with features (P, N, C) a multiple of N in each row.
    """
    check_floats("features", features)
    C, here = embeddings.shape[-1], ids == placeholder
    if features.shape[-1:] != (C,):
        raise ValueError(f"features {tuple(features.shape)} should be (..., {C}), as words are")
    count, found = int(here.sum()), features.numel() // C
    if count != found:
        raise ValueError(f"{count} placeholders (id {placeholder}) in the text, {found} features")
    rows = here.sum(-1)
    if count and features.ndim == 3 and (rows % features.shape[1]).any():
        each = f"not multiples of the {features.shape[1]} features of a picture"
        raise ValueError(f"placeholders in the rows are {rows.tolist()}, {each}")


def check_keys_values(keys_values: Any, mask: Tensor | None, x: Tensor) -> None:
    """Raises: ValueError unless these are a picture's keys and values, and the mask fits them."""
    if not isinstance(keys_values, tuple) or len(keys_values) != 2:
        kind = type(keys_values).__name__
        raise ValueError(f"keys_values must be what keys_values(features) gave, not {kind}")
    if mask is None:
        return
    B, T, S = len(x), x.shape[1], keys_values[0].shape[2]
    is_bool = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim == 3
    if not is_bool or any(
        n not in (1, size) for n, size in zip(mask.shape, (B, T, S), strict=True)
    ):
        tensor = isinstance(mask, Tensor)
        given = f"{mask.dtype} {tuple(mask.shape)}" if tensor else type(mask).__name__
        raise ValueError(f"mask must be bool (B, T, S) = {(B, T, S)}, not {given}")
