"""The command line: python -m minillm train | generate | chat | eval.

    python -m minillm train --output-dir runs/first --steps 500
    python -m minillm generate runs/first --count 3
    python -m minillm generate model.gguf --prompt "The sky is"
    python -m minillm chat HuggingFaceTB/SmolLM2-135M-Instruct
    python -m minillm eval runs/first
    torchrun --nproc-per-node 2 -m minillm train --output-dir runs/two --parallel fsdp
    torchrun --nproc-per-node 2 -m minillm generate runs/two --parallel tensor

`train` writes config.json, model.safetensors and tokenizer.json as Hugging Face does, beside them
the checkpoints and metrics of the run, and run.json, which says how it was made. Started again
with --resume, it goes on where the newest whole checkpoint stands.
"""

# Written by hand; what it calls is explained in notebooks 01, 02, 09 and 10. torch takes seconds to
# import, so every function imports what it needs itself: `--help` answers at once.

import argparse
import math
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from minillm.cli.terminal import prepare, show, tell, visible
from minillm.files import read_json, write_json

__all__ = ["main"]

END = "<|endoftext|>"  # what ends a document in a text file
RUN_INFO = "run.json"


# The options


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


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(
        prog="python -m minillm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(required=True, metavar="train | generate | chat | eval")

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, formatter_class=OneDefault)
        made.set_defaults(command=function)
        made.add_argument("--device", help="cpu, cuda or mps (default: the best there is)")
        made.add_argument("--seed", type=int, default=0, help="of every random draw")
        return made

    _train_options(command("train", train, "train a model on stories or on a text file"))
    one = command("generate", generate_texts, "print texts of a saved model")
    one.add_argument("folder", type=Path, help="of a saved model; or a GGUF file")
    one.add_argument("--prompt", default="", help="the beginning; empty: the model begins")
    one.add_argument("--count", type=int, default=1, help="how many texts")
    one.add_argument(
        "--max-new-tokens", type=int, help="default: 400, or what the model's context leaves"
    )
    one.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given again"
    )
    _sampler_options(one, temperature=1.0)
    _dtype_option(one)
    one.add_argument(
        "--parallel", choices=["tensor"], help="under torchrun: cut the layers over the processes"
    )
    _chat_options(command("chat", chat, "talk with a chat model, or answer the lines of a pipe"))
    one = command("eval", evaluate_folder, "bits per byte; of stories also floor and valid share")
    one.add_argument("folder", type=Path, help="of a saved model; or a GGUF file")
    one.add_argument(
        "--corpus",
        help="stories-en, stories-zh, or a text file, of which all is measured (default: what the"
        " run held out)",
    )
    one.add_argument("--documents", type=int, default=500, help="at most so many held-out ones")
    one.add_argument("--samples", type=int, default=200, help="stories to sample and to parse")
    _dtype_option(one)
    return top


def _train_options(one: argparse.ArgumentParser) -> None:
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


def _sampler_options(one: argparse.ArgumentParser, *, temperature: float) -> None:
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


def _dtype_option(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="of the weights",
    )


def _chat_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("model", metavar="NAME_OR_FOLDER_OR_FILE", help="what from_pretrained opens")
    one.add_argument("--system", help="what the model is told before the conversation")
    one.add_argument("--max-new-tokens", type=int, default=1024, help="of one answer")
    _sampler_options(one, temperature=0.7)
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
    if a.command is train:
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
    if a.command is chat and a.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {a.max_new_tokens} must be at least 1: an answer")


# The program


def main(argv: list[str] | None = None) -> int:
    """Run a command; a caller's mistake is one line on the error channel and exit code 1."""
    top = parser()
    arguments = top.parse_args(argv)
    try:
        if getattr(arguments, "config", None) is not None:
            words = [*(sys.argv[1:] if argv is None else argv)]
            arguments = top.parse_args([words[0], *words_of(arguments.config), *words[1:]])
        check_options(arguments)
        arguments.command(arguments)
    except BrokenPipeError:
        raise  # nobody reads on: no mistake of the caller's; see `run`
    except (MemoryError, RuntimeError) as error:
        if not re.search("memory", f"{type(error).__name__} {error}", re.IGNORECASE):
            raise
        reason = (str(error) or "nothing is left").splitlines()[0]
        tell(f"error: this needs more memory than there is: {reason}")
        return 1
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        message = " ".join(str(error).splitlines()) or type(error).__name__
        tell(f"error: {message}")
        return 1
    except KeyboardInterrupt as error:
        tell(f"interrupted{error}")
        return 130
    return 0


def run() -> NoReturn:
    """The program; under torchrun it ends at once, freeing nothing (see `distributed.stop`)."""
    prepare()
    try:
        try:
            code = main()
        except SystemExit as stop:  # argparse has shown its help, or what is wrong
            code = int(stop.code or 0)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output, such as `head -1`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + 13  # what a shell calls the end by SIGPIPE
    if "WORLD_SIZE" in os.environ:
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def device(a: argparse.Namespace) -> Any:
    """The device of --device, else of the environment's MINILLM_DEVICE, else the best there is.

    Raises: ValueError for one that is not there.
    """
    import torch

    from minillm.device import pick_device

    name = a.device or os.environ.get("MINILLM_DEVICE")
    if not name:
        return pick_device()
    try:
        place = torch.device(name)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"no device {name!r} here: {reason}") from None
    # counted, not tried: under torchrun all processes would take memory of the first GPU
    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    count = {"cpu": 1, **counts}.get(place.type)
    if count is None:
        raise ValueError(f"no device {name!r} here: it may be cpu, cuda or mps")
    if (place.index or 0) >= count:
        raise ValueError(f"no device {name!r} here: of {place.type} there are {count}")
    return torch.device("cpu") if place.type == "cpu" else place


# train: tokenizer, data, model, training, saving


def train(a: argparse.Namespace) -> None:
    """Train, and save the model with its tokenizer."""
    from minillm.training import distributed
    from minillm.training.checkpoint import CheckpointError
    from minillm.training.evaluation import token_byte_lengths
    from minillm.training.run import Run
    from minillm.training.trainer import Trainer

    place, lock = distributed.start(device(a)), None
    try:
        first = distributed.world().rank == 0
        tokenizer, lock = _prepare(a) if first else (None, None)
        try:
            distributed.barrier()
        except RuntimeError as error:  # it has said why, and a traceback would hide that
            raise ValueError("the first process ended before the training began") from error
        tokenizer = tokenizer or _tokenizer(a.output_dir)
        model, config = _model(a, tokenizer).to(place), _config(a)
        looks: dict[str, Any] = {}
        if held_out := held_out_texts(a):
            looks["validate"] = lambda m: {"held_out": measure(m, tokenizer, held_out, a)}
        if not a.quiet:
            looks |= {"sample": lambda m: _early_text(a, m, tokenizer), "on_log": _show}
        looks |= {"token_bytes": token_byte_lengths(tokenizer), "progress": not a.quiet}
        run = Run(a.output_dir, checkpoint_interval=a.checkpoint_interval)
        trainer = Trainer(model, source(a, tokenizer), config, run=run, **looks)
        if a.resume:
            found = trainer.resume()
            if first:
                stands = "resumed at" if found else "no whole checkpoint to go on from, so from"
                tell(f"{stands} step {trainer.step}")
        start = time.perf_counter()
        try:
            trainer.train()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_keep(a, trainer)) from None
        tensors = distributed.whole_tensors(model)
        if first:
            _finish(a, tokenizer, tensors, trainer, time.perf_counter() - start)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    finally:
        if lock is not None:
            lock.release()
        distributed.stop()


def _keep(a: argparse.Namespace, trainer: Any) -> str:
    """Write a checkpoint of an interrupted run, if there is something to keep; how to go on."""
    from minillm.training.checkpoint import checkpoints

    if trainer.processes.size == 1 and trainer.step and not trainer.step_incomplete:
        trainer.run.save(trainer)
    found = checkpoints(a.output_dir)
    return f"; train --resume goes on from {found[-1].name}" if found else ""


def _prepare(a: argparse.Namespace) -> tuple[Any, Any]:
    """Take the folder; make the tokenizer and, of a file, the token file."""
    from minillm.model import CausalLM
    from minillm.pretrained.folder import empty_model
    from minillm.pretrained.load import check_savable
    from minillm.tokenizer.bpe import BPETokenizer
    from minillm.training.distributed import world
    from minillm.training.run_folder import FolderLock, check_free
    from minillm.training.tensor_parallel import check_tensor_parallel
    from minillm.training.token_file import TokenDataset

    if not a.resume:
        check_free(a.output_dir, "give --resume to go on, or another --output-dir")
    else:
        check_same_run(a)
    if is_file(a) and next(documents(a.corpus), None) is None:
        raise ValueError(f"--corpus {a.corpus} holds no text")
    _config(a)  # numbers that make no training are errors now
    if a.resume and (a.output_dir / "tokenizer.json").exists():
        tokenizer = _tokenizer(a.output_dir)
    elif a.tokenizer is not None or a.init_from is not None:
        tokenizer = _tokenizer(a.tokenizer or a.init_from)
    else:
        texts = documents_to_learn(a) if is_file(a) else stories(a.corpus, 2000, "tokenizer")
        tokenizer = BPETokenizer.train(texts, a.vocab_size, special_tokens=[END])
    if tokenizer.eos_token_id is None and layout(a) != "windows":
        road = "a text file with --layout windows needs none"
        road += f", without --tokenizer one is trained that has {END}"
        raise ValueError(f"the tokenizer has no end token, where documents end: {road}")
    if layout(a) != "windows" and isinstance(tokenizer, BPETokenizer) and not tokenizer.add_bos:
        tokenizer.bos_token, tokenizer.add_bos = tokenizer.eos_token, True  # so begins each row
    config = _model_config(a, tokenizer)
    _check_fit(config, a, tokenizer)
    check_savable(config)  # rather now than after the training
    if a.parallel == "tensor":
        check_tensor_parallel(empty_model(CausalLM, config), world().size)
    if not is_file(a):
        next(source(a, tokenizer))  # does a story fit a row?
    lock = FolderLock(a.output_dir)
    lock.acquire()
    if not a.resume:  # also now that it is ours
        check_free(a.output_dir, "give --resume to go on, or another --output-dir")
    tokenizer.save(a.output_dir)
    begin_run_info(a)
    if is_file(a) and not (a.resume and (a.output_dir / "tokens.npy").exists()):
        encoded = (tokenizer.encode_ordinary(text) for text in documents_to_learn(a))
        ends = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_token_id}
        TokenDataset.write(a.output_dir / "tokens.npy", encoded, **ends)
    return tokenizer, lock


def _model_config(a: argparse.Namespace, tokenizer: Any) -> Any:
    """The config of --init-from, or of the options of the model."""
    from minillm.config import ModelConfig
    from minillm.pretrained.load import from_pretrained

    if a.init_from is not None:
        return from_pretrained(a.init_from)[0].config
    end = tokenizer.eos_token_id
    try:
        return ModelConfig(
            model_type=a.family,
            vocab_size=tokenizer.vocab_size,
            hidden_size=a.hidden_size,
            num_hidden_layers=a.layers,
            num_attention_heads=a.heads,
            num_key_value_heads=a.kv_heads,
            head_dim=a.head_dim,
            attention_dropout=a.dropout,
            intermediate_size=a.intermediate_size or -(-8 * a.hidden_size // 3 // 32) * 32,
            max_position_embeddings=max(512, 2 * a.context_length),
            tie_word_embeddings=True,
            initializer_range=a.init_range,
            rope_theta=a.rope_theta,
            bos_token_id=end,
            eos_token_id=end,
        )
    except ValueError as error:
        heads = f"--heads {a.heads}" + (f" --kv-heads {a.kv_heads}" if a.kv_heads else "")
        asked = f"--family {a.family} --hidden-size {a.hidden_size} {heads}"
        raise ValueError(f"{asked}: {error}") from None


def _check_fit(config: Any, a: argparse.Namespace, tokenizer: Any) -> None:
    """Raises: ValueError if ids or positions of the training are not the model's."""
    if tokenizer.vocab_size > config.vocab_size:
        sizes = f"{tokenizer.vocab_size:,} tokens, the model knows {config.vocab_size:,}"
        raise ValueError(f"the tokenizer has {sizes}")
    limit = config.max_position_embeddings
    if config.positions == "learned" and a.context_length > limit:
        raise ValueError(f"--context-length {a.context_length}: the model has {limit} positions")


def _model(a: argparse.Namespace, tokenizer: Any) -> Any:
    """A fresh model of the options, or the one of --init-from, in float32.

    Raises: ValueError if there is not so much memory.
    """
    import torch

    from minillm.model import CausalLM
    from minillm.pretrained.load import from_pretrained

    if a.init_from is not None:
        return from_pretrained(a.init_from, dtype=torch.float32)[0]
    config = _model_config(a, tokenizer)
    try:
        return CausalLM(config, seed=a.seed)
    except (MemoryError, RuntimeError) as error:
        reason = (str(error) or "no memory").splitlines()[0]
        sizes = f"--hidden-size {a.hidden_size} --layers {a.layers}"
        raise ValueError(f"a model of {sizes} cannot be made here: {reason}") from None


def _config(a: argparse.Namespace) -> Any:
    """The settings of the training: what the options are called there."""
    from minillm.training.trainer import TrainConfig

    return TrainConfig(
        a.steps,
        max_lr=a.lr,
        min_lr=a.lr / 20 if a.min_lr is None else a.min_lr,
        warmup_steps=a.warmup,
        weight_decay=a.weight_decay,
        optimizer=a.optimizer,
        gradient_accumulation_steps=a.gradient_accumulation_steps,
        precision=a.precision,
        compile=a.compile,
        seed=a.seed,
        parallel=a.parallel,
        log_interval=a.log_interval,
        eval_interval=a.eval_interval,
    )


def _finish(
    a: argparse.Namespace, tokenizer: Any, tensors: Any, trainer: Any, seconds: float
) -> None:
    """Save the model where `from_pretrained` finds it, and say how it was made."""
    import torch

    from minillm.model import CausalLM
    from minillm.pretrained.load import save_pretrained
    from minillm.training import distributed
    from minillm.training.checkpoint import load_model_tensors

    model = CausalLM(trainer.model.config)
    load_model_tensors(model, tensors)
    model.to(getattr(torch, a.save_dtype))  # the checkpoints beside it stay as they were trained
    save_pretrained(model, tokenizer, a.output_dir)
    made = {"processes": distributed.world().size, "torch": torch.__version__, "seconds": seconds}
    figures = {"parameters": model.num_parameters(), **made}
    found = finish_run_info(a, figures, trainer.history)
    names = ("loss", "bits_per_byte", "held_out")
    measured = {name: round(found[name], 4) for name in names if name in found}
    size, tokens = f"{model.num_parameters():,} parameters", f"{trainer.tokens:,} tokens"
    show(f"{a.output_dir}: {size}, {tokens}, {measured}")


def _early_text(a: argparse.Namespace, model: Any, tokenizer: Any) -> str:
    """A text of the model now; of a sharded one by a whole copy in process 0: all must call it."""
    from minillm.generation.sampling import Sampler
    from minillm.model import CausalLM
    from minillm.training import distributed
    from minillm.training.checkpoint import load_model_tensors

    if distributed.is_sharded(model):
        tensors, place = distributed.whole_tensors(model), next(model.parameters()).device
        if distributed.world().rank > 0:
            return ""
        model = CausalLM(model.config).to(place).eval()
        load_model_tensors(model, tensors)
    begin = [tokenizer.eos_token_id]  # as each row of the training begins
    if tokenizer.eos_token_id is None:
        begin = tokenizer.encode_ordinary("\n")
    sampler = Sampler(seed=a.seed)
    return sample_texts(model, tokenizer, begin, sampler=sampler, max_new_tokens=60)[0]


def _show(record: dict[str, Any]) -> None:
    """Print what a look at the model found."""
    from tqdm import tqdm

    if "sample" in record:
        held_out = f", held out {record['held_out']:.4f}" if "held_out" in record else ""
        text = visible(f"step {record['step']}{held_out}: {record['sample']}")
        tqdm.write(text, sys.stderr)


def _tokenizer(folder: Path) -> Any:
    from minillm.tokenizer.wrapped import load_tokenizer

    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise FileNotFoundError(f"{folder} has no tokenizer.json")
    return tokenizer


# The corpus: fresh stories, or the documents of a text file


def is_file(a: argparse.Namespace) -> bool:
    """Whether --corpus names a file, and not the stories."""
    return a.corpus not in ("stories-en", "stories-zh")


def layout(a: argparse.Namespace) -> Any:
    """What a row holds: a document, several, or a window of a file."""
    usual = "windows" if is_file(a) else "packed" if a.compile else "padded"  # packed: one shape
    return a.layout or usual


def language(corpus: str) -> Any:
    """The story language of `stories-en` or `stories-zh`."""
    from minillm.stories.language import StoryLanguage

    return StoryLanguage(corpus.removeprefix("stories-"))


def stories(corpus: str, count: int, purpose: str) -> list[str]:
    """Stories drawn for one purpose; other purposes and the training draw others."""
    told = language(corpus)
    return [told.sample(random.Random(f"{purpose}/{i}")).text for i in range(count)]


def documents(path: str | Path) -> Iterator[str]:
    r"""The documents of a text file, read line by line; empty ones are left out.

    Line ends at the borders of a document go, inside it they stay as they are, `\r\n` too.
    Raises: ValueError that names file and line where it is not UTF-8.
    """
    lines: list[str] = []
    with open(path, "rb") as file:
        for number, data in enumerate(file, 1):
            try:
                line = data.decode("utf-8")
            except UnicodeDecodeError as error:
                where = f"line {number}, byte {data[error.start]:#04x}: {error.reason}"
                raise ValueError(f"{path} is not a text file in UTF-8: {where}") from None
            *ended, rest = line.split(END)
            for piece in ended:
                if text := "".join([*lines, piece]).strip("\r\n"):
                    yield text
                lines = []
            lines.append(rest)
    if rest := "".join(lines).strip("\r\n"):
        yield rest


def _parted(a: argparse.Namespace, learned: bool) -> Iterator[str]:
    """The documents of a file to learn from, or those held out: every tenth; of fewer than ten, the
    last tenth of each."""
    first = [text for text, _ in zip(documents(a.corpus), range(10), strict=False)]
    if len(first) < 10:
        for text in first:
            cut = len(text) * 9 // 10 if a.held_out else len(text)
            yield text[:cut] if learned else text[cut:]
        return
    for number, text in enumerate(documents(a.corpus)):
        if (number % 10 < 9 or not a.held_out) == learned:
            yield text


def documents_to_learn(a: argparse.Namespace) -> Iterator[str]:
    """The documents of a file without those that are held out."""
    return (text for text in _parted(a, learned=True) if text)


def held_out_texts(a: argparse.Namespace) -> list[str]:
    """What a run is measured on: stories that it never saw, or the held-out part of its file."""
    if not is_file(a):
        return stories(a.corpus, a.held_out, "held out")
    texts = (text for text in _parted(a, learned=False) if text.strip())
    return [text for text, _ in zip(texts, range(a.held_out), strict=False)]


def measure(model: Any, tokenizer: Any, texts: list[str], a: argparse.Namespace) -> float:
    """Bits per byte: of whole stories, or of a file's texts, read in windows."""
    from minillm.checks import context_length
    from minillm.training.evaluation import evaluate
    from minillm.training.scoring import evaluate_text

    if not is_file(a):
        return evaluate(model, tokenizer, texts)
    window = getattr(a, "context_length", None) or min(1024, context_length(model.config))
    sizes = [len(text.encode()) for text in texts]
    bits = [evaluate_text(model, tokenizer, text, window=window) for text in texts]
    return sum(x * size for x, size in zip(bits, sizes, strict=True)) / sum(sizes)


def source(a: argparse.Namespace, tokenizer: Any) -> Any:
    """Batches of fresh stories, of the documents of a file, or of random windows of it."""
    from minillm.stories.curriculum import DeckDocuments, ExactBatches
    from minillm.training.data import WindowBatches
    from minillm.training.documents import DocumentBatches, StoryDocuments
    from minillm.training.token_file import FileDocuments, TokenDataset

    end, encode = tokenizer.eos_token_id, tokenizer.encode_ordinary
    texts: Any
    if is_file(a):
        data = TokenDataset(a.output_dir / "tokens.npy", eos_token_id=end)
        if layout(a) == "windows":
            return WindowBatches(data, a.batch_size, a.context_length, seed=a.seed)
        texts = FileDocuments(data, seed=a.seed)
    elif a.deck_cards is not None:
        few = {"cards": a.deck_cards, "stories": a.deck_stories}
        texts = DeckDocuments(a.corpus.removeprefix("stories-"), encode, **few, seed=a.seed)
    else:
        texts = StoryDocuments(language(a.corpus), encode, seed=a.seed)
    sizes = (a.batch_size, a.context_length)
    batches = DocumentBatches(texts, *sizes, eos_token_id=end, layout=layout(a), seed=a.seed)
    return ExactBatches(batches, texts.language, tokenizer) if a.exact_targets else batches


# run.json: what a run was asked for, from its beginning, and what came of it, at its end

# the settings of TrainConfig are compared with those in the checkpoint
FIXED = (
    *("family", "hidden_size", "layers", "heads", "kv_heads", "intermediate_size"),
    *("context_length", "rope_theta", "init_from", "deck_cards", "exact_targets"),
    *("head_dim", "dropout"),
)


def options(a: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, as JSON can hold it."""
    skip = ("command", "quiet", "resume", "config")
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items() if k not in skip}


def read_run_info(path: Path) -> dict[str, Any]:
    """What a run.json holds. Raises: ValueError if it does not hold the options of a run."""
    info = read_json(path, nan=True)
    asked = info.get("options")
    if not isinstance(asked, dict) or not isinstance(asked.get("corpus"), str):
        raise ValueError(f"{path} does not say what the run was asked for")
    return info


def check_same_run(a: argparse.Namespace) -> None:
    """Raises: ValueError if the run in the folder began with another model or other texts."""
    from minillm.checks import check_settings

    path = a.output_dir / RUN_INFO
    if not path.exists():
        return
    try:
        saved = read_run_info(path)["options"]
    except ValueError as error:
        raise ValueError(f"{error}: remove it to resume without the comparison") from None
    both = []
    for given in (saved, options(a)):
        corpus = Path(given["corpus"]).name  # its folder may have moved
        fixed = {name: given.get(name) or None for name in FIXED}  # a dropout of 0 is none
        both.append({"corpus": corpus, **fixed})
    check_settings(*both)


def begin_run_info(a: argparse.Namespace) -> None:
    """Write down what was asked for; a run that is resumed has done so before."""
    path = a.output_dir / RUN_INFO
    if not (a.resume and path.exists()):
        write_json(path, {"options": options(a)})


def finish_run_info(
    a: argparse.Namespace, figures: dict[str, Any], history: list[dict[str, Any]]
) -> dict[str, Any]:
    """Add what came of it; a run that had already ended keeps its old results."""
    path = a.output_dir / RUN_INFO
    old: dict[str, Any] = {}
    if not history:
        with suppress(FileNotFoundError, ValueError):  # none, or a damaged one
            old = read_run_info(path)
    took = {"seconds": old.get("seconds", figures["seconds"])}
    info = {**old, "options": options(a), **figures, **took, **(history[-1] if history else {})}
    write_json(path, info)
    return info


# generate, chat and eval


def generate_texts(a: argparse.Namespace) -> None:
    """Print texts that the model of a folder writes; of several processes, the first prints."""
    from minillm.checks import context_length
    from minillm.training import distributed

    drawn_by = sampler(a)
    if a.parallel is not None:
        a.device = str(distributed.start(device(a)))
    try:
        model, tokenizer = _load(a)
        if a.parallel is not None:
            model = distributed.wrap(model, a.parallel)
        begin = _begin(model, tokenizer, a.prompt)
        new = _new_tokens(a.max_new_tokens, len(begin), context_length(model.config))
        how = {"count": a.count, "sampler": drawn_by, "max_new_tokens": new, "stop": a.stop}
        texts = sample_texts(model, tokenizer, begin, prompt=a.prompt, **how)
        if distributed.world().rank == 0:
            show("\n\n".join(texts))
    finally:
        distributed.stop()


def _new_tokens(asked: int | None, length: int, context: int) -> int:
    """How many tokens may follow a prompt. Raises: ValueError if the context has not so many."""
    room = context - length
    if room < (asked or 0) or room < 1:
        new = "" if asked is None else f" --max-new-tokens {asked}:"
        raise ValueError(
            f"{new} the prompt's length is {length:,}, and this model can read {context:,}".strip()
        )
    return min(400, room) if asked is None else asked


def sampler(a: argparse.Namespace) -> Any:
    """The sampler of the options, which are called as its fields (all but `steps`)."""
    from dataclasses import fields

    from minillm.generation.sampling import Sampler

    names = {field.name for field in fields(Sampler)} - {"steps"}
    return Sampler(**{name: getattr(a, name) for name in names})


def chat(a: argparse.Namespace) -> None:
    """Talk with a chat model, in a form that writes fast; see `minillm.cli.talk`.

    Raises: ValueError if the model has no chat template, or --system spells a special token.
    """
    import torch

    from minillm.cli.talk import talk
    from minillm.generation.conversation import Conversation
    from minillm.pretrained.load import from_pretrained

    drawn_by, place = sampler(a), device(a)
    dtype = a.dtype or ("float32" if place.type == "cpu" else None)
    model, tokenizer = from_pretrained(a.model, dtype=dtype, device=place)
    if not a.plain and place.type == "cpu" and model.lm_head.weight.dtype == torch.float32:
        with suppress(ValueError):  # a family that cannot be packed
            model = model.packed()
    begin = [] if a.system is None else [{"role": "system", "content": a.system}]
    conversation = Conversation(model, tokenizer, begin)
    if spelled := [name for name in tokenizer.special_tokens if name in (a.system or "")]:
        raise ValueError(f"--system spells the special token {spelled[0]!r}")
    talk(conversation, known_only(drawn_by, tokenizer, model.config.vocab_size), a)


def evaluate_folder(a: argparse.Namespace) -> None:
    """Print bits per byte; of stories also the floor, and how many samples are stories."""
    from minillm.generation.sampling import Sampler

    model, tokenizer = _load(a)
    whole, a.held_out = a.corpus is not None, a.documents
    a.corpus = a.corpus or _corpus_of(a.folder)
    if is_file(a):
        texts = list(documents(a.corpus))[: a.documents] if whole else held_out_texts(a)
        part = "" if whole else "the held-out part of "
        if not texts:
            raise ValueError(f"{part}{a.corpus} holds no text")
        print(f"bits per byte  {measure(model, tokenizer, texts, a):.4f}  on {part}{a.corpus}")
        return
    grammar = language(a.corpus)
    measured = measure(model, tokenizer, held_out_texts(a), a)
    floor = grammar.bits_per_byte()
    print(f"bits per byte  {measured:.4f}  on {a.documents} held-out stories, ends included")
    print(f"floor          {floor:.4f}  which no model can beat; ratio {measured / floor:.3f}")
    begin, texts = _begin(model, tokenizer, ""), []
    for start in range(0, a.samples, 64):
        sampler = Sampler(seed=a.seed + start // 64)
        how = {"count": min(64, a.samples - start), "sampler": sampler, "max_new_tokens": 512}
        texts += sample_texts(model, tokenizer, begin, **how)
    if texts:
        valid = sum(grammar.score(text) > float("-inf") for text in texts)
        print(f"valid stories  {valid} of {len(texts)} sampled at temperature 1")


def _corpus_of(folder: Path) -> str:
    """What the run of a folder was trained on; English stories if it does not say."""
    with suppress(OSError, ValueError):
        return read_run_info(folder / RUN_INFO)["options"]["corpus"]
    return "stories-en"


def _load(a: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer of the folder or of the GGUF file."""
    from minillm.pretrained.load import from_pretrained

    if not a.folder.exists():
        kind = "file" if a.folder.suffix == ".gguf" else "folder"
        raise FileNotFoundError(f"there is no {kind} {a.folder}")
    model, tokenizer = from_pretrained(a.folder, dtype=a.dtype, device=device(a))
    if tokenizer is None:
        raise ValueError(f"{a.folder} has no tokenizer")
    return model, tokenizer


def _begin(model: Any, tokenizer: Any, prompt: str) -> list[int]:
    """The ids of a prompt, begun as the tokenizer's file asks; of none, the model's begin token."""
    ids = tokenizer.encode_ordinary(prompt)
    begin = tokenizer.bos_token_id
    if not tokenizer.add_bos:
        begin = None if ids else model.config.bos_token_id
    if begin is not None and ids[:1] != [begin]:
        ids = [begin, *ids]
    if not ids:
        raise ValueError("this model has no begin token: give a --prompt")
    return ids


def sample_texts(
    model: Any,
    tokenizer: Any,
    begin: list[int],
    *,
    prompt: str = "",
    count: int = 1,
    sampler: Any,
    max_new_tokens: int,
    stop: list[str] | None = None,
) -> list[str]:
    """`count` texts that go on after the ids `begin` of a prompt, without the end token or stop."""
    import torch

    from minillm.generation.decoding import generate

    prompts = torch.tensor([begin] * count, device=model.lm_head.weight.device)
    sampler = known_only(sampler, tokenizer, model.config.vocab_size)
    stops: dict[str, Any] = {} if stop is None else {"stop": stop, "tokenizer": tokenizer}
    rows = generate(model, prompts, max_new_tokens=max_new_tokens, sampler=sampler, **stops)
    ends, texts = {*model.config.eos_token_ids, tokenizer.eos_token_id}, []
    for row in rows[:, len(begin) :].tolist():
        new = row[: next((i for i, token in enumerate(row) if token in ends), len(row))]
        # a text that begins loses its first space in some tokenizers; one that goes on must not
        rest = tokenizer.decode_bytes(new).decode("utf-8", "replace")
        text = rest if prompt else tokenizer.decode(new)
        first = min((text.find(word) for word in stop or () if word in text), default=len(text))
        texts.append(prompt + text[:first])
    return texts


def known_only(sampler: Any, tokenizer: Any, vocab_size: int) -> Any:
    """A sampler that draws no id without a token, as published models with padded rows have."""
    unknown = []
    if len(tokenizer) < vocab_size:
        for i in range(vocab_size):
            try:
                tokenizer.decode_bytes([i])
            except ValueError:
                unknown.append(i)
    if not unknown:
        return sampler

    def draw(logits: Any, *rest: Any, **named: Any) -> Any:
        logits = logits.clone()
        logits[:, unknown] = -math.inf
        return sampler(logits, *rest, **named)

    return draw
