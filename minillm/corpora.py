"""What `python -m minillm train` reads: fresh stories, or the documents of a text file.

Written by hand; the pieces are explained in notebooks 01 and 09.
"""

import argparse
import random
from collections.abc import Iterator
from typing import Any

__all__ = ["END", "check_source", "documents", "is_file", "language", "source", "stories"]

END = "<|endoftext|>"


def is_file(a: argparse.Namespace) -> bool:
    """Whether --corpus names a file, and not the stories."""
    return a.corpus not in ("stories-en", "stories-zh")


def language(corpus: str) -> Any:
    """The story language of `stories-en` or `stories-zh`."""
    from minillm.stories.language import StoryLanguage

    return StoryLanguage(corpus.removeprefix("stories-"))


def stories(corpus: str, count: int, purpose: str) -> list[str]:
    """Stories drawn for one purpose; other purposes and the training draw others."""
    told = language(corpus)
    return [told.sample(random.Random(f"{purpose}/{i}")).text for i in range(count)]


def documents(path: str) -> Iterator[str]:
    """The documents of a text file, read line by line; empty ones are left out."""
    lines: list[str] = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            *ended, rest = line.split(END)
            for piece in ended:
                if text := "".join([*lines, piece]).strip("\n"):
                    yield text
                lines = []
            lines.append(rest)
    if rest := "".join(lines).strip("\n"):
        yield rest


def check_source(a: argparse.Namespace) -> None:
    """Raises: ValueError if what is asked of the corpus does not go with its kind."""
    if a.deck_cards is not None and is_file(a):
        raise ValueError("--deck-cards is for stories, not for a text file")
    if a.exact_targets and (is_file(a) or a.deck_cards is not None):
        raise ValueError("--exact-targets is for stories told with all cards")
    if a.layout == "windows" and not is_file(a):
        raise ValueError("stories never end, so there are no windows of them: padded or packed")


def source(a: argparse.Namespace, tokenizer: Any) -> Any:
    """Fresh stories, the documents of a file, or random windows of it."""
    from minillm.stories.curriculum import DeckDocuments, ExactBatches
    from minillm.training.data import TokenDataset, WindowBatches
    from minillm.training.documents import DocumentBatches, FileDocuments, StoryDocuments

    usual = "windows" if is_file(a) else "packed" if a.compile else "padded"  # packed: one shape
    layout, end, encode = a.layout or usual, tokenizer.eos_token_id, tokenizer.encode_ordinary
    if is_file(a):
        data = TokenDataset(a.out / "tokens.npy", end_id=end)
        if layout == "windows":
            return WindowBatches(data, a.batch_size, a.context_length, seed=a.seed)
        texts = FileDocuments(data, seed=a.seed)
    elif a.deck_cards is not None:
        few = {"cards": a.deck_cards, "stories": a.deck_stories}
        texts = DeckDocuments(a.corpus.removeprefix("stories-"), encode, **few, seed=a.seed)
    else:
        texts = StoryDocuments(language(a.corpus), encode, seed=a.seed)
    sizes = (a.batch_size, a.context_length)
    batches = DocumentBatches(texts, *sizes, end_id=end, layout=layout, seed=a.seed)
    return ExactBatches(batches, texts.language, tokenizer) if a.exact_targets else batches
