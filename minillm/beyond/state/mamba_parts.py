"""What both layers with a state are made of: their sizes, their first values, where they compute.

Written by hand; beyond/12_state shows it.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm.support.checks.kinds import SWITCH, check_values, whole


@dataclass(frozen=True)
class StateSizes:
    """What fixes a Mamba layer's shapes and arithmetic, under Hugging Face's keys.

    The mixer has `expand` times the model's hidden size channels. Mamba-2 cuts them into
    `num_heads`, which share B and C in `n_groups`; Mamba has a rank for its time steps instead
    (None: a sixteenth of the hidden size, rounded up).

    Raises: ValueError, with key and value, for what it may not hold.
    """

    state_size: int = 16
    num_heads: int | None = None
    n_groups: int = 1
    chunk_size: int = 64
    conv_kernel: int = 4
    expand: int = 2
    time_step_rank: int | None = None
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    use_bias: bool = False
    use_conv_bias: bool = True
    residual_in_fp32: bool = False  # what a 16-bit model adds its layers up in

    def __post_init__(self) -> None:
        check_values(self, _KINDS)
        low, high = _limits(self.time_step_limit)
        object.__setattr__(self, "time_step_limit", (low, high))
        if self.num_heads is not None and self.num_heads % self.n_groups:
            raise ValueError(f"num_heads {self.num_heads} do not share n_groups {self.n_groups}")


_KINDS = {
    **dict.fromkeys(("state_size", "num_heads", "n_groups", "chunk_size"), whole(1)),
    **dict.fromkeys(("conv_kernel", "expand", "time_step_rank"), whole(1)),
    **dict.fromkeys(("use_bias", "use_conv_bias", "residual_in_fp32"), SWITCH),
}


def _limits(given: Any) -> tuple[float, float]:
    """Raises: ValueError unless these are two numbers, the first from 0 and not the greater."""
    if isinstance(given, list | tuple) and len(given) == 2:
        low, high = given
        numbers = all(isinstance(x, int | float) and type(x) is not bool for x in given)
        if numbers and 0 <= low <= high and low < math.inf:
            return float(low), float(high)
    words = "two numbers, the first from 0, the second not below it"
    raise ValueError(f"time_step_limit must be {words}, not {given!r}")


def check_heads(hidden_size: int, sizes: StateSizes) -> int:
    """How many heads. Raises: ValueError unless the channels are cut into them evenly."""
    channels = sizes.expand * hidden_size
    if sizes.num_heads is None or channels % sizes.num_heads:
        given = f"num_heads {sizes.num_heads}, {channels} channels"
        raise ValueError(f"Mamba-2 cuts expand * hidden_size channels into heads: {given}")
    return sizes.num_heads


def at_least_float32(*tensors: Tensor) -> list[Tensor]:
    """In float32 at least, as what a state sums up must be."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


@torch.no_grad()
def draw_first_values(mixer: Any, generator: torch.Generator | None) -> None:
    """First values: decays from slow to fast, time steps from 0.001 to 0.1 that inputs change."""
    if mixer.D.is_meta:
        return  # there is nothing to fill
    conv, bias = mixer.conv1d, mixer.time_step_bias()
    bound = conv.weight.shape[-1] ** -0.5
    conv.weight.uniform_(-bound, bound, generator=generator)
    if conv.bias is not None:
        conv.bias.zero_()
    mixer.D.fill_(1.0)
    rates = torch.arange(1, mixer.A_log.shape[-1] + 1, dtype=torch.float32)
    mixer.A_log.copy_(rates.log().to(mixer.A_log.device).expand_as(mixer.A_log))
    bias.uniform_(math.log(0.001), math.log(0.1), generator=generator)
    step = bias.exp()
    bias.copy_(step + (-torch.expm1(-step)).log())  # whose softplus is the step
