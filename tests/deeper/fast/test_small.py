"""Pruned vocabularies and int8 weights: against torch's and our own."""

import copy
import logging

import numpy as np
import pytest
import torch
from exported_models import SMALL, made, prompts
from torch import nn

from minillm.config import ModelConfig
from minillm.deeper.fast.small import (
    Int8Embedding,
    Int8Linear,
    int8_copy,
    prune_vocabulary,
    quantize_rows,
)
from minillm.generation import generate
from minillm.model import CausalLM

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
    from minillm.bpe import BPETokenizer

    text = "the cat sat on the mat. the hat is on the cat. " * 3
    return BPETokenizer.train(text, 270, special_tokens=["<|endoftext|>"])


def sized(tokenizer, **changes):
    ends = {"bos_token_id": 269, "eos_token_id": 269}
    config = {**SMALL, "vocab_size": tokenizer.vocab_size, **ends, **changes}
    return CausalLM(ModelConfig(**config), seed=2).eval()


WINDOWS = {"model_type": "gemma3_text", "sliding_window": 4, "sliding_window_pattern": 2}


@pytest.mark.parametrize("keys", [{}, {**WINDOWS, "final_logit_softcapping": 0.02}])
@pytest.mark.parametrize("tied", [False, True])
def test_kept_logits_are_the_same(tokenizer, tied, keys):
    model = sized(tokenizer, tie_word_embeddings=tied, **keys).double()
    text = "the cat sat the cat sat the cat"  # longer than a window
    keep = tokenizer.encode(text)
    small, small_tokenizer, old = prune_vocabulary(model, tokenizer, keep)
    assert small.config.vocab_size == len(old) == small_tokenizer.vocab_size < 270
    assert (small.lm_head.weight is small.model.embed_tokens.weight) is tied
    assert small.config.eos_token_id == old.index(269) == small_tokenizer.eos_token_id
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
    from minillm.deeper.pretrained.load import from_pretrained, save_pretrained

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
