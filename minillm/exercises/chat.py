"""Graders of the page 10_chat: what may be kept of a cache, and what a conversation costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minillm.exercises import check_table, check_values, exercise

_CASES: tuple[tuple[str, list[int], list[int], list[int]], ...] = (
    ("a prompt that goes on", [1, 2, 3, 4], [4, 4], [1, 2, 3, 4, 5, 6]),
    ("a prompt that differs in the middle", [1, 2, 3, 4, 5], [5, 5], [1, 2, 9, 4, 5, 6]),
    ("the same prompt again", [1, 2, 3], [3, 3], [1, 2, 3]),
    ("a prompt that is a beginning of it", [1, 2, 3, 4, 5], [5, 5], [1, 2, 3]),
    ("a pass that was cut off", [1, 2, 3, 4], [4, 3, 2], [1, 2, 3, 4, 5]),
    ("a crop that was cut off", [1, 2, 3, 4], [2, 4, 4], [1, 2, 3, 4, 5]),
    ("an answer whose last token was never computed", [1, 2, 3], [2, 2], [1, 2, 3, 4]),
    ("an empty cache", [], [0, 0], [1, 2]),
)


def _agree(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@exercise(
    "10_chat.1",
    "three things limit it: the ids, what every layer holds, and whose scores are needed",
    "what is kept agrees in its ids, is held by every layer, and is not the prompt's last",
)
def _cut_back(answer: Callable[[list[int], list[int], list[int]], Any]) -> str | None:
    for case, held, lengths, prompt in _CASES:
        agree, least, last = _agree(held, prompt), min(lengths), len(prompt) - 1
        want, got = min(agree, least, last), answer([*held], [*lengths], [*prompt])
        if isinstance(got, bool) or not hasattr(got, "__float__"):
            return f"return a number of positions, not {got!r}"
        alike = min(len({*held} & {*prompt}), least, last)
        slips = {
            "the last position has no scores yet, so it is computed again": min(agree, least),
            f"a layer holds {least} positions only": min(agree, last),
            "after the first difference nothing counts, be it alike or not": alike,
        }
        said = f"{want} positions may stay, not {got}"
        if why := check_values(got, want, slips, otherwise=said):
            return f"{case}: held={held}, lengths={lengths}, prompt={prompt}: {why}"
    return None


COMPUTED = {
    "nothing is kept": 70,
    "the cache is kept": 11,
    "the template drops the first answer's 12 tokens of thought, which came first": 28,
    "the template writes the time into the system message, after 5 tokens": 65,
    "the answer was stopped after 15 tokens; the template writes its end token": 12,
}
_WHY = (
    "then the whole prompt is computed",
    "the cache holds all but the answer's last token, which was drawn and not computed",
    "what stays is what stands before the thought; the rest of the answer and the question are new",
    "all after the first difference is new, also what is alike",
    "new are the last token that was drawn, the end token that nobody drew, and the question",
)


@exercise(
    "10_chat.2",
    "how long is the prompt, and how much of its beginning does the cache hold?",
    "what is computed is the prompt without what agrees from its beginning on",
)
def _computed(answer: Any) -> str | None:
    return check_table(answer, COMPUTED, dict(zip(COMPUTED, _WHY, strict=True)))


def _work(n: int, q: int, a: int) -> tuple[int, int]:
    turn = q + a
    anew = sum((i * turn + q) + (a - 1) for i in range(n))
    return anew, n * turn - 1


@exercise(
    "10_chat.3",
    "how long is the prompt of turn i? and in which turn is each position computed?",
    "anew the work grows with the square of n; kept, every position but the last is computed once",
)
def _total(answer: Callable[[int, int, int], Any]) -> str | None:
    for n, q, a in ((1, 10, 5), (2, 10, 5), (5, 7, 1), (40, 30, 200)):
        want, got = _work(n, q, a), answer(n, q, a)
        got = got.tolist() if hasattr(got, "tolist") else got
        if not isinstance(got, tuple | list) or len(got) != 2:
            return "return two numbers: all anew, and with the cache kept"
        case = f"n={n}, q={q}, a={a}"
        if tuple(got) == want:
            continue
        if tuple(got) == want[::-1]:
            return f"{case}: first all anew, then with the cache kept"
        if got[0] == want[0] + n or got[1] == want[1] + 1:
            return f"{case}: the last token of an answer is drawn, not computed"
        if got[1] != want[1] and got[1] == n * (q + a - 1):
            return f"{case}: the last token of an answer is computed after all, a turn later"
        if got[0] == n * (q + a) - n:
            return f"{case}: a prompt holds all that was said before it, not the question only"
        which = "all anew" if got[0] != want[0] else "with the cache kept"
        return f"{case}: {which} it is {want[got[0] == want[0]]}, not {got[got[0] == want[0]]}"
    return None
