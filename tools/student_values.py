"""What a chapter's functions return on numbers drawn from a seed, for another process to compare.

    python tools/student_values.py 03 SEED FILE    write them to FILE, as JSON

tools/student_class.py runs this on the course and on a hand-in, with a seed that nobody knows
beforehand, and compares in a process of its own.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

Values = dict[str, Callable[[], Any]]


def text(seed: int, words: int = 60) -> str:
    rng = random.Random(seed)
    return " ".join(
        rng.choice("a red hen sat on the old mat and ran".split()) for _ in range(words)
    )


def chapter_01(seed: int) -> Values:
    from minillm.ngram import NGramModel, bits_per_byte, count_ngrams, word_pieces

    texts = [text(seed + i, 12) for i in range(20)]

    def score(smoothing: str) -> float:
        return NGramModel(3, smoothing=smoothing).fit(texts).cross_entropy([text(seed + 50)])

    return {
        "word_pieces": lambda: word_pieces(texts[0]),
        "count_ngrams": lambda: len(count_ngrams(texts, 2)[-1]),
        "NGramModel(add_k)": lambda: score("add_k"),
        "NGramModel(kneser_ney)": lambda: score("kneser_ney"),
        "bits_per_byte": lambda: bits_per_byte(float(seed), 7),
    }


def chapter_02(seed: int) -> Values:
    from minillm.bpe import (
        GPT4_PATTERN,
        BPETokenizer,
        learn_merges,
        make_pre_tokenizer,
        merge_word,
    )

    ranks = {bytes([b]): b for b in range(256)} | {b"he": 256, b"th": 257, b"the": 258}

    def ids() -> list[int]:
        return BPETokenizer.train(text(seed, 400), 280).encode(text(seed + 1))

    return {
        "make_pre_tokenizer": lambda: make_pre_tokenizer(GPT4_PATTERN).words(text(seed)),
        "learn_merges": lambda: [
            (left + right).hex() for left, right in learn_merges(Counter(text(seed).split()), 9)
        ],
        "merge_word": lambda: [p.hex() for p in merge_word(b"the" * (seed % 5 + 1), ranks)],
        "BPETokenizer.encode": ids,
    }


def heads(seed: int, *lengths: int) -> list:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, length, 4, generator=generator) for length in lengths]


def chapter_03(seed: int) -> Values:
    import torch

    from minillm import attention as page

    q, k, v = heads(seed, 3, 5, 5)
    positions = torch.arange(5)[None]
    return {
        "softmax": lambda: page.softmax(q, -1),
        "causal_mask": lambda: page.causal_mask(3, 5),
        "build_mask": lambda: page.build_mask(positions, positions, window=1 + seed % 4),
        "attention_weights": lambda: page.attention_weights(q, k, is_causal=True),
        "attention": lambda: page.attention(q, k, v, is_causal=True),
        "attention(eager)": lambda: page.attention(q, k, v, backend="eager"),
    }


def drawn(module: Any, seed: int) -> Any:
    """A module whose parameters are drawn from the seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module


def chapter_04(seed: int) -> Values:
    from minillm.heads import MultiHeadAttention, merge_heads, split_heads

    (x,) = heads(seed, 6)

    def layer(**kind: Any) -> Any:
        return drawn(MultiHeadAttention(8, 4, **kind), seed)(merge_heads(x), is_causal=True)

    return {
        "merge_heads": lambda: merge_heads(x),
        "split_heads": lambda: split_heads(merge_heads(x), 4),
        "MultiHeadAttention": layer,
        "MultiHeadAttention(num_kv_heads=2)": lambda: layer(num_kv_heads=2),
    }


def chapter_05(seed: int) -> Values:
    import torch

    from minillm.rope import RotaryEmbedding, rope_periods

    (x,) = heads(seed, 6)
    return {
        "rope_periods": lambda: rope_periods(16, base=100.0 + seed % 100),
        "RotaryEmbedding": lambda: RotaryEmbedding(4)(torch.arange(6)[None])(x),
    }


def chapter_06(seed: int) -> Values:
    from minillm import layers as page
    from minillm.heads import MultiHeadAttention

    (x,) = heads(seed, 6)

    def layer() -> Any:
        parts = MultiHeadAttention(4, 2), page.GatedMLP(4, 6), page.RMSNorm(4), page.RMSNorm(4)
        return drawn(page.DecoderLayer(*parts), seed)(x[0], is_causal=True)

    return {
        "LayerNorm": lambda: drawn(page.LayerNorm(4), seed)(x),
        "RMSNorm": lambda: drawn(page.RMSNorm(4), seed)(x),
        "MLP": lambda: drawn(page.MLP(4, 6), seed)(x),
        "GatedMLP": lambda: drawn(page.GatedMLP(4, 6), seed)(x),
        "DecoderLayer": layer,
    }


def chapter_07(seed: int) -> Values:
    import torch
    from torch import nn

    from minillm import training as page
    from minillm.training import WindowBatches, get_batch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (200,), generator=generator)

    def train() -> list[float]:
        model = drawn(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), seed)
        config = page.TrainConfig(6, warmup_steps=2, log_interval=1)
        return [record["loss"] for record in page.train(model, WindowBatches(ids, 2, 8), config)]

    return {
        "cross_entropy": lambda: page.cross_entropy(heads(seed, 6)[0][0], ids[:12].view(2, 6) % 4),
        "cosine_schedule": lambda: [page.cosine_schedule(s, 1.0, 0.1, 3, 20) for s in range(20)],
        "get_batch": lambda: get_batch(ids, 2, 5, generator=torch.Generator().manual_seed(seed)),
        "train": train,
    }


def chapter_08(seed: int) -> Values:
    from minillm.cache import CacheLayer, KVCache

    def walk() -> list:
        cache = KVCache([CacheLayer(1, 2, 4, 4)])
        found: list = []
        for length in (3, 1, 2):
            found += [cache.key_positions(length), *cache[0].update(*heads(seed, length, length))]
        cache.crop(2 + seed % 3)
        return [*found, cache.length, *cache[0].update(*heads(seed, 1, 1))]

    return {"update, crop": walk}


def chapter_09(seed: int) -> Values:
    from minillm import sampling as page

    x = heads(seed, 8)[0].reshape(2, 32)
    return {
        "temperature": lambda: page.temperature(x, 0.7),
        "top_k": lambda: page.top_k(x, 1 + seed % 7).softmax(-1),
        "top_p": lambda: page.top_p(x, 0.6).softmax(-1),
        "min_p": lambda: page.min_p(x, 0.2).softmax(-1),
        "Sampler": lambda: page.Sampler(temperature=0.9, top_p=0.9, seed=seed)(x),
        "GREEDY": lambda: page.GREEDY(x),
    }


def chapter_10(seed: int) -> Values:
    import torch

    from minillm.config import ModelConfig
    from minillm.generation import generate
    from minillm.model import CausalLM

    ids = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(seed))
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}

    def model() -> Any:
        made = CausalLM(ModelConfig(vocab_size=20, num_hidden_layers=2, **sizes))
        return drawn(made, seed)

    return {
        "CausalLM": lambda: model()(ids),
        "generate": lambda: generate(model(), ids, max_new_tokens=6),
    }


def plain(value: Any) -> Any:
    """Tensors as lists: what JSON can say."""
    if hasattr(value, "tolist"):
        return value.detach().tolist() if hasattr(value, "detach") else value.tolist()
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def said(make: Callable[[], Any]) -> Any:
    """What a call returns, or its error as text."""
    try:
        return plain(make())
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def main() -> None:
    chapter, seed, target = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    try:
        values = globals()[f"chapter_{chapter}"](seed)
        found = {name: said(make) for name, make in values.items()}
    except Exception as error:
        found = {"import": f"{type(error).__name__}: {error}"[:300]}
    target.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
