"""Small pictures whose contents are known exactly: coloured glyphs on a grid.

Explained in notebooks/beyond/16_pictures.ipynb.
"""

# Built from notebooks/beyond/16_pictures.ipynb: edit there, then make build.

from dataclasses import dataclass

import numpy as np

__all__ = ["COLORS", "GLYPHS", "Scene", "Thing", "sample_scene"]

COLORS = {
    "red": (1.0, 0.1, 0.1),
    "green": (0.1, 0.8, 0.1),
    "blue": (0.2, 0.3, 1.0),
    "yellow": (1.0, 0.9, 0.1),
    "purple": (0.6, 0.1, 0.8),
    "cyan": (0.1, 0.8, 0.9),
    "orange": (1.0, 0.5, 0.0),
    "white": (1.0, 1.0, 1.0),
}

# Seven rows of seven pixels, # is paint.
GLYPHS = {
    "box": "####### #.....# #.....# #.....# #.....# #.....# #######",
    "block": "####### ####### ####### ####### ####### ####### #######",
    "ring": "..###.. .#...#. #.....# #.....# #.....# .#...#. ..###..",
    "disc": "..###.. .#####. ####### ####### ####### .#####. ..###..",
    "plus": "...#... ...#... ...#... ####### ...#... ...#... ...#...",
    "cross": "#.....# .#...#. ..#.#.. ...#... ..#.#.. .#...#. #.....#",
    "arrow": "...#... ..###.. .#.#.#. #..#..# ...#... ...#... ...#...",
    "tree": "...#... ..###.. ..###.. .#####. ####### ...#... ...#...",
    "house": "...#... ..#.#.. .#...#. ####### #.....# #.....# #######",
    "heart": ".##.##. ####### ####### ####### .#####. ..###.. ...#...",
    "moon": "..###.. .##.... ##..... ##..... ##..... .##.... ..###..",
    "stairs": "#...... ##..... ###.... ####... #####.. ######. #######",
}

CELL, ROWS, COLUMNS = 8, 3, 4  # pixels a side, cells down and across


@dataclass(frozen=True)
class Thing:
    """A coloured glyph in a cell of the grid."""

    color: str
    glyph: str
    row: int
    column: int

    @property
    def name(self) -> str:
        return f"{self.color} {self.glyph}"


@dataclass(frozen=True)
class Scene:
    """Two things, one left of the other."""

    left: Thing
    right: Thing

    @property
    def caption(self) -> str:
        return f"{self.left.name} left of {self.right.name}"

    def pixels(self) -> np.ndarray:
        """The picture, black where nothing is. Shape: (3, 24, 32) float32, from 0 to 1."""
        picture = np.zeros((3, ROWS * CELL, COLUMNS * CELL), dtype=np.float32)
        for thing in (self.left, self.right):
            paint = np.array([[c == "#" for c in row] for row in GLYPHS[thing.glyph].split()])
            y, x = thing.row * CELL, thing.column * CELL
            color = np.array(COLORS[thing.color], dtype=np.float32)
            picture[:, y : y + 7, x : x + 7] = color[:, None, None] * paint
        return picture


def sample_scene(rng: np.random.Generator) -> Scene:
    """Two things of any colour, glyph and row, in two different columns, all equally likely."""
    columns = sorted(rng.choice(COLUMNS, size=2, replace=False).tolist())
    colors, glyphs = list(COLORS), list(GLYPHS)
    things = [
        Thing(
            colors[rng.integers(len(colors))],
            glyphs[rng.integers(len(glyphs))],
            int(rng.integers(ROWS)),
            column,
        )
        for column in columns
    ]
    return Scene(*things)
