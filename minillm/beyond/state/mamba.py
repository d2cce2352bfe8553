"""A layer with a state: a memory of fixed size in the place of attention (Mamba-2).

Explained in notebooks/beyond/12_state.ipynb. Parameters are named and laid out as in Hugging Face's
Mamba-2 and Bamba. Of shapes the letters are: batch, T positions, H heads of D numbers, G groups, N
columns of state, E = H D channels. Of formulas, as in the papers: A decay rate, B where an input is
written, C what is read.
"""

# Built from notebooks/beyond/12_state.ipynb: edit there, then make build.

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.beyond.state.mamba_parts import (
    StateSizes,
    at_least_float32,
    check_heads,
    draw_first_values,
)
from minillm.beyond.state.state_cache import StateLayer
from minillm.layers import ACTIVATIONS
from minillm.support.checks.attention import check_input
from minillm.support.checks.kinds import check_one_of
from minillm.support.modes import without_autocast

__all__ = [
    "GatedRMSNorm",
    "Mamba2Mixer",
    "causal_conv",
    "segment_decay",
    "ssm_chunked",
    "ssm_quadratic",
    "ssm_recurrent",
]


def ssm_recurrent(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Position by position: the state decays, takes in x, and is read.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]ᵀ and y[t] = h[t] C[t], for each head.

    Shape: x (batch, T, H, D), dt (batch, T, H), A (H,), B and C (batch, T, G, N),
        state (batch, H, D, N) -> y (batch, T, H, D), the last state
    Source: Dao and Gu 2024, equation 1 with a scalar A.
    """
    batch, T, H, D = x.shape
    B, C = (m.repeat_interleave(H // m.shape[2], 2) for m in (B, C))  # (B, T, H, N)
    h = x.new_zeros(batch, H, D, B.shape[-1]) if state is None else state
    decay = (dt * A).exp()[..., None, None]  # (B, T, H, 1, 1)
    x = x * dt[..., None]
    y = []
    for t in range(T):
        h = decay[:, t] * h + x[:, t, :, :, None] * B[:, t, :, None, :]
        y.append((h @ C[:, t, :, :, None])[..., 0])
    return torch.stack(y, 1), h


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each channel's weighted sum of its last W inputs; `window` holds the W - 1 before the first.

    Shape: x (batch, T, E), weight (E, 1, W), window (batch, W - 1, E), zeros without one
        -> (batch, T, E), the window after the last input
    """
    batch, T, channels = x.shape
    width = weight.shape[-1]
    before = x.new_zeros(batch, width - 1, channels) if window is None else window.to(x.dtype)
    x = torch.cat((before, x), 1)
    y = F.conv1d(x.mT, weight, bias, groups=channels).mT
    return y, x[:, T:]


def segment_decay(a: Tensor) -> Tensor:
    """What is left at t of an input at s: exp(a[s+1] + ... + a[t]); 1 where s = t, 0 where s > t.

    Each segment is a sum of its own terms: a difference of two long sums would lose digits.

    Shape: (..., T) -> (..., T, T)
    Source: Dao and Gu 2024, section 6.
    """
    T = a.shape[-1]
    terms = a[..., :, None].expand(*a.shape, T).tril(-1)  # row t, column s < t: a[t]
    return terms.cumsum(-2).exp().tril()


def ssm_quadratic(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """The same outputs as `ssm_recurrent`, from one matrix (T, T) of weights for each head.

    Shape: as `ssm_recurrent`, without a state.
    Source: Dao and Gu 2024, section 5.
    """
    R = x.shape[2] // B.shape[2]
    decay = segment_decay((dt * A).transpose(1, 2))  # (B, H, T, T)
    scores = torch.einsum("btgn,bsgn->bgts", C, B).repeat_interleave(R, 1)
    return torch.einsum("bhts,bshd->bthd", scores * decay, x * dt[..., None])


def ssm_chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `ssm_recurrent`: quadratic within chunks, recurrent from chunk to chunk.

    Shape: as `ssm_recurrent`.
    Source: Dao and Gu 2024, section 6.
    """
    batch, T, H, D = x.shape
    G, N = B.shape[2:]
    R = H // G
    Q = -(-T // -(-T // chunk_size))  # as few chunks as their size allows, and of one length
    x = x * dt[..., None]
    a = dt * A
    if T % Q:  # positions that take a step of 0: no decay, no input
        x, B, C = (F.pad(m, (0, 0, 0, 0, 0, -T % Q)) for m in (x, B, C))
        a = F.pad(a, (0, 0, 0, -T % Q))
    a = a.view(batch, -1, Q, G, R).permute(0, 1, 3, 4, 2)  # (B, K, G, R, Q) for K chunks
    B, C = (m.view(batch, -1, Q, G, N).transpose(2, 3) for m in (B, C))  # (B, K, G, Q, N)
    x = x.view(batch, -1, Q, G, R, D).permute(0, 1, 3, 4, 2, 5)  # (B, K, G, R, Q, D)
    decay = segment_decay(a)  # (B, K, G, R, Q, Q)
    y = ((C @ B.mT)[:, :, :, None] * decay) @ x  # within each chunk
    # what each chunk adds to the state by its end
    added = (x * decay[..., -1, :, None]).transpose(3, 4).flatten(4).mT @ B  # (B, K, G, R D, N)
    so_far = a.cumsum(-1).exp()  # decay from the chunk's start to each position
    h = x.new_zeros(batch, G, R * D, N) if state is None else state.view(batch, G, R * D, N)
    states = []  # at the start of each chunk
    for k in range(added.shape[1]):
        states.append(h)
        h = h * so_far[:, k, :, :, -1].repeat_interleave(D, -1)[..., None] + added[:, k]
    past = C @ torch.stack(states, 1).mT  # (B, K, G, Q, R D)
    past = past.unflatten(-1, (R, D)).transpose(3, 4)  # (B, K, G, R, Q, D)
    y = torch.addcmul(y, past, so_far[..., None])
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, -1, H, D)
    return y[:, :T], h.view(batch, H, D, N)


class GatedRMSNorm(nn.Module):
    """Multiply by silu(gate), then divide each group of channels by its root mean square.

    Shape: x and gate (..., E) -> (..., E), in float32 at least
    """

    def __init__(self, size: int, num_groups: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_groups, self.eps = num_groups, eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = at_least_float32(x, gate)
        groups = (x * F.silu(gate)).unflatten(-1, (self.num_groups, -1))
        return self.weight * F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2)


class Mamba2Mixer(nn.Module):
    """Mamba-2's layer: heads whose state decays as a whole, so that chunks are matrix products.

    One projection gives gate, x, B, C and the time steps; x, B and C go through the convolution.

    Shape: x (batch, T, hidden_size), mask (batch, T) bool, False at padding -> as x
    Raises: ValueError for heads that do not fit, an unknown activation; calling it, for x of
        another size.
    Source: Dao and Gu 2024, section 7. Time steps keep to their limits in every form, and padding
        is kept out after the projection, whose bias would let it in.
    """

    def __init__(
        self,
        hidden_size: int,
        sizes: StateSizes,
        *,
        activation: str = "silu",
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        H = check_heads(hidden_size, sizes)
        check_one_of("activation", activation, list(ACTIVATIONS))
        self.hidden_size, self.activation = hidden_size, ACTIVATIONS[activation]
        self.num_heads, self.num_groups = H, sizes.n_groups
        self.state_size, self.chunk_size = sizes.state_size, sizes.chunk_size
        self.time_step_limit = sizes.time_step_limit
        E, BC = sizes.expand * hidden_size, sizes.n_groups * sizes.state_size
        self.parts = [E, E + 2 * BC, H]  # gate; x, B and C; time steps
        self.in_proj = nn.Linear(hidden_size, sum(self.parts), bias=sizes.use_bias)
        self.conv1d = nn.Conv1d(
            E + 2 * BC, E + 2 * BC, sizes.conv_kernel, groups=E + 2 * BC, bias=sizes.use_conv_bias
        )
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.D = nn.Parameter(torch.empty(H))
        self.norm = GatedRMSNorm(E, sizes.n_groups, eps=norm_eps)
        self.out_proj = nn.Linear(E, hidden_size, bias=sizes.use_bias)
        self.draw()

    def time_step_bias(self) -> Tensor:
        """What the softplus of a time step begins with."""
        return self.dt_bias

    def draw(self, generator: torch.Generator | None = None) -> None:
        """Draw what is no projection of hidden states."""
        draw_first_values(self, generator)

    def make_cache(self, batch_size: int, **options: Any) -> StateLayer:
        """An empty memory for this layer."""
        D = self.parts[0] // self.num_heads
        window = (self.conv1d.kernel_size[0] - 1, self.conv1d.in_channels)
        return StateLayer(batch_size, window, (self.num_heads, D, self.state_size), **options)

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, cache: StateLayer | None = None
    ) -> Tensor:
        """Once over x; with a cache, after all that it holds."""
        check_input(x, self.hidden_size)
        T, H, G = x.shape[1], self.num_heads, self.num_groups
        window, state = (None, None) if cache is None else cache.read(T, len(x))
        gate, x, dt = self.in_proj(x.to(self.in_proj.weight.dtype)).split(self.parts, -1)
        x = x if mask is None else x * mask[..., None]
        x, window = causal_conv(x, self.conv1d.weight, self.conv1d.bias, window)
        E, BC = self.parts[0], G * self.state_size
        with without_autocast(x):
            dt, x = at_least_float32(dt, self.activation(x))
            dt = F.softplus(dt + self.dt_bias).clamp(*self.time_step_limit)  # (B, T, H)
            dt = dt if mask is None else dt * mask[..., None]
            x, B, C = x.split([E, BC, BC], -1)
            x = x.unflatten(-1, (H, -1))
            inputs = (x, dt, -at_least_float32(self.A_log)[0].exp(), B.unflatten(-1, (G, -1)))
            C = C.unflatten(-1, (G, -1))
            if T == 1:
                y, state = ssm_recurrent(*inputs, C, state=state)
            else:
                y, state = ssm_chunked(*inputs, C, chunk_size=self.chunk_size, state=state)
            y = self.norm((y + self.D[:, None] * x).flatten(2), gate)
        if cache is not None:
            cache.write(window, state, T)
        return self.out_proj(y.to(gate.dtype))
