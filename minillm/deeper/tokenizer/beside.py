"""What the files beside a `tokenizer.json` say of its tokens, and two older files in its place.

As transformers 5 reads them (`PreTrainedTokenizerBase._from_pretrained`, `TokenizersBackend`, and
its classes of tokenizers). Written by hand, not built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from minillm.bpe import QWEN2_PATTERN
from minillm.support.checks.texts import is_id
from minillm.support.checks.words import quoted
from minillm.support.files import read_json

# All files of a tokenizer that are read; a tokenizer that is saved takes the place of all.
TOKENIZER_FILES = """
    tokenizer.json tokenizer_config.json chat_template.jinja special_tokens_map.json
    added_tokens.json vocab.json merges.txt
""".split()

# The roles of all tokenizers; a template sees what has one, under its name.
ROLES = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split()

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

Token = str | Mapping[str, Any]  # as the files have it: its spelling, or that and its flags


def spelling(token: Any) -> Any:
    """The spelling of a token that a file gives as a string or with its flags."""
    return token["content"] if isinstance(token, Mapping) else token


def named_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Token], list[Token]]:
    """The tokens of a `tokenizer_config.json` that have a role, by its name, and further ones.

    Where it lists no `added_tokens_decoder`, `special_tokens_map.json` is asked too, and first.
    Raises: ValueError if that file is damaged.
    """
    roles = {k: v for k, v in config.items() if k in ROLES or k.endswith("_token")}
    further = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    if isinstance(further, Mapping):  # roles of the model's own
        roles, further = {**roles, **further}, None
    path = folder / "special_tokens_map.json"
    if config.get("added_tokens_decoder") is None and path.exists():
        said = read_json(path)
        older = said.pop("additional_special_tokens", None)
        more = said.pop("extra_special_tokens", None)
        if isinstance(more, Mapping):
            roles, more = {**roles, **more}, None
        roles |= {k: _special(v) for k, v in said.items() if k in ROLES or k.endswith("_token")}
        known = [*map(spelling, further or ())]
        more = [_special(token) for token in more or () if spelling(token) not in known]
        further = [*(further or ()), *more] or older
    for key in ROLES:
        if isinstance(roles.get(key), Mapping) and not _is_token(roles[key]):
            raise ValueError(f"{key} should have a content: {quoted(roles[key])}")
    tokens = {key: token for key, token in roles.items() if _is_token(token)}
    if strange := [token for token in further or () if not _is_token(token)]:
        raise ValueError(f"extra_special_tokens: {quoted(strange[0])} is no token")
    first = [key for key in ROLES if key in tokens]
    return {key: tokens[key] for key in dict.fromkeys([*first, *tokens])}, list(further or ())


def _is_token(token: Any) -> bool:
    return isinstance(token.get("content") if isinstance(token, Mapping) else token, str)


def _special(token: Token) -> Token:
    return {**token, "special": True} if isinstance(token, Mapping) else token


def _whole(token: Token, *, special: bool = False) -> dict[str, Any]:
    """A token with all its flags. What is special is not normalized, unless its flags say so."""
    given = token if isinstance(token, Mapping) else {}
    special = special or bool(given.get("special"))
    usual = {**dict.fromkeys(_FLAGS, False), "normalized": not special}
    flags = {k: bool(given[k]) for k in _FLAGS if given.get(k) is not None}
    return {"content": spelling(token), **usual, **flags, "special": special}


def tokens_to_add(
    folder: Path, config: Mapping[str, Any], content: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The tokens that the files add to a `tokenizer.json`, in order, each with its flags.

    Raises: ValueError if a file is damaged.
    """
    roles, further = named_tokens(folder, config)
    own = [_whole(token) for token in content.get("added_tokens") or ()]
    listed, path = config.get("added_tokens_decoder"), folder / "added_tokens.json"
    decoder: dict[int, dict[str, Any]] = {}
    if listed is not None:
        for i, token in listed.items():
            if not str(i).isdecimal() or not _is_token(token):
                raise ValueError(f"added_tokens_decoder: {quoted(i)} is no id, or has no token")
            decoder[int(i)] = _whole(token)
    elif path.exists():
        special = {*map(spelling, [*(roles.get(k) for k in ROLES), *further])}
        for name, i in read_json(path).items():
            if not is_id(i):
                raise ValueError(f"{path}: {quoted(name)} should have an id, not {quoted(i)}")
            decoder[i] = _whole(name, special=name in special)
        for token in content.get("added_tokens") or ():
            decoder.pop(token["id"], None)
    add = [token for _, token in sorted(decoder.items()) if token not in own]
    names = {token["content"] for token in (*own, *add)}
    for token, is_role in [*((t, True) for t in roles.values()), *((t, False) for t in further)]:
        if (name := spelling(token)) not in names:
            names.add(name)
            add.append(_whole(token, special=is_role or isinstance(token, str)))
    if "" in names:
        raise ValueError("a token that the files name is empty")
    return add


def numbered(tokens: Iterable[Mapping[str, Any]], vocab: Mapping[str, int]) -> list[dict[str, Any]]:
    """Added tokens with the ids that the library gives them, whatever ids a file says.

    One of the vocabulary keeps its id; others are counted on from what is greater: the size of the
    vocabulary, or the greatest id of those before. Of one that comes again the last flags count,
    but what was special stays so.
    """
    found: dict[str, dict[str, Any]] = {}
    free = len(vocab)
    for token in tokens:
        name = token["content"]
        i = vocab[name] if name in vocab else found[name]["id"] if name in found else free
        free = max(free, i + 1)
        special = token.get("special", True) or found.get(name, {}).get("special", False)
        found[name] = {**token, "id": i, "special": special}
    return list(found.values())


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}

_GPT2 = dict.fromkeys(["unk_token", "bos_token", "eos_token"], "<|endoftext|>")
_QWEN2 = dict.fromkeys(["unk_token", "eos_token", "pad_token"], "<|endoftext|>")

# Classes that read vocab.json and merges.txt -> tokens that they name, the pattern, the normalizer.
_CLASSES: dict[str, tuple[dict[str, str], str | None, str | None]] = {
    "GPT2Tokenizer": (_GPT2, None, None),
    "Qwen2Tokenizer": (_QWEN2, QWEN2_PATTERN, "NFC"),
}

# Which class reads them where no file says so: by the model_type of config.json.
_CLASS_OF = {"gpt2": "GPT2Tokenizer"} | dict.fromkeys(
    ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"], "Qwen2Tokenizer"
)


def class_of(folder: Path) -> str | None:
    """The class that reads a folder's vocab.json and merges.txt, if we know how, and if they count.

    They do not beside a `tokenizer.json`.
    """
    there = {name for name in TOKENIZER_FILES if (folder / name).exists()}
    if "tokenizer.json" in there or not there >= {"vocab.json", "merges.txt"}:
        return None
    model, config = (
        read_json(folder / name) if (folder / name).exists() else {}
        for name in ("config.json", "tokenizer_config.json")
    )
    found = config.get("tokenizer_class") or model.get("tokenizer_class")
    if not isinstance(found, str) or model.get("model_type") == "qwen2":  # whatever it says
        found = _CLASS_OF.get(str(model.get("model_type")), "")
    found = found.removesuffix("Fast")
    return found if found in _CLASSES else None


def config_of(folder: Path) -> dict[str, Any]:
    """A folder's `tokenizer_config.json`, over what its class says if it is read by one."""
    path, kind = folder / "tokenizer_config.json", class_of(folder)
    usual = {} if kind is None else _CLASSES[kind][0]
    return {**usual, **(read_json(path) if path.exists() else {})}


def from_merges(folder: Path, kind: str) -> dict[str, Any]:
    """The content of a `tokenizer.json` that vocab.json and merges.txt of a class stand for."""
    config = config_of(folder)
    _, pattern, normalizer = _CLASSES[kind]
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line.rstrip("\r") for line in lines if line and not line.startswith("#version")]
    level = {**_BYTE_LEVEL, "add_prefix_space": bool(config.get("add_prefix_space"))}
    cut: dict[str, Any] = {**level, "use_regex": pattern is None}
    if pattern is not None:
        split = {"type": "Split", "behavior": "Isolated", "invert": False}
        steps = [{**split, "pattern": {"Regex": pattern}}, cut]
        cut = {"type": "Sequence", "pretokenizers": steps}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer and {"type": normalizer},
        "pre_tokenizer": cut,
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "use_regex": True},
        "model": {"type": "BPE", "vocab": read_json(folder / "vocab.json"), "merges": merges},
    }
    roles, _ = named_tokens(folder, config)
    begin, end = (
        spelling(roles.get(f"{part}_token")) if config.get(f"add_{part}_token") else None
        for part in ("bos", "eos")
    )
    if begin is not None or end is not None:
        tokens = numbered(tokens_to_add(folder, config, content), content["model"]["vocab"])
        ids = {token["content"]: token["id"] for token in tokens}
        around = [*filter(None, [begin]), None, *filter(None, [end])]
        content["post_processor"] = _template(around, ids)
    return content


def _template(around: list[str | None], ids: Mapping[str, int]) -> dict[str, Any]:
    """What puts tokens around a text, which is None among them."""

    def written(text: str, kind: int) -> list[dict[str, Any]]:
        body = {"Sequence": {"id": text, "type_id": kind}}
        return [body if t is None else {"SpecialToken": {"id": t, "type_id": kind}} for t in around]

    named = [name for name in dict.fromkeys(around) if name is not None]
    special = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in named}
    pair = [*written("A", 0), *written("B", 1)]
    return {
        "type": "TemplateProcessing",
        "single": written("A", 0),
        "pair": pair,
        "special_tokens": special,
    }
