"""MultiHeadAttention, forward and backward, beside Llama's attention and nn.MultiheadAttention.

    OMP_NUM_THREADS=1 python benchmarks/attention.py

Same shapes and the same weights; outputs and gradients are compared before anything is timed. Each
round runs ours and the peer one after the other, in an order that alternates; a ratio is the median
over the rounds of peer / ours, so that 1.0 is equal and more is better for us. With one thread on a
CPU we read the processor time of the process, which a busy machine disturbs less; else the clock.
A CPU also trains in bfloat16, where short rows go another way (notebook 03). On a GPU,
FlexAttention and `torch.compile` join, in bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from minillm.attention import attention
from minillm.heads import MultiHeadAttention
from minillm.rope import RotaryEmbedding

# (batch, positions, hidden size, heads, key heads)
CPU_SHAPES = [(16, 64, 256, 8, 8), (4, 256, 512, 8, 8), (4, 256, 512, 8, 2), (1, 1024, 512, 8, 8)]
BFLOAT16_SHAPES = [(24, 168, 128, 4, 4), (16, 64, 256, 8, 8), (4, 256, 512, 8, 2)]  # on a CPU
GPU_SHAPES = [(8, 1024, 768, 12, 12), (8, 2048, 2048, 32, 8), (2, 8192, 4096, 32, 8)]
Step = Callable[[], None]


def step(module: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor]) -> tuple[Step, Step]:
    """One forward without gradients, and one forward with its backward."""
    weight = torch.randn_like(x)

    def inference() -> None:
        with torch.no_grad():
            forward(x)

    def training() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        (forward(x) * weight).sum().backward()

    return inference, training


def ours(shape: tuple, options: dict) -> MultiHeadAttention:
    _, _, C, H, G = shape
    return MultiHeadAttention(C, H, num_kv_heads=G).to(**options)


def llama(mine: MultiHeadAttention, shape: tuple, options: dict) -> tuple[nn.Module, Callable]:
    _, T, C, H, G = shape
    config = LlamaConfig(
        hidden_size=C, num_attention_heads=H, num_key_value_heads=G, attn_implementation="sdpa"
    )
    module = LlamaAttention(config, layer_idx=0).to(**options)
    module.load_state_dict(mine.state_dict())
    places = torch.arange(T, device=options["device"])[None]
    cos_sin = LlamaRotaryEmbedding(config).to(options["device"])(torch.zeros(1, **options), places)
    return module, lambda x: module(x, position_embeddings=cos_sin, attention_mask=None)[0]


def torch_multihead(
    mine: MultiHeadAttention, shape: tuple, options: dict
) -> tuple[nn.Module, Callable]:
    _, T, C, H, _ = shape
    module = nn.MultiheadAttention(C, H, bias=False, batch_first=True).to(**options)
    projections = [mine.q_proj.weight, mine.k_proj.weight, mine.v_proj.weight]
    module.in_proj_weight.data.copy_(torch.cat([w.data for w in projections]))
    module.out_proj.weight.data.copy_(mine.o_proj.weight.data)
    mask = nn.Transformer.generate_square_subsequent_mask(T, **options)

    def forward(x: Tensor) -> Tensor:
        return module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]

    return module, forward


def flex(mine: MultiHeadAttention, shape: tuple, options: dict) -> tuple[nn.Module, Callable]:
    """Our projections around a compiled FlexAttention with the causal mask as a function."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T, H, G = shape[1], shape[3], shape[4]
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, T, T, options["device"])
    compiled = torch.compile(flex_attention)

    def forward(x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for p, heads in ((mine.q_proj, H), (mine.k_proj, G), (mine.v_proj, G))
        )
        out = compiled(q, k, v, block_mask=block_mask, enable_gqa=G < H)
        return mine.o_proj(out.transpose(1, 2).flatten(2))

    return mine, forward


def gradients(module: nn.Module, forward: Callable, x: Tensor) -> tuple[Tensor, Tensor]:
    x.grad = None
    out = forward(x)
    out.float().square().sum().backward()
    return out.detach(), x.grad.clone()


def clock(step: Step, device: str) -> float:
    if device == "cpu" and torch.get_num_threads() == 1:
        start = time.process_time()
        step()
        return time.process_time() - start
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(mine: Step, peer: Step, rounds: int, device: str) -> tuple[float, float, float]:
    """Median milliseconds of ours and of the peer, and the median ratio peer / ours."""
    for _ in range(3):
        mine(), peer()
    times = []
    for i in range(rounds):
        a, b = (mine, peer) if i % 2 else (peer, mine)
        pair = clock(a, device), clock(b, device)
        times.append(pair if i % 2 else pair[::-1])
    medians = [1e3 * statistics.median(t) for t in zip(*times, strict=True)]
    return *medians, statistics.median(b / a for a, b in times)


def run(shape: tuple, rounds: int, options: dict) -> list[float]:
    device, ratios = options["device"], []
    torch.manual_seed(0)
    B, T, C, H, G = shape
    x = torch.randn(B, T, C, **options, requires_grad=True)
    mine = ours(shape, options)
    rope = RotaryEmbedding(C // H)(torch.arange(T)[None])
    if device != "cpu":
        rope = RotaryEmbedding(C // H).to(device)(torch.arange(T, device=device)[None])

    def plain(x: Tensor) -> Tensor:
        return mine(x, is_causal=True)

    def rotated(x: Tensor) -> Tensor:
        return mine(x, rope=rope, is_causal=True)

    peers = {"Llama (sdpa)": (rotated, llama(mine, shape, options))}
    if G == H:
        peers["nn.MultiheadAttention"] = plain, torch_multihead(mine, shape, options)
    if device == "cuda":
        peers["FlexAttention"] = plain, flex(mine, shape, options)
        module, forward = llama(mine, shape, options)
        both = torch.compile(rotated), (module, torch.compile(forward))
        peers["Llama, both compiled"] = both
    for name, (forward, (module, peer)) in peers.items():
        tolerance = 1e-4 if x.dtype == torch.float32 else 5e-2
        expected = gradients(module, peer, x)
        for a, b in zip(gradients(mine, forward, x), expected, strict=True):
            error = (a - b).float().norm() / b.float().norm()
            if error > tolerance:
                raise SystemExit(f"{name}: not the same numbers, relative error {error:.1e}")
        pairs = zip(step(mine, x, forward), step(module, x, peer), strict=True)
        for kind, (a, b) in zip(("forward", "forward + backward"), pairs, strict=True):
            first, second, ratio = compare(a, b, rounds, device)
            print(f"{shape!s:24} {name:22} {kind:19} {first:9.2f} {second:9.2f} {ratio:6.2f}")
            ratios.append(ratio)
    return ratios


def tiles(options: dict) -> None:
    """The three backends alone: what tiles in plain PyTorch cost beside the formula."""
    q, k, v = (torch.randn(1, 8, 2048, 64, **options, requires_grad=True) for _ in range(3))
    for backend in ("sdpa", "tiled", "eager"):

        def step(backend: str = backend) -> None:
            attention(q, k, v, is_causal=True, backend=backend).sum().backward()

        times = [clock(step, options["device"]) for _ in range(3)]
        print(f"(1, 8, 2048, 64) {backend:6} forward + backward {1e3 * min(times):9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    options = {"device": args.device, "dtype": torch.bfloat16 if on_gpu else torch.float32}
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} thread(s), "
          f"{options['dtype']}, {args.rounds} rounds")  # fmt: skip
    print(f"{'(B, T, C, H, G)':24} {'peer':22} {'':19} {'ours ms':>9} {'peer ms':>9} {'ratio':>6}")
    for shape in GPU_SHAPES if on_gpu else CPU_SHAPES:
        run(shape, args.rounds, options)
    tiles(options)
    if not on_gpu:
        print("torch.bfloat16")
        for shape in BFLOAT16_SHAPES:
            run(shape, args.rounds, options | {"dtype": torch.bfloat16})


if __name__ == "__main__":
    main()
