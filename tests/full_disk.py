"""A script: every writer on a disk that fills up while it writes.

`python full_disk.py tmpfs FOLDER` mounts a small file system of its own there (Linux; run it under
`unshare --user --map-root-user --mount`, which asks for no rights). `... limit FOLDER` lets no file
grow beyond some size: no disk is full then, but the kernel refuses in the same places.
For each writer and each size, until one is enough, it prints what came of it as a line of JSON.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from training_runs import small_disk

import minillm.support.files
from minillm.beyond.lora.adapters import add_lora
from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.pretrained.adapters import save_adapter
from minillm.deeper.pretrained.load import save_pretrained
from minillm.deeper.training.checkpoint import save_checkpoint
from minillm.deeper.training.run_folder import append_record, forget_after
from minillm.deeper.training.token_file import TokenDataset
from minillm.model import CausalLM
from minillm.support.files import write_json

PAGE = 4096  # what tmpfs counts in
DISK = 100 * PAGE


def model(number: int) -> CausalLM:
    return CausalLM(ModelConfig(270, 16, 1, 2, 32), seed=number)


def tokenizer(number: int) -> BPETokenizer:
    texts = ["one fish, two fish, red fish, blue fish", "a cat sat on a mat"]
    return BPETokenizer.train(texts[number], 270, special_tokens=[f"<|end{number}|>"])


def adapter(number: int, folder: Path) -> None:
    base = model(0)
    add_lora(base, 4, 8)
    for p in base.parameters():
        p.data += number
    save_adapter(base, folder)


def checkpoint(number: int, folder: Path) -> None:
    tensors = {name: {"w": torch.full((3000,), float(number))} for name in ("model", "optimizer")}
    save_checkpoint(folder, 7, tensors, {"value": number}, keep=1)


def tokens(number: int, folder: Path) -> None:
    documents = [[number] * 500] * (20 + number)
    TokenDataset.write(folder / "tokens.npy", documents, vocab_size=270, eos_token_id=9)


def records(number: int, folder: Path) -> None:
    """A record longer than a page: half of it fits."""
    record = {"step": number, "sample": "".join(random.Random(number).choices("abc", k=9000))}
    append_record(folder / "metrics.jsonl", record)


def forget(number: int, folder: Path) -> None:
    """Two records, one of which is dropped."""
    if number == 0:
        records(1, folder)
        records(2, folder)
    else:
        forget_after(folder / "metrics.jsonl", 1)


def info(number: int, folder: Path) -> None:
    write_json(folder / "run.json", {"options": ["x" * 99] * 99, "value": number})


WRITERS: dict[str, Callable[[int, Path], None]] = {
    "checkpoint": checkpoint,
    "metrics": records,
    "metrics of a resumed run": forget,
    "run.json": info,
    "tokens": tokens,
    "tokenizer": lambda number, folder: tokenizer(number).save(folder),
    "save_pretrained": lambda number, folder: save_pretrained(
        model(number), tokenizer(number), folder, max_shard_bytes=15_000
    ),
    "adapter": adapter,
}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@contextmanager
def filled(folder: Path, free: int):
    """The disk of `folder` has so much room in here."""
    filler = folder / "filler"
    used = sum(-(-len(data) // PAGE) * PAGE for data in contents(folder).values())
    filler.write_bytes(b"x" * (DISK - used - free))
    try:
        yield
    finally:
        filler.unlink()


def tried(write: Callable[[int, Path], None], folder: Path) -> str | None:
    """What a writer says, None if it has written."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            write(1, folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "; ".join(str(warning.message) for warning in heard) or None


def main(how: str, disk: Path) -> None:
    if how == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(disk)]
        subprocess.run(mount, check=True)
    minillm.support.files.check_space = lambda *_: None  # the disk fills up after it was asked
    for name, write in WRITERS.items():
        for free in range(0, DISK, PAGE if how == "tmpfs" else 1000):
            folder = disk / f"{name} {free}"
            folder.mkdir()
            write(0, folder)
            before = contents(folder)
            with filled(folder, free) if how == "tmpfs" else small_disk(free):
                said = tried(write, folder)
                same = {p: d for p, d in contents(folder).items() if p != "filler"} == before
            again = tried(write, folder)  # there is room again
            found = {"writer": name, "free": free, "folder": str(folder), "said": said}
            found |= {"same": same, "again": again, "end": sorted(contents(folder))}
            print(json.dumps(found))
            shutil.rmtree(folder)
            if said is None:
                break


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
