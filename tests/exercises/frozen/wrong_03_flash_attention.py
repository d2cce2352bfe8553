"""Wrong answers of 03_flash_attention: exercise, answer, words that its message holds."""

import torch
import torch.nn.functional as F

from minillm.attention import attention, build_mask, softmax


def overflowing(x, temperature):
    probs = torch.exp(x / temperature)
    return probs / probs.sum(-1, keepdim=True)


def merge(out_a, lse_a, out_b, lse_b):
    """Relative to the larger of the two; unlike the solution, without logaddexp."""
    top = torch.maximum(lse_a, lse_b).clamp(min=-1e30)
    a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = a + b
    weight_a, weight_b = (x / total.masked_fill(total == 0, 1) for x in (a, b))
    return out_a * weight_a[..., None] + out_b * weight_b[..., None], top + torch.log(total)


def merge_with_nan(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = torch.exp(lse_a - lse), torch.exp(lse_b - lse)
    return out_a * a[..., None] + out_b * b[..., None], lse


def merge_naively(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.exp()[..., None], lse_b.exp()[..., None]
    total = (a + b).masked_fill(a + b == 0, 1)
    return (out_a * a + out_b * b) / total, torch.logaddexp(lse_a, lse_b)


def merge_undivided(out_a, lse_a, out_b, lse_b):
    top = torch.maximum(lse_a, lse_b).clamp(min=-1e30)
    a, b = torch.exp(lse_a - top)[..., None], torch.exp(lse_b - top)[..., None]
    return out_a * a + out_b * b, torch.logaddexp(lse_a, lse_b)


def window_by_rows(q, k, v, window):
    """One query at a time: slow, but linear."""
    T = q.shape[2]
    rows = []
    for t in range(T):
        keys = slice(max(0, t - window + 1), t + 1)
        rows.append(attention(q[:, :, t : t + 1], k[:, :, keys], v[:, :, keys]))
    return torch.cat(rows, 2)


def window_square(q, k, v, window):
    places = torch.arange(q.shape[2])
    return attention(q, k, v, mask=build_mask(places, places, window=window))


def window_plus_one(q, k, v, window):
    return window_by_rows(q, k, v, window + 1)


WRONG = [
    ("03_flash_attention.1", lambda x, t: softmax(x * t, -1), "you multiply by the temperature"),
    ("03_flash_attention.1", lambda x, t: softmax(x, -1), "the temperature has no effect"),
    ("03_flash_attention.1", lambda x, t: softmax(x / t, 0), "the rows should sum to 1"),
    ("03_flash_attention.1", overflowing, "subtract the maximum"),
    (
        "03_flash_attention.1",
        lambda x, t: torch.softmax(x / t, -1),
        "a row of -inf should give zeros",
    ),
    ("03_flash_attention.1", lambda x, t: softmax(x / t**2, -1), "not the softmax of x / 2.5"),
    ("03_flash_attention.1", lambda x, t: (x / t).tolist(), "should be a tensor, but is a list"),
    (
        "03_flash_attention.2",
        lambda a, la, b, lb: ((a + b) / 2, torch.logaddexp(la, lb)),
        "you average",
    ),
    ("03_flash_attention.2", merge_with_nan, "gives NaN: out should be 0, lse -inf"),
    ("03_flash_attention.2", merge_naively, "when scores are large: subtract the larger lse first"),
    (
        "03_flash_attention.2",
        lambda a, la, b, lb: (merge(a, la, b, lb)[0], la + lb),
        "lse is not log",
    ),
    (
        "03_flash_attention.2",
        lambda a, la, b, lb: (a, torch.logaddexp(la, lb)),
        "not the attention over all",
    ),
    ("03_flash_attention.2", merge_undivided, "divide by their sum"),
    ("03_flash_attention.2", lambda a, la, b, lb: merge(a, la, b, lb)[0], "return two tensors"),
    (
        "03_flash_attention.3",
        lambda q, k, v, w: window_by_rows(q * q.shape[-1] ** 0.5, k, v, w),
        "not divided by the root of D",
    ),
    ("03_flash_attention.3", window_square, "the numbers are right, but for 1024 positions"),
    ("03_flash_attention.3", window_plus_one, "one key too many"),
    (
        "03_flash_attention.3",
        lambda q, k, v, w: F.scaled_dot_product_attention(q, k, v),
        "query 0 is the first to come out wrong: it may read nothing but itself",
    ),
    (
        "03_flash_attention.3",
        lambda q, k, v, w: attention(q, k, v, is_causal=True),
        "query 4 is the first",
    ),
]
