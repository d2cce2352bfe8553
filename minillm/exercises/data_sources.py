"""Graders of 07_data_sources: first fit, a shuffled stream that resumes, shares to predict."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from minillm.exercises import Unsolved, check_table, exercise, is_number


def _fit(lengths: list[int], width: int, choose: Callable[[list[int]], int]) -> list[list[int]]:
    """Each length into one of the rows where it fits, given by `choose` from what they hold."""
    rows: list[list[int]] = []
    for n in lengths:
        fits = [i for i, row in enumerate(rows) if sum(row) + n <= width]
        if fits:
            rows[fits[choose([sum(rows[i]) for i in fits])]].append(n)
        else:
            rows.append([n])
    return rows


def _next_fit(lengths: list[int], width: int) -> list[list[int]]:
    rows: list[list[int]] = [[]]
    for n in lengths:
        if sum(rows[-1]) + n > width:
            rows.append([])
        rows[-1].append(n)
    return [row for row in rows if row]


def _falling(lengths: list[int]) -> list[int]:
    return sorted(lengths, reverse=True)


def _in_order(rows: Iterable[Iterable[int]]) -> list[list[int]]:
    return [sorted(row, reverse=True) for row in rows]


OTHER_WAYS: list[tuple[Callable[[list[int], int], list[list[int]]], str]] = [
    (lambda x, w: _fit(x, w, lambda sums: 0), "in the order given; take the longest first"),
    (lambda x, w: _fit(sorted(x), w, lambda sums: 0), "the shortest first; take the longest"),
    (
        lambda x, w: _fit(_falling(x), w, lambda sums: sums.index(max(sums))),
        "that is best fit, into the fullest row; asked is the first that has room",
    ),
    (
        lambda x, w: _fit(_falling(x), w, lambda sums: sums.index(min(sums))),
        "that is the emptiest row; asked is the first that has room",
    ),
    (
        lambda x, w: _fit(_falling(x), w, lambda sums: -1),
        "that is the last row that has room; asked is the first",
    ),
    (
        lambda x, w: _fit(_falling(x), w - 1, lambda sums: 0),
        "a row may be filled to its last place",
    ),
    (
        lambda x, w: _next_fit(_falling(x), w),
        "only the last row was looked at; earlier ones have room",
    ),
    (_next_fit, "only the last row was looked at, and nothing was sorted"),
]


@exercise(
    "07_data_sources.1",
    "put the longest first, each into the first row that has room; open a row if none has",
    "the long ones open rows, the short ones fill their gaps; nothing is cut",
)
def _first_fit(answer: Callable[[list[int], int], list[list[int]]]) -> str | None:
    draw = random.Random(4)
    cases = [([3, 9, 5, 2], 12), ([4, 4, 4], 12), ([12], 12), ([12, 15, 1, 7], 20), ([], 7)]
    for _ in range(30):
        cases.append(([draw.randint(1, 12) for _ in range(draw.randint(5, 12))], 20))
    for lengths, width in cases:
        given = list(lengths)
        rows = answer(given, width)
        case = f"lengths {lengths}, width {width}"
        if given != lengths:
            return f"{case}: your function changes the list it was given"
        try:
            found = [list(row) for row in rows]
            flat = Counter(n for row in found for n in row)
        except TypeError:
            return f"{case}: the result is a list of rows, each a list of lengths, not {rows!r}"
        if flat != Counter(lengths):
            return f"{case}: every length stands in one row, once, uncut; yours are {found}"
        if full := [row for row in found if sum(row) > width]:
            return f"{case}: the row {full[0]} has {sum(full[0])}, more than fit"
        if [] in found:
            return f"{case}: there is an empty row"
        want = _fit(_falling(lengths), width, lambda sums: 0)
        shown = _in_order(found)
        if shown == want:
            continue
        if sorted(shown) == sorted(want):
            return f"{case}: the rows stand in the order in which they were opened, {want}"
        for other, hint in OTHER_WAYS:
            if all(_in_order(answer(list(x), w)) == _in_order(other(x, w)) for x, w in cases):
                return f"{case}: {hint}"
        return f"{case}: first fit gives {want}, yours are {found}"
    return None


class _Counting:
    """A stream of 0, 1, 2, ... that can go back."""

    def __init__(self) -> None:
        self.index = 0
        self.farthest = 0

    def __iter__(self) -> _Counting:
        return self

    def __next__(self) -> int:
        self.index += 1
        self.farthest = max(self.farthest, self.index)
        return self.index - 1

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


@exercise(
    "07_data_sources.2",
    "draw a buffer, shuffle it by a seed of its own, and keep where the stream stood before it",
    "the place is the stream's place before the buffer, and how many were taken from it",
)
def _shuffled(answer: Any) -> str | None:
    def take(source: Any, count: int) -> list[int]:
        items = [next(source) for _ in range(count)]
        if None in items or ... in items:
            raise Unsolved
        return [int(n) for n in items]

    stream = _Counting()
    seen = take(answer(stream, 10, 0), 30)
    if sorted(seen) != list(range(30)):
        twice = sorted(n for n, times in Counter(seen).items() if times > 1)
        what = (
            f"{twice[0]} came twice" if twice else f"{min(set(range(30)) - set(seen))} is missing"
        )
        return f"the first 30 items should be 0 to 29 in some order, and {what}"
    if stream.farthest > 30:
        return f"for 30 items {stream.farthest} were drawn: no more than {10} at a time are held"
    blocks = [seen[i : i + 10] for i in (0, 10, 20)]
    if seen == sorted(seen):
        return "the items come in the order of the stream"
    if any(sorted(block) != list(range(10 * i, 10 * i + 10)) for i, block in enumerate(blocks)):
        return (
            f"the first 10 items are 0 to 9 in some order, then 10 to 19; yours begin {seen[:12]}"
        )
    if [n - 10 for n in blocks[1]] == blocks[0]:
        return "every buffer is shuffled in the same way: let it depend on the buffer's number too"
    if take(answer(_Counting(), 10, 1), 30) == seen:
        return "another seed gives the same order"
    if take(answer(_Counting(), 10, 0), 30) != seen:
        return "the same seed gives another order: use a generator of your own, seeded"
    for taken in (13, 0, 3, 10, 17, 20, 25):
        source, stream = answer(_Counting(), 10, 0), _Counting()
        take(source, taken)
        state = source.state_dict()
        if state is None or state is ...:
            raise Unsolved
        try:
            text = json.dumps(state)
        except TypeError as error:
            return f"your state is not plain data: {error}"
        expected = take(source, 25)
        other = answer(stream, 10, 0)
        take(other, 4)
        other.load_state_dict(json.loads(text))
        got = take(other, 25)
        if got != expected:
            case = f"after {taken} items, a stream that loads the state goes on with {got[:4]} ..."
            if got == seen[:25]:
                return f"{case}, from the start again"
            if set(got) & set(seen[:taken]):
                return f"{case}, which came before"
            if missing := sorted(set(expected[: 10 - taken % 10]) - set(got)):
                return (
                    f"{case}; {missing[0]} was in the buffer and never comes: the place is too far"
                )
            return (
                f"{case} instead of {expected[:4]}: what decides the order is not all in the state"
            )
    return None


SHARES: dict[str, float] = {
    "never seen after windows of two epochs' length": math.exp(-2),
    "never seen after two epochs by permutation": 0.0,
    "targets, documents of 10 and 90 tokens, each in a row of 102 inputs": 0.5,
    "targets, both packed into one such row": 1.0,
}
_UNSEEN, _PERMUTED, _PADDED, _PACKED = SHARES
_SLIPS: dict[str, list[tuple[float, str]]] = {
    _UNSEEN: [
        (math.exp(-1), "that is after one epoch's length"),
        (1 - math.exp(-2), "that is the share that was seen"),
        (0.0, "windows at random places overlap, and leave gaps"),
        (0.5 * math.exp(-1), "each further epoch's length leaves e^-1 of what was left"),
    ],
    _PERMUTED: [
        (math.exp(-2), "a permutation takes everything once an epoch"),
        (math.exp(-1), "a permutation takes everything once an epoch"),
    ],
    _PADDED: [(100 / 204, "the end token after a document is a target too")],
    _PACKED: [
        (100 / 102, "each document has an end token after it, and that is a target"),
        (0.5, "both lie in one row now"),
        (101 / 102, "each of the two documents has an end token after it"),
    ],
}


def _slip(question: str, value: float) -> str | None:
    off, sentence = min((abs(value - slip), sentence) for slip, sentence in _SLIPS[question])
    return sentence if off < 0.006 else None


@exercise(
    "07_data_sources.3",
    "count targets: what follows the first end token, up to and with the last",
    "random windows leave e to the minus epochs unseen; packing turned half padding into none",
)
def _shares(answer: Any) -> str | None:
    return check_table(
        answer,
        SHARES,
        dict.fromkeys(SHARES, "draw the rows, and mark their targets"),
        _slip,
        kind="a share between 0 and 1",
        fits=lambda value: is_number(value) and 0 <= value <= 1,
        near=0.005,
    )
