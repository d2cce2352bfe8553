"""Tiny ViT, SigLIP, CLIP and LLaVA models of transformers with random weights, in odd shapes."""

from pathlib import Path

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    Qwen2Config,
    SiglipVisionConfig,
    ViTConfig,
)
from transformers.models.clip.modeling_clip import CLIPVisionModel
from transformers.models.siglip.modeling_siglip import SiglipVisionModel
from transformers.models.vit.modeling_vit import ViTModel

BASE = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "image_size": 24, "patch_size": 8,
}  # fmt: skip
KINDS = {
    "vit": (ViTConfig, ViTModel),
    "siglip": (SiglipVisionConfig, SiglipVisionModel),
    "clip": (CLIPVisionConfig, CLIPVisionModel),
}
TOWERS = {
    "vit": ("vit", {}),
    "vit-not-square": ("vit", {"image_size": [16, 32], "patch_size": [8, 4]}),
    "vit-no-bias": ("vit", {"qkv_bias": False, "num_channels": 1, "hidden_act": "relu"}),
    "vit-uneven-heads": ("vit", {"hidden_size": 26, "patch_size": 6}),
    "vit-pooler": ("vit", {"pooler_output_size": 7, "pooler_act": "relu", "layer_norm_eps": 1e-5}),
    "siglip": ("siglip", {}),
    "siglip-left-over": ("siglip", {"image_size": 23, "patch_size": 6}),
    "siglip-one-head": ("siglip", {"num_attention_heads": 1, "patch_size": 12, "num_channels": 2}),
    "siglip-no-pool": ("siglip", {"vision_use_head": False, "hidden_act": "gelu"}),
    "siglip-one-layer": ("siglip", {"num_hidden_layers": 1, "hidden_size": 12, "patch_size": 4}),
    "clip": ("clip", {}),
    "clip-one-patch": ("clip", {"patch_size": 24, "intermediate_size": 7}),
    "clip-left-over": ("clip", {"image_size": 17, "patch_size": 5}),
    "clip-gelu": ("clip", {"hidden_act": "gelu", "num_attention_heads": 6, "layer_norm_eps": 1e-3}),
}


def draw(model, seed=0):
    """Weights large enough that every part counts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            weight.normal_(1.0 if norm else 0.0, 0.2, generator=generator)
    return model.eval()


def make_tower(case):
    """transformers' model of a case."""
    kind, changes = TOWERS[case]
    config_class, model_class = KINDS[kind]
    config = config_class(**{**BASE, **changes})
    config._attn_implementation = "eager"
    return draw(model_class(config))


def pictures_for(config, count=2, seed=1):
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, config.num_channels, height, width, generator=generator)


TEXT = {
    "vocab_size": 60, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAVAS = {
    "clip-llama": ("clip", {}, LlamaConfig, {}, {}),
    "clip-last-full": ("clip", {}, LlamaConfig, {}, {
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "clip-two-layers": ("clip", {}, LlamaConfig, {"tie_word_embeddings": True}, {
        "vision_feature_layer": [-3, -1], "multimodal_projector_bias": False,
        "tie_word_embeddings": True}),
    "siglip-qwen2": ("siglip", {"vision_use_head": False}, Qwen2Config, {}, {
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu_pytorch_tanh"}),
    "siglip-head": ("siglip", {}, LlamaConfig, {"attention_bias": True}, {
        "vision_feature_layer": 1, "vision_feature_select_strategy": "full"}),
    "clip-mistral": ("clip", {}, MistralConfig, {"sliding_window": 7}, {
        "vision_feature_layer": 1, "projector_hidden_act": "relu"}),
    "vit-llama": ("vit", {"image_size": [16, 32]}, LlamaConfig, {}, {"vision_feature_layer": -1}),
}  # fmt: skip
PLACEHOLDER = 5


def make_llava(case):
    """transformers' LLaVA of a case."""
    kind, vision, text_class, text, changes = LLAVAS[case]
    config = LlavaConfig(
        vision_config=KINDS[kind][0](**{**BASE, **vision}),
        text_config=text_class(**{**TEXT, **text}),
        image_token_index=PLACEHOLDER,
        **changes,
    )
    config._attn_implementation = "eager"
    return draw(LlavaForConditionalGeneration(config))


def save(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
