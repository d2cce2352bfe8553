"""Attention maps: those of transformers, and of the pass itself; foreign attention is refused."""

import pytest
import torch

from minillm.beyond.lora.adapters import add_lora
from minillm.config import ModelConfig
from minillm.deeper.attention.maps import attention_maps
from minillm.deeper.pretrained.load import from_pretrained
from minillm.generation import generate
from minillm.model import CausalLM

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
KEYS = {"num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.3}


def model(**keys):
    return CausalLM(ModelConfig(**{**SIZES, **KEYS, **keys}), seed=1)


def ids(rows=2, length=9):
    return torch.randint(40, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("Llama", {"num_key_value_heads": 2, "attention_dropout": 0.5}),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
        ("Mistral", {"num_key_value_heads": 4, "sliding_window": 4}),
        ("GPT2", {}),
    ],
)
def test_they_are_those_of_transformers(name, keys, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {**SIZES, "intermediate_size": 48, "max_position_embeddings": 64, **keys}
    if name == "GPT2":
        sizes = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    config = getattr(transformers, f"{name}Config")(
        **sizes, initializer_range=0.3, attn_implementation="eager"
    )
    torch.manual_seed(0)
    made = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    theirs = getattr(transformers, made)(config).eval()
    theirs.save_pretrained(tmp_path)
    ours, _ = from_pretrained(tmp_path)
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    for given in (None, mask):
        how = {"attention_mask": given, "output_attentions": True}
        if given is not None:
            how["position_ids"] = (given.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            wanted = theirs(ids(), **how).attentions
        found = attention_maps(ours, ids(), attention_mask=given)
        assert len(found) == len(wanted) == 2
        for a, b in zip(found, wanted, strict=True):
            real = torch.ones(2, 9, dtype=torch.bool) if given is None else given.bool()
            a, b = (x.transpose(1, 2)[real] for x in (a, b))  # rows of padding mean nothing
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_the_model_is_as_it_was_and_dropout_is_off():
    lm = model(attention_dropout=0.9)
    lm.train()
    first, second = (attention_maps(lm, ids()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert lm.training and not any(part._forward_hooks for part in lm.modules())
    assert all(torch.allclose(a.sum(-1), torch.ones(2, 4, 9)) for a in first)
    assert not first[0].requires_grad
    with pytest.raises(ValueError, match="input_ids must be"):
        attention_maps(lm, ids().float())
    assert not any(part._forward_hooks for part in lm.modules())  # nor after an error


def test_an_adapter_counts():
    lm = model()
    before = attention_maps(lm, ids())
    add_lora(lm, 2, 4)
    for part in lm.modules():
        if hasattr(part, "lora_B"):
            torch.nn.init.normal_(part.lora_B.weight)
    assert not torch.allclose(attention_maps(lm, ids())[0], before[0])


def test_what_is_no_multi_head_attention_is_named():
    latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    config = ModelConfig(
        **SIZES, intermediate_size=48, model_type="deepseek_v3", **latent, num_key_value_heads=4
    )
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn is MultiHeadLatentAttention"):
        attention_maps(CausalLM(config), ids())
    with pytest.raises(ValueError, match="Linear has none"):
        attention_maps(torch.nn.Linear(2, 2), ids())


def test_a_packed_copy_has_the_same():
    lm = model().eval()
    packed = lm.packed("linear")
    generate(packed, ids(), max_new_tokens=1)
    for a, b in zip(attention_maps(lm, ids()), attention_maps(packed, ids()), strict=True):
        torch.testing.assert_close(a, b)
