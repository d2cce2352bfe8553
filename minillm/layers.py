"""Norms, activations, feed-forward blocks, and the layer of them and attention (notebook 06)."""

# Built from notebooks/06_layers.ipynb: edit there, then make build.

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.heads import SupportsUpdate
from minillm.rope import Rotation
from minillm.support.checks.kinds import check_known
from minillm.support.family import ACTIVATION_SPELLINGS

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "DecoderLayer",
    "GatedMLP",
    "LayerNorm",
    "RMSNorm",
    "gelu_sigmoid",
    "relu_squared",
]


class LayerNorm(nn.Module):
    """Centre each vector, divide by its standard deviation, scale and shift.

    Computed in float32 for 16-bit inputs, as torch does. The variance is the biased one.
    Shape: (..., C) -> (..., C)
    Source: Ba, Kiros, Hinton 2016, equation 4.
    """

    def __init__(self, size: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C), each vector by itself."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


class RMSNorm(nn.Module):
    """Divide each vector by its root mean square, then scale by `offset + weight`.

    The mean square is taken in float32 for 16-bit inputs. As in Llama, the result is cast back to
    the input's type before the weight multiplies it; with an offset, as in Gemma (offset=1, weights
    near 0), it is multiplied in float32 and cast afterwards. The two differ in the last bit.
    Shape: (..., C) -> (..., C)
    Source: Zhang and Sennrich 2019, equation 4, with eps under the root.
    """

    def __init__(self, size: int, *, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C), each vector by itself."""
        size = self.weight.shape
        if self.offset:
            high = torch.promote_types(x.dtype, torch.float32)
            scale = self.offset + self.weight.to(high)
            return F.rms_norm(x.to(high), size, scale, self.eps).to(x.dtype)
        if x.dtype == self.weight.dtype and x.dtype not in (torch.bfloat16, torch.float16):
            return F.rms_norm(x, size, self.weight, self.eps)
        return self.weight * F.rms_norm(x, size, None, self.eps)

    def extra_repr(self) -> str:
        offset = f", offset={self.offset}" if self.offset else ""
        return f"{self.weight.shape[0]}, eps={self.eps}{offset}"


def gelu_sigmoid(x: Tensor) -> Tensor:
    """x times a logistic curve, close to GELU. Source: Hendrycks and Gimpel 2016, section 2."""
    return x * torch.sigmoid(1.702 * x)


def relu_squared(x: Tensor) -> Tensor:
    """ReLU, squared. Source: So et al. 2021 (Primer), section 3."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_sigmoid": gelu_sigmoid,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "relu_squared": relu_squared,
}

# and under the names that Hugging Face's files have for the same functions
ACTIVATIONS |= {theirs: ACTIVATIONS[ours] for theirs, ours in ACTIVATION_SPELLINGS.items()}


class MLP(nn.Module):
    """Two matrices with an activation between them: the feed-forward block of GPT-2 and Falcon.

    Shape: (..., C) -> (..., C)
    Raises: ValueError for an activation that is not in ACTIVATIONS.
    Source: Vaswani et al. 2017, equation 2.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "gelu_tanh",
        bias: bool = True,
    ) -> None:
        check_known("activation", activation, ACTIVATIONS)
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C), each position by itself."""
        return self.down_proj(self.activation(self.up_proj(x)))


class GatedMLP(nn.Module):
    """A feed-forward block whose hidden units are multiplied by gates: SwiGLU, GEGLU, ReGLU.

    Shape: (..., C) -> (..., C)
    Raises: ValueError for an activation that is not in ACTIVATIONS.
    Source: Shazeer 2020, equation 6.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        bias: bool = False,
    ) -> None:
        check_known("activation", activation, ACTIVATIONS)
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C), each position by itself."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward block, each on a normalised copy and added back (pre-norm).

    `rope`, `mask`, `is_causal` and `cache` are handed on to attention.
    Shape: (B, T, C) -> (B, T, C).
    Source: Xiong et al. 2020, figure 1 (b).
    """

    def __init__(
        self, attention: nn.Module, mlp: nn.Module, norm1: nn.Module, norm2: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm = norm1
        self.self_attn = attention
        self.post_attention_layernorm = norm2
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        *,
        rope: Rotation | None = None,
        mask: Tensor | None = None,
        is_causal: bool = False,
        cache: SupportsUpdate | None = None,
    ) -> Tensor:
        """Attention, then the feed-forward block: (B, T, C) -> (B, T, C)."""
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, rope=rope, mask=mask, is_causal=is_causal, cache=cache)
        return x + self.mlp(self.post_attention_layernorm(x))
