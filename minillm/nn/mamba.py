"""State-space layers: a memory of fixed size in the place of attention (Mamba, Mamba-2).

Explained in notebooks/beyond/12_state.ipynb. Parameters are named and laid out as in Hugging Face's
Mamba, Mamba-2 and Bamba. Letters: B batch, T positions, H heads of D numbers, G groups, N numbers
of state for each number of a head, E channels of a mixer.
"""

# Built from notebooks/beyond/12_state.ipynb: edit there, then make build.

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.cache.base import CacheLayer, KVCache, make_cache
from minillm.checks import check_input
from minillm.nn.layers import ACTIVATIONS

__all__ = [
    "GatedRMSNorm",
    "Mamba2Mixer",
    "MambaLayer",
    "MambaMixer",
    "StateLayer",
    "StateSizes",
    "causal_conv",
    "check_heads",
    "make_state_cache",
    "segment_decay",
    "selective_scan",
    "ssm_chunked",
    "ssm_quadratic",
    "ssm_recurrent",
]


def ssm_recurrent(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Position by position: the state decays, takes in x, and is read.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]ᵀ and y[t] = h[t] C[t], for each head.

    Shape: x (B, T, H, D), dt (B, T, H), A (H,), B and C (B, T, G, N), state (B, H, D, N)
        -> y (B, T, H, D), the last state
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


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each channel's weighted sum of its last W inputs; `window` holds the W - 1 before the first.

    Shape: x (B, T, E), weight (E, 1, W), window (B, W - 1, E), zeros without one
        -> (B, T, E), the window after the last input
    """
    batch, T, channels = x.shape
    width = weight.shape[-1]
    before = x.new_zeros(batch, width - 1, channels) if window is None else window.to(x.dtype)
    x = torch.cat((before, x), 1)
    y = F.conv1d(x.mT, weight, bias, groups=channels).mT
    return y, x[:, T:]


class StateLayer(CacheLayer):
    """A layer's memory of fixed size: the last inputs of its convolution, and its state.

    It holds what all positions so far have left, so it cannot go back to fewer, but for none.
    """

    holds_keys = False

    def __init__(
        self,
        batch_size: int,
        window: Sequence[int],
        state: Sequence[int],
        *,
        max_length: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.batch_size, self.max_length, self.dtype = batch_size, max_length, dtype
        self.device = torch.empty(0, device=device).device
        self.state_dtype = torch.promote_types(dtype, torch.float32)
        self.shapes = (tuple(window), tuple(state))
        self.reset()

    def reset(self) -> None:
        self.length = 0
        window, state = ((self.batch_size, *shape) for shape in self.shapes)
        self._buffers = self._zeros(*window), self._zeros(*state, dtype=self.state_dtype)

    def read(self, num_new: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Window and state before `num_new` more positions.

        Raises: ValueError if the positions or the rows do not fit.
        """
        self.new_length(num_new)
        if batch_size != self.batch_size:
            raise ValueError(f"{batch_size} rows do not fit a cache of {self.batch_size} rows")
        window, state = self._buffers
        return window, state

    def write(self, window: Tensor, state: Tensor, num_new: int) -> None:
        """Keep what `num_new` more positions have left."""
        self.length = self.new_length(num_new)
        with torch.inference_mode(False):
            kept = window.detach().to(self.dtype, copy=True), state.detach().clone()
        self._buffers = kept

    def key_positions(self, num_new: int) -> Tensor:
        """The new positions: there is nothing else to read one by one. Shape: -> (T,) long."""
        return self.query_positions(num_new)

    def check_crop(self, length: int) -> None:
        super().check_crop(length)
        if 0 < length < self.length:
            given = f"cannot crop {self.length} positions to {length}"
            raise ValueError(f"{given}: a state cannot go back; reset() and compute them anew")

    def crop(self, length: int) -> None:
        self.check_crop(length)
        if length == 0:
            self.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of window and state, however many positions have passed."""
        return sum(buffer.nbytes for buffer in self._buffers)


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
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type is bool:
                if not isinstance(value, bool):
                    raise ValueError(f"{f.name} must be True or False, not {value!r}")
            elif f.name == "time_step_limit" or (value is None and f.default is None):
                continue
            elif type(value) is not int or not 0 < value < 2**31:
                raise ValueError(f"{f.name} must be a positive integer, not {value!r}")
        low, high = _limits(self.time_step_limit)
        object.__setattr__(self, "time_step_limit", (low, high))
        if self.num_heads is not None and self.num_heads % self.n_groups:
            raise ValueError(f"num_heads {self.num_heads} do not share n_groups {self.n_groups}")


def _limits(given: Any) -> tuple[float, float]:
    """Raises: ValueError unless these are two numbers, the first from 0 and not the greater."""
    if isinstance(given, list | tuple) and len(given) == 2:
        low, high = given
        numbers = all(isinstance(x, int | float) and type(x) is not bool for x in given)
        if numbers and 0 <= low <= high and low < math.inf:
            return float(low), float(high)
    words = "two numbers, the first from 0, the second not below it"
    raise ValueError(f"time_step_limit must be {words}, not {given!r}")


def _without_autocast(x: Tensor) -> Any:
    """Outside of autocast, which would round the state."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def _at_least_float32(*tensors: Tensor) -> list[Tensor]:
    """In float32 at least, as what a state sums up must be."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    """Raises: ValueError with the known names."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


@torch.no_grad()
def _draw(mixer: "MambaMixer | Mamba2Mixer", generator: torch.Generator | None) -> None:
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


class GatedRMSNorm(nn.Module):
    """Multiply by silu(gate), then divide each group of channels by its root mean square.

    Shape: x and gate (..., E) -> (..., E), in float32 at least
    """

    def __init__(self, size: int, num_groups: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_groups, self.eps = num_groups, eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = _at_least_float32(x, gate)
        groups = (x * F.silu(gate)).unflatten(-1, (self.num_groups, -1))
        return self.weight * F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2)


def check_heads(hidden_size: int, sizes: StateSizes) -> int:
    """How many heads. Raises: ValueError unless the channels are cut into them evenly."""
    channels = sizes.expand * hidden_size
    if sizes.num_heads is None or channels % sizes.num_heads:
        given = f"num_heads {sizes.num_heads}, {channels} channels"
        raise ValueError(f"Mamba-2 cuts expand * hidden_size channels into heads: {given}")
    return sizes.num_heads


class Mamba2Mixer(nn.Module):
    """Mamba-2's layer: heads whose state decays as a whole, so that chunks are matrix products.

    One projection gives gate, x, B, C and the time steps; x, B and C go through the convolution.

    Shape: x (B, T, C), mask (B, T) bool, False at padding -> (B, T, C)
    Raises: ValueError for heads that do not fit, an unknown activation; calling it, for x of
        another size.
    Source: Dao and Gu 2024, section 7. Time steps keep to their limits in every form, as padding
        keeps out (see `MambaMixer`).
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
        self.hidden_size, self.activation = hidden_size, _activation(activation)
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
        _draw(self, generator)

    def make_cache(self, batch_size: int, **options: Any) -> StateLayer:
        """An empty memory for this layer."""
        D = self.parts[0] // self.num_heads
        window = (self.conv1d.kernel_size[0] - 1, self.conv1d.in_channels)
        return StateLayer(batch_size, window, (self.num_heads, D, self.state_size), **options)

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, cache: StateLayer | None = None
    ) -> Tensor:
        """As `MambaMixer.forward`."""
        check_input(x, self.hidden_size)
        T, H, G = x.shape[1], self.num_heads, self.num_groups
        window, state = (None, None) if cache is None else cache.read(T, len(x))
        gate, x, dt = self.in_proj(x.to(self.in_proj.weight.dtype)).split(self.parts, -1)
        x = x if mask is None else x * mask[..., None]
        x, window = causal_conv(x, self.conv1d.weight, self.conv1d.bias, window)
        E, BC = self.parts[0], G * self.state_size
        with _without_autocast(x):
            dt, x = _at_least_float32(dt, self.activation(x))
            dt = F.softplus(dt + self.dt_bias).clamp(*self.time_step_limit)  # (B, T, H)
            dt = dt if mask is None else dt * mask[..., None]
            x, B, C = x.split([E, BC, BC], -1)
            x = x.unflatten(-1, (H, -1))
            inputs = (x, dt, -_at_least_float32(self.A_log)[0].exp(), B.unflatten(-1, (G, -1)))
            C = C.unflatten(-1, (G, -1))
            if T == 1:
                y, state = ssm_recurrent(*inputs, C, state=state)
            else:
                y, state = ssm_chunked(*inputs, C, chunk_size=self.chunk_size, state=state)
            y = self.norm((y + self.D[:, None] * x).flatten(2), gate)
        if cache is not None:
            cache.write(window, state, T)
        return self.out_proj(y.to(gate.dtype))


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mamba's recurrence: as `ssm_recurrent`, but every number of the state decays at its own rate.

    Shape: x and dt (B, T, E), A (E, N), B and C (B, T, N), state (B, E, N)
        -> y (B, T, E), the last state
    Source: Gu and Dao 2023, algorithm 2, with Euler's step for B as in its code.
    """
    h = x.new_zeros(*x[:, 0].shape, A.shape[-1]) if state is None else state
    decay = (dt[..., None] * A).exp()  # (B, T, E, N)
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
        self.hidden_size, self.activation = hidden_size, _activation(activation)
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
        _draw(self, generator)
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
        with _without_autocast(x):
            wide, dt, A, B, C = _at_least_float32(
                x, dt, -_at_least_float32(self.A_log)[0].exp(), B, C
            )
            y, state = selective_scan(wide, dt, A, B, C, state=state)
            y = (y + self.D * wide) * F.silu(gate.to(y.dtype))
        if cache is not None:
            cache.write(window, state, T)
        return self.out_proj(y.to(gate.dtype))


class MambaLayer(nn.Module):
    """A mixer, then a feed-forward block if there is one, each on a normalised copy and added back.

    It stands where a `DecoderLayer` may: `rope` and `is_causal` say the order to attention, and a
    state knows it. With `residual_in_fp32` a 16-bit model adds up in float32.

    Shape: x (B, T, C), mask (B, T) bool, False at padding -> (B, T, C)
    """

    def __init__(
        self,
        mixer: MambaMixer | Mamba2Mixer,
        mlp: nn.Module | None = None,
        *,
        norm: Callable[[], nn.Module],
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.residual_in_fp32 = residual_in_fp32
        self.input_layernorm, self.mamba = norm(), mixer
        self.post_attention_layernorm = None if mlp is None else norm()
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        *,
        rope: Any = None,
        mask: Tensor | None = None,
        is_causal: bool = True,
        cache: StateLayer | None = None,
    ) -> Tensor:
        if self.residual_in_fp32:
            x = _at_least_float32(x)[0]
        x = x + self.mamba(self.input_layernorm(x), mask=mask, cache=cache)
        if self.mlp is None or self.post_attention_layernorm is None:
            return x
        return x + self.mlp(self.post_attention_layernorm(x))

    def make_cache(self, model: Any, kind: str, shape: Mapping[str, Any]) -> KVCache:
        """A cache for a model with layers of this kind; see `make_state_cache`."""
        return make_state_cache(model, kind, shape)

    @property
    def state_numbers(self) -> int:
        """How many numbers the state has."""
        return self.mamba.out_proj.in_features * self.mamba.state_size


def make_state_cache(model: Any, kind: str, shape: Mapping[str, Any]) -> KVCache:
    """A cache of that kind where a layer of the model attends, of fixed size where it has a state.

    Raises: ValueError as `make_cache` does.
    """
    mixers = [getattr(layer, "mamba", None) for layer in model.model.layers]
    count = mixers.count(None)
    one = {"num_layers": 1, "num_kv_heads": 1, "key_dim": 1, "value_dim": 1}
    checked = make_cache(kind, **{**shape, **({"num_layers": count} if count else one)})
    keys = checked.layers if count else []  # a kind says how keys lie, and here there may be none
    options = {key: shape[key] for key in ("max_length", "dtype", "device")}
    return KVCache(
        [
            keys.pop(0) if mixer is None else mixer.make_cache(shape["batch_size"], **options)
            for mixer in mixers
        ]
    )
