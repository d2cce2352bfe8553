"""The tokenizer's files: tokenizer.json saved and loaded, tiktoken's ranks loaded.

Explained in notebook 02. A file is written whole or not at all, and a damaged one is an error.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.bpe_encoder import find_merges
from minillm.chat import choose_template
from minillm.files import replacing
from minillm.tokenizer_reader import DIGEST, digest, read_json, spell, splits, unspell

__all__ = ["NAMES", "load", "read_tiktoken", "save", "to_json"]

if TYPE_CHECKING:
    from minillm.tokenizer import BPETokenizer

NAMES = ("bos_token", "eos_token", "pad_token")

_TEMPLATE = "chat_template.jinja"


def save(tokenizer: "BPETokenizer", directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, each whole or not at all.

    Raises: ValueError as `to_json`, before anything is written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {name: getattr(tokenizer, name) for name in (*NAMES, "chat_template")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    config = {key: value for key, value in config.items() if value is not None}
    for name, content in (
        ("tokenizer_config.json", config),
        ("tokenizer.json", to_json(tokenizer)),
    ):
        with replacing(directory / name) as path:
            path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    (directory / _TEMPLATE).unlink(missing_ok=True)  # an older one would be read instead


def to_json(tokenizer: "BPETokenizer") -> dict[str, Any]:
    """The content of `tokenizer.json`.

    Tokens that no merge makes (some vocabularies have them) are listed with all their splits, and
    `ignore_merges` lets a whole word be one of them, as Llama 3's file does.
    Raises: ValueError if a special or added token is spelled as the file spells another.
    """
    ranks, merges, whole_words = tokenizer.ranks, [], False
    for token, parts in find_merges(ranks):
        whole_words |= len(parts) > 2
        merges += [tuple(parts)] if len(parts) == 2 else splits(token, ranks)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = tokenizer.special_tokens
    named = _by_id({**special, **tokenizer.added_tokens})
    added = [{"id": i, "content": t, **flags, "special": t in special} for t, i in named.items()]
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    split["pattern"] = {"Regex": tokenizer.pattern}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = False
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False}
    model |= {"ignore_merges": whole_words}
    model["vocab"] = _vocabulary(ranks, named)
    model["merges"] = [[spell(left), spell(right)] for left, right in merges]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": tokenizer.normalizer and {"type": tokenizer.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": _begin_template(tokenizer) if tokenizer.add_bos else None,
        "decoder": level,
        "model": model,
    }
    model[DIGEST] = digest(content)
    return content


def _by_id(ids: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(ids.items(), key=lambda item: item[1]))


def _vocabulary(ranks: Mapping[bytes, int], named: Mapping[str, int]) -> dict[str, int]:
    """The spelling and the id of every token, special ones included.

    Of an added token that is missing here, `tokenizers` overlooks the id, and numbers it itself.
    """
    vocab = {spell(token): i for token, i in ranks.items()}
    if alike := vocab.keys() & named.keys():
        token = min(alike)
        raise ValueError(f"a file cannot tell the token {unspell(token)} from the name {token!r}")
    return _by_id({**vocab, **named})


def _begin_template(tokenizer: "BPETokenizer") -> dict[str, Any]:
    name, i = tokenizer.bos_token, tokenizer.bos_token_id
    begin = [{"SpecialToken": {"id": name, "type_id": n}} for n in (0, 1)]
    text = [{"Sequence": {"id": "AB"[n], "type_id": n}} for n in (0, 1)]
    return {
        "type": "TemplateProcessing",
        "single": [begin[0], text[0]],
        "pair": [begin[0], text[0], begin[1], text[1]],
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]}},
    }


def load(path: Path) -> dict[str, Any]:
    """The arguments of `BPETokenizer` that a `tokenizer.json` (or its folder) asks for.

    Raises: ValueError if the file is damaged or was edited, or needs a feature that we lack.
    """
    path = path / "tokenizer.json" if path.is_dir() else path
    content = _read(path)
    beside = path.with_name("tokenizer_config.json")
    config = _read(beside) if beside.exists() else {}
    template = path.with_name(_TEMPLATE)
    try:
        found = read_json(content)
        for name in NAMES:
            found.setdefault(name, _content(config.get(name)))
        _promote(found, config)
        if template.exists():
            found["chat_template"] = template.read_text(encoding="utf-8")
        else:
            found["chat_template"] = choose_template(config.get("chat_template"))
        return found
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path}: not a tokenizer file: {type(error).__name__} {error}") from None


def _content(token: Any) -> Any:
    """The spelling of a token that a config gives as a string or with its flags."""
    return token["content"] if isinstance(token, dict) else token


def _promote(found: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Make special what the file merely adds but the config gives a part, as transformers does."""
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    more = more.values() if isinstance(more, dict) else more
    for name in [*(found[name] for name in NAMES), *map(_content, more)]:
        if name in found["added_tokens"]:
            found["special_tokens"][name] = found["added_tokens"].pop(name)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged or cut off: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a tokenizer file: {type(content).__name__} at the top")
    return content


def read_tiktoken(path: Path) -> dict[bytes, int]:
    """Ranks from a file of lines "base64-of-the-bytes rank", as tiktoken and Llama 3 ship.

    Raises: ValueError naming the first line that is damaged or whose rank does not rise.
    """
    ranks: dict[bytes, int] = {}
    last = -1
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            token, rank = base64.b64decode(token, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{path}, line {number} is damaged: {line[:60]!r}") from None
        if rank <= last or token in ranks:
            raise ValueError(f"{path}, line {number}: rank {rank} after {last}, token {token}")
        ranks[token] = last = rank
    return ranks
