"""A layer of experts, interleaved with transformers' implementations that run on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/experts.py

The routed part alone (512 tokens of 256 numbers, 8 experts of F numbers, 2 chosen), then the whole
block with its router; forward without gradients, and forward with backward. CPU time; prints the
medians and the median over the rounds of ours / the quickest of theirs in the same round (below 1:
ours is quicker).
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import transformers
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from minillm.beyond.experts.moe import SparseMoeBlock

B, T, C, E, K, ROUNDS = 4, 128, 256, 8, 2, 40
THEIRS = ("eager", "grouped_mm", "batched_mm")


def peer(implementation: str, size: int) -> MixtralSparseMoeBlock:
    config = transformers.MixtralConfig(
        hidden_size=C, intermediate_size=size, num_local_experts=E, num_experts_per_tok=K
    )
    config._experts_implementation = implementation
    return MixtralSparseMoeBlock(config)


def blocks(size: int) -> dict[str, torch.nn.Module]:
    """The contenders, all with the same weights."""
    found: dict[str, torch.nn.Module] = {"ours": SparseMoeBlock(C, size, E, K)}
    state = found["ours"].state_dict()
    for name in THEIRS:
        found[name] = peer(name, size)
        found[name].load_state_dict(state)
    return found


def measure(calls: dict[str, Callable[[], Tensor]], backward: bool) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(ROUNDS):
        for name, call in calls.items():
            if name == "batched_mm" and i:
                continue  # copies a whole expert for each choice: a hundred times slower
            start = time.process_time()
            with torch.set_grad_enabled(backward):
                y = call()
                if backward:
                    y.square().sum().backward()
            times[name].append(time.process_time() - start)
    return times


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(B, T, C, requires_grad=True)
    rows = x.reshape(-1, C)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, ", end="")
    print(f"{torch.get_num_threads()} thread(s), {ROUNDS} rounds, CPU ms")
    print(f"{'':34}" + "".join(f"{name:>12}" for name in ("ours", *THEIRS)) + "   ratio")
    for size in (128, 512, 1024):
        contenders = blocks(size)
        with torch.no_grad():
            _, weights, indices = contenders["ours"].gate(rows)
            a, b = (contenders[name](x) for name in ("ours", "eager"))
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        flat, w = rows.detach().requires_grad_(), weights.clone().requires_grad_()
        parts = {name: partial(m.experts, flat, indices, w) for name, m in contenders.items()}
        whole = {name: partial(m, x) for name, m in contenders.items()}
        for kind, calls in (("experts", parts), ("block", whole)):
            for backward in (False, True):
                times = measure(calls, backward)
                rounds = zip(times["ours"], times["eager"], times["grouped_mm"], strict=True)
                ratio = statistics.median(mine / min(others) for mine, *others in rounds)
                what = "forward and backward" if backward else "forward"
                row = "".join(f"{1e3 * statistics.median(t):12.1f}" for t in times.values())
                print(f"F {size:4} {kind:8} {what:20}{row}{ratio:8.2f}")


if __name__ == "__main__":
    main()
