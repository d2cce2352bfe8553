"""The graders of 07_data_sources accept right answers and say what is wrong with others."""

import random

import pytest

from minillm.exercises import grade
from minillm.exercises.data_sources import SHARES

UNSEEN, PERMUTED, PADDED, PACKED = SHARES


def first_fit(lengths, width):
    rows = []
    for n in sorted(lengths, reverse=True):
        for row in rows:
            if sum(row) + n <= width:
                row.append(n)
                break
        else:
            rows.append([n])
    return rows


def with_room(lengths, width):
    """Another right answer: keeps the room that is left."""
    rows, room = [], []
    for n in sorted(lengths)[::-1]:
        place = next((i for i, r in enumerate(room) if r >= n), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(width)
        rows[place].append(n)
        room[place] -= n
    return rows


def unsorted(lengths, width):
    rows = []
    for n in lengths:
        place = next((row for row in rows if sum(row) + n <= width), None)
        if place is None:
            rows.append(place := [])
        place.append(n)
    return rows


def last_row_only(lengths, width):
    rows = [[]]
    for n in sorted(lengths, reverse=True):
        if sum(rows[-1]) + n > width:
            rows.append([])
        rows[-1].append(n)
    return [row for row in rows if row]


def best_fit(lengths, width):
    rows = []
    for n in sorted(lengths, reverse=True):
        fits = [row for row in rows if sum(row) + n <= width]
        if fits:
            max(fits, key=sum).append(n)
        else:
            rows.append([n])
    return rows


def last_fit(lengths, width):
    rows = []
    for n in sorted(lengths, reverse=True):
        fits = [row for row in rows if sum(row) + n <= width]
        if fits:
            fits[-1].append(n)
        else:
            rows.append([n])
    return rows


def worst_fit(lengths, width):
    rows = []
    for n in sorted(lengths, reverse=True):
        fits = [row for row in rows if sum(row) + n <= width]
        if fits:
            min(fits, key=sum).append(n)
        else:
            rows.append([n])
    return rows


def too_full(lengths, width):
    return first_fit(lengths, width + 1)


def cuts(lengths, width):
    total = sum(lengths)
    return [[min(width, total - i)] for i in range(0, total, width)]


def sorts_in_place(lengths, width):
    lengths.sort(reverse=True)
    return first_fit(lengths, width)


class Shuffled:
    def __init__(self, stream, size, seed):
        self.stream, self.size, self.seed = stream, size, seed
        self.number, self.taken, self.buffer = 0, 0, []
        self.before = stream.state_dict()

    def order(self):
        random.Random(f"{self.seed}/{self.number}").shuffle(self.buffer)

    def fill(self):
        self.before = self.stream.state_dict()
        self.buffer = [next(self.stream) for _ in range(self.size)]
        self.order()
        self.number, self.taken = self.number + 1, 0

    def __next__(self):
        if self.taken == len(self.buffer):
            self.fill()
        self.taken += 1
        return self.buffer[self.taken - 1]

    def state_dict(self):
        started = bool(self.buffer)
        return {"before": self.before, "number": self.number - started, "taken": self.taken}

    def load_state_dict(self, state):
        self.stream.load_state_dict(state["before"])
        self.number = state["number"]
        self.fill()
        self.taken = state["taken"]


class HoldsTheBuffer(Shuffled):
    """Another right answer: the items that are left are part of the state."""

    def state_dict(self):
        left = self.buffer[self.taken :]
        return {"stream": self.stream.state_dict(), "left": left, "number": self.number}

    def load_state_dict(self, state):
        self.stream.load_state_dict(state["stream"])
        self.buffer, self.taken, self.number = state["left"], 0, state["number"]


class InOrder(Shuffled):
    def order(self):
        pass


class SameEachTime(Shuffled):
    def order(self):
        random.Random(str(self.seed)).shuffle(self.buffer)


class NoSeed(Shuffled):
    def order(self):
        random.Random(str(self.number)).shuffle(self.buffer)


class Unseeded(Shuffled):
    def order(self):
        random.shuffle(self.buffer)


class ForgetsNumber(Shuffled):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "number": 0})


class PlaceOfTheStream(Shuffled):
    """Keeps where the stream stands now: what is left in the buffer is lost."""

    def state_dict(self):
        return {"before": self.stream.state_dict(), "number": self.number, "taken": 0}


class ForgetsTaken(Shuffled):
    def load_state_dict(self, state):
        super().load_state_dict({**state, "taken": 0})


class StartsAgain(Shuffled):
    def load_state_dict(self, state):
        super().load_state_dict({"before": {"index": 0}, "number": 0, "taken": 0})


class Drops(Shuffled):
    def fill(self):
        super().fill()
        self.buffer = self.buffer[:-1]


class Everything(Shuffled):
    def __init__(self, stream, size, seed):
        super().__init__(stream, 3 * size, seed)


class Ahead(Shuffled):
    """Draws the next buffer while the last is dealt."""

    def __init__(self, stream, size, seed):
        super().__init__(stream, size, seed)
        self.next = [next(stream) for _ in range(size)]

    def fill(self):
        self.buffer, self.next = self.next, [next(self.stream) for _ in range(self.size)]
        self.order()
        self.number, self.taken = self.number + 1, 0


class NotPlain(Shuffled):
    def state_dict(self):
        return {**super().state_dict(), "seen": {1, 2}}


RIGHT = {
    "07_data_sources.1": first_fit,
    "07_data_sources.2": Shuffled,
    "07_data_sources.3": SHARES,
}
WRONG = [
    ("07_data_sources.1", unsorted, "take the longest first"),
    ("07_data_sources.1", lambda n, w: unsorted(sorted(n), w), "shortest first"),
    ("07_data_sources.1", last_row_only, "only the last row was looked at"),
    ("07_data_sources.1", best_fit, "that is best fit"),
    ("07_data_sources.1", last_fit, "the last row that has room"),
    ("07_data_sources.1", worst_fit, "the emptiest row"),
    ("07_data_sources.1", lambda n, w: first_fit(n, w - 1), "filled to its last place"),
    ("07_data_sources.1", too_full, "more than fit"),
    ("07_data_sources.1", cuts, "uncut"),
    ("07_data_sources.1", sorts_in_place, "changes the list"),
    ("07_data_sources.1", lambda n, w: first_fit(n, w)[::-1], "order in which they were opened"),
    ("07_data_sources.1", lambda n, w: len(first_fit(n, w)), "a list of rows"),
    ("07_data_sources.2", InOrder, "in the order of the stream"),
    ("07_data_sources.2", SameEachTime, "shuffled in the same way"),
    ("07_data_sources.2", NoSeed, "another seed gives the same order"),
    ("07_data_sources.2", Unseeded, "the same seed gives another order"),
    ("07_data_sources.2", PlaceOfTheStream, "the place is too far"),
    ("07_data_sources.2", ForgetsTaken, "which came before"),
    ("07_data_sources.2", StartsAgain, "from the start again"),
    ("07_data_sources.2", Drops, "is missing"),
    ("07_data_sources.2", Everything, "the first 10 items are 0 to 9"),
    ("07_data_sources.2", Ahead, "no more than 10"),
    ("07_data_sources.2", ForgetsNumber, "which came before"),
    ("07_data_sources.2", NotPlain, "not plain data"),
    ("07_data_sources.3", {**SHARES, UNSEEN: 0.37}, "after one epoch's length"),
    ("07_data_sources.3", {**SHARES, UNSEEN: 0.86}, "share that was seen"),
    ("07_data_sources.3", {**SHARES, UNSEEN: 0}, "leave gaps"),
    ("07_data_sources.3", {**SHARES, PERMUTED: 0.14}, "once an epoch"),
    ("07_data_sources.3", {**SHARES, PADDED: 0.49}, "is a target too"),
    ("07_data_sources.3", {**SHARES, PACKED: 0.98}, "that is a target"),
    ("07_data_sources.3", {**SHARES, PACKED: 50}, "between 0 and 1"),
    ("07_data_sources.3", {**SHARES, PACKED: ...}, "not filled in"),
    ("07_data_sources.3", [0.14], "a dictionary"),
]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("07_data_sources.1", with_room),
        ("07_data_sources.2", HoldsTheBuffer),
        ("07_data_sources.3", {**SHARES, UNSEEN: 0.14}),
    ],
)
def test_other_right_answers(name, answer):
    assert grade(name, answer).status == "correct", grade(name, answer).message


def test_a_class_of_empty_methods_is_unsolved():
    class Stub:
        def __init__(self, stream, size, seed): ...

        def __next__(self): ...

    assert grade("07_data_sources.2", Stub).status == "unsolved"
