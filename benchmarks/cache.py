"""KV caches: what one more token costs, early and late; and what a shared system prompt saves.

    OMP_NUM_THREADS=1 python benchmarks/cache.py

First, one decode step of a whole cache (8 layers, 8 heads of 128), without any attention, at
steps 400 and 4000: medians of 101. Second, the time to the first token after a system prompt of
1,000 tokens and a question of 20, computed anew or forked: a 28M Llama shape, medians of 5,
interleaved.
"""

import copy
import statistics
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from minillm.cache import KVCache
from minillm.support.modes import make_cache

LAYERS, HEADS, DIM = 8, 8, 128
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
}
KINDS = {
    "dynamic": {},
    "static": {"max_length": 4200},
    "sliding": {"window": 256},
    "paged": {},
    "quantized": {},
}


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def ours(kind: str, length: int) -> Callable[[], object]:
    cache = make_cache(
        kind, num_layers=LAYERS, batch_size=1, num_kv_heads=HEADS, key_dim=DIM, value_dim=DIM,
        **KINDS[kind],
    )  # fmt: skip
    past, new = torch.randn(1, HEADS, length, DIM), torch.randn(1, HEADS, 1, DIM)
    for layer in cache.layers:
        layer.update(past, past)

    def step() -> None:
        cache.query_positions(1), cache.key_positions(1)
        for layer in cache.layers:
            layer.update(new, new)

    return step


def peer(length: int) -> Callable[[], object]:
    cache = DynamicCache()
    past, new = torch.randn(1, HEADS, length, DIM), torch.randn(1, HEADS, 1, DIM)
    for i in range(LAYERS):
        cache.update(past, past, i)

    def step() -> None:
        for i in range(LAYERS):
            cache.update(new, new, i)

    return step


def append() -> None:
    print(f"{'one step of the cache':28} {'at 400, us':>12} {'at 4000, us':>12} {'ratio':>6}")
    makers = {kind: (lambda n, k=kind: ours(k, n)) for kind in KINDS}
    for name, make in (makers | {"transformers' DynamicCache": peer}).items():
        early, late = make(300), make(3900)
        times: dict[str, list[float]] = {"early": [], "late": []}
        for i in range(151):  # interleaved; the first steps may grow the buffers
            a, b = timed(early), timed(late)
            if i >= 50:
                times["early"].append(a)
                times["late"].append(b)
        a, b = (1e6 * statistics.median(t) for t in times.values())
        print(f"{name:28} {a:12.0f} {b:12.0f} {b / a:6.2f}")


def prefix() -> None:
    from minillm.config import ModelConfig
    from minillm.model import CausalLM

    model = CausalLM(ModelConfig(**SHAPE, model_type="llama")).eval()
    theirs = LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=2048)).eval()
    theirs.load_state_dict(model.state_dict(), strict=False)
    g = torch.Generator().manual_seed(0)
    system, question = (torch.randint(4096, (1, n), generator=g) for n in (1000, 20))
    both = torch.cat([system, question], dim=1)

    def cold(kind: str) -> torch.Tensor:
        cache = model.make_cache(kind, batch_size=1, max_length=1100)
        return model(both, cache=cache, logits_to_keep=1)

    bases: dict[str, KVCache] = {}
    for kind in ("dynamic", "paged"):
        bases[kind] = model.make_cache(kind, batch_size=1, max_length=1100)
        model(system, cache=bases[kind], logits_to_keep=1)
    base = DynamicCache()
    theirs(system, past_key_values=base, logits_to_keep=1)

    def warm(kind: str) -> torch.Tensor:
        return model(question, cache=bases[kind].fork(), logits_to_keep=1)

    runs = {
        "ours, cold": lambda: cold("dynamic"),
        "ours, forked": lambda: warm("dynamic"),
        "ours, forked pages": lambda: warm("paged"),
        "transformers, cold": lambda: theirs(both, logits_to_keep=1).logits,
        "transformers, deep copy": lambda: (
            theirs(question, past_key_values=copy.deepcopy(base), logits_to_keep=1).logits
        ),
    }
    expected = cold("dynamic")
    for run in runs.values():
        torch.testing.assert_close(run(), expected, rtol=0, atol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(5):
        for name, run in runs.items():
            times[name].append(timed(run))
    print(f"\n{'time to the first token':28} {'ms':>8} {'of cold':>8}")
    first = statistics.median(times["ours, cold"])
    for name, each in times.items():
        median = statistics.median(each)
        print(f"{name:28} {1e3 * median:8.1f} {median / first:8.3f}")


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), float32, CPU")
    with torch.inference_mode():
        append()
        prefix()


if __name__ == "__main__":
    main()
