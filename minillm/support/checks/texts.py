"""Refusals of texts, ids and tokenizers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from numbers import Integral
from operator import index
from typing import Any

from minillm.support.checks.words import quoted


def check_utf8(name: str, text: str) -> None:
    """Raises: ValueError, with the place, for half a character, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = f"{text[error.start]!r} at place {error.start}, surrogates not allowed"
        raise ValueError(f"{name}, {quoted(text)}, holds half a character: {wrong}") from None


MAX_ID = (1 << 31) - 1


def is_id(value: Any) -> bool:
    """Whether `value` can be the id of a token; True, 0.5 and 10**15 cannot."""
    return type(value) is int and 0 <= value <= MAX_ID


# What usually begins and ends a text, by the names that models gave it.
BEGIN_TOKENS = ("<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>")
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>", "</s>")


def check_ranks(
    tokenizer: Any,
    ranks: Mapping[bytes, int],
    special_tokens: Mapping[str, int] | None,
    bos_token: str | None,
    eos_token: str | None,
    pad_token: str | None,
    add_bos: bool,
) -> None:
    """Raises: ValueError for what makes no tokenizer: ids, tokens or names contradict each other.

    Of one of another model's files, its `added_tokens` count, and whether it may lack bytes.
    """
    special = special_tokens or {}
    added = tokenizer.added_tokens
    ids = [*chain(ranks.values(), special.values(), added.values())]
    for i in ids:
        if not is_id(i):
            raise ValueError(f"an id is a whole number from 0 to {MAX_ID:,}, not negative: {i!r}")
    for text in chain(special, added):
        check_utf8("a token", text)
    if twice := special.keys() & added.keys():
        raise ValueError(f"{quoted(min(twice))} is special and not special")
    if len({*ids}) < len(ids):
        shared = next(i for i, count in Counter(ids).items() if count > 1)
        raise ValueError(f"two tokens share the id {shared}")
    if b"" in ranks or "" in special or "" in added:
        raise ValueError("a token is empty")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing and not tokenizer.drop_unknown_bytes:
        raise ValueError(f"{len(missing)} of the 256 bytes have no id, first {missing[0]}")
    for name in (bos_token, eos_token, pad_token):
        if name and name not in special:
            raise ValueError(f"{quoted(name)} is none of the special tokens {quoted([*special])}")
    if add_bos and not (bos_token or eos_token or special.keys() & {*BEGIN_TOKENS, *END_TOKENS}):
        raise ValueError("add_bos needs a bos_token")


def check_special(tokenizer: Any, text: Any, allowed: str | Collection[str]) -> None:
    """Raises: ValueError if a text spells a special token that is not allowed, or is none."""
    check_text(text, "encode_batch takes several")
    if allowed == "all" or not tokenizer.names:
        return
    allowed = [allowed] if isinstance(allowed, str) else allowed
    for found in tokenizer.names.finditer(text):
        if (name := found[0]) in tokenizer.special_tokens and name not in allowed:
            raise ValueError(
                f"the text spells the special token {quoted(name)}: allow it by "
                "allowed_special, or call encode_ordinary to read it as plain text"
            )


def check_learning(
    texts: Any, vocab_size: int, special_tokens: Collection[str], add_bos: bool
) -> None:
    """Raises: ValueError if there is no room for bytes and special tokens, if these are one
    string, or repeat, or cannot begin a text; for a file's name instead of its text."""
    if isinstance(special_tokens, str) or len({*special_tokens}) < len(special_tokens):
        raise ValueError(f"special_tokens must be different names, not {quoted(special_tokens)}")
    if add_bos and not {*BEGIN_TOKENS, *END_TOKENS}.intersection(special_tokens):
        known = quoted([*special_tokens])
        raise ValueError(f"add_bos needs a begin or end token: {known} has none")
    if vocab_size < 256 + len(special_tokens):
        raise ValueError(f"vocab_size {vocab_size} < 256 bytes + {len(special_tokens)} special")
    texts_of(texts)


def check_texts(texts: Any, name: str = "texts") -> None:
    """Raises: ValueError for one text where many belong, for its letters would be taken for them.

    Also for bytes, and for the path of a file that was not read.
    """
    if isinstance(texts, str):
        one_or_many = "write [text] for one, text.split(...) if it holds many"
        raise ValueError(f"{name} must be several texts, not one, {quoted(texts)}: {one_or_many}")
    _check_read(texts, name)


def check_text(text: Any, several: str = "join several") -> None:
    """Raises: ValueError for several texts where one belongs, for bytes, and for a path."""
    if not isinstance(text, str):
        _check_read(text, "text")
        raise ValueError(f"text must be one text, a str, not {quoted(text)}: {several}")


def check_one_row(ids: Any) -> None:
    """Raises: ValueError for rows of ids, or a single id, where one row belongs."""
    rows = isinstance(ids, list | tuple) and bool(ids) and isinstance(ids[0], list | tuple)
    if rows or isinstance(ids, str | Mapping | Integral):
        each = "for several rows [decode(row) for row in ids]"
        each = f"for one id [{ids}]" if isinstance(ids, Integral) else each
        raise ValueError(f"decode takes the ids of one text, not {quoted(ids)}: {each}")


def ids_of(ids: Any) -> list[int]:
    """The ids of one text as Python's numbers, be they a tensor, or tensors of one number each.

    Raises: ValueError as `check_one_row`, and for what is no id of any vocabulary.
    """
    if hasattr(ids, "tolist"):
        ids = ids.tolist() if ids.ndim else [ids.tolist()]
    check_one_row(ids)
    try:
        found = [*map(index, ids)]
    except TypeError as error:
        raise ValueError(f"ids must be whole numbers, not {quoted(ids)}: {error}") from None
    if (least := min(found, default=0)) < 0:
        raise ValueError(f"no token has the id {least}; there are none below 0")
    return found


def check_tokenizer(tokenizer: Any) -> None:
    """Raises: ValueError for what encodes nothing, such as texts where the tokenizer belongs, and
    for a tokenizer of another library."""
    if hasattr(tokenizer, "encode_ordinary") and hasattr(tokenizer, "special_tokens"):
        return
    kind = f"{type(tokenizer).__module__.partition('.')[0]}.{type(tokenizer).__name__}"
    if hasattr(tokenizer, "save_pretrained"):  # of transformers
        road = "save it, tokenizer.save_pretrained(folder), and BPETokenizer.load(folder) opens it"
        raise ValueError(f"a {kind} is no tokenizer of minillm: {road}")
    if hasattr(tokenizer, "encode") and not isinstance(tokenizer, str):  # of tiktoken, tokenizers
        road = "BPETokenizer.load(folder) opens a tokenizer.json, from_tiktoken_file ranks"
        raise ValueError(f"a {kind} is no tokenizer of minillm: {road}")
    order = "the order is model, tokenizer, texts"
    raise ValueError(f"{quoted(tokenizer)} is no tokenizer: {order}")


def texts_of(texts: str | Iterable[str]) -> Iterable[str]:
    """Texts, or one as the only one of a list.

    Raises: ValueError for bytes, a path, and a string that is the name of a file.
    """
    if not isinstance(texts, str):
        _check_read(texts, "texts")
        return texts
    if "\n" not in texts and len(texts) < 1024 and os.path.isfile(texts):
        read = f"Path({texts!r}).read_text(encoding='utf-8')"
        raise ValueError(f"{quoted(texts)} is the name of a file: hand in what it holds, {read}")
    return [texts]


def _check_read(texts: Any, name: str) -> None:
    if isinstance(texts, os.PathLike):
        read = f"[Path({os.fspath(texts)!r}).read_text(encoding='utf-8')]"
        raise ValueError(f"{name} must be texts, not a path: {read}")
    if isinstance(texts, bytes | bytearray):
        raise ValueError(f"{name} must be texts, not bytes, {quoted(bytes(texts))}: decode them")


def check_ngram_model(
    n: int, smoothing: str, k: float, discounts: Sequence[float] | None, given: Any
) -> None:
    """Raises: ValueError for settings of an `NGramModel` that make no model."""
    if n < 1 or smoothing not in ("mle", "add_k", "kneser_ney") or k <= 0:
        raise ValueError(f"no n-gram model with {n=}, {smoothing=}, {k=}")
    if discounts is not None and (len(discounts) != n or not all(0 <= d <= 1 for d in discounts)):
        raise ValueError(f"discounts are one number in [0, 1], or {n} of them, not {given}")
