"""The graders of 10_fast_decoding accept right answers and say what is wrong with wrong ones."""

from dataclasses import replace

import torch

from minillm.config import ModelConfig
from minillm.generation import generate
from minillm.model import CausalLM

ONE = "one call: prompt of 10, 50 new tokens"
NEAR = "two calls: prompts of 10 and of 100, 50 new tokens each"
FAR = "two calls: prompts of 10 and of 250, 50 new tokens each"
ROWS = "two calls: one row, then two rows, prompts of 10"
GROWING = "one call with a growing cache instead: 5 single tokens"
COMPILATIONS = {ONE: 1, NEAR: 1, FAR: 2, ROWS: 2, GROWING: 5}


def read(c, context, *, embedding=0, heads=None, both=2, layers=None, matrices=3, kv=None, head=1):
    C, D = c.hidden_size, c.head_dim
    G, H = c.num_key_value_heads, c.num_attention_heads
    per_layer = 2 * C * H * D + 2 * C * (kv or (lambda c: G))(c) * D
    per_layer += matrices * C * c.intermediate_size
    heads = (heads or (lambda c: G))(c)
    cache = (layers or c.num_hidden_layers) * context * both * heads * D
    return c.num_hidden_layers * per_layer + (head + embedding) * c.vocab_size * C + cache


def most(**slip):
    return lambda c, bandwidth, size, context: bandwidth / (size * read(c, context, **slip))


def one_layer(c, bandwidth, size, context):
    return most()(replace(c, num_hidden_layers=1), bandwidth, size, context)


def without_output(c, bandwidth, size, context):
    o = c.num_hidden_layers * c.hidden_size * c.num_attention_heads * c.head_dim
    return bandwidth / (size * (read(c, context) - o))


def narrow_heads(c, bandwidth, size, context):
    c = replace(c, head_dim=c.hidden_size // c.num_attention_heads)
    return most()(c, bandwidth, size, context)


def counted(c, bandwidth, size, context):
    """Another right way: count a model's weights, norms and all."""
    with torch.device("meta"):
        model = CausalLM(c)
    numbers = model.num_parameters() - c.vocab_size * c.hidden_size
    numbers += 2 * c.num_hidden_layers * context * c.num_key_value_heads * c.head_dim
    return bandwidth / (size * numbers)


def query_heads(c):
    return c.num_attention_heads


def fold(g, matrices):
    return torch.cat(matrices) * g * len(g) ** 0.5


def in_place(g, matrices):
    g *= len(g) ** 0.5
    return torch.cat(matrices) * g


def by_diagonal(g, matrices):
    return torch.cat([w @ torch.diag(g) for w in matrices]) * len(g) ** 0.5


def in_float64(g, matrices):
    return torch.cat(matrices).double() * g * len(g) ** 0.5


def on_rows(g, matrices):
    whole = torch.cat(matrices)
    right = whole * g * len(g) ** 0.5
    return whole * g[:, None] * len(g) ** 0.5 if len(whole) == len(g) else right


RIGHT = {
    "10_fast_decoding.1": most(),
    "10_fast_decoding.2": fold,
    "10_fast_decoding.3": COMPILATIONS,
}
WRONG = [
    ("10_fast_decoding.1", most(embedding=1), "looks up one row"),
    ("10_fast_decoding.1", most(head=0), "the head is not counted"),
    ("10_fast_decoding.1", most(both=0), "the cache is left out"),
    ("10_fast_decoding.1", most(both=1), "keys *and* values"),
    ("10_fast_decoding.1", most(heads=query_heads), "G key heads, not H"),
    ("10_fast_decoding.1", most(layers=1), "a cache of its own"),
    ("10_fast_decoding.1", most(matrices=2), "three matrices"),
    ("10_fast_decoding.1", most(kv=query_heads), "G heads wide"),
    ("10_fast_decoding.1", lambda c, b, s, n: 1 / most()(c, b, s, n), "seconds a token"),
    ("10_fast_decoding.1", lambda c, b, s, n: most()(c, b, 1, n), "has 4 bytes"),
    ("10_fast_decoding.1", lambda c, b, s, n: most()(c, b, 2 * s, n), "read once"),
    ("10_fast_decoding.1", one_layer, "all layers"),
    ("10_fast_decoding.1", without_output, "a fourth matrix"),
    ("10_fast_decoding.1", narrow_heads, "need not be C / H"),
    ("10_fast_decoding.1", lambda c, b, s, n: 17.0, "are possible"),
    ("10_fast_decoding.2", lambda g, ws: torch.cat(ws) * g, "where did sqrt(C) go"),
    ("10_fast_decoding.2", lambda g, ws: torch.cat(ws) * g / len(g) ** 0.5, "the wrong side"),
    ("10_fast_decoding.2", lambda g, ws: torch.cat(ws) * g * len(g), "not C"),
    ("10_fast_decoding.2", lambda g, ws: torch.cat(ws) * len(g) ** 0.5, "g is missing"),
    ("10_fast_decoding.2", lambda g, ws: torch.cat(ws) / g * len(g) ** 0.5, "does not divide"),
    ("10_fast_decoding.2", lambda g, ws: fold(g, ws[::-1]), "another order"),
    ("10_fast_decoding.2", lambda g, ws: fold(g, ws).T, "M should be (7, 6)"),
    ("10_fast_decoding.2", lambda g, ws: torch.cat(ws) * g * sum(map(len, ws)) ** 0.5, "of M"),
    (
        "10_fast_decoding.2",
        lambda g, ws: torch.cat([w * g * len(w) ** 0.5 for w in ws]),
        "the rows of a matrix",
    ),
    ("10_fast_decoding.2", on_rows, "belongs to the columns"),
    ("10_fast_decoding.2", in_place, "changes its arguments"),
    ("10_fast_decoding.3", {**COMPILATIONS, ONE: 50}, "changes from step to step"),
    ("10_fast_decoding.3", {**COMPILATIONS, NEAR: 2}, "rounded up"),
    ("10_fast_decoding.3", {**COMPILATIONS, FAR: 1}, "rounded up"),
    ("10_fast_decoding.3", {**COMPILATIONS, ROWS: 1}, "differs between the calls"),
    ("10_fast_decoding.3", {**COMPILATIONS, GROWING: 1}, "at each of the five"),
    ("10_fast_decoding.3", {**COMPILATIONS, ONE: ...}, "not filled in"),
    ("10_fast_decoding.3", {**COMPILATIONS, ONE: "once"}, "write a whole number"),
    ("10_fast_decoding.3", [1, 1, 2, 2, 5], "a dictionary"),
]


def test_other_right_ways():
    from minillm.exercises import grade

    assert grade("10_fast_decoding.1", counted).status == "correct"
    assert grade("10_fast_decoding.2", by_diagonal).status == "correct"
    assert grade("10_fast_decoding.2", in_float64).status == "correct"


def test_the_predicted_compilations_are_those_that_happen():
    def fresh():
        model, graphs = CausalLM(ModelConfig(64, 16, 1, 2, 32)).eval(), []

        def counting(graph, example_inputs):
            graphs.append(graph)
            return graph.forward

        torch.compiler.reset()
        model.compiled_run = torch.compile(model.run, dynamic=False, backend=counting)
        return model, graphs

    calls = {ONE: [(1, 10)], NEAR: [(1, 10), (1, 100)], FAR: [(1, 10), (1, 250)]}
    for case, prompts in {**calls, ROWS: [(1, 10), (2, 10)]}.items():
        model, graphs = fresh()
        for shape in prompts:
            ids = torch.ones(shape, dtype=torch.long)
            generate(model, ids, max_new_tokens=50, cache="static", compile=True)
        assert len(graphs) == COMPILATIONS[case], case
