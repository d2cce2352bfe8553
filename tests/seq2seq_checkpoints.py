"""Tiny BART and Marian models of transformers with random weights, in several odd shapes."""

from pathlib import Path

import torch
import transformers

from minillm.beyond.two_sequences.seq2seq import EncoderDecoder

BASE = {
    "vocab_size": 53, "d_model": 24, "max_position_embeddings": 30, "dropout": 0.0,
    "encoder_layers": 2, "encoder_ffn_dim": 40, "encoder_attention_heads": 4,
    "decoder_layers": 3, "decoder_ffn_dim": 28, "decoder_attention_heads": 3,
}  # fmt: skip
MARIAN = {"pad_token_id": 52, "decoder_start_token_id": 52}
TWO = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 61}

CASES = {
    "bart": ("bart", {}),
    "bart-scaled-relu": (
        "bart",
        {"scale_embedding": True, "encoder_layers": 1, "activation_function": "relu"},
    ),
    "bart-untied": ("bart", {"tie_word_embeddings": False, "forced_eos_token_id": None}),
    "bart-one-head": (
        "bart",
        {"d_model": 10, "encoder_attention_heads": 1, "decoder_attention_heads": 10},
    ),
    "bart-deep-encoder": (
        "bart",
        {"encoder_layers": 4, "decoder_layers": 1, "activation_function": "silu"},
    ),
    "bart-other-ids": (
        "bart",
        {"pad_token_id": 0, "eos_token_id": 5, "decoder_start_token_id": 9, "bos_token_id": 4,
         "forced_eos_token_id": 6},
    ),
    "bart-two-ends": (
        "bart",
        {"eos_token_id": [5, 2], "forced_eos_token_id": [3, 2], "activation_function": "gelu_new"},
    ),
    "bart-quick-gelu": ("bart", {"activation_function": "quick_gelu", "encoder_ffn_dim": 7}),
    "bart-pad-ends": (
        "bart",
        {"pad_token_id": 2, "scale_embedding": True, "activation_function": "relu2",
         "encoder_ffn_dim": 1, "decoder_attention_heads": 1},
    ),
    "marian-one-column": (
        "marian",
        {**MARIAN, "d_model": 1, "encoder_attention_heads": 1, "decoder_attention_heads": 1},
    ),
    "marian": ("marian", {**MARIAN, "scale_embedding": True}),
    "marian-untied": (
        "marian",
        {**MARIAN, "tie_word_embeddings": False, "activation_function": "swish"},
    ),
    "marian-two-vocabularies": (
        "marian",
        {**MARIAN, **TWO, "d_model": 21, "encoder_attention_heads": 7, "scale_embedding": True},
    ),
    "marian-two-untied": (
        "marian",
        {**TWO, "pad_token_id": 40, "decoder_start_token_id": 60, "tie_word_embeddings": False,
         "decoder_layers": 1},
    ),
}  # fmt: skip


def make(name: str, folder: Path, **changes: object) -> transformers.PreTrainedModel:
    """The model, saved in `folder`; weights are drawn so that every part matters."""
    kind, own = CASES[name]
    config = transformers.AutoConfig.for_model(kind, **{**BASE, **own, **changes})
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.requires_grad:
                p.copy_(0.2 * torch.randn(p.shape, generator=generator) + ("norm.w" in key))
        model.final_logits_bias.normal_(generator=generator)
    model.save_pretrained(folder)
    return model


def pair(name: str, folder: Path, **changes: object):
    """The model of transformers, and ours read from its files."""
    theirs = make(name, folder, **changes)
    return theirs, EncoderDecoder.from_pretrained(folder)


def batch(seed: int = 0):
    """Sources (3, 9) and targets (3, 7); masks with padding on the left, the right and nowhere."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(3, 50, (3, n), generator=generator) for n in (9, 7))
    x_mask, y_mask = torch.ones_like(x), torch.ones_like(y)
    x_mask[0, :3] = x_mask[1, -4:] = 0
    y_mask[0, -2:] = y_mask[2, :3] = 0
    return x, y, x_mask, y_mask
