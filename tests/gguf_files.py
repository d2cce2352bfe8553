"""Small GGUF files: transformers' random models, written by the library gguf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from minillm.bpe import BPETokenizer
from minillm.deeper.tokenizer.hf_json import spell

SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SIZES |= {"rms_norm_eps": 1e-5, "initializer_range": 0.5}
ENDS = {"bos_token_id": 318, "eos_token_id": 319, "pad_token_id": 319}

t = transformers
CONFIGS = {
    "llama": lambda: t.LlamaConfig(**SIZES, **ENDS, rope_theta=5e4),
    "llama-tied": lambda: t.LlamaConfig(**SIZES, **ENDS, tie_word_embeddings=True),
    "qwen2": lambda: t.Qwen2Config(**SIZES, **ENDS, rope_theta=1e6, tie_word_embeddings=True),
    # transformers' reader of files overlooks key_length and takes Qwen 3 to have heads of 128
    "qwen3": lambda: t.Qwen3Config(**SIZES, **ENDS, head_dim=128, rope_theta=1e6),
    # its reader also takes Gemma 3 to divide scores by the root of 256, and every sixth layer to
    # read all the past; of a window of 8, seventeen positions are more than two
    "gemma3": lambda: t.Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 7, "initializer_range": 0.2},
        **ENDS,
        head_dim=256,
        sliding_window=8,
        query_pre_attn_scalar=256,
    ),
}

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")


def model_of(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A random model of transformers'; its norms and biases are random as well."""
    torch.manual_seed(seed)
    model = t.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5) if "norm" in key else weight.normal_(0, 0.5)
                if name == "gemma3":  # 1 + weight is stored, and 1 taken off without a loss
                    weight.mul_(1024).round_().div_(1024)
    return model


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k as llama.cpp's converter stores them for Llama."""
    pairs = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def theirs(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """The weights under llama.cpp's names, in its order of rows, by the library's own table."""
    config = model.config
    kind = config.model_type.removesuffix("_text")
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == kind)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if config.model_type == "llama" and "q_proj" in key:
            array = interleaved(array, config.num_attention_heads)
        if config.model_type == "llama" and "k_proj" in key:
            array = interleaved(array, config.num_key_value_heads)
        if kind == "gemma3" and key.endswith("norm.weight"):
            array = array + 1
        found[names.get_name(key, try_suffixes=(".weight", ".bias"))] = array
    return found


def write(
    path: Path,
    model: transformers.PreTrainedModel | None = None,
    *,
    kind: str = "F32",
    tokenizer: BPETokenizer | None = None,
    cut: str = "gpt-2",
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model's file; `changes` replaces keys (None: leaves one out)."""
    model = model_of("llama") if model is None else model
    c = model.config
    n = c.model_type.removesuffix("_text")
    ropes = c.rope_parameters.get("full_attention", c.rope_parameters)
    writer = gguf.GGUFWriter(path, (changes or {}).get("general.architecture", n))
    keys: dict[str, Any] = {
        "general.name": "small",
        f"{n}.block_count": c.num_hidden_layers,
        f"{n}.context_length": c.max_position_embeddings,
        f"{n}.embedding_length": c.hidden_size,
        f"{n}.feed_forward_length": c.intermediate_size,
        f"{n}.attention.head_count": c.num_attention_heads,
        f"{n}.attention.head_count_kv": c.num_key_value_heads,
        f"{n}.attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        f"{n}.rope.freq_base": float(ropes["rope_theta"]),
        f"{n}.vocab_size": c.vocab_size,
    }
    if n == "gemma3":
        keys[f"{n}.attention.sliding_window"] = c.sliding_window
    if n in ("qwen3", "gemma3"):
        keys |= {f"{n}.attention.key_length": c.head_dim, f"{n}.attention.value_length": c.head_dim}
    else:
        keys[f"{n}.rope.dimension_count"] = c.hidden_size // c.num_attention_heads
    keys |= {f"tokenizer.ggml.{k}": getattr(c, k) for k in ("bos_token_id", "eos_token_id")}
    keys["tokenizer.ggml.padding_token_id"] = c.pad_token_id
    if tokenizer is not None:
        keys |= lists(tokenizer, c.vocab_size, cut)
    for key, value in {**keys, **(changes or {})}.items():
        if value is None or key == "general.architecture":
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add |= {str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    for name, array in theirs(model).items():
        wanted = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quantize(array, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def lists(tokenizer: BPETokenizer, size: int, cut: str) -> dict[str, Any]:
    """A tokenizer's lists, as llama.cpp's converter writes them."""
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [5] * size
    for token, i in tokenizer.ranks.items():
        tokens[i], kinds[i] = spell(token), 1
    for named, kind in ((tokenizer.special_tokens, 3), (tokenizer.added_tokens, 4)):
        for token, i in named.items():
            tokens[i], kinds[i] = token, kind
    merges = [f"{spell(left)} {spell(right)}" for left, right in tokenizer.merges]
    found = {"model": "gpt2", "pre": cut, "tokens": tokens, "token_type": kinds, "merges": merges}
    found |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    found |= {"add_bos_token": tokenizer.add_bos}
    keys = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    if tokenizer.chat_template is not None:
        keys["tokenizer.chat_template"] = tokenizer.chat_template
    return keys
