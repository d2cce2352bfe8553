"""Wrong answers of 09: exercise, answer, words that its message holds."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.training import get_batch

Batches = list[tuple[Tensor, Tensor]]


def _loop(
    model: nn.Module, optimizer: Any, batches: Batches, mistakes: tuple[str, ...] = ()
) -> float:
    loss = torch.zeros(())
    for inputs, targets in batches:
        logits = model(inputs)
        logits = logits.softmax(-1) if "softmax" in mistakes else logits
        if "shift" in mistakes:
            logits, targets = logits[:, :-1], targets[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if "clear" not in mistakes:
            optimizer.zero_grad()
        loss.backward()
        if "clip" not in mistakes:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if "clip" in mistakes:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.item()


def targets(rows, pad):
    labels = rows[:, 1:].clone()
    labels[labels == pad] = -100
    return rows[:, :-1], labels


def in_place(rows, pad):
    labels = rows[:, 1:]
    labels[labels == pad] = -100
    return rows[:, :-1], labels


def twice(rows, pad):
    return rows[:, :-2], rows[:, 2:]


def unmasked(rows, pad):
    return rows[:, :-1], rows[:, 1:].clone()


def copies(rows, pad):
    labels = rows[:, :-1].clone()
    labels[labels == pad] = -100
    return rows[:, :-1], labels


def masked_inputs(rows, pad):
    inputs, labels = targets(rows, pad)
    return inputs.masked_fill(inputs == pad, -100), labels


def fixed_pad(rows, pad):
    return targets(rows, 2)


EXPECTED = {
    "first loss, all logits near 0 (nats)": 7.6,
    "loss of a model that is always torn between two tokens, both equally likely (nats)": 0.69,
    "slope for the target's logit, when its probability is 0.25 (one token)": -0.75,
    "sum of the slopes for all 2,000 logits of a token": 0,
    "FLOPs to train on 1,000 tokens, without attention's reading": 6_000_000_000,
    "AdamW's first step at rate 0.001 for a slope of 50, no decay (its size)": 1e-3,
    "joint length 5 clipped to 1: what becomes of a slope of 2": 0.4,
}

QUESTIONS = list(EXPECTED)


def train_right(model, optimizer, batches):
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def with_mistakes(*mistakes):
    return lambda *given: _loop(*given, mistakes)


def clipped_one_by_one(model, optimizer, batches):
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs).mT, targets)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            torch.nn.utils.clip_grad_norm_([p], 1.0)
        optimizer.step()
    return loss.item()


def cleared_too_late(model, optimizer, batches):
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs).mT, targets)
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
    return loss.item()


def two_steps(model, optimizer, batches):
    train_right(model, optimizer, batches)
    return train_right(model, optimizer, batches)


def returns_nothing(model, optimizer, batches):
    train_right(model, optimizer, batches)


class EpochBatches:
    """The solution: window i of epoch e is a permutation that depends on (seed, e) alone."""

    reshuffle = True

    def __init__(self, tokens, batch_size, context_length, seed):
        self.tokens, self.size, self.length = tokens, batch_size, context_length
        self.seed, self.index = seed, 0
        self.windows = (len(tokens) - 1) // context_length

    def order(self, epoch):
        generator = torch.Generator().manual_seed(self.seed * 10_000 + epoch * self.reshuffle)
        return torch.randperm(self.windows, generator=generator)

    def __next__(self):
        rows = []
        for _ in range(self.size):
            epoch, place = divmod(self.index, self.windows)
            start = int(self.order(epoch)[place]) * self.length
            rows.append(self.tokens[start : start + self.length + 1])
            self.index += 1
        rows = torch.stack(rows)
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


class SameOrder(EpochBatches):
    reshuffle = False


class InOrder(EpochBatches):
    def order(self, epoch):
        return torch.arange(self.windows)


class Random(EpochBatches):
    def __next__(self):
        self.index += 1
        generator = torch.Generator().manual_seed(self.seed + self.index)
        return get_batch(self.tokens, self.size, self.length, generator=generator)


class Forgetful(EpochBatches):
    def load_state_dict(self, state):
        pass


class TensorState(EpochBatches):
    def state_dict(self):
        return {"index": torch.tensor(self.index)}


class OnlyEpoch(EpochBatches):
    def state_dict(self):
        return {"index": self.index // self.windows * self.windows}


class Unseeded(EpochBatches):
    made = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        Unseeded.made += 1  # as a generator of its own would that nobody seeded
        self.seed += 100 * Unseeded.made


class NoSeed(EpochBatches):
    def order(self, epoch):
        return torch.randperm(self.windows, generator=torch.Generator().manual_seed(epoch))


class Summed(EpochBatches):
    def order(self, epoch):
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.windows, generator=generator)


class TooMany(EpochBatches):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.windows = len(self.tokens) // self.length


class Places(EpochBatches):
    def __init__(self, tokens, *arguments):
        super().__init__(torch.arange(len(tokens)) + 2000, *arguments)


class Apart(EpochBatches):
    """Windows that share no token."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.windows = len(self.tokens) // (self.length + 1)

    def __next__(self):
        rows = []
        for _ in range(self.size):
            epoch, place = divmod(self.index, self.windows)
            start = int(self.order(epoch)[place]) * (self.length + 1)
            rows.append(self.tokens[start : start + self.length + 1])
            self.index += 1
        rows = torch.stack(rows)
        return rows[:, :-1], rows[:, 1:]


class Unshifted(EpochBatches):
    def __next__(self):
        x, _ = super().__next__()
        return x, x


WRONG = [
    ("07.1", in_place, "changes the rows"),
    ("07.1", twice, "4 inputs and 4 targets"),
    ("07.1", unmasked, "learns to predict padding"),
    ("07.1", copies, "learn to copy"),
    ("07.1", masked_inputs, "not a token"),
    ("07.1", fixed_pad, "id of the padding"),
    ("07.2", EXPECTED | {QUESTIONS[0]: 10.97}, "in bits"),
    ("07.2", EXPECTED | {QUESTIONS[1]: 1.0}, "in bits"),
    ("07.2", EXPECTED | {QUESTIONS[2]: 0.75}, "the sign is not"),
    ("07.2", EXPECTED | {QUESTIONS[3]: 1}, "and so does the truth"),
    ("07.2", EXPECTED | {QUESTIONS[4]: 2e9}, "twice that backward"),
    ("07.2", EXPECTED | {QUESTIONS[5]: 0.05}, "up to the sign"),
    ("07.2", EXPECTED | {QUESTIONS[6]: 1.0}, "the same factor"),
    ("07.2", EXPECTED | {QUESTIONS[6]: ...}, "not filled in"),
    ("07.2", EXPECTED | {QUESTIONS[0]: "ln V"}, "write a number"),
    ("07.2", [7.6], "a dictionary"),
    ("07.3", with_mistakes("softmax", "shift", "clear", "clip"), "mistakes are left"),
    ("07.3", with_mistakes("softmax"), "softmax is still taken twice"),
    ("07.3", with_mistakes("shift"), "shifts them once more"),
    ("07.3", with_mistakes("clear"), "gradients of earlier steps"),
    ("07.3", with_mistakes("clip"), "between backward() and step()"),
    ("07.3", cleared_too_late, "no parameter has moved"),
    ("07.3", two_steps, "end elsewhere"),
    ("07.3", clipped_one_by_one, "that of their joint length"),
    ("07.3", returns_nothing, "now return the last loss"),
    ("07.4", SameOrder, "same order"),
    ("07.4", InOrder, "shuffle them"),
    ("07.4", Random, "each of 0, 10"),
    ("07.4", Apart, "each of 0, 10"),
    ("07.4", Forgetful, "goes on with other windows"),
    ("07.4", TensorState, "not plain data"),
    ("07.4", OnlyEpoch, "goes on with other windows"),
    ("07.4", Unseeded, "generator of your own"),
    ("07.4", NoSeed, "another seed gives the same order"),
    ("07.4", Summed, "mix seed and epoch"),
    ("07.4", Unshifted, "not the tokens that follow"),
    ("07.4", TooMany, "with 100 tokens your source raises"),
    ("07.4", Places, "not their places"),
]
