"""Models with states: transformers' numbers, caches, padding, training, files, what is refused."""

import json
import re

import pytest
import torch
import transformers
from family_checkpoints import CONFIGS, FAMILY_CONFIGS, STATE_CONFIGS, make, ragged
from safetensors.torch import load_file, save_file
from training_runs import learns_and_resumes_bit_for_bit

from minillm.beyond.state.mamba_parts import StateSizes
from minillm.config import ModelConfig
from minillm.deeper.generation.speculative import speculative_generate
from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.deeper.pretrained.weights import read_weights
from minillm.deeper.training.trainer import RunConfig, Trainer
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.training import WindowBatches

NAMES = ["mamba", "mamba2", "bamba"]
each = pytest.mark.parametrize("name", NAMES)
ALL = [*(name for name in CONFIGS if "amba" in name), *STATE_CONFIGS]


def lively(name, **changes):
    """A model whose branches count."""
    config = ModelConfig(**{**vars(FAMILY_CONFIGS[name]), **changes, "initializer_range": 0.3})
    return CausalLM(config).eval()


def some_ids(rows=3, length=14):
    return torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(0))


# ---- beside transformers ----


@pytest.mark.parametrize("name", ALL)
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path):
    theirs = make(name, tmp_path, max_shard_size="20KB")
    ours, _ = from_pretrained(tmp_path)
    ids = ragged()[0].clamp(min=2)  # the padding token's vector is not learned there
    found = []
    for m in (theirs, ours):
        logits = m(ids, use_cache=False).logits if m is theirs else m(ids)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        grads = {k: p.grad for k, p in m.named_parameters()}
        found.append((logits, read_weights(grads, ours.config) if m is theirs else grads))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-5, rtol=1e-5)
    assert found[0][1].keys() == found[1][1].keys()
    for key, expected in found[0][1].items():
        torch.testing.assert_close(found[1][1][key], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", STATE_CONFIGS)
@torch.no_grad()
def test_saved_in_pieces_transformers_reads_the_same(name, tmp_path):
    theirs = make(name, tmp_path / "theirs")
    ours, _ = from_pretrained(tmp_path / "theirs")
    save_pretrained(ours, None, tmp_path / "ours", max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    ids, _, _ = ragged()
    expected = theirs(ids, use_cache=False).logits  # its cache needs a layer that attends
    assert torch.equal(again(ids, use_cache=False).logits, expected)
    assert CausalLM.from_pretrained(tmp_path / "ours").config == ours.config


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_each_step_is_one_shot_and_each_padded_row_is_alone(name, tmp_path):
    make(name, tmp_path)
    ours, _ = from_pretrained(tmp_path)
    ids, mask, _ = ragged()
    expected = ours(ids, attention_mask=mask)
    for row in range(3):
        real = mask[row].bool()
        alone = ours(ids[row : row + 1, real])
        torch.testing.assert_close(expected[row, real], alone[0], atol=1e-5, rtol=1e-5)
    for sizes in ([4] + [1] * 17, [7, 9, 5]):
        cache, found, end = ours.make_cache(batch_size=3), [], 0
        for size in sizes:
            end += size
            seen = mask[:, :end]
            found.append(ours(ids[:, end - size : end], attention_mask=seen, cache=cache))
        real = mask.bool()
        torch.testing.assert_close(torch.cat(found, 1)[real], expected[real], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_where_transformers_disagrees_with_itself(tmp_path):
    """Quirks that the page names: each makes its pieces, or its padded rows, other numbers."""

    def pieces(name, cut):
        theirs = make(name, tmp_path / name)
        ids = ragged()[0]
        whole, first = theirs(ids, use_cache=False).logits, theirs(ids[:, :cut], use_cache=True)
        rest = theirs(ids[:, cut:], cache_params=first.cache_params, use_cache=True).logits
        return (rest - whole[:, cut:]).abs().max().item()

    assert pieces("mamba", 20) < 1e-4 < 1e-3 < pieces("mamba", 9)  # a second piece starts anew
    assert pieces("mamba2", 9) < 1e-4
    assert pieces("mamba2-tied-limits", 20) > 1e-3  # a step forgets the limits
    theirs, (ids, mask, _) = make("mamba-odd", tmp_path / "odd"), ragged()
    alone = theirs(ids[1:2, 6:], use_cache=False).logits
    padded = theirs(ids, attention_mask=mask, use_cache=False).logits[1:2, 6:]
    assert (padded - alone).abs().max() > 1e-2  # the projection's bias enters with the padding


@each
@torch.no_grad()
def test_16_bit_models_are_near_those_of_transformers(name, tmp_path):
    theirs = make(name, tmp_path).bfloat16()
    ours, _ = from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids, _, _ = ragged()
    exact = from_pretrained(tmp_path)[0](ids)
    error = (theirs(ids, use_cache=False).logits.float() - exact).abs().max()
    found = ours(ids)
    assert found.dtype == torch.bfloat16 and (found.float() - exact).abs().max() < 2 * error


@torch.no_grad()
def test_older_files_call_the_embedding_otherwise(tmp_path):
    make("mamba", tmp_path)
    expected = CausalLM.from_pretrained(tmp_path)(some_ids())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(CausalLM.from_pretrained(tmp_path)(some_ids()), expected)


# ---- caches, generation, training ----


@each
@pytest.mark.parametrize("kind", ["dynamic", "static", "paged", "quantized"])
@torch.no_grad()
def test_every_cache_gives_the_same_as_none(name, kind):
    model = lively(name)
    a = some_ids()
    expected, found = model(a), []
    cache = model.make_cache(kind, batch_size=3, max_length=16)
    for start, end in ((0, 5), (5, 9), *((i, i + 1) for i in range(9, 14))):
        found.append(model(a[:, start:end], cache=cache))
    worst = (torch.cat(found, 1) - expected).abs().max() / expected.abs().max()
    assert worst < (0.2 if kind == "quantized" else 1e-5), worst
    with pytest.raises(ValueError, match="3 new positions after 14 exceed max_length=16"):
        model(a[:, :3], cache=cache)


@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1), ()])
@torch.no_grad()
def test_attention_may_stand_in_any_layer(layers):
    model, a = lively("bamba", attn_layer_indices=layers).double(), some_ids()
    kinds = [type(layer).__name__ for layer in model.make_cache(batch_size=3).layers]
    assert kinds == ["CacheLayer" if i in layers else "StateLayer" for i in range(2)]
    cache = model.make_cache("static", batch_size=3, max_length=16)
    found = [
        model(a[:, :6], cache=cache),
        *(model(a[:, i : i + 1], cache=cache) for i in range(6, 14)),
    ]
    torch.testing.assert_close(torch.cat(found, 1), model(a), atol=1e-10, rtol=1e-10)


@each
@torch.no_grad()
def test_left_padded_rows_write_what_each_writes_alone(name):
    model, a = lively(name), some_ids()
    mask = torch.ones_like(a)
    mask[0, :5], mask[2, :11] = 0, 0
    options = {"max_new_tokens": 12, "eos_token_id": None}
    written = generate(model, a, attention_mask=mask, **options)
    for row in range(3):
        alone = a[row : row + 1, mask[row].bool()]
        new = generate(model, alone, **options)[0, alone.shape[1] :]
        assert torch.equal(written[row, 14:], new)
        assert torch.equal(generate(model, alone, cache=None, **options)[0, alone.shape[1] :], new)


@each
def test_training_goes_through_the_trainer_and_resumes_bit_for_bit(name, tmp_path):
    learns_and_resumes_bit_for_bit(lambda: CausalLM(FAMILY_CONFIGS[name], seed=1), tmp_path)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bfloat16_products_and_both_optimizers_train_it(optimizer):
    model = CausalLM(FAMILY_CONFIGS["bamba"])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    settings = RunConfig(3, warmup_steps=0, precision="bfloat16", optimizer=optimizer)
    Trainer(model, WindowBatches(torch.arange(300) % 11, 4, 16), settings, progress=False).train()
    for key, value in model.state_dict().items():
        assert value.isfinite().all() and not torch.equal(value, before[key]), key


@each
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rates_and_passes_do_not_decay_and_rates_are_no_matrix(name, optimizer):
    """As in the code of Mamba's authors; A_log has two dimensions in Mamba, one in Mamba-2."""
    model = CausalLM(FAMILY_CONFIGS[name])
    made = RunConfig(9, warmup_steps=2, weight_decay=0.3, optimizer=optimizer).make_optimizer(model)
    named = {id(p): key for key, p in model.named_parameters()}
    decays = {named[id(p)]: g["weight_decay"] for g in made.param_groups for p in g["params"]}
    assert decays.keys() == set(named.values())
    for key, decay in decays.items():
        assert decay == (0.3 if key.endswith(".weight") and "norm" not in key else 0.0), key
    if optimizer == "muon":
        moved = {named[id(p)] for g in made.muon.param_groups for p in g["params"]}
        assert moved and all(key.endswith("_proj.weight") for key in moved)


def test_weights_are_drawn_with_the_seed_and_steps_keep_their_range():
    a, b, c = (CausalLM(FAMILY_CONFIGS["mamba"], seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(a[k], b[k]) for k in a)
    drawn = [k for k in a if "norm" not in k and not k.endswith((".D", "A_log", "conv1d.bias"))]
    assert all(not torch.equal(a[k], c[k]) for k in drawn)
    assert torch.equal(a["model.layers.0.mamba.A_log"][0].exp().round(), torch.arange(1.0, 6.0))


def test_flops_do_not_grow_with_the_context_where_nothing_attends():
    for name, count in (("mamba", 0), ("mamba2", 0), ("bamba", 1)):
        model = CausalLM(FAMILY_CONFIGS[name])
        more = model.flops_per_token(1000) - model.flops_per_token()
        assert more == count * 2 * 4 * 8 * 1000  # 4 heads, keys and values of 4 numbers


@each
@torch.no_grad()
def test_given_positions_and_a_mask_go_together(name):
    model, a = lively(name), some_ids()
    mask = torch.ones_like(a)
    mask[1, :4] = 0
    positions = torch.arange(14)[None]  # one row for all; attention sees differences only
    found = model(a, attention_mask=mask, position_ids=positions)
    expected = model(a, attention_mask=mask)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)


def test_float64_is_computed_in_float64():
    for name in NAMES:
        single, double = lively(name), lively(name).double()
        exact = double(some_ids())
        assert exact.dtype == torch.float64
        assert 1e-9 < (single(some_ids()).double() - exact).abs().max() < 1e-4


# ---- what is refused ----


def test_what_needs_to_go_back_is_refused_by_name():
    model, plain, a = lively("bamba"), lively("llama"), some_ids(rows=1)
    for pair in ((model, plain), (plain, model)):
        with pytest.raises(ValueError, match="state cannot go back behind a refused guess: bamba"):
            speculative_generate(*pair, a, max_new_tokens=3)
    cache = model.make_cache(batch_size=1)
    model(a, cache=cache)
    with pytest.raises(ValueError, match="cannot crop 14 positions to 9: a state cannot go back"):
        cache.crop(9)
    assert cache.length == 14 and {layer.length for layer in cache.layers} == {14}
    cache.crop(0)
    torch.testing.assert_close(model(a, cache=cache), model(a), atol=1e-5, rtol=1e-5)


@each
def test_packing_compiling_and_rings_are_refused_by_name(name):
    model = CausalLM(FAMILY_CONFIGS[name])
    with pytest.raises(ValueError, match=f"{name} .*cannot be packed"):
        model.packed()
    with pytest.raises(ValueError, match=f"a step of {name} cannot be compiled"):
        generate(model, some_ids(), max_new_tokens=2, cache="static", compile=True)
    with pytest.raises(ValueError, match="sliding"):
        model.make_cache("sliding", batch_size=1)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mamba", {"state": None}, "a mamba config needs state, a StateSizes or a table, not None"),
        ("mamba", {"state": {"d_state": 4}}, "state has no 'd_state', but"),
        (
            "mamba",
            {"state": {"state_size": -1}},
            "state_size must be a whole number from 1 to 2147483647, not -1",
        ),
        ("mamba", {"state": 16}, "needs state, a StateSizes or a table, not 16"),
        ("mamba", {"num_attention_heads": 4}, "mamba has neither .*num_attention_heads 4"),
        ("mamba2", {"intermediate_size": 32}, "mamba2 has neither .*intermediate_size 32"),
        ("mamba2", {"attn_layer_indices": (1,)}, "a mamba2 config has no attn_layer_indices"),
        ("mamba2", {"state": {}}, "num_heads None, 32 channels"),
        ("mamba2", {"state": {"num_heads": 5}}, "num_heads 5, 32 channels"),
        ("bamba", {"attn_layer_indices": (2,)}, r"attn_layer_indices \[2\]: there are 2 layers"),
        ("bamba", {"attn_layer_indices": (-1,)}, "attn_layer_indices must be a list, each a whole"),
        ("bamba", {"num_attention_heads": None}, "a bamba config lacks num_attention_heads"),
        ("bamba", {"partial_rotary_factor": 0.0}, "partial_rotary_factor must be a number above 0"),
        ("bamba", {"partial_rotary_factor": 0.3}, "head_dim 4 of which 1 rotate"),
        ("bamba", {"partial_rotary_factor": 2.0}, "partial_rotary_factor must be"),
        ("llama", {"state": StateSizes()}, "a llama config has no state"),
        ("llama", {"attn_layer_indices": (0,)}, "a llama config has no attn_layer_indices"),
        ("llama", {"partial_rotary_factor": 0.5}, "llama config has no partial_rotary_factor"),
        ("llama", {"num_attention_heads": None}, "a llama config lacks num_attention_heads"),
    ],
)
def test_configs_that_contradict_themselves_are_named(name, changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**vars(FAMILY_CONFIGS[name]), **changes})


def file_of(name):
    return CONFIGS[name]().to_dict()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mamba", {"intermediate_size": 65}, "intermediate_size 65 is not expand times hidden"),
        ("mamba", {"state_size": "16"}, "state_size must be a whole number from 1"),
        ("mamba", {"time_step_rank": "four"}, "time_step_rank must be 'auto' or a whole number"),
        ("mamba2", {"head_dim": 8}, "head_dim 8 times 4 heads is not expand times hidden_size, 64"),
        ("mamba2", {"num_heads": 3}, "head_dim 16 times 3 heads is not"),
        ("mamba2", {"n_groups": 3}, "num_heads 4 do not share n_groups 3"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, "time_step_limit must be two numbers"),
        ("mamba2", {"use_bias": "no"}, "use_bias must be true or false"),
        ("bamba", {"mamba_d_head": 5}, "mamba_d_head 5 times 4 heads is not expand"),
        ("bamba", {"mamba_n_heads": 0}, "mamba_n_heads must be a whole number from 1"),
        ("bamba", {"attn_layer_indices": [7]}, r"attn_layer_indices \[7\]"),
        ("llama-3", {"partial_rotary_factor": 0.5}, "rotating only a part of each head is not"),
    ],
)
def test_files_that_say_what_we_do_not_compute_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**file_of(name), **changes})


def test_files_may_leave_out_what_transformers_takes_for_granted():
    sizes = {"vocab_size": 50, "hidden_size": 4096, "num_hidden_layers": 1}
    mamba2 = ModelConfig.from_dict({"model_type": "mamba2", **sizes})
    theirs = transformers.Mamba2Config(**sizes)
    assert ModelConfig.from_dict(theirs.to_dict()).state == mamba2.state
    mamba = ModelConfig.from_dict({"model_type": "mamba", **sizes})
    theirs = transformers.MambaConfig(**sizes)
    assert mamba.tie_word_embeddings and mamba.state.residual_in_fp32
    assert (
        ModelConfig.from_dict({**theirs.to_dict(), "time_step_rank": "auto"}).state == mamba.state
    )
    heads = {**sizes, "num_attention_heads": 32, "intermediate_size": 64}
    with pytest.warns(UserWarning, match="no rope_theta"):
        bamba = ModelConfig.from_dict({"model_type": "bamba", **heads})
    assert bamba.partial_rotary_factor == 0.5 and bamba.attn_layer_indices == ()


@pytest.mark.parametrize(
    ("name", "change", "lost"),
    [
        ("mamba", {"state": {"num_heads": 4}}, "state="),
        ("mamba2", {"state": {"num_heads": 4, "time_step_rank": 3}}, "state="),
        ("bamba", {"state": {"num_heads": 2, "residual_in_fp32": True}}, "state="),
        ("mamba2", {"attention_dropout": 0.5}, "attention_dropout=0.5"),
    ],
)
def test_what_no_file_of_the_family_can_say_is_not_saved(name, change, lost, tmp_path):
    config = ModelConfig(**{**vars(FAMILY_CONFIGS[name]), **change})
    with pytest.raises(ValueError, match=f"config.json has no place for .*{re.escape(lost)}"):
        save_pretrained(CausalLM(config), None, tmp_path)


def test_infinity_is_written_as_json_readers_know_it(tmp_path):
    save_pretrained(lively("mamba2"), None, tmp_path)
    text = (tmp_path / "config.json").read_text(encoding="utf-8")
    assert json.loads(text)["time_step_limit"][0] == 0.0
    assert CausalLM.from_pretrained(tmp_path).config.state.time_step_limit == (0.0, float("inf"))
    assert transformers.AutoConfig.from_pretrained(tmp_path).time_step_limit[1] == float("inf")
