"""Files of ViT, SigLIP, CLIP and LLaVA: read, written, of older ages, damaged, refused."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from vision_checkpoints import (
    BASE,
    KINDS,
    LLAVAS,
    PLACEHOLDER,
    TOWERS,
    make_llava,
    make_tower,
    pictures_for,
)

from minillm.beyond.pictures.picture_parts import PictureConfig
from minillm.beyond.pictures.pictures import PictureLM
from minillm.beyond.pictures.vision import VisionTransformer
from minillm.beyond.pictures.vision_parts import VisionConfig
from minillm.config import ModelConfig
from minillm.deeper.pretrained.vision import read_config, read_llava_config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
FILE = "model.safetensors"


@pytest.mark.parametrize("case", TOWERS)
@torch.no_grad()
def test_towers_that_we_write_transformers_reads(case, tmp_path):
    theirs = make_tower(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = VisionTransformer.from_pretrained(tmp_path / "theirs")
    assert not ours.training
    ours.save_pretrained(tmp_path / "ours")
    model_class = KINDS[TOWERS[case][0]][1]
    again, info = model_class.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[kind] for kind in info), info
    pixels = pictures_for(theirs.config)
    expected = theirs(pixels).last_hidden_state
    torch.testing.assert_close(again(pixels).last_hidden_state, expected)
    back = VisionTransformer.from_pretrained(tmp_path / "ours")
    assert back.config == ours.config and torch.equal(back(pixels), ours(pixels))
    names = [set(load_file(tmp_path / who / FILE)) for who in ("theirs", "ours")]
    assert names[0] == names[1]


@pytest.mark.parametrize("case", LLAVAS)
@torch.no_grad()
def test_llavas_that_we_write_transformers_reads(case, tmp_path):
    theirs = make_llava(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = PictureLM.from_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again, info = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info[kind] for kind in info), info
    ids = torch.tensor([[7, *[PLACEHOLDER] * ours.config.features_per_picture, 8, 9]])
    pixels = pictures_for(theirs.config.vision_config, 1)
    expected = theirs(input_ids=ids, pixel_values=pixels).logits
    torch.testing.assert_close(again(input_ids=ids, pixel_values=pixels).logits, expected)
    back = PictureLM.from_pretrained(tmp_path / "ours")
    assert back.config == ours.config
    assert torch.equal(back(ids, pixels=pixels), ours(ids, pixels=pixels))
    names = [set(load_file(tmp_path / who / FILE)) for who in ("theirs", "ours")]
    assert names[0] == names[1]


@torch.no_grad()
def test_older_names_and_towers_within_larger_models(tmp_path):
    theirs = make_tower("vit")
    theirs.save_pretrained(tmp_path)
    ours = VisionTransformer.from_pretrained(tmp_path)
    tensors = {f"vit.{k}": v for k, v in load_file(tmp_path / FILE).items() if "pooler" not in k}
    tensors["classifier.weight"] = torch.zeros(5, 24)
    save_file(tensors, tmp_path / FILE)
    classifier = VisionTransformer.from_pretrained(tmp_path)
    assert not classifier.config.vision_use_head
    pixels = pictures_for(theirs.config)
    assert torch.equal(classifier(pixels), ours(pixels))
    for kind in ("siglip", "clip"):
        tower = make_tower(kind)
        tower.save_pretrained(tmp_path / kind)
        ours = VisionTransformer.from_pretrained(tmp_path / kind)
        inside = {f"vision_model.{k}": v for k, v in load_file(tmp_path / kind / FILE).items()}
        inside["text_model.embeddings.token_embedding.weight"] = torch.zeros(3, 4)
        inside["vision_model.embeddings.position_ids"] = torch.arange(3)
        save_file(inside, tmp_path / kind / FILE)
        data = {"model_type": kind, "vision_config": BASE}
        (tmp_path / kind / "config.json").write_text(json.dumps(data))
        whole = VisionTransformer.from_pretrained(tmp_path / kind)
        assert torch.equal(whole(pixels), ours(pixels))


OLD = [
    {"vision_tower.": "vision_tower.vision_model."},
    {
        "vision_tower.": "model.vision_tower.",
        "multi_modal": "model.multi_modal",
        "language_model.lm_head.": "lm_head.",
        "language_model.model.": "model.language_model.",
    },
]


@pytest.mark.parametrize("changes", OLD)
@torch.no_grad()
def test_llavas_of_other_ages(changes, tmp_path):
    make_llava("clip-llama").save_pretrained(tmp_path)
    ours = PictureLM.from_pretrained(tmp_path)
    tensors = {}
    for name, tensor in load_file(tmp_path / FILE).items():
        old = next((p for p in changes if name.startswith(p)), "")
        tensors[changes.get(old, "") + name.removeprefix(old)] = tensor
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    back = PictureLM.from_pretrained(tmp_path)
    assert back.config.text_config.eos_token_ids == (2, 9)
    ids, pixels = torch.tensor([[6, *[PLACEHOLDER] * 9, 8]]), torch.randn(1, 3, 24, 24)
    assert torch.equal(back(ids, pixels=pixels), ours(ids, pixels=pixels))


def test_the_shortest_config_means_llava_7b():
    """llava-hf/llava-1.5-7b-hf says no more of its text than this."""
    data = {
        "model_type": "llava", "image_token_index": 32000, "projector_hidden_act": "gelu",
        "text_config": {"model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5,
                        "max_position_embeddings": 4096},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024,
                          "image_size": 336, "intermediate_size": 4096, "patch_size": 14,
                          "num_attention_heads": 16, "num_hidden_layers": 24},
        "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
    }  # fmt: skip
    ours, theirs = read_llava_config(data), transformers.LlavaConfig(**data)
    assert ours.features_per_picture == 576
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(ours.text_config, name) == getattr(theirs.text_config, name)
        assert getattr(ours.vision_config, name) == getattr(theirs.vision_config, name)
    assert ours.text_config.rope_theta == 10000.0
    assert ours.vision_config.hidden_act == theirs.vision_config.hidden_act
    assert ours.vision_config.layer_norm_eps == theirs.vision_config.layer_norm_eps


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_config_means_what_transformers_takes_it_to_mean(kind):
    theirs = KINDS[kind][0]()
    ours = read_config({"model_type": theirs.model_type})
    for name in ("image_size", "patch_size", "hidden_act", "layer_norm_eps", *BASE):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_trained_weights_dtypes_and_what_was_there(tmp_path):
    make_llava("clip-two-layers").save_pretrained(tmp_path)
    model = PictureLM.from_pretrained(tmp_path)
    assert model.language_model.lm_head.weight is model.language_model.model.embed_tokens.weight
    ids, pixels = torch.tensor([[6, *[PLACEHOLDER] * 9, 8]]), torch.randn(1, 3, 24, 24)
    model(ids, pixels=pixels).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.0 if p.grad is None else 0.01 * p.grad
    model.save_pretrained(tmp_path)
    assert torch.equal(
        PictureLM.from_pretrained(tmp_path)(ids, pixels=pixels), model(ids, pixels=pixels)
    )
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    narrow = PictureLM.from_pretrained(tmp_path)
    assert all(p.dtype == torch.bfloat16 for p in narrow.parameters())
    wide = PictureLM.from_pretrained(tmp_path, dtype="float32")
    assert all(p.dtype == torch.float32 for p in wide.parameters())
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        PictureLM.from_pretrained(tmp_path, dtype="int8")


NORM = "encoder.layers.1.layer_norm1.weight"
FC1 = "encoder.layers.2.mlp.fc1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), r"missing: encoder\.layers\.1\.layer_norm1\.weight"),
        (lambda t: t.update(strange=t[NORM]), "unexpected: strange"),
        (lambda t: t.update({FC1: t[FC1][:5]}), r"fc1\.weight is \(5, 24\), .* \(40, 24\)"),
        (lambda t: t.update({FC1: t[FC1].int()}), r"fc1\.weight holds torch\.int32"),
        (
            lambda t: [t.pop(k) for k in list(t) if "layers.1." in k],
            r"missing: encoder\.layers\.1 \(by",
        ),
        (lambda t: t.pop("head.attention.in_proj_bias"), r"missing: head\.attention\.k_proj\.bias"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message, tmp_path):
    make_tower("siglip").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE)
    change(tensors)
    save_file({k: v.clone() for k, v in tensors.items()}, tmp_path / FILE)
    with pytest.raises(ValueError, match=message):
        VisionTransformer.from_pretrained(tmp_path)


PROJECTOR = "multi_modal_projector.linear_1.weight"
TEXT = "language_model.model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(PROJECTOR), f"missing: {PROJECTOR}"),
        (lambda t: t.pop(TEXT), f"missing: {TEXT}"),
        (lambda t: t.update({PROJECTOR: t[PROJECTOR][:, :3]}), r"is \(20, 3\), the config wants"),
        (lambda t: t.update(audio_tower=t[TEXT]), "unexpected: audio_tower"),
        (
            lambda t: [t.pop(k) for k in list(t) if "model.layers.1." in k],
            r"missing: language_model\.model\.layers\.1 \(by",
        ),
    ],
)
def test_weights_of_a_llava_that_do_not_fit_are_named(change, message, tmp_path):
    make_llava("clip-llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE)
    change(tensors)
    save_file({k: v.clone() for k, v in tensors.items()}, tmp_path / FILE)
    with pytest.raises(ValueError, match=message):
        PictureLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model_type": "beit"}, "unknown model_type 'beit' of a picture tower; known are vit"),
        ({"model_type": "vit", "hidden_dropout_prob": 0.1}, "hidden_dropout_prob=0.1 of a vit"),
        (
            {"model_type": "siglip", "vision_config": {"attention_dropout": 0.2}},
            "attention_dropout=0.2",
        ),
        ({"model_type": "vit", "head_dim": 5}, "head_dim=5 of a vit config is not computed"),
        ({"model_type": "vit", "quantization_config": {}}, "quantization_config={} of a vit"),
        ({"model_type": "vit", "hidden_act": "mish"}, "'mish' is unknown: choose one of relu"),
    ],
)
def test_configs_that_are_not_computed(data, message):
    with pytest.raises(ValueError, match=message):
        read_config(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model_type": "llava_next"}, "unknown model_type 'llava_next'; known is llava"),
        ({"model_type": "llava", "text_config": {"model_type": "gemma3"}}, "unknown model_type"),
        ({"model_type": "llava", "vision_config": {"model_type": "pixtral"}}, "'pixtral' of a"),
        ({"model_type": "llava", "image_token_index": 32001}, "image_token_index=32001, but ids"),
    ],
)
def test_llava_configs_that_are_not_computed(data, message):
    text = {"vocab_size": 32000, "rms_norm_eps": 1e-6}
    with pytest.raises(ValueError, match=message):
        read_llava_config({"text_config": text, **data})


def test_what_files_cannot_hold_is_not_written(tmp_path):
    tower = VisionTransformer(VisionConfig("clip_vision_model", (8, 16), 8, hidden_size=12))
    with pytest.raises(ValueError, match=r"no place for image_size=\(8, 16\): only squares"):
        tower.save_pretrained(tmp_path / "a")
    text = ModelConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                       num_key_value_heads=2, intermediate_size=8)  # fmt: skip
    with pytest.raises(ValueError, match="only squares"):
        PictureLM(PictureConfig(tower.config, text, 3)).save_pretrained(tmp_path / "b")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="no folder"):
        VisionTransformer.from_pretrained(tmp_path / "a")
