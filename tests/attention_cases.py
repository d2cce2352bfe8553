"""What the tests of attention share: a formula in numpy, random inputs, and a count of memory."""

import itertools
import math
import weakref

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

BACKENDS = ("eager", "sdpa", "tiled")
# of an error e against a value x: |e| / (1 + |x|); rounding to bfloat16 alone costs up to 2^-8
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}

MASKS = ("none", "keys", "rows", "full", "empty_rows")

BIASES = ("none", "heads", "keys")


def oracle(q, k, v, mask=None, bias=None, is_causal=False, scale=None):
    """One query at a time, in numpy's float64, from the formula."""
    q, k, v = (x.detach().double().numpy() for x in (q, k, v))
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    mask = np.broadcast_to(True if mask is None else mask.numpy(), (B, H, T, S))
    bias = np.broadcast_to(0.0 if bias is None else bias.detach().double().numpy(), (B, H, T, S))
    out = np.zeros((B, H, T, v.shape[-1]))
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        g = h // (H // G)
        reads = [s for s in range(S) if mask[b, h, t, s] and (not is_causal or s <= t + S - T)]
        if reads:
            scores = k[b, g, reads] @ q[b, h, t] * (D**-0.5 if scale is None else scale)
            scores = scores + bias[b, h, t, reads]
            probs = np.exp(scores - scores.max())
            out[b, h, t] = probs @ v[b, g, reads] / probs.sum()
    return torch.from_numpy(out)


def tensors(generator, *shapes, dtype=torch.float64, requires_grad=False):
    made = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [x.requires_grad_(requires_grad) for x in made]


def make_mask(kind, B, H, T, S, generator):
    shape = {"keys": (B, 1, 1, S), "rows": (T, S), "full": (B, H, T, S)}.get(kind, (B, 1, T, S))
    mask = torch.rand(shape, generator=generator) > 0.4
    if kind == "none":
        return None
    if kind == "empty_rows":
        mask[0, :, T // 2] = False
        return mask
    return mask | (torch.arange(S) == 0)  # the first key is always there


def make_bias(kind, H, T, S, generator, dtype):
    shape = {"none": None, "heads": (H, T, S), "keys": (1, S)}[kind]
    return None if shape is None else torch.randn(shape, generator=generator).to(dtype)


class PeakMemory(TorchDispatchMode):
    """Bytes of the tensors made inside and still alive, at most; `largest` is the biggest one."""

    def __enter__(self):
        self.now = self.peak = self.largest = 0
        self.seen = weakref.WeakSet()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.untyped_storage() not in self.seen:
                storage = x.untyped_storage()
                self.seen.add(storage)
                self.now += storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
                weakref.finalize(storage, self.release, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def release(self, nbytes):
        self.now -= nbytes


def scattered(seed, size, spread):
    """Random rows of scores, some -inf, and the first of each row never."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, size, generator=generator, dtype=torch.float64) * spread
    x[:, 1:][torch.rand(3, size - 1, generator=generator) < 0.2] = -torch.inf
    return x


def check_softmax_edges(function):
    """No entry to read, halves near overflow, NaN, and gradients."""
    empty = torch.full((2, 3), -torch.inf, requires_grad=True)
    probs = function(empty)
    assert probs.tolist() == [[0.0] * 3] * 2
    (gradient,) = torch.autograd.grad(probs.sum(), empty)
    assert gradient.abs().max() == 0
    high = torch.tensor([60_000.0, 12.0, 59_999.0], dtype=torch.float16)
    torch.testing.assert_close(function(high), torch.softmax(high, -1))
    assert function(torch.tensor([1.0, math.nan])).isnan().all()
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, x)
