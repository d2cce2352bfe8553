"""Planted wrong answers of the page 02_tokenizer_files, each with the sentence it must earn."""

import base64

from minillm.exercises.tokenizer_files import _closure


def read_ranks(lines):
    pairs = (line.split() for line in lines)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def as_text(lines):
    return {token.decode("latin-1"): rank for token, rank in read_ranks(lines).items()}


def spelled(lines):
    return {line.split()[0]: int(line.split()[1]) for line in lines}


def numbered(lines):
    return {token: i for i, token in enumerate(read_ranks(lines))}


def once(wanted, parts):
    return {*wanted}.union(*(parts.get(token, ()) for token in wanted))


def without_themselves(wanted, parts):
    return _closure(wanted, parts) - wanted


def without_bytes(wanted, parts):
    return {token for token in _closure(wanted, parts) if len(token) > 1}


RIGHT = {"02_tokenizer_files.1": read_ranks, "02_tokenizer_files.2": _closure}

WRONG = [
    ("02_tokenizer_files.1", as_text, "not text"),
    ("02_tokenizer_files.1", spelled, "still spelled in base64"),
    ("02_tokenizer_files.1", numbered, "not the number of the line"),
    ("02_tokenizer_files.2", once, "the parts of the parts"),
    ("02_tokenizer_files.2", without_themselves, "must stay, too"),
    ("02_tokenizer_files.2", without_bytes, "single bytes belong"),
]
