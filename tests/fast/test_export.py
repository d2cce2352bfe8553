"""A decoding step as a program for others, pruned vocabularies, int8 weights: against our own."""

import copy
import logging
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from minillm.config import ModelConfig
from minillm.fast.export import (
    OPSETS,
    DecodingStep,
    Int8Embedding,
    Int8Linear,
    decode,
    export_step,
    int8_copy,
    prune_vocabulary,
    quantize_rows,
    to_onnx,
)
from minillm.generation.decoding import generate
from minillm.model import CausalLM

SMALL = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
SMALL |= {"intermediate_size": 40, "head_dim": 10, "initializer_range": 0.1}
FAMILIES = {
    "llama": {},
    "shared keys": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "gpt2": {"model_type": "gpt2", "head_dim": 8},
    "gemma": {"model_type": "gemma"},
    "falcon": {"model_type": "falcon", "head_dim": 8},
    "window": {"model_type": "mistral", "sliding_window": 4},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "max_position_embeddings": 64,
    },
    "experts": {"model_type": "mixtral", "num_experts": 3, "num_experts_per_tok": 2},
    "latent": {
        "model_type": "deepseek_v3",
        "head_dim": 6,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 8,
    },
}


def made(kind, seed=0):
    model = CausalLM(ModelConfig(**{**SMALL, **FAMILIES[kind]}), seed=seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn(p.shape, generator=draw))
    return model.eval()


def reference(model, prompt, steps, max_length=28):
    """The logits of each step of `generate` with a static cache, and its ids."""
    seen = []

    def keep(logits, previous):
        seen.append(logits.clone())
        return logits.argmax(-1)

    options = {"max_new_tokens": steps, "sampler": keep, "eos_token_id": None, "cache": "static"}
    return generate(model, prompt, **options), seen


def recorded(step):
    """The step, and the logits that it gives."""
    seen = []

    def call(*inputs):
        logits, *cache = step(*inputs)
        seen.append(logits)
        return logits, *cache

    return call, seen


def compare(step, empty, model, prompt, steps=20, atol=1e-6):
    ids, wanted = reference(model, prompt, steps)
    call, seen = recorded(step)
    with torch.no_grad():
        found = decode(call, prompt, empty, max_new_tokens=steps)
    assert torch.equal(found, ids)
    for ours, theirs in zip(seen[prompt.shape[1] - 1 :], wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-6)


def prompts(rows=2, length=5):
    return torch.randint(31, (rows, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("kind", FAMILIES)
def test_twenty_steps_of_the_program_are_those_of_generate(kind):
    model = made(kind)
    step = DecodingStep(model, max_length=26, batch_size=2)
    compare(step, step.empty(), model, prompts())
    program = export_step(model, max_length=26, batch_size=2)
    compare(program.module(), step.empty(), model, prompts())


def onnx_session(path):
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def step(ids, position, keys, values):
        names = ("input_ids", "position", "keys", "values")
        tensors = (ids, position, keys, values)
        given = {n: np.ascontiguousarray(t.numpy()) for n, t in zip(names, tensors, strict=True)}
        return [torch.from_numpy(x) for x in session.run(None, given)]

    return step


@pytest.mark.parametrize("kind", FAMILIES)
def test_twenty_steps_in_onnxruntime_are_those_of_generate(kind, tmp_path):
    pytest.importorskip("onnxscript")
    model = made(kind)
    to_onnx(export_step(model, max_length=26, batch_size=2), tmp_path / "step.onnx")
    empty = DecodingStep(model, max_length=26, batch_size=2).empty()
    compare(onnx_session(tmp_path / "step.onnx"), empty, model, prompts())


@pytest.mark.parametrize("opset", [OPSETS[0], OPSETS[-1]])
def test_the_first_and_the_last_opset_are_written_and_run(opset, tmp_path):
    pytest.importorskip("onnxscript")
    import onnx

    model = made("qwen3")
    to_onnx(export_step(model, max_length=26), tmp_path / "step.onnx", opset=opset)
    written = onnx.load(tmp_path / "step.onnx")
    assert [(o.domain, o.version) for o in written.opset_import if not o.domain] == [("", opset)]
    onnx.checker.check_model(written)
    empty = DecodingStep(model, max_length=26).empty()
    compare(onnx_session(tmp_path / "step.onnx"), empty, model, prompts(rows=1))


@pytest.mark.parametrize("opset", [0, 7, 17, OPSETS[-1] + 1, "20", None])
def test_an_unknown_opset_is_named_with_the_known_ones(opset, tmp_path):
    with pytest.raises(ValueError, match=rf"opset {opset!r}; known are 18 to {OPSETS[-1]}"):
        to_onnx(None, tmp_path / "step.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


def test_without_onnxscript_the_error_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match="onnx and onnxscript"):
        to_onnx(None, tmp_path / "step.onnx")


def test_a_saved_program_runs_without_the_package(tmp_path):
    model = made("shared keys")
    torch.export.save(export_step(model, max_length=26), tmp_path / "step.pt2")
    code = """
import sys, torch
step = torch.export.load("step.pt2").module()
keys = torch.zeros(2, 1, 2, 26, 10)
logits = step(torch.tensor([[3]]), torch.tensor([0]), keys, keys)[0]
assert "minillm" not in sys.modules
torch.save(logits, "logits.pt")
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)
    logits = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(logits, model(torch.tensor([[3]]))[:, 0], atol=1e-6, rtol=1e-6)


def test_the_export_leaves_the_model_as_it_was():
    model = made("llama").train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    export_step(model, max_length=9)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


def test_slots_beyond_the_position_are_not_read():
    model = made("llama")
    step = DecodingStep(model, max_length=9)
    noise = tuple(torch.randn(t.shape) * 50 for t in step.empty())
    inputs = (torch.tensor([[3]]), torch.tensor([0]))
    torch.testing.assert_close(step(*inputs, *noise)[0], step(*inputs, *step.empty())[0])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_length": 0}, "max_length=0"),
        ({"max_length": 4, "batch_size": 0}, "batch_size=0"),
    ],
)
def test_sizes_below_one_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        export_step(made("llama"), **sizes)


def test_models_whose_step_is_another_are_refused():
    with pytest.raises(ValueError, match="PackedLM"):
        export_step(made("llama").packed("linear"), max_length=8)
    with pytest.raises(ValueError, match=r"max_length 2049.* 2048 positions"):
        export_step(made("gpt2"), max_length=2049)
    scaling = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(ValueError, match="dynamic"):
        export_step(CausalLM(ModelConfig(**SMALL, **scaling)), max_length=8)


@pytest.mark.parametrize(
    ("rows", "length", "new", "fits"), [(1, 5, 6, True), (1, 5, 7, False), (2, 5, 1, False)]
)
def test_what_does_not_fit_the_cache_is_refused(rows, length, new, fits):
    step = DecodingStep(made("llama"), max_length=10)
    if fits:
        assert decode(step, prompts(rows, length), step.empty(), max_new_tokens=new).shape[1] == 11
    else:
        message = f"{rows} rows of {length} \\+ {new} tokens .* 1 rows and 10 slots"
        with pytest.raises(ValueError, match=message):
            decode(step, prompts(rows, length), step.empty(), max_new_tokens=new)


# int8


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (16, 5)])
def test_int8_rows_are_torchs_own(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 10
    rows, scale = quantize_rows(weight)
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    theirs = torch.quantize_per_channel(weight, scale[:, 0].double(), zeros, 0, torch.qint8)
    assert torch.equal(rows, theirs.int_repr())
    torch.testing.assert_close(rows * scale, theirs.dequantize())
    assert (rows.int().abs().amax(1) == 127).all()
    assert ((rows * scale - weight).abs() <= 0.5001 * scale).all()


def test_a_row_of_zeros_stays_one_and_bad_numbers_are_refused():
    rows, scale = quantize_rows(torch.zeros(2, 3))
    assert not rows.any()
    assert scale.isfinite().all()
    for bad in (torch.tensor([[1.0, float("nan")]]), torch.tensor([[float("inf"), 1.0]])):
        with pytest.raises(ValueError, match=r"\(1, 2\) with numbers that are not finite"):
            quantize_rows(bad)
    with pytest.raises(ValueError, match=r"\(3,\) is no matrix"):
        quantize_rows(torch.ones(3))


def test_int8_layers_compute_with_the_matrix_they_stand_for():
    layer = nn.Linear(7, 5)
    small = Int8Linear(layer.weight, layer.bias)
    x = torch.randn(2, 3, 7)
    wanted = x.numpy() @ (small.rows.numpy() * small.scale.numpy()).T + layer.bias.detach().numpy()
    np.testing.assert_allclose(small(x).numpy(), wanted, atol=1e-6)
    table = Int8Embedding(layer.weight)
    ids = torch.tensor([[4, 0], [1, 1]])
    assert torch.equal(table(ids), table.weight[ids])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "falcon", "latent"])
def test_an_int8_copy_generates_and_leaves_the_model_alone(kind):
    model = made(kind)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    small = int8_copy(model)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert not [n for n, p in small.named_parameters() if p.ndim > 1]
    by_hand = copy.deepcopy(model)
    for part in by_hand.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            rows, scale = quantize_rows(part.weight.detach())
            part.weight.data = rows * scale
    with torch.no_grad():
        torch.testing.assert_close(small(prompts()), by_hand(prompts()), atol=1e-6, rtol=1e-6)
    ids = generate(small, prompts(), max_new_tokens=4, eos_token_id=None)
    assert torch.equal(ids, generate(by_hand, prompts(), max_new_tokens=4, eos_token_id=None))


def test_a_tied_head_is_kept_once():
    small = int8_copy(made("qwen3"))
    assert small.lm_head.rows is small.model.embed_tokens.rows
    untied = int8_copy(made("llama"))
    assert untied.lm_head.rows is not untied.model.embed_tokens.rows


def test_experts_and_packed_models_are_refused_by_name():
    with pytest.raises(ValueError, match="a CausalLM, not a PackedLM"):
        int8_copy(made("llama").packed("linear"))
    with pytest.raises(ValueError, match=r"not model.layers.0.mlp.gate.weight"):
        int8_copy(made("experts"))


# pruned vocabularies


@pytest.fixture(scope="module")
def tokenizer():
    from minillm.tokenizer.bpe import BPETokenizer

    text = "the cat sat on the mat. the hat is on the cat. " * 3
    return BPETokenizer.train(text, 270, special_tokens=["<|endoftext|>"])


def sized(tokenizer, **changes):
    ends = {"bos_token_id": 269, "eos_token_id": 269}
    config = {**SMALL, "vocab_size": tokenizer.vocab_size, **ends, **changes}
    return CausalLM(ModelConfig(**config), seed=2).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_kept_logits_are_the_same(tokenizer, tied):
    model = sized(tokenizer, tie_word_embeddings=tied).double()
    keep = tokenizer.encode("the cat sat")
    small, small_tokenizer, old = prune_vocabulary(model, tokenizer, keep)
    assert small.config.vocab_size == len(old) == small_tokenizer.vocab_size < 270
    assert (small.lm_head.weight is small.model.embed_tokens.weight) is tied
    assert small.config.eos_token_id == old.index(269) == small_tokenizer.eos_token_id
    text = "the cat sat"
    ids, new_ids = (torch.tensor([t.encode(text)]) for t in (tokenizer, small_tokenizer))
    assert [old[i] for i in new_ids[0]] == ids[0].tolist()
    with torch.no_grad():
        torch.testing.assert_close(small(new_ids), model(ids)[..., old], rtol=0, atol=1e-14)
    assert model.config.vocab_size == 270 == len(model.lm_head.weight)


def test_several_ends_and_none_are_renumbered(tokenizer):
    several = sized(tokenizer, eos_token_id=(269, 65), pad_token_id=66)
    small, _, old = prune_vocabulary(several, tokenizer, [])
    assert [old[i] for i in small.config.eos_token_id] == [269, 65]
    assert old[small.config.pad_token_id] == 66
    none = sized(tokenizer, eos_token_id=None, bos_token_id=None)
    assert prune_vocabulary(none, tokenizer, [])[0].config.eos_token_id is None


def test_a_pruned_folder_loads_in_transformers_and_here(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    from minillm.pretrained.load import from_pretrained, save_pretrained

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = sized(tokenizer, head_dim=8)
    small, small_tokenizer, _ = prune_vocabulary(model, tokenizer, tokenizer.encode("the cat"))
    save_pretrained(small, small_tokenizer, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "the hat is on the cat"
    ids = small_tokenizer.encode(text)
    assert their_tokenizer(text).input_ids == ids
    ours, our_tokenizer = from_pretrained(tmp_path)
    assert our_tokenizer.encode(text) == ids
    with torch.no_grad():
        wanted = small(torch.tensor([ids]))
        torch.testing.assert_close(theirs(torch.tensor([ids])).logits, wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours(torch.tensor([ids])), wanted)


def test_what_cannot_be_pruned_is_refused(tokenizer):
    model = sized(tokenizer)
    with pytest.raises(ValueError, match="a CausalLM, not a PackedLM"):
        prune_vocabulary(model.packed("linear"), tokenizer, [1])
    for unknown in (999, 270, -1):
        with pytest.raises(ValueError, match=f"no token has the id {unknown}; there are 270 ids"):
            prune_vocabulary(model, tokenizer, [unknown])
    with pytest.raises(ValueError, match="prune before int8: the head is Int8Linear"):
        prune_vocabulary(int8_copy(model), tokenizer, [1])
    with pytest.raises(TypeError, match="float"):
        prune_vocabulary(model, tokenizer, [1.0])
    with pytest.raises(ValueError, match="a list cannot be pruned"):
        prune_vocabulary(model, [], [1])


def test_a_pruned_model_becomes_int8_and_ids_may_be_a_tensor(tokenizer):
    keep = tokenizer.encode("the cat sat")
    model = sized(tokenizer)
    small, small_tokenizer, old = prune_vocabulary(model, tokenizer, torch.tensor(keep))
    assert old == prune_vocabulary(model, tokenizer, keep)[2]
    eight = int8_copy(small)
    ids = torch.tensor([small_tokenizer.encode("the cat sat")])
    with torch.no_grad():
        assert 0 < (eight(ids) - small(ids)).abs().max() < 0.05 * small(ids).abs().max()


def test_an_int8_copy_of_an_int8_model_has_the_same_numbers():
    once = int8_copy(made("llama"))
    twice = int8_copy(once).state_dict()
    assert all(torch.equal(tensor, twice[name]) for name, tensor in once.state_dict().items())
    ours, theirs = (m.state_dict()["lm_head.rows"].data_ptr() for m in (once, int8_copy(once)))
    assert ours != theirs
