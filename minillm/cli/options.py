"""The options of each command, each with its default, its range and its help.

Written by hand.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minillm.cli.corpus import END, is_file
from minillm.support.checks.kinds import POSITIVE, SHARE, Kind, check_kind, number, whole
from minillm.support.files import read_json

MOST = 10**9  # sizes and counts beyond it are a slip of the finger
AT_ONCE = 100_000  # texts that are held at once
BATCH = 2**22  # tokens in a batch: larger ones are steps of several batches
ANY = whole(0, MOST)
SOME = whole(1, MOST)
FEW = whole(1, AT_ONCE)
RATE = number(f"from 0 to {MOST:,}", lambda x: 0 <= x <= MOST)
CORPUS = "stories-en, stories-zh, or a text file"
DTYPES = ["float32", "bfloat16", "float16"]


# What `train --corpus FILE` does if nothing else is said, measured by benchmarks/real_text.py. Less
# text takes fewer steps, one for each BYTES_A_STEP, or else it is read too often, and a warm-up of
# a sixth of them.
OF_A_FILE: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 768,
    "context_length": 96,
    "batch_size": 12,
    "steps": 660,
    "lr": 8e-3,
    "min_lr": 0.0,
    "warmup": 50,
    "optimizer": "muon",
}
BYTES_A_STEP = 500


def defaults_of(a: argparse.Namespace) -> dict[str, Any]:
    """What is other than usual where a fresh model is trained on windows of a file.

    Looks cost time: if the held-out tenth is long there is one, at the end; if short, up to ten.
    """
    whole_model = a.init_from is None and a.parallel == "ddp"  # Muon moves whole matrices
    if not (is_file(a) and whole_model and a.layout in (None, "windows")):
        return {}
    size = os.path.getsize(a.corpus) if os.path.isfile(a.corpus) else MOST
    steps = max(1, min(OF_A_FILE["steps"], size // BYTES_A_STEP))
    looks = max(1, min(10, 2_000_000 // max(1, size)))
    fewer = {"steps": steps, "warmup": min(OF_A_FILE["warmup"], steps // 6)}
    return {**OF_A_FILE, **fewer, "eval_interval": -(-steps // looks)}


class OneDefault(argparse.HelpFormatter):
    """Each option's default, once: as its help says it, or else as it is."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        said = "default" in text or default in (None, argparse.SUPPRESS) or default is False
        bare = said or action.required or not action.option_strings
        return text if bare else f"{text} (default: %(default)s)"


class Checked(argparse.Action):
    """An option with a range: a ValueError names it as it was typed."""

    def __init__(self, *, kind: Kind, **more: Any) -> None:
        super().__init__(**more)
        self.kind = kind

    def __call__(self, _: Any, found: argparse.Namespace, value: Any, name: Any = None) -> None:
        """Raises: ValueError for a value out of its range."""
        check_kind(name, value, self.kind)
        setattr(found, self.dest, value)


def adder(group: Any) -> Callable[..., None]:
    """A function that adds to a parser or group: names (the last is its own), default, kind, help.

    The kind is a range of `support.checks.kinds` or a list of words to choose from.
    """

    def add(names: str, default: Any, kind: Kind | list[str], help: str, **more: Any) -> None:
        own = names.split()
        dest = own[-1].strip("-").replace("-", "_")
        if isinstance(kind, list):
            more |= {"choices": kind}
        else:
            read = {"type": int if default is None else type(default)}
            more = read | more | {"action": Checked, "kind": kind}
        group.add_argument(*own, dest=dest, default=default, help=help, **more)

    return add


def common_options(one: argparse.ArgumentParser) -> None:
    """The options of every command."""
    one.add_argument("--device", help="cpu, cuda or mps (default: the best there is)")
    adder(one)("--seed", 0, whole(0, 2**63 - 1), "of every random draw")


def train_options(one: argparse.ArgumentParser) -> None:
    """The options of `train`: files, then the model, the run, and the course's own."""
    add = adder(one)
    one.add_argument("--output-dir", type=Path, required=True, help="folder of the run")
    one.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    documents = f"{CORPUS} whose documents end with {END}"
    other = f"{documents}; of a file, unless you say otherwise: {_in_words(OF_A_FILE)}"
    one.add_argument("--corpus", default="stories-en", help=other)
    one.add_argument("--tokenizer", type=Path, help="folder of a tokenizer to use (else: train)")
    bytes_and_end = whole(257, MOST, ": the bytes and an end token")
    add("--vocab-size", 1024, bytes_and_end, "of a tokenizer that is trained, bytes included")
    config = 'JSON with options, {"max-lr": 1e-3, ...}; what is typed as well goes before it'
    one.add_argument("--config", type=Path, metavar="FILE", help=config)
    start = "folder of a saved model to start from, with its tokenizer; the options of the model"
    one.add_argument("--init-from", type=Path, help=f"{start} then say nothing")

    model = one.add_argument_group("model")
    names = ("--model-type", "--family")
    model.add_argument(*names, dest="family", default="llama", help="llama, qwen3, gpt2, ...")
    add = adder(model)
    add("--hidden-size", 128, SOME, "numbers in a hidden state")
    add("--num-hidden-layers --layers", 4, whole(1, 10_000), "layers")
    add("--num-attention-heads --heads", 4, SOME, "query heads")
    add("--num-key-value-heads --kv-heads", None, SOME, "default: as query heads")
    add("--head-dim", None, SOME, "numbers in a head (default: hidden size / query heads)")
    eight_thirds = "default: 8/3 of the hidden size, up to a multiple of 32"
    add("--intermediate-size", None, SOME, eight_thirds)
    add("--context-length", 256, SOME, "tokens in a row of a batch")
    add("--initializer-range --init-range", 0.02, RATE, "deviation of fresh weights")
    add("--rope-theta", 10000.0, POSITIVE, "base of the rotation")
    add("--dropout", 0.0, SHARE, "share of attention weights dropped while training")

    add = adder(run := one.add_argument_group("run"))
    add("--steps", 500, SOME, "updates of the weights")
    add("--batch-size", 16, SOME, "rows of the context's length")
    add("--gradient-accumulation-steps", 1, SOME, "batches a step", metavar="N")
    add("--layout", None, ["padded", "packed", "windows"], "rows (default: what fits)")
    rate = number(f"above 0 and at most {MOST:,}", lambda x: 0 < x <= MOST)
    add("--max-lr --lr", 2e-3, rate, "highest learning rate")
    end = "rate at the end (default: a 20th of the highest)"
    add("--min-lr", None, RATE, end, type=float)
    add("--warmup-steps --warmup", 100, ANY, "steps until the rate is highest")
    add("--weight-decay", 0.1, RATE, "of matrices")
    add("--optimizer", "adamw", ["adamw", "muon"], "AdamW or Muon")
    add("--precision", "float32", DTYPES[:2], "of matrix products; weights are float32")
    run.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    parallel = (
        "under torchrun: every process has the whole model and some rows of each batch; or a"
        " part of it (fsdp); or some heads and hidden units of each layer, and all rows (tensor)."
        " Samples of the latter two are written by a whole copy in the first process"
    )
    add("--parallel", "ddp", ["ddp", "fsdp", "tensor"], parallel)
    finished = "of the finished model.safetensors; checkpoints keep float32"
    add("--save-dtype", "float32", DTYPES[:2], finished)
    add("--checkpoint-interval", 100, ANY, "steps; 0: at the end")
    add("--eval-interval", 100, ANY, "steps; prints a sample too")
    held_out = "at most so many stories, or documents of the tenth of a file that is held out; 0:"
    add("--held-out", 100, whole(0, AT_ONCE), f"{held_out} nothing is held out")
    add("--log-interval", 10, SOME, "steps")
    run.add_argument("--quiet", action="store_true", help="no progress bar, no samples")

    course = one.add_argument_group("the course's stories (deeper/10_exact_targets)")
    add, drawn = adder(course), whole(3, MOST, ": a story may draw so many")
    few = "tell the stories with so few names, animals, colours and things, so that what does"
    add("--deck-cards", None, drawn, f"{few} not come twice is seen (default: with all)")
    add("--deck-stories", 16000, SOME, "other cards after so many stories")
    exact = "where a story draws a card, learn the probabilities of all and not the one drawn"
    course.add_argument("--exact-targets", action="store_true", help=exact)


def _in_words(defaults: dict[str, Any]) -> str:
    """Defaults as they would be typed."""
    typed = [f"--{name.replace('_', '-')} {value}" for name, value in defaults.items()]
    size = BYTES_A_STEP * defaults["steps"] // 1000
    return f"{' '.join(typed)} (below {size} kB fewer steps, a shorter warm-up)"


def generate_options(one: argparse.ArgumentParser) -> None:
    """The options of `generate`."""
    add = adder(one)
    one.add_argument("folder", type=Path, help="of a saved model; or a GGUF file")
    one.add_argument("--prompt", default="", help="the beginning; empty: the model begins")
    add("--count", 1, FEW, "how many texts")
    add("--max-new-tokens", None, ANY, "default: 400, or what the model's context leaves")
    stop = "end before this text; may be given again"
    one.add_argument("--stop", action="append", metavar="TEXT", help=stop)
    _sampler_options(one, temperature=1.0)
    add("--dtype", "float32", DTYPES, "of the weights")
    add("--parallel", None, ["tensor"], "under torchrun: cut the layers over the processes")


def chat_options(one: argparse.ArgumentParser) -> None:
    """The options of `chat`."""
    add, where = adder(one), "NAME_OR_FOLDER_OR_FILE"
    one.add_argument("model", metavar=where, help="what from_pretrained opens")
    one.add_argument("--system", help="what the model is told before the conversation")
    add("--max-new-tokens", 1024, SOME, "of one answer")
    _sampler_options(one, temperature=0.7)
    dtype = "of the weights (default: float32 on a CPU, elsewhere the file's)"
    add("--dtype", None, DTYPES, dtype)
    plain = "do not pack float32 weights: slower, less memory"
    one.add_argument("--plain", action="store_true", help=plain)
    one.add_argument("--verbose", action="store_true", help="what was computed, and how fast")


def eval_options(one: argparse.ArgumentParser) -> None:
    """The options of `eval`."""
    add = adder(one)
    one.add_argument("folder", type=Path, help="of a saved model; or a GGUF file")
    measured = f"{CORPUS}, of which all is measured (default: what the run held out)"
    one.add_argument("--corpus", help=measured)
    add("--documents", 500, FEW, "at most so many held-out ones")
    add("--samples", 200, ANY, "stories to sample and to parse")
    add("--dtype", "float32", DTYPES, "of the weights")


def _sampler_options(one: argparse.ArgumentParser, *, temperature: float) -> None:
    add, seen = adder(one), "of tokens that came before"
    finite = number("that is finite", lambda x: True)
    add("--temperature", temperature, RATE, "0 takes the likeliest token")
    add("--top-k", None, SOME, "draw from so many of the likeliest (default: all)")
    above_0 = number("above 0 and at most 1", lambda x: 0 < x <= 1)
    add("--top-p", None, above_0, "draw from the likeliest with this share of all", type=float)
    from_0 = number("from 0 to 1", lambda x: 0 <= x <= 1)
    best = "leave out what is below this share of the best"
    add("--min-p", None, from_0, best, type=float)
    add("--repetition-penalty", 1.0, POSITIVE, f"divides positive scores {seen}")
    add("--presence-penalty", 0.0, finite, f"taken once from scores {seen}")
    add("--frequency-penalty", 0.0, finite, f"taken each time from scores {seen}")


def words_of(path: Path) -> list[str]:
    """The options of a JSON file, as they would be typed. Raises: ValueError for what is none."""
    words = []
    for name, value in read_json(path).items():
        if isinstance(value, list | dict):
            raise ValueError(f"{path}: {name} must be one value, not {value!r:.60}")
        if value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}"))
    return words


def check_training(a: argparse.Namespace) -> None:
    """Raises: ValueError for options of `train` that do not go together."""
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
