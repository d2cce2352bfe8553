"""The graders of notebook 09 accept the solutions and explain planted wrong answers."""

import math

import torch
import torch.nn.functional as F

from minillm.training.data import get_batch


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


def score_gradients(q, k, d_scores):
    return d_scores @ k / math.sqrt(q.shape[1]), d_scores.T @ q / math.sqrt(q.shape[1])


def lost_transpose(q, k, d_scores):
    scale = math.sqrt(q.shape[1])
    return d_scores @ k / scale, d_scores @ q / scale


def unscaled(q, k, d_scores):
    return d_scores @ k, d_scores.T @ q


def scaled_by_size(q, k, d_scores):
    return d_scores @ k / q.shape[1], d_scores.T @ q / q.shape[1]


def swapped(q, k, d_scores):
    return tuple(reversed(score_gradients(q, k, d_scores)))


def total_loss(model, batch, reduction):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction=reduction)


def accumulate(model, batches):
    count = sum(int((y != -100).sum()) for _, y in batches)
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = total_loss(model, batch, "sum") / count
        loss.backward()
        total += loss.item()
    return total


def mean_of_means(model, batches):
    model.zero_grad()
    losses = [total_loss(model, batch, "mean") / len(batches) for batch in batches]
    torch.stack(losses).sum().backward()
    return sum(loss.item() for loss in losses)


def undivided(model, batches):
    model.zero_grad()
    for batch in batches:
        total_loss(model, batch, "sum").backward()
    return 0.0


def all_positions(model, batches):
    model.zero_grad()
    for batch in batches:
        (total_loss(model, batch, "sum") / sum(y.numel() for _, y in batches)).backward()
    return 0.0


def one_large_batch(model, batches):
    model.zero_grad()
    loss = total_loss(
        model, tuple(torch.cat(parts) for parts in zip(*batches, strict=True)), "mean"
    )
    loss.backward()
    return loss.item()


def keeps_old(model, batches):
    count = sum(int((y != -100).sum()) for _, y in batches)
    losses = [total_loss(model, batch, "sum") / count for batch in batches]
    torch.stack(losses).sum().backward()
    return sum(loss.item() for loss in losses)


def wrong_loss(model, batches):
    return accumulate(model, batches) * 2


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


class Unshifted(EpochBatches):
    def __next__(self):
        x, _ = super().__next__()
        return x, x


RIGHT = {
    "09.1": targets,
    "09.2": score_gradients,
    "09.3": accumulate,
    "09.4": EpochBatches,
}


WRONG = [
    ("09.1", in_place, "changes the rows"),
    ("09.1", twice, "4 inputs and 4 targets"),
    ("09.1", unmasked, "learns to predict padding"),
    ("09.1", copies, "learn to copy"),
    ("09.1", masked_inputs, "not a token"),
    ("09.1", fixed_pad, "id of the padding"),
    ("09.2", lost_transpose, "transpose"),
    ("09.2", unscaled, "divided by sqrt(D)"),
    ("09.2", scaled_by_size, "not by D"),
    ("09.2", swapped, "dq is wrong"),
    ("09.3", mean_of_means, "average the batches' means"),
    ("09.3", undivided, "forgot to divide"),
    ("09.3", all_positions, "label -100 do not count"),
    ("09.3", one_large_batch, "was called 1 times"),
    ("09.3", keeps_old, "adds to the old gradients"),
    ("09.3", wrong_loss, "you return"),
    ("09.4", SameOrder, "same order"),
    ("09.4", InOrder, "shuffle them"),
    ("09.4", Random, "each should come once"),
    ("09.4", Forgetful, "goes on with other windows"),
    ("09.4", TensorState, "not plain data"),
    ("09.4", OnlyEpoch, "goes on with other windows"),
    ("09.4", Unseeded, "generator of your own"),
    ("09.4", NoSeed, "another seed gives the same order"),
    ("09.4", Unshifted, "not the tokens that follow"),
]
