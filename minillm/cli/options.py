"""The options of each command, their ranges, and the device.

Written by hand.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minillm.cli.corpus import END, is_file
from minillm.files import read_json


class OneDefault(argparse.HelpFormatter):
    """Each option's default, once: as its help says it, or else as it is."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        said = (
            "default" in text
            or action.default in (None, argparse.SUPPRESS)
            or action.default is False
        )
        return (
            text
            if said or action.required or not action.option_strings
            else f"{text} (default: %(default)s)"
        )


def train_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("--output-dir", type=Path, required=True, help="folder of the run")
    one.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    one.add_argument(
        "--corpus",
        default="stories-en",
        help=f"stories-en, stories-zh, or a text file whose documents end with {END}",
    )
    one.add_argument("--tokenizer", type=Path, help="folder of a tokenizer to use (else: train)")
    one.add_argument(
        "--vocab-size",
        type=int,
        default=1024,
        help="of a tokenizer that is trained, bytes included",
    )
    one.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help='JSON with options, {"max-lr": 1e-3, ...}; what is typed as well goes before it',
    )
    one.add_argument(
        "--init-from",
        type=Path,
        help="folder of a saved model to start from, with its tokenizer; the options of the model"
        " then say nothing",
    )
    model = one.add_argument_group("model")

    def number(*names: str, default: float | None = None, dest: str = "", help: str) -> None:
        kind: Any = float if isinstance(default, float) else int
        named: Any = {"dest": dest} if dest else {}
        model.add_argument(*names, type=kind, default=default, help=help, **named)

    model.add_argument(
        *("--model-type", "--family"),
        dest="family",
        default="llama",
        help="llama, qwen3, gpt2, ...",
    )
    number("--hidden-size", default=128, help="numbers in a hidden state")
    number("--num-hidden-layers", "--layers", dest="layers", default=4, help="layers")
    number("--num-attention-heads", "--heads", dest="heads", default=4, help="query heads")
    number(
        *("--num-key-value-heads", "--kv-heads"), dest="kv_heads", help="default: as query heads"
    )
    number("--head-dim", help="numbers in a head (default: hidden size / query heads)")
    number("--intermediate-size", help="default: 8/3 of the hidden size, up to a multiple of 32")
    number("--context-length", default=256, help="tokens in a row of a batch")
    number(
        *("--initializer-range", "--init-range"),
        dest="init_range",
        default=0.02,
        help="deviation of fresh weights",
    )
    number("--rope-theta", default=10000.0, help="base of the rotation")
    number("--dropout", default=0.0, help="share of attention weights dropped while training")
    run = one.add_argument_group("run")
    run.add_argument("--steps", type=int, default=500, help="updates of the weights")
    run.add_argument("--batch-size", type=int, default=16, help="rows of the context's length")
    run.add_argument(
        "--gradient-accumulation-steps", type=int, default=1, metavar="N", help="batches a step"
    )
    run.add_argument(
        "--layout", choices=["padded", "packed", "windows"], help="rows (default: what fits)"
    )
    run.add_argument(
        "--max-lr", "--lr", dest="lr", type=float, default=2e-3, help="highest learning rate"
    )
    run.add_argument(
        "--min-lr", type=float, help="rate at the end (default: a 20th of the highest)"
    )
    run.add_argument(
        *("--warmup-steps", "--warmup"),
        dest="warmup",
        type=int,
        default=100,
        help="steps until the rate is highest",
    )
    run.add_argument("--weight-decay", type=float, default=0.1, help="of matrices")
    run.add_argument(
        "--optimizer", choices=["adamw", "muon"], default="adamw", help="AdamW or Muon"
    )
    run.add_argument(
        "--precision",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of matrix products; weights are float32",
    )
    run.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    run.add_argument(
        "--parallel",
        choices=["ddp", "fsdp", "tensor"],
        default="ddp",
        help="under torchrun: every process has the whole model and some rows of each batch; or a"
        " part of it (fsdp); or some heads and hidden units of each layer, and all rows (tensor)."
        " Samples of the latter two are written by a whole copy in the first process",
    )
    run.add_argument(
        "--save-dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the finished model.safetensors; checkpoints keep float32",
    )
    run.add_argument("--checkpoint-interval", type=int, default=100, help="steps; 0: at the end")
    run.add_argument("--eval-interval", type=int, default=100, help="steps; prints a sample too")
    run.add_argument(
        "--held-out",
        type=int,
        default=100,
        help="at most so many stories, or documents of the tenth of a file that is held out; 0:"
        " nothing is held out",
    )
    run.add_argument("--log-interval", type=int, default=10, help="steps")
    run.add_argument("--quiet", action="store_true", help="no progress bar, no samples")
    course = one.add_argument_group("the course's stories (deeper/10_exact_targets)")
    course.add_argument(
        "--deck-cards",
        type=int,
        help="tell the stories with so few names, animals, colours and things, so that what does"
        " not come twice is seen (default: with all)",
    )
    course.add_argument(
        "--deck-stories", type=int, default=16000, help="other cards after so many stories"
    )
    course.add_argument(
        "--exact-targets",
        action="store_true",
        help="where a story draws a card, learn the probabilities of all and not the one drawn",
    )


def sampler_options(one: argparse.ArgumentParser, *, temperature: float) -> None:
    likeliest = "0 takes the likeliest token"
    one.add_argument("--temperature", type=float, default=temperature, help=likeliest)
    one.add_argument("--top-k", type=int, help="draw from so many of the likeliest (default: all)")
    one.add_argument("--top-p", type=float, help="draw from the likeliest with this share of all")
    one.add_argument("--min-p", type=float, help="leave out what is below this share of the best")
    seen = "of tokens that came before"
    one.add_argument(
        "--repetition-penalty", type=float, default=1.0, help=f"divides positive scores {seen}"
    )
    one.add_argument(
        "--presence-penalty", type=float, default=0.0, help=f"taken once from scores {seen}"
    )
    one.add_argument(
        "--frequency-penalty", type=float, default=0.0, help=f"taken each time from scores {seen}"
    )


def dtype_option(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="of the weights",
    )


def chat_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("model", metavar="NAME_OR_FOLDER_OR_FILE", help="what from_pretrained opens")
    one.add_argument("--system", help="what the model is told before the conversation")
    one.add_argument("--max-new-tokens", type=int, default=1024, help="of one answer")
    sampler_options(one, temperature=0.7)
    one.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights (default: float32 on a CPU, elsewhere the file's)",
    )
    one.add_argument(
        "--plain", action="store_true", help="do not pack float32 weights: slower, less memory"
    )
    one.add_argument("--verbose", action="store_true", help="what was computed, and how fast")


MOST = 10**9  # sizes and counts beyond it are a slip of the finger
AT_ONCE = 100_000  # texts that are held at once
BATCH = 2**22  # tokens in a batch: larger ones are steps of several batches
AT_LEAST_1 = (lambda x: 1 <= x <= MOST, f"must be from 1 to {MOST:,}")
A_FEW = (lambda x: 1 <= x <= AT_ONCE, f"must be from 1 to {AT_ONCE:,}")
AT_LEAST_0 = (lambda x: 0 <= x <= MOST, f"must be from 0 to {MOST:,}")
ABOVE_0 = (lambda x: 0 < x < math.inf, "must be above 0")
FINITE = (math.isfinite, "must be a number")
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("hidden_size", "heads", "kv_heads", "intermediate_size", "head_dim"), AT_LEAST_1
    ),
    **dict.fromkeys(("context_length", "steps", "batch_size"), AT_LEAST_1),
    **dict.fromkeys(("gradient_accumulation_steps", "log_interval"), AT_LEAST_1),
    **dict.fromkeys(("deck_stories", "top_k"), AT_LEAST_1),
    **dict.fromkeys(("count", "documents"), A_FEW),
    "held_out": (lambda x: 0 <= x <= AT_ONCE, f"must be from 0 to {AT_ONCE:,}"),
    **dict.fromkeys(("checkpoint_interval", "eval_interval", "warmup"), AT_LEAST_0),
    **dict.fromkeys(("max_new_tokens", "samples"), AT_LEAST_0),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), FINITE),
    **dict.fromkeys(("min_lr", "weight_decay", "init_range", "temperature"), AT_LEAST_0),
    "lr": (lambda x: 0 < x <= MOST, f"must be above 0 and at most {MOST:,}"),
    "dropout": (lambda x: 0 <= x < 1, "must be from 0, below 1"),
    **dict.fromkeys(("rope_theta", "repetition_penalty"), ABOVE_0),
    "min_p": (lambda x: 0 <= x <= 1, "must be from 0 to 1"),
    "layers": (lambda x: 1 <= x <= 10_000, "must be from 1 to 10,000"),
    "vocab_size": (lambda x: 257 <= x <= MOST, "must be at least 257: the bytes and an end token"),
    "deck_cards": (lambda x: 3 <= x <= MOST, "must be at least 3: a story may draw so many"),
    "top_p": (lambda x: 0 < x <= 1, "must be above 0 and at most 1"),
    "seed": (lambda x: 0 <= x < 2**63, "must be from 0 to 2**63 - 1"),
}


def words_of(path: Path) -> list[str]:
    """The options of a JSON file, as they would be typed. Raises: ValueError for what is none."""
    words = []
    for name, value in read_json(path).items():
        if isinstance(value, list | dict):
            raise ValueError(f"{path}: {name} must be one value, not {value!r:.60}")
        if value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}"))
    return words


def check_options(a: argparse.Namespace) -> None:
    """Raises: ValueError that names the option, as it is typed, that is out of its range."""
    for name, (fits, rule) in RANGES.items():
        value = getattr(a, name, None)
        if value is not None and not fits(value):
            raise ValueError(f"--{name.replace('_', '-')} {value} {rule}")
    if "steps" in a:
        if (tokens := a.batch_size * a.context_length) > BATCH:
            sizes = f"--batch-size {a.batch_size} --context-length {a.context_length}"
            raise ValueError(
                f"{sizes} are {tokens:,} tokens in a batch, of at most {BATCH:,}; "
                "--gradient-accumulation-steps takes several batches for a step"
            )
        if a.min_lr is not None and a.min_lr > a.lr:
            raise ValueError(f"--min-lr {a.min_lr} is above --lr {a.lr}")
        if a.deck_cards is not None and is_file(a):
            raise ValueError("--deck-cards is for stories, not for a text file")
        if a.exact_targets and (is_file(a) or a.deck_cards is not None):
            raise ValueError("--exact-targets is for stories told with all cards")
        if a.layout == "windows" and not is_file(a):
            raise ValueError("stories never end, so there are no windows of them: padded or packed")
    if "system" in a and a.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {a.max_new_tokens} must be at least 1: an answer")
