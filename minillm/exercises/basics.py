"""Graders of notebook 00: shapes, a gradient by hand, broadcasting's trap, a first training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.exercises import as_given, check_table, check_values, exercise

SHAPES: dict[str, tuple[int, ...] | str] = {
    "x[0]": (3, 4),
    "x[:, 1:]": (2, 2, 4),
    "x.mean(dim=1, keepdim=True)": (2, 1, 4),
    "x.transpose(1, 2)": (2, 4, 3),
    "x + torch.zeros(3, 1)": (2, 3, 4),
    "x @ torch.zeros(4, 7)": (2, 3, 7),
    "x @ torch.zeros(3, 4)": "error",
}
HINTS = {
    "x[0]": "an index takes one element of a dimension, and that dimension disappears",
    "x[:, 1:]": "a slice keeps its dimension, however many elements are left",
    "x.mean(dim=1, keepdim=True)": "keepdim leaves the dimension in place, with size 1",
    "x.transpose(1, 2)": "the dimensions are counted from 0: 1 and 2 change places",
    "x + torch.zeros(3, 1)": "align the shapes at the right; size 1 is stretched",
    "x @ torch.zeros(4, 7)": "the last dimension meets the first of the matrix and disappears",
    "x @ torch.zeros(3, 4)": "which two sizes meet in the middle, and are they equal?",
}


@exercise(
    "00.1",
    "fill in the seven shapes; read each from the outside in",
    "an index removes a dimension, a slice keeps it, size 1 is stretched, the middle disappears",
)
def shapes(answer: Any) -> str | None:
    answer = as_given(answer, SHAPES)
    if answer is not None:
        answer = {key: _plain(shape) for key, shape in answer.items()}
    kind = 'a tuple such as (3, 4), or "error"'
    return check_table(
        answer, SHAPES, HINTS, kind=kind, fits=lambda s: isinstance(s, tuple) or s == "error"
    )


def _plain(shape: Any) -> Any:
    return tuple(shape) if isinstance(shape, list | torch.Size) else shape


@exercise(
    "00.2",
    "how does the error of one story change when w, or b, grows a little?",
    "each slope is a mean of twice the error times what the error changes by",
)
def gradient(answer: Callable[..., Sequence[Any]]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for n in (3, 5):
        x, y = torch.rand(2, n, generator=generator, dtype=torch.float64) * 4
        for w, b in ((1.0, 0.0), (-0.5, 2.0)):
            found = answer(x.clone(), y.clone(), w, b)
            if isinstance(found, Tensor) and found.shape == (2,):
                found = found.unbind()
            if not isinstance(found, tuple | list) or len(found) != 2:
                return "return two numbers: the slope for w and the slope for b"
            found = [torch.as_tensor(v, dtype=torch.float64).detach() for v in found]
            if any(v.shape != () for v in found):
                shapes = [tuple(v.shape) for v in found]
                return f"each slope is one number, a mean over the stories; yours have {shapes}"
            values = torch.stack(found)
            error, e = w * x + b - y, w * x - y
            right = torch.stack([(2 * error * x).mean(), (2 * error).mean()])
            product = torch.stack([(2 * error).mean() * x.mean(), right[1]])
            slips = {
                "these are the right numbers in the wrong order: w first": right.flip(0),
                "the loss is a mean over the stories, you return the slopes of a sum": right * n,
                "half of what it should be: the slope of a square e * e is twice e": right / 2,
                "the sign is the wrong way round: the error is prediction minus truth": -right,
                "the mean of a product is not the product of the means": product,
                "divide by the number of stories, which is not always 3": right * n / 3,
                "the prediction is w * x + b: b is missing": (
                    torch.stack([(2 * e * x).mean(), (2 * e).mean()])
                ),
            }
            both = [", ".join(f"{v:.3f}" for v in pair) for pair in (right, values)]
            said = f"at w = {w}, b = {b} the slopes are {both[0]}, not {both[1]}"
            if torch.isclose(values[1], right[1]):
                said = "the slope for b is right; for w, each error counts x times as much"
            if why := check_values(values, right, slips, otherwise=said):
                return why
    return None


@exercise(
    "00.3",
    "look at the shape of the difference",
    "before you subtract, look at both shapes: (N, 1) minus (N,) is (N, N), in silence",
)
def mean_squared_error(answer: Callable[[Tensor, Tensor], Any]) -> str | None:
    generator = torch.Generator().manual_seed(1)
    for n in (3, 8):
        predicted, target = torch.rand(2, n, generator=generator)
        wanted = ((predicted - target) ** 2).mean()
        for given in (predicted[:, None], predicted):
            shapes = f"predictions {tuple(given.shape)} and targets {tuple(target.shape)}"
            leaf = given.clone().requires_grad_()
            try:
                found = answer(leaf, target.clone())
            except NotImplementedError:  # a RuntimeError, and a stub
                raise
            except (IndexError, RuntimeError) as error:
                return f"for {shapes} your answer raised {type(error).__name__}: {error}"
            found = torch.as_tensor(found)
            if found.shape != ():
                return f"for {shapes} one number is asked, not a tensor of {tuple(found.shape)}"
            if torch.isclose(found, wanted) and not found.requires_grad:
                return "the number is right, but no gradient reaches the predictions: stay in torch"
            if torch.isclose(found, wanted):
                continue
            if torch.isclose(found, ((predicted[:, None] - target) ** 2).mean()):
                return f"for {shapes} every prediction still meets every target"
            return f"for {shapes} the mean is {wanted:.4f}, you return {found:.4f}"
    return None


@exercise(
    "00.4",
    "the loop of this chapter, with three parameters instead of two",
    "the same loop fits any model whose loss has a gradient",
)
def fit_parabola(answer: Callable[[Tensor, Tensor], Sequence[float]]) -> str | None:
    x = torch.linspace(-1, 1, 21)
    for a, b, c in ((1.0, -0.5, 0.25), (-2.0, 1.0, 3.0)):
        try:
            found = answer(x.clone(), a * x**2 + b * x + c)
        except TypeError as error:
            if "NoneType" not in str(error):
                raise
            return "a .grad is None: the new parameter was computed from the old one, not changed"
        except RuntimeError as error:
            if "second time" in str(error):
                return "compute the loss again in every step, then call backward()"
            if "leaf Variable" in str(error):
                return "change the parameters inside torch.no_grad()"
            raise
        if not isinstance(found, tuple | list | Tensor) or len(found) != 3:
            return "return the three parameters a, b and c"
        values = [float(value) for value in found]
        far = max(abs(v - r) for v, r in zip(values, (a, b, c), strict=True))
        if far <= 0.01:
            continue
        if not all(abs(v) < 1e6 for v in values):
            return "the parameters ran away: a step against the gradient? a smaller learning rate?"
        if max(abs(v - r) for v, r in zip(values[::-1], (a, b, c), strict=True)) <= 0.01:
            return "the right numbers in the wrong order: a belongs to x squared"
        names = ", ".join(f"{v:.3f}" for v in values)
        advice = "more steps? gradients cleared after each step? all shapes (N,)?"
        return f"for {a}, {b}, {c} you return {names}: {advice}"
    return None
