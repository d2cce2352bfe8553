"""The graders of 13 accept right answers and say what is wrong with wrong ones."""

import math

import pytest

from minillm.exercises import grade

COUNTED = {
    "one answer of 3 tokens, the end token marked": 4,
    "one answer of 3 tokens, the end token outside the marks": 3,
    "an empty answer, the end token marked": 1,
    "two answers, of 3 and 2 tokens, the end tokens marked": 7,
    "the first and the fourth of these, packed in one row": 11,
    "one answer of 3 tokens, the end token marked, in a row cut after 2 tokens of the answer": 2,
}
ONE, OUTSIDE, EMPTY, TWO, PACKED, CUT = COUNTED


def shifted(ids, mask):
    return ids[:-1], [i if m else -100 for i, m in zip(ids[1:], mask[1:], strict=True)]


def not_shifted(ids, mask):
    return ids[:-1], [i if m else -100 for i, m in zip(ids[:-1], mask, strict=False)]


def mask_not_shifted(ids, mask):
    return ids[:-1], [i if m else -100 for i, m in zip(ids[1:], mask, strict=False)]


def inputs_masked(ids, mask):
    return [i if m else -100 for i, m in zip(ids, mask, strict=True)][:-1], ids[1:]


def overwriting(ids, mask):
    inputs = ids[:-1]
    for t, learned in enumerate(mask):
        if not learned:
            ids[t] = -100
    return inputs, ids[1:]


def alone(numbers):
    T = len(numbers)
    positions = []
    for t in range(T):
        same = t > 0 and numbers[t] == numbers[t - 1]
        positions.append(positions[-1] + 1 if same else 0)
    mask = [[t - positions[t] <= s <= t for s in range(T)] for t in range(T)]
    return positions, mask


def broken(numbers):
    T = len(numbers)
    return list(range(T)), [[s <= t for s in range(T)] for t in range(T)]


def only_positions(numbers):
    return alone(numbers)[0], broken(numbers)[1]


def same_number(numbers):
    pairs = [[s <= t and a == b for s, b in enumerate(numbers)] for t, a in enumerate(numbers)]
    return [t - numbers.index(a) for t, a in enumerate(numbers)], pairs


def only_not_earlier(numbers):
    """Takes numbers for ones that grow along the row."""
    pairs = [[s <= t and b >= a for s, b in enumerate(numbers)] for t, a in enumerate(numbers)]
    return alone(numbers)[0], pairs


def both_ways(numbers):
    return alone(numbers)[0], [[a == b for b in numbers] for a in numbers]


def only_itself(numbers):
    T = len(numbers)
    return alone(numbers)[0], [[s == t for s in range(T)] for t in range(T)]


def loss_of_pair(c, r, ref_c, ref_r, beta):
    x = -beta * ((c - ref_c) - (r - ref_r))
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def naive(c, r, ref_c, ref_r, beta):
    return -math.log(1 / (1 + math.exp(-beta * ((c - ref_c) - (r - ref_r)))))


RIGHT = {"13.1": shifted, "13.2": COUNTED, "13.3": alone, "13.4": loss_of_pair}
WRONG = [
    ("13.1", not_shifted, "not the input itself"),
    ("13.1", mask_not_shifted, "whether an id is learned, not whether one is read"),
    ("13.1", inputs_masked, "the model reads all ids"),
    ("13.1", lambda ids, mask: (ids, shifted(ids, mask)[1]), "nothing follows the last id"),
    ("13.1", lambda ids, mask: (ids[:-1], ids[1:]), "the mask is not used"),
    ("13.1", lambda ids, mask: (ids[:-1], shifted(ids, mask)[1][1:]), "4 inputs and 3 targets"),
    ("13.1", lambda ids, mask: shifted(ids, mask)[1], "return two lists"),
    ("13.1", lambda ids, mask: shifted(ids, mask)[::-1], "the inputs first, then the targets"),
    ("13.1", overwriting, "the lists that were given are changed"),
    ("13.2", {**COUNTED, ONE: 3}, "learn to stop"),
    ("13.2", {**COUNTED, OUTSIDE: 4}, "not marked does not count"),
    ("13.2", {**COUNTED, EMPTY: 0}, "how does it end"),
    ("13.2", {**COUNTED, TWO: 6}, "how many end tokens"),
    ("13.2", {**COUNTED, PACKED: 10}, "does packing change"),
    ("13.2", {**COUNTED, CUT: 0}, "before the cut"),
    ("13.2", {**COUNTED, CUT: ...}, "not filled in"),
    ("13.2", {**COUNTED, CUT: "two"}, "write a number, not 'two'"),
    ("13.2", {**COUNTED, EMPTY: True}, "write a number, not True"),
    ("13.2", {**COUNTED, ONE: 3.5}, "not 3.5; the model must also learn to stop"),
    ("13.2", [4, 3, 1, 7, 11, 2], "a dictionary"),
    ("13.3", broken, "go on from one example to the next"),
    ("13.3", only_positions, "query 2 reads key 0, of another example"),
    ("13.3", only_not_earlier, "query 2 reads key 0, of another example"),
    ("13.3", both_ways, "query 0 reads key 1, which comes later"),
    ("13.3", only_itself, "query 1 must read key 0"),
    ("13.3", lambda numbers: [0] * len(numbers), "return the positions and the mask"),
    ("13.4", naive, "large numbers need another form"),
    ("13.4", lambda c, r, a, b, beta: loss_of_pair(c, r, 0, 0, beta), "the reference is missing"),
    ("13.4", lambda c, r, a, b, beta: loss_of_pair(r, c, b, a, beta), "the other way round"),
    ("13.4", lambda c, r, a, b, beta: loss_of_pair(c, r, a, b, 1), "beta belongs inside"),
    ("13.4", lambda c, r, a, b, beta: -math.exp(-loss_of_pair(c, r, a, b, beta)), "logarithm"),
    ("13.4", lambda c, r, a, b, beta: -beta * ((c - a) - (r - b)), "the margin itself"),
    ("13.4", lambda c, r, a, b, beta: -loss_of_pair(c, r, a, b, beta), "the minus before"),
    ("13.4", lambda c, r, a, b, beta: 1.0, "1.0 is not"),
]
ALSO_RIGHT = [
    ("13.1", lambda ids, mask: [*map(list, shifted(ids, mask))]),
    ("13.2", {**COUNTED, ONE: 4.0}),
    ("13.3", same_number),
]


@pytest.mark.parametrize(("name", "answer"), ALSO_RIGHT)
def test_other_right_answers(name, answer):
    assert grade(name, answer).status == "correct"
