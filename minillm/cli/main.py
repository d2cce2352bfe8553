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
# import, so every function of this room imports what it needs itself: `--help` answers at once.

import argparse
import os
import re
import sys
from typing import Any, NoReturn

from minillm.cli.evaluate import evaluate_folder
from minillm.cli.generate import generate_texts
from minillm.cli.options import (
    OneDefault,
    chat_options,
    common_options,
    defaults_of,
    eval_options,
    generate_options,
    train_options,
    words_of,
)
from minillm.cli.talk import chat
from minillm.cli.terminal import prepare, tell
from minillm.cli.train import train


class Command(argparse.ArgumentParser):
    """A command's options; what is none of them is answered with the command's own usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def parser(**of_training: Any) -> argparse.ArgumentParser:
    """The commands and their options; `of_training` are other defaults of `train`."""
    top = argparse.ArgumentParser(
        prog="python -m minillm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = "train | generate | chat | eval"
    commands = top.add_subparsers(required=True, metavar=kinds, parser_class=Command)

    def command(function: Any, add_options: Any, name: str, text: str) -> None:
        made = commands.add_parser(name, help=text, description=text, formatter_class=OneDefault)
        common_options(made)
        add_options(made)
        made.set_defaults(command=function, **(of_training if function is train else {}))

    command(train, train_options, "train", "train a model on stories or on a text file")
    command(generate_texts, generate_options, "generate", "print texts of a saved model")
    talk = "talk with a chat model, or answer the lines of a pipe"
    command(chat, chat_options, "chat", talk)
    measure = "bits per byte; of stories also floor and valid share"
    command(evaluate_folder, eval_options, "eval", measure)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command; a caller's mistake is one line on the error channel and exit code 1."""
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = parser().parse_args(words)
        if getattr(arguments, "config", None) is not None:
            words = [words[0], *words_of(arguments.config), *words[1:]]
            arguments = parser().parse_args(words)
        if arguments.command is train and (others := defaults_of(arguments)):
            arguments = parser(**others).parse_args(words)
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
