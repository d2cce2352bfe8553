"""Wrong answers of 09_many_processes: exercise, answer, words that its message holds."""

import torch

GIGABYTES: dict[str, float] = {
    "DDP, held by each": 128,
    "FSDP, held by each": 16,
    "DDP, sent": 56,
    "FSDP, sent": 84,
}


def combine(gradients, counts):
    return sum(n * g for g, n in zip(gradients, counts, strict=True)) / sum(counts)


def in_place(gradients, counts):
    for g, n in zip(gradients, counts, strict=True):
        g *= n / sum(counts)
    return sum(gradients)


WRONG = [
    ("09_many_processes.1", lambda g, n: sum(g) / len(g), "weighs as much as"),
    ("09_many_processes.1", lambda g, n: sum(g), "means were added up"),
    ("09_many_processes.1", lambda g, n: combine(g, n) * sum(n), "gradient of the sum"),
    ("09_many_processes.1", lambda g, n: combine(g, n) * sum(n) / max(n), "not by the most"),
    ("09_many_processes.1", lambda g, n: sum(g) / sum(n), "already divided"),
    ("09_many_processes.1", lambda g, n: combine(g, n) * sum(n) / len(n), "not by that of"),
    ("09_many_processes.1", lambda g, n: g[0], "not the gradient of the mean"),
    ("09_many_processes.1", lambda g, n: torch.stack(g), "shape of one gradient"),
    ("09_many_processes.1", lambda g, n: 0.5, "shape of one gradient"),
    ("09_many_processes.1", in_place, "changes the gradients"),
    ("09_many_processes.2", lambda rank, round, size: (rank - round) % size, "to the right"),
    ("09_many_processes.2", lambda rank, round, size: rank, "counted twice"),
    ("09_many_processes.2", lambda rank, round, size: round, "no chunk of process"),
    ("09_many_processes.2", lambda rank, round, size: rank + round, "of 0 to 2"),
    ("09_many_processes.2", lambda rank, round, size: (rank + round) % 3, "4 processes"),
    ("09_many_processes.2", lambda rank, round, size: 0, "counted twice"),
    ("09_many_processes.3", {**GIGABYTES, "DDP, held by each": 16}, "holds everything"),
    ("09_many_processes.3", {**GIGABYTES, "DDP, held by each": 32}, "four numbers"),
    ("09_many_processes.3", {**GIGABYTES, "FSDP, held by each": 44}, "sharded as well"),
    ("09_many_processes.3", {**GIGABYTES, "DDP, sent": 64}, "in each half"),
    ("09_many_processes.3", {**GIGABYTES, "FSDP, sent": 112}, "only scattered"),
    ("09_many_processes.3", {**GIGABYTES, "FSDP, sent": 84e9}, "not in bytes"),
    ("09_many_processes.3", {**GIGABYTES, "FSDP, sent": 1}, "not 1"),
    ("09_many_processes.3", {**GIGABYTES, "FSDP, sent": "84"}, "write a number"),
    ("09_many_processes.3", {**GIGABYTES, "FSDP, sent": ...}, "not filled in"),
    ("09_many_processes.3", [128], "a dictionary"),
]
