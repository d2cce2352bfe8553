"""The course's scoreboard: how far from the floor each chapter's best model is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

__all__ = ["scoreboard"]

LINES = Path(__file__).resolve().parents[2] / "assets" / "scoreboard.json"


def scoreboard(chapter: str, measured: Mapping[str, float], *, within: float = 0.05) -> None:
    """Print the lines up to `chapter`; its own must be what the page has just `measured`.

    Lines are read from assets/scoreboard.json: chapter, model, stories that it saw, floors (bits
    per byte on new stories over those of the language itself), as text.
    Raises: ValueError if a measured figure is further than `within` of the written one, or if the
        chapter's lines and the measured ones are not the same.
    """
    lines = json.loads(LINES.read_text(encoding="utf-8"))
    own = {model: float(floors) for number, model, _, floors in lines if number == chapter}
    if own.keys() != measured.keys():
        raise ValueError(f"chapter {chapter} has the lines {[*own]}, measured were {[*measured]}")
    for model, floors in own.items():
        if not abs(measured[model] - floors) <= within * floors:
            raise ValueError(f"{model}: {measured[model]:.4f} floors; the scoreboard has {floors}")
    print(f"{'chapter, model':36s}{'stories':>8s}{'floors':>8s}")
    for number, model, stories, floors in lines:
        if number <= chapter:
            print(f"{number}  {model:32s}{stories:>8s}{floors:>8s}")
