"""Mllama's files: the text model read and written, beside a tower, damaged, refused."""

import json

import pytest
import torch
import transformers
from mllama_checkpoints import BASE, CASES, IMAGE, V, batch, pair, run_theirs
from safetensors.torch import load_file, save_file
from transformers.models.mllama.configuration_mllama import MllamaConfig as TheirConfig
from transformers.models.mllama.modeling_mllama import (
    MllamaForCausalLM,
    MllamaForConditionalGeneration,
)

from minillm.config import ModelConfig
from minillm.models.mllama import MllamaConfig, MllamaText

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

TOWER = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2,
    "intermediate_size": 16, "vision_output_dim": 32, "image_size": 8, "patch_size": 4,
    "max_num_tiles": 2, "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
}  # fmt: skip


@pytest.fixture(params=CASES)
def both(request, tmp_path):
    return pair(tmp_path, **CASES[request.param])


@torch.no_grad()
def test_what_we_write_transformers_reads(both, tmp_path):
    theirs, ours = both
    ours.save_pretrained(tmp_path / "ours")
    again, info = MllamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[kind] for kind in info), info
    ids, states, mask = batch()
    expected = run_theirs(theirs, ids, states, mask).logits
    torch.testing.assert_close(run_theirs(again, ids, states, mask).logits, expected)
    back = MllamaText.from_pretrained(tmp_path / "ours")
    assert back.config == ours.config
    assert torch.equal(back(ids, states, mask), ours(ids, states, mask))
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    shards = MllamaText.from_pretrained(tmp_path / "shards", dtype=torch.float64)
    assert shards.language.lm_head.weight.dtype == torch.float64


@torch.no_grad()
@pytest.mark.parametrize("newer", [False, True])
def test_a_tower_is_refused_by_name_or_left(newer, tmp_path):
    config = TheirConfig(text_config=BASE, vision_config=TOWER, image_token_index=IMAGE)
    theirs = MllamaForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    if newer:  # the names that the model has in memory
        save_file(theirs.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tower.*multi_modal_projector.bias.*text_only=True"):
        MllamaText.from_pretrained(tmp_path)
    ours = MllamaText.from_pretrained(tmp_path, text_only=True)
    ids = torch.tensor([[5, 6, 7]])
    expected = theirs(input_ids=ids).logits
    torch.testing.assert_close(ours(ids), expected, atol=1e-5, rtol=1e-5)


def damaged(folder, change, name="model.safetensors"):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.cross_attn_attn_gate"),
            "missing: model.layers.1.cross_at",
        ),
        (lambda t: t.update(extra=torch.zeros(1)), "unexpected: extra"),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.zeros(V, 32)}),
            r"model.embed_tokens.weight is \(50, 32\), the config wants \(58, 32\)",
        ),
        (
            lambda t: [t.pop(k) for k in list(t) if ".layers.3." in k],
            "layers are missing: 5 by the config, and weights of 4",
        ),
        (
            lambda t: t.update({"language_model.lm_head.weight": torch.zeros(V, 32)}),
            "lm_head.weight under two names",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(change, message, tmp_path):
    pair(tmp_path)
    damaged(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        MllamaText.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "'llama', and neither mllama_text_model nor mllama"),
        ({"dropout": 0.1}, "dropout=0.1 of a mllama_text_model config is not computed"),
        ({"cross_attention_layers": [7]}, r"\(7,\), but layers are 0 to 4"),
        ({"cross_attention_layers": [3, 1]}, "must ascend"),
        ({"cross_attention_layers": [0, 1, 2, 3, 4]}, "leave some of 5"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ],
)
def test_configs_that_are_not_computed_are_refused(changes, message, tmp_path):
    pair(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=message):
        MllamaText.from_pretrained(tmp_path)


def test_a_text_that_the_files_cannot_hold_is_not_saved(tmp_path):
    model = MllamaText(MllamaConfig(ModelConfig(40, 32, 3, 4, 48), (1,)))
    with pytest.raises(ValueError, match="bos_token_id=None"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
