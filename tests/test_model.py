"""The model: what is counted and drawn, what is refused; no position sees the future."""

import subprocess
import sys

import pytest
import torch
from family_checkpoints import FAMILY_CONFIGS
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from minillm.beyond.lora.adapters import add_lora
from minillm.config import ModelConfig
from minillm.model import CausalLM
from minillm.support.family import FAMILIES

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 24}
MLA = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}


def model(seed=0, **changes):
    return CausalLM(ModelConfig(**{**LLAMA, **changes}), seed=seed).eval()


def ids(rows=2, length=9, seed=0):
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("gemma-2b", 2_506_172_416),
        ("falcon-7b", 6_921_720_704),
        ("olmo-2-7b", 7_298_617_344),
        ("qwen3.5-0.8b", 752_393_024),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("deepseek-v3", 671_026_404_352),
    ],
)
def test_presets_have_the_published_sizes(name, count):
    with torch.device("meta"):
        assert CausalLM(ModelConfig.preset(name)).num_parameters() == count


def test_deepseek_v3s_attention_has_its_size():
    with torch.device("meta"):
        attention = CausalLM(ModelConfig.preset("deepseek-v3-dense")).model.layers[0].self_attn
    parts = [
        7168 * 1536,
        1536,
        1536 * 128 * 192,
        7168 * 576,
        512,
        512 * 128 * 256,
        128 * 128 * 7168,
    ]
    assert sum(p.numel() for p in attention.parameters()) == sum(parts) == 187_107_328


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "mistral"])
@given(position=st.integers(0, 8))
def test_no_position_sees_the_future(family, position):
    m = model(model_type=family, sliding_window=4 if family == "mistral" else None)
    a = ids()
    b = a.clone()
    b[:, position] = (b[:, position] + 1) % 64
    with torch.no_grad():
        moved = (m(a) - m(b)).abs().amax(-1)
    assert not moved[:, :position].any() and moved[:, position].all()
    if family == "mistral":  # two layers of window 4 reach 6 back
        assert not moved[:, position + 7 :].any()


@torch.no_grad()
def test_padding_is_never_read():
    m = model()
    a, mask = ids(), torch.ones(2, 9, dtype=torch.long)
    mask[:, :3] = 0
    expected = m(a[:, 3:])
    torch.testing.assert_close(m(a, attention_mask=mask)[:, 3:], expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_static_cache_gives_a_prompt_no_empty_slots_and_a_step_all_of_them():
    m, a = model(), ids()
    cache = m.make_cache("static", batch_size=2, max_length=40)
    pieces = []
    for start, end, read in ((0, 5, 5), (5, 8, 8), (8, 9, 40)):
        _, mask, is_causal = m.model.prepare(a[:, start:end], None, None, cache)
        assert (mask is None and is_causal) if start == 0 else mask.shape == (end - start, read)
        pieces.append(m(a[:, start:end], cache=cache))
    torch.testing.assert_close(torch.cat(pieces, 1), m(a), atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="32 new positions after 9 exceed max_length=40"):
        m.model.prepare(torch.zeros(2, 32, dtype=torch.long), None, None, cache)


@torch.no_grad()
def test_logits_to_keep():
    m = model()
    full = m(ids())
    for n in (1, 4, 9):
        torch.testing.assert_close(m(ids(), logits_to_keep=n), full[:, -n:])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.zeros(3, dtype=torch.long)), r"int32 \(B, T\)"),
        (lambda m: m(torch.zeros(0, 3, dtype=torch.long)), r"int32 \(B, T\)"),
        (lambda m: m(torch.zeros(2, 3)), "torch.float32"),
        (lambda m: m(ids().to(torch.int16)), "int64 or int32 .* not torch.int16"),
        (lambda m: m(ids(), logits_to_keep=-1), "must not be negative: -1"),
        (
            lambda m: model(model_type="gpt2")(ids(), position_ids=torch.arange(9)[None] - 1),
            "position -1",
        ),
        (lambda m: m(ids(), attention_mask=torch.ones(2, 8)), r"\(2, 8\) should be .*\(2, 9\)"),
        (lambda m: m(ids(), position_ids=torch.zeros(2, 8)), r"position_ids \(2, 8\)"),
        (lambda m: m.make_cache("sliding", batch_size=2), "sliding_window"),
        (
            lambda m: m(ids(), cache=m.make_cache("static", batch_size=2, max_length=8)),
            "max_length=8",
        ),
        (lambda m: model(model_type="gpt2", max_position_embeddings=8)(ids()), "learned only 8"),
    ],
)
def test_calls_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call(model())


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a = model(seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    b, c = model(seed=3), model(seed=4)
    for x, y, z in zip(a.parameters(), b.parameters(), c.parameters(), strict=True):
        assert torch.equal(x, y) and (x.dim() == 1 or not torch.equal(x, z))


def test_initial_sizes_of_the_weights():
    m = CausalLM(ModelConfig(1000, 256, 8, 4, 512, initializer_range=0.05))
    layer = m.model.layers[3]
    assert abs(layer.self_attn.q_proj.weight.std().item() - 0.05) < 1e-3
    assert abs(layer.mlp.down_proj.weight.std().item() - 0.05 / 4) < 1e-3
    assert abs(m.lm_head.weight.std().item() - 0.05) < 1e-3


def test_flops_are_those_that_torch_counts():
    models = [model(), model(tie_word_embeddings=True), model(model_type="gpt2")]
    for m in (*models, *(CausalLM(FAMILY_CONFIGS[name]) for name in ("mixtral", "qwen3_moe"))):
        math = sdpa_kernel(SDPBackend.MATH)  # the CPU's flash kernel is not counted
        with FlopCounterMode(display=False) as counter, torch.no_grad(), math:
            m(ids(1, 9))
        assert counter.get_total_flops() == 9 * m.flops_per_token(context_length=9)


def test_gradients_reach_every_parameter():
    assert {config.model_type for config in FAMILY_CONFIGS.values()} == set(FAMILIES)
    for name, config in FAMILY_CONFIGS.items():
        m = CausalLM(config)
        m(ids(4, 20)).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in m.parameters()), name


@pytest.mark.parametrize(
    ("wrong", "message"), [(64, "token id 64, .* only 64 token ids"), (-1, "token id -1, but")]
)
def test_ids_outside_the_vocabulary_are_named_and_leave_the_cache_alone(wrong, message):
    a, m = ids(), model()
    cache = m.make_cache(batch_size=2)
    m(a, cache=cache)
    a[1, 3] = wrong
    for memory in (cache, None):
        with pytest.raises(ValueError, match=message):
            m(a, cache=memory)
    assert cache.length == 9 and all(cache[i].length == 9 for i in range(2))


def test_what_is_no_tensor_is_named():
    m, a = model(), ids()
    for inputs in (
        {"input_ids": [[1, 2]]},
        {"input_ids": a, "attention_mask": [[1] * 9] * 2},
        {"input_ids": a, "position_ids": list(range(9))},
    ):
        with pytest.raises(ValueError, match=r"must be tensors, not \[.*\d"):
            m(**inputs)


def test_padding_does_not_count_among_learned_positions():
    m = model(model_type="gpt2", max_position_embeddings=8)
    mask = torch.ones(2, 9, dtype=torch.long)
    with pytest.raises(ValueError, match=r"position 8, .* learned only 8 positions"):
        m(ids(), attention_mask=mask)
    mask[:, 0] = 0
    assert m(ids(), attention_mask=mask).isfinite().all()


def test_what_few_models_want_is_imported_when_it_is_wanted():
    code = (
        "import sys, torch, minillm.generation as d\n"
        "from minillm.config import ModelConfig\nfrom minillm.model import CausalLM\n"
        "m = CausalLM(ModelConfig(64, 16, 1, 2, 24))\n"
        "d.generate(m, torch.zeros(1, 2, dtype=torch.long), max_new_tokens=2)\n"
        "print(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {n for n in done.stdout.split() if n.startswith("minillm.")}
    depth = {
        "minillm.deeper.attention.mla",
        "minillm.deeper.attention.flash",
        "minillm.deeper.attention.fused",
        "minillm.deeper.caches.static",
    }
    depth |= {
        "minillm.deeper.caches.paged",
        "minillm.deeper.fast.packed",
        "minillm.deeper.pretrained.families",
    }
    depth.add("minillm.deeper.generation.search")
    assert "minillm.model" in loaded and not loaded & depth


@pytest.mark.parametrize("tied", [True, False])
def test_numbers_are_counted_with_and_without_what_is_frozen(tied):
    V, C, rank = 50, 32, 4
    model = CausalLM(ModelConfig(V, C, 2, 4, 48, tie_word_embeddings=tied))
    whole, tables = model.num_parameters(), V * C
    assert whole == sum(p.numel() for p in model.parameters())
    assert model.num_parameters(only_trainable=True) == whole
    assert model.num_parameters(exclude_embeddings=True) == whole - tables
    add_lora(model, rank, 8.0, targets=["q_proj", "v_proj"])
    added = 2 * 2 * rank * (C + C)
    assert model.num_parameters() == whole + added
    assert model.num_parameters(only_trainable=True) == added
    assert model.num_parameters(only_trainable=True, exclude_embeddings=True) == added
    model.requires_grad_(True)
    trained = model.num_parameters(only_trainable=True, exclude_embeddings=True)
    assert trained == whole - tables + added


def test_a_table_of_positions_is_an_embedding():
    model = CausalLM(ModelConfig(50, 32, 2, 4, 48, model_type="gpt2", max_position_embeddings=24))
    left_out = model.num_parameters() - model.num_parameters(exclude_embeddings=True)
    assert left_out == (50 + 24) * 32


@pytest.mark.parametrize("kind", ["llama", "bamba"])
def test_a_rotation_that_is_handed_in_is_the_one_that_turns(kind):
    decoder = CausalLM(FAMILY_CONFIGS[kind]).model.eval()
    tokens, positions = torch.tensor([[1, 2, 3, 4, 5]]), torch.arange(5)[None]
    with torch.no_grad():
        x = decoder.embed(tokens, positions)
        usual = decoder(x, positions, None, True)
        same = decoder(x, positions, None, True, rope=decoder.rotary(positions))
        other = decoder(x, positions, None, True, rope=decoder.rotary(3 * positions))
    torch.testing.assert_close(same, usual)
    assert not torch.allclose(other, usual, atol=1e-6)
