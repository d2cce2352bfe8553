"""Wrong answers of 12: exercise, answer, words that its message holds.

12.3 and 12.4 ask something else than at first: their old answers stood on the page.
"""

import math

from minillm.exercises import state


def weights_of(dt, a, B, C, *, future=False, steps=True, shift=1, turned=False):
    T = len(dt)
    rows = []
    for t in range(T):
        row = []
        for s in range(T):
            c, b = (C[s], B[t]) if turned else (C[t], B[s])
            fits = sum(x * y for x, y in zip(c, b, strict=True))
            left = math.exp(sum(a[s + shift : t + 1]))
            row.append(fits * left * (dt[s] if steps else 1) * (future or s <= t))
        rows.append(row)
    return rows


def outputs_steps(dt, a, B, C):
    rows = weights_of(dt, a, B, C, steps=False)
    return [[w * dt[t] for w in row] for t, row in enumerate(rows)]


def divided(dt, a, B, C):
    left = [math.exp(sum(a[: t + 1])) for t in range(len(a))]
    rows = weights_of(dt, [0.0] * len(a), B, C)
    return [[w * left[t] / left[s] for s, w in enumerate(row)] for t, row in enumerate(rows)]


def subtracted(dt, a, B, C):
    so_far = [sum(a[: t + 1]) for t in range(len(a))]
    rows = weights_of(dt, [0.0] * len(a), B, C)
    return [
        [w * math.exp(min(so_far[t] - so_far[s], 0.0)) for s, w in enumerate(row)]
        for t, row in enumerate(rows)
    ]


def memory_bytes(c, length, *, window=-1, channels=None, bytes_each=4, head_dim=None, heads=None):
    total = 0
    for i in range(c.num_hidden_layers):
        if c.has_state(i):
            s, E = c.state, c.state.expand * c.hidden_size
            width = E + 2 * s.n_groups * s.state_size if channels is None else E
            total += (s.conv_kernel + window) * width + E * s.state_size
        else:
            G, D = heads or c.num_key_value_heads, head_dim or c.head_dim
            total += 2 * G * D * length
    return bytes_each * total


def states_of(c):
    layers = sum(map(c.has_state, range(c.num_hidden_layers)))
    return 4 * layers * c.state.expand * c.hidden_size * c.state.state_size


def other_groups(c):
    s, layers = c.state, sum(map(c.has_state, range(c.num_hidden_layers)))
    return 4 * layers * (s.conv_kernel - 1) * 2 * (s.n_groups - 1) * s.state_size


def halver(marks, *, A=-693147.18, other=1e-6, mark=1.0):
    return [mark if m else other for m in marks], A


def slower(marks, rate):
    """Halves, but the smaller the rate, the more the unmarked inputs add up to."""
    return halver(marks, A=-float(rate), other=math.log(2) / rate)


def reach(**changes):
    answer = dict(zip(state.REACH, (4, 10, 1, 193, 100), strict=True))
    return answer | {list(answer)[int(key[1:])]: value for key, value in changes.items()}


WRONG = [
    ("12.1", lambda *a: weights_of(*a, future=True), "reads inputs after t"),
    ("12.1", lambda *a: weights_of(*a, steps=False), "the weight of its own step"),
    ("12.1", lambda *a: weights_of(*a, shift=0), "does not fade at its own position"),
    ("12.1", lambda *a: weights_of(*a, turned=True), "its C meets the input's B"),
    ("12.1", lambda *a: weights_of(*a)[:-1], "return 1 rows of 1 numbers"),
    ("12.1", lambda *a: weights_of(*a, shift=99), "fades on its way"),
    ("12.1", lambda *a: outputs_steps(*a), "the step is the input's"),
    ("12.1", lambda dt, *_: [0.0] * len(dt), "return 1 rows of 1 numbers"),
    ("12.1", divided, "no quotient brings back"),
    ("12.1", subtracted, "has lost what the short one"),
    (
        "12.1",
        lambda *a: [list(row) for row in zip(*weights_of(*a), strict=True)],
        "the recurrence says otherwise",
    ),
    ("12.2", lambda c, n: memory_bytes(c, n, bytes_each=1), "each of which takes 4 bytes"),
    ("12.2", lambda c, n: memory_bytes(c, n, window=0), "the newest input"),
    ("12.2", lambda c, n: memory_bytes(c, 1), "keys grow with each token"),
    ("12.2", lambda c, n: memory_bytes(c, n, channels="x"), "B and C go through"),
    ("12.2", lambda c, n: memory_bytes(c, n) - other_groups(c), "each of the groups"),
    (
        "12.2",
        lambda c, n: memory_bytes(c, n, window=-c.state.conv_kernel if c.state else 0),
        "window is missing",
    ),
    ("12.2", lambda c, n: memory_bytes(c, n) - states_of(c), "the state is missing"),
    (
        "12.2",
        lambda c, n: memory_bytes(
            c, n, head_dim=c.num_attention_heads and c.hidden_size // c.num_attention_heads
        ),
        "as wide as `config.head_dim`",
    ),
    ("12.2", lambda c, n: memory_bytes(c, n, heads=c.num_attention_heads), "heads share keys"),
    ("12.2", lambda c, n: memory_bytes(c, n) + 1, "1 more than the cache holds"),
    ("12.2", lambda c, n: "a lot", "return a number"),
    ("12.3", lambda m: halver(m, other=0.0), "a share of 1.000 is left of before"),
    ("12.3", lambda m: ([float(x) for x in m], -20.0), "a share of 1.000 is left of before"),
    ("12.3", lambda m: halver(m, other=1e-7), "a share of 0.933 is left of before"),
    (
        "12.3",
        lambda m: halver(m, A=-math.log(2), other=1.0),
        "is not marked, and its input came in",
    ),
    ("12.3", lambda m: halver(m, mark=2.0), "enters with the weight 2.0"),
    ("12.3", lambda m: halver(m, A=-1.0), "a share of 1.000 is left of before"),
    ("12.3", lambda m: halver(m, A=20.0), "A is a negative number"),
    ("12.3", lambda m: halver(m, A=-math.inf), "A is a negative number, not -inf"),
    ("12.3", lambda m: halver(m, mark=math.nan), "a step is a number from 0"),
    ("12.3", lambda m: (halver(m)[0][:-1], -20.0), "a step for each of 5 positions"),
    ("12.3", lambda m: halver(m, other=-1.0), "a step is a number from 0"),
    ("12.3", lambda m: halver(m)[0], "return two things"),
    ("12.3", lambda m: slower(m, 1000), "unmarked inputs of 10 have let in 0.01"),
    ("12.3", lambda m: slower(m, 1100), "unmarked inputs of 10 have let in 0.01"),
    ("12.3", lambda m: slower(m, 1300), "unmarked inputs of 10 have let in 0.01"),
    ("12.4", reach(_0=3), "count the position itself too"),
    ("12.4", reach(_1=12), "has itself read further back"),
    ("12.4", reach(_1=4), "has itself read further back"),
    ("12.4", reach(_2=3), "nothing brings anything"),
    ("12.4", reach(_3=256), "as many as the one before"),
    ("12.4", reach(_4=1), "what does the state sum up"),
    ("12.4", reach(_4=...), "not filled in yet"),
    ("12.4", 5, "a dictionary with the 5 questions"),
]
