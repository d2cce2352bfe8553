"""A story of the shipped model, word by word, and at its end whether it is valid and what it cost.

    python tools/story.py              as `make story` does: another one each time
    python tools/story.py --seed 4     the same one each time

The language of the stories says both: whether every word is one that it allows, and what a perfect
model would have paid for this very story.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import sys
import textwrap
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.exercises.duties import first_wrong

if TYPE_CHECKING:
    from minillm import StoryLanguage

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "assets/stories-en"
WIDTH = min(100, shutil.get_terminal_size().columns)
TOKENS = 320  # a story has some 200 at most
MISSING = (
    "{path} is not there: the model comes with the repository (4.3 MB). In a clone, `git checkout "
    "assets/stories-en` brings it back; else clone it again"
)


def verdict(language: StoryLanguage, text: str, bits: float) -> str:
    """Whether a story is valid, and what it cost beside the least that it can cost."""
    cost = f"It cost the model {bits:.1f} bits, {bits / len(text.encode()):.4f} a byte"
    wrong = first_wrong(language, text)
    if wrong is None:
        floor = -language.score(text) / math.log(2)
        luck = "" if bits > floor else " (Less, by luck: on average no model can pay less.)"
        return (
            f"Valid to the last word. {cost}; its own floor, what a perfect model would have paid "
            f"for this very story, is {floor:.1f}.{luck}"
        )
    fault = f"the first word that cannot stand there is {wrong!r}" if wrong else "it ends too early"
    return f"Not valid: {fault}. {cost}; it has no floor, for no story of the language is this one."


def show(pieces: Iterable[str], width: int) -> str:
    """Print a text while it comes, a word at a time, in lines of at most `width`; the text."""
    text, held, column = "", "", 0
    for piece in chain(pieces, [" "]):
        text, held = text + piece, held + piece
        *words, held = held.split(" ")
        for word in words:
            gap = " " if column else ""
            if column and column + 1 + len(word) > width:
                gap, column = "\n", 0
            print(gap + word, end="", flush=True)
            column += len(gap.strip("\n")) + len(word)
    return text[:-1]


def tell(seed: int) -> str:
    """Print a story word by word, as the model draws it; the verdict."""
    import torch

    from minillm import Sampler, StoryLanguage, from_pretrained, stream_text

    model, tokenizer = from_pretrained(FOLDER, dtype="float32")
    begin, ids = torch.tensor([[tokenizer.bos_token_id]]), [tokenizer.bos_token_id]
    torch.set_num_threads(1)  # for so small a model more are slower
    written = stream_text(
        model.packed(),
        tokenizer,
        begin,
        max_new_tokens=TOKENS,
        sampler=Sampler(seed=seed),
        on_token=lambda token: ids.append(int(token)),
    )
    text = show(written, WIDTH)
    print("\n")
    with torch.no_grad():
        log_probs = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    nats = -log_probs.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
    return verdict(StoryLanguage("en"), text, nats / math.log(2))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="a number: the same story each time")
    seed = parser.parse_args(argv).seed
    if seed is not None and not -(2**63) <= seed < 2**63:
        parser.error(f"--seed {seed} has more than 64 bits")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (FOLDER / name).is_file():
            print(MISSING.format(path=os.path.relpath(FOLDER / name)), file=sys.stderr)
            return 1
    seed = random.randrange(10**4) if seed is None else seed
    further = "make run trains a model of your own, make lab opens the course"
    try:
        print(textwrap.fill(tell(seed), WIDTH))
    except ValueError as error:  # files that are there, but not as they should be
        print(f"{os.path.relpath(FOLDER)} cannot be read: {error}", file=sys.stderr)
        return 1
    print(f"(make story SEED={seed} tells it again; {further}.)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
