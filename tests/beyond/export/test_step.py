"""A decoding step as a program for others, with ONNX and without: against our own."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import torch
from exported_models import FAMILIES, SMALL, made, prompts

from minillm.beyond.export.onnx_file import OPSETS, to_onnx
from minillm.beyond.export.step import DecodingStep, decode, export_step
from minillm.config import ModelConfig
from minillm.generation import generate
from minillm.model import CausalLM


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


@functools.cache
def exported(kind):
    """A model, its step, and the program of that, which is exported once for all tests."""
    model, sizes = made(kind), {"max_length": 26, "batch_size": 2}
    return model, DecodingStep(model, **sizes), export_step(model, **sizes)


@pytest.mark.parametrize("kind", FAMILIES)
def test_twenty_steps_of_the_program_are_those_of_generate(kind):
    model, step, program = exported(kind)
    compare(step, step.empty(), model, prompts())
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
    model, step, program = exported(kind)
    to_onnx(program, tmp_path / "step.onnx")
    compare(onnx_session(tmp_path / "step.onnx"), step.empty(), model, prompts())


@pytest.mark.parametrize("opset", [OPSETS[0], OPSETS[-1]])
def test_the_first_and_the_last_opset_are_written_and_run(opset, tmp_path):
    pytest.importorskip("onnxscript")
    import onnx

    model, step, program = exported("qwen3")
    to_onnx(program, tmp_path / "step.onnx", opset=opset)
    written = onnx.load(tmp_path / "step.onnx")
    assert [(o.domain, o.version) for o in written.opset_import if not o.domain] == [("", opset)]
    onnx.checker.check_model(written)
    compare(onnx_session(tmp_path / "step.onnx"), step.empty(), model, prompts())


@pytest.mark.parametrize("opset", [0, 7, 17, OPSETS[-1] + 1, "20", None])
def test_an_unknown_opset_is_named_with_the_known_ones(opset, tmp_path):
    with pytest.raises(ValueError, match=rf"opset {opset!r}; known are 18 to {OPSETS[-1]}"):
        to_onnx(None, tmp_path / "step.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


def test_bfloat16_is_refused_where_no_runtime_could_open_it(tmp_path):
    pytest.importorskip("onnxscript")
    whole = CausalLM(ModelConfig(**{**SMALL, "num_hidden_layers": 1})).eval().to(torch.bfloat16)
    program = export_step(whole, max_length=4)
    with pytest.raises(ValueError, match=r"bfloat16, which onnxruntime cannot.*model\.float\(\)"):
        to_onnx(program, tmp_path / "step.onnx")
    assert not (tmp_path / "step.onnx").exists()
    for dtype in (torch.float16, torch.float64):  # float32 is that of all the others
        to_onnx(export_step(whole.to(dtype), max_length=4), tmp_path / "step.onnx")
        step = DecodingStep(whole, max_length=4)
        inputs = (torch.ones(1, 1, dtype=torch.long), torch.tensor([0]), *step.empty())
        with torch.no_grad():
            ours = step(*inputs)
        theirs = onnx_session(tmp_path / "step.onnx")(*inputs)
        torch.testing.assert_close([*theirs], [*ours], atol=2e-2, rtol=1e-2)


def test_without_onnxscript_the_error_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match="onnx and onnxscript"):
        to_onnx(None, tmp_path / "step.onnx")


def test_a_saved_program_runs_without_the_package(tmp_path):
    model, _, program = exported("shared keys")
    torch.export.save(program, tmp_path / "step.pt2")
    code = """
import sys, torch
step = torch.export.load("step.pt2").module()
keys = torch.zeros(2, 2, 2, 26, 10)
logits = step(torch.tensor([[3], [4]]), torch.tensor([0]), keys, keys)[0]
assert "minillm" not in sys.modules
torch.save(logits, "logits.pt")
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=900)
    logits = torch.load(tmp_path / "logits.pt")
    wanted = model(torch.tensor([[3], [4]]))[:, 0]
    torch.testing.assert_close(logits, wanted, atol=1e-6, rtol=1e-6)


def test_the_export_leaves_the_model_as_it_was():
    model = made("llama").train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    export_step(model, max_length=9)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


def test_slots_beyond_the_position_have_weight_zero():
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
