"""The packed model gives the logits and the tokens of the model that it was made from."""

import pytest
import torch
import torch.nn.functional as F
from family_checkpoints import make, ragged

from minillm.config import ModelConfig
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.packed import PackedLM, lay_out, multiply, shrink
from minillm.pretrained import from_pretrained
from minillm.sampling import Sampler

NAMES = ["llama-2", "llama-3", "llama-biased", "llama-tied", "mistral", "qwen2", "qwen2-window"]
NAMES += ["qwen3"]


def both(name, folder):
    """The named model, as a small checkpoint holds it, and its packed form."""
    make(name, folder)
    model, _ = from_pretrained(folder)
    return model, PackedLM(model)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_and_tokens_are_those_of_the_model(name, tmp_path):
    theirs = make(name, tmp_path)
    model, _ = from_pretrained(tmp_path)
    packed = PackedLM(model)
    ids, mask, positions = ragged()
    expected = theirs(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    found = packed(ids, attention_mask=mask)[mask.bool()]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    for cache in ("dynamic", "static", None):
        options = {"attention_mask": mask, "max_new_tokens": 24, "cache": cache}
        assert torch.equal(generate(packed, ids, **options), generate(model, ids, **options))
    heat = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
    a, b = (
        generate(m, ids[:1], max_new_tokens=9, sampler=Sampler(**heat)) for m in (packed, model)
    )
    assert torch.equal(a, b)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", [(8, 6), (6, 8), (7, 4)])
def test_a_product_with_halves_is_the_product(rows, shape):
    weight, x, plus = torch.randn(shape), torch.randn(rows, shape[1]), torch.randn(rows, shape[0])
    laid = lay_out(weight)
    assert laid.shape == ((1, 7, 4) if shape[0] == 7 else (2, shape[0] // 2, shape[1]))
    torch.testing.assert_close(multiply(x, laid), x @ weight.T)
    torch.testing.assert_close(multiply(x, laid, plus), x @ weight.T + plus)
    assert multiply(x, laid).is_contiguous()


def test_shrink_is_rms_norm_but_for_a_factor():
    x = torch.randn(3, 64)
    floor = torch.tensor((64 * 1e-5) ** 0.5)
    torch.testing.assert_close(8 * shrink(x, floor), F.rms_norm(x, (64,), None, 1e-5))
    assert shrink(x.bfloat16(), floor).dtype == torch.bfloat16
    assert torch.equal(shrink(torch.zeros(1, 64), floor), torch.zeros(1, 64))


def test_positions_beyond_the_table_are_turned_too(tmp_path):
    make("llama-2", tmp_path)
    model, _ = from_pretrained(tmp_path)
    packed = PackedLM(model)
    ids = torch.randint(1, 60, (2, 5))
    expected = generate(packed, ids, max_new_tokens=12, eos_token_id=None)
    packed.table = packed.table[:, :9]
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
    with pytest.raises(ValueError, match=r"gpt2 .*packed; llama, mistral, qwen2, qwen3 with silu"):
        PackedLM(model)
    for change in ({"rope_interleave": True}, {"hidden_act": "gelu"}):
        (value,) = change.values()
        with pytest.raises(ValueError, match=f"llama with .*{value}.* cannot be packed"):
            PackedLM(small(**change))


def small(**changes):
    return CausalLM(ModelConfig(97, 32, 2, 4, 48, num_key_value_heads=2, **changes)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rotation_that_grows_with_the_text(dtype):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    model = small(max_position_embeddings=16, rope_scaling=scaling).to(dtype)
    packed, (ids, mask, _) = PackedLM(model), ragged()
    options = {"attention_mask": mask, "max_new_tokens": 24}
    assert torch.equal(generate(packed, ids, **options), generate(model, ids, **options))


@torch.no_grad()
def test_the_packed_copy_stands_for_itself():
    """Training goes on in the model's own mode, and leaves the packed matrices as they are."""
    model = small(attention_dropout=0.5).train()
    packed = PackedLM(model)
    assert not packed.training and all(m.training for m in model.modules())
    before = {k: v.clone() for k, v in packed.packed.state_dict().items()}
    for layer in model.model.layers:
        for p in layer.parameters():
            p.mul_(0.5)
    assert all(torch.equal(v, before[k]) for k, v in packed.packed.state_dict().items())


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
