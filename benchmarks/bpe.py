"""The tokenizer beside tokenizers and tiktoken: training, encoding, long words, memory, import.

    python benchmarks/bpe.py [--size 5] [--rounds 3] [FILE ...]

Texts: stories, Python's standard library, and files named. One thread each, and its CPU time, so
that a busy machine disturbs little; rounds are interleaved; medians, and medians of the ratios
within a round. A ratio of times below 1, or of speeds above 1, means that ours is quicker.
"""

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import numpy as np
import tiktoken
import tokenizers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from minillm.bpe import GPT2_PATTERN, GPT4_PATTERN, BPETokenizer, PreTokenizer
from minillm.deeper.tokenizer.hf_json import to_hf, to_tiktoken
from minillm.deeper.tokenizer.merges import count_words
from minillm.stories.language import StoryLanguage

SEPARATOR = "\n\n"


def texts(size: int, files: list[Path]) -> dict[str, str]:
    """About `size` characters of each kind of text."""
    stories = StoryLanguage("en").corpus(size // 650, 0)
    sources, length = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts and length < size:
            sources.append(path.read_text(encoding="utf-8", errors="ignore"))
            length += len(sources[-1])
    found = {"stories": SEPARATOR.join(stories), "library": "".join(sources)}
    found |= {path.name: path.read_text(encoding="utf-8") for path in files}
    return {name: text[:size] for name, text in found.items()}


def interleave(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each function in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.process_time()
            function()
            seconds[name].append(time.process_time() - start)
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def documents(text: str) -> list[str]:
    """Pieces of about 10,000 characters, cut before a paragraph."""
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + 10_000)
        pieces.append(text[start : end if end > 0 else len(text)])
        start += len(pieces[-1])
    return pieces


def their_trainer(pieces: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(GPT4_PATTERN), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def naive_trainer(text: str, num_merges: int) -> list[tuple[bytes, bytes]]:
    """The first trainer of notebook 02: all pairs in all words, again after every merge."""
    words = [[bytes([b]) for b in w.encode()] for w in PreTokenizer(GPT4_PATTERN).words(text)]
    merges = []
    for _ in range(num_merges):
        counts = Counter(pair for parts in words for pair in pairwise(parts))
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        for parts in words:
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = [best[0] + best[1]]
                i += 1
    return merges


def training(name: str, text: str, vocab_size: int, rounds: int) -> None:
    pieces = documents(text)
    seconds = interleave(
        {
            "ours": lambda: BPETokenizer.train(pieces, vocab_size, ties="lowest_ids"),
            "theirs": lambda: their_trainer(pieces, vocab_size),
        },
        rounds,
    )
    ours, theirs = seconds["ours"], seconds["theirs"]
    print(
        f"  {name:10} {len(text) / 1e6:4.1f} MB to {vocab_size:6,}:"
        f" ours {statistics.median(ours):6.2f}  tokenizers {statistics.median(theirs):6.2f}"
        f"  ratio {ratio(ours, theirs):.2f}"
    )


def small_and_long(text: str, rounds: int) -> None:
    quick = interleave({"quick": lambda: BPETokenizer.train(text, 500)}, 5 * rounds)["quick"]
    few = 20  # the naive trainer's time is the same for each merge, or a little less
    naive = interleave({"naive": lambda: naive_trainer(text, few)}, 1)["naive"][0] * 244 / few
    print(
        f"\n  130 KB to 500: ours {statistics.median(quick):.3f} s,"
        f" the notebook's naive trainer about {naive:.0f} s:"
        f" {naive / statistics.median(quick):.0f} times (bar 100)"
    )
    rng = random.Random(0)
    word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=1_000_000))
    for label, long in (("random letters", word), ("one letter", "a" * 1_000_000)):
        taken = interleave({"ours": lambda long=long: BPETokenizer.train(long, 1000)}, rounds)
        print(f"  one word of 1 MB, {label}, to 1,000: {min(taken['ours']):.2f} s (bar 3)")


def encoding(name: str, text: str, rounds: int) -> None:
    pieces = documents(text)
    tokenizer = BPETokenizer.train(pieces, 10_000)
    native, theirs = to_tiktoken(tokenizer), to_hf(tokenizer)
    fresh = [BPETokenizer(tokenizer.ranks, tokenizer.pattern) for _ in range(rounds)]
    batches = {
        "encode_batch": lambda: theirs.encode_batch(pieces),
        "encode_batch_fast": lambda: theirs.encode_batch_fast(pieces),
    }
    seconds = interleave(
        {
            "cold": lambda: fresh.pop().encode_ordinary(text),
            "warm": lambda: np.array(tokenizer.encode_ordinary(text), dtype=np.uint32),
            "tiktoken": lambda: native.encode_ordinary(text),
            "tiktoken numpy": lambda: native.encode_to_numpy(text, disallowed_special=()),
            **batches,
        },
        rounds,
    )
    assert native.encode_ordinary(text) == tokenizer.encode_ordinary(text)
    best = min(batches, key=lambda batch: statistics.median(seconds[batch]))
    megabytes = len(text.encode()) / 1e6
    speeds = {key: megabytes / statistics.median(taken) for key, taken in seconds.items()}
    print(f"  {name:10} " + "  ".join(f"{key} {value:.1f}" for key, value in speeds.items()))
    print(
        f"  {'':10} cold / tiktoken {ratio(seconds['tiktoken'], seconds['cold']):.2f}"
        f"  cold / {best} {ratio(seconds[best], seconds['cold']):.2f}"
        f"  warm / tiktoken, both numpy {ratio(seconds['tiktoken numpy'], seconds['warm']):.2f}"
    )


def degenerate() -> None:
    print("\nA million characters without a break (seconds, bar 3)")
    rng = random.Random(0)
    cases = {
        "one letter": "a" * 10**6,
        "spaces": " " * 10**6,
        "newlines": "\n" * 10**6,
        "random letters": "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=10**6)),
    }
    stories = StoryLanguage("en").corpus(300, 1)
    for label, pattern in (("GPT-2", GPT2_PATTERN), ("GPT-4", GPT4_PATTERN)):
        tokenizer = BPETokenizer.train([*stories, *cases.values()], 4000, pattern=pattern)
        taken = []
        for name, text in cases.items():
            start = time.process_time()
            ids = tokenizer.encode(text)
            taken.append(f"{name} {time.process_time() - start:.2f}")
            assert tokenizer.decode(ids) == text
        print(f"  {label}: " + ", ".join(taken))


def imports(rounds: int) -> None:
    code = "import time; s = time.perf_counter(); {}; print(time.perf_counter() - s)"
    lines = {
        "the tokenizer": "from minillm.bpe import BPETokenizer",
        "minillm": "import minillm",
        "torch": "import torch",
    }
    for name, line in lines.items():
        runs = [
            subprocess.run(
                [sys.executable, "-c", code.format(line)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for _ in range(rounds)
        ]
        print(f"  import {name}: {statistics.median(map(float, runs)):.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--size", type=float, default=5, help="million characters of each text")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(
        f"Python {platform.python_version()}, tokenizers {tokenizers.__version__}, "
        f"tiktoken {tiktoken.__version__}, one thread, {args.rounds} rounds, load "
        + " ".join(f"{load:.1f}" for load in os.getloadavg())
    )
    corpora = texts(int(args.size * 1e6), args.files)
    for name, text in corpora.items():
        words = count_words([text], PreTokenizer(GPT4_PATTERN))
        print(f"  {name}: {len(text):,} characters, {len(words):,} distinct words")
    print("\nTraining (CPU seconds; ratio = ours / tokenizers, bar 0.70)")
    for name, text in corpora.items():
        for vocab_size in (1000, 10_000):
            training(name, text, vocab_size, args.rounds)
    small_and_long(corpora["stories"][:130_000], args.rounds)
    print("\nEncoding, vocabulary 10,000 (MB/s; ratios of speeds, bars 0.25, 1.5, 0.7)")
    for name, text in corpora.items():
        encoding(name, text, args.rounds)
    degenerate()
    print("\nImport")
    imports(args.rounds)


if __name__ == "__main__":
    main()
