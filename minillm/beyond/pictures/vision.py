"""A Transformer that reads pictures: cut into patches, each patch a vector, attention among them.

Explained in notebooks/beyond/16_pictures.ipynb. Computes what Hugging Face's ViT, SigLIP (its
vision tower) and CLIP (its vision tower) do; `deeper.pretrained.vision` reads and writes files.
"""

# Built from notebooks/beyond/16_pictures.ipynb: edit there, then make build.

import torch
from torch import Tensor, nn

from minillm.beyond.pictures.vision_parts import (
    POOLER_ACTIVATIONS,
    AttentionPool,
    VisionConfig,
    check_floats,
    check_pixels,
)
from minillm.heads import MultiHeadAttention
from minillm.layers import MLP, LayerNorm
from minillm.support.checks.attention import check_input
from minillm.support.saved import SavedModel

__all__ = ["VisionLayer", "VisionTransformer", "cut_patches"]


def cut_patches(pixels: Tensor, patch_size: int | tuple[int, int]) -> Tensor:
    """The patches of pictures, row by row; in each all pixels of a channel, then the next channel.

    Shape: (B, channels, height, width) -> (B, N, channels * patch height * patch width)
    Raises: ValueError, with the sizes, if patches do not fill the picture.
    """
    check_floats("pixels", pixels)
    p, q = patch_size if isinstance(patch_size, tuple) else (patch_size, patch_size)
    if any(type(n) is not int or n < 1 for n in (p, q)):
        raise ValueError(f"patch_size must be a positive integer or two, not {patch_size!r}")
    if pixels.ndim != 4 or pixels.shape[2] % p or pixels.shape[3] % q:
        raise ValueError(f"pictures {tuple(pixels.shape)} cannot be cut into patches of {p} x {q}")
    grid = pixels.unflatten(3, (-1, q)).unflatten(2, (-1, p))  # (B, channels, rows, p, columns, q)
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class VisionLayer(nn.Module):
    """Attention of all patches to all, then the feed-forward block; each normalised first.

    Shape: (B, N, C) -> (B, N, C).
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        c, C = config, config.hidden_size
        self.layer_norm1 = LayerNorm(C, eps=c.layer_norm_eps)
        self.self_attn = MultiHeadAttention(
            C,
            c.num_attention_heads,
            head_dim=C // c.num_attention_heads,
            bias=c.qkv_bias,
            out_bias=True,
        )
        self.layer_norm2 = LayerNorm(C, eps=c.layer_norm_eps)
        self.mlp = MLP(C, c.intermediate_size, activation=c.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionTransformer(SavedModel):
    """Pictures to vectors, one a patch.

    Weights are drawn with `seed`: normal with `initializer_range`, biases zero.
    Source: Dosovitskiy et al. 2020 (ViT); Radford et al. 2021 (CLIP); Zhai et al. 2023 (SigLIP).
    """

    files = "vision.TOWER"

    def __init__(self, config: VisionConfig, *, seed: int = 0) -> None:
        super().__init__()
        c, C = config, config.hidden_size
        self.config, kind = config, config.model_type
        with torch.random.fork_rng(devices=[]):  # torch's own initial values leave no trace
            bias = kind != "clip_vision_model"
            self.patch_embedding = nn.Conv2d(c.num_channels, C, c.patch, stride=c.patch, bias=bias)
            self.class_embedding = nn.Parameter(torch.zeros(C)) if c.class_token else None
            self.position_embedding = nn.Embedding(c.num_positions, C)
            norms = [LayerNorm(C, eps=c.layer_norm_eps) for _ in range(2)]
            self.pre_layernorm = norms[0] if kind == "clip_vision_model" else None
            self.layers = nn.ModuleList(VisionLayer(c) for _ in range(c.num_hidden_layers))
            self.post_layernorm = norms[1]
            self.head: nn.Module | None = None
            if c.vision_use_head and kind == "vit":
                self.head = nn.Linear(C, c.pooler_output_size or C)
            elif c.vision_use_head and kind == "siglip_vision_model":
                self.head = AttentionPool(c)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Draw all matrices anew; biases zero; norms as they were made."""
        device = self.post_layernorm.weight.device
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() > 1 or name == "class_embedding":
                weight.normal_(0.0, self.config.initializer_range, generator=generator)
            elif name.endswith(("_proj.bias", "patch_embedding.bias", "head.bias")):
                weight.zero_()

    def embed(self, pixels: Tensor) -> Tensor:
        """Vectors of the patches with their positions, the class token first if there is one.

        Shape: (B, channels, height, width) -> (B, N, C)
        Raises: ValueError as `check_pixels`.
        """
        check_pixels(pixels, self.config)
        weight = self.patch_embedding.weight
        x = self.patch_embedding(pixels.to(weight.dtype)).flatten(2).mT  # (B, N, C)
        if self.class_embedding is not None:
            x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1)
        x = x + self.position_embedding.weight
        return x if self.pre_layernorm is None else self.pre_layernorm(x)

    def hidden_states(self, pixels: Tensor) -> list[Tensor]:
        """The vectors before the first layer and after each, without the last norm."""
        states = [self.embed(pixels)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return states

    def forward(self, pixels: Tensor) -> Tensor:
        """The vectors after the last layer; normalised, but for CLIP, whose norm is `pool`'s.

        Shape: (B, channels, height, width) -> (B, N, C)
        """
        x = self.embed(pixels)
        for layer in self.layers:
            x = layer(x)
        return x if self.pre_layernorm is not None else self.post_layernorm(x)

    def pool(self, features: Tensor) -> Tensor:
        """One vector for each picture, from what `forward` gave. Shape: (B, N, C) -> (B, C).

        Raises: ValueError if the model has no head for it, or for features of another size.
        """
        check_input(features, self.config.hidden_size)
        if self.config.model_type == "clip_vision_model":
            return self.post_layernorm(features[:, 0])
        if self.head is None:
            raise ValueError(f"this {self.config.model_type} was made with vision_use_head=False")
        if self.config.model_type == "vit":
            return POOLER_ACTIVATIONS[self.config.pooler_act](self.head(features[:, 0]))
        return self.head(features)
