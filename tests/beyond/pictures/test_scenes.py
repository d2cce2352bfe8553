"""Scenes: what is drawn is what the caption says, and every scene can come."""

from collections import Counter
from itertools import combinations

import numpy as np

from minillm.beyond.pictures.scenes import (
    CELL,
    COLORS,
    COLUMNS,
    GLYPHS,
    ROWS,
    Scene,
    Thing,
    sample_scene,
)


def read(pixels):
    """The things in a picture, found by comparing every cell with every thing: (name, cell)."""
    found = []
    for row in range(ROWS):
        for column in range(COLUMNS):
            y, x = row * CELL, column * CELL
            cell = pixels[:, y : y + CELL, x : x + CELL]
            if not cell.any():
                continue
            for color, paint in COLORS.items():
                for glyph, lines in GLYPHS.items():
                    expected = np.zeros((3, CELL, CELL), dtype=np.float32)
                    for i, line in enumerate(lines.split()):
                        for j, mark in enumerate(line):
                            if mark == "#":
                                expected[:, i, j] = paint
                    if np.array_equal(cell, expected):
                        found.append((f"{color} {glyph}", row, column))
    return found


def test_what_is_drawn_can_be_read_back():
    rng = np.random.default_rng(0)
    for _ in range(60):
        scene = sample_scene(rng)
        pixels = scene.pixels()
        assert pixels.shape == (3, 24, 32) and pixels.dtype == np.float32
        assert pixels.min() >= 0.0 and pixels.max() <= 1.0
        found = sorted(read(pixels), key=lambda thing: thing[2])
        both = (scene.left, scene.right)
        assert found == [(thing.name, thing.row, thing.column) for thing in both]
        assert scene.caption == f"{found[0][0]} left of {found[1][0]}"


def test_glyphs_and_colors_can_be_told_apart():
    shapes = {name: tuple(lines.split()) for name, lines in GLYPHS.items()}
    assert all(len(s) == 7 and all(len(line) == 7 for line in s) for s in shapes.values())
    assert all(set("".join(s)) <= {"#", "."} for s in shapes.values())
    for a, b in combinations(shapes, 2):
        pairs = zip("".join(shapes[a]), "".join(shapes[b]), strict=True)
        assert sum(x != y for x, y in pairs) >= 5, (a, b)
    for a, b in combinations(COLORS, 2):
        assert np.abs(np.subtract(COLORS[a], COLORS[b])).max() >= 0.3, (a, b)


def test_scenes_follow_the_seed_and_spread_evenly():
    first, second = (np.random.default_rng(3) for _ in range(2))
    scenes = [sample_scene(first) for _ in range(1200)]
    assert scenes == [sample_scene(second) for _ in range(1200)]
    assert all(scene.left.column < scene.right.column for scene in scenes)
    columns = Counter((scene.left.column, scene.right.column) for scene in scenes)
    assert len(columns) == 6 and min(columns.values()) > 140
    for seen, size in (
        (Counter(scene.left.color for scene in scenes), len(COLORS)),
        (Counter(scene.right.glyph for scene in scenes), len(GLYPHS)),
        (Counter(scene.left.row for scene in scenes), ROWS),
    ):
        assert len(seen) == size and min(seen.values()) > 0.6 * 1200 / size


def test_a_scene_is_what_it_was_made_of():
    scene = Scene(Thing("red", "moon", 0, 1), Thing("blue", "house", 2, 3))
    assert scene.caption == "red moon left of blue house"
    pixels = scene.pixels()
    assert pixels[:, 0:8, 8:16].any() and pixels[:, 16:24, 24:32].any()
    pixels[:, 0:8, 8:16] = pixels[:, 16:24, 24:32] = 0
    assert not pixels.any()
