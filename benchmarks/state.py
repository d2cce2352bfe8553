"""Mamba-2's layer, interleaved with transformers' (without its GPU kernels); the step by length.

    OMP_NUM_THREADS=1 python benchmarks/state.py

Both have the same weights and the same chunk size; outputs are compared first. CPU time; prints the
medians and the median over the rounds of ours / theirs in the same round (below 1: ours is
quicker). Then one step of generation after texts of several lengths: a state beside attention.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import transformers
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as Peer

from minillm.beyond.state.mamba import Mamba2Mixer
from minillm.beyond.state.mamba_parts import StateSizes
from minillm.config import ModelConfig
from minillm.model import CausalLM

ROUNDS = 15
SHAPES = [  # batch, positions, hidden size, state, heads, groups, chunk
    (8, 160, 64, 16, 4, 1, 32),
    (8, 160, 64, 16, 4, 4, 64),
    (8, 160, 64, 16, 4, 1, 256),
    (4, 512, 256, 64, 8, 1, 64),
    (4, 512, 256, 64, 8, 1, 256),
]


def layers(shape: tuple[int, ...]) -> tuple[Mamba2Mixer, Peer]:
    _, _, C, N, H, G, Q = shape
    config = transformers.Mamba2Config(
        hidden_size=C, state_size=N, num_heads=H, head_dim=2 * C // H, n_groups=G, chunk_size=Q
    )
    ours, theirs = Mamba2Mixer(C, StateSizes(N, H, G, Q)), Peer(config, 0)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def spent(call: Callable[[], Tensor], backward: bool) -> float:
    start = time.process_time()
    with torch.set_grad_enabled(backward):
        y = call()
        if backward:
            y.square().sum().backward()
    return time.process_time() - start


def compare() -> None:
    print(f"{'B, T, C, N, H, G, chunk':28}{'':22}{'ours':>9}{'theirs':>9}   ratio")
    for shape in SHAPES:
        x = torch.randn(shape[0], shape[1], shape[2], requires_grad=True)
        ours, theirs = layers(shape)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
        for backward in (False, True):
            pairs = []
            for _ in range(ROUNDS):
                pairs.append([spent(partial(m, x), backward) for m in (ours, theirs)])
            a, b = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
            ratio = statistics.median(mine / other for mine, other in pairs)
            what = "forward and backward" if backward else "forward"
            print(f"{str(shape)[1:-1]:28}{what:22}{a:9.1f}{b:9.1f}{ratio:8.2f}")


@torch.inference_mode()
def step() -> None:
    sizes = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4}
    kinds = {
        "state": {"model_type": "mamba2", "state": {"state_size": 16, "num_heads": 4}},
        "attention": {"num_attention_heads": 4, "intermediate_size": 256},
    }
    lengths = (64, 512, 4096, 16384)
    print(f"one step, CPU ms, after{'':8}" + "".join(f"{n:9,}" for n in lengths) + " tokens")
    for kind, changes in kinds.items():
        config = ModelConfig(**sizes, **changes, max_position_embeddings=32768)
        model, token = CausalLM(config).eval(), torch.zeros(1, 1, dtype=torch.long)
        caches = []
        for length in lengths:
            caches.append(model.make_cache(batch_size=1))
            for start in range(0, length, 512):
                size = min(512, length - start)
                model(token.expand(1, size), cache=caches[-1], logits_to_keep=1)
        rounds = [
            [spent(partial(model, token, cache=cache), False) for cache in caches]
            for _ in range(100)
        ]
        found = [1e3 * statistics.median(times) for times in zip(*rounds, strict=True)]
        print(f"{kind:31}" + "".join(f"{ms:9.2f}" for ms in found))


def main() -> None:
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, ", end="")
    print(f"{torch.get_num_threads()} thread(s), {ROUNDS} rounds, CPU ms")
    compare()
    step()


if __name__ == "__main__":
    main()
