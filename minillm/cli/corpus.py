"""What is learned and measured: fresh stories, or the documents of a text file.

Written by hand.
"""

import argparse
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

END = "<|endoftext|>"  # what ends a document in a text file


def is_file(a: argparse.Namespace) -> bool:
    """Whether --corpus names a file, and not the stories."""
    return a.corpus not in ("stories-en", "stories-zh")


def layout(a: argparse.Namespace) -> Any:
    """What a row holds: a document, several, or a window of a file."""
    usual = "windows" if is_file(a) else "packed" if a.compile else "padded"  # packed: one shape
    return a.layout or usual


@cache
def language(corpus: str) -> Any:
    """The story language of `stories-en` or `stories-zh`, whose grammar is read once."""
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


def check_text(path: str | Path) -> None:
    """Raises: ValueError for a file without text, or of one and the same character."""
    kinds: set[str] = set()
    for text in documents(path):
        kinds.update(text)
        if len(kinds) > 1:
            return
    what = f"nothing but {kinds.pop()!r}, from which nothing is learned" if kinds else "no text"
    raise ValueError(f"--corpus {path} holds {what}")


def check_windows(a: argparse.Namespace, tokenizer: Any) -> None:
    """Raises: ValueError if what is learned from is shorter than a window of it."""
    count, end = 0, tokenizer.eos_token_id is not None
    for text in documents_to_learn(a):
        count += len(tokenizer.encode_ordinary(text[:1_000_000])) + end
        if count > a.context_length:
            return
    window = f"--context-length {a.context_length} takes {a.context_length + 1}"
    raise ValueError(f"--corpus {a.corpus} has {count} tokens to learn from; {window}")


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
    from minillm.deeper.training.scoring import evaluate_text
    from minillm.support.checks.model import context_length
    from minillm.training import evaluate

    if not is_file(a):
        return evaluate(model, tokenizer, texts)
    window = getattr(a, "context_length", None) or min(1024, context_length(model.config))
    sizes = [len(text.encode()) for text in texts]
    bits = [evaluate_text(model, tokenizer, text, window=window) for text in texts]
    return sum(x * size for x, size in zip(bits, sizes, strict=True)) / sum(sizes)


def source(a: argparse.Namespace, tokenizer: Any) -> Any:
    """Batches of fresh stories, of the documents of a file, or of random windows of it."""
    from minillm.deeper.training.documents import DocumentBatches, StoryDocuments
    from minillm.deeper.training.token_file import FileDocuments, TokenDataset
    from minillm.stories.curriculum import DeckDocuments, ExactBatches
    from minillm.training import WindowBatches, begin_id

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
    how = {"bos_token_id": begin_id(tokenizer), "layout": layout(a), "seed": a.seed}
    batches = DocumentBatches(texts, *sizes, eos_token_id=end, **how)
    return ExactBatches(batches, texts.language, tokenizer) if a.exact_targets else batches
