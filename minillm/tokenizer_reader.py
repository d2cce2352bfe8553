"""What a tokenizer.json asks for: its spelling of bytes, its features, its merges checked.

Explained in notebook 02. What a file asks for and we lack is an error that names it.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from minillm.bpe_encoder import find_merges
from minillm.pretokenizer import GPT2_PATTERN

__all__ = ["DIGEST", "check_merges", "digest", "read_json", "spell", "splits", "unspell"]

DIGEST = "minillm_sha256"  # in the model's part of our files; other readers pass over it


def _stand_ins() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself, or the next letter from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return {byte: chr(byte if byte in printable else next(rest)) for byte in range(256)}


_STAND_IN = _stand_ins()

_BYTE = {character: byte for byte, character in _STAND_IN.items()}


def spell(token: bytes) -> str:
    """A token's bytes as `tokenizer.json` writes them: b" the" is "Ġthe"."""
    return "".join(map(_STAND_IN.__getitem__, token))


def unspell(spelling: str) -> bytes:
    """The bytes that a spelling stands for. Raises: ValueError if it is not byte-level."""
    try:
        return bytes(map(_BYTE.__getitem__, spelling))
    except KeyError:
        raise ValueError(f"token {spelling!r} is not spelled in bytes: no byte-level BPE") from None


def splits(token: bytes, ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All ways to make `token` of two others, in the order in which converters list them."""
    pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
    pairs = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
    return sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def check_merges(
    ranks: Mapping[bytes, int], merges: Iterable[tuple[bytes, bytes]], *, whole_words: bool = False
) -> None:
    """Make sure that merging by rank does what the listed merges do, in their order.

    Raises: ValueError naming the first token or merge for which it does not.
    """
    listed, last = defaultdict(set), -1
    for left, right in merges:
        rank = ranks.get(left + right)
        if rank is None or left not in ranks or right not in ranks:
            raise ValueError(f"the merge of {left} and {right} is not in the vocabulary")
        if rank < last:
            raise ValueError(f"the merge of {left} and {right} is out of the order of ids")
        last = rank
        listed[left + right].add((left, right))
    for token, parts in find_merges(ranks):
        if len(parts) == 2 and tuple(parts) not in listed[token]:
            raise ValueError(f"{token} should be merged from {parts}, which is not listed")
        if len(parts) > 2 and not (whole_words and listed[token] == {*splits(token, ranks)}):
            raise ValueError(f"no merge makes the token {token}, and ignore_merges does not help")


def digest(content: Mapping[str, Any]) -> str:
    """A fingerprint of the content, itself left out, by which `load` notices edits."""
    model = {key: value for key, value in content["model"].items() if key != DIGEST}
    text = json.dumps({**content, "model": model}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `BPETokenizer` that the content of a `tokenizer.json` asks for."""
    model = content["model"]
    if DIGEST in model and model[DIGEST] != digest(content):
        raise ValueError(f"edited since it was saved (if on purpose, remove {DIGEST!r})")
    _refuse_unknown(content, model)
    named: dict[bool, dict[str, int]] = {True: {}, False: {}}  # special or merely added -> ids
    for token in content.get("added_tokens") or ():
        named[token.get("special", True)][token["content"]] = token["id"]
    ids = named[True] | named[False]
    vocab = {name: i for name, i in model["vocab"].items() if ids.get(name) != i}
    if DIGEST not in model and (alike := vocab.keys() & ids.keys()):
        name = min(alike)
        raise ValueError(
            f"{name!r} has the id {ids[name]} as added, {vocab[name]} as ordinary token"
        )
    ranks = {unspell(name): i for name, i in vocab.items()}
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    merges = [(unspell(left), unspell(right)) for left, right in pairs]
    if DIGEST not in model:
        check_merges(ranks, merges, whole_words=model.get("ignore_merges", False))
    found = {"ranks": ranks, "special_tokens": named[True], "added_tokens": named[False]}
    found["pattern"] = _pattern(content["pre_tokenizer"])
    found["normalizer"] = "NFC" if content.get("normalizer") else None
    begin = _begin_token(content.get("post_processor"))
    return {**found, "add_bos": True, "bos_token": begin} if begin else found


def _refuse_unknown(content: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise ValueError for the first feature of the file that would change ids and that we lack."""
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"a model of type {model['type']!r}, not byte-level BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise ValueError(f"{key} = {model[key]!r} is not supported")
    for key in ("truncation", "padding"):
        if content.get(key):
            raise ValueError(f"{key} in the file is not supported: {content[key]}")
    normalizer = content.get("normalizer")
    if normalizer and normalizer != {"type": "NFC"}:
        raise ValueError(f"normalizer {normalizer.get('type')!r} is not supported, only NFC")
    decoder = content.get("decoder")
    if decoder and decoder["type"] != "ByteLevel":
        raise ValueError(f"decoder {decoder['type']!r} is not byte-level BPE's")
    for token in content.get("added_tokens") or ():
        flags = ["single_word", "lstrip", "rstrip"] + ["normalized"] * bool(normalizer)
        for flag in flags:
            if token.get(flag):
                raise ValueError(f"added token {token['content']!r} with {flag} is not supported")


def _pattern(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """The pattern of a ByteLevel step that has its own, or of one Split step before it."""
    steps = [pre_tokenizer or {"type": None}]
    if steps[0]["type"] == "Sequence":
        steps = steps[0]["pretokenizers"]
    *splits, level = steps
    kinds = [step["type"] for step in steps]
    if level["type"] != "ByteLevel" or kinds[:-1] not in ([], ["Split"]):
        raise ValueError(f"pre_tokenizer {kinds} is not supported: only Split, ByteLevel")
    if level.get("add_prefix_space"):
        raise ValueError("pre_tokenizer with add_prefix_space is not supported")
    if bool(splits) == level.get("use_regex", True):
        raise ValueError("pre_tokenizer ByteLevel must cut by its own regex or by one Split step")
    if not splits:
        return GPT2_PATTERN
    how = (splits[0]["behavior"], splits[0].get("invert", False))
    if how not in (("Isolated", False), ("Removed", True)) or "Regex" not in splits[0]["pattern"]:
        raise ValueError(f"pre_tokenizer Split {splits[0]} is not supported")
    return splits[0]["pattern"]["Regex"]


def _begin_token(processor: Mapping[str, Any] | None) -> str | None:
    """The begin token that a post-processor adds to a text, if it adds any."""
    steps = [processor] if processor else []
    if steps and processor["type"] == "Sequence":
        steps = processor["processors"]
    steps = [step for step in steps if step["type"] != "ByteLevel"]  # that one moves offsets only
    if not steps:
        return None
    if len(steps) > 1 or steps[0]["type"] != "TemplateProcessing":
        raise ValueError(f"post_processor {[step['type'] for step in steps]} is not supported")
    *before, last = steps[0]["single"]
    if "Sequence" not in last or len(before) > 1 or any("SpecialToken" not in b for b in before):
        raise ValueError("post_processor adds more than one begin token")
    return before[0]["SpecialToken"]["id"] if before else None
