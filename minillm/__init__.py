"""A small, fast, real language model; ten notebooks that build it line by line are its source.

Public names are resolved on first use: `from minillm.tokenizer import BPETokenizer` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "stories": ["StoryLanguage"],
    "ngram": ["NGramModel", "bits_per_byte", "viterbi_segment"],
    "tokenizer": ["BPETokenizer"],
    "multihead": ["MultiHeadAttention", "MultiHeadLatentAttention"],
    "rope": ["RotaryEmbedding", "rope_frequencies"],
    "layers": ["ACTIVATIONS", "GatedMLP", "LayerNorm", "MLP", "RMSNorm"],
    "cache": ["KVCache", "make_cache"],
    "sampling": ["GREEDY", "Sampler", "beam_search"],
    "train": [
        "AdamW",
        "DocumentBatches",
        "FileDocuments",
        "StoryDocuments",
        "TokenDataset",
        "TrainConfig",
        "Trainer",
        "WindowBatches",
        "cosine_schedule",
        "cross_entropy",
        "evaluate",
        "get_batch",
        "token_byte_lengths",
    ],
    "model": ["CausalLM", "Decoder", "DecoderLayer", "ModelConfig"],
    "generation": ["generate", "speculative_generate", "stream_text"],
    "pretrained": ["from_pretrained", "save_pretrained"],
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'minillm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"minillm.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
