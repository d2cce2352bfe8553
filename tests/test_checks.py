"""Checks of what callers hand in."""

import pytest
import torch

from minillm.checks import check_mask
from minillm.config import ModelConfig
from minillm.generation.decoding import generate
from minillm.model import CausalLM
from minillm.nn.mllama import MllamaConfig, MllamaText
from minillm.nn.qwen_vl import QwenVisionConfig, QwenVL, QwenVLConfig
from minillm.nn.seq2seq import EncoderDecoder, Seq2SeqConfig
from minillm.nn.vision import VisionConfig
from minillm.nn.vlm import PictureConfig, PictureLM

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 16}
IDS = torch.tensor([[3, 5, 6, 7]])
TOWER = VisionConfig(image_size=16, patch_size=8, hidden_size=16, intermediate_size=16,
                     num_hidden_layers=1, num_attention_heads=2)  # fmt: skip
QWEN = QwenVisionConfig(hidden_size=32, depth=1, embed_dim=16, num_heads=2, patch_size=4)
MODELS = {
    "decoder": lambda: CausalLM(ModelConfig(**SIZES)),
    "packed": lambda: CausalLM(ModelConfig(**SIZES)).packed(),
    "LLaVA": lambda: PictureLM(PictureConfig(TOWER, ModelConfig(**SIZES), 9)),
    "Qwen2-VL": lambda: QwenVL(
        QwenVLConfig(ModelConfig(**SIZES, model_type="qwen2"), QWEN, image_token_id=36,
                     video_token_id=37, vision_start_token_id=38, vision_end_token_id=39,
                     mrope_section=(2, 1, 1))
    ),
    "Mllama": lambda: MllamaText(MllamaConfig(ModelConfig(**SIZES), (1,))),
    "encoder and decoder": lambda: EncoderDecoder(
        Seq2SeqConfig(vocab_size=40, d_model=16, max_position_embeddings=24)
    ),
}  # fmt: skip


def calls(model):
    """What a mask can be given to."""
    if isinstance(model, EncoderDecoder):
        yield lambda mask: model(IDS, IDS, attention_mask=mask)
        yield lambda mask: model(IDS, IDS, decoder_attention_mask=mask)
        yield lambda mask: model.generate(IDS, max_new_tokens=2, attention_mask=mask)
        return
    yield lambda mask: model(IDS, attention_mask=mask)
    write = model.generate if hasattr(model, "generate") else lambda x, **o: generate(model, x, **o)
    yield lambda mask: write(IDS, max_new_tokens=1, attention_mask=mask)
    yield lambda mask: write(IDS, max_new_tokens=0, attention_mask=mask)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_mask_of_floating_point_numbers_is_refused(name):
    """0.5 would count as a token in one place and as padding in another."""
    model = MODELS[name]().eval()
    for call in calls(model):
        for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64):
            call(torch.ones(1, 4, dtype=dtype))
        for mask in (torch.full((1, 4), 0.5), torch.ones(1, 4, dtype=torch.float16)):
            with pytest.raises(ValueError, match=f"is {mask.dtype}; it must be bool or an integer"):
                call(mask)


def test_no_number_of_a_mask_is_asked_for():
    for dtype in (torch.float32, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"^the mask is {dtype}; it must be bool or an integ"):
            check_mask(torch.ones(2, 3, dtype=dtype, device="meta"), "the mask")
    check_mask(torch.ones(2, 3, dtype=torch.bool, device="meta"))
    check_mask(None)
