"""The packed model gives the logits and the tokens of the model that it was made from."""

import pytest
import torch
from family_checkpoints import make, ragged

from minillm.generation import generate
from minillm.packed import PackedLM, lay_out
from minillm.pretrained import from_pretrained
from minillm.sampling import Sampler

NAMES = ["llama-2", "llama-3", "llama-biased", "llama-tied", "mistral", "qwen2", "qwen2-window"]


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


def test_the_longer_side_is_contiguous():
    for rows, columns in ((7, 3), (3, 7), (5, 5)):
        weight = torch.randn(rows, columns)
        laid = lay_out(weight)
        assert torch.equal(laid, weight)
        assert laid.stride(0 if rows >= columns else 1) == 1


def test_what_cannot_be_packed(tmp_path):
    make("gpt2", tmp_path)
    model, _ = from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gpt2 cannot be packed; llama, mistral, qwen2 can"):
        PackedLM(model)
