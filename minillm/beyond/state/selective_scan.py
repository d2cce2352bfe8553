"""The first Mamba's layer: every number of the state decays at a rate of its own.

Written by hand; beyond/12_state shows it beside Mamba-2's, which it builds.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.beyond.state.mamba import causal_conv
from minillm.beyond.state.mamba_parts import StateSizes, at_least_float32, draw_first_values
from minillm.beyond.state.state_cache import StateLayer
from minillm.layers import ACTIVATIONS
from minillm.support.checks.attention import check_input
from minillm.support.checks.kinds import check_one_of
from minillm.support.modes import without_autocast


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mamba's recurrence: as `ssm_recurrent`, but every number of the state decays at its own rate.

    Shape: x and dt (batch, T, E), A (E, N), B and C (batch, T, N), state (batch, E, N)
        -> y (batch, T, E), the last state
    Source: Gu and Dao 2023, algorithm 2, with Euler's step for B as in its code.
    """
    h = x.new_zeros(*x[:, 0].shape, A.shape[-1]) if state is None else state
    decay = (dt[..., None] * A).exp()  # (batch, T, E, N)
    x = dt * x
    y = []
    for t in range(x.shape[1]):
        h = decay[:, t] * h + x[:, t, :, None] * B[:, t, None, :]
        y.append((h @ C[:, t, :, None])[..., 0])
    return torch.stack(y, 1), h


class MambaMixer(nn.Module):
    """Mamba's layer: a short convolution, then a state whose steps, inputs and reads are learned.

    Each of E channels has N numbers of state; each number decays at its own rate.

    Shape: x (B, T, C), mask (B, T) bool, False at padding -> (B, T, C)
    Raises: ValueError for an unknown activation; calling it, for x of another size.
    Source: Gu and Dao 2023, sections 3.2 to 3.4. Padding is kept out after the projection: the
        projection's bias, if any, would let it in.
    """

    def __init__(self, hidden_size: int, sizes: StateSizes, *, activation: str = "silu") -> None:
        super().__init__()
        check_one_of("activation", activation, list(ACTIVATIONS))
        self.hidden_size, self.activation = hidden_size, ACTIVATIONS[activation]
        E, self.state_size = sizes.expand * hidden_size, sizes.state_size
        self.rank = sizes.time_step_rank or math.ceil(hidden_size / 16)
        self.in_proj = nn.Linear(hidden_size, 2 * E, bias=sizes.use_bias)
        self.conv1d = nn.Conv1d(E, E, sizes.conv_kernel, groups=E, bias=sizes.use_conv_bias)
        self.x_proj = nn.Linear(E, self.rank + 2 * sizes.state_size, bias=False)
        self.dt_proj = nn.Linear(self.rank, E)
        self.A_log = nn.Parameter(torch.empty(E, sizes.state_size))
        self.D = nn.Parameter(torch.empty(E))
        self.out_proj = nn.Linear(E, hidden_size, bias=sizes.use_bias)
        self.draw()

    def time_step_bias(self) -> Tensor:
        """What the softplus of a time step begins with."""
        return self.dt_proj.bias

    @torch.no_grad()
    def draw(self, generator: torch.Generator | None = None) -> None:
        """Draw what is no projection of hidden states."""
        draw_first_values(self, generator)
        self.dt_proj.weight.uniform_(-(self.rank**-0.5), self.rank**-0.5, generator=generator)

    def make_cache(self, batch_size: int, **options: Any) -> StateLayer:
        """An empty memory for this layer."""
        E, width = self.conv1d.in_channels, self.conv1d.kernel_size[0]
        return StateLayer(batch_size, (width - 1, E), (E, self.state_size), **options)

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, cache: StateLayer | None = None
    ) -> Tensor:
        """Once over x; with a cache, after all that it holds."""
        check_input(x, self.hidden_size)
        T = x.shape[1]
        window, state = (None, None) if cache is None else cache.read(T, len(x))
        x, gate = self.in_proj(x.to(self.in_proj.weight.dtype)).chunk(2, -1)  # (B, T, E) each
        x = x if mask is None else x * mask[..., None]
        x, window = causal_conv(x, self.conv1d.weight, self.conv1d.bias, window)
        x = self.activation(x)
        dt, B, C = self.x_proj(x).split([self.rank, self.state_size, self.state_size], -1)
        dt = F.softplus(self.dt_proj(dt))  # (B, T, E)
        dt = dt if mask is None else dt * mask[..., None]
        with without_autocast(x):
            wide, dt, A, B, C = at_least_float32(
                x, dt, -at_least_float32(self.A_log)[0].exp(), B, C
            )
            y, state = selective_scan(wide, dt, A, B, C, state=state)
            y = (y + self.D * wide) * F.silu(gate.to(y.dtype))
        if cache is not None:
            cache.write(window, state, T)
        return self.out_proj(y.to(gate.dtype))
