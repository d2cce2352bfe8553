"""The command line: python -m minillm train | generate | eval.

    python -m minillm train --out runs/first --steps 500
    python -m minillm generate runs/first --count 3
    python -m minillm eval runs/first
    torchrun --nproc-per-node 2 -m minillm train --out runs/two --parallel fsdp

`train` writes config.json, model.safetensors and tokenizer.json as Hugging Face does, beside them
the checkpoints and metrics of the run, and run.json, which says how it was made. Started again
with --resume, it goes on where the newest whole checkpoint stands.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from minillm.commands import device, train
from minillm.corpora import END, language, stories

__all__ = ["main", "parser", "run"]


def main(argv: list[str] | None = None) -> int:
    """Run a command; a caller's mistake is one line on the error channel and exit code 1."""
    arguments = parser().parse_args(argv)
    from minillm.training.checkpoint import CheckpointError

    try:
        arguments.command(arguments)
    except (ValueError, OSError, ImportError, CheckpointError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; train --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(
        prog="python -m minillm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(required=True, metavar="train | generate | eval")

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=text,
            description=text,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        made.set_defaults(command=function)
        made.add_argument("--device", help="cpu, cuda, mps (default: the best there is)")
        made.add_argument("--seed", type=int, default=0)
        return made

    _train_options(command("train", train, "train a model on stories or on a text file"))
    one = command("generate", generate_text, "print texts of a saved model")
    one.add_argument("folder", type=Path)
    one.add_argument("--prompt", default="", help="the beginning; empty: the model begins")
    one.add_argument("--count", type=int, default=1)
    one.add_argument("--max-new-tokens", type=int, default=400)
    one.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token")
    one.add_argument("--top-k", type=int)
    one.add_argument("--top-p", type=float)
    one = command("eval", evaluate_folder, "bits per byte, floor and share of valid stories")
    one.add_argument("folder", type=Path)
    one.add_argument("--corpus", choices=["stories-en", "stories-zh"], default="stories-en")
    one.add_argument("--documents", type=int, default=500, help="held-out stories to measure on")
    one.add_argument("--samples", type=int, default=200, help="stories to sample and to parse")
    return top


def _train_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("--out", type=Path, required=True, help="folder of the run")
    one.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    one.add_argument(
        "--corpus",
        default="stories-en",
        help=f"stories-en, stories-zh, or a text file whose documents end with {END}",
    )
    one.add_argument("--tokenizer", type=Path, help="folder of a tokenizer to use (else: train)")
    one.add_argument("--vocab-size", type=int, default=1024)
    one.add_argument(
        "--init-from",
        type=Path,
        help="folder of a saved model to start from, with its tokenizer; the options of the model"
        " then say nothing",
    )
    one.add_argument(
        "--deck-cards",
        type=int,
        help="tell the stories with so few names, animals, colours and things, so that what does"
        " not come twice is seen (default: with all)",
    )
    one.add_argument("--deck-stories", type=int, default=16000, help="other cards after so many")
    one.add_argument(
        "--exact-targets",
        action="store_true",
        help="where a story draws a card, learn the probabilities of all and not the one drawn",
    )
    model = one.add_argument_group("model")
    model.add_argument("--family", default="llama", help="llama, qwen3, gpt2, ...")
    model.add_argument("--hidden-size", type=int, default=128)
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--kv-heads", type=int, help="key/value heads (default: as many)")
    model.add_argument("--intermediate-size", type=int, help="default: 8/3 hidden, times of 32")
    model.add_argument("--context-length", type=int, default=256)
    model.add_argument("--init-range", type=float, default=0.02, help="deviation of fresh weights")
    model.add_argument("--rope-theta", type=float, default=10000.0)
    run = one.add_argument_group("run")
    run.add_argument("--steps", type=int, default=500)
    run.add_argument("--batch-size", type=int, default=16, help="rows of the context's length")
    run.add_argument("--accumulation", type=int, default=1, help="batches a step")
    run.add_argument(
        "--layout", choices=["padded", "packed", "windows"], help="rows (default: what fits)"
    )
    run.add_argument("--lr", type=float, default=2e-3)
    run.add_argument("--min-lr", type=float, help="default: lr / 20")
    run.add_argument("--warmup", type=int, default=100, help="steps")
    run.add_argument("--weight-decay", type=float, default=0.1)
    run.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    run.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    run.add_argument("--compile", action="store_true")
    run.add_argument(
        "--parallel",
        choices=["ddp", "fsdp"],
        default="ddp",
        help="under torchrun: every process has the whole model, or a part of it; samples of the"
        " latter are written by a whole copy in the first process",
    )
    run.add_argument(
        "--save-dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the finished model.safetensors; checkpoints keep float32",
    )
    run.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    run.add_argument("--validate-every", type=int, default=100, help="steps; prints a sample too")
    run.add_argument("--held-out", type=int, default=100, help="stories for validation")
    run.add_argument("--log-every", type=int, default=10, help="steps")
    run.add_argument("--quiet", action="store_true", help="no progress bar, no samples")


def generate_text(a: argparse.Namespace) -> None:
    """Print texts that the model of a folder writes."""
    model, tokenizer = _load(a)
    for i, text in enumerate(_sample(model, tokenizer, a.prompt, a.count, a)):
        print(("\n" if i else "") + text)


def evaluate_folder(a: argparse.Namespace) -> None:
    """Print bits per byte on held-out stories, the floor, and how many samples are stories."""
    from minillm.training.evaluation import evaluate

    model, tokenizer = _load(a)
    grammar = language(a.corpus)
    measured = evaluate(model, stories(a.corpus, a.documents, "held out"), tokenizer)
    floor = grammar.bits_per_byte()
    print(f"bits per byte  {measured:.4f}  on {a.documents} held-out stories, ends included")
    print(f"floor          {floor:.4f}  which no model can beat; ratio {measured / floor:.3f}")
    if a.samples:
        a.temperature, a.top_k, a.top_p, a.max_new_tokens = 1.0, None, None, 512
        texts = [t for n in _parts(a.samples, 64) for t in _sample(model, tokenizer, "", n, a)]
        valid = sum(grammar.score(text) > float("-inf") for text in texts)
        print(f"valid stories  {valid} of {len(texts)} sampled at temperature 1")


def _parts(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


def _sample(
    model: Any, tokenizer: Any, prompt: str, count: int, a: argparse.Namespace
) -> list[str]:
    """`count` continuations of a prompt, without the end token."""
    import torch

    from minillm.generation.decoding import generate
    from minillm.generation.sampling import GREEDY, Sampler

    ids = tokenizer.encode_ordinary(prompt)
    begin = model.config.bos_token_id
    if begin is not None and ids[:1] != [begin]:
        ids = [begin, *ids]
    if not ids:
        raise ValueError("this model has no begin token: give a --prompt")
    sampler = GREEDY
    if a.temperature > 0:
        limits = {"top_k": a.top_k, "top_p": a.top_p}
        sampler = Sampler(temperature=a.temperature, seed=a.seed, **limits)
    a.seed += 1  # the next call draws other texts
    prompts = torch.tensor([ids] * count, device=model.lm_head.weight.device)
    rows = generate(model, prompts, max_new_tokens=a.max_new_tokens, sampler=sampler)
    texts = []
    for row in rows[:, len(ids) :].tolist():
        ends = [row.index(e) for e in model.config.eos_token_ids if e in row]
        new = row[: min(ends, default=len(row))]
        # a text that begins loses its first space in some tokenizers; one that goes on must not
        rest = tokenizer.decode_bytes(new).decode("utf-8", "replace")
        texts.append(prompt + rest if prompt else tokenizer.decode(new))
    return texts


def _load(a: argparse.Namespace) -> tuple[Any, Any]:
    import torch

    from minillm.pretrained.load import from_pretrained

    if not a.folder.is_dir():
        raise FileNotFoundError(f"there is no folder {a.folder}")
    model, tokenizer = from_pretrained(a.folder, dtype=torch.float32, device=device(a))
    if tokenizer is None:
        raise ValueError(f"{a.folder} has no tokenizer")
    return model, tokenizer


def run() -> NoReturn:
    """The program; under torchrun it ends at once, freeing nothing (see `distributed.stop`)."""
    code = main()
    if "WORLD_SIZE" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
