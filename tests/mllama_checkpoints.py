"""Tiny text models of Mllama with random weights, and texts with features of pictures for them."""

import torch
from transformers.models.mllama.configuration_mllama import MllamaTextConfig
from transformers.models.mllama.modeling_mllama import (
    MllamaForCausalLM,
    _prepare_cross_attention_mask,
)

from minillm.models.mllama import MllamaText, picture_mask

V, IMAGE = 50, 50
BASE = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "cross_attention_layers": [1, 3], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
CASES = {
    "plain": {},
    "first-and-last": {"cross_attention_layers": [0, 2, 4], "num_key_value_heads": 4},
    "side-by-side": {"cross_attention_layers": [1, 2, 3], "rope_parameters": LLAMA3},
    "one-key-head": {"num_key_value_heads": 1, "num_attention_heads": 8, "hidden_act": "gelu",
                     "rms_norm_eps": 1e-6},
    "nowhere": {"cross_attention_layers": [], "num_hidden_layers": 2},
}  # fmt: skip


def pair(folder, **changes):
    """The model of transformers with random weights and open gates, and ours from its files."""
    theirs = MllamaForCausalLM(MllamaTextConfig(**{**BASE, **changes})).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, p in theirs.named_parameters():
            norm = "norm" in key
            p.copy_(0.25 * torch.randn(p.shape, generator=generator) + norm + ("gate" in key))
    theirs.save_pretrained(folder)
    return theirs, MllamaText.from_pretrained(folder)


def batch(seed=0, rows=3, length=8, pictures=2, features=3):
    """Ids (3, 8) whose pictures stand at 0 and 4, features (3, 6, 32), mask (3, 8, 6)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, V, (rows, length), generator=generator)
    ids[:, 0] = IMAGE
    if pictures > 1:
        ids[:, 4] = IMAGE
    states = torch.randn(rows, pictures * features, 32, generator=generator)
    return ids, states, picture_mask(ids, IMAGE).repeat_interleave(features, 2)


def theirs_masks(mask):
    """Their two masks of ours, by their own function: tiles of one vision token each."""
    return _prepare_cross_attention_mask(mask[:, :, :, None].float(), 1, torch.float32)


def run_theirs(model, ids, states, mask, **options):
    bias, rows = theirs_masks(mask)
    return model(
        input_ids=ids, cross_attention_states=states, cross_attention_mask=bias,
        full_text_row_masked_out_mask=rows, **options,
    )  # fmt: skip
