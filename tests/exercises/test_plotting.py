"""The shared pictures: places of labels, colours of tokens, errors; nothing needs a screen."""

from itertools import pairwise

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch

mpl.use("agg")

from minillm.exercises.plotting import (
    attention_map,
    figure,
    html_tokens,
    label_lines,
    shaded_text,
    visible,
)


def test_labels_stand_apart_at_the_right_end_and_inside():
    _, ax = figure()
    for i in range(5):
        ax.plot([0, 1], [0, 1 + 0.001 * i], label=f"line {i}")
    ax.plot([0, 1], [5, 0.0], label="low")
    ax.plot([0, 1], [0, 2])  # no label, no text
    label_lines(ax)
    texts = {t.get_text(): t.xy for t in ax.texts}
    assert set(texts) == {"low", *(f"line {i}" for i in range(5))}
    heights = [texts["low"][1], *(texts[f"line {i}"][1] for i in range(5))]
    gaps = [b - a for a, b in pairwise(heights)]
    assert min(gaps) > 0.05 and max(heights) <= 1.0
    assert all(x > 0.9 for x, _ in texts.values())


def test_a_line_across_the_axes_is_labelled_at_its_end():
    _, ax = figure()
    ax.plot([3, 50], [0.0, 1.0], label="loss")
    ax.axhline(0.5, label="floor")
    label_lines(ax)
    x, y = next(t.xy for t in ax.texts if t.get_text() == "floor")
    assert x > 0.99 and y == pytest.approx(0.5, abs=0.01)


def test_label_lines_without_lines_draws_nothing():
    _, ax = figure()
    label_lines(ax)
    assert not ax.texts


def test_attention_map_shows_the_weights():
    weights = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    ax = attention_map(weights, ["a", " b"], title="t")
    assert [t.get_text() for t in ax.texts] == ["1.00", "0.00", "0.25", "0.75"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "␣b"]
    with pytest.raises(ValueError, match=r"\(2, 2\) do not fit 1 queries x 1 keys"):
        attention_map(weights, ["a"])


def test_tokens_are_escaped_visible_and_numbered():
    html = html_tokens(["<b>", b" x", b"\xe4\xb8"], ids=[7, 8, 9])
    assert "&lt;b&gt;" in html and "␣x" in html and "E4 B8" in html and 'title="id 9"' in html
    assert visible("a\tb\n") == "a⇥b⏎"


def test_a_shaded_text_needs_a_value_for_each_piece():
    with pytest.raises(ValueError, match="shorter"):
        shaded_text(["a", " b"], [1.0], most=2, unit="bits")
    shaded_text(["a", " long" * 30, " b"], [0.0, 1.0, 9.0], most=2, unit="bits")
    letters = [text.get_text() for text in plt.gca().texts]
    assert letters.count("b") == 1 and "bits" in letters
    shades = [patch.get_facecolor()[3] for patch in plt.gca().patches]
    assert shades[:3] == [0.0, 0.375, 0.75]
    plt.close("all")
