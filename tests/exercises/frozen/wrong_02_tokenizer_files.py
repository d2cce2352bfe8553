"""Wrong answers of 02_tokenizer_files: exercise, answer, words that its message holds."""

import base64
import string
from collections.abc import Collection, Mapping

from minillm.deeper.tokenizer.hf_json import spell, splits
from minillm.deeper.tokenizer.vocabulary import find_merges


def _closure(wanted: Collection[bytes], parts: Mapping[bytes, tuple[bytes, bytes]]) -> set[bytes]:
    found, waiting = set(), list(wanted)
    while waiting:
        token = waiting.pop()
        if token not in found:
            found.add(token)
            waiting += parts.get(token, ())
    return found


EFFECTS = {
    "the decoder is removed": "same",
    "the first line of the merges, h e, is removed": "other",
    "the line of a merge that the sentence does not need is removed": "same",
    "two tokens of the sentence exchange their ids in vocab": "other",
    "use_regex is left out of ByteLevel": "same",
    "add_prefix_space is set to true": "other",
    "truncation to 3 tokens is switched on": "other",
    "the post_processor adds a begin token": "other",
}


def read_ranks(lines):
    pairs = (line.split() for line in lines)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"


def by_bits(lines, keep=lambda spelled: spelled.rstrip("="), over=7):
    """base64 without the module."""
    ranks = {}
    for line in lines:
        spelled, rank = line.decode().split()
        bits = "".join(f"{max(ALPHABET.find(c), 0):06b}" for c in keep(spelled))
        token = bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits) - over, 8))
        ranks[token] = int(rank)
    return ranks


def with_the_rest(lines):
    return by_bits(lines, over=0)


def with_the_signs(lines):
    return by_bits(lines, keep=str)


def whole_groups(lines):
    return by_bits(lines, keep=lambda spelled: spelled[: len(spelled.rstrip("=")) // 4 * 4])


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


def merges_of(ranks):
    return [tuple(parts) for _, parts in find_merges(ranks)]


def longer(ranks):
    return [token for token in sorted(ranks, key=ranks.get) if len(token) > 1]


def first_split(ranks):
    return [min(splits(token, ranks), key=lambda pair: len(pair[0])) for token in longer(ranks)]


def longest_left(ranks):
    return [max(splits(token, ranks), key=lambda pair: len(pair[0])) for token in longer(ranks)]


def from_the_right(ranks):
    backwards = {token[::-1]: rank for token, rank in ranks.items()}
    return [(b[::-1], a[::-1]) for a, b in merges_of(backwards)]


def own_rank_too(ranks):
    return [(token,) for token in longer(ranks)]


def all_splits(ranks):
    return [pair for token in longer(ranks) for pair in splits(token, ranks)]


def in_the_order_of_the_dictionary(ranks):
    pairs = dict(zip(longer(ranks), merges_of(ranks), strict=True))
    return [pairs[token] for token in ranks if token in pairs]


WRONG = [
    ("02_tokenizer_files.1", as_text, "not text"),
    (
        "02_tokenizer_files.1",
        lambda lines: {rank: token for token, rank in read_ranks(lines).items()},
        "the keys are the tokens",
    ),
    ("02_tokenizer_files.1", spelled, "still spelled in base64"),
    ("02_tokenizer_files.1", numbered, "not the number of the line"),
    ("02_tokenizer_files.1", with_the_rest, "bits left over make no byte"),
    ("02_tokenizer_files.1", with_the_signs, "= stands for no bits"),
    ("02_tokenizer_files.1", whole_groups, "too short"),
    ("02_tokenizer_files.2", once, "the parts of the parts"),
    ("02_tokenizer_files.2", without_themselves, "must stay, too"),
    ("02_tokenizer_files.2", without_bytes, "single bytes belong"),
    (
        "02_tokenizer_files.2",
        lambda wanted, parts: {*_closure(wanted, parts), *(bytes([byte]) for byte in range(256))},
        "b'\\x00' is part of no wanted token",
    ),
    ("02_tokenizer_files.2", lambda wanted, parts: {*wanted, *parts}, "the answer is"),
    ("02_tokenizer_files.3", first_split, "the lowest rank first"),
    ("02_tokenizer_files.3", longest_left, "wherever it stands"),
    ("02_tokenizer_files.3", from_the_right, "the one on the left"),
    ("02_tokenizer_files.3", own_rank_too, "use only the lower ranks"),
    ("02_tokenizer_files.3", all_splits, "one pair for each token"),
    ("02_tokenizer_files.3", in_the_order_of_the_dictionary, "not in the order of ranks"),
    ("02_tokenizer_files.3", lambda ranks: merges_of(ranks)[:-1], "one pair for each token"),
    (
        "02_tokenizer_files.3",
        lambda ranks: [(spell(a), spell(b)) for a, b in merges_of(ranks)],
        "not spelled as text",
    ),
    ("02_tokenizer_files.3", longer, "a pair of bytes"),
    ("02_tokenizer_files.3", lambda ranks: dict(merges_of(ranks)), "not a dict"),
    ("02_tokenizer_files.4", {**EFFECTS, "the decoder is removed": "other"}, "which way"),
    (
        "02_tokenizer_files.4",
        {**EFFECTS, "use_regex is left out of ByteLevel": "other"},
        "once more",
    ),
    (
        "02_tokenizer_files.4",
        {**EFFECTS, "truncation to 3 tokens is switched on": "same"},
        "how many tokens",
    ),
    ("02_tokenizer_files.4", {**EFFECTS, "the decoder is removed": True}, 'write "same"'),
    ("02_tokenizer_files.4", {**EFFECTS, "the decoder is removed": ...}, "not filled in"),
    ("02_tokenizer_files.4", ["same"] * 8, "a dictionary"),
]
