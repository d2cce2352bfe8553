"""Pictures: one figure style, curves with direct labels, attention maps, tokens in colour.

Used by all notebooks. matplotlib is imported inside the functions: minillm never needs it.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLORS",
    "attention_map",
    "figure",
    "floors_curve",
    "html_tokens",
    "label_lines",
    "shaded_text",
    "show_tokens",
]

# Dark to light: the order survives printing in grey. Use with LINE_STYLES when lines cross.
COLORS = ("#1b3a6b", "#c4472b", "#2f8f83", "#d99a2b", "#7a5195", "#8a8d91")
LINE_STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
TOKEN_COLORS = ("#dbe7f6", "#fbe3cf", "#d8efe3", "#f7efc9", "#eadff2")
FONT_SIZE = 10.5


def figure(
    rows: int = 1, columns: int = 1, *, width: float = 7.2, height: float = 3.4, **kwargs: Any
) -> tuple[Figure, Any]:
    """A figure in the course's style and its axes, as from `plt.subplots`; sizes in inches."""
    import matplotlib.pyplot as plt
    from cycler import cycler

    style: Any = {
        "figure.dpi": 110,
        "savefig.bbox": "tight",
        "font.size": FONT_SIZE,
        "axes.titlesize": FONT_SIZE,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e6e6",
        "grid.linewidth": 0.8,
        "axes.axisbelow": True,
        "lines.linewidth": 2.0,
        "legend.frameon": False,
        "axes.prop_cycle": cycler(color=COLORS) + cycler(linestyle=LINE_STYLES),
    }
    plt.rcParams.update(style)  # for good: titles and labels that come later follow it too
    kwargs.setdefault("layout", "constrained")
    return plt.subplots(rows, columns, figsize=(width, height), **kwargs)


def label_lines(ax: Axes, *, pad: float = 0.02) -> None:
    """Write each line's label at its right end, in its colour, instead of a legend box."""
    import numpy as np

    lines = [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")]
    lines = [line for line in lines if np.size(line.get_xdata())]
    if not lines:
        return
    ax.get_xlim(), ax.get_ylim()  # settle the limits: the places below depend on them
    inverse = ax.transAxes.inverted()
    points = ax.get_window_extent().height * 72 / ax.figure.dpi
    step = 1.15 * FONT_SIZE / points  # the height of a line of text, in shares of the axes
    ends = [line.get_transform().transform(np.asarray(line.get_xydata())[-1]) for line in lines]
    places = [inverse.transform(end) for end in ends]
    order = sorted(range(len(lines)), key=lambda i: places[i][1])
    heights = [places[i][1] for i in order]
    for j in range(1, len(heights)):  # apart, upwards
        heights[j] = max(heights[j], heights[j - 1] + step)
    heights[-1] = min(heights[-1], 1.0)
    for j in range(len(heights) - 2, -1, -1):  # and back down into the axes
        heights[j] = min(heights[j], heights[j + 1] - step)
    for i, y in zip(order, heights, strict=True):
        ax.annotate(
            str(lines[i].get_label()),
            (places[i][0] + pad, y),
            xycoords="axes fraction",
            color=lines[i].get_color(),
            va="center",
            annotation_clip=False,
        )


def attention_map(
    weights: Any,
    queries: Sequence[str],
    keys: Sequence[str] | None = None,
    *,
    ax: Axes | None = None,
    title: str = "",
    numbers: bool | None = None,
) -> Axes:
    """Draw one head's weights as a grid: a row a query, a column a key, darker for more.

    Shape: weights (T, S), tensor or array; T `queries` and S `keys` as labels (keys: the queries).
    Raises: ValueError if the labels do not fit the weights.
    """  # fmt: skip
    import numpy as np

    if hasattr(weights, "detach"):
        weights = weights.detach().float().cpu().numpy()
    weights = np.asarray(weights, dtype=float)
    keys = queries if keys is None else keys
    if weights.ndim != 2 or weights.shape != (len(queries), len(keys)):
        raise ValueError(
            f"weights {weights.shape} do not fit {len(queries)} queries x {len(keys)} keys"
        )
    if ax is None:
        size = 0.42 * max(len(queries), len(keys)) + 1.2
        _, ax = figure(width=min(size + 0.8, 9), height=min(size, 8))
    ax.imshow(weights, cmap="Blues", vmin=0, vmax=max(1.0, weights.max(initial=0)), aspect="auto")
    ax.set_xticks(range(len(keys)), [visible(k) for k in keys], rotation=60, ha="right")
    ax.set_yticks(range(len(queries)), [visible(q) for q in queries])
    ax.grid(False)
    ax.set(title=title, xlabel="key: read from", ylabel="query: reads")
    if numbers if numbers is not None else weights.size <= 64:
        for (row, column), value in np.ndenumerate(weights):
            color = "white" if value > 0.55 else "black"
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
    return ax


def shaded_text(
    pieces: Sequence[str], values: Sequence[float], *, most: float, unit: str, columns: int = 92
) -> None:
    """Draw a text whose pieces are the darker the larger their value; at `most` the darkest.

    Raises: ValueError if there are not as many values as pieces.
    """
    from matplotlib.patches import Rectangle

    places: list[tuple[float, float, str, float]] = []
    row = column = 0
    for piece, value in zip(pieces, values, strict=True):
        if column and column + len(piece) > columns:
            row, column, piece = row + 1, 0, piece.lstrip()
        places.append((row, column, piece, value))
        column += len(piece)
    _, ax = figure(width=8.6, height=0.24 * (row + 2.6))
    legend = [0, most / 4, most / 2, most]
    texts = [f" {value:g}{' or more' if value == most else ''} " for value in legend]
    starts = [sum(map(len, texts[:i])) + i for i in range(len(texts))]
    places += [(-1.6, start, t, v) for start, t, v in zip(starts, texts, legend, strict=True)]
    ax.text(starts[-1] + len(texts[-1]) + 1, -1.6, unit, va="center", fontsize=9)
    for y, x, piece, value in places:
        color = (196 / 255, 71 / 255, 43 / 255, min(max(value, 0) / most, 1) * 0.75)
        ax.add_patch(Rectangle((x, y - 0.45), len(piece), 0.9, color=color, linewidth=0))
        for i, letter in enumerate(piece):
            ax.text(
                x + i + 0.5, y, letter, ha="center", va="center", fontsize=10, family="monospace"
            )
    ax.set(xlim=(0, columns), ylim=(row + 0.6, -2.2))
    ax.axis("off")


def visible(text: str) -> str:
    """White space made visible: a space as ␣, a line end as ⏎."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def html_tokens(tokens: Sequence[str | bytes], *, ids: Sequence[int] | None = None) -> str:
    """Tokens as HTML boxes in alternating colours; bytes that are no character appear as hex."""
    boxes = []
    for i, token in enumerate(tokens):
        text = visible(token) if isinstance(token, str) else token.hex(" ").upper()
        if isinstance(token, bytes):
            with suppress(UnicodeDecodeError):
                text = visible(token.decode("utf-8"))
        title = f' title="id {ids[i]}"' if ids is not None else ""
        color = TOKEN_COLORS[i % len(TOKEN_COLORS)]
        boxes.append(
            f'<span{title} style="background:{color};color:#222;padding:1px 2px;margin:1px;'
            f'border-radius:3px;white-space:pre">{html.escape(text)}</span>'
        )
    return f'<div style="font-family:monospace;line-height:2">{"".join(boxes)}</div>'


def show_tokens(tokens: Sequence[str | bytes], *, ids: Sequence[int] | None = None) -> None:
    """Display `html_tokens` in a notebook."""
    from IPython.display import HTML, display

    display(HTML(html_tokens(tokens, ids=ids)))


def floors_curve(
    history: Sequence[Mapping[str, float]], floor: float, lines: Mapping[str, float] | None = None
) -> Figure:
    """A training's loss in floors over millions of tokens; `lines` of others, in floors, for it.

    Each record of `history` has "tokens" and "bits_per_byte"; `floor` is in bits a byte.
    """
    import matplotlib.pyplot as plt

    fig, ax = figure(height=3)
    seen = [record["tokens"] / 1e6 for record in history]
    if seen:
        ax.plot(seen, [record["bits_per_byte"] / floor for record in history], label="our model")
    for i, (name, floors) in enumerate({"floor": 1.0, **(lines or {})}.items(), 2):
        ax.plot([0, max(seen, default=0.1)], [floors] * 2, label=name, color=COLORS[i], ls=":")
    ax.set(yscale="log", xlabel="million tokens seen", ylabel="floors (log scale)", ylim=(0.9, 30))
    ax.set_yticks((1, 1.5, 2, 5, 10, 20), ("1", "1.5", "2", "5", "10", "20"))
    ax.minorticks_off()
    label_lines(ax)
    plt.close(fig)
    return fig
