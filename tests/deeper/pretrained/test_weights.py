"""Weights that cannot be taken as they stand: two of one name, types of 8 bits, several types."""

import json
import re
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.beyond.pictures.picture_parts import PictureConfig
from minillm.beyond.pictures.pictures import PictureLM
from minillm.beyond.pictures.vision import VisionTransformer
from minillm.beyond.pictures.vision_parts import VisionConfig
from minillm.beyond.two_sequences.seq2seq import EncoderDecoder, Seq2SeqConfig
from minillm.config import ModelConfig
from minillm.deeper.pictures.qwen_vl import QwenVisionConfig, QwenVL, QwenVLConfig
from minillm.deeper.pretrained.load import save_pretrained
from minillm.model import CausalLM

FILE = "model.safetensors"
SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 16}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TOWER = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "intermediate_size": 16,
         "num_hidden_layers": 1, "num_attention_heads": 2}  # fmt: skip
QWEN = QwenVisionConfig(hidden_size=32, depth=1, embed_dim=16, num_heads=2, patch_size=4)
TOKENS = {"image_token_id": 36, "video_token_id": 37, "vision_start_token_id": 38}
TOKENS |= {"vision_end_token_id": 39, "mrope_section": (2, 1, 1)}
MODELS = {
    **{
        family: lambda family=family: CausalLM(ModelConfig(**SIZES, model_type=family))
        for family in ("llama", "gpt2", "falcon")
    },
    "mixtral": lambda: CausalLM(
        ModelConfig(**SIZES, model_type="mixtral", num_experts=2, num_experts_per_tok=1)
    ),
    "siglip": lambda: VisionTransformer(VisionConfig("siglip_vision_model", **TOWER)),
    "llava": lambda: PictureLM(
        PictureConfig(VisionConfig("clip_vision_model", **TOWER), ModelConfig(**SIZES), 9)
    ),
    "qwen2_vl": lambda: QwenVL(
        QwenVLConfig(ModelConfig(**SIZES, **IDS, model_type="qwen2"), QWEN, **TOKENS)
    ),
    "bart": lambda: EncoderDecoder(
        Seq2SeqConfig(vocab_size=40, d_model=16, max_position_embeddings=24)
    ),
}  # fmt: skip


def saved(name, folder):
    """The class of a small model, whose files are in the folder now."""
    model = MODELS[name]()
    if isinstance(model, CausalLM):
        save_pretrained(model, None, folder)
    else:
        model.save_pretrained(folder)
    return type(model)


def change(folder, change):
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file({k: v.clone() for k, v in tensors.items()}, folder / FILE)


TWO = [  # a name that the file has, and another that comes to the same
    ("gpt2", "transformer.wte.weight", "wte.weight"),
    ("gpt2", "transformer.h.1.attn.c_attn.bias", "h.1.attn.c_attn.bias"),
    ("falcon", "transformer.ln_f.weight", "model.norm.weight"),
    ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
    ("siglip", "embeddings.patch_embedding.bias", "patch_embedding.bias"),
    ("llava", "language_model.model.norm.weight", "model.language_model.norm.weight"),
    ("llava", "language_model.lm_head.weight", "lm_head.weight"),
    ("bart", "model.encoder.layers.0.fc1.bias", "encoder.layers.0.fc1.bias"),
    ("qwen2_vl", "model.norm.weight", "model.language_model.norm.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "one", "two"), TWO)
def test_two_tensors_that_are_one_weight_are_refused(name, one, two, tmp_path):
    kind = saved(name, tmp_path)
    kind.from_pretrained(tmp_path)
    change(tmp_path, lambda t: t.update({two: t[one] + 1}))
    with pytest.raises(ValueError) as caught:
        kind.from_pretrained(tmp_path)
    assert two in str(caught.value) or one in str(caught.value)
    assert "are one weight to us" in str(caught.value) or "under two names" in str(caught.value)


def test_experts_one_by_one_and_together_are_refused(tmp_path):
    kind = saved("mixtral", tmp_path)
    together = {"model.layers.1.mlp.experts.down_proj": torch.zeros(2, 32, 16)}
    change(tmp_path, lambda t: t.update(together))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj is there, and besid"):
        kind.from_pretrained(tmp_path)


def test_a_config_may_claim_any_number_of_experts(tmp_path):
    """A name for each of them would not fit into memory."""
    kind = saved("mixtral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 2**31 - 1}))
    message = r"missing: .*\.experts\.2\.gate_proj\.weight, .*, of 2147483647 experts"
    with pytest.raises(ValueError, match=message):
        kind.from_pretrained(tmp_path)


def test_a_header_that_names_a_tensor_twice_is_refused(tmp_path):
    """The library takes the last of the two: a weight of 16 bits may be read in two ways."""
    kind = saved("llama", tmp_path)
    change(tmp_path, lambda t: t.update({k: v.half() for k, v in t.items()}))
    data = (tmp_path / FILE).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    again = {**header["model.norm.weight"], "dtype": "BF16"}
    text = json.dumps(header)[:-1] + f', "model.norm.weight": {json.dumps(again)}}}'
    (tmp_path / FILE).write_bytes(struct.pack("<Q", len(text)) + text.encode() + data[8 + size :])
    with pytest.raises(ValueError, match=r"header of .* holds the key 'model\.norm\.weight' twice"):
        kind.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_8_bits_are_refused_by_name(name, tmp_path):
    kind = saved(name, tmp_path)
    last = sorted(load_file(tmp_path / FILE))[-1]

    def all_narrow(tensors):
        tensors.update({k: v.to(torch.float8_e4m3fn) for k, v in tensors.items()})

    for narrow in (lambda t: t.update({last: t[last].to(torch.float8_e5m2)}), all_narrow):
        change(tmp_path, narrow)
        with pytest.raises(ValueError, match=r"holds torch\.float8_.*not .* of 16 to 64 bits"):
            kind.from_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"unknown dtype torch\.float8_e4m3fn for weights"):
            kind.from_pretrained(tmp_path, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_of_several_types_becomes_a_model_of_one(name, tmp_path):
    kind = saved(name, tmp_path)
    tensors = load_file(tmp_path / FILE)
    last = max(k for k in tensors if re.search("(fc1|c_fc|up_proj|h_to_4h|w1).weight", k))
    change(tmp_path, lambda t: t.update({last: t[last].bfloat16()}))
    found = kind.from_pretrained(tmp_path)
    found = found[0] if isinstance(found, tuple) else found
    assert {p.dtype for p in found.parameters()} == {torch.float32}
