"""The graders of 07_gradients accept right answers and say what is wrong with wrong ones."""

import math

import torch
import torch.nn.functional as F

from minillm.exercises import grade


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


def total_loss(model, batch, reduction):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction=reduction)


def accumulate(model, batches):
    count = sum(int((y != -100).sum()) for _, y in batches)
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = total_loss(model, batch, "sum") / count
        loss.backward()
        total += loss.item()
    return total


def mean_of_means(model, batches):
    model.zero_grad()
    losses = [total_loss(model, batch, "mean") / len(batches) for batch in batches]
    torch.stack(losses).sum().backward()
    return sum(loss.item() for loss in losses)


def undivided(model, batches):
    model.zero_grad()
    for batch in batches:
        total_loss(model, batch, "sum").backward()
    return 0.0


def all_positions(model, batches):
    model.zero_grad()
    for batch in batches:
        (total_loss(model, batch, "sum") / sum(y.numel() for _, y in batches)).backward()
    return 0.0


def one_large_batch(model, batches):
    model.zero_grad()
    loss = total_loss(
        model, tuple(torch.cat(parts) for parts in zip(*batches, strict=True)), "mean"
    )
    loss.backward()
    return loss.item()


def keeps_old(model, batches):
    count = sum(int((y != -100).sum()) for _, y in batches)
    total = 0.0
    for batch in batches:
        loss = total_loss(model, batch, "sum") / count
        loss.backward()
        total += loss.item()
    return total


def wrong_loss(model, batches):
    return accumulate(model, batches) * 2


def one_backward(model, batches):
    """Right gradients, but all graphs are in memory at once."""
    count = sum(int((y != -100).sum()) for _, y in batches)
    model.zero_grad()
    loss = torch.stack([total_loss(model, batch, "sum") for batch in batches]).sum() / count
    loss.backward()
    return loss.item()


def divided_last(model, batches):
    """As right: sums first, one division of all gradients at the end (a count in a tensor)."""
    model.zero_grad()
    total, count = 0.0, torch.zeros((), dtype=torch.long)
    for batch in batches:
        loss = total_loss(model, batch, "sum")
        loss.backward()
        total, count = total + loss.item(), count + (batch[1] != -100).sum()
    for p in model.parameters():
        p.grad /= count
    return total / count


def no_return(model, batches):
    accumulate(model, batches)


RIGHT = {
    "07_gradients.1": score_gradients,
    "07_gradients.2": norm_gradients,
    "07_gradients.3": accumulate,
}
WRONG = [
    ("07_gradients.1", lost_transpose, "transpose"),
    ("07_gradients.1", unscaled, "divided by sqrt(D)"),
    ("07_gradients.1", scaled_by_size, "not by D"),
    ("07_gradients.1", swapped, "dq is wrong"),
    ("07_gradients.1", through_softmax, "is too often"),
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
    ("07_gradients.3", mean_of_means, "average the batches' means"),
    ("07_gradients.3", undivided, "forgot to divide"),
    ("07_gradients.3", all_positions, "label -100 do not count"),
    ("07_gradients.3", one_large_batch, "was called 1 times"),
    ("07_gradients.3", one_backward, "backward after each batch"),
    ("07_gradients.3", no_return, "return the mean loss as well"),
    ("07_gradients.3", keeps_old, "adds to the old gradients"),
    ("07_gradients.3", wrong_loss, "you return"),
]


def test_the_solution_is_autograds():
    x, dy = torch.randn(2, 3, 5, dtype=torch.float64)
    gain = torch.rand(5, dtype=torch.float64)
    x.requires_grad_(), gain.requires_grad_()
    y = gain * x / (x.pow(2).mean(-1, keepdim=True) + 0.1).sqrt()
    found = norm_gradients(x, gain, dy, 0.1)
    for ours, theirs in zip(found, torch.autograd.grad(y, (x, gain), dy), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_count_may_be_a_tensor_and_the_division_last():
    assert grade("07_gradients.3", divided_last).status == "correct"
    assert grade("07_gradients.3", lambda *_: None).status == "unsolved"
