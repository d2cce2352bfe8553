"""A Transformer that reads pictures: cut into patches, each patch a vector, attention among them.

Explained in notebooks/beyond/16_pictures.ipynb. Computes what Hugging Face's ViT, SigLIP (its
vision tower) and CLIP (its vision tower) do; `minillm.pretrained.vision` reads and writes files.
"""

# Built from notebooks/beyond/16_pictures.ipynb: edit there, then make build.

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minillm.checks import check_input
from minillm.nn.attention import attention
from minillm.nn.layers import ACTIVATIONS, MLP, LayerNorm
from minillm.nn.multihead import MultiHeadAttention, merge_heads, split_heads

__all__ = [
    "AttentionPool",
    "VisionConfig",
    "VisionLayer",
    "VisionTransformer",
    "check_floats",
    "cut_patches",
]


def check_floats(name: str, x: Tensor) -> None:
    """Raises: ValueError, with name and type, unless x is a tensor of floats."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a tensor of floats, not {given}")


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


@dataclass(frozen=True)
class VisionConfig:
    """Sizes and switches of a `VisionTransformer`, named as in Hugging Face's.

    Args:
        model_type: "vit" has a class token and a last norm; "siglip_vision_model" no class token;
            "clip_vision_model" a class token and a first norm, its patches have no bias, and the
            last norm is for the pooled vector alone.
        image_size, patch_size: height and width, or one number for both. What whole patches leave
            over at the right and at the bottom is not read (SigLIP: 384 pixels, patches of 14).
        qkv_bias: whether queries, keys and values have biases (False: ViT only).
        vision_use_head: whether there are weights that make one vector of a picture: ViT puts
            the class token through a layer, SigLIP asks its patches with one learned query.
        pooler_output_size, pooler_act: of ViT's layer; hidden_size if None.
    Raises: ValueError, with the value, for what cannot be or is not computed.
    """

    model_type: str = "vit"
    image_size: int | tuple[int, int] = 224
    patch_size: int | tuple[int, int] = 16
    num_channels: int = 3
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    qkv_bias: bool = True
    vision_use_head: bool = False
    pooler_output_size: int | None = None
    pooler_act: str = "tanh"
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        kinds = ("vit", "siglip_vision_model", "clip_vision_model")
        if self.model_type not in kinds:
            raise ValueError(
                f"unknown model_type {self.model_type!r}; known are {', '.join(kinds)}"
            )
        for name in ("image_size", "patch_size"):  # JSON has lists
            given = getattr(self, name)
            object.__setattr__(self, name, tuple(given) if isinstance(given, list) else given)
        for name in ("image_size", "patch_size", *_SIZES):
            given = getattr(self, name)
            if name == "pooler_output_size" and given is None:
                continue
            pair = name in ("image_size", "patch_size") and isinstance(given, tuple)
            numbers = given if pair else (given,)
            if len(numbers) != (2 if pair else 1) or any(
                type(n) is not int or n < 1 for n in numbers
            ):
                raise ValueError(f"{name} must be a positive integer, not {given!r}")
        if any(size < patch for size, patch in zip(self.size, self.patch, strict=True)):
            raise ValueError(f"no patch of {self.patch_size} in a picture of {self.image_size}")
        if self.hidden_size % self.num_attention_heads and self.model_type != "vit":
            heads = self.num_attention_heads
            raise ValueError(f"num_attention_heads={heads} do not divide {self.hidden_size=}")
        for name in (self.hidden_act, self.pooler_act):
            if name not in _POOLER_ACTIVATIONS:
                known = ", ".join(ACTIVATIONS)
                raise ValueError(f"unknown activation {name!r}; known are {known}")
        if not self.qkv_bias and self.model_type != "vit":
            raise ValueError("qkv_bias=False is ViT's; the others have biases")
        for name in ("initializer_range", "layer_norm_eps"):
            given = getattr(self, name)
            if not isinstance(given, int | float) or not 0.0 <= given < math.inf:
                raise ValueError(f"{name} must be a number, not negative, and not {given!r}")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of a picture."""
        s = self.image_size
        return (s, s) if isinstance(s, int) else s

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch."""
        p = self.patch_size
        return (p, p) if isinstance(p, int) else p

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        (height, width), (p, q) = self.size, self.patch
        return height // p, width // q

    @property
    def class_token(self) -> bool:
        """Whether a vector stands before those of the patches."""
        return self.model_type != "siglip_vision_model"

    @property
    def num_positions(self) -> int:
        """How many vectors a picture becomes."""
        return self.grid[0] * self.grid[1] + self.class_token


_SIZES = """
    num_channels hidden_size intermediate_size num_hidden_layers num_attention_heads
    pooler_output_size
""".split()

_POOLER_ACTIVATIONS = {**ACTIVATIONS, "tanh": torch.tanh}


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


class AttentionPool(nn.Module):
    """One vector of many: a learned query reads them all, and a feed-forward block follows.

    Shape: (B, N, C) -> (B, C).
    Source: Zhai et al. 2022, Scaling vision transformers, section 3.1 (MAP head); SigLIP's head.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        c, C = config, config.hidden_size
        self.probe = nn.Parameter(torch.randn(1, 1, C))
        self.attention = MultiHeadAttention(C, c.num_attention_heads, bias=True, out_bias=True)
        self.layernorm = LayerNorm(C, eps=c.layer_norm_eps)
        self.mlp = MLP(C, c.intermediate_size, activation=c.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        a = self.attention
        q = split_heads(a.q_proj(self.probe.expand(len(x), 1, -1)), a.num_heads)
        k, v = (split_heads(proj(x), a.num_heads) for proj in (a.k_proj, a.v_proj))
        read = a.o_proj(merge_heads(attention(q, k, v)))
        return (read + self.mlp(self.layernorm(read)))[:, 0]


class VisionTransformer(nn.Module):
    """Pictures to vectors, one a patch.

    Weights are drawn with `seed`: normal with `initializer_range`, biases zero.
    Source: Dosovitskiy et al. 2020 (ViT); Radford et al. 2021 (CLIP); Zhai et al. 2023 (SigLIP).
    """

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
        Raises: ValueError for other pictures than those the config names, with the sizes, and for
            pixels that are no floats, are NaN or infinite (looked for on the CPU alone).
        """
        c = self.config
        check_floats("pixels", pixels)
        if pixels.ndim != 4 or pixels.shape[1:] != (c.num_channels, *c.size):
            wanted = f"(B, {c.num_channels}, {c.size[0]}, {c.size[1]})"
            patches = f"in patches of {c.patch[0]} x {c.patch[1]}"
            raise ValueError(f"pictures {tuple(pixels.shape)} should be {wanted}, {patches}")
        if pixels.device.type == "cpu" and (bad := int((~pixels.isfinite()).sum())):
            raise ValueError(f"{bad} of {pixels.numel()} pixels are NaN or infinite")
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
            return _POOLER_ACTIVATIONS[self.config.pooler_act](self.head(features[:, 0]))
        return self.head(features)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **options: Any) -> "VisionTransformer":
        """The picture tower of a checkpoint; see `minillm.pretrained.vision.load`."""
        from minillm.pretrained.vision import load

        return load(name, **options)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint that transformers reads, too; see `minillm.pretrained.vision`."""
        from minillm.pretrained.vision import save

        save(self, folder)
