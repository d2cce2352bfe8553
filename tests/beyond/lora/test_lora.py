"""Adapters against peft: outputs, gradients, files both ways; merging, and what is refused."""

import copy
import json
import math
import random
import re
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from family_checkpoints import FAMILY_CONFIGS, make
from safetensors.torch import load_file, save_file
from torch import nn

from minillm.beyond.lora.adapters import (
    add_lora,
    check_merged,
    linear_layers,
    lora_disabled,
    lora_layers,
    merge,
    remove_lora,
    unmerge,
)
from minillm.beyond.lora.lora import LoRALinear
from minillm.config import ModelConfig
from minillm.deeper.caches.kinds import CACHE_KINDS
from minillm.deeper.fast.packed import PackedLM
from minillm.deeper.pretrained.adapters import load_adapter, save_adapter
from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.deeper.training.run import Run
from minillm.deeper.training.trainer import RunConfig, Trainer
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.stories.curriculum import fewer_cards
from minillm.stories.language import StoryLanguage
from minillm.support import fence
from minillm.training import TrainConfig, WindowBatches, evaluate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's

LLAMA = ["q_proj", "v_proj"]
CASES = {  # checkpoint, then what peft is told
    "llama": ("llama-3", {"r": 3, "lora_alpha": 5, "target_modules": LLAMA}),
    "rank one": ("llama-3", {"r": 1, "lora_alpha": 7, "target_modules": ["down_proj"]}),
    "full rank": ("llama-3", {"r": 16, "lora_alpha": 2, "target_modules": ["k_proj"]}),
    "rslora": (
        "llama-biased",
        {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"},
    ),
    "one layer": (
        "mistral",
        {"r": 2, "lora_alpha": 2, "target_modules": ["model.layers.1.mlp.up_proj"]},
    ),
    "pattern": ("qwen2", {"r": 5, "lora_alpha": 3, "target_modules": r".*\.1\..*(gate|o)_proj"}),
    "tied head": ("qwen3", {"r": 3, "lora_alpha": 4, "target_modules": ["lm_head", "q_proj"]}),
    "free head": ("llama-2", {"r": 3, "lora_alpha": 4, "target_modules": ["lm_head"]}),
    "gemma": ("gemma", {"r": 2, "lora_alpha": 9, "target_modules": "all-linear"}),
    "gpt2": ("gpt2", {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"}),
    "gpt2 fused": ("gpt2-wide", {"r": 3, "lora_alpha": 5, "target_modules": ["c_attn"]}),
    "gpt2 projections": ("gpt2", {"r": 2, "lora_alpha": 5, "target_modules": ["c_proj"]}),
    "falcon": (
        "falcon-one-key",
        {"r": 3, "lora_alpha": 5, "target_modules": ["query_key_value", "dense"]},
    ),
    "falcon groups": (
        "falcon-new",
        {"r": 4, "lora_alpha": 2, "use_rslora": True, "target_modules": "all-linear"},
    ),
    "falcon heads": ("falcon-in-turn", {"r": 3, "lora_alpha": 1, "target_modules": "all-linear"}),
    "latent": ("deepseek", {"r": 3, "lora_alpha": 5, "target_modules": ["kv_b_proj", "q_a_proj"]}),
    "experts": ("mixtral", {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "o_proj"]}),
    "latent attention": (
        "deepseek-plain",
        {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj"]},
    ),
    "latent experts": (
        "deepseek-experts",
        {"r": 3, "lora_alpha": 5, "target_modules": ["o_proj", "kv_b_proj"]},
    ),
}
each = pytest.mark.parametrize("case", CASES)
IDS = torch.randint(2, 97, (2, 11), generator=torch.Generator().manual_seed(5))


def theirs_of(case, folder):
    """A base of transformers in `folder`, with an adapter of peft whose B is not zero."""
    name, settings = CASES[case]
    base = make(name, folder)
    torch.manual_seed(7)
    return peft.get_peft_model(base, peft.LoraConfig(**settings, init_lora_weights=False)).eval()


def ours_of(case, folder):
    """Our model of the same base, with an adapter of the same settings."""
    settings = CASES[case][1]
    model, _ = from_pretrained(folder)
    rslora = settings.get("use_rslora", False)
    add_lora(
        model, settings["r"], settings["lora_alpha"], settings["target_modules"], use_rslora=rslora
    )
    return model


@each
def test_outputs_and_gradients_are_those_of_peft(case, tmp_path):
    theirs = theirs_of(case, tmp_path / "base")
    theirs.save_pretrained(tmp_path / "adapter")
    ours, _ = from_pretrained(tmp_path / "base")
    load_adapter(ours, tmp_path / "adapter")
    a, b = theirs(IDS).logits, ours(IDS)
    torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)
    with theirs.disable_adapter(), lora_disabled(ours):
        off = theirs(IDS).logits
        assert (off - a).abs().max() > 1e-3  # the adapter matters
        torch.testing.assert_close(ours(IDS), off, atol=1e-5, rtol=1e-5)
    toward = torch.linspace(-1, 1, a.numel()).view_as(a) / a.numel() ** 0.5
    (a * toward).sum().backward()
    (b * toward).sum().backward()
    expected = {
        k.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for k, p in theirs.named_parameters()
        if p.requires_grad
    }
    trained = {k for k, p in ours.named_parameters() if p.requires_grad}
    assert trained == {k for k in trained if ".lora_" in k}
    for name, parts in linear_layers(ours).items():
        layers = [ours.get_submodule(part) for part in parts]
        if isinstance(layers[0], LoRALinear):
            wanted = expected.pop(f"{name}.lora_A.weight")
            assert apart(layers[0].lora_A.weight.grad, wanted) < 1e-5
            grads = [layer.lora_B.weight.grad for layer in layers]
            wanted = expected.pop(f"{name}.lora_B.weight")
            whole = grads[0] if len(grads) == 1 else joined(grads, ours.config)
            assert apart(whole, wanted) < 1e-5
    assert not expected


def apart(found, wanted):
    """The largest difference, measured by the largest number if that is above 1."""
    return (found - wanted).abs().max() / wanted.abs().max().clamp(min=1)


def joined(parts, config):
    """The fused rows of queries, keys and values, as the families lay them out."""
    groups = 1 if config.model_type == "gpt2" else config.num_key_value_heads
    pieces = [p.view(groups, -1, p.shape[1]) for p in parts]
    return torch.cat(pieces, 1).reshape(-1, parts[0].shape[1])


@each
@torch.no_grad()
def test_what_we_write_peft_reads(case, tmp_path):
    base = make(CASES[case][0], tmp_path / "base")
    ours = ours_of(case, tmp_path / "base")
    generator = torch.Generator().manual_seed(3)
    for layer in lora_layers(ours).values():
        layer.lora_B.weight.normal_(0, 0.2, generator=generator)
    save_adapter(ours, tmp_path / "adapter", base=str(tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(theirs(IDS).logits, ours(IDS), atol=1e-5, rtol=1e-5)
    again, _ = from_pretrained(tmp_path / "base")
    assert (again(IDS) - ours(IDS)).abs().max() > 1e-3
    assert set(load_adapter(again, tmp_path / "adapter")) == {
        k.rpartition(".lora_")[0].removeprefix("base_model.model.")
        for k in load_file(tmp_path / "adapter/adapter_model.safetensors")
    }
    assert torch.equal(again(IDS), ours(IDS))


@each
@torch.no_grad()
def test_merged_it_computes_the_same_and_is_a_model_that_transformers_loads(case, tmp_path):
    import transformers

    theirs_of(case, tmp_path / "base").save_pretrained(tmp_path / "adapter")
    ours, _ = from_pretrained(tmp_path / "base")
    plain, config = ours(IDS), ours.config
    state = {k: v.clone() for k, v in ours.state_dict().items()}
    load_adapter(ours, tmp_path / "adapter")
    expected = ours(IDS)
    with pytest.raises(ValueError, match=r"not merged; see merge"):
        save_pretrained(ours, None, tmp_path / "never")
    assert not (tmp_path / "never").exists()
    merge(ours)
    torch.testing.assert_close(ours(IDS), expected, atol=2e-5, rtol=2e-5)
    if "tied head" in case:
        assert not ours.config.tie_word_embeddings
    save_pretrained(ours, None, tmp_path / "merged")
    for again in (
        from_pretrained(tmp_path / "merged")[0](IDS),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(IDS).logits,
    ):
        torch.testing.assert_close(again, expected, atol=2e-5, rtol=2e-5)
    unmerge(ours)
    torch.testing.assert_close(ours(IDS), expected, atol=0, rtol=0)
    remove_lora(ours)
    assert torch.equal(ours(IDS), plain) and ours.config == config
    assert ours.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in ours.state_dict().items())
    assert all(p.requires_grad for p in ours.parameters())


def test_peft_merges_a_tied_head_into_the_embedding_and_we_do_not(tmp_path):
    theirs = theirs_of("tied head", tmp_path / "base")
    theirs.save_pretrained(tmp_path / "adapter")
    ours, _ = from_pretrained(tmp_path / "base")
    load_adapter(ours, tmp_path / "adapter")
    with torch.no_grad():
        expected = theirs(IDS).logits
        merge(ours)
        assert (ours(IDS) - expected).abs().max() < 2e-5
        embedding = ours.model.embed_tokens.weight
        assert ours.lm_head.weight is not embedding
        assert (theirs.merge_and_unload()(IDS).logits - expected).abs().max() > 0.01
        unmerge(ours)
        assert ours.lm_head.weight is embedding and ours.config.tie_word_embeddings


def small(name="llama", **changes):
    return CausalLM(FAMILY_CONFIGS[name], **changes).eval()


def lively(model, *args, **options):
    """An adapter whose B is not zero."""
    add_lora(model, *args, **options)
    with torch.no_grad():
        for i, layer in enumerate(lora_layers(model).values()):
            generator = torch.Generator().manual_seed(i)
            layer.lora_B.weight.normal_(0, 0.3, generator=generator)
    return model


def few_ids(rows=2, length=9):
    return torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_a_fresh_adapter_changes_nothing_in_any_family(name):
    model = small(name)
    before = model(few_ids())
    names = add_lora(model, 1, 3)  # a rank that every matrix has
    assert names and torch.equal(model(few_ids()), before)
    assert "lm_head" not in names and len(lora_layers(model)) >= len(names)


def test_the_first_A_is_drawn_as_in_peft_and_by_the_seed():
    layer = LoRALinear(nn.Linear(300, 200), 64, 8, generator=torch.Generator().manual_seed(0))
    theirs = peft.get_peft_model(
        nn.Sequential(nn.Linear(300, 200)), peft.LoraConfig(r=64, target_modules=["0"])
    ).base_model.model[0]
    wanted = theirs.lora_A["default"].weight
    assert math.isclose(layer.lora_A.weight.std(), wanted.std(), rel_tol=0.03)
    assert layer.lora_A.weight.abs().max() <= 300**-0.5
    a, b, c = (small() for _ in range(3))
    state = torch.get_rng_state()
    for model, seed in ((a, 1), (b, 1), (c, 2)):
        add_lora(model, 2, 2, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's random numbers are used
    weights = [m.model.layers[0].self_attn.q_proj.lora_A.weight for m in (a, b, c)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(("rows", "columns"), [(7, 12), (12, 7), (8, 8)])
def test_a_layer_against_numpy_in_float64(rows, columns):
    rng = np.random.default_rng(0)
    base = nn.Linear(columns, rows, dtype=torch.float64)
    layer = LoRALinear(base, 3, 5.0)
    with torch.no_grad():
        layer.lora_B.weight.copy_(torch.from_numpy(rng.standard_normal((rows, 3))))
        x = torch.from_numpy(rng.standard_normal((4, columns)))
        w, b = base.weight.numpy(), base.bias.numpy()
        a, up = layer.lora_A.weight.numpy(), layer.lora_B.weight.numpy()
        expected = x.numpy() @ (w + 5 / 3 * up @ a).T + b
        np.testing.assert_allclose(layer(x).numpy(), expected, atol=1e-12)
        layer.merge()
        np.testing.assert_allclose(layer(x).numpy(), expected, atol=1e-12)
    assert np.linalg.matrix_rank(layer.change().detach().numpy()) == 3


def test_dropout_is_for_training_alone():
    layer = LoRALinear(nn.Linear(50, 4).eval(), 4, 4, dropout=0.5)
    nn.init.ones_(layer.lora_B.weight)
    x = torch.ones(64, 50)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    assert not LoRALinear(nn.Linear(4, 4), 1, 1).eval().dropout.training


def test_beside_16_bits_the_adapter_is_float32():
    model = lively(small().bfloat16(), 2, 4)
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.weight.dtype == torch.bfloat16 and layer.lora_A.weight.dtype == torch.float32
    with torch.no_grad():
        logits = model(few_ids())
        assert logits.dtype == torch.bfloat16
        before = {k: v.clone() for k, v in model.state_dict().items()}
        merge(model)
        assert layer.weight.dtype == torch.bfloat16
        exact = before["model.layers.0.self_attn.q_proj.weight"].float() + layer.change()
        assert torch.equal(layer.weight, exact.bfloat16())
        unmerge(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


# ---- with the rest of the house ----


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "qwen3_moe"])
def test_training_moves_the_adapter_alone_and_resumes_bit_for_bit(name, tmp_path):
    text = torch.arange(400) % 7 + torch.arange(400) // 7 % 5

    def trainer(run=None):
        model = small(name, seed=1)
        add_lora(model, 4, 8, dropout=0.1, seed=2)
        settings = TrainConfig(30, max_lr=3e-2, warmup_steps=2, log_interval=1)
        return Trainer(model, WindowBatches(text, 4, 16), settings, run=run, progress=False)

    whole = trainer()
    before = {k: v.clone() for k, v in whole.model.state_dict().items()}
    losses = [record["loss"] for record in whole.train()]
    assert losses[-1] < 0.97 * losses[0]
    for key, value in whole.model.state_dict().items():
        assert (".lora_" in key) != torch.equal(value, before[key]), key
    first = trainer(Run(tmp_path))
    first.train(until=12)
    second = trainer(Run(tmp_path))
    assert second.resume() and second.step == 12
    second.train()
    for key, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[key], value), key


@pytest.mark.parametrize("settings", [{"precision": "bfloat16"}, {"fused": False}])
def test_training_in_bfloat16_and_with_our_own_adamw(settings):
    model = small()
    add_lora(model, 2, 2)
    source = WindowBatches(torch.arange(300) % 11, 4, 16)
    config = RunConfig(3, warmup_steps=0, **settings)
    Trainer(model, source, config, progress=False).train()
    assert all(layer.lora_B.weight.any() for layer in lora_layers(model).values())


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_it_generates_with_every_cache(kind):
    model = lively(small("mistral" if kind == "sliding" else "llama"), 2, 4)
    a = few_ids()
    expected = model(a)
    cache = model.make_cache(kind, batch_size=2, max_length=12)
    found = torch.cat([model(a[:, i : i + 3], cache=cache) for i in (0, 3, 6)], 1)
    worst = (found - expected).abs().max() / expected.abs().max()
    assert worst < (0.2 if kind == "quantized" else 1e-5), worst
    written = generate(model, a, max_new_tokens=6, eos_token_id=None)
    merge(model)
    assert torch.equal(generate(model, a, max_new_tokens=6, eos_token_id=None), written)


@torch.no_grad()
def test_absorbed_latent_attention_reads_the_adapter():
    model = lively(small("deepseek_v3"), 2, 4, ["kv_b_proj"])
    a, expected = few_ids(), model(few_ids())
    for layer in model.model.layers:
        layer.self_attn.absorb = True
    torch.testing.assert_close(model(a), expected, atol=1e-5, rtol=1e-5)
    with lora_disabled(model):
        assert (model(a) - expected).abs().max() > 1e-3


@torch.no_grad()
def test_a_packed_model_takes_merged_adapters_and_no_others():
    model = lively(small("qwen3"), 2, 4)
    expected = model(few_ids())
    with pytest.raises(ValueError, match=r"q_proj has an adapter that is not merged; see merge"):
        model.packed()
    merge(model)
    check_merged(model, "ours")
    packed = PackedLM(model, "halves")
    torch.testing.assert_close(packed(few_ids()), expected, atol=1e-5, rtol=1e-5)
    step = packed(few_ids()[:, :1])
    torch.testing.assert_close(step, model(few_ids()[:, :1]), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"PackedLM only generates"):
        add_lora(small("qwen3").packed("linear"), 2, 4)


@torch.no_grad()
def test_of_a_packed_model_the_merged_one_is_saved(tmp_path):
    model = lively(small("qwen3"), 2, 4)
    merge(model)
    save_pretrained(PackedLM(model, "transposed"), None, tmp_path)
    torch.testing.assert_close(from_pretrained(tmp_path)[0](few_ids()), model(few_ids()))


@torch.no_grad()
def test_copies_compile_and_keep_their_adapters():
    model = lively(small("gpt2"), 2, 4)
    twin = copy.deepcopy(model)
    q, k = (twin.model.layers[0].self_attn.get_submodule(f"{p}_proj") for p in "qk")
    assert q.lora_A is k.lora_A and q.lora_B is not k.lora_B
    assert torch.equal(twin(few_ids()), model(few_ids()))
    compiled = torch.compile(twin, backend="eager")
    torch.testing.assert_close(compiled(few_ids()), model(few_ids()))


def test_any_module_of_linear_layers_will_do(tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    assert add_lora(model, 2, 2, ["0", "2"]) == ["0", "2"]
    save_adapter(model, tmp_path)
    other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    assert load_adapter(other, tmp_path) == ["0", "2"]


def test_a_layer_that_a_notebook_defined_itself_is_found_too():
    """There the class is another one than the package's, with the same code."""

    class Own(nn.Linear):
        merged = False

    model = small("qwen3")
    attention = model.model.layers[1].self_attn
    attention.o_proj = Own(attention.o_proj.in_features, attention.o_proj.out_features, bias=False)
    attention.o_proj.lora_A = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"layers.1.self_attn.o_proj has an adapter that is not"):
        model.packed()


@torch.no_grad()
def test_the_shipped_adapter_knows_the_four_cards():
    """And peft's file format is all that it needs: the figures are those of the results."""
    root = Path(__file__).parents[3]
    base, tokenizer = from_pretrained(root / "assets/stories-en", dtype=torch.float32)
    assert len(load_adapter(base, root / "assets/lora-decks/adapter")) == 21
    grammar = (root / "minillm/stories/grammars/en.txt").read_text(encoding="utf-8")
    few = StoryLanguage("en", grammar=fewer_cards(grammar, 4, random.Random("14_lora")))
    stories = [few.sample(random.Random(f"other/{i}")) for i in range(12)]
    size = sum(len(story.text.encode()) for story in stories)
    nats = evaluate(base, tokenizer, [story.text for story in stories]) * math.log(2) * size
    above = (nats + sum(story.log_prob for story in stories)) / 12
    assert 0 < above < 2
    with lora_disabled(base):
        off = evaluate(base, tokenizer, [story.text for story in stories]) * math.log(2) * size
    assert (off - nats) / 12 > 5


# ---- bad input ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rank": 0},
            r"rank for model.layers.0.self_attn.q_proj, a matrix \(16, 16\), .* 1 to 16, not 0",
        ),
        ({"rank": 17}, r"rank for .*\(16, 16\), must be .* from 1 to 16, not 17"),
        ({"rank": 9}, r"rank for model.layers.0.self_attn.k_proj, a matrix \(8, 16\), .* not 9"),
        ({"rank": 2.0}, r"rank for .* not 2.0"),
        ({"rank": True}, r"rank for .* not True"),
        ({"alpha": math.nan}, r"alpha must be a number .*, not nan"),
        ({"alpha": "8"}, r"alpha must be a number .*, not '8'"),
        ({"dropout": 1.0}, r"dropout must be .*, not 1.0"),
        ({"targets": ["q_proj", "c_attn"]}, r"no linear layer fits 'c_attn'; there are q_proj"),
        ({"targets": []}, r"no linear layer fits \[\]"),
        ({"targets": None}, r"targets must be names or a pattern, not None"),
        ({"targets": 5}, r"targets must be names or a pattern, not 5"),
        ({"targets": ["q_proj", 3]}, r"names or a pattern, not \['q_proj', 3\]"),
        ({"targets": b"q_proj"}, r"names or a pattern, not b'q_proj'"),
        ({"targets": {"q_proj": 8}}, r"names or a pattern, not \{'q_proj': 8\}"),
        ({"targets": iter(["q_proj"])}, r"names or a pattern, not <list_iterator"),
        ({"targets": ["all-linear"]}, r"no linear layer fits 'all-linear'"),  # nor in peft
        ({"targets": "all_linear"}, r"no linear layer fits 'all_linear'"),
        ({"targets": "q_proj"}, r"fits 'q_proj' \(a string is a pattern for whole names\)"),
        ({"targets": ["embed_tokens"]}, r"no linear layer fits 'embed_tokens'"),
        ({"targets": ["input_layernorm"]}, r"no linear layer fits"),
    ],
)
def test_adapters_that_cannot_be_are_refused_and_nothing_is_changed(change, message):
    model = small()
    with pytest.raises(ValueError, match=message):
        add_lora(model, **{"rank": 2, "alpha": 4, **change})
    assert not lora_layers(model) and all(p.requires_grad for p in model.parameters())


def test_experts_are_no_linear_layers():
    with pytest.raises(ValueError, match=r"no linear layer fits 'experts'"):
        add_lora(small("mixtral"), 2, 2, ["experts"])


def test_adding_and_merging_twice_are_refused():
    model = lively(small(), 2, 4, LLAMA)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj has an adapter already"):
        add_lora(model, 2, 4, ["o_proj"])
    with pytest.raises(ValueError, match=r"has an adapter already"):
        LoRALinear(model.model.layers[0].self_attn.q_proj, 2, 4)
    with pytest.raises(ValueError, match=r"q_proj is not merged"):
        unmerge(model)
    merge(model)
    before = model(few_ids())
    with pytest.raises(ValueError, match=r"q_proj is merged already"):
        merge(model)
    with (
        pytest.raises(ValueError, match=r"q_proj is merged: unmerge the model"),
        lora_disabled(model),
    ):
        pass
    with pytest.raises(ValueError, match=r"merged already"):
        model.model.layers[0].self_attn.q_proj.merge()
    assert torch.equal(model(few_ids()), before)
    unmerge(model)
    with pytest.raises(ValueError, match=r"not merged"):
        model.model.layers[0].self_attn.q_proj.unmerge()


@pytest.mark.parametrize("call", [merge, unmerge, remove_lora, lambda m: save_adapter(m, "x")])
def test_without_adapters_there_is_nothing_to_do(call):
    with pytest.raises(ValueError, match=r"a CausalLM without adapters"):
        call(small())


def test_nan_is_neither_merged_nor_saved(tmp_path):
    model = lively(small(), 2, 4, LLAMA)
    model.model.layers[1].self_attn.v_proj.lora_B.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"adapter of model.layers.1.self_attn.v_proj is NaN"):
        merge(model)
    assert not any(layer.merged for layer in lora_layers(model).values())
    with pytest.raises(ValueError, match=r"NaN or infinite: .*layers.1.self_attn.v_proj.lora_B"):
        save_adapter(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_switching_off_ends_with_the_block_also_after_an_error():
    model = lively(small(), 2, 4)
    on = model(few_ids())
    with pytest.raises(KeyError), lora_disabled(model):
        assert not torch.equal(model(few_ids()), on)
        raise KeyError
    assert torch.equal(model(few_ids()), on)


def test_one_layer_is_merged_with_the_checks_of_a_whole_model():
    layer = LoRALinear(nn.Linear(6, 5).half(), 2, 4)
    before, x = layer.weight, torch.ones(2, 6)
    nn.init.constant_(layer.lora_B.weight, math.nan)
    with pytest.raises(ValueError, match=r"the adapter of this layer is NaN or infinite"):
        layer.merge()
    nn.init.constant_(layer.lora_A.weight, 1e3)
    nn.init.constant_(layer.lora_B.weight, 1e3)
    with pytest.raises(ValueError, match=r"this layer would be NaN .* in torch.float16"):
        layer.merge()
    assert layer.weight is before and not layer.merged
    nn.init.constant_(layer.lora_B.weight, 1e-3)
    expected = layer.float()(x)
    layer.merge()
    torch.testing.assert_close(layer(x), expected)


# ---- files ----


def saved(tmp_path, **options):
    model = lively(small(), 2, 4, LLAMA, **options)
    save_adapter(model, tmp_path)
    return model


def rewrite(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


REFUSED = {
    "use_dora": True,
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 4},
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "lora_bias": True,
    "target_parameters": ["experts.down_proj"],
    "trainable_token_indices": [3],
    "layer_replication": [[0, 2]],
    "init_lora_weights": "pissa",
    "use_qalora": True,
    "alora_invocation_tokens": [5],
    "some_later_variant": 0.5,
}


@pytest.mark.parametrize("key", REFUSED)
def test_settings_that_change_numbers_are_refused_by_name(key, tmp_path):
    saved(tmp_path)
    rewrite(tmp_path, **{key: REFUSED[key]})
    model = small()
    with pytest.raises(ValueError, match=rf"we do not compute {key}="):
        load_adapter(model, tmp_path)
    assert not lora_layers(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"r": 3}, r"A and B of model.layers.0.self_attn.q_proj are \(\(2, 16\), \(16, 2\)\)"),
        ({"r": 99}, r"rank for model.layers.* not 99"),
        ({"r": "2"}, r"rank for .* not '2'"),
        ({"lora_alpha": None}, r"alpha must be a number .*, not None"),
        (
            {"lora_alpha": 1e308},
            r"alpha must be a number from -1,000,000 to 1,000,000, not 1e\+308",
        ),
        ({"lora_alpha": -1e7}, r"alpha must be .* not -10000000"),
        ({"lora_alpha": 10**400}, r"alpha must be a number .*, not 10{119}"),
        ({"lora_alpha": math.inf}, r"alpha must be a number .*, not inf"),
        ({"lora_alpha": math.nan}, r"adapter_config\.json is not whole JSON: it holds NaN"),
        ({"r": math.inf}, r"rank for model.layers.* not inf"),
        ({"r": 10**400}, r"rank for model.layers.* not 10{119}"),
        ({"lora_dropout": math.inf}, r"dropout must be"),
        ({"lora_dropout": 2}, r"dropout must be"),
        ({"layers_to_transform": "1"}, r"json: layers_to_transform must be numbers .* not '1'"),
        ({"layers_to_transform": [True]}, r"layers_to_transform must be numbers .* not \[True\]"),
        ({"layers_to_transform": [0, -1]}, r"layers_to_transform must be numbers"),
        ({"layers_pattern": [1]}, r"layers_pattern must be names, not \[1\]"),
        ({"exclude_modules": {"a": 1}}, r"exclude_modules must be names, not {'a': 1}"),
        ({"layers_to_transform": [1]}, r"weights of model\.layers\.0\..*, which its"),
        ({"layers_to_transform": [7]}, r"weights of model\.layers\.0\..*, which its"),
        ({"exclude_modules": ["v_proj"]}, r"weights of .*v_proj, which its target_modules do not"),
        (
            {"target_modules": [*LLAMA, "k_proj"]},
            r"no weights for 2 of 6 layers .* the first model\.layers\.0\.self_attn\.k_proj",
        ),
        ({"use_rslora": 3}, r"use_rslora is 3"),
        ({"target_modules": None}, r"target_modules must be names"),
        ({"target_modules": ["q_proj"]}, r"weights of .*v_proj, which its target_modules do not"),
    ],
)
def test_configs_that_do_not_fit_are_refused(changes, message, tmp_path):
    saved(tmp_path)
    rewrite(tmp_path, **changes)
    model = small()
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path)
    assert not lora_layers(model)


def key_of(part, layer=0, last="q_proj"):
    return f"base_model.model.model.layers.{layer}.self_attn.{last}.lora_{part}.weight"


def cast(tensors, dtype):
    tensors[key_of("B")] = tensors[key_of("B")].to(dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(key_of("B")), r"missing: .*q_proj.lora_B"),
        (lambda t: t.clear(), r"holds no adapter"),
        (lambda t: t.update({key_of("A", 7): torch.ones(2, 16)}), r"not there: .*layers.7"),
        (lambda t: t.update({"model.x": torch.ones(2)}), r"unexpected: model.x"),
        (lambda t: cast(t, torch.int64), r"16 to 64 bits: .*q_proj.lora_B.weight is torch.int64$"),
        (lambda t: cast(t, torch.bool), r"q_proj.lora_B.weight is torch.bool"),
        (lambda t: cast(t, torch.complex64), r"q_proj.lora_B.weight is torch.complex64"),
        (lambda t: cast(t, torch.float8_e4m3fn), r"q_proj.lora_B.weight is torch.float8_e4m3fn"),
        (lambda t: t.update({key_of("A"): torch.ones(2, 15)}), r"are \(\(2, 15\)"),
        (lambda t: t.update({key_of("B"): torch.full((16, 2), math.inf)}), r"NaN or infinite"),
        (
            lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(64, 16)}),
            r"lm_head.weight is not the model's: it has another base",
        ),
        (
            lambda t: t.update({key_of("A").replace("lora_A", "lora_embedding_A"): torch.ones(2)}),
            r"unexpected",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message, tmp_path):
    saved(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    model = small()
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path)
    assert not lora_layers(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_adapters_of_other_floating_point_types_are_read_as_peft_does(dtype, tmp_path):
    theirs = theirs_of("llama", tmp_path / "base")
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    base = theirs.unload()
    theirs = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    ours, _ = from_pretrained(tmp_path / "base")
    load_adapter(ours, tmp_path)
    assert all(layer.lora_A.weight.dtype == torch.float32 for layer in lora_layers(ours).values())
    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spelling", ["all-linear", "All-Linear", "ALL-LINEAR"])
def test_all_linear_is_spelled_as_loosely_as_in_peft(spelling, tmp_path):
    base = make("llama-3", tmp_path / "base")
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=spelling))
    theirs.save_pretrained(tmp_path)
    wanted = {key.removeprefix("base_model.model.") for key, _ in theirs.named_modules()}
    ours, _ = from_pretrained(tmp_path / "base")
    names = add_lora(ours, 2, 8, spelling)
    assert {f"{n}.lora_A" for n in names} == {key for key in wanted if key.endswith(".lora_A")}
    ours, _ = from_pretrained(tmp_path / "base")
    rewrite(tmp_path, target_modules=spelling)  # peft writes the names, but reads this too
    assert load_adapter(ours, tmp_path) == sorted(names)


def test_folders_without_an_adapter_and_damaged_ones(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"adapter_config.json"):
        load_adapter(small(), tmp_path)
    saved(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"damaged or no safetensors"):
        load_adapter(small(), tmp_path)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no adapter_model.safetensors"):
        load_adapter(small(), tmp_path)


def test_a_model_and_an_adapter_do_not_share_a_folder(tmp_path):
    model = saved(tmp_path / "adapter")
    merge(model)
    with pytest.raises(ValueError, match=r"holds an adapter, which readers would put onto"):
        save_pretrained(model, None, tmp_path / "adapter")
    save_pretrained(model, None, tmp_path / "model")
    with pytest.raises(ValueError, match=r"holds a model"):
        save_adapter(model, tmp_path / "model")
    load_adapter(small(), tmp_path / "adapter")
    from_pretrained(tmp_path / "model")


def test_an_adapter_takes_an_older_ones_place_as_a_whole(tmp_path, monkeypatch):
    saved(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    other = lively(small(), 3, 5, ["o_proj"])

    def full(*args, **kwargs):
        raise OSError(28, "no space left")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space"):
        save_adapter(other, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    monkeypatch.undo()
    save_adapter(other, tmp_path)
    again = small()
    load_adapter(again, tmp_path)
    assert torch.equal(again(few_ids()), other(few_ids()))


def test_what_peft_cannot_hold_is_refused(tmp_path):
    model = lively(small("gpt2"), 2, 4, ["c_attn"])
    attention = model.model.layers[0].self_attn
    attention.k_proj.lora_A = copy.deepcopy(attention.k_proj.lora_A)
    with pytest.raises(ValueError, match=r"c_attn is one matrix in a file: .*share lora_A"):
        save_adapter(model, tmp_path)
    plain = small()
    attention = plain.model.layers[0].self_attn
    attention.q_proj = LoRALinear(attention.q_proj, 2, 4)
    attention.v_proj = LoRALinear(attention.v_proj, 3, 4)
    with pytest.raises(ValueError, match=r"one adapter, one \(rank, alpha"):
        save_adapter(plain, tmp_path)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_where_peft_would_take_a_block_for_experts_nothing_is_written(name, tmp_path):
    """Of these families peft renames up_proj and the like, also in layers without experts."""
    model = lively(small(name), 2, 4)
    with pytest.raises(ValueError, match=rf"mlp.gate_proj: in a {name} peft takes it for the exp"):
        save_adapter(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_short_names_are_written_only_if_they_mean_the_same_layers(tmp_path):
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"]
    for targets, wanted in ((LLAMA, LLAMA), (names, names)):
        model = lively(small(), 2, 4, targets)
        save_adapter(model, tmp_path / str(len(wanted[0])))
        config = json.loads((tmp_path / str(len(wanted[0])) / "adapter_config.json").read_text())
        assert config["target_modules"] == wanted


CHOICES = {
    "names": {"target_modules": LLAMA},
    "one layer": {"target_modules": LLAMA, "layers_to_transform": 1},
    "two layers": {"target_modules": ["o_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "layers under a name": {
        "target_modules": LLAMA, "layers_to_transform": [2], "layers_pattern": "layers",
    },
    "layers under one of two names": {
        "target_modules": LLAMA, "layers_to_transform": [0], "layers_pattern": ["h", "layers"],
    },
    "a whole name beside layers": {
        "target_modules": ["v_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [1],
    },
    "all but names": {
        "target_modules": "all-linear",
        "exclude_modules": ["up_proj", "model.layers.1.mlp.gate_proj"],
    },
    "all but a pattern": {"target_modules": "all-linear", "exclude_modules": r".*\.1\..*|lm_head"},
    "a pattern": {"target_modules": r".*\.[12]\.self_attn\.[qk]_proj"},
    "no layers": {"target_modules": LLAMA, "layers_to_transform": []},
}  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES)
def test_an_adapter_belongs_onto_the_layers_that_its_settings_choose(choice, tmp_path):
    """As peft chooses them; on a deeper model peft would leave new layers bare, with a warning."""
    sizes = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24}
    config = ModelConfig(**sizes, num_hidden_layers=3, num_attention_heads=2)
    save_pretrained(CausalLM(config, seed=1), None, tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    asked = peft.LoraConfig(r=2, init_lora_weights=False, **CHOICES[choice])
    theirs = peft.get_peft_model(base, asked).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    ours, _ = from_pretrained(tmp_path / "base")
    names = load_adapter(ours, tmp_path / "adapter")
    assert sorted(names) == sorted(theirs.targeted_module_names)
    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, atol=1e-5, rtol=1e-5)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    for lost in (names[0], names[-1]):
        save_file({k: v for k, v in tensors.items() if f".{lost}.lora" not in k}, path)
        ours, _ = from_pretrained(tmp_path / "base")
        which = f"no weights for 1 of {len(names)} layers .* the first {re.escape(lost)}: another"
        with pytest.raises(ValueError, match=which):
            load_adapter(ours, tmp_path / "adapter")
        assert not lora_layers(ours)


def test_an_adapter_of_two_layers_does_not_go_onto_three(tmp_path):
    models = [CausalLM(replace(FAMILY_CONFIGS["llama"], num_hidden_layers=n)) for n in (1, 2, 3)]
    small_one, base, model = models
    save_adapter(lively(base, 2, 4, LLAMA), tmp_path)
    message = (
        r"no weights for 2 of 6 layers that its settings choose .* model\.layers\.2\.self_attn"
    )
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path)
    assert not lora_layers(model)
    with pytest.raises(ValueError, match=r"layers that are not there: 2 of 4 layers, the first"):
        load_adapter(small_one, tmp_path)


def test_the_adapter_of_an_excluded_layer_is_not_there(tmp_path):
    """Settings of peft that only choose layers: the file holds those that were chosen."""
    base = make("llama-3", tmp_path / "base")
    torch.manual_seed(0)
    settings = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}
    config = peft.LoraConfig(**settings, exclude_modules=["up_proj"])
    theirs = peft.get_peft_model(base, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    ours, _ = from_pretrained(tmp_path / "base")
    names = load_adapter(ours, tmp_path / "adapter")
    assert len(names) == 12 and not any("up_proj" in name for name in names)
    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, atol=1e-5, rtol=1e-5)


def test_the_error_messages_name_layers_as_files_do():
    with pytest.raises(ValueError, match=re.escape("rank for transformer.h.0.attn.c_attn")):
        add_lora(small("gpt2"), 17, 2, ["c_attn"])


def test_a_broken_pattern_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'\(' is no pattern"):
        add_lora(small(), 2, 2, "(")
    saved(tmp_path)
    rewrite(tmp_path, target_modules="(")
    with pytest.raises(ValueError, match=r"'\(' is no pattern"):
        load_adapter(small(), tmp_path)


def test_a_pattern_that_takes_forever_is_stopped(tmp_path, monkeypatch):
    """Once for all layers, not once for each."""
    forever = "(([a-z._0-9])+)+!"
    monkeypatch.setattr(fence, "SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"the pattern '.*\+!' takes more than 0\.2 seconds"):
        add_lora(small(), 2, 2, forever)
    saved(tmp_path)
    rewrite(tmp_path, target_modules=forever)
    with pytest.raises(ValueError, match=r"the pattern '.*\+!' takes more than 0\.2 seconds"):
        load_adapter(small(), tmp_path)


def test_many_targets_are_looked_up_and_not_tried_one_by_one(tmp_path):
    def layers():
        return nn.ModuleList(nn.Linear(2, 2) for _ in range(300))

    model = layers()
    names = add_lora(model, 1, 1)
    save_adapter(model, tmp_path)
    rewrite(tmp_path, target_modules=[*map(str, range(10**9, 10**9 + 500_000)), *names])
    start = time.process_time()
    json.loads((tmp_path / "adapter_config.json").read_text())
    reading = time.process_time() - start
    assert load_adapter(layers(), tmp_path) == sorted(names)
    loading = time.process_time() - start - reading
    assert loading < 40 * reading  # some four times; one by one it is 150


def test_a_merge_that_16_bits_cannot_hold_is_refused():
    model = lively(small().half(), 2, 2, LLAMA)
    layer = model.model.layers[1].self_attn.v_proj
    before = layer.weight.clone()
    nn.init.constant_(layer.lora_A.weight, 1e3)
    nn.init.constant_(layer.lora_B.weight, 1e3)
    with pytest.raises(ValueError, match=r"1.self_attn.v_proj would be .* in torch.float16"):
        merge(model)
    assert torch.equal(layer.weight, before)
    assert not any(layer.merged for layer in lora_layers(model).values())
