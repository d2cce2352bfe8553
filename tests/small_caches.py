"""Small caches, the tokens that go into them, and a decoder that may use one: for the tests."""

import torch
from torch import nn

from minillm.attention import build_mask
from minillm.cache import KVCache
from minillm.deeper.attention.mla import MultiHeadLatentAttention
from minillm.deeper.caches.kinds import CACHE_KINDS
from minillm.heads import MultiHeadAttention
from minillm.layers import GatedMLP, RMSNorm
from minillm.rope import RotaryEmbedding
from minillm.support.modes import make_cache

WINDOW, BLOCK, MAX = 5, 4, 40
KINDS = list(CACHE_KINDS)
EXACT = [kind for kind in KINDS if kind != "quantized"]


def new(kind: str, batch_size=2, layers=2, heads=3, key_dim=4, value_dim=6, **options) -> KVCache:
    options = {"max_length": MAX, "window": WINDOW, "block_size": BLOCK} | options
    return make_cache(
        kind,
        num_layers=layers,
        batch_size=batch_size,
        num_kv_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        **options,
    )


def tokens(num: int, seed=0, batch_size=2, heads=3, layers=2, dims=(4, 6)) -> list:
    """Random keys and values for each layer: [(B, G, T, key_dim), (B, G, T, value_dim)]."""
    g = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(batch_size, heads, num, dim, generator=g) for dim in dims)
        for _ in range(layers)
    ]


def feed(cache: KVCache, new_tokens: list) -> list:
    return [layer.update(k, v) for layer, (k, v) in zip(cache.layers, new_tokens, strict=True)]


def state(cache: KVCache) -> tuple:
    """All that a later step could notice, without disturbing it."""
    twin = cache.fork()
    read = feed(twin, tokens(1, seed=99, batch_size=cache.batch_size)) if cache.length < MAX else []
    return cache.length, cache.nbytes, [t.clone() for pair in read for t in pair]


def assert_same(one: tuple, other: tuple) -> None:
    assert one[:2] == other[:2] and len(one[2]) == len(other[2])
    for a, b in zip(one[2], other[2], strict=True):
        assert torch.equal(a, b)


HEADS = {"MHA": 4, "GQA": 2, "MQA": 1, "MLA": None}
MLA = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


class Block(nn.Module):
    def __init__(self, heads: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([RMSNorm(32), RMSNorm(32)])
        if heads == "MLA":
            self.attention = MultiHeadLatentAttention(32, 4, **MLA)
        else:
            self.attention = MultiHeadAttention(32, 4, num_kv_heads=HEADS[heads])
        self.mlp = GatedMLP(32, 48)

    def forward(self, x, **options):
        x = x + self.attention(self.norms[0](x), **options)
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """Two layers; its mask comes from positions, whatever the cache."""

    def __init__(self, heads: str, window: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.window = heads, window
        self.embed = nn.Embedding(50, 32)
        self.rotary = RotaryEmbedding(4 if heads == "MLA" else 8)
        self.layers = nn.ModuleList([Block(heads), Block(heads)])
        self.double().requires_grad_(False)

    def make_cache(self, kind: str, batch_size: int) -> KVCache:
        mla = self.heads == "MLA"
        sizes = {"heads": 1 if mla else HEADS[self.heads]}
        sizes |= {"key_dim": 12, "value_dim": 4} if mla else {"key_dim": 8, "value_dim": 8}
        return new(kind, batch_size, dtype=torch.float64, **sizes)

    def forward(self, ids, *, real=None, cache=None):
        T = ids.shape[1]
        queries = keys = torch.arange(T)
        if cache is not None:
            queries, keys = cache.query_positions(T), cache.key_positions(T)
        valid = None if real is None else real[:, keys.clamp(min=0)]
        mask = build_mask(queries, keys, key_valid=valid, window=self.window)
        at = queries[None] if real is None else (real.cumsum(1) - 1).clamp(min=0)[:, queries]
        x, rope = self.embed(ids), self.rotary(at)
        for i, layer in enumerate(self.layers):
            x = layer(x, rope=rope, mask=mask, cache=None if cache is None else cache[i])
        return x @ self.embed.weight.T


CHUNKS = {"one shot": [14, *[1] * 6], "chunked": [4, 5, 1, 6, 1, 1, 2], "step by step": [1] * 20}
PADDING = {"no padding": [0, 0, 0], "left padding": [0, 3, 9]}
IDS = torch.randint(1, 50, (3, 20), generator=torch.Generator().manual_seed(1))


def cached(model: Decoder, kind: str, chunks: list[int], padding: list[int], cache=None):
    """Logits of padded rows, chunk by chunk through a cache; and of each row alone, uncached."""
    real = torch.arange(20) >= torch.tensor(padding)[:, None]
    ids = IDS.masked_fill(~real, 0)
    real = None if not any(padding) else real
    cache = cache or model.make_cache(kind, 3)
    found = [
        model(
            part,
            real=None if real is None else real[:, : cache.length + part.shape[1]],
            cache=cache,
        )
        for part in ids.split(chunks, dim=1)
    ]
    alone = [model(ids[i : i + 1, pad:])[0] for i, pad in enumerate(padding)]
    found = torch.cat(found, dim=1)
    return [found[i, pad:] for i, pad in enumerate(padding)], alone
