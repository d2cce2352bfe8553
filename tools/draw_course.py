"""Draw the course as one picture: which chapter builds which part of the model.

python tools/draw_course.py    writes assets/course.png for the README, assets/map/01.png to
                               10.png, which stand at the head of the chapters, and token.png,
                               one token's way, for chapter 10
"""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib.pyplot as plt

from minillm.exercises.plotting import COLORS, figure
from minillm.support.files import replacing

ROOT = Path(__file__).resolve().parents[1]
BLUE, ORANGE, GREEN, YELLOW = "#dbe7f6", "#fbe3cf", "#d8efe3", "#f7efc9"

# the model from below to above: height, name, chapter, colour
STACK = [
    (0.0, "text", "", "white"),
    (1.1, "tokenizer: text to ids", "02", BLUE),
    (2.2, "embedding: ids to vectors", "02, 03", BLUE),
    (3.75, "norm", "06", GREEN),
    (4.65, "heads: queries, keys, values", "04", ORANGE),
    (5.55, "rotation: where a token stands", "05", ORANGE),
    (6.45, "attention: read from the past", "03", ORANGE),
    (8.05, "norm", "06", GREEN),
    (8.95, "feed-forward", "06", GREEN),
    (10.9, "norm, head: token scores", "06", BLUE),
    (12.0, "sampler: one token is drawn", "09", BLUE),
    (13.1, "text, one token longer", "", "white"),
]
SUMS = [(3.05, 7.15), (7.55, 9.75)]  # where a branch leaves the stream, and where it is added

# around the model: left edge, height, name, chapter, what it is for
AROUND = [
    (-7.6, 12.0, "n-grams", "01", "a text's probability;\nthe floor that no model beats"),
    (-7.6, 8.95, "training", "07", "a loss, its gradient,\na step for every weight"),
    (-7.6, 6.45, "KV cache", "08", "keys and values are kept,\nso the past is not computed again"),
    (-7.6, 2.2, "preparation", "00", "tensors, gradients, modules"),
]

# the shelf behind each part: height, what stands there
DEEPER = [
    (12.0, "01  the story language"),
    (11.3, "09  best path · speculative decoding · fast sampling"),
    (
        10.3,
        "10  families · fast decoding · exact targets ·\n      GGUF files · chat · a real model",
    ),
    (8.95, "07  gradients · optimizers · data sources ·\n      runs that survive · many processes"),
    (7.75, "06  norms and activations"),
    (7.0, "03  flash attention"),
    (6.3, "08  serving caches · roofline"),
    (5.55, "05  long contexts"),
    (4.65, "04  latent attention"),
    (1.1, "02  fast BPE · tokenizer files · chat templates"),
]


def chapter(ax: plt.Axes, x: float, y: float, number: str) -> None:
    """A chapter's number as a dark label with its right edge at x."""
    style = {"boxstyle": "round,pad=0.3", "fc": COLORS[0], "ec": "none"}
    ax.text(x, y, number, color="white", weight="bold", fontsize=9, ha="right", va="center",
            bbox=style, zorder=4)  # fmt: skip


def draw() -> plt.Figure:
    """The whole picture."""
    fig, ax = figure(width=9.6, height=7.6)
    arrow = {"arrowstyle": "-|>", "color": COLORS[0], "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    for (below, *_), (above, *_) in itertools.pairwise(STACK):
        ax.annotate("", (0, above - 0.34), (0, below + 0.34), arrowprops=arrow, zorder=1)
    for y, name, number, colour in STACK:
        box = plt.Rectangle((-2.6, y - 0.34), 5.2, 0.68, fc=colour, ec=COLORS[5], zorder=2)
        ax.add_patch(box)
        ax.text(-2.45, y, name, va="center", fontsize=9.5, zorder=3)
        if number:
            chapter(ax, 2.5, y, number)
    for start, end in SUMS:
        ax.plot(
            [0, 2.95, 2.95],
            [start, start, end],
            color=COLORS[0],
            linestyle="-",
            linewidth=1.6,
            zorder=1,
        )
        ax.annotate("", (0.2, end), (2.98, end), arrowprops=arrow, zorder=1)
        plus = {"boxstyle": "circle,pad=0.15", "fc": "white", "ec": COLORS[0]}
        ax.text(0, end, "+", weight="bold", ha="center", va="center", bbox=plus, zorder=3)
    frame = {"fill": False, "ec": COLORS[1], "linestyle": "--", "linewidth": 1.2}
    ax.add_patch(plt.Rectangle((-2.95, 2.75), 6.2, 7.4, **frame))
    ax.text(-2.8, 9.75, "one layer, L times", color=COLORS[1], fontsize=9, va="center")
    ax.add_patch(plt.Rectangle((-3.3, -0.55), 6.9, 14.2, fill=False, ec=COLORS[0], linewidth=1.6))
    chapter(ax, -2.6, 14.0, "10")
    ax.text(-2.4, 14.0, "MiniLLM: all of it, trained, tells stories", fontsize=10, va="center")
    for x, y, name, number, text in AROUND:
        box = plt.Rectangle((x, y - 0.34), 2.9, 0.68, fc=YELLOW, ec=COLORS[5], zorder=2)
        ax.add_patch(box)
        ax.text(x + 0.15, y, name, va="center", fontsize=9.5, zorder=3)
        chapter(ax, x + 2.8, y, number)
        ax.text(x, y - 0.5, text, va="top", fontsize=8.5)
        if number != "00":
            ax.annotate("", (-3.32, y), (x + 2.95, y), arrowprops=arrow)
    ax.text(4.0, 14.0, "one shelf further: notebooks/deeper", fontsize=10, va="center")
    for y, text in DEEPER:
        ax.text(4.0, y, text, va="center", fontsize=8.5)
    ax.axis("off")
    ax.set(xlim=(-7.8, 10.6), ylim=(-0.8, 14.4))
    return fig


# the map at the head of a chapter: x, y, width, text, the chapters that build it
MAP = [
    (0.0, 1.0, 1.0, "text", ()),
    (1.35, 1.0, 1.55, "tokenizer", ("02",)),
    (3.25, 1.0, 1.8, "embedding", ("02", "03")),
    (5.45, 1.0, 1.1, "heads", ("04",)),
    (6.85, 1.0, 1.4, "rotation", ("05",)),
    (8.55, 1.0, 1.5, "attention", ("03",)),
    (10.35, 1.0, 2.1, "norms, MLP", ("06",)),
    (12.95, 1.0, 1.0, "head", ("06",)),
    (14.25, 1.0, 1.45, "sampler", ("09",)),
    (16.0, 1.0, 1.2, "text", ()),
    (0.0, 2.6, 3.6, "n-grams, the floor", ("01",)),
    (4.9, 2.6, 1.65, "training", ("07",)),
    (8.4, 2.6, 1.8, "KV cache", ("08",)),
    (13.6, 2.6, 3.6, "the whole model", ("10",)),
]


def draw_map(here: str) -> plt.Figure:
    """The model from left to right; what the chapter builds is dark, later parts are pale."""
    fig, ax = figure(width=8.8, height=1.25)
    style = {"arrowstyle": "-|>", "color": COLORS[5], "shrinkA": 0, "shrinkB": 0}
    row = [entry for entry in MAP if entry[1] == 1.0]
    for (x, y, width, *_), (after, *_) in itertools.pairwise(row):
        ax.annotate("", (after, y), (x + width, y), arrowprops=style, zorder=1)
    frame = {"fill": False, "ec": COLORS[5], "linestyle": "--", "linewidth": 1}
    ax.add_patch(plt.Rectangle((5.2, 0.3), 7.5, 1.4, **frame))
    ax.text(12.6, 0.1, "one layer, L times", fontsize=7, va="top", ha="right", color="0.4")
    for x, y, width, name, chapters in MAP:
        current, done = here in chapters, all(number <= here for number in chapters)
        color = COLORS[1] if current else BLUE if done and chapters else "white"
        ink = "white" if current else "black" if done else "0.6"
        box = plt.Rectangle((x, y - 0.45), width, 0.9, fc=color, ec="0.6" if done else "0.8")
        ax.add_patch(box)
        label = f"{chapters[0]} {name}" if chapters else name
        weight = "bold" if current else "normal"
        ax.text(x + width / 2, y, label, ha="center", va="center", fontsize=7.5, color=ink,
                weight=weight, zorder=3)  # fmt: skip
    ax.axis("off")
    ax.set(xlim=(-0.1, 17.3), ylim=(-0.35, 3.15))
    return fig


# one token's way through the model, for chapter 10
TOKEN_BOXES = [  # column, row, name, shape of what leaves it, chapter
    (0, 0.0, "text", "str", ""),
    (0, 1.0, "token ids", "(B, T)", "02"),
    (0, 2.0, "embedding", "(B, T, C)", "02, 03"),
    (1, 3.1, "RMSNorm", "(B, T, C)", "06"),
    (2, 3.1, "q, k, v", "(B, H or G, T, D)", "04"),
    (2, 4.3, "norm and rotate q, k", "(B, H or G, T, D)", "06, 05"),
    (2, 5.5, "attention over S keys", "(B, H, T, D)", "03, 08"),
    (1, 5.5, "output", "(B, T, C)", "04"),
    (1, 7.1, "RMSNorm", "(B, T, C)", "06"),
    (2, 7.1, "gate and up", "2 x (B, T, F)", "06"),
    (2, 8.3, "silu(gate) x up", "(B, T, F)", "06"),
    (1, 8.3, "down", "(B, T, C)", "06"),
    (0, 9.7, "RMSNorm", "(B, T, C)", "06"),
    (0, 10.7, "head", "(B, T, V)", "06"),
    (0, 11.7, "sampler: next id", "(B,)", "09"),
]
TOKEN_COLUMNS = (0.0, 2.6, 5.6)  # where the columns stand
TOKEN_BRANCHES = [  # the stream's row, the boxes on the way, the row where the sum is taken
    (3.1, [(1, 3.1), (2, 3.1), (2, 4.3), (2, 5.5), (1, 5.5)], 5.5),
    (7.1, [(1, 7.1), (2, 7.1), (2, 8.3), (1, 8.3)], 8.3),
]


def draw_token() -> plt.Figure:
    """The model of chapter 10 as boxes, each with the shape of what leaves it."""
    fig, ax = figure(width=8.2, height=7.2)
    arrow = {"arrowstyle": "-|>", "color": COLORS[0], "shrinkA": 0, "shrinkB": 0}
    middle = {"ha": "center", "va": "center", "zorder": 3}
    ax.annotate("", (0, 11.7), (0, 0), arrowprops={**arrow, "linewidth": 2.5}, zorder=1)
    for start, boxes, joint in TOKEN_BRANCHES:
        points = [
            (0, start),
            *((TOKEN_COLUMNS[column], row) for column, row in boxes),
            (0.12, joint),
        ]
        for a, b in itertools.pairwise(points):
            b = (b[0], b[1] - 0.33) if a[0] == b[0] else b  # downwards: to the box's upper edge
            ax.annotate("", b, a, arrowprops=arrow, zorder=1)
        circle = {"boxstyle": "circle", "fc": "white", "ec": COLORS[0]}
        ax.text(0, joint, "+", weight="bold", bbox=circle, **middle)
    for column, row, name, shape, where in TOKEN_BOXES:
        text = f"{name}  [{where}]" if where else name
        colour = "#dbe7f6" if column == 0 else "#fbe3cf" if row < 6 else "#d8efe3"
        style = {"boxstyle": "round,pad=0.35", "fc": colour, "ec": "none"}
        ax.text(TOKEN_COLUMNS[column], row, text, fontsize=9.5, bbox=style, **middle)
        style = {"family": "monospace", "bbox": {"fc": "white", "ec": "none", "pad": 0.5}}
        ax.text(TOKEN_COLUMNS[column], row + 0.52, shape, fontsize=8, **style, **middle)
    for row, name in ((3.7, "attention"), (7.7, "feed-forward")):
        ax.text(4.1, row, name, style="italic", color=COLORS[0], **middle)
    ax.plot([-0.3, -1.0, -1.0, -0.8], [10.7, 10.7, 2.0, 2.0], color=COLORS[4], linestyle=":")
    ax.text(-1.1, 6.3, "tied:\none table", ha="right", va="center", fontsize=8.5, color=COLORS[4])
    frame = {"fill": False, "ec": COLORS[1], "linestyle": "--"}
    ax.add_patch(plt.Rectangle((-0.55, 2.75), 7.5, 6.35, **frame))
    ax.text(6.85, 6.35, "L layers", ha="right", va="center", color=COLORS[1])
    meaning = "the stream:\nwhat each position knows,\nonly ever added to"
    ax.text(0.12, 6.3, meaning, va="center", fontsize=8.5)
    ax.axis("off")
    ax.set(xlim=(-1.9, 7.1), ylim=(12.4, -0.5), title="One token's way through the model")
    return fig


if __name__ == "__main__":
    with replacing(ROOT / "assets" / "course.png") as temporary:
        draw().savefig(temporary, dpi=110)
    (ROOT / "assets" / "map").mkdir(exist_ok=True)
    for number in range(1, 11):
        with replacing(ROOT / "assets" / "map" / f"{number:02d}.png") as temporary:
            draw_map(f"{number:02d}").savefig(temporary, dpi=110)
    with replacing(ROOT / "assets" / "map" / "token.png") as temporary:
        draw_token().savefig(temporary, dpi=110)
