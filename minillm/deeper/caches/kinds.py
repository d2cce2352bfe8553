"""The kinds of caches by name; all but the one that grows are told in deeper/08_serving_caches.

Written by hand.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from minillm.cache import CacheLayer, KVCache
from minillm.support.checks.kinds import check_sizes

CACHE_KINDS = {  # where the class of each kind stands; it is imported when it is asked for
    "dynamic": "minillm.cache.CacheLayer",
    "static": "minillm.deeper.caches.static.StaticLayer",
    "sliding": "minillm.deeper.caches.sliding.SlidingLayer",
    "paged": "minillm.deeper.caches.paged.PagedLayer",
    "quantized": "minillm.deeper.caches.quantized.QuantizedLayer",
}


def layer_maker(
    kind: str, *, window: int | None = None, block_size: int = 16
) -> Callable[..., CacheLayer]:
    """What makes one layer's cache of a kind, from the sizes that all kinds have.

    Args:
        window: how many positions a query reads, itself included. "sliding" needs it and keeps no
            more; the other kinds keep everything and leave the window to the mask.
        block_size: positions in a block of a "paged" cache.
    Raises: ValueError for an unknown kind, a size below 1, a sliding cache without its window.
    """
    if kind not in CACHE_KINDS:
        raise ValueError(f"no cache kind {kind!r}; there are {', '.join(CACHE_KINDS)}")
    check_sizes(window=window, block_size=block_size)
    module, _, name = CACHE_KINDS[kind].rpartition(".")
    make = getattr(importlib.import_module(module), name)
    if kind == "sliding":
        if window is None:
            raise ValueError("a sliding cache needs window")
        return partial(make, window=window)
    return partial(make, block_size=block_size) if kind == "paged" else make


def cache_of(
    kind: str, num_layers: int, window: int | None, block_size: int, **sizes: Any
) -> KVCache:
    """A whole cache of a kind; `minillm.make_cache` tells the sizes. Raises: as `layer_maker`."""
    make = layer_maker(kind, window=window, block_size=block_size)
    layers: list[Any] = [make(**sizes) for _ in range(num_layers)]
    if kind == "static":
        from minillm.deeper.caches.static import StaticCache

        return StaticCache(layers)
    return KVCache(layers)
