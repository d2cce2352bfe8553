"""The graders of 07_optimizers accept right answers and say what is wrong with wrong ones."""

import torch

from minillm.deeper.training.muon import equalize
from minillm.exercises import grade

A, B, C = 3.4445, -4.7750, 2.0315


def adamw_step(p, g, m, v, t, rate, beta1, beta2, eps, decay, **slip):
    g = g + slip.get("inside", 0.0) * decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g ** slip.get("power", 2)
    m_hat, v_hat = m, v
    if not slip.get("uncorrected"):
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    root = v_hat.sqrt() + eps
    if slip.get("eps_inside"):
        root = (v_hat + eps).sqrt()
    shrink = decay * slip.get("shrink", rate) * (not slip.get("inside"))
    moved = p - rate * m_hat / root
    return moved - shrink * (moved if slip.get("after") else p), m, v


def slip(**how):
    return lambda *given: adamw_step(*given, **how)


def torchs(p, g, m, v, t, rate, beta1, beta2, eps, decay):
    """torch's own step, from the same state."""
    weight = torch.nn.Parameter(p.clone())
    settings = {"lr": rate, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
    optimizer = torch.optim.AdamW([weight], **settings)
    optimizer.state[weight] = {
        "step": torch.tensor(t - 1.0),
        "exp_avg": m.clone(),
        "exp_avg_sq": v.clone(),
    }
    weight.grad = g
    optimizer.step()
    state = optimizer.state[weight]
    return weight.detach(), state["exp_avg"], state["exp_avg_sq"]


def in_place(p, g, m, v, *rest):
    new, m_new, v_new = adamw_step(p, g, m, v, *rest)
    p.copy_(new)
    return p, m_new, v_new


def old_m(p, g, m, v, *rest):
    new, _, v_new = adamw_step(p, g, m, v, *rest)
    return new, 0.2 * m + 0.8 * g, v_new


def from_zero(p, g, m, v, t, *rest):
    return adamw_step(p, g, m, v, t + 1, *rest)


def plus(p, *rest):
    new, m, v = adamw_step(p, *rest)
    return 2 * p - new, m, v


def make_alike(M, steps=5, norm=torch.linalg.norm, turn=True):
    tall = turn and M.shape[0] > M.shape[1]
    X = M.T if tall else M
    X = X / norm(X).clamp(min=1e-7)
    for _ in range(steps):
        gram = X @ X.T
        X = A * X + (B * gram + C * gram @ gram) @ X
    return X.T if tall else X


def other_side(M):
    """The smaller A without a transpose: X times a polynomial of X^T X."""
    if M.shape[0] <= M.shape[1]:
        return make_alike(M)
    X = M / torch.linalg.norm(M).clamp(min=1e-7)
    for _ in range(5):
        gram = X.T @ X
        X = A * X + X @ (B * gram + C * gram @ gram)
    return X


def decomposed(M):
    U, _, Vt = torch.linalg.svd(M, full_matrices=False)
    return U @ Vt


def nan_for_zero(M):
    return make_alike(M) if M.any() else M / M.norm()


def turned(M):
    X = make_alike(M)
    return X.T if M.shape[0] > M.shape[1] else X


RIGHT = {"07_optimizers.1": adamw_step, "07_optimizers.2": make_alike}
WRONG = [
    ("07_optimizers.1", slip(inside=1.0), "shrink p by itself"),
    ("07_optimizers.1", slip(shrink=1.0), "multiplied with the rate"),
    ("07_optimizers.1", slip(uncorrected=True), "began at zero"),
    ("07_optimizers.1", slip(eps_inside=True), "outside of the root"),
    ("07_optimizers.1", slip(after=True), "before the step"),
    ("07_optimizers.1", slip(shrink=0.0), "p shrinks as well"),
    ("07_optimizers.1", from_zero, "no t + 1"),
    ("07_optimizers.1", slip(power=4), "v is wrong"),
    ("07_optimizers.1", old_m, "m is wrong"),
    ("07_optimizers.1", in_place, "changes what it was given"),
    ("07_optimizers.1", plus, "but p is not"),
    ("07_optimizers.1", lambda *given: adamw_step(*given)[0], "three tensors"),
    ("07_optimizers.2", decomposed, "exactly 1"),
    ("07_optimizers.2", lambda M: make_alike(M, steps=3), "five steps?"),
    ("07_optimizers.2", lambda M: make_alike(M, norm=lambda X: torch.linalg.norm(X, 2)), "largest"),
    ("07_optimizers.2", turned, "the same shape"),
    ("07_optimizers.2", torch.sign, "directions have turned"),
    ("07_optimizers.2", nan_for_zero, "not nan"),
    ("07_optimizers.2", lambda M: make_alike(M, norm=lambda X: torch.ones(())), "by the norm"),
    ("07_optimizers.2", lambda M: make_alike(M.float()), "type of the matrix"),
    ("07_optimizers.2", lambda M: make_alike(M, turn=False), "use the smaller"),
]


def test_other_right_answers():
    assert grade("07_optimizers.1", torchs).status == "correct"
    assert grade("07_optimizers.2", other_side).status == "correct"


def test_the_package_makes_them_alike_in_the_same_way():
    M = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(equalize(M), make_alike(M), rtol=1e-4, atol=1e-4)
