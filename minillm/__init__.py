"""A small, fast, real language model; ten notebooks that build it line by line are its source.

Public names are resolved on first use: `from minillm.tokenizer import BPETokenizer` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "stories.language": ["StoryLanguage"],
    "ngram": ["NGramModel", "bits_per_byte"],
    "tokenizer.bpe": ["BPETokenizer"],
    "nn.multihead": ["MultiHeadAttention"],
    "nn.mamba": ["Mamba2Mixer"],
    "nn.mamba_parts": ["StateSizes"],
    "nn.selective_scan": ["MambaMixer"],
    "nn.mla": ["MultiHeadLatentAttention"],
    "nn.moe": ["Experts", "SparseMoeBlock", "TopKRouter", "load_balancing_loss", "update_bias"],
    "nn.adapters": ["add_lora", "merge", "remove_lora", "unmerge"],
    "nn.lora": ["LoRALinear"],
    "nn.maps": ["attention_maps"],
    "models.seq2seq": ["EncoderDecoder", "Seq2SeqConfig", "shift_right"],
    "models.vision": ["VisionTransformer"],
    "models.vision_parts": ["VisionConfig"],
    "nn.cross": ["CrossAttention"],
    "models.pictures": ["GatedCrossAttentionLayer", "PictureLM", "put_pictures"],
    "models.picture_parts": ["PictureConfig"],
    "models.qwen_vl": ["QwenVL", "QwenVLConfig", "QwenVisionConfig", "mrope_positions"],
    "nn.rope": ["RotaryEmbedding"],
    "nn.rope_scaling": ["rope_frequencies"],
    "nn.layers": ["ACTIVATIONS", "DecoderLayer", "GatedMLP", "LayerNorm", "MLP", "RMSNorm"],
    "cache.base": ["KVCache", "make_cache"],
    "generation.sampling": ["GREEDY", "Sampler"],
    "generation.search": ["beam_search", "viterbi_segment"],
    "training.optim": ["AdamW", "cosine_schedule"],
    "training.data": ["IndexedSource", "RowBatches", "WindowBatches", "get_batch"],
    "training.documents": ["DocumentBatches", "StoryDocuments", "TextDocuments"],
    "training.loss": ["cross_entropy"],
    "training.evaluation": ["evaluate", "token_byte_lengths"],
    "training.conversations": [
        "ConversationBatches",
        "conversation_example",
        "conversation_examples",
    ],
    "training.sft": ["Isolated", "document_example"],
    "training.sft_files": ["completion_example", "read_examples"],
    "training.scoring": ["evaluate_text", "token_log_probs"],
    "training.run": ["Run"],
    "training.token_file": ["FileDocuments", "TokenDataset"],
    "training.trainer": ["TrainConfig", "Trainer"],
    "model": ["CausalLM", "Decoder"],
    "config": ["ModelConfig"],
    "generation.conversation": ["Conversation"],
    "generation.decoding": ["generate"],
    "generation.stream": ["stream_text"],
    "generation.speculative": ["speculative_generate"],
    "fast.export": ["DecodingStep", "export_step"],
    "fast.onnx_file": ["to_onnx"],
    "fast.small": ["int8_copy", "prune_vocabulary"],
    "training.tensor_parallel": ["parallelize"],
    "pretrained.adapters": ["load_adapter", "save_adapter"],
    "pretrained.load": ["from_pretrained", "save_pretrained"],
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
