"""Wrong answers of 16_real_readers: exercise, answer, words that its message holds."""

import torch

PREDICTED = {
    "placeholders of the picture": 256,
    "position of the first word after the picture": 26,
    "delta": -240,
    "position of the 5th word of the answer": 50,
    "pairs of a head of 128 that turn by width": 24,
    "pairs of a head of 80 in the tower that turn by column": 20,
}

PLACES, FIRST, DELTA, FIFTH, WIDE, COLUMN = PREDICTED


def positions(layout, *, area=False, swap=False, shift=0, plain=False):
    time, height, width, start = [], [], [], 0
    for part in layout:
        h, w = (1, 1) if isinstance(part, int) else part
        for i in range(part if isinstance(part, int) else h * w):
            word = isinstance(part, int)
            place = (start + i,) * 3 if word else (start, start + i // w, start + i % w)
            for row, value in zip((time, height, width), place, strict=True):
                row.append(len(time) - (row is time) if plain else value)
        if plain:
            time[-1] = len(time) - 1
        start += part if isinstance(part, int) else (h * w if area else max(h, w))
    rows = (time, width, height) if swap else (time, height, width)
    return [list(r) for r in rows], start - len(time) + shift


def counted(layout):
    n = sum(p if isinstance(p, int) else p[0] * p[1] for p in layout)
    return [list(range(n))] * 3, 0


def later(mask, delta, n, *, shift=0):
    return mask.sum(1)[:, None] + delta + shift + torch.arange(n)


def with_padding(mask, delta, n):
    return mask.shape[1] + delta + torch.arange(n)


def safe(scores, mask):
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return weights.masked_fill(~mask, 0.0)


def theirs(scores, mask):
    bias = torch.where(mask, 0.0, torch.finfo(scores.dtype).min)
    return (scores + bias * mask.any(-1, keepdim=True)).softmax(-1)


WRONG = [
    ("16_real_readers.1", counted, "how far did the picture move the text on"),
    ("16_real_readers.1", lambda x: positions(x, area=True), "is 8, its number"),
    ("16_real_readers.1", lambda x: positions(x, swap=True), "exchanged"),
    ("16_real_readers.1", lambda x: positions(x, shift=1), "delta is"),
    ("16_real_readers.1", lambda x: positions(x)[0], "the three rows and delta"),
    ("16_real_readers.1", lambda x: (positions(x)[0][:2], 0), "there should be three rows, not 2"),
    ("16_real_readers.1", lambda x: ([[0]] * 3, 0), "1 positions for 3 tokens"),
    (
        "16_real_readers.1",
        lambda x: ([[i + 1 for i in r] for r in positions(x)[0]], 0),
        "and should be 0",
    ),
    ("16_real_readers.2", {**PREDICTED, PLACES: 1024}, "four of them become one"),
    ("16_real_readers.2", {**PREDICTED, FIRST: 266}, "the larger side"),
    ("16_real_readers.2", {**PREDICTED, DELTA: 240}, "less the number of tokens"),
    ("16_real_readers.2", {**PREDICTED, FIFTH: 290}, "what is delta"),
    ("16_real_readers.2", {**PREDICTED, WIDE: 16}, "width has the last"),
    ("16_real_readers.2", {**PREDICTED, COLUMN: 40}, "half by column"),
    ("16_real_readers.3", with_padding, "padding is counted"),
    ("16_real_readers.3", lambda m, d, n: later(m, 0 * d, n), "delta is missing"),
    ("16_real_readers.3", lambda m, d, n: later(m, d, n, shift=1), "all are off by 1"),
    ("16_real_readers.3", lambda m, d, n: later(m, d[:1], n), "should be [[2, 3], [2, 3]]"),
    ("16_real_readers.3", lambda m, d, n: later(m, d, n + 1), "return (1, 3), not (1, 4)"),
    ("16_real_readers.4", lambda s, m: s.masked_fill(~m, -torch.inf).softmax(-1), "NaN"),
    ("16_real_readers.4", theirs, "everything is allowed"),
    (
        "16_real_readers.4",
        lambda s, m: s.masked_fill(~m, -1e9).softmax(-1),
        "everything is allowed",
    ),
    (
        "16_real_readers.4",
        lambda s, m: s.softmax(-1) * m,
        "not the softmax of the scores that it may see",
    ),
    (
        "16_real_readers.4",
        lambda s, m: s.masked_fill(~m, -100.0).softmax(-1) * m,
        "that it may see, with scores around -200",
    ),
    (
        "16_real_readers.4",
        lambda s, m: s.exp() * m / ((s.exp() * m).sum(-1, keepdim=True) + 1e-9),
        "gives NaN, with scores around 200",
    ),
    ("16_real_readers.4", lambda s, m: s[0], "return (3, 4)"),
    (
        "16_real_readers.4",
        lambda s, m: safe(s, m) + 0.5 * ~m.any(-1, keepdim=True),
        "should be zeros",
    ),
]
