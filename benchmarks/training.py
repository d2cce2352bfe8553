"""Training steps on the CPU: ours against transformers' Llama, same shape, same settings.

    OMP_NUM_THREADS=1 python benchmarks/training.py [--pairs 5] [--batch-size 16] [--cuda]

A step is forward, loss, backward, clipping and fused AdamW; ours is a step of `Trainer`. The two
models hold the same weights and see the same batches, in turn; reported are medians of the
tokens a second and of the ratio of each pair. On one thread the clock is the process's CPU time,
which other processes on the machine disturb less. Last, the switch fp32_precision.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from minillm.config import ModelConfig
from minillm.deeper.training.trainer import RunConfig, Trainer
from minillm.model import CausalLM
from minillm.training import WindowBatches, decay_groups

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 704,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
T = 256


def models(device: str) -> tuple[CausalLM, LlamaForCausalLM]:
    """Ours and theirs, with the same weights."""
    ours = CausalLM(ModelConfig(**SHAPE)).to(device)
    config = LlamaConfig(**SHAPE, rms_norm_eps=1e-6, rope_theta=10000.0)
    theirs = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").to(device)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs.train()


def our_step(
    model: CausalLM, source: WindowBatches, precision: str, compiled: bool
) -> Callable[[], float]:
    config = RunConfig(10**6, precision=precision, warmup_steps=1, compile=compiled)
    trainer = Trainer(model, source, config, progress=False)
    model.train()
    return lambda: trainer.one_step()[0]


def their_step(
    model: LlamaForCausalLM, source: WindowBatches, precision: str, compiled: bool
) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(
        decay_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True
    )
    device = next(model.parameters()).device
    call = torch.compile(model) if compiled else model

    def step() -> float:
        inputs, targets = (x.to(device) for x in next(source))
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            logits = call(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()) * targets.numel()

    return step


def compare(precision: str, a: argparse.Namespace) -> None:
    device = "cuda" if a.cuda else "cpu"
    clock = time.process_time if torch.get_num_threads() == 1 and not a.cuda else time.perf_counter
    tokens = torch.randint(SHAPE["vocab_size"], (100_000,), generator=torch.Generator())
    ours, theirs = models(device)
    steps = {
        "minillm": our_step(ours, WindowBatches(tokens, a.batch_size, T), precision, a.cuda),
        "transformers": their_step(
            theirs, WindowBatches(tokens, a.batch_size, T), precision, a.cuda
        ),
    }
    losses = {name: step() for name, step in steps.items()}  # also warms up
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(a.pairs):
        for name, step in steps.items():
            start = clock()
            step()
            times[name].append(clock() - start)
    per_step = a.batch_size * T
    for name, seconds in times.items():
        speed = per_step / statistics.median(seconds)
        print(f"{precision:9} {name:13} {speed:10,.0f} tokens/s   first loss {losses[name]:.2f}")
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{precision:9} ratio {statistics.median(ratios):.2f} ({spread}), target 1.0")


def switch() -> None:
    """What `fp32_precision` does to the products of this shape, and to their error."""
    x = torch.randn(4096, SHAPE["hidden_size"])
    weight = torch.randn(SHAPE["intermediate_size"], SHAPE["hidden_size"])
    exact = x.double() @ weight.double().T
    for setting in ("none", "ieee", "tf32", "bf16"):
        torch.backends.mkldnn.matmul.fp32_precision = setting
        error = float((F.linear(x, weight) - exact).abs().max() / exact.abs().max())
        times = []
        for _ in range(15):
            start = time.process_time()
            F.linear(x, weight)
            times.append(time.process_time() - start)
        speed = 2 * x.numel() * len(weight) / statistics.median(times) / 1e9
        print(f"fp32_precision {setting!r:7} {speed:6.0f} GFLOP/s, relative error {error:.0e}")
    torch.backends.mkldnn.matmul.fp32_precision = "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--cuda", action="store_true", help="on a GPU, both compiled")
    a = parser.parse_args()
    print(
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}, T {T}, B {a.batch_size}"
    )
    for precision in ("float32", "bfloat16"):
        compare(precision, a)
    if not a.cuda:
        switch()


if __name__ == "__main__":
    main()
