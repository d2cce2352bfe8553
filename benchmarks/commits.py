"""This tree against another one of the same project, in turns: did a change make anything slower?

    git worktree add ../old COMMIT
    OMP_NUM_THREADS=1 python benchmarks/commits.py ../old --rounds 7

Each round runs every workload once in each tree, in a process of its own; printed is the median of
the rounds' ratios (above 1: this tree is quicker), with the least and the greatest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CLOCK = """
import time
def best(function, times):
    found = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    print(min(found))
"""

MODEL = """
import torch
from minillm import CausalLM, ModelConfig, generate
try:  # where it lay before the house was moved
    from minillm.fast.packed import PackedLM
except ImportError:
    from minillm.deeper.fast.packed import PackedLM
sizes = dict(hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4)
if LARGE:
    sizes = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
                 num_attention_heads=8)
model = CausalLM(ModelConfig(vocab_size=4096, **sizes)).eval()
model = PackedLM(model) if PACKED else model
prompt = torch.arange(16).repeat(BATCH, 1)
options = dict(max_new_tokens=64, eos_token_id=None)
if COMPILED:
    options |= dict(cache="static", compile=True)
best(lambda: generate(model, prompt, **options), 4)
"""

BPE = """
from minillm import BPETokenizer, StoryLanguage
texts = StoryLanguage("en").corpus(3000, seed=0)
"""


def decode(batch: int, *, packed: bool = False, large: bool = False, compiled: bool = False) -> str:
    """The code that times 64 new tokens."""
    named = {"BATCH": batch, "PACKED": packed, "LARGE": large, "COMPILED": compiled}
    return "\n".join(f"{name} = {value}" for name, value in named.items()) + MODEL


WORKLOADS = {
    "import minillm": "start = time.perf_counter(); import minillm\n"
    "minillm.CausalLM; print(time.perf_counter() - start)",
    "minillm.BPETokenizer": "start = time.perf_counter(); import minillm\n"
    "minillm.BPETokenizer; print(time.perf_counter() - start)",
    "BPE training": BPE + "best(lambda: BPETokenizer.train(texts, 1400), 3)",
    "BPE encoding, cold": BPE
    + "one = BPETokenizer.train(texts[:500], 1000)\n"
    + "best(lambda: BPETokenizer(one.ranks, one.pattern, {}).encode_ordinary(' '.join(texts)), 5)",
    "BPE encoding, warm": BPE
    + "one = BPETokenizer.train(texts[:500], 1000)\n"
    + "best(lambda: [one.encode(text) for text in texts], 5)",
    "decoding, batch 1": decode(1),
    "decoding, batch 8": decode(8),
    "decoding packed, batch 1": decode(1, packed=True),
    "decoding packed, batch 8": decode(8, packed=True),
    "decoding 28M, batch 1": decode(1, large=True),
    "decoding 28M packed, batch 1": decode(1, packed=True, large=True),
    "decoding 28M, batch 8": decode(8, large=True),
    "decoding 28M packed, batch 8": decode(8, packed=True, large=True),
    "opening a folder": "from minillm import CausalLM\n"
    "best(lambda: CausalLM.from_pretrained('assets/stories-en'), 7)",
    "training steps": """
import torch
from minillm import CausalLM, ModelConfig, TrainConfig, Trainer, WindowBatches
sizes = dict(hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4)
def run():
    model = CausalLM(ModelConfig(vocab_size=1024, **sizes))
    tokens = torch.arange(20000) % 1024
    Trainer(model, WindowBatches(tokens, 8, 128), TrainConfig(12, warmup_steps=2),
            progress=False).train()
best(run, 3)
""",
}
COMPILED = {
    "decoding compiled, batch 1": decode(1, packed=True, compiled=True),
    "decoding compiled, batch 8": decode(8, packed=True, compiled=True),
}


def seconds(tree: Path, code: str) -> float:
    """What a workload takes in one tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "MINILLM_DEVICE": "cpu"}
    command = [sys.executable, "-c", CLOCK + code]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", env=environment, cwd=tree
    )
    if done.returncode:
        raise SystemExit(f"{tree}: {done.stderr}")
    return float(done.stdout.split()[-1])


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, nargs="?", help="folder of the other tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="compiled decoding too (minutes)")
    parser.add_argument("--only", default="", help="workloads whose name holds this")
    args = parser.parse_args()
    if args.old is None:
        print("nothing to compare with: name the folder of another tree")
        return
    chosen = WORKLOADS | (COMPILED if args.compile else {})
    print("| workload | old, ms | new, ms | old / new: median | least | greatest |")
    print("|---|---|---|---|---|---|")
    for name, code in chosen.items():
        if args.only not in name:
            continue
        both = [
            (seconds(args.old.resolve(), code), seconds(ROOT, code)) for _ in range(args.rounds)
        ]
        ratios = sorted(old / new for old, new in both)
        old, new = (statistics.median(column) * 1000 for column in zip(*both, strict=True))
        middle = statistics.median(ratios)
        row = [name, f"{old:.1f}", f"{new:.1f}"]
        row += [f"{ratio:.2f}" for ratio in (middle, ratios[0], ratios[-1])]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
