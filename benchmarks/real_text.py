"""Real text: `train --corpus` with its defaults against nanoGPT's recipe for a CPU, in one run.

    OMP_NUM_THREADS=1 python benchmarks/real_text.py [--seeds 0 1 2] [--save FOLDER]
    OMP_NUM_THREADS=1 python benchmarks/real_text.py --others   # the same on four other texts
    OMP_NUM_THREADS=1 python benchmarks/real_text.py --pack FOLDER   # the held-out tenth as a file
    OMP_NUM_THREADS=1 python benchmarks/real_text.py --tokens   # or characters, at equal time
    OMP_NUM_THREADS=1 python benchmarks/real_text.py --again   # a part of it, read many times
    OMP_NUM_THREADS=1 python benchmarks/real_text.py --real   # a published model on the same tenth

The text is assets/shakespeare, its last tenth held out, measured by both in windows that overlap by
half. The clock is the process's processor time, on one thread: of ours all that the command does
(tokenizer, encoding, training, looks, saving), of nanoGPT's the training steps and its looks: one,
at the end; of a text under 250 kB eight, of which the best counts, for ours keeps its best as well.
Its recipe (README, "only have a macbook": characters, 4 layers of 128, windows of 64, 12 a batch,
2,000 steps) and model are re-stated here; its code is not used. Bits are bits a byte of the
held-out tenth. `--tokens`, `--again` and `--real` write the tables that deeper/10_real_text shows.
"""

import argparse
import bz2
import csv
import json
import lzma
import math
import sys
import sysconfig
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm import (
    BPETokenizer,
    CausalLM,
    ModelConfig,
    RunConfig,
    WindowBatches,
    evaluate_text,
    from_pretrained,
    train,
)
from minillm.cli.corpus import END, stories
from minillm.cli.main import main as command
from minillm.deeper.generation.compression import compress, decompress

ROOT = Path(__file__).resolve().parents[1]
SHAKESPEARE = ROOT / "assets/shakespeare/tinyshakespeare.txt.bz2"


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
    looks, best = 1 if len(text.encode()) > 250_000 else 8, math.inf
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
        if (step + 1) % (steps // looks) == 0:
            best = min(best, letters_bits(model, held_out, text[cut:]))
    return best, time.process_time() - began


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


def side_by_side(path: Path, seeds: list[int], save: Path | None = None) -> None:
    """Both recipes in turn, seed by seed."""
    text = path.read_text(encoding="utf-8")
    for seed in seeds:
        kept = {"save": save} if seed == seeds[0] else {}
        bits, seconds, info = ours(path, "--seed", str(seed), **kept)
        best = f"best at step {info['best']['step']} of {info['options']['steps']}"
        print(f"train --corpus, seed {seed}: {bits:.4f} bits, {seconds:.1f} s, {best}", flush=True)
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


def others(work: Path, seeds: list[int]) -> None:
    """Both recipes on texts of other kinds and sizes."""
    prose = (ROOT / "assets/course-prose.txt").read_text(encoding="utf-8")
    texts = {
        "Python's library": library(),
        "Chinese stories": "\n".join(stories("stories-zh", 2500, "real text")),
        "the course's prose": prose,
        "20 kB of it": prose[:20_000],
    }
    for name, text in texts.items():
        path = work / "text.txt"
        path.write_text(text, encoding="utf-8")
        print(f"{name}, {len(text.encode()):,} bytes:", flush=True)
        side_by_side(path, seeds)


def pack(path: Path, folder: Path) -> None:
    """The held-out tenth as a file, beside the packers; unpacked again, and compared."""
    model, tokenizer = from_pretrained(folder, dtype=torch.float32)
    text = path.read_text(encoding="utf-8")
    learned, held_out = (part.encode() for part in parted(text))
    packers = {
        "gzip": lambda data: zlib.compress(data, 9),
        "bz2": bz2.compress,
        "xz": lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    for name, packer in packers.items():
        began = time.process_time()
        alone = len(packer(held_out))
        seconds = time.process_time() - began
        after = len(packer(learned + held_out)) - len(packer(learned))
        print(f"{name}: {alone:,} bytes in {seconds:.2f} s, {after:,} after the nine tenths")
    expected = evaluate_text(model, tokenizer, held_out.decode(), window=96) * len(held_out) / 8
    began = time.process_time()
    coded = compress(model, tokenizer, held_out.decode(), window=96)
    middle = time.process_time()
    same = decompress(model, tokenizer, coded, window=96).encode() == held_out
    seconds = f"{middle - began:.0f} s, back in {time.process_time() - middle:.0f} s"
    print(f"the model: {len(held_out):,} bytes -> {len(coded):,} in {seconds}, the same: {same}")
    print(f"    its loss is {expected:,.0f} bytes: {len(coded) / expected:.4f} of it")


def parted(text: str) -> tuple[str, str]:
    """The first nine tenths, and the last."""
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def short(
    text: str, vocab: int, window: int, rate: float, seed: int, steps: int
) -> tuple[float, float]:
    """A short training: processor seconds, and bits a byte of the first 20,000 held out."""
    learned, held_out = parted(text)
    tokenizer = BPETokenizer.train([learned], vocab, special_tokens=[END])
    ids = torch.tensor(tokenizer.encode_ordinary(learned))
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 352, "max_position_embeddings": 512}
    kind = {"model_type": "qwen3", "tie_word_embeddings": True}
    end = tokenizer.eos_token_id
    model = CausalLM(ModelConfig(vocab, **sizes, **kind, eos_token_id=end), seed=seed)
    batches = WindowBatches(ids, 12 * 96 // window, window, seed=seed)
    how = {"max_lr": rate, "min_lr": 0.0, "warmup_steps": min(50, steps // 4), "seed": seed}
    began = time.process_time()
    train(model, batches, RunConfig(steps, **how, optimizer="muon", log_interval=steps))
    seconds = time.process_time() - began
    return seconds, evaluate_text(model, tokenizer, held_out[:20_000], window=window)


def tokens_or_characters(text: str, seconds: float = 30.0) -> None:
    """768 tokens against the text's bytes, each one character: the same model, about equal time.

    Three rates with seed 0, the best one with two more seeds, on the first 20,000 characters of the
    held-out tenth. A row of 96 tokens has some 240 characters: one run has rows of as many.
    """
    rows = [("kind", "vocab_size", "window", "rate", "seed", "steps", "seconds", "bits")]

    def steps_in_time(vocab: int, window: int) -> int:
        for _ in range(2):  # the first steps of a process are slow
            ten, _ = short(text[:20_000], vocab, window, 1e-3, 0, 10)
        return round(10 * seconds / ten)

    def run(kind: str, vocab: int, window: int, rate: float, seed: int, steps: int) -> float:
        took, bits = short(text, vocab, window, rate, seed, steps)
        rows.append((kind, vocab, window, rate, seed, steps, round(took, 2), round(bits, 4)))
        print(*rows[-1], flush=True)
        return bits

    for kind, vocab in (("tokens", 768), ("characters", 257)):
        steps = steps_in_time(vocab, 96)
        tried = {rate: run(kind, vocab, 96, rate, 0, steps) for rate in (4e-3, 8e-3, 1.6e-2)}
        best = min(tried, key=tried.__getitem__)
        for seed in (1, 2):
            run(kind, vocab, 96, best, seed, steps)
    run("characters, long rows", 257, 240, best, 0, steps_in_time(257, 240))
    table("tokens.csv", rows)


def again(text: str, work: Path) -> None:
    """The command on the first 50,000 characters, for so long that it knows them by heart."""
    path = work / "part.txt"
    path.write_text(text[:50_000], encoding="utf-8")
    words = ["--steps", "400", "--eval-interval", "20", "--log-interval", "20"]
    ours(path, *words, save=work / "again")
    lines = (work / "again/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    size = len(np.load(work / "again/tokens.npy"))
    rows = [("step", "times_read", "learned", "held_out")]
    for record in map(json.loads, lines):
        bits = (round(record[name], 4) for name in ("bits_per_byte", "held_out"))
        rows.append((record["step"], round(record["tokens"] / size, 2), *bits))
    table("again.csv", rows)


def real(text: str) -> None:
    """SmolLM2-135M-Instruct, from its file of 4-bit weights, beside the model of this text."""
    from four_bits import real_file

    if (weights := real_file()) is None:
        sys.exit("the model is not here: make real fetches it")
    rows = [("model", "weights", "window", "bits")]
    models = (("ours", SHAKESPEARE.parent, [96]), ("SmolLM2", weights, [96, 512]))
    for name, place, windows in models:
        model, tokenizer = from_pretrained(place, dtype=torch.float32)
        for window in windows:
            bits = evaluate_text(model, tokenizer, text, window=window)
            rows.append((name, model.num_parameters(), window, round(bits, 4)))
            print(*rows[-1], flush=True)
    table("real.csv", rows)


def table(name: str, rows: list[tuple]) -> None:
    """Write a table that the page shows."""
    with (SHAKESPEARE.parent / name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--save", type=Path, help="folder for the model of the first seed")
    for name in ("--others", "--tokens", "--again", "--real"):
        options.add_argument(name, action="store_true")
    options.add_argument("--pack", type=Path, metavar="FOLDER", help="of a model of this text")
    asked = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "tinyshakespeare.txt"
        path.write_bytes(bz2.decompress(SHAKESPEARE.read_bytes()))
        if asked.others:
            others(Path(work), asked.seeds)
        elif asked.pack:
            pack(path, asked.pack)
        elif asked.tokens:
            tokens_or_characters(path.read_text(encoding="utf-8"))
        elif asked.real:
            real(parted(path.read_text(encoding="utf-8"))[1][:8_000])
        elif asked.again:
            again(path.read_text(encoding="utf-8"), Path(work))
        else:
            side_by_side(path, asked.seeds, asked.save)


if __name__ == "__main__":
    main()
