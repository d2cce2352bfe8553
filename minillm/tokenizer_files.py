"""Tokenizer files: Hugging Face's tokenizer.json, tiktoken's ranks, the libraries themselves.

Explained in notebook 02. What a file asks for and we lack is an error that names it.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from minillm.bpe_trainer import byte_alphabet
from minillm.tokenizer import BPETokenizer

__all__ = ["load", "save", "to_json"]

_CODES = {
    byte: chr(byte) if i < 188 else chr(256 + i - 188)
    for i, byte in enumerate(byte_alphabet("lowest_ids"))
}

_BYTES = {character: byte for byte, character in _CODES.items()}


def to_json(tokenizer: BPETokenizer) -> dict[str, Any]:
    """The content of `tokenizer.json`."""
    spell = {token: "".join(map(_CODES.__getitem__, token)) for token in tokenizer.ranks}
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {
        "type": "Split",
        "pattern": {"Regex": tokenizer.pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for token, i in sorted(tokenizer.special_tokens.items(), key=lambda item: item[1])
    ]  # fmt: skip
    by_id = sorted(tokenizer.ranks, key=tokenizer.ranks.__getitem__)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": tokenizer.normalizer} if tokenizer.normalizer else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {"type": "ByteLevel", **byte_level}],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False,
            "byte_fallback": False, "ignore_merges": False,
            "vocab": {spell[token]: tokenizer.ranks[token] for token in by_id},
            "merges": [[spell[left], spell[right]] for left, right in tokenizer.merges],
        },
    }  # fmt: skip


def save(tokenizer: BPETokenizer, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, each whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "chat_template": tokenizer.chat_template,
    }
    config = {key: value for key, value in config.items() if value is not None}
    for name, content in (
        ("tokenizer.json", to_json(tokenizer)),
        ("tokenizer_config.json", config),
    ):
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, directory / name)


def load(path: Path) -> BPETokenizer:
    """Read `tokenizer.json` and, if it lies beside it, `tokenizer_config.json`."""
    path = path / "tokenizer.json" if path.is_dir() else path
    content = json.loads(path.read_text(encoding="utf-8"))
    beside = path.with_name("tokenizer_config.json")
    config = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
    ranks = {
        bytes(map(_BYTES.__getitem__, token)): i for token, i in content["model"]["vocab"].items()
    }
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    pattern = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    names = {
        key: config.get(key) for key in ("bos_token", "eos_token", "pad_token", "chat_template")
    }
    return BPETokenizer(ranks, pattern, special, **names)
