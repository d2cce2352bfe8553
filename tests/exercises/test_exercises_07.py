"""Planted wrong answers of notebook 07, each with the sentence that it earns; and right ones."""

import torch

from minillm.exercises import grade


def cache_bytes(layers, kv_heads, key_dim, value_dim, length, *, window=None, bytes_per_number=2):
    kept = length if window is None else min(length, window)
    return layers * kv_heads * (key_dim + value_dim) * kept * bytes_per_number


def keys_only(layers, kv_heads, key_dim, value_dim, length, *, window=None, bytes_per_number=2):
    return cache_bytes(
        layers, kv_heads, key_dim, 0, length, window=window, bytes_per_number=bytes_per_number
    )


def values_like_keys(layers, kv_heads, key_dim, value_dim, length, **options):
    return cache_bytes(layers, kv_heads, key_dim, key_dim, length, **options)


def windowless(*shape, window=None, **options):
    return cache_bytes(*shape, **options)


def always_full(layers, kv_heads, key_dim, value_dim, length, *, window=None, **options):
    return cache_bytes(layers, kv_heads, key_dim, value_dim, window or length, **options)


def numbers(*shape, window=None, bytes_per_number=2):
    return cache_bytes(*shape, window=window, bytes_per_number=1)


def ring(length, window, shift=0, empty=-1):
    slots = [empty] * window
    for p in range(max(0, length - window), length):
        slots[(p + shift) % window] = p
    return slots


def one_based(length, window):
    return [p + 1 if p >= 0 else p for p in ring(length, window)]


def finish(ids, end, pad, dim=1, keep=True):
    ended = (ids == end).int()
    after = ended.cumsum(dim) - (ended if keep else 0) > 0
    lengths = (ended.cumsum(1) - ended == 0).sum(1)
    return ids.masked_fill(after, pad), lengths


def finish_in_place(ids, end, pad):
    done, lengths = finish(ids, end, pad)
    return ids.copy_(done), lengths


def finish_short(ids, end, pad):
    done, lengths = finish(ids, end, pad)
    return done, lengths - (ids == end).any(1).int()


def first_end(ids, end, pad):  # argmax is 0 where there is no end
    return finish(ids, end, pad)[0], (ids == end).int().argmax(1) + 1


class Sinks:
    """Right: what is kept and what is returned, by position."""

    def __init__(self, sinks, window):
        self.sinks, self.window, self.length = sinks, window, 0
        self.positions, self.kept = torch.arange(0), None

    def key_positions(self, num_new):
        return torch.cat([self.positions, torch.arange(self.length, self.length + num_new)])

    def keep(self, positions):
        return (positions < self.sinks) | (positions >= self.length - self.window)

    def update(self, keys, values):
        positions = self.key_positions(keys.shape[2])
        pair = (keys, values)
        if self.kept is not None:
            pair = tuple(torch.cat([old, new], 2) for old, new in zip(self.kept, pair, strict=True))
        self.length += keys.shape[2]
        kept = self.keep(positions)
        self.positions, self.kept = positions[kept], tuple(x[:, :, kept] for x in pair)
        return pair


class NoSinks(Sinks):
    def keep(self, positions):
        return positions >= self.length - self.window


class KeepsAll(Sinks):
    def keep(self, positions):
        return positions >= 0


class Twice(Sinks):
    def key_positions(self, num_new):
        held = [*range(min(self.sinks, self.length)), *range(self.length)[-self.window :]]
        return torch.tensor(held + list(range(self.length, self.length + num_new)))

    def keep(self, positions):
        return slice(None)


class OnlyHeld(Sinks):
    def update(self, keys, values):
        super().update(keys, values)
        return self.kept


class Mixed(Sinks):
    def update(self, keys, values):
        keys, values = super().update(keys, values)
        return keys, values.flip(2)


WRONG = [
    ("07.1", lambda layers, *shape, **options: cache_bytes(1, *shape, **options), "one layer"),
    ("07.1", keys_only, "keys only"),
    ("07.1", values_like_keys, "values have 64 numbers"),
    ("07.1", numbers, "of 2 bytes each"),
    ("07.1", windowless, "keeps no more than 4096"),
    ("07.1", always_full, "only 100 positions"),
    ("07.1", lambda *s, **options: 1 + cache_bytes(*s, **options), "bytes, not"),
    ("07.2", lambda n, w: list(range(max(0, n - w), n)), "there are 4 slots"),
    ("07.2", lambda n, w: ring(n, w, shift=1), "slot p % 4"),
    ("07.2", one_based, "counting from 0"),
    ("07.2", lambda n, w: ring(n, w, empty=0), "still empty"),
    ("07.2", lambda n, w: ring(n, w) if n <= w else ring(n - w, w), "the slots hold"),
    ("07.3", lambda ids, end, pad: finish(ids, end, pad, dim=0, keep=False), "neighbour"),
    ("07.3", lambda ids, end, pad: finish(ids, end, pad, keep=False), "the end 9 itself is gone"),
    ("07.3", lambda ids, end, pad: (ids, finish(ids, end, pad)[1]), "after the first 9"),
    ("07.3", finish_in_place, "work on a copy"),
    ("07.3", finish_short, "the end counts"),
    ("07.3", first_end, "is whole"),
    ("07.3", lambda ids, end, pad: (torch.full_like(ids, pad), ids[:, 0]), "should become"),
    ("07.4", NoSinks, "[0] should be there"),
    ("07.4", KeepsAll, "should have been dropped"),
    ("07.4", Twice, "there twice"),
    ("07.4", OnlyHeld, "update returns"),
    ("07.4", Mixed, "do not belong to their keys"),
]  # fmt: skip


RIGHT = {"07.1": cache_bytes, "07.2": ring, "07.3": finish, "07.4": Sinks}


def test_a_class_with_stubs_is_unsolved():
    class Stub:
        def __init__(self, sinks, window):
            pass

        def key_positions(self, num_new):
            raise NotImplementedError

    assert grade("07.4", Stub).status == "unsolved"
