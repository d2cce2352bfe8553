"""Graders of deeper/07_optimizers: a step of AdamW, a matrix with singular values alike."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from minillm.exercises import exercise

__all__: list[str] = []


def _step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, *rest: float, **slip: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The step, right or with one of the usual slips."""
    rate, beta1, beta2, eps, decay = rest
    if slip.get("decay_inside"):
        g = g + decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g if slip.get("no_square") else g**2)
    plain, late = slip.get("uncorrected"), t + bool(slip.get("from_zero"))
    m_hat, v_hat = (m, v) if plain else (m / (1 - beta1**late), v / (1 - beta2**late))
    root = (v_hat + eps).sqrt() if slip.get("eps_inside") else v_hat.sqrt() + eps
    new = p - rate * m_hat / root
    if slip.get("decay_alone"):
        return new - decay * p, m, v
    if slip.get("decay_after"):
        return new - rate * decay * new, m, v
    return new if {"decay_inside", "no_decay"} & slip.keys() else new - rate * decay * p, m, v


SLIPS = {
    "decay_inside": "the decay is inside of what is divided: that is Adam; shrink p by itself",
    "decay_alone": "the decay is multiplied with the rate too",
    "decay_after": "what decays is the old p, before the step",
    "no_decay": "p shrinks as well, by a small share of itself; see the section on decay",
    "from_zero": "the first step is t = 1, so the corrections need no t + 1",
    "uncorrected": "m and v began at zero; divide by 1 - beta ** t to undo that",
    "eps_inside": "eps stands outside of the root",
}


@exercise(
    "07_optimizers.1",
    "two running averages, two corrections, one division; and what happens to p besides?",
    "a running average, its correction, a division and a decay of its own: that is all of AdamW",
)
def _adamw_step(answer: Callable[..., Any]) -> str | None:
    generator = torch.Generator().manual_seed(7)
    for t in (1, 3):
        p, g, m = torch.randn(3, 5, generator=generator, dtype=torch.float64)
        v = torch.rand(5, generator=generator, dtype=torch.float64)
        m, v = (m, v) if t > 1 else (0 * m, 0 * v)
        given = [x.clone() for x in (p, g, m, v)]
        settings = (0.1, 0.8, 0.9, 0.05, 0.3)
        found = answer(*given, t, *settings)
        if not isinstance(found, tuple | list) or len(found) != 3:
            return "return three tensors: the new p, m and v"
        if any(not torch.equal(x, y) for x, y in zip(given, (p, g, m, v), strict=True)):
            return "your function changes what it was given; return new tensors"
        new_p, new_m, new_v = _step(p, g, m, v, t, *settings)
        for slip, message in SLIPS.items():
            if _close(found[0], _step(p, g, m, v, t, *settings, **{slip: True})[0]):
                return message
        if not _close(found[1], new_m):
            return "m is wrong: it keeps beta1 of what it was and takes 1 - beta1 of the slope"
        if not _close(found[2], new_v):
            return "v is wrong: it keeps beta2 of what it was and takes 1 - beta2 of the square"
        if not _close(found[0], new_p):
            return f"m and v are right, but p is not (step {t})"
    return None


@exercise(
    "07_optimizers.2",
    "divide by the norm, then five times the same products; which side makes the smaller A?",
    "products of matrices alone change the singular values and leave their directions",
)
def _make_alike(answer: Callable[[Tensor], Tensor]) -> str | None:
    generator = torch.Generator().manual_seed(8)
    for shape in ((4, 7), (7, 4), (5, 5)):
        M = torch.randn(*shape, generator=generator, dtype=torch.float64)
        try:
            found = answer(M.clone())
        except NotImplementedError:  # a RuntimeError, and a stub
            raise
        except RuntimeError as error:
            return f"for a matrix of {shape} your answer raised RuntimeError: {error}"
        if found.shape != M.shape:
            return f"for a matrix of {shape} the result has the same shape, not {(*found.shape,)}"
        if found.dtype != M.dtype:
            return f"the result has the type of the matrix, {M.dtype}, not {found.dtype}"
        if not found.isfinite().all():
            return "large singular values grow without bound: divide by the norm first"
        U, S, Vt = torch.linalg.svd(M, full_matrices=False)
        inside = U.T @ found @ Vt.T
        values = inside.diagonal()
        if (inside - values.diag()).abs().max() > 1e-6:
            return "the directions have turned: only products of X and A = X X^T keep them"
        if (values - 1).abs().max() < 1e-6:
            return "exactly 1: this page asks for the five products, not for a decomposition"
        if not _close(values, _polynomial(S / S.norm())):
            if _close(values, _polynomial(S / S.max())):
                return "divide by the norm of the matrix; its largest singular value is not known"
            listed = [f"{value:.2f}" for value in values.tolist()]
            return f"for a matrix of {shape} the singular values end at {listed}: five steps?"
    if not torch.equal(answer(torch.zeros(2, 3)), torch.zeros(2, 3)):
        return "a matrix of zeros has no direction: return zeros, not nan"
    with FlopCounterMode(display=False) as counter:
        answer(torch.ones(64, 2))
    if counter.get_total_flops() > 5 * 3 * 2 * 64 * 64 * 2:
        return "right, but for a tall matrix your A has as many rows as the matrix; use the smaller"
    return None


def _polynomial(s: Tensor) -> Tensor:
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def _close(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and torch.allclose(a, b, 1e-6, 1e-9)
