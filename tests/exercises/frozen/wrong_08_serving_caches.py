"""Wrong answers of 08_serving_caches: exercise, answer, words that its message holds."""

import torch


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


def always_two_bytes(*shape, window=None, bytes_per_number=2):
    return cache_bytes(*shape, window=window)


def ring(length, window, shift=0, empty=-1):
    slots = [empty] * window
    for p in range(max(0, length - window), length):
        slots[(p + shift) % window] = p
    return slots


def one_based(length, window):
    return [p + 1 if p >= 0 else p for p in ring(length, window)]


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
    (
        "08_serving_caches.1",
        lambda layers, *shape, **options: cache_bytes(1, *shape, **options),
        "one layer",
    ),
    ("08_serving_caches.1", keys_only, "keys only"),
    ("08_serving_caches.1", values_like_keys, "values have 64 numbers"),
    ("08_serving_caches.1", numbers, "of 2 bytes each"),
    ("08_serving_caches.1", always_two_bytes, "a number has 4 bytes here"),
    ("08_serving_caches.1", windowless, "keeps no more than 4096"),
    ("08_serving_caches.1", always_full, "only 100 positions"),
    ("08_serving_caches.1", lambda *s, **options: 1 + cache_bytes(*s, **options), "bytes, not"),
    ("08_serving_caches.2", lambda n, w: list(range(max(0, n - w), n)), "there are 4 slots"),
    ("08_serving_caches.2", lambda n, w: ring(n, w, shift=1), "slot p % 4"),
    ("08_serving_caches.2", one_based, "counting from 0"),
    ("08_serving_caches.2", lambda n, w: ring(n, w, empty=0), "still empty"),
    (
        "08_serving_caches.2",
        lambda n, w: ring(n, w) if n <= w else ring(n - w, w),
        "the slots hold",
    ),
    ("08_serving_caches.3", NoSinks, "[0] should be there"),
    ("08_serving_caches.3", KeepsAll, "should have been dropped"),
    ("08_serving_caches.3", Twice, "there twice"),
    ("08_serving_caches.3", OnlyHeld, "update returns"),
    ("08_serving_caches.3", Mixed, "do not belong to their keys"),
]
