"""Graders of the page 02_tokenizer_files: ranks, pruning, merges from ranks, what changes ids."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from minillm.exercises import check_table, exercise


@exercise(
    "02_tokenizer_files.1",
    "how many bits does a character carry, how many a byte? what may be left over at the end?",
    "base64 carries any bytes through a file of text, and the rank is all else that is needed",
)
def _read_ranks(answer: Callable[[list[bytes]], Mapping[bytes, int]]) -> str | None:
    ranks = {b"!": 0, b" the": 262, "\u4e2d".encode(): 5, b"\xe4\xb8": 70, b" \n": 7, b"a=": 8}
    ranks |= {b"\xfb\xff": 9, b"    ": 300}  # the first needs + and /
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    got = dict(answer(list(lines)))
    if got == ranks:
        return None
    if any(isinstance(token, int) for token in got):
        return "the keys are the tokens, the values their ranks"
    if any(isinstance(token, str) for token in got):
        return "a token is bytes, not text: some tokens end inside a character"
    if {*got} <= {line.split()[0] for line in lines}:
        return "the tokens are still spelled in base64"
    if [*got.values()] == [*range(len(got))]:
        return "the rank is the number in the line, not the number of the line"
    if {*map(type, got.values())} != {int}:
        return "a rank is a whole number (int)"
    bytes_of = {rank: token for token, rank in ranks.items()}
    longer = [len(token) - len(bytes_of.get(rank, token)) for token, rank in got.items()]
    if max(longer, default=0) > 0:
        return "a token is too long: = stands for no bits, and bits left over make no byte"
    if min(longer, default=0) < 0:
        return "a token is too short: count eight bits for each byte, across the characters"
    return f"the ranks should be {ranks}, not {got}"


def _closure(wanted: Collection[bytes], parts: Mapping[bytes, tuple[bytes, bytes]]) -> set[bytes]:
    found, waiting = set(), list(wanted)
    while waiting:
        token = waiting.pop()
        if token not in found:
            found.add(token)
            waiting += parts.get(token, ())
    return found


@exercise(
    "02_tokenizer_files.2",
    "what must be there before a wanted token can be merged, and what before that?",
    "a token can be kept only with its parts, and the parts of these, down to the bytes",
)
def _to_keep(
    answer: Callable[[set[bytes], dict[bytes, tuple[bytes, bytes]]], Collection[bytes]],
) -> str | None:
    parts = {b"he": (b"h", b"e"), b" t": (b" ", b"t"), b" the": (b" t", b"he")}
    parts |= {b"nd": (b"n", b"d"), b"and": (b"a", b"nd"), b" then": (b" the", b"n")}
    for wanted in ({b" then", b"nd"}, {b" the"}, {b"x"}, set(), {b"and", b"he"}):
        want, got = _closure(wanted, parts), {*answer(set(wanted), dict(parts))}
        if got == want:
            continue
        once = {*wanted}.union(*(parts.get(token, ()) for token in wanted))
        if got == once:
            return f"{sorted(wanted)}: the parts of the parts are missing"
        if got == want - wanted:
            return f"{sorted(wanted)}: the wanted tokens themselves must stay, too"
        if got == {token for token in want if len(token) > 1}:
            return f"{sorted(wanted)}: the single bytes belong to it as well"
        if want < got:
            return f"{sorted(wanted)}: {min(got - want)!r} is part of no wanted token"
        return f"for {sorted(wanted)} the answer is {sorted(want)}, not {sorted(got)}"
    return None


def _below(ranks: Mapping[bytes, int], token: bytes) -> list[bytes]:
    """The parts of a token when its bytes are merged with the ranks below its own."""
    parts = [bytes([byte]) for byte in token]
    while True:
        found = [
            (ranks[a + b], i)
            for i, (a, b) in enumerate(pairwise(parts))
            if a + b in ranks and ranks[a + b] < ranks[token]
        ]
        if not found:
            return parts
        i = min(found)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


_VOCABULARIES = (  # the tokens beside the bytes, in the order of their ranks, and why
    (("ab", "bc", "abc"), "merging by rank joins the lowest rank first"),
    (("bc", "ab", "abc"), "the lowest rank comes first, wherever it stands in the word"),
    (("aa", "aaa"), "of two equal pairs the one on the left is joined first"),
    (("he", " t", " the", "nd", "an", "and", "in", "ing", "es", "est", "ine", "inest"), ""),
)


@exercise(
    "02_tokenizer_files.3",
    "take one token, begin with its single bytes, and merge as the encoder does; what may it use?",
    "a token's pair is what merging with the lower ranks ends with: other splits do not count",
)
def _merges_of(answer: Callable[[dict[bytes, int]], Sequence[Any]]) -> str | None:
    for words, why in _VOCABULARIES:
        ranks = {bytes([byte]): byte for byte in range(256)}
        ranks |= {word.encode(): 256 + i for i, word in enumerate(words)}
        want = [tuple(_below(ranks, word.encode())) for word in words]
        shuffled = dict(sorted(ranks.items(), key=lambda item: item[0][::-1]))
        found = answer(shuffled)
        if not isinstance(found, list | tuple):
            return f"return a list of pairs, not a {type(found).__name__}"
        got = [tuple(pair) if isinstance(pair, list | tuple) else pair for pair in found]
        if got == want:
            continue
        if any(len(pair) == 1 for pair in got if isinstance(pair, tuple)):
            return "with a token's own rank allowed, one part is left: use only the lower ranks"
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in got):
            return f"each entry is a pair of bytes, such as (b'a', b'b'), not {got[0]!r}"
        if any(not isinstance(part, bytes) for pair in got for part in pair):
            return "the parts are bytes: no ids, and not spelled as text"
        if sorted(got) == sorted(want):
            return "these are the right pairs, but not in the order of ranks"
        if len(got) > len(want):
            return f"one pair for each token of two bytes or more: {len(want)}, not {len(got)}"
        wrong = next((pair for pair, right in zip(got, want, strict=False) if pair != right), None)
        if wrong is None:
            return f"one pair for each token of two bytes or more: {len(want)}, not {len(got)}"
        right = want[got.index(wrong)]
        return f"with tokens {list(words)}: {wrong} should be {right}" + (f"; {why}" if why else "")
    return None


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
_WHY = {
    "the decoder is removed": "which way does a decoder work?",
    "the first line of the merges, h e, is removed": "which words hold he?",
    "the line of a merge that the sentence does not need is removed": "is that merge ever asked?",
    "two tokens of the sentence exchange their ids in vocab": "the tokens stay; what are ids?",
    "use_regex is left out of ByteLevel": "does GPT-2's pattern cut these words once more?",
    "add_prefix_space is set to true": "what does the text begin with then?",
    "truncation to 3 tokens is switched on": "how many tokens has the sentence?",
    "the post_processor adds a begin token": "encode of the library adds what the file asks for",
}


@exercise(
    "02_tokenizer_files.4",
    "follow the sentence through the steps of the picture: which step does the change touch?",
    "most keys change ids; the decoder does not, and some changes do not show in every sentence",
)
def _effects(answer: Any) -> str | None:
    kinds = ("same", "other")
    return check_table(
        answer, EFFECTS, _WHY, kind='"same" or "other"', fits=lambda value: value in kinds
    )
