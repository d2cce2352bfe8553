"""The graders of notebook 05 accept right answers and say what is wrong with wrong ones."""

import torch

from minillm.attention import attention
from minillm.deeper.attention.rope_layouts import half_to_interleaved, interleaved_to_half
from minillm.deeper.attention.rope_scaling import RotaryEmbedding, rope_frequencies

SAME = {
    "query at 17, key at 10": True,
    "query at 3, key at 10": False,
    "query at 107, key at 100": True,
    "query at 10, key at 4": False,
    "query at 20, key at 5": True,
    "query at 5, key at 6": True,
}


def theta(head_dim, base=10000.0):
    return base ** (-torch.arange(0, head_dim, 2) / head_dim)


def turn(x, positions, frequencies, sign=1.0):
    angles = sign * positions[:, None] * frequencies
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def turn_interleaved(x, positions, frequencies):
    return RotaryEmbedding(x.shape[-1], interleaved=True)(positions[None])(x)


def turn_in_place(x, positions, frequencies):
    x *= 1.0 + 1e-3
    return turn(x, positions, frequencies)


def read_on(
    q, k, v, kept_keys, kept_values, rope, q_from=None, k_from=None, mask=True, twice=False
):
    S, T = kept_keys.shape[2], q.shape[2]
    at = torch.arange(T)[None]
    q_at, k_at = (at + (S if start is None else start) for start in (q_from, k_from))
    if twice and S:
        kept_keys = rope(torch.arange(S)[None])(kept_keys)
    keys = torch.cat((kept_keys, rope(k_at)(k)), dim=2)
    values = torch.cat((kept_values, v), dim=2)
    if isinstance(mask, bool):
        return attention(rope(q_at)(q), keys, values, is_causal=mask)
    return attention(rope(q_at)(q), keys, values, mask=mask(T, S))


def read_whole(q, k, v, kept_keys, kept_values, rope):
    """Another right way: the mask from positions."""
    S, T = kept_keys.shape[2], q.shape[2]
    new, every = torch.arange(S, S + T), torch.arange(S + T)
    keys = torch.cat((kept_keys, rope(new[None])(k)), dim=2)
    values = torch.cat((kept_values, v), dim=2)
    return attention(rope(new[None])(q), keys, values, mask=every <= new[:, None])


def read_turned_values(q, k, v, kept_keys, kept_values, rope):
    S = kept_keys.shape[2]
    new = rope(torch.arange(S, S + q.shape[2])[None])
    return read_on(q, k, new(v), kept_keys, kept_values, rope)


def top_left(T, S):
    return torch.ones(T, S + T, dtype=torch.bool).tril()


def convert(weights, heads, names=("q_proj", "k_proj"), kinds=("weight", "bias"), how=None):
    how = how or interleaved_to_half
    return {
        n: how(w, heads[n[:6]]) if n[:6] in names and n[7:] in kinds else w
        for n, w in weights.items()
    }


def convert_in_place(weights, H, G):
    for name, w in weights.items():
        if name[:6] in ("q_proj", "k_proj"):
            w.copy_(interleaved_to_half(w, H if name[0] == "q" else G))
    return weights


def look_back(D, distance, sign=1.0):
    ones = torch.ones(1, 1, 1, D)
    return ones.flatten(), turn(ones, torch.tensor([distance]), theta(D), sign).flatten()


def look_back_by_the_query(D, distance):
    angle = distance * theta(D)
    return torch.cat((angle.cos(), -angle.sin())), torch.cat(
        (torch.ones(D // 2), torch.zeros(D // 2))
    )


def look_back_interleaved(D, distance):
    ones = torch.ones(1, 1, 1, D)
    key = RotaryEmbedding(D, interleaved=True)(torch.tensor([[distance]]))(ones)
    return ones.flatten(), key.flatten()


RIGHT = {
    "05.1": turn,
    "05.2": SAME,
    "05.3": read_on,
    "05.4": lambda w, H, G: convert(w, {"q_proj": H, "k_proj": G}),
    "05.5": look_back,
}
WRONG = [
    ("05.1", turn_interleaved, "half-split pairs are (i, i + D/2)"),
    ("05.1", lambda x, p, f: turn(x, p, f, -1.0), "the other way round"),
    ("05.1", lambda x, p, f: turn(x, torch.arange(len(p)), f), "you turned by 0, 1, 2, 3"),
    ("05.1", lambda x, p, f: turn(x, p, f) + x, "the length of a vector changed"),
    ("05.1", lambda x, p, f: turn(x, p, f * 0.5), "are not turned by position times frequency"),
    ("05.1", lambda x, p, f: turn(x, p, f)[:, :1], "the shape is (2, 1, 4, 6), not (2, 3, 4, 6)"),
    ("05.1", lambda x, p, f: turn(x, p, theta(x.shape[-1])), "the frequencies of base 10,000"),
    ("05.1", lambda x, p, f: turn(x, p, 1 / f), "not divided by it"),
    (
        "05.1",
        lambda x, p, f: torch.stack(turn(x, p, f).chunk(2, -1), -1).flatten(-2),
        "one half after the other",
    ),
    ("05.1", turn_in_place, "x itself has changed"),
    ("05.2", {**SAME, "query at 3, key at 10": True}, "is that the same angle"),
    ("05.2", {**SAME, "query at 20, key at 5": False}, "turns once in 8"),
    ("05.2", {**SAME, "query at 5, key at 6": False}, "how far is it from there to 7"),
    ("05.2", dict.fromkeys(SAME, True), "right so far: 4 of 6"),
    ("05.2", {**SAME, "query at 10, key at 4": ...}, "not filled in yet"),
    ("05.2", {**SAME, "query at 10, key at 4": "no"}, "write True or False"),
    ("05.2", [True] * 6, "a dictionary"),
    ("05.3", lambda *a: read_on(*a, q_from=0, k_from=0), "begin at position 0 again"),
    (
        "05.3",
        lambda *a: read_on(*a, mask=False),
        "3 new words: positions are right, but a new word reads the new words after",
    ),
    ("05.3", lambda *a: read_on(*a, k_from=0), "the queries stand right, the new keys begin at"),
    ("05.3", lambda *a: read_on(*a, q_from=0), "the new keys stand right, the queries begin at"),
    ("05.3", lambda *a: read_on(*a, twice=True), "turned when they came in, you turn them again"),
    (
        "05.3",
        lambda *a: read_on(*a, q_from=a[3].shape[2] + 1, k_from=a[3].shape[2] + 1),
        "stands at position 5, not at 6",
    ),
    ("05.3", read_turned_values, "only q and k should be"),
    ("05.3", lambda *a: read_on(*a, mask=top_left), "aligned with the first keys"),
    ("05.3", lambda *a: read_on(*a)[:, :1], "expected (B, H, T, D) = (2, 2, 1, 8)"),
    ("05.3", lambda *a: read_on(*a) * 1.01, "differs from reading the whole text at once"),
    ("05.4", lambda w, H, G: w, "q_proj.weight is as it came"),
    (
        "05.4",
        lambda w, H, G: convert(w, {"q_proj": H, "k_proj": G}, names=("q_proj",)),
        "k_proj.weight is as it came",
    ),
    ("05.4", lambda w, H, G: {"q_proj.weight": w["q_proj.weight"]}, "look at k_proj.weight"),
    ("05.4", lambda w, H, G: {n: t[:4] for n, t in w.items()}, "changed its shape"),
    ("05.4", convert_in_place, "the dictionary that came in has changed"),
    (
        "05.4",
        lambda w, H, G: convert(
            w, {"q_proj": H, "k_proj": G, "v_proj": G}, names=("q_proj", "k_proj", "v_proj")
        ),
        "v_proj.weight is reordered",
    ),
    (
        "05.4",
        lambda w, H, G: convert(w, {"q_proj": H, "k_proj": H}),
        "k_proj.weight has 2 heads, not 4",
    ),
    (
        "05.4",
        lambda w, H, G: convert(w, {"q_proj": G, "k_proj": G}),
        "q_proj.weight has 4 heads, not 2",
    ),
    ("05.4", lambda w, H, G: convert(w, {"q_proj": 1, "k_proj": 1}), "as one large head"),
    (
        "05.4",
        lambda w, H, G: convert(w, {"q_proj": H, "k_proj": G}, how=half_to_interleaved),
        "went the other way",
    ),
    (
        "05.4",
        lambda w, H, G: convert(w, {"q_proj": H, "k_proj": G}, how=lambda t, heads: t.flip(0)),
        "in an order that is neither",
    ),
    (
        "05.4",
        lambda w, H, G: convert(w, {"q_proj": H, "k_proj": G}, kinds=("weight",)),
        "q_proj.bias is as it came",
    ),
    ("05.5", lambda D, d: look_back(D, d, -1.0), "looks 50 words ahead"),
    ("05.5", lambda D, d: (torch.ones(D), torch.ones(D)), "the word itself scores highest"),
    ("05.5", lambda D, d: (torch.zeros(D), torch.ones(D)), "all keys get the same score"),
    ("05.5", look_back_interleaved, "half-split: (i, i + D/2)"),
    ("05.5", lambda D, d: look_back(D, d + 2), "the highest score is 52 words back"),
    ("05.5", lambda D, d: look_back(64, d), "expected (D,) = (16,)"),
    ("05.5", lambda D, d: (torch.ones(D), torch.full((D,), torch.nan)), "not finite"),
    ("05.5", lambda D, d: torch.ones(D), "two vectors"),
]


def test_the_frequencies_used_here_are_the_modules():
    torch.testing.assert_close(theta(64), rope_frequencies(64)[0])


def test_other_right_answers_are_right():
    from minillm.exercises import grade

    assert grade("05.3", read_whole).status == "correct"
    assert grade("05.5", look_back_by_the_query).status == "correct"
