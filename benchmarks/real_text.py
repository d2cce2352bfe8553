"""Real text: `train --corpus` with its defaults against nanoGPT's recipe for a CPU, in one run.

    OMP_NUM_THREADS=1 python benchmarks/real_text.py [--seeds 0 1 2] [--save FOLDER]
    OMP_NUM_THREADS=1 python benchmarks/real_text.py --others   # texts of other kinds and sizes
    OMP_NUM_THREADS=1 python benchmarks/real_text.py --pack FOLDER   # the held-out tenth as a file

The text is assets/shakespeare, its last tenth held out, measured by both in windows that overlap by
half. The clock is the process's processor time, on one thread: of ours all that the command does
(tokenizer, encoding, training, looks, saving), of nanoGPT's the training steps and one measurement.
Its recipe (README, "only have a macbook": characters, 4 layers of 128, windows of 64, 12 a batch,
2,000 steps) and model are re-stated here; its code is not used. Bits are bits a byte of the
held-out tenth.
"""

import argparse
import bz2
import json
import math
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.cli.corpus import stories
from minillm.cli.main import main as command

ROOT = Path(__file__).resolve().parents[1]
SHAKESPEARE = ROOT / "assets/shakespeare/tinyshakespeare.txt.bz2"
# what `train --corpus` did by default before, but for the steps: as many as take about as long
BEFORE = "--family llama --vocab-size 1024 --context-length 256 --batch-size 16 --max-lr 2e-3"
BEFORE += " --optimizer adamw --warmup 100"


class Block(nn.Module):
    """A layer of GPT-2 as nanoGPT has it, without biases."""

    def __init__(self, C: int, H: int) -> None:
        super().__init__()
        self.heads = H
        self.ln_1, self.ln_2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
        self.qkv, self.proj = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.up, self.down = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        parts = self.qkv(self.ln_1(x)).split(C, 2)
        q, k, v = (y.view(B, T, self.heads, -1).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    """nanoGPT's model at its sizes for a CPU; the head is the embedding."""

    def __init__(self, V: int, C: int = 128, L: int = 4, H: int = 4, T: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(Block(C, H) for _ in range(L))
        self.ln, self.head = nn.LayerNorm(C, bias=False), nn.Linear(C, V, bias=False)
        self.tokens.weight = self.head.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, 0.0, 0.02 / math.sqrt(2 * L) if last else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def nanogpt(text: str, seed: int, steps: int = 2000) -> tuple[float, float]:
    """Its recipe on the first nine tenths: bits a byte of the last, and processor seconds."""
    torch.manual_seed(seed)
    cut, letters = len(text) * 9 // 10, sorted(set(text))
    place = {letter: i for i, letter in enumerate(letters)}
    ids = torch.tensor([place[letter] for letter in text])
    learned, held_out = ids[:cut], ids[cut:]
    model = GPT(len(letters))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    # nanoGPT takes the fused version on a GPU only
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    began = time.process_time()
    for step in range(steps):
        progress = (step - 100) / (steps - 100)
        falling = 1e-4 + 0.5 * (1 + math.cos(math.pi * progress)) * 9e-4
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 101 if step < 100 else falling
        starts = torch.randint(len(learned) - 64, (12,)).tolist()
        inputs = torch.stack([learned[s : s + 64] for s in starts])
        targets = torch.stack([learned[s + 1 : s + 65] for s in starts])
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return letters_bits(model, held_out, text[cut:]), time.process_time() - began


@torch.no_grad()
def letters_bits(model: nn.Module, ids: Tensor, text: str) -> float:
    """Bits a byte, in windows of 64 that move on by 32."""
    nats, counted = 0.0, 0
    for start in range(0, len(ids) - 1, 32):
        piece = ids[start : start + 65]
        losses = F.cross_entropy(model(piece[None, :-1])[0], piece[1:], reduction="none")
        new = start + len(losses) - counted
        nats, counted = nats + float(losses[-new:].double().sum()), counted + new
        if counted == len(ids) - 1:
            break
    return nats / math.log(2) / len(text.encode())


def ours(path: Path, *options: str, save: Path | None = None) -> tuple[float, float, dict]:
    """`train --corpus`: bits a byte of what it saved, processor seconds, and its run.json."""
    with tempfile.TemporaryDirectory() as work:
        out = save or Path(work) / "run"
        began = time.process_time()
        words = ["--output-dir", str(out), "--corpus", str(path), "--quiet", *options]
        if command(["train", *words]):
            sys.exit("train has failed")
        seconds = time.process_time() - began
        info = json.loads((out / "run.json").read_text(encoding="utf-8"))
    return info["best"]["held_out"], seconds, info


def side_by_side(path: Path, seeds: list[int], save: Path | None) -> None:
    """Both recipes in turn, seed by seed."""
    text = path.read_text(encoding="utf-8")
    for seed in seeds:
        kept = {"save": save} if seed == seeds[0] else {}
        bits, seconds, _ = ours(path, "--seed", str(seed), **kept)
        print(f"train --corpus, seed {seed}: {bits:.4f} bits, {seconds:.1f} s", flush=True)
        their_bits, their_seconds = nanogpt(text, seed)
        ratios = f"{bits / their_bits:.3f} of the bits, {seconds / their_seconds:.3f} of the time"
        print(f"nanoGPT's recipe, seed {seed}: {their_bits:.4f} bits, {their_seconds:.1f} s")
        print(f"    ours has {ratios}", flush=True)


def library() -> str:
    """A megabyte of Python's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "ast", "dataclasses", "datetime", "difflib", "doctest", "enum", "inspect")
    names += ("optparse", "pathlib", "pdb", "pickle", "pydoc", "random", "shutil", "socket")
    names += ("statistics", "subprocess", "tarfile", "textwrap", "threading", "turtle", "typing")
    names += ("uuid", "zipfile")
    found = (folder / f"{name}.py" for name in names)
    return "\n".join(p.read_text(encoding="utf-8") for p in found if p.exists())[:1_000_000]


def others(work: Path) -> None:
    """New defaults and the ones before, at about equal time, on texts of other kinds and sizes."""
    prose = (ROOT / "assets/course-prose.txt").read_text(encoding="utf-8")
    texts = {
        "course's prose, 20 kB": (prose[:20_000], 10),
        "course's prose": (prose, 120),
        "Python's library": (library(), 120),
        "Chinese stories": ("\n".join(stories("stories-zh", 2500, "real text")), 120),
    }
    for name, (text, steps) in texts.items():
        path = work / "text.txt"
        path.write_text(text, encoding="utf-8")
        size = f"{name} ({len(text.encode()):,} bytes)"
        for what, options in (("now", []), ("before", [*BEFORE.split(), "--steps", str(steps)])):
            bits, seconds, info = ours(path, *options)
            best = f"best at step {info['best']['step']} of {info['options']['steps']}"
            print(f"{size}, {what}: {bits:.4f} bits, {seconds:.1f} s, {best}", flush=True)


def pack(path: Path, folder: Path) -> None:
    """The held-out tenth as a file, beside xz; unpacked again, and compared."""
    import lzma

    from minillm import from_pretrained
    from minillm.deeper.generation.compression import compress, decompress

    model, tokenizer = from_pretrained(folder, dtype=torch.float32)
    text = path.read_text(encoding="utf-8")
    held_out = text[len(text) * 9 // 10 :]
    began = time.process_time()
    coded = compress(model, tokenizer, held_out, window=96)
    seconds = time.process_time() - began
    same = decompress(model, tokenizer, coded, window=96) == held_out
    xz = len(lzma.compress(held_out.encode(), preset=9 | lzma.PRESET_EXTREME))
    bits = 8 * len(coded) / len(held_out.encode())
    print(f"{len(held_out.encode()):,} bytes -> {len(coded):,} ({bits:.4f} bits a byte)", end="")
    print(f" in {seconds:.0f} s; xz {xz:,}; the text came back: {same}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--save", type=Path, help="folder for the model of the first seed")
    options.add_argument("--others", action="store_true")
    options.add_argument("--pack", type=Path, metavar="FOLDER", help="of a model of this text")
    asked = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "tinyshakespeare.txt"
        path.write_bytes(bz2.decompress(SHAKESPEARE.read_bytes()))
        if asked.others:
            others(Path(work))
        elif asked.pack:
            pack(path, asked.pack)
        else:
            side_by_side(path, asked.seeds, asked.save)


if __name__ == "__main__":
    main()
