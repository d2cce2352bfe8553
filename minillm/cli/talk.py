"""python -m minillm chat: questions from the terminal or from a pipe, answers as they are written.

Answers go to the output; all that the program says itself goes to the error channel. Written by
hand; what is kept from one answer to the next is explained in deeper/10_chat.
"""

from __future__ import annotations

import argparse
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from minillm.cli.generate import device, known_only, sampler
from minillm.cli.terminal import show, tell

if TYPE_CHECKING:
    from minillm.deeper.generation.conversation import Conversation

HELP = "/reset begins a new conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(a: argparse.Namespace) -> None:
    """Talk with a chat model, in a form that writes fast.

    Raises: ValueError if the model has no chat template, or --system spells a special token.
    """
    import torch

    from minillm.deeper.generation.conversation import Conversation
    from minillm.deeper.pretrained.folder import local_place
    from minillm.deeper.pretrained.load import load_model, tokenizer_of

    drawn_by, place = sampler(a), device(a)
    dtype = a.dtype or ("float32" if place.type == "cpu" else None)
    files = local_place(a.model)
    model, tokenizer = load_model(files, dtype=dtype, device=place), tokenizer_of(files)
    if not a.plain and place.type == "cpu" and model.lm_head.weight.dtype == torch.float32:
        with suppress(ValueError):  # a family that cannot be packed
            model = model.packed()
    begin = [] if a.system is None else [{"role": "system", "content": a.system}]
    conversation = Conversation(model, tokenizer, begin)
    if spelled := [name for name in tokenizer.special_tokens if name in (a.system or "")]:
        raise ValueError(f"--system spells the special token {spelled[0]!r}")
    talk(conversation, known_only(drawn_by, tokenizer, model.config.vocab_size), a)


def talk(conversation: Conversation, sampler: Callable[..., Any], a: argparse.Namespace) -> None:
    """Answer line after line, until there are no more."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        model = conversation.model
        tell(f"{a.model}: {model.num_parameters():,} parameters, {model.lm_head.weight.dtype},")
        tell(f"context of {conversation.context_length:,} tokens. {HELP}.")
    for line in lines(terminal):
        text = line.strip()
        if text == "/quit":
            return
        if text == "/reset":
            conversation.reset()
            tell("a new conversation")
        elif text[:1] == "/" and text[1:].isalpha():
            tell(f"there is no command {text}: {HELP}")
        elif text:
            with interrupts() as pressed:
                answer(conversation, line, sampler, pressed, a)


def lines(terminal: bool) -> Iterator[str]:
    """The lines that somebody types, or that come through a pipe, until they end."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        # a pipe brings a file's bytes; a terminal has its own encoding
        encoding = None if sys.stdin.isatty() else "utf-8-sig"
        with suppress(io.UnsupportedOperation):  # somebody has read from it before
            sys.stdin.reconfigure(encoding=encoding, errors="replace")
    while True:
        try:
            yield input("> " if terminal else "").rstrip("\r")  # Windows' line ends
        except EOFError:
            if terminal:
                print()
            return
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):  # the next one, if it comes at once
                if terminal:
                    tell(f"\n({HELP})")


def answer(
    conversation: Conversation,
    text: str,
    sampler: Callable[..., Any],
    pressed: Callable[[], bool],
    a: argparse.Namespace,
) -> None:
    """Print the answer as it is written, until `pressed()`; or say why there is none."""
    from minillm.deeper.generation.conversation import ContextFullError

    start = time.perf_counter()
    try:
        pieces = conversation.stream(text, max_new_tokens=a.max_new_tokens, sampler=sampler)
    except ContextFullError as error:
        tell(f"{error}: /reset begins a new conversation")
        return
    except ValueError as error:
        tell(f"error: {error}")
        return
    trouble = "[stopped]"
    try:
        for piece in pieces:
            show(piece, end="")
            if pressed():
                break
        else:
            trouble = ""
    except KeyboardInterrupt:
        pass
    except ValueError as error:  # such as scores that are no numbers
        trouble = f"error: {error}"
    print(flush=True)
    used, length = len(conversation.ids), conversation.prompt_length
    if trouble:
        tell(trouble)
    elif not conversation.ended and used == conversation.context_length:
        tell(f"[the context of {used:,} tokens is full: /reset begins a new conversation]")
    elif not conversation.ended:
        tell(f"[cut off after --max-new-tokens {a.max_new_tokens}]")
    if a.verbose:
        new, seconds = used - length, time.perf_counter() - start
        tell(
            f"[prompt of {length:,} tokens, {length - conversation.reused:,} of them computed; "
            f"answer of {new:,}, {new / seconds:.1f} a second; "
            f"{used / conversation.context_length:.1%} of the context]"
        )


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """While this lasts, Ctrl-C is noted, so that what was shown is whole; a second one interrupts.

    Gives a function that says whether Ctrl-C was pressed.
    """
    pressed: list[int] = []

    def note(number: int, _: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # Ctrl-C is the main thread's alone
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
