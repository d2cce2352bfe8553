"""The graders of 07_many_processes accept right answers and say what is wrong with others."""

import pytest
import torch

from minillm.exercises import grade
from minillm.exercises.many_processes import GIGABYTES


def combine(gradients, counts):
    return sum(n * g for g, n in zip(gradients, counts, strict=True)) / sum(counts)


def by_weights(gradients, counts):
    weights = torch.tensor(counts).double() / sum(counts)
    return weights @ torch.stack(gradients)


def in_place(gradients, counts):
    for g, n in zip(gradients, counts, strict=True):
        g *= n / sum(counts)
    return sum(gradients)


RIGHT = {
    "07_many_processes.1": combine,
    "07_many_processes.2": lambda rank, round, size: (rank + round) % size,
    "07_many_processes.3": GIGABYTES,
}
WRONG = [
    ("07_many_processes.1", lambda g, n: sum(g) / len(g), "weighs as much as"),
    ("07_many_processes.1", lambda g, n: sum(g), "means were added up"),
    ("07_many_processes.1", lambda g, n: combine(g, n) * sum(n), "gradient of the sum"),
    ("07_many_processes.1", lambda g, n: combine(g, n) * sum(n) / max(n), "not by the most"),
    ("07_many_processes.1", lambda g, n: sum(g) / sum(n), "already divided"),
    ("07_many_processes.1", lambda g, n: combine(g, n) * sum(n) / len(n), "not by that of"),
    ("07_many_processes.1", lambda g, n: g[0], "not the gradient of the mean"),
    ("07_many_processes.1", lambda g, n: torch.stack(g), "shape of one gradient"),
    ("07_many_processes.1", lambda g, n: 0.5, "shape of one gradient"),
    ("07_many_processes.1", in_place, "changes the gradients"),
    ("07_many_processes.2", lambda rank, round, size: (rank - round) % size, "to the right"),
    ("07_many_processes.2", lambda rank, round, size: rank, "counted twice"),
    ("07_many_processes.2", lambda rank, round, size: round, "no chunk of process"),
    ("07_many_processes.2", lambda rank, round, size: rank + round, "of 0 to 2"),
    ("07_many_processes.2", lambda rank, round, size: (rank + round) % 3, "4 processes"),
    ("07_many_processes.2", lambda rank, round, size: 0, "counted twice"),
    ("07_many_processes.3", {**GIGABYTES, "DDP, held by each": 16}, "holds everything"),
    ("07_many_processes.3", {**GIGABYTES, "DDP, held by each": 32}, "four numbers"),
    ("07_many_processes.3", {**GIGABYTES, "FSDP, held by each": 44}, "sharded as well"),
    ("07_many_processes.3", {**GIGABYTES, "DDP, sent": 64}, "in each half"),
    ("07_many_processes.3", {**GIGABYTES, "FSDP, sent": 112}, "only scattered"),
    ("07_many_processes.3", {**GIGABYTES, "FSDP, sent": 84e9}, "not in bytes"),
    ("07_many_processes.3", {**GIGABYTES, "FSDP, sent": 1}, "not 1"),
    ("07_many_processes.3", {**GIGABYTES, "FSDP, sent": "84"}, "write a number"),
    ("07_many_processes.3", {**GIGABYTES, "FSDP, sent": ...}, "not filled in"),
    ("07_many_processes.3", [128], "a dictionary"),
]


@pytest.mark.parametrize("shift", [1, 2])
def test_any_ring_that_works_is_right(shift):
    def send(rank, round, size):
        return (rank + round + shift) % size

    assert grade("07_many_processes.2", send).status == "correct"


def test_weights_of_the_processes_are_another_right_answer():
    assert grade("07_many_processes.1", by_weights).status == "correct"


def test_the_predicted_numbers_follow_from_bytes():
    P, N, number = 8e9, 8, 4
    held = 4 * number * P / 1e9
    half = (N - 1) / N * number * P / 1e9
    assert list(GIGABYTES.values()) == [held, held / N, 2 * half, 3 * half]
