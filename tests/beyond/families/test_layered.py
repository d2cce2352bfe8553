"""Families whose layers differ: each key of their files that changes numbers, as in transformers.

That their plain passes, caches, padding, texts and files are transformers' is for
tests/deeper/pretrained/test_load.py, which has them in its table.
"""

import copy
import json
import pickle
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from family_checkpoints import DEEP, DELTA, LAYERED, LINEAR, THETA, make, ragged
from safetensors.torch import load_file, save_file

from minillm.beyond.export.step import DecodingStep, decode, export_step
from minillm.beyond.families.qwen35 import delta_rule
from minillm.beyond.lora.adapters import add_lora, merge, remove_lora
from minillm.config import ModelConfig
from minillm.deeper.fast.small import int8_copy
from minillm.deeper.pretrained.load import from_pretrained
from minillm.generation import generate
from minillm.model import CausalLM

FULL, WINDOW = "full_attention", "sliding_attention"
ROPES = {FULL: THETA, WINDOW: LINEAR}
GONE = object()  # the file does not say the key

# What a file of the named model says in the place of what it said.
TURNED = {
    "gemma3": [
        {"sliding_window": 5},
        {"sliding_window": GONE},
        {"layer_types": [WINDOW, FULL, FULL, WINDOW]},
        {"layer_types": GONE},
        {"layer_types": GONE, "sliding_window_pattern": 2},
        {"rope_parameters": ROPES},
        {"rope_parameters": {WINDOW: {"rope_type": "default"}}},
        {"rope_parameters": GONE},
        {"rope_parameters": GONE, "rope_theta": 500.0},
        {"rope_parameters": GONE, "rope_local_base_freq": 500.0},
        {"rope_parameters": GONE, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"query_pre_attn_scalar": 8},
        {"query_pre_attn_scalar": GONE},
        {"final_logit_softcapping": 0.5},
        {"rms_norm_eps": 0.1},
        {"hidden_activation": "silu"},
        {"tie_word_embeddings": True},
    ],
    "smollm3": [
        {"no_rope_layers": [0, 1, 0, 1]},
        {"no_rope_layers": GONE, "no_rope_layer_interval": 2},
        {"rope_parameters": GONE, "rope_theta": 500.0},
        {"rope_parameters": LINEAR},
        {"rms_norm_eps": 0.1},
        {"hidden_act": "gelu"},
    ],
    "olmo2": [
        {"rope_parameters": GONE},
        {"rope_parameters": GONE, "rope_theta": 500.0},
        {"rope_parameters": LINEAR},
        {"rms_norm_eps": 0.1},
        {"hidden_act": "gelu"},
    ],
    "olmo3": [
        {"sliding_window": 5},
        {"sliding_window": GONE},
        {"layer_types": [WINDOW, FULL, FULL, WINDOW]},
        {"rope_parameters": ROPES},
        {"rope_parameters": GONE, "rope_theta": 500.0},
        {"rope_parameters": GONE, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rms_norm_eps": 0.1},
        {"hidden_act": "gelu"},
    ],
    "gpt-oss": [
        {"sliding_window": 5},
        {"sliding_window": GONE},
        {"layer_types": [FULL, WINDOW, FULL, WINDOW]},
        {"rope_parameters": LINEAR},
        {"rope_parameters": THETA},
        {"rope_parameters": GONE, "rope_theta": 500.0},
        {"num_experts_per_tok": 3},
        {"num_experts_per_tok": GONE},
        {"swiglu_limit": 0.2},
        {"swiglu_limit": GONE},
        {"swiglu_alpha": 0.5},
        {"rms_norm_eps": 0.1},
    ],
    "qwen3-5": [
        {"rope_parameters": {**THETA, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {**THETA, "partial_rotary_factor": 0.25}},
        {"rope_parameters": GONE, "rope_theta": 500.0},
        {"rms_norm_eps": 0.1},
        {"hidden_act": "gelu"},
    ],
    "gpt-oss-plain": [{"rope_parameters": GONE}, {"swiglu_alpha": 0.5}],
}  # fmt: skip
REFUSED = {
    "gemma3": [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping must be a number above 0, not 0"),
        ({"sliding_window": None}, "sliding_window is not given"),
        ({"layer_types": [FULL]}, "1 layer_types, but num_hidden_layers is 4"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types must be a list, each full_att"),
        ({"rope_parameters": THETA}, "rope_parameters of gemma3_text go by layer: no 'rope_type'"),
        ({"rope_parameters": {WINDOW: {"rope_type": "dynamic", "factor": 2.0}}}, "'dynamic' is"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number above 0, not 0"),
    ],
    "smollm3": [
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": GONE},
            "use_sliding_window with 8 positions",
        ),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers has 2 numbers, but num_hidden_layers is 4"),
        ({"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers must be a list, each a whole number"),
    ],
    "olmo3": [({"rope_parameters": THETA}, "rope_parameters of olmo3 go by layer: no 'rope_type'")],
    "qwen3-5": [
        ({"layer_types": ["full_attention"]}, "1 layer_types, but num_hidden_layers is 4"),
        ({"layer_types": [WINDOW] * 4}, "layer_types must be a list, each linear_attention or"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 do not share 2 key heads"),
    ],
    "gpt-oss": [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'.* quantized weights"),
        ({"num_experts_per_tok": 6}, "6"),
        ({"swiglu_limit": 0}, "swiglu_limit must be a number above 0, not 0"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """name -> the folder that transformers has written, made once each."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make(name, made[name])
        return made[name]

    return get


def changed(folder, keys, new):
    """A copy of a folder whose config says other keys."""
    shutil.copytree(folder, new, dirs_exist_ok=True)
    data = {**json.loads((folder / "config.json").read_text("utf-8")), **keys}
    said = {key: value for key, value in data.items() if value is not GONE}
    (new / "config.json").write_text(json.dumps(said), encoding="utf-8")
    return new


@pytest.mark.parametrize(("name", "keys"), [(n, keys) for n in TURNED for keys in TURNED[n]])
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:the config gives no rope_theta")
def test_a_key_moves_the_logits_as_those_of_transformers(name, keys, folder_of, tmp_path):
    folder, (ids, _, _) = folder_of(name), ragged()
    before = CausalLM.from_pretrained(folder)(ids)
    place = changed(folder, keys, tmp_path)
    if keys.get("tie_word_embeddings"):  # then no file holds the head
        weights = load_file(place / "model.safetensors")
        del weights["lm_head.weight"]
        save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place).eval()(ids).logits
    ours = CausalLM.from_pretrained(place)(ids)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert (ours - before).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore:the config gives no rope_theta")
@pytest.mark.parametrize(("name", "keys", "why"), [(n, *x) for n in REFUSED for x in REFUSED[n]])
def test_what_is_not_computed_is_refused_by_name(name, keys, why, folder_of, tmp_path):
    with pytest.raises(ValueError, match=why):
        from_pretrained(changed(folder_of(name), keys, tmp_path))


SIZES = {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 96}
HEADS = {"vocab_size": 97, "num_attention_heads": 8}
BARE = {
    "gemma3_text": (transformers.Gemma3TextConfig, SIZES),  # published ones lack these, too
    "smollm3": (transformers.SmolLM3Config, SIZES | HEADS),
    "olmo2": (transformers.Olmo2Config, SIZES | HEADS),
    "olmo3": (transformers.Olmo3Config, SIZES | HEADS),
    "gpt_oss": (transformers.GptOssConfig, SIZES | HEADS),
    "qwen3_5_text": (
        transformers.Qwen3_5TextConfig,
        SIZES | HEADS | {"full_attention_interval": 3},
    ),
}


@pytest.mark.parametrize("kind", BARE)
def test_absent_keys_mean_what_transformers_takes_them_to_mean(kind):
    make_config, sizes = BARE[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bare = ModelConfig.from_dict({"model_type": kind, **sizes})
        full = ModelConfig.from_dict(make_config(**sizes).to_dict())
    numbers, layers = [], range(bare.num_hidden_layers)
    for config in (bare, full):
        said = {k: v for k, v in vars(config).items() if k[-9:] != "_token_id"}
        for key in ("layer_types", "no_rope_layers", "full_attention_interval"):  # lists, patterns
            said.pop(key, None)
        for of_layer in {"has_window", "turns", "has_state"} & {*dir(config)}:
            said[of_layer] = [*map(getattr(config, of_layer), layers)]
        numbers.append(said)
    assert numbers[0] == numbers[1]


def test_a_text_within_the_window_shows_nothing(folder_of, tmp_path):
    """Why all texts here are longer: up to its length a window may as well not be there."""
    model = CausalLM.from_pretrained(folder_of("gemma3"))
    wide = CausalLM.from_pretrained(changed(folder_of("gemma3"), {"sliding_window": 64}, tmp_path))
    ids = ragged()[0]
    assert torch.equal(model(ids[:, :8]), wide(ids[:, :8]))
    assert (model(ids) - wide(ids)).abs()[:, 8:].max() > 1e-2


@torch.no_grad()
def test_only_layers_with_a_window_keep_a_ring(folder_of):
    model, (ids, mask, _) = CausalLM.from_pretrained(folder_of("gemma3")), ragged()
    cache = model.make_cache("sliding", batch_size=3)
    model(ids, attention_mask=mask, cache=cache)
    slots = [layer.nbytes // (3 * 2 * 2 * 12 * 4) for layer in cache.layers]
    assert slots == [21, 8, 8, 21]
    twin = cache.fork()
    both = [generate(model, ids[:, :9], max_new_tokens=12, cache=k) for k in ("sliding", "dynamic")]
    assert torch.equal(*both)
    with pytest.raises(ValueError, match="ring of 8 has overwritten"):
        twin.crop(3)
    assert twin.length == cache.length == 21


@pytest.mark.parametrize("keys", [{}, {"final_logit_softcapping": 2}])
@torch.no_grad()
def test_an_exported_step(keys, folder_of, tmp_path):
    model = CausalLM.from_pretrained(changed(folder_of("gemma3"), keys, tmp_path))
    prompt = ragged()[0][:1]
    expected = generate(model, prompt, max_new_tokens=12, eos_token_id=None)
    step = DecodingStep(model, max_length=40)
    exported = export_step(model, max_length=40).module()
    for each in (step, exported):
        assert torch.equal(decode(each, prompt, step.empty(), max_new_tokens=12), expected)
    logits = exported(prompt[:, :1], torch.tensor([0]), *step.empty())[0]
    torch.testing.assert_close(logits, model(prompt[:, :1])[:, 0])


def test_a_packed_copy_is_refused_by_name(folder_of):
    model = CausalLM.from_pretrained(folder_of("gemma3"))
    with pytest.raises(ValueError, match=r"gemma3_text .* cannot be packed: layers\.0 is a Sandw"):
        model.packed()


def test_a_cap_holds_for_whatever_head_there_is(tmp_path):
    """It comes after the head: in a loss, a copy, one of 8 bits, with an adapter."""
    theirs = make("gemma3-capped", tmp_path)
    model, (ids, _, _) = CausalLM.from_pretrained(tmp_path), ragged()
    logits = model(ids)
    assert 1.9 < logits.abs().max() < 2
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected = theirs(ids, labels=ids).loss
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for lm, its_loss in ((model, loss), (theirs, expected)):
        lm.zero_grad()
        its_loss.backward()
    torch.testing.assert_close(
        model.model.norm.weight.grad, theirs.model.norm.weight.grad, atol=1e-5, rtol=1e-5
    )
    with torch.no_grad():
        uncapped = CausalLM(replace(model.config, final_logit_softcapping=None)).eval()
        uncapped.load_state_dict(model.state_dict())
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(ids), logits)
        whole = int8_copy(uncapped)(ids)
        assert whole.abs().max() > 3
        torch.testing.assert_close(int8_copy(model)(ids), 2 * torch.tanh(whole / 2))
        adapted = [copy.deepcopy(model), copy.deepcopy(uncapped)]
        for lm in adapted:
            add_lora(lm, 2, 4, ["lm_head"])
            torch.nn.init.normal_(lm.lm_head.lora_B.weight, generator=torch.manual_seed(0))
        wanted = 2 * torch.tanh(adapted[1](ids) / 2)
        assert (wanted - logits).abs().max() > 0.1
        torch.testing.assert_close(adapted[0](ids), wanted)
        merge(adapted[0])
        torch.testing.assert_close(adapted[0](ids), wanted)
        remove_lora(adapted[0])
        torch.testing.assert_close(adapted[0](ids), wanted)
    assert model.flops_per_token(9) == uncapped.flops_per_token(9)
    with pytest.raises(ValueError, match=r"lm_head changes its scores, as its family does: packed"):
        model.packed()


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_a_state_that_corrects_itself_in_chunks(chunk):
    """Against the rule as its paper writes it, position by position."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)

    q, k, v, decay, beta, state = (
        draw(*s) for s in ((37, 5), (37, 5), (37, 4), (37,), (37,), (5, 4))
    )
    k, decay, beta = k / k.norm(dim=-1, keepdim=True), -decay.abs(), beta.sigmoid()
    found, last = delta_rule(q, k, v, decay, beta, state, chunk)
    for t in range(37):
        state = state * decay[:, :, t].exp()[..., None, None]
        wrong = v[:, :, t] - torch.einsum("bhde,bhd->bhe", state, k[:, :, t])
        state = state + k[:, :, t, :, None] * (beta[:, :, t, None] * wrong)[:, :, None]
        expected = torch.einsum("bhde,bhd->bhe", state, q[:, :, t])
        torch.testing.assert_close(found[:, :, t], expected)
    torch.testing.assert_close(last, state)


@pytest.mark.parametrize("kind", ["gemma3", "gemma3, older", "qwen3_5"])
@torch.no_grad()
def test_the_text_part_of_a_model_that_sees_pictures(kind, tmp_path):
    tower = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 14}
    if kind == "qwen3_5":
        text = transformers.Qwen3_5TextConfig(**DEEP, **DELTA, head_dim=16).to_dict()
        tower |= {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
        config = transformers.Qwen3_5Config(text_config=text, vision_config=tower)
        make_theirs = transformers.Qwen3_5ForConditionalGeneration
    else:
        text = transformers.Gemma3TextConfig(**LAYERED)
        tower |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
        sizes = {"vision_config": tower, "mm_tokens_per_image": 4}
        config = transformers.Gemma3Config(text_config=text, **sizes)
        make_theirs = transformers.Gemma3ForConditionalGeneration
    torch.manual_seed(0)
    theirs = make_theirs(config).eval()
    for p in theirs.parameters():
        p.add_(0.15 * torch.randn(p.shape))
    theirs.save_pretrained(tmp_path)
    if "older" in kind:
        file = tmp_path / "model.safetensors"
        new = {
            key.replace("model.language_model.", "language_model.model."): weight
            for key, weight in load_file(file).items()
        }
        save_file(new, file, metadata={"format": "pt"})
    ours, _ = from_pretrained(tmp_path)
    ids, _, _ = ragged()
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
    assert ours.config.model_type == f"{kind.split(',')[0]}_text"
    assert ours.config.eos_token_id == 1
