"""The grid of beyond/19_scale: models of several widths on several numbers of tokens.

    OMP_NUM_THREADS=1 python benchmarks/scale.py

Each point is a run of its own, from first weights to the end of its schedule, on stories drawn
afresh, with three seeds. The rate is searched: with 100 steps a factor 2 up and down until both
neighbours of the best are worse, with more only down, from the best of half as many steps; by the
mean of the seeds, from 400 steps on by seed 0 alone. Then one width reads few stories again and
again. Each run becomes a line of assets/scale.csv; what stands there is not run again.

Last, one model of chapter 10's size is trained for as long as there, and looked at on the way:
assets/scale-run.csv. All of it takes a quarter of an hour of one quiet core.

A line says what the model pays for 200 held-out stories above what a perfect model pays for these
same stories, in bits a byte: in all, and by kind of word.
"""

import csv
import math
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from minillm.config import ModelConfig
from minillm.deeper.training.documents import DocumentBatches, StoryDocuments, TextDocuments
from minillm.model import CausalLM
from minillm.ngram import word_pieces
from minillm.stories.grammar import Chain, Choice, Copy, Draw, Node, Table
from minillm.stories.language import StoryLanguage
from minillm.training import TrainConfig, pad_rows, train

ASSETS = Path(__file__).parents[1] / "assets"
TABLE, LONG_RUN = ASSETS / "scale.csv", ASSETS / "scale-run.csv"
WIDTHS, STEPS, SEEDS = (16, 32, 64, 96), (100, 200, 400, 800), (0, 1, 2)
ROWS, CONTEXT = 4, 256  # a step: about 4 * 256 tokens
FIRST_RATE = 0.016
MOST_EXPENSIVE = 64 * 400  # width * steps
REPEATED = (32, 400, (600, 150))  # width, steps, numbers of stories: read about 4 and 16 times
COPIES = ("name", "pronoun", "food", "sum", "other")  # settled by what the story has said
KINDS = ("template", "card", *COPIES)


class Piece(NamedTuple):
    """A part of a story: where it stands, of which kind, and what a perfect model pays for it."""

    start: int
    end: int
    kind: str
    nats: float


def kind_of(node: Node) -> str:
    """The words of the template, a card that is drawn, or one of the `COPIES`."""
    if isinstance(node, Draw):
        return "card"
    if not isinstance(node, Copy):
        return "template"
    if len(node.slots) > 1:
        return "sum"
    pool = next(iter(node.slots.values()))
    if pool == "names":
        return "pronoun" if node.form else "name"
    return "food" if pool == "foods" else "other"


def pieces(language: StoryLanguage, text: str) -> list[Piece]:
    """A story, piece by piece. What a choice of ways costs is paid by the first piece of the way.

    Raises: ValueError for a text outside the language.
    """
    found = walk(language.grammar.root, text, 0, {})
    if found is None or found[0] != len(text):
        raise ValueError(f"no story of this language: {text[:80]!r}")
    return found[2]


def walk(
    node: Chain | Node, text: str, start: int, table: Table
) -> tuple[int, Table, list[Piece]] | None:
    """As a node's `read`, but with pieces in the place of the log-probability."""
    if isinstance(node, Chain):
        made: list[Piece] = []
        for part in node.nodes:
            found = walk(part, text, start, table)
            if found is None:
                return None
            start, table = found[:2]
            made += found[2]
        return start, table, made
    if isinstance(node, Choice):
        for log_p, chain in node.ways:
            found = walk(chain, text, start, table)
            if found is not None:
                end, table, made = found
                made[0] = made[0]._replace(nats=made[0].nats - log_p)
                return end, {slot: table[slot] for slot in node.keep}, made
        return None
    read = node.read(text, start, table)
    if read is None:
        return None
    return read[0], read[1], [Piece(start, read[0], kind_of(node), -read[2])]


def is_settled(piece: Piece) -> bool:
    """Whether the story has left no choice here, and what it says here differs between stories."""
    return piece.kind in COPIES and piece.nats == 0


class Words:
    """The words and marks of the language, 585, and an end token before and after each story."""

    def __init__(self, language: StoryLanguage) -> None:
        seen = {word for text in language.corpus(2000, seed=1) for word in word_pieces(text)}
        self.spelling = ["", *sorted(seen)]
        self.ids = {word: i for i, word in enumerate(self.spelling)}
        self.end = 0

    def encode(self, text: str) -> list[int]:
        return [self.ids[word] for word in word_pieces(text)]


class HeldOut:
    """Stories that no model reads in training, with what a perfect model pays for their pieces.

    `encode` is a tokenizer's, `spelling` the text of each id, `end` the id of the end token.
    """

    def __init__(
        self,
        language: StoryLanguage,
        encode: Callable[[str], list[int]],
        spelling: list[str],
        end: int,
        count: int = 200,
    ) -> None:
        self.texts = language.corpus(count, seed=1_000_003)
        self.num_bytes = sum(len(text.encode()) for text in self.texts)
        self.pieces = [pieces(language, text) for text in self.texts]
        self.rows = [[end, *encode(text), end] for text in self.texts]
        self.owners = [
            [*owners([spelling[i] for i in row[1:-1]], made), len(made) - 1]
            for row, made in zip(self.rows, self.pieces, strict=True)
        ]  # the end token belongs to the last piece

    def measure(self, model: torch.nn.Module) -> dict[str, float]:
        """Bits a byte above perfect, in all and by kind; how many of the copies are right.

        A copy is right if each of its tokens was the most probable one, given the true story
        before it; a whole story, if all its copies are.
        """
        nats, right = dict.fromkeys(KINDS, 0.0), dict.fromkeys([*COPIES, "whole"], 0)
        for n, (paid, hits) in enumerate(self.paid(model)):
            made, owner = self.pieces[n], self.owners[n]
            wrong = {i for i, hit in zip(owner, hits, strict=False) if not hit}
            for i, cost in zip(owner, paid, strict=False):
                nats[made[i].kind] += cost
            for i, piece in enumerate(made):
                nats[piece.kind] -= piece.nats
                if is_settled(piece):
                    right[piece.kind] += i not in wrong
            right["whole"] += not any(is_settled(made[i]) for i in wrong)
        bits = {kind: x / math.log(2) / self.num_bytes for kind, x in nats.items()}
        found = {"excess": sum(bits.values())} | {f"bits_{k}": x for k, x in bits.items()}
        return found | {f"right_{k}": count for k, count in right.items()}

    @torch.no_grad()
    def paid(self, model: torch.nn.Module) -> Iterator[tuple[list[float], list[bool]]]:
        """For each story: nats of its tokens, and where the most probable token is the one."""
        for start in range(0, len(self.rows), 20):
            rows = self.rows[start : start + 20]
            inputs, targets = pad_rows(rows, max(map(len, rows)), rows[0][0])
            logits = model(inputs)  # (B, T, V)
            nats = F.cross_entropy(logits.mT, targets, reduction="none")
            yield from zip(nats.tolist(), (logits.argmax(-1) == targets).tolist(), strict=True)


def owners(words: list[str], made: list[Piece]) -> Iterator[int]:
    """For each token of a story the number of the piece that holds its first letter."""
    starts, place = [piece.start for piece in made], 0
    for word in words:
        yield bisect(starts, place + len(word) - len(word.lstrip())) - 1
        place += len(word)


def make_model(width: int, seed: int, vocab_size: int, end: int) -> CausalLM:
    """Chapter 10's live model in another width: two layers, heads of 16 numbers."""
    config = ModelConfig(
        model_type="qwen3",
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=width // 16,
        intermediate_size=(8 * width // 3 + 31) // 32 * 32,
        max_position_embeddings=512,
        rope_theta=1e5,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=end,
        eos_token_id=end,
    )
    return CausalLM(config, seed=seed)


class Lab:
    """Language, words and held-out stories, and a run at any point of the grid."""

    def __init__(self) -> None:
        self.language = StoryLanguage("en")
        self.words = words = Words(self.language)
        self.held_out = HeldOut(self.language, words.encode, words.spelling, words.end)

    def run(
        self, width: int, steps: int, rate: float, seed: int, stories: int = 0
    ) -> dict[str, float]:
        """Train one model and measure it. `stories`: so many, again and again; 0: fresh ones."""
        end, encode = self.words.end, self.words.encode
        model = make_model(width, seed, len(self.words.spelling), end)
        source: Any = StoryDocuments(self.language, encode, seed=seed)
        if stories:
            texts = [source.text(i) for i in range(stories)]
            source = TextDocuments(texts, encode, seed=seed)
        batches = DocumentBatches(source, ROWS, CONTEXT, eos_token_id=end, seed=seed)
        config = TrainConfig(
            steps, rate, min_lr=0.0, warmup_steps=steps // 10, weight_decay=0.03, log_interval=steps
        )
        history = train(model, batches, config)
        point = {"width": width, "steps": steps, "rate": rate, "seed": seed, "stories": stories}
        size = {"params": model.num_parameters(), "tokens": history[-1]["tokens"]}
        return {**point, **size, **self.held_out.measure(model.eval())}


def read_table(path: Path = TABLE) -> list[dict[str, float]]:
    """The lines of a table, as numbers."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{key: float(x) for key, x in line.items()} for line in csv.DictReader(file)]


def add_line(path: Path, made: dict[str, float]) -> None:
    """Add a run to a table."""
    first = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(made), lineterminator="\n")
        if first:
            writer.writeheader()
        writer.writerow(
            {k: f"{x:.6f}" if k[:4] in ("exce", "bits") else x for k, x in made.items()}
        )


def run_once(lab: Lab, **point: float) -> float:
    """What a point pays above perfect: from the table, or run now and added to the table."""
    for line in read_table():
        if all(line[key] == x for key, x in point.items()):
            return line["excess"]
    made = lab.run(**point)  # type: ignore[arg-type]
    add_line(TABLE, made)
    print({key: made[key] for key in (*point, "excess")}, flush=True)
    return made["excess"]


def mean_excess(
    lab: Lab, width: int, steps: int, rate: float, seeds: Sequence[int] = SEEDS, stories: int = 0
) -> float:
    """The mean of the seeds."""
    point = {"width": width, "steps": steps, "rate": rate, "stories": stories}
    return fmean(run_once(lab, seed=seed, **point) for seed in seeds)


def best_rate(lab: Lab, width: int, steps: int, shorter: float | None) -> float:
    """The best of rates a factor 2 apart; `shorter` is the best of runs half as long, if known."""
    best, seeds = shorter or FIRST_RATE, SEEDS if steps < 400 else SEEDS[:1]
    for factor in (0.5,) if shorter else (0.5, 2):
        now = mean_excess(lab, width, steps, best, seeds)
        while (other := mean_excess(lab, width, steps, factor * best, seeds)) < now:
            best, now = factor * best, other
    return best


def run_long(lab: Lab) -> None:
    """Chapter 10's live training, with our words, measured every 100 steps."""
    end, encode = lab.words.end, lab.words.encode
    source = StoryDocuments(lab.language, encode, seed=0)
    kept = ["step", "tokens", "excess", *(f"bits_{kind}" for kind in KINDS)]
    kept += [f"right_{kind}" for kind in (*COPIES, "whole")]
    train(
        make_model(160, 0, len(lab.words.spelling), end),
        DocumentBatches(source, 6, CONTEXT, eos_token_id=end),
        TrainConfig(900, 5e-3, 1e-4, 15, weight_decay=0.03, log_interval=100, eval_interval=100),
        validate=lab.held_out.measure,
        on_log=lambda record: add_line(LONG_RUN, {key: record[key] for key in kept}),
    )


def main() -> None:
    lab = Lab()
    points = sorted(product(WIDTHS, STEPS), key=math.prod)
    rates: dict[int, float] = {}
    for width, steps in points:
        if width * steps > MOST_EXPENSIVE:
            continue
        rates[width] = best_rate(lab, width, steps, rates.get(width))
        mean_excess(lab, width, steps, rates[width])
        if (width, steps) == REPEATED[:2]:
            for stories in REPEATED[2]:
                mean_excess(lab, width, steps, rates[width], stories=stories)
    if not LONG_RUN.exists():
        run_long(lab)


if __name__ == "__main__":
    main()
