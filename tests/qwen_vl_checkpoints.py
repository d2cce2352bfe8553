"""Tiny Qwen2-VL models of transformers with random weights, and texts with pictures for them."""

from pathlib import Path

import torch
import transformers
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLForConditionalGeneration

from minillm.deeper.pictures.qwen_vl import QwenVL

IMAGE, VIDEO, START, END, PAD = 90, 91, 92, 93, 0
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD,
    "rope_parameters": ROPE,
}  # fmt: skip
VISION = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4,
          "mlp_ratio": 2}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "factor": 4.0,
        "original_max_position_embeddings": 128}  # fmt: skip

CASES = {
    "plain": ({}, {}, {}),
    "tied": ({"num_key_value_heads": 4, "rms_norm_eps": 1e-6}, {}, {"tie_word_embeddings": True}),
    "merge-3": (
        {"num_attention_heads": 2, "num_key_value_heads": 1,
         "rope_parameters": {**ROPE, "rope_theta": 500.0, "mrope_section": [1, 3, 4]}},
        {"spatial_merge_size": 3, "patch_size": 3, "temporal_patch_size": 1, "num_heads": 1,
         "mlp_ratio": 1, "hidden_act": "gelu"},
        {},
    ),
    "merge-1": (
        {"hidden_act": "gelu", "num_hidden_layers": 1},
        {"spatial_merge_size": 1, "in_channels": 1, "temporal_patch_size": 3, "num_heads": 4},
        {},
    ),
    "yarn": ({"rope_parameters": YARN}, {"rope_parameters": {"rope_type": "axial",
                                                             "rope_theta": 100.0}}, {}),
    "no-time": (
        {"rope_parameters": {**ROPE, "rope_theta": 1e6, "mrope_section": [0, 1, 3]}},
        {"embed_dim": 24, "num_heads": 3, "depth": 1, "hidden_act": "silu"},
        {},
    ),
}  # fmt: skip


def make(name: str, folder: Path, **changes: object) -> Qwen2VLForConditionalGeneration:
    """The model, saved in `folder`; weights are drawn so that every part matters."""
    text, vision, whole = CASES[name]
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    config = transformers.AutoConfig.for_model(
        "qwen2_vl",
        text_config={**TEXT, **text},
        vision_config={**VISION, **vision},
        **{**tokens, "vision_end_token_id": END, **whole, **changes},
    )
    model = Qwen2VLForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, p in model.named_parameters():
            norm = any(part in key for part in ("norm", "ln_q")) and key.endswith("weight")
            p.copy_(0.25 * torch.randn(p.shape, generator=generator) + norm)
    model.save_pretrained(folder)
    return model


def pair(name: str, folder: Path, **changes: object):
    """The model of transformers, and ours read from its files."""
    theirs = make(name, folder, **changes)
    return theirs, QwenVL.from_pretrained(folder)


def draw(config, layouts, *, seed=0, side="left"):
    """Texts with pictures: each row a list of numbers (so much text) and grids (t, h, w).

    Grids count merged squares; t > 1 is a film. Gives ids, mask, pixels and grids in order, and
    what transformers asks for: pictures and films apart, and the type of each token.
    """
    generator = torch.Generator().manual_seed(seed)
    m, numbers = config.vision.spatial_merge_size, config.vision.patch_numbers
    rows, grids, pixels = [], [], []
    for layout in layouts:
        ids = []
        for part in layout:
            if isinstance(part, int):
                ids += torch.randint(3, IMAGE, (part,), generator=generator).tolist()
                continue
            t, h, w = part
            ids += [VIDEO if t > 1 else IMAGE] * (t * h * w)
            grids.append((t, h * m, w * m))
            pixels.append(torch.randn(t * h * w * m * m, numbers, generator=generator))
        rows.append(ids)
    longest = max(map(len, rows))
    x, mask = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(2))
    for i, ids in enumerate(rows):
        place = slice(longest - len(ids), None) if side == "left" else slice(len(ids))
        x[i, place], mask[i, place] = torch.tensor(ids), 1
    theirs = {"mm_token_type_ids": (x == IMAGE).int() + 2 * (x == VIDEO).int()}
    for name, films in (("image", False), ("video", True)):
        chosen = [i for i, g in enumerate(grids) if (g[0] > 1) == films]
        if chosen:
            theirs[f"{name}_grid_thw"] = torch.tensor([grids[i] for i in chosen])
            key = "pixel_values_videos" if films else "pixel_values"
            theirs[key] = torch.cat([pixels[i] for i in chosen])
    return x, mask, torch.cat(pixels), torch.tensor(grids), theirs


LAYOUTS = {
    "one": [[4, (1, 2, 3), 3]],
    "first": [[(1, 3, 2), 5]],
    "last": [[6, (1, 2, 2)]],
    "several": [[2, (1, 2, 3), 1, (1, 1, 4), 3, (1, 2, 1), 2]],
    "batch": [[3, (1, 3, 1), 2], [(1, 2, 2), 4, (1, 1, 1), 1], [2, (1, 2, 3), 9]],
    "film": [[2, (3, 2, 4), 3, (1, 2, 2), 2], [1, (2, 3, 2), 1]],
}
