"""Graders of the page on flash attention: temperature, merging halves, a window in linear time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm.attention import attention, build_mask
from minillm.exercises import exercise
from minillm.exercises.attention import close, wrong_form


@exercise(
    "03_flash_attention.1",
    "what may be subtracted from a row without changing its softmax? And from a row of -inf?",
    "a temperature only divides the scores; subtracting the maximum keeps any temperature safe",
)
def _warm_softmax(answer: Callable[[Tensor, float], Tensor]) -> str | None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    probs = answer(x, 2.5)
    if finding := wrong_form(probs, (3, 5), "the result for a (3, 5) tensor", torch.float32):
        return finding
    if not close(probs.sum(-1), torch.ones(3)):
        sums = [round(s, 4) for s in probs.sum(-1).tolist()]
        return f"the rows should sum to 1 along the last dimension, but sum to {sums}"
    if close(probs, torch.softmax(x * 2.5, -1)):
        return "you multiply by the temperature: a higher temperature should make weights more even"
    if close(probs, torch.softmax(x, -1)):
        return "the temperature has no effect"
    if not close(probs, torch.softmax(x / 2.5, -1)):
        return "the weights at temperature 2.5 are not the softmax of x / 2.5"
    high = torch.tensor([[1000.0, 999.0, 0.0], [-2000.0, -2001.0, -2000.0]])
    if not close(answer(high, 0.5), torch.softmax(high / 0.5, -1)):
        return "scores of 1000 and -2000 come out wrong: subtract the maximum before exp"
    empty = torch.tensor([[-torch.inf, -torch.inf], [0.0, -torch.inf]])
    if not close(answer(empty, 2.0), torch.tensor([[0.0, 0.0], [1.0, 0.0]])):
        return f"a row of -inf should give zeros, but gives {answer(empty, 2.0)[0].tolist()}"
    return None


def _half(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over some keys and the log-sum-exp of its scores, from PyTorch's own functions."""
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return attention(q, k, v, mask=mask), torch.logsumexp(scores, dim=-1)


@exercise(
    "03_flash_attention.2",
    "an output was divided by its own half's sum: which sum should it be divided by?",
    "an output and one number per query are enough to join what was computed apart",
)
def _merge(answer: Callable[..., tuple[Tensor, Tensor]]) -> str | None:
    generator = torch.Generator().manual_seed(2)
    for scale, name in ((1.0, ""), (40.0, " when scores are large: subtract the larger lse first")):
        q, k, v = (torch.randn(2, 3, 8, 4, generator=generator) for _ in range(3))
        q = q * scale
        mask = torch.rand(2, 1, 8, 8, generator=generator) > 0.2
        if not name:
            mask[0, :, 2, 3:], mask[1, :, 4, :3], mask[0, :, 6] = False, False, False
        halves = [_half(q, k[:, :, s], v[:, :, s], mask[..., s]) for s in (slice(3), slice(3, 8))]
        expected_out, expected_lse = _half(q, k, v, mask)
        found = answer(*halves[0], *halves[1])
        if not isinstance(found, tuple) or len(found) != 2:
            return "return two tensors, (out, lse)"
        out, lse = found
        for x, like, part in ((out, expected_out, "out"), (lse, expected_lse, "lse")):
            if finding := wrong_form(x, like.shape, part, torch.float32):
                return finding
        if finding := _merge_finding(out, lse, halves, expected_out, expected_lse):
            return finding + name
    return None


def _merge_finding(
    out: Tensor, lse: Tensor, halves: list, expected_out: Tensor, expected_lse: Tensor
) -> str | None:
    (out_a, lse_a), (out_b, lse_b) = halves
    some = torch.isfinite(expected_lse)
    if close(out[some], ((out_a + out_b) / 2)[some]):
        return "you average the halves: the one with the larger log-sum-exp should weigh more"
    if out[some].isnan().any() or not out[some].isfinite().all():
        return "out holds NaN or infinity"
    if out[~some].isnan().any() or lse[~some].isnan().any():
        return "a query that may read nothing in either half gives NaN: out should be 0, lse -inf"
    if not close(out, expected_out, 1e-4):
        larger = torch.maximum(lse_a, lse_b)[..., None]
        undivided = expected_out * torch.exp(expected_lse[..., None] - larger)
        if close(out[some], undivided[some], 1e-4):
            return "the weights of the two halves should sum to 1: divide by their sum"
        return "out is not the attention over all keys"
    if not close(lse, expected_lse, 1e-4):
        return "out is right, but lse is not log(exp(lse_a) + exp(lse_b)): merging again would fail"
    return None


class _Largest(TorchDispatchMode):
    """The largest tensor that was made inside."""

    shape: tuple[int, ...] = (0,)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                size = x.untyped_storage().nbytes() // x.element_size()
                if size > torch.Size(self.shape).numel():
                    self.shape = tuple(x.shape) if x.numel() == size else (size,)
        return made


@exercise(
    "03_flash_attention.3",
    "cut the queries into blocks as long as the window: which keys can a block reach?",
    "what a mask forbids need not be computed: in blocks, a window costs T times its size",
)
def _window_attention(answer: Callable[..., Tensor]) -> str | None:
    generator = torch.Generator().manual_seed(3)
    for T, window in [(12, 4), (12, 1), (13, 5), (3, 8), (64, 16), (1, 1), (50, 7)]:
        q, k, v = (torch.randn(2, 2, T, 8, generator=generator) for _ in range(3))
        out, call = answer(q, k, v, window), f"{T} positions with a window of {window}"
        if finding := wrong_form(out, (2, 2, T, 8), f"for {call}, the result", torch.float32):
            return finding
        places = torch.arange(T)
        masks = [build_mask(places, places, window=w) for w in (window, window + 1)]
        if close(out, attention(q, k, v, mask=masks[0])):
            continue
        if close(out, attention(q, k, v, mask=masks[1])):
            return f"for {call}, a query reads one key too many: the window includes itself"
        if out.isnan().any():
            return f"for {call}, the result holds NaN"
        if close(out, attention(q, k, v, mask=masks[0], scale=1.0)):
            return f"for {call}, the scores are not divided by the root of D"
        error = (out - attention(q, k, v, mask=masks[0])).abs().amax((0, 1, 3))
        t = (error > 1e-5).nonzero()[0].item()
        alone = ": it may read nothing but itself" if t == 0 else ""
        return f"for {call}, query {t} is the first to come out wrong{alone}"
    q, k, v = (torch.randn(1, 2, 1024, 8, generator=generator) for _ in range(3))
    with _Largest() as largest:
        answer(q, k, v, 16)
    if torch.Size(largest.shape).numel() > 8 * 2 * 1024 * (16 + 8):
        return (
            f"the numbers are right, but for 1024 positions with a window of 16 you make a tensor "
            f"of shape {largest.shape}"
        )
    return None
