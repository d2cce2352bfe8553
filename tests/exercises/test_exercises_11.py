"""The graders of 11 accept right answers and say what is wrong with wrong ones."""

import torch

from minillm.exercises import grade

LOSS_AT = {
    "8 experts, 2 chosen, load and probabilities even": 2,
    "16 experts, 1 chosen, load and probabilities even": 1,
    "4 experts, 1 chosen, one expert has all tokens with probability 1": 4.0,
    "5 experts, all 5 chosen, any probabilities": 5,
}
EVEN, _, ONE, ALL = LOSS_AT


def bias_step(bias, load, rate):
    mean = sum(load) / len(load)
    return [b + rate * ((n < mean) - (n > mean)) for b, n in zip(bias, load, strict=True)]


def turned(bias, load, rate):
    return [2 * b - new for b, new in zip(bias, bias_step(bias, load, rate), strict=True)]


def proportional(bias, load, rate):
    mean = sum(load) / len(load)
    return [b + rate * (mean - n) for b, n in zip(bias, load, strict=True)]


def in_place(bias, load, rate):
    bias[:] = bias_step(bias, load, rate)
    return bias


def steps_only(bias, load, rate):
    return bias_step([0.0] * len(bias), load, rate)


def two_sides(bias, load, rate):
    """Never leaves a bias alone, even where the load is the mean."""
    mean = sum(load) / len(load)
    return [b + (rate if n <= mean else -rate) for b, n in zip(bias, load, strict=True)]


def from_the_middle(bias, load, rate):
    middle = sorted(load)[len(load) // 2]
    middle = (middle + sorted(load)[(len(load) - 1) // 2]) / 2
    return [b + rate * ((n < middle) - (n > middle)) for b, n in zip(bias, load, strict=True)]


def whole_mean(bias, load, rate):
    mean = sum(load) // len(load)
    return [b + rate * ((n < mean) - (n > mean)) for b, n in zip(bias, load, strict=True)]


def active(c, *, experts=None, matrices=3, router=True, tied=True, head_dim=None):
    H, G, C = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"]
    F, L, V = c["intermediate_size"], c["num_hidden_layers"], c["vocab_size"]
    D = head_dim or c.get("head_dim", C // H)
    layer = 2 * C + C * D * (2 * H + 2 * G)
    layer += (experts or c["num_experts_per_tok"]) * matrices * C * F
    layer += c["num_local_experts"] * C if router else 0
    return L * layer + C + V * C * (1 if tied and c["tie_word_embeddings"] else 2)


RIGHT = {"11.1": LOSS_AT, "11.2": bias_step, "11.3": active}


def in_float32(bias, load, rate):
    load = torch.tensor(load, dtype=torch.float32)
    return (torch.tensor(bias) + rate * (load.mean() - load).sign()).tolist()


WRONG = [
    ("11.1", {**LOSS_AT, EVEN: 1}, "what do the shares f add up to"),
    ("11.1", {**LOSS_AT, ONE: 1}, "only one term"),
    ("11.1", {**LOSS_AT, ALL: 1}, "what share of the tokens"),
    ("11.1", {**LOSS_AT, ALL: ...}, "not filled in"),
    ("11.1", {**LOSS_AT, ALL: "five"}, "write a number"),
    ("11.1", [2, 1, 4, 5], "a dictionary"),
    ("11.2", turned, "the wrong direction"),
    ("11.2", proportional, "only its sign"),
    ("11.2", in_place, "the old list was changed"),
    ("11.2", steps_only, "the old bias is missing"),
    ("11.2", two_sides, "stays where it is, it does not go up"),
    ("11.2", from_the_middle, "not with the middle one"),
    ("11.2", lambda bias, load, rate: list(bias), "expert 0 has no fewer tokens than the mean"),
    ("11.2", lambda bias, load, rate: bias[:-1], "return a list of 3"),
    ("11.2", whole_mean, "expert 2 has fewer tokens than the mean, 2.5"),
    ("11.3", lambda c: active(c, experts=c["num_local_experts"]), "the whole model"),
    (
        "11.3",
        lambda c: (
            active(c, experts=c["num_local_experts"])
            * c["num_experts_per_tok"]
            / c["num_local_experts"]
        ),
        "not shared out",
    ),
    ("11.3", lambda c: active(c, matrices=2), "a gate, an up and a down"),
    ("11.3", lambda c: active(c, router=False), "a router too"),
    ("11.3", lambda c: active(c, tied=False), "unless `tie_word_embeddings`"),
    (
        "11.3",
        lambda c: active(c, head_dim=c["hidden_size"] // c["num_attention_heads"]),
        "heads are as wide as `head_dim` says",
    ),
    ("11.3", lambda c: active(c, experts=1), "not one"),
    ("11.3", lambda c: active(c) - c["hidden_size"], "a norm after the last layer"),
    (
        "11.3",
        lambda c: active({**c, "num_key_value_heads": c["num_attention_heads"]}),
        "have `num_key_value_heads` heads",
    ),
    (
        "11.3",
        lambda c: active(c) - 2 * c["num_hidden_layers"] * c["hidden_size"],
        "each layer has two norms",
    ),
    ("11.3", lambda c: active(c) + 64, "more than take part"),
    ("11.3", lambda c: "12.9 billion", "return a number"),
]


def test_an_answer_in_float32_is_right():
    result = grade("11.2", in_float32)
    assert result.status == "correct", result.message
