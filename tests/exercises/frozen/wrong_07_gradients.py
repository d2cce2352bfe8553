"""Wrong answers of 07_gradients: exercise, answer, words that its message holds."""

import math

import torch


def score_gradients(q, k, d_scores):
    return d_scores @ k / math.sqrt(q.shape[1]), d_scores.T @ q / math.sqrt(q.shape[1])


def lost_transpose(q, k, d_scores):
    scale = math.sqrt(q.shape[1])
    return d_scores @ k / scale, d_scores @ q / scale


def unscaled(q, k, d_scores):
    return d_scores @ k, d_scores.T @ q


def scaled_by_size(q, k, d_scores):
    return d_scores @ k / q.shape[1], d_scores.T @ q / q.shape[1]


def swapped(q, k, d_scores):
    return tuple(reversed(score_gradients(q, k, d_scores)))


def through_softmax(q, k, d_scores):
    p = (q @ k.T / math.sqrt(q.shape[1])).softmax(-1)
    return score_gradients(q, k, p * (d_scores - (p * d_scores).sum(-1, keepdim=True)))


def autograd_scores(q, k, d_scores):
    q, k = q.requires_grad_(), k.requires_grad_()
    return torch.autograd.grad(q @ k.T / math.sqrt(q.shape[1]), (q, k), d_scores)


def autograd_norm(x, gain, dy, eps):
    with torch.enable_grad():
        x, gain = x.requires_grad_(), gain.requires_grad_()
        y = torch.nn.functional.rms_norm(x, gain.shape, gain, eps)
        return torch.autograd.grad(y, (x, gain), dy)


def without_eps(x, gain, dy, eps):
    return norm_gradients(x, gain, dy, 0.0)


def parts(x, gain, dy, eps):
    r = (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    n, dn = x / r, dy * gain
    return r, n, dn, (dn * n).mean(-1, keepdim=True)


def norm_gradients(x, gain, dy, eps):
    r, n, dn, along = parts(x, gain, dy, eps)
    return (dn - n * along) / r, (dy * n).sum(0)


def with_dx(make):
    def answer(x, gain, dy, eps):
        r, n, dn, along = parts(x, gain, dy, eps)
        return make(x, r, n, dn, along, dy), (dy * n).sum(0)

    return answer


def with_gain(make):
    def answer(x, gain, dy, eps):
        n = parts(x, gain, dy, eps)[1]
        return norm_gradients(x, gain, dy, eps)[0], make(x, n, dy)

    return answer


WRONG = [
    ("07_gradients.1", lost_transpose, "transpose"),
    ("07_gradients.1", unscaled, "divided by sqrt(D)"),
    ("07_gradients.1", scaled_by_size, "not by D"),
    ("07_gradients.1", swapped, "dq is wrong"),
    ("07_gradients.1", through_softmax, "once too often"),
    ("07_gradients.1", autograd_scores, "autograd is switched off"),
    ("07_gradients.1", lambda q, k, d: d @ k / math.sqrt(q.shape[1]), "two tensors"),
    ("07_gradients.2", autograd_norm, "autograd is switched off"),
    ("07_gradients.2", without_eps, "under the root"),
    (
        "07_gradients.2",
        with_dx(lambda x, r, n, dn, a, dy: dn / r - x * (dn * x).mean(-1, keepdim=True) / r**2),
        "one r too few",
    ),
    ("07_gradients.2", with_dx(lambda x, r, n, dn, a, dy: dn / r), "through it"),
    (
        "07_gradients.2",
        with_dx(lambda x, r, n, dn, a, dy: (dy - n * (dy * n).mean(-1, keepdim=True)) / r),
        "gain is missing",
    ),
    (
        "07_gradients.2",
        with_dx(lambda x, r, n, dn, a, dy: (dn - n * a * x.shape[1]) / r),
        "times too large",
    ),
    ("07_gradients.2", with_dx(lambda x, r, n, dn, a, dy: (dn + n * a) / r), "wrong sign"),
    ("07_gradients.2", with_dx(lambda x, r, n, dn, a, dy: dn), "dx is wrong"),
    ("07_gradients.2", with_gain(lambda x, n, dy: (dy * n).mean(0)), "not a mean"),
    ("07_gradients.2", with_gain(lambda x, n, dy: (dy * x).sum(0)), "not with x"),
    ("07_gradients.2", with_gain(lambda x, n, dy: dy * n), "yours have"),
]
