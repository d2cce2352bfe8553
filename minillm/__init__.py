"""A small, fast, real language model, whose heart is built line by line in ten notebooks.

Public names are resolved on first use: `from minillm import BPETokenizer` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "stories.language": ["StoryLanguage"],
    "ngram": ["NGramModel", "bits_per_byte"],
    "bpe": ["BPETokenizer"],
    "deeper.tokenizer.foreign": ["ForeignTokenizer"],
    "heads": ["MultiHeadAttention"],
    "beyond.state.mamba": ["Mamba2Mixer"],
    "beyond.state.mamba_parts": ["StateSizes"],
    "beyond.state.selective_scan": ["MambaMixer"],
    "deeper.attention.mla": ["MultiHeadLatentAttention"],
    "beyond.experts.moe": [
        "Experts",
        "SparseMoeBlock",
        "TopKRouter",
        "load_balancing_loss",
        "update_bias",
    ],
    "beyond.lora.adapters": ["add_lora", "merge", "remove_lora", "unmerge"],
    "beyond.lora.lora": ["LoRALinear"],
    "deeper.attention.maps": ["attention_maps"],
    "beyond.two_sequences.seq2seq": ["EncoderDecoder", "Seq2SeqConfig", "shift_right"],
    "beyond.pictures.vision": ["VisionTransformer"],
    "beyond.pictures.vision_parts": ["VisionConfig"],
    "beyond.two_sequences.cross": ["CrossAttention"],
    "beyond.pictures.pictures": ["GatedCrossAttentionLayer", "PictureLM", "put_pictures"],
    "beyond.pictures.picture_parts": ["PictureConfig"],
    "deeper.pictures.qwen_vl": ["QwenVL", "QwenVLConfig", "QwenVisionConfig", "mrope_positions"],
    "deeper.attention.rope_scaling": ["RotaryEmbedding", "rope_frequencies"],
    "layers": ["ACTIVATIONS", "DecoderLayer", "GatedMLP", "LayerNorm", "MLP", "RMSNorm"],
    "cache": ["KVCache"],
    "sampling": ["GREEDY", "Sampler"],
    "deeper.generation.search": ["beam_search", "viterbi_segment"],
    "support.modes": ["make_cache"],
    "support.sources": ["IndexedSource"],
    "training": [
        "AdamW",
        "RowBatches",
        "TrainConfig",
        "WindowBatches",
        "begin_id",
        "cosine_schedule",
        "cross_entropy",
        "evaluate",
        "get_batch",
        "gradients",
        "train",
    ],
    "deeper.training.trainer": ["RunConfig", "Trainer", "token_byte_lengths"],
    "deeper.training.documents": ["DocumentBatches", "StoryDocuments", "TextDocuments"],
    "beyond.answers.conversations": [
        "ConversationBatches",
        "conversation_example",
        "conversation_examples",
    ],
    "beyond.answers.sft": ["Isolated", "document_example"],
    "beyond.answers.sft_files": ["completion_example", "read_examples"],
    "deeper.training.scoring": ["evaluate_text", "token_log_probs"],
    "deeper.training.run": ["Run"],
    "deeper.training.token_file": ["FileDocuments", "TokenDataset"],
    "model": ["CausalLM", "Decoder"],
    "config": ["ModelConfig"],
    "deeper.generation.conversation": ["Conversation"],
    "generation": ["generate"],
    "deeper.generation.stream": ["stream_text"],
    "deeper.generation.speculative": ["speculative_generate"],
    "beyond.export.step": ["DecodingStep", "export_step"],
    "beyond.export.onnx_file": ["to_onnx"],
    "deeper.fast.small": ["int8_copy", "prune_vocabulary"],
    "deeper.training.tensor_parallel": ["parallelize"],
    "deeper.pretrained.adapters": ["load_adapter", "save_adapter"],
    "deeper.pretrained.load": ["from_pretrained", "save_pretrained"],
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
