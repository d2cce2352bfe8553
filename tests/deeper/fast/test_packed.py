"""The packed model gives the logits and the tokens of the model that it was made from."""

import copy
import itertools
import pickle
import shutil

import pytest
import torch
import torch.nn.functional as F
from family_checkpoints import make, ragged
from torch import nn
from torch._dynamo.testing import EagerAndRecordGraphs

from minillm.config import ModelConfig
from minillm.deeper.fast.kernels import MOST_ROWS
from minillm.deeper.fast.packed import (
    CHUNK,
    PLAIN,
    WAYS,
    PackedLM,
    PackedMatrix,
    in_halves,
    measure_ways,
    normalize,
)
from minillm.deeper.pretrained.load import from_pretrained
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.sampling import Sampler

NAMES = ["llama-2", "llama-3", "llama-biased", "llama-tied", "mistral", "qwen2", "qwen2-window"]
NAMES += ["qwen3"]


ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


def both(name, folder):
    """The named model, as a small checkpoint holds it, and its packed form."""
    make(name, folder)
    model, _ = from_pretrained(folder)
    return model, PackedLM(model, "halves")


CACHES = ("dynamic", "static", None)


def texts_of(model):
    """What it writes with each cache, and by chance."""
    ids, mask, _ = ragged()
    options = {"attention_mask": mask, "max_new_tokens": 24}
    heat = Sampler(temperature=0.8, top_p=0.9, seed=1)
    texts = [generate(model, ids, cache=cache, **options) for cache in CACHES]
    return [*texts, generate(model, ids[:1], max_new_tokens=9, sampler=heat)]


@pytest.fixture(scope="module", params=NAMES)
def named(request, tmp_path_factory):
    """A model, its logits by transformers, and its texts."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs, (ids, mask, positions) = make(request.param, folder), ragged()
    with torch.no_grad():
        logits = theirs(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    model, _ = from_pretrained(folder)
    return model, logits, texts_of(model)


@pytest.mark.parametrize(
    "way", ["linear", "halves", "transposed", pytest.param("mkldnn", marks=ONEDNN)]
)
@torch.no_grad()
def test_logits_and_tokens_are_those_of_the_model(named, way):
    model, expected, texts = named
    packed, (ids, mask, _) = PackedLM(model, way), ragged()
    found = packed(ids, attention_mask=mask)[mask.bool()]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert all(map(torch.equal, texts_of(packed), texts))


@pytest.mark.parametrize(
    "way", ["linear", "halves", "transposed", pytest.param("mkldnn", marks=ONEDNN)]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 40])
@pytest.mark.parametrize("shape", [(8, 6), (6, 8), (7, 4), (1, 5), (1024, 512)])
def test_each_way_is_the_product(rows, shape, way):
    weight, x, plus = torch.randn(shape), torch.randn(rows, shape[1]), torch.randn(rows, shape[0])
    matrix = PackedMatrix(weight, tuple(way if way in known else "linear" for known in WAYS))
    assert matrix.weight.is_contiguous() or way == "transposed"
    assert matrix.way(x) == (way if way in WAYS[rows > 1] else "linear")
    close = {"atol": 1e-4, "rtol": 1e-4}
    for more in (None, plus, plus[0]):
        exact = x.double() @ weight.double().T + (0 if more is None else more.double())
        found = matrix(x, more)
        torch.testing.assert_close(found, exact.float(), **close)
        assert found.is_contiguous() and found.layout == torch.strided
        torch.testing.assert_close(
            matrix.double()(x.double(), more if more is None else more.double()), exact
        )
        matrix.float()
    twin = pickle.loads(pickle.dumps(matrix))
    assert twin.weight.stride() == matrix.weight.stride() and torch.equal(twin(x), matrix(x))


def test_a_row_in_halves():
    weight, x = torch.randn(8, 6), torch.randn(1, 6)
    torch.testing.assert_close(in_halves(x, weight), x @ weight.T)
    torch.testing.assert_close(in_halves(x, weight, torch.ones(8)), x @ weight.T + 1)


@ONEDNN
@torch.no_grad()
def test_more_rows_go_to_onednn():
    weight, x, plus = torch.randn(520, 512), torch.randn(5, 512), torch.randn(520)
    matrix, exact = PackedMatrix(weight, ("halves", "mkldnn")), x.double() @ weight.double().T
    for rows, more in ((1, None), (5, None), (5, plus), (5, plus.expand(5, -1))):
        expected = exact[:rows] if more is None else exact[:rows] + more
        found = matrix(x[:rows], more)
        torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-5)
        assert found.layout == torch.strided and (matrix.mkldnn is None) == (rows == 1)
    twin = copy.deepcopy(matrix)
    assert torch.equal(twin(x), matrix(x))
    twin.load_state_dict({"weight": 2 * matrix.weight})  # the copy made before is stale
    torch.testing.assert_close(twin(x), 2 * matrix(x))
    torch.testing.assert_close(matrix.double()(x.double()), exact)
    with torch.autocast("cpu", torch.bfloat16):
        for again in (PackedMatrix(weight), PackedMatrix(weight, ("halves", "mkldnn"))):
            assert again(x).dtype == torch.bfloat16 and again.mkldnn is None


@ONEDNN
@torch.no_grad()
@pytest.mark.parametrize("length", [12, 99])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_prompts_and_batches_of_a_wide_model(kind, length):
    """Wide enough for oneDNN: ragged prompts, more than a chunk, with and without a cache."""
    window = {"sliding_window": 9} if kind == "mistral" else {}
    config = ModelConfig(
        300, 256, 2, 8, 544, num_key_value_heads=2, model_type=kind, initializer_range=0.1, **window
    )
    model = CausalLM(config).eval()
    packed, ids = PackedLM(model, "mkldnn"), torch.randint(0, 300, (3, length))
    assert (ids.numel() > CHUNK) == (length == 99)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for given in (None, mask):
        real = mask.bool() if given is not None else mask.bool() | True
        expected = model(ids, attention_mask=given)
        found = packed(ids, attention_mask=given)
        torch.testing.assert_close(found[real], expected[real], atol=1e-4, rtol=1e-4)
        last = packed(ids, attention_mask=given, logits_to_keep=2)
        torch.testing.assert_close(last, found[:, -2:])
        options = {"attention_mask": given, "max_new_tokens": 10, "eos_token_id": None}
        assert torch.equal(generate(packed, ids, **options), generate(model, ids, **options))
    assert packed.packed_layers[0].gate_up.mkldnn is not None
    cache = packed.make_cache(batch_size=3)
    cuts = (0, 7, length - 1, length)
    pieces = [packed(ids[:, a:b], cache=cache) for a, b in itertools.pairwise(cuts)]
    torch.testing.assert_close(torch.cat(pieces, 1), packed(ids), atol=1e-4, rtol=1e-4)


def test_normalize_is_rms_norm_but_for_a_factor():
    x = torch.randn(3, 64)
    eps = torch.tensor((64 * 1e-5) ** 0.5)
    torch.testing.assert_close(8 * normalize(x, eps), F.rms_norm(x, (64,), None, 1e-5))
    assert normalize(x.bfloat16(), eps).dtype == torch.bfloat16
    assert torch.equal(normalize(torch.zeros(1, 64), eps), torch.zeros(1, 64))


def test_positions_beyond_those_of_training_are_rotated_too():
    model = small(max_position_embeddings=8)
    packed, ids = PackedLM(model, "halves"), torch.randint(1, 60, (2, 5))
    with pytest.warns(UserWarning, match="position 8 lies beyond the 8 positions"):
        expected = generate(model, ids, max_new_tokens=12, eos_token_id=None)
    assert torch.equal(generate(packed, ids, max_new_tokens=12, eos_token_id=None), expected)


@pytest.mark.parametrize("name", ["llama-3", "qwen3"])
@torch.no_grad()
def test_one_token_more_gives_the_scores_of_the_model(name, tmp_path):
    model, packed = both(name, tmp_path)
    ids = torch.randint(1, 60, (3, 7))
    for kind in ("dynamic", "static", "paged"):
        scores = []
        for m in (model, packed):
            cache = m.make_cache(kind, batch_size=3, max_length=16)
            m(ids[:, :6], cache=cache)
            scores.append(m(ids[:, 6:], cache=cache))
        torch.testing.assert_close(*scores, atol=2e-5, rtol=1e-5)


def test_what_cannot_be_packed(tmp_path):
    make("gpt2", tmp_path)
    model, _ = from_pretrained(tmp_path)
    for way in (PackedLM, CausalLM.packed):
        with pytest.raises(ValueError, match=r"gpt2 .*cannot be packed: layers.0.mlp is"):
            way(model)
    with pytest.raises(ValueError, match="llama with gelu cannot be packed"):
        PackedLM(small(hidden_act="gelu"))


def small(**changes):
    return CausalLM(ModelConfig(97, 32, 2, 4, 48, num_key_value_heads=2, **changes)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rotation_that_grows_with_the_text(dtype):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = small(max_position_embeddings=16, rope_scaling=scaling).to(dtype)
    way = "halves" if dtype == torch.float32 else "linear"
    packed, (ids, mask, _) = PackedLM(model, way), ragged()
    options = {"attention_mask": mask, "max_new_tokens": 24}
    assert torch.equal(generate(packed, ids, **options), generate(model, ids, **options))


@torch.no_grad()
def test_the_packed_copy_stands_for_itself():
    """Training goes on in the model's own mode, and leaves the packed matrices as they are."""
    model = small(attention_dropout=0.5).train()
    packed = PackedLM(model, "halves")
    assert not packed.training and all(m.training for m in model.modules())
    before = {k: v.clone() for k, v in packed.packed_layers.state_dict().items()}
    for layer in model.model.layers:
        for p in layer.parameters():
            p.mul_(0.5)
    assert all(torch.equal(v, before[k]) for k, v in packed.packed_layers.state_dict().items())


@torch.no_grad()
def test_one_word_packs():
    """It holds as much again as the matrices, and what the model learns later it does not know."""
    model, prompt = small(), torch.randint(0, 60, (1, 1))
    packed = model.packed("halves")
    assert isinstance(packed, PackedLM) and not packed.training
    before, options = packed(prompt), {"max_new_tokens": 20, "eos_token_id": None}
    torch.testing.assert_close(before, model(prompt), atol=1e-5, rtol=1e-5)
    assert torch.equal(generate(packed, prompt, **options), generate(model, prompt, **options))
    held = sum(b.nbytes for b in [*packed.packed_layers.buffers(), *packed.head.buffers()])
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert held == sum(m.weight.nbytes for m in linear)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(2)
    assert torch.equal(packed(prompt), before)
    for anew in (model.packed("halves"), packed.packed("transposed")):
        torch.testing.assert_close(anew(prompt), model(prompt), atol=1e-5, rtol=1e-5)


def test_loading_weights_is_refused_before_the_model_behind_changes():
    model, other = small(), CausalLM(small().config, seed=1)
    packed = PackedLM(model, "halves")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for module in (packed, nn.ModuleList([packed])):
        for state in (other.state_dict(), module.state_dict()):
            with pytest.raises(ValueError, match=r"takes no weights.*pack it anew"):
                module.load_state_dict(state, strict=False)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama-3", "qwen3"])
@torch.no_grad()
def test_generation_under_autocast(name, tmp_path):
    model, packed = both(name, tmp_path)
    ids = torch.randint(1, 60, (2, 7))
    with torch.autocast("cpu", torch.bfloat16):
        rows = generate(packed, ids, max_new_tokens=8, eos_token_id=None)
        cache = packed.make_cache(batch_size=2)
        packed(rows[:, :-1], cache=cache)
        last = packed(rows[:, -1:], cache=cache)[:, -1]
        whole = model(rows)[:, -1]
    assert (last - whole).abs().max() < 0.05 * whole.abs().max()


def recorded(packed):
    """The graphs that a compiler gets for this model; nothing is compiled."""
    torch._dynamo.reset()
    backend = EagerAndRecordGraphs()
    packed.compiled_run = torch.compile(packed.run, dynamic=False, backend=backend)
    return backend.graphs


def names_of(graphs):
    return [getattr(node.target, "__name__", node.target) for g in graphs for node in g.graph.nodes]


@pytest.mark.parametrize("name", NAMES)
def test_a_compiler_gets_sums_and_the_same_tokens(name, tmp_path):
    model, packed = both(name, tmp_path)
    ids, mask, _ = ragged()
    options = {"attention_mask": mask, "max_new_tokens": 12, "cache": "static"}
    graphs = recorded(packed)
    found = generate(packed, ids, compile=True, **options)
    assert torch.equal(found, generate(model, ids, **options))
    names = names_of(graphs)
    assert len(graphs) == 1 and "as_strided" in names
    assert not {"linear", "addmm", "scaled_dot_product_attention"} & set(names)


@torch.no_grad()
def test_what_has_no_panels_is_compiled_as_before():
    """Many rows, float64, autocast: products by `linear`."""
    model = small()
    for rows, dtype in ((33, torch.float32), (17, torch.bfloat16), (1, torch.float64)):
        packed = PackedLM(model.to(dtype), "linear")
        graphs, ids = recorded(packed), torch.randint(1, 97, (rows, 5))
        options = {"max_new_tokens": 4, "cache": "static", "eos_token_id": None}
        found = generate(packed, ids, compile=True, **options)
        assert torch.equal(found, generate(packed, ids, **options))
        assert "linear" in names_of(graphs)
        assert (packed.head.panels is None) == (dtype not in MOST_ROWS)
    packed = PackedLM(model.float(), "halves")
    graphs = recorded(packed)
    with torch.autocast("cpu", torch.bfloat16):
        generate(packed, ids, compile=True, **options)
    assert "linear" in names_of(graphs)


@torch.no_grad()
def test_a_compiler_gets_attention_whole_where_registers_would_not_hold_its_sums():
    config = ModelConfig(97, 32, 1, 8, 48, num_key_value_heads=1, head_dim=64)
    packed, ids = PackedLM(CausalLM(config).eval(), "transposed"), torch.randint(1, 97, (2, 5))
    graphs, options = recorded(packed), {"max_new_tokens": 4, "eos_token_id": None}
    found = generate(packed, ids, cache="static", compile=True, **options)
    assert torch.equal(found, generate(packed, ids, **options))
    names = names_of(graphs)
    assert "scaled_dot_product_attention" in names and "linear" not in names


@torch.no_grad()
def test_few_digits_on_the_way_leave_no_trace_in_the_rotation():
    packed, positions = PackedLM(small(), "halves"), torch.arange(40)[None]
    cos, eps = packed.model.rotary(positions).cos, packed.eps.clone()
    packed.bfloat16().float()
    assert torch.equal(packed.model.rotary(positions).cos, cos) and torch.equal(packed.eps, eps)
    packed, model, ids = (
        PackedLM(small(), "halves").double(),
        small().double(),
        torch.tensor([[3, 5, 8]]),
    )
    cache = packed.make_cache(batch_size=1)
    found = torch.cat([packed(ids[:, t : t + 1], cache=cache) for t in range(3)], 1)
    torch.testing.assert_close(found, model(ids), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_panels_follow_their_matrix():
    matrix = PackedMatrix(torch.randn(32, 8))
    matrix.make_panels()
    kept = matrix.panels
    matrix.make_panels()
    assert matrix.panels is kept
    assert pickle.loads(pickle.dumps(matrix)).panels is None and matrix.panels is kept
    matrix.load_state_dict({"weight": 2 * matrix.weight})
    assert matrix.panels is None
    matrix.make_panels()
    assert torch.equal(matrix.panels, 2 * kept)
    assert matrix.bfloat16().panels is None


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_sums_give_the_same_tokens():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = ModelConfig(97, 32, 1, 4, 48, num_key_value_heads=2, initializer_range=0.1)
    model = CausalLM(config).eval()
    packed, ids = PackedLM(model, "transposed"), torch.randint(1, 97, (2, 5))
    options = {"max_new_tokens": 12, "cache": "static", "eos_token_id": None}
    found = generate(packed, ids, compile=True, **options)
    assert torch.equal(found, generate(model, ids, **options))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@torch.no_grad()
def test_the_ways_are_measured_kept_shown_and_taken():
    model = small()
    packed = model.packed()
    shapes = {(64, 32), (32, 32), (96, 32), (32, 48), (97, 32)}
    assert packed.ways.keys() == shapes and f"ways={packed.ways}" in repr(packed)
    assert all(a in WAYS[0] and b in WAYS[1] for a, b in packed.ways.values())
    again = model.packed(packed.ways)
    assert again.ways == packed.ways and {
        p.ways for p in again.modules() if isinstance(p, PackedMatrix)
    } == set(packed.ways.values())
    ids = torch.randint(0, 97, (1, 1))
    assert torch.equal(again(ids), packed(ids))
    for way, names in {
        "linear": PLAIN,
        "halves": ("halves", "linear"),
        "transposed": ("transposed", "linear"),
    }.items():
        assert model.packed(way).ways == dict.fromkeys(shapes, names)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"halves": 2, "transposed": 2, "mkldnn": 2}, PLAIN),
        ({"halves": 0.5, "transposed": 0.7, "mkldnn": 2}, ("halves", "linear")),
        ({"halves": 0.7, "transposed": 0.5, "mkldnn": 0.5}, ("transposed", "mkldnn")),
        ({"halves": 0.96, "transposed": 0.97, "mkldnn": 0.96}, PLAIN),  # no clear gain
        ({"halves": 0.9, "transposed": 0.5, "mkldnn": 2, "slows": 1.2}, ("halves", "linear")),
        ({"halves": 2, "transposed": 0.5, "mkldnn": 2, "slows": 1.2}, PLAIN),
        ({"halves": 2, "transposed": 0.5, "mkldnn": 0.9, "slows": 0.8}, ("transposed", "linear")),
    ],
)
def test_what_is_clearly_quicker_by_the_clock_is_taken(seconds, expected, monkeypatch):
    """By a clock of our own, on which a product by `linear` takes a second."""
    if "mkldnn" in expected and not torch.backends.mkldnn.is_available():
        pytest.skip("needs oneDNN")
    passed = []

    def linear(x, weight):
        one = seconds["transposed"] if len(x) == 1 else seconds.get("slows", 1.0)
        passed.append(1.0 if weight.is_contiguous() else one)

    monkeypatch.setattr("minillm.deeper.fast.packed.time.perf_counter", lambda: sum(passed))
    monkeypatch.setattr("minillm.deeper.fast.packed.F.linear", linear)
    for name, key in {"in_halves": "halves", "by_onednn": "mkldnn"}.items():
        takes = seconds[key]
        monkeypatch.setattr(
            f"minillm.deeper.fast.packed.{name}", lambda *_, t=takes: passed.append(t)
        )
    weights = [torch.randn(8, 6), torch.randn(6, 8), torch.randn(8, 6)]
    assert measure_ways(weights) == {(8, 6): expected, (6, 8): expected}


def test_matrices_that_are_not_float32_on_a_cpu_have_one_way():
    assert set(small().double().packed().ways.values()) == {PLAIN}
    with pytest.raises(
        ValueError, match=r"\('halves', 'linear'\) for torch.float64 on cpu.*'linear'"
    ):
        small().double().packed("halves")


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        ("quick", r"unknown way 'quick'; .*'halves', 'transposed'.*'mkldnn'"),
        (7, r"ways 7, but the matrices are \[\(32, 32\), .*\(97, 32\)\]"),
        ({(32, 32): PLAIN}, r"ways \{\(32, 32\).*, but the matrices are"),
        (("mkldnn", "linear"), r"\('mkldnn', 'linear'\) for \(32, 32\)"),
        (("halves", "transposed"), r"\('halves', 'transposed'\) for \(32, 32\)"),
        (("linear",), r"\('linear',\) for \(32, 32\)"),
    ],
)
def test_ways_that_are_not_known_are_refused(ways, message):
    model = small()
    if isinstance(ways, tuple):
        ways = {**dict.fromkeys([(64, 32), (96, 32), (32, 48), (97, 32)], PLAIN), (32, 32): ways}
    with pytest.raises(ValueError, match=message):
        model.packed(ways)


@torch.no_grad()
def test_a_global_default_changes_no_choice():
    """Products are timed in float32 on the CPU, whatever a new tensor is by default."""
    model = small()
    torch.set_default_dtype(torch.float64)
    try:
        assert model.packed().ways.keys() == model.packed("linear").ways.keys()
    finally:
        torch.set_default_dtype(torch.float32)
