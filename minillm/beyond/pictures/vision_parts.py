"""What a picture tower is made of besides its layers: its sizes, and one vector of many.

Written by hand; beyond/16_pictures shows it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minillm.attention import attention
from minillm.heads import MultiHeadAttention, merge_heads, split_heads
from minillm.layers import ACTIVATIONS, MLP, LayerNorm
from minillm.support.checks.kinds import (
    NOT_NEGATIVE,
    SWITCH,
    Kind,
    check_one_of,
    check_values,
    whole,
)

POOLER_ACTIVATIONS = {**ACTIVATIONS, "tanh": torch.tanh}


def _are_sides(x: object) -> bool:
    sides = x if isinstance(x, tuple) and len(x) == 2 else (x,)
    return all(type(n) is int and n > 0 for n in sides)


_SIDES: Kind = "a positive integer or two", _are_sides
_KINDS = {
    **dict.fromkeys(("image_size", "patch_size"), _SIDES),
    **dict.fromkeys(("num_channels", "hidden_size", "intermediate_size"), whole(1)),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), whole(1)),
    "pooler_output_size": whole(1),
    **dict.fromkeys(("qkv_bias", "vision_use_head"), SWITCH),
    **dict.fromkeys(("initializer_range", "layer_norm_eps"), NOT_NEGATIVE),
}


def check_floats(name: str, x: Tensor) -> None:
    """Raises: ValueError, with name and type, unless x is a tensor of floats."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a tensor of floats, not {given}")


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
        check_one_of("model_type", self.model_type, kinds)
        for name in ("image_size", "patch_size"):  # JSON has lists
            given = getattr(self, name)
            object.__setattr__(self, name, tuple(given) if isinstance(given, list) else given)
        check_values(self, _KINDS)
        if any(size < patch for size, patch in zip(self.size, self.patch, strict=True)):
            raise ValueError(f"no patch of {self.patch_size} in a picture of {self.image_size}")
        if self.hidden_size % self.num_attention_heads and self.model_type != "vit":
            heads = self.num_attention_heads
            raise ValueError(f"num_attention_heads={heads} do not divide {self.hidden_size=}")
        for name in ("hidden_act", "pooler_act"):
            check_one_of(name, getattr(self, name), list(POOLER_ACTIVATIONS))
        if not self.qkv_bias and self.model_type != "vit":
            raise ValueError("qkv_bias=False is ViT's; the others have biases")

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


def check_pixels(pixels: Tensor, c: VisionConfig) -> None:
    """Raises: ValueError for other pictures than those the config names, with the sizes, and for
    pixels that are no floats, are NaN or infinite (looked for on the CPU alone).
    """
    check_floats("pixels", pixels)
    if pixels.ndim != 4 or pixels.shape[1:] != (c.num_channels, *c.size):
        wanted = f"(B, {c.num_channels}, {c.size[0]}, {c.size[1]})"
        patches = f"in patches of {c.patch[0]} x {c.patch[1]}"
        raise ValueError(f"pictures {tuple(pixels.shape)} should be {wanted}, {patches}")
    if pixels.device.type == "cpu" and (bad := int((~pixels.isfinite()).sum())):
        raise ValueError(f"{bad} of {pixels.numel()} pixels are NaN or infinite")


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
