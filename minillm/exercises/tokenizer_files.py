"""Graders of the page 02_tokenizer_files: a file of ranks, and what pruning must keep."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping

from minillm.exercises import exercise


@exercise(
    "02_tokenizer_files.1",
    "Write read_ranks(lines): bytes of each token -> rank; each line is base64, a space, a number.",
    "base64 carries any bytes through a file of text, and the rank is all else that is needed",
)
def _read_ranks(answer: Callable[[list[bytes]], Mapping[bytes, int]]) -> str | None:
    ranks = {b"!": 0, b" the": 262, "\u4e2d".encode(): 5, b"\xe4\xb8": 70, b" \n": 7, b"a=": 8}
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    got = dict(answer(list(lines)))
    if got == ranks:
        return None
    if any(isinstance(token, str) for token in got):
        return "a token is bytes, not text: some tokens end inside a character"
    if {*got} <= {line.split()[0] for line in lines}:
        return "the tokens are still spelled in base64"
    if [*got.values()] == [*range(len(got))]:
        return "the rank is the number in the line, not the number of the line"
    if {*map(type, got.values())} != {int}:
        return "a rank is a whole number (int)"
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
    "Write to_keep(wanted, parts): the set of wanted tokens with all that they are merged from.",
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
        return f"for {sorted(wanted)} the answer is {sorted(want)}, not {sorted(got)}"
    return None
