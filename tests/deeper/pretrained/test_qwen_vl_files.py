"""Qwen2-VL's files: old and new names, flat and nested configs, sharded, damaged, refused."""

import json
import re

import pytest
import torch
import transformers
from qwen_vl_checkpoints import CASES, LAYOUTS, draw, make, pair
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLForConditionalGeneration

from minillm.deeper.pictures.qwen_vl import QwenVL
from minillm.deeper.pretrained.qwen_vl import read_config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# The config of Qwen/Qwen2-VL-2B-Instruct, as its file has it: flat, with older spellings.
PUBLISHED = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 1536,
    "initializer_range": 0.02, "intermediate_size": 8960, "max_position_embeddings": 32768,
    "max_window_layers": 28, "model_type": "qwen2_vl", "num_attention_heads": 12,
    "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16,
                      "in_chans": 3, "hidden_size": 1536, "patch_size": 14,
                      "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 151936,
}  # fmt: skip


def run(model, seed=0):
    x, _, pixels, grids, kw = draw(model.config, LAYOUTS["several"], seed=seed)
    return model(x, pixels, grids), kw, x


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_what_we_write_transformers_reads(name, tmp_path):
    theirs, ours = pair(name, tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again, info = Qwen2VLForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info[kind] for kind in info), info
    mine, kw, x = run(ours)
    expected = theirs(input_ids=x, **kw).logits
    torch.testing.assert_close(again(input_ids=x, **kw).logits, expected)
    back = QwenVL.from_pretrained(tmp_path / "ours")
    assert back.config == ours.config and torch.equal(run(back)[0], mine)
    names = load_file(tmp_path / "theirs" / "model.safetensors").keys()
    assert names == load_file(tmp_path / "ours" / "model.safetensors").keys()


@torch.no_grad()
def test_newer_names_several_files_and_older_configs_are_read(tmp_path):
    theirs, ours = pair("plain", tmp_path)
    expected = run(ours)[0]
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert torch.equal(run(QwenVL.from_pretrained(tmp_path / "shards"))[0], expected)
    newer = theirs.state_dict()  # the names that the model has in memory
    assert {k.split(".")[1] for k in newer} == {"visual", "language_model", "weight"}
    save_file(newer, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(run(QwenVL.from_pretrained(tmp_path))[0], expected)
    data = json.loads((tmp_path / "config.json").read_text())
    flat = {**data, **data.pop("text_config"), "model_type": "qwen2_vl"}
    del flat["text_config"]
    table = flat.pop("rope_parameters")
    flat["rope_theta"] = table["rope_theta"]
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": table["mrope_section"]}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert torch.equal(run(QwenVL.from_pretrained(tmp_path))[0], expected)
    again = Qwen2VLForConditionalGeneration.from_pretrained(tmp_path)
    _, kw, x = run(ours)
    torch.testing.assert_close(again(input_ids=x, **kw).logits, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.filterwarnings("error")
def test_the_published_config_is_read_as_transformers_reads_it():
    ours = read_config(PUBLISHED)
    theirs = transformers.AutoConfig.for_model(**PUBLISHED)
    for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(ours.text, name) == getattr(theirs.text_config, name)
    assert ours.text.rope_theta == theirs.text_config.rope_parameters["rope_theta"]
    assert list(ours.mrope_section) == theirs.text_config.rope_parameters["mrope_section"]
    for name in ("depth", "embed_dim", "num_heads", "patch_size", "hidden_size", "hidden_act"):
        assert getattr(ours.vision, name) == getattr(theirs.vision_config, name)
    assert ours.text.tie_word_embeddings and theirs.tie_word_embeddings
    assert ours.text.sliding_window is None and ours.image_token_id == 151655
    half = read_config({"model_type": "qwen2_vl", "vision_config": {"hidden_size": 8192}})
    full = transformers.Qwen2VLConfig().text_config
    assert half.text.hidden_size == full.hidden_size == 8192
    assert half.text.eos_token_id == full.eos_token_id
    assert half.text.rope_theta == full.rope_parameters["rope_theta"]


@pytest.mark.parametrize("text, base", [({}, 1e6), ({"rope_parameters": {"rope_theta": 2e4}}, 2e4)])
def test_the_base_of_positions_is_the_files_in_silence(text, base, recwarn):
    vision = {"hidden_size": 8192, "depth": 1}
    config = read_config({"model_type": "qwen2_vl", "text_config": text, "vision_config": vision})
    assert config.text.rope_theta == base and not recwarn.list


def test_a_bare_config_has_a_tower_that_does_not_fit():
    with pytest.raises(ValueError, match="vectors of 3584, the language model reads 8192"):
        read_config({"model_type": "qwen2_vl", "vision_config": {}})


@torch.no_grad()
def test_dtypes_ends_and_ties(tmp_path):
    make("tied", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    model = QwenVL.from_pretrained(tmp_path)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert model.language.lm_head.weight is model.language.model.embed_tokens.weight
    assert not model.training and model.language.model.rotary.inv_freq.dtype == torch.float32
    wide = QwenVL.from_pretrained(tmp_path, dtype="float32")
    assert wide.visual.patch_embed.weight.dtype == torch.float32
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert QwenVL.from_pretrained(tmp_path).config.text.eos_token_ids == (2, 7)
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        QwenVL.from_pretrained(tmp_path, dtype="int8")
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "generation_config.json").exists()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the emb"):
        QwenVL.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError):
        QwenVL.from_pretrained(str(tmp_path / "nowhere"))


def _rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("visual.merger.ln_q.bias"), "missing: visual.merger.ln_q.bias"),
        (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
        (
            lambda t: _rename(t, "visual.blocks.0.attn.qkv.bias", "visual.blocks.0.attn.q.bias"),
            r"missing: visual.blocks.0.attn.qkv.bias; unexpected: visual.blocks.0.attn.q.bias",
        ),
        (
            lambda t: t.update({"visual.patch_embed.proj.weight": torch.zeros(16, 3, 1, 4, 4)}),
            r"proj.weight is \(16, 48\), the config wants \(16, 96\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
            "model.norm.weight holds torch.int8",
        ),
        (
            lambda t: t.update({"model.language_model.norm.weight": torch.zeros(32)}),
            "model.norm.weight and model.norm.weight are one weight",
        ),
        (
            lambda t: [t.pop(k) for k in list(t) if "blocks.1." in k],
            "missing: visual.blocks.1 .by the config there are 2, and weights of 1",
        ),
        (
            lambda t: [t.pop(k) for k in list(t) if "model.layers.0." in k],
            "missing: model.layers.0 .by the config there are 2, and weights of 1",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(change, message, tmp_path):
    make("plain", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        QwenVL.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2_5_vl"}, "'qwen2_5_vl', and not qwen2_vl"),
        ({"vision": {"window_size": 112}}, "what is not computed: window_size"),
        ({"vision": {"in_chans": 1}}, "in_chans=1 is not in_channels=3"),
        ({"vision": {"rope_parameters": {"rope_type": "linear"}}}, "rope_type='linear'"),
        ({"vision": {"patch_size": [4, 4]}}, r"patch_size must be a whole number .*, not \[4, 4"),
        ({"text": {"rope_parameters": {"rope_type": "mystery"}}}, "mystery"),
        ({"text": {"use_sliding_window": True, "sliding_window": 8}}, "mrope|sliding window"),
        ({"image_token_id": 4000}, "image_token_id=4000, but ids are 0 to 95"),
    ],
)
def test_configs_that_are_not_computed_are_refused(changes, message, tmp_path):
    make("plain", tmp_path)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    for part in ("text", "vision"):
        if part in changes:
            data[f"{part}_config"] |= changes[part]
    data |= {k: v for k, v in changes.items() if k not in ("text", "vision")}
    if "use_sliding_window" in changes.get("text", {}):
        data["text_config"] |= {"layer_types": ["full_attention", "sliding_attention"]}
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        QwenVL.from_pretrained(tmp_path)


def test_a_text_that_the_files_cannot_hold_is_not_saved(tmp_path):
    from dataclasses import replace

    _, model = pair("plain", tmp_path)
    object.__setattr__(model.config, "text", replace(model.config.text, attention_bias=True))
    with pytest.raises(ValueError, match=re.escape("no place for attention_bias=True")):
        model.save_pretrained(tmp_path)
