"""Each grader of notebook 00 accepts a right answer and says what is wrong with wrong ones."""

import torch

SHAPES = {
    "x[0]": (3, 4),
    "x[:, 1:]": (2, 2, 4),
    "x.mean(dim=1, keepdim=True)": (2, 1, 4),
    "x.transpose(1, 2)": (2, 4, 3),
    "x + torch.zeros(3, 1)": (2, 3, 4),
    "x @ torch.zeros(4, 7)": (2, 3, 7),
    "x @ torch.zeros(3, 4)": "error",
}


def gradient(x, y, w, b):
    error = w * x + b - y
    return (2 * error * x).mean(), (2 * error).mean()


def mean_squared_error(predicted, target):
    return ((predicted.reshape(-1) - target.reshape(-1)) ** 2).mean()


def fit_parabola(x, y, steps=2000, rate=0.5, clear=True):
    parameters = torch.zeros(3, requires_grad=True)
    for _ in range(steps):
        a, b, c = parameters
        ((a * x**2 + b * x + c - y) ** 2).mean().backward()
        with torch.no_grad():
            parameters -= rate * parameters.grad
        if clear:
            parameters.grad = None
    return parameters.tolist()


def loss_once(x, y):
    p = torch.zeros(3, requires_grad=True)
    loss = ((p[0] * x**2 + p[1] * x + p[2] - y) ** 2).mean()
    for _ in range(2):
        loss.backward()
    return p.tolist()


def in_place(x, y):
    p = torch.zeros(3, requires_grad=True)
    ((p[0] * x**2 + p[1] * x + p[2] - y) ** 2).mean().backward()
    p -= 0.1 * p.grad
    return p.tolist()


def rebuilt(x, y):
    p = torch.zeros(3, requires_grad=True)
    for _ in range(2):
        ((p[0] * x**2 + p[1] * x + p[2] - y) ** 2).mean().backward()
        p = p - 0.1 * p.grad
    return p.tolist()


RIGHT = {
    "00.1": SHAPES,
    "00.2": gradient,
    "00.3": mean_squared_error,
    "00.4": fit_parabola,
}
WRONG = [
    ("00.1", {**SHAPES, "x[0]": (1, 3, 4)}, "that dimension disappears"),
    ("00.1", {**SHAPES, "x.mean(dim=1, keepdim=True)": (2, 4)}, "with size 1"),
    ("00.1", {**SHAPES, "x + torch.zeros(3, 1)": "error"}, "align the shapes at the right"),
    ("00.1", {**SHAPES, "x @ torch.zeros(3, 4)": (2, 3, 4)}, "meet in the middle"),
    ("00.1", [(3, 4)], "a dictionary"),
    ("00.1", {**SHAPES, "x[0]": ...}, "not filled in"),
    ("00.1", {**SHAPES, "x[0]": "(3, 4)"}, "write a tuple"),
    ("00.2", lambda x, y, w, b: gradient(x, y, w, b)[::-1], "w first"),
    ("00.2", lambda x, y, w, b: tuple(len(x) * g for g in gradient(x, y, w, b)), "of a sum"),
    ("00.2", lambda x, y, w, b: tuple(g / 2 for g in gradient(x, y, w, b)), "twice e"),
    ("00.2", lambda x, y, w, b: tuple(-g for g in gradient(x, y, w, b)), "prediction minus truth"),
    ("00.2", lambda x, y, w, b: (gradient(x, y, w, b)[1],) * 2, "x times as much"),
    ("00.2", lambda x, y, w, b: gradient(x, y, w, b)[0], "two numbers"),
    ("00.2", lambda x, y, w, b: (2 * (w * x + b - y) * x, 2 * (w * x + b - y)), "a mean over"),
    ("00.2", lambda x, y, w, b: tuple(len(x) * g / 3 for g in gradient(x, y, w, b)), "always 3"),
    ("00.2", lambda x, y, w, b: gradient(x, y, w, 0.0), "b is missing"),
    (
        "00.2",
        lambda x, y, w, b: (gradient(x, y, w, b)[1] * x.mean(), gradient(x, y, w, b)[1]),
        "product of the means",
    ),
    ("00.3", lambda p, t: ((p - t) ** 2).mean(), "every prediction still meets every target"),
    ("00.3", lambda p, t: (p.reshape(-1) - t) ** 2, "one number is asked"),
    ("00.3", lambda p, t: ((p[:, 0] - t) ** 2).mean(), "predictions (3,) and targets (3,)"),
    ("00.3", lambda p, t: mean_squared_error(p, t).item(), "no gradient reaches"),
    ("00.3", lambda p, t: (p.reshape(-1) - t).abs().mean(), "the mean is"),
    ("00.4", lambda x, y: fit_parabola(x, y, steps=20), "more steps"),
    ("00.4", lambda x, y: fit_parabola(x, y, rate=2.5), "smaller learning rate"),
    ("00.4", lambda x, y: fit_parabola(x, y, rate=-0.5), "against the gradient"),
    ("00.4", lambda x, y: fit_parabola(x, y, clear=False), "gradients cleared"),
    ("00.4", loss_once, "again in every step"),
    ("00.4", in_place, "inside torch.no_grad()"),
    ("00.4", rebuilt, "a .grad is None"),
    ("00.4", lambda x, y: fit_parabola(x, y)[::-1], "wrong order"),
    ("00.4", lambda x, y: fit_parabola(x, y)[:2], "the three parameters"),
]
