"""One GPU, bfloat16: training MFU, prefill MFU, and decoding beside transformers and the limit.

    python benchmarks/gpu.py [--shapes 124M 1.1B] [--peak 989e12]
    python benchmarks/gpu.py --device cpu --shapes tiny --peak 1e11  # whether the script runs

MFU is the share of the published operations a second (`--peak`; the default is that of H100 and
H200) that the model's own products use: `flops_per_token`, three times that in training. Decoding
is one row, compiled, with a static cache; its limit is reading all weights once a token at the
bandwidth that is measured here. Ours and transformers hold the same weights and take turns;
reported are medians.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from minillm.config import ModelConfig
from minillm.deeper.training.trainer import RunConfig, Trainer
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.training import WindowBatches

SHAPES = {
    "tiny": (512, 64, 2, 4, 176, 2),
    "124M": (32768, 768, 12, 12, 2048, 12),
    "1.1B": (32768, 2048, 22, 16, 5632, 8),
}
PROMPT, NEW = 128, 128


def clock(device: str) -> float:
    """Seconds, once all that was started on the device has ended."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def median_seconds(steps: dict[str, Callable[[], object]], device: str, a) -> dict[str, float]:
    """The median time of each step, taken in turns after some that compile and warm up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(3 + a.rounds):
        for name, step in steps.items():
            started = clock(device)
            step()
            if i >= 3:
                times[name].append(clock(device) - started)
    return {name: statistics.median(found) for name, found in times.items()}


def bandwidth(device: str) -> float:
    """Bytes a second that one pass over a gigabyte of ones reads (an eighth on a CPU)."""
    ones = torch.ones(2**28 if device == "cuda" else 2**25, device=device)
    found = []
    for _ in range(10):
        started = clock(device)
        ones.sum().item()
        found.append(ones.nbytes / (clock(device) - started))
    return max(found)


def training(config: ModelConfig, device: str, a) -> None:
    rows, context = (2, 64) if device == "cpu" else (a.batch_size, 1024)
    tokens = torch.randint(config.vocab_size, (rows * context * 8,))
    model = CausalLM(config).to(device)
    settings = RunConfig(10**6, precision="bfloat16", warmup_steps=1, compile=True)
    trainer = Trainer(model, WindowBatches(tokens, rows, context), settings, progress=False)
    model.train()
    seconds = median_seconds({"": trainer.one_step}, device, a)[""]
    work = 3 * rows * context * model.flops_per_token(context // 2)  # half of it, on average
    speed, mfu = rows * context / seconds, work / seconds / a.peak
    print(f"  training, {rows} x {context}: {speed:,.0f} tokens/s, MFU {mfu:.1%}")


def prefill(model: CausalLM, device: str, a) -> None:
    config, context = model.config, 64 if device == "cpu" else 2048
    ids = torch.randint(config.vocab_size, (1 if device == "cpu" else 8, context), device=device)
    run = torch.compile(model)
    with torch.inference_mode():
        seconds = median_seconds({"": lambda: run(ids, logits_to_keep=1)}, device, a)[""]
    head = 2 * config.vocab_size * config.hidden_size  # of the last position only
    work = len(ids) * (context * (model.flops_per_token(context // 2) - head) + head)
    mfu = work / seconds / a.peak
    print(
        f"  prefill, {len(ids)} x {context}: {ids.numel() / seconds:,.0f} tokens/s, MFU {mfu:.1%}"
    )


def decoding(
    ours: CausalLM, theirs: transformers.LlamaForCausalLM, device: str, rate: float, a
) -> None:
    ids = torch.randint(1, ours.config.vocab_size, (1, PROMPT), device=device)
    if device == "cuda":  # one CUDA graph a token
        ours.compiled_run = torch.compile(ours.run, mode="reduce-overhead", dynamic=False)
    options = {"do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}

    def them(new: int) -> torch.Tensor:  # on a GPU a static cache makes it compile by itself
        length = {"max_new_tokens": new, "min_new_tokens": new}
        return theirs.generate(ids, attention_mask=torch.ones_like(ids), **length, **options)

    def us(new: int) -> torch.Tensor:
        return generate(
            ours, ids, max_new_tokens=new, eos_token_id=None, cache="static", compile=True
        )

    same = (us(NEW) == them(NEW)).float().mean().item()
    print(f"  decoding: {same:.0%} of the tokens are the same (bfloat16 rounds ties otherwise)")
    steps = {
        f"{name} {new}": (lambda run=run, new=new: run(new))
        for name, run in (("minillm", us), ("transformers", them))
        for new in (8, NEW)
    }
    seconds = median_seconds(steps, device, a)
    looked_up = ours.config.vocab_size * ours.config.hidden_size
    read = 2 * (ours.num_parameters() - looked_up)
    for name in ("minillm", "transformers"):
        token = (seconds[f"{name} {NEW}"] - seconds[f"{name} 8"]) / (NEW - 8)
        print(f"  {name:13} {1 / token:8.1f} tokens/s, {read / token / rate:.1%} of the bandwidth")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["124M", "1.1B"])
    parser.add_argument("--peak", type=float, default=989e12, help="published operations a second")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    a = parser.parse_args()
    if a.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    transformers.logging.set_verbosity_error()
    rate = bandwidth(a.device)
    name = torch.cuda.get_device_name() if a.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"published {a.peak / 1e12:,.1f} TFLOP/s; memory read at {rate / 1e9:,.0f} GB/s")
    for shape in a.shapes:
        V, C, layers, heads, inner, groups = SHAPES[shape]
        config = ModelConfig(V, C, layers, heads, inner, num_key_value_heads=groups)
        print(shape)
        training(config, a.device, a)
        gc.collect()
        ours = CausalLM(config).to(a.device, torch.bfloat16).eval()
        prefill(ours, a.device, a)
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=V,
                hidden_size=C,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=inner,
                num_key_value_heads=groups,
                max_position_embeddings=config.max_position_embeddings,
                rms_norm_eps=config.rms_norm_eps,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        theirs = theirs.to(a.device, torch.bfloat16).eval()
        theirs.load_state_dict(ours.state_dict())
        decoding(ours, theirs, a.device, rate, a)
        del ours, theirs
        gc.collect()
        torch.compiler.reset()


if __name__ == "__main__":
    main()
