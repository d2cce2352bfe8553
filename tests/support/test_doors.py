"""Doors: a method that is a function elsewhere, with that function's own signature and help."""

import inspect
import pickle
import pydoc

import pytest
import torch

import minillm
from minillm.deeper.fast.packed import PackedLM
from minillm.deeper.tokenizer import bulk, chat_template, hf_json, merges
from minillm.support.counting import count_operations, count_parameters
from minillm.support.doors import Doors

TARGETS = {
    "generate": minillm.generate,
    "packed": PackedLM,
    "num_parameters": count_parameters,
    "flops_per_token": count_operations,
}


@pytest.fixture
def model():
    return minillm.CausalLM(minillm.ModelConfig(64, 16, 1, 2, 32)).eval()


@pytest.mark.parametrize("name", TARGETS)
def test_a_door_has_the_signature_of_what_it_leads_to(model, name):
    wanted = list(inspect.signature(TARGETS[name]).parameters.values())
    assert list(inspect.signature(getattr(model, name)).parameters.values()) == wanted[1:]
    assert inspect.getdoc(getattr(minillm.CausalLM, name)) == inspect.getdoc(TARGETS[name])


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("decoder", bulk.stream_decoder),
        ("encode_batch", bulk.encode_batch),
        ("apply_chat_template", chat_template.apply_chat_template),
        ("save", hf_json.save),
    ],
)
def test_so_have_the_doors_of_a_tokenizer(name, target):
    tokenizer = minillm.BPETokenizer.train("the cat", 257)
    wanted = list(inspect.signature(target).parameters.values())
    assert list(inspect.signature(getattr(tokenizer, name)).parameters.values()) == wanted[1:]
    assert minillm.BPETokenizer.load is hf_json.load_bpe


def test_a_door_of_the_class_hands_over_the_class():
    class Own(minillm.BPETokenizer):
        pass

    wanted = list(inspect.signature(merges.train_tokenizer).parameters.values())
    assert list(inspect.signature(Own.train).parameters.values()) == wanted[1:]
    assert inspect.getdoc(Own.train) == inspect.getdoc(merges.train_tokenizer)
    own = Own.train("the cat", 257)
    assert type(own) is type(own.train("the cat", 257)) is Own


def test_help_tells_all(model):
    text = pydoc.plain(pydoc.render_doc(minillm.CausalLM))
    assert "Door object" not in text
    for name in TARGETS:
        assert f" {name}" in text
    assert "max_new_tokens: so many" not in text
    assert "cache: a kind of cache" in pydoc.plain(pydoc.render_doc(model.generate))


def test_doors_are_five_lines_at_most():
    for name, method in vars(Doors).items():
        if inspect.isfunction(method) or isinstance(method, classmethod):
            lines = inspect.getsource(getattr(Doors, name)).strip().splitlines()
            code = [x for x in lines if x.strip() and not x.strip().startswith(("@", '"""', "#"))]
            assert len(code) <= 5, name


def test_a_copy_does_not_take_the_compiled_step_along(model):
    model.compiled_run = lambda: None
    twin = pickle.loads(pickle.dumps(model))
    assert not hasattr(twin, "compiled_run")
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(twin.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))
