"""A real chat model beside transformers: logits, tokens, opening, tokens per second; one thread.

    OMP_NUM_THREADS=1 python benchmarks/real.py

SmolLM2-135M-Instruct in float32, from the file that `make real` fetches. Contenders take turns in
one process, times are its processor time; printed are medians over the rounds and the range of the
ratios transformers / ours (above 1: ours is quicker).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from four_bits import CHAT, real_file, rounds

from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.generation import generate


def report(title: str, seconds: dict[str, list[float]], tokens: int = 0) -> None:
    first = seconds["transformers"]
    print(title)
    for name, mine in seconds.items():
        middle = statistics.median(mine)
        speed = f"{tokens / middle:6.1f} tokens/s" if tokens else f"{middle:6.2f} s"
        ratios = [a / b for a, b in zip(first, mine, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"  {name:13} {speed}  {statistics.median(ratios):5.2f}x ({spread})", flush=True)


def theirs_from(**where: Any) -> transformers.PreTrainedModel:
    with redirect_stderr(StringIO()):  # a progress bar
        return transformers.AutoModelForCausalLM.from_pretrained(**where).eval()


def opening(path: Path, number: int) -> None:
    """Time from a file to model and tokenizer, once everything is imported."""

    def them(**where: Any) -> Callable[[], Any]:
        tokenizer = transformers.AutoTokenizer.from_pretrained
        return lambda: (theirs_from(**where), tokenizer(**where))

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(*from_pretrained(path), folder)
        readers = {
            "transformers": them(pretrained_model_name_or_path=folder),
            "minillm": lambda: from_pretrained(folder),
        }
        rounds(readers, 1)  # imports
        report("opening a folder, model and tokenizer", rounds(readers, number))
    gguf = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    readers = {"transformers": them(**gguf), "minillm": lambda: from_pretrained(path)}
    report("opening the GGUF file, model and tokenizer", rounds(readers, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64)
    args = parser.parse_args()
    if (path := real_file()) is None:
        print("left out: the model is not here (make real fetches it)")
        return
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    gguf = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    (ours, tokenizer), theirs = from_pretrained(path), theirs_from(**gguf)
    packed = ours.packed()
    prompt = torch.tensor([tokenizer.apply_chat_template(CHAT)])
    off = (ours(prompt) - theirs(prompt).logits).abs().max().item()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, 1 thread, float32")
    print(f"logits of {prompt.shape[1]} tokens: off by at most {off:.1e}")

    options = {"max_new_tokens": args.new, "min_new_tokens": args.new, "do_sample": False}
    options |= {"attention_mask": torch.ones_like(prompt), "pad_token_id": 2}
    writers = {
        "transformers": lambda: theirs.generate(prompt, **options),
        "minillm": lambda: generate(ours, prompt, max_new_tokens=args.new, eos_token_id=None),
        "packed": lambda: generate(packed, prompt, max_new_tokens=args.new, eos_token_id=None),
    }
    found = {name: write() for name, write in writers.items()}
    same = all(torch.equal(found["transformers"], ids) for ids in found.values())
    print(f"{args.new} greedy tokens: {'identical' if same else 'DIFFERENT'}")
    report("writing", rounds(writers, args.rounds), args.new)

    opening(path, args.rounds)


if __name__ == "__main__":
    main()
