"""`make story`: the verdict is the language's, the price the model's; a missing file is told."""

import json
import math
import random
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from minillm import StoryLanguage, from_pretrained

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import story as teller  # noqa: E402

LANGUAGE = StoryLanguage("en")
STORIES = LANGUAGE.corpus(60, seed="verdicts")


def test_a_strange_word_is_found_where_it_stands():
    for text in STORIES:
        words = text.split(" ")
        assert teller.first_wrong(LANGUAGE, text) is None
        for k in {0, 1, len(words) // 3, len(words) - 1}:
            changed = " ".join([*words[:k], "xyzzy", *words[k + 1 :]])
            assert teller.first_wrong(LANGUAGE, changed) == "xyzzy"
            assert teller.first_wrong(LANGUAGE, " ".join(words[:k])) == ""  # ends too early
        assert teller.first_wrong(LANGUAGE, text + " More, please.") == "More,"
        assert teller.first_wrong(LANGUAGE, text + "!") == "!"
    assert teller.first_wrong(LANGUAGE, "def f(x):") == "def"
    assert teller.first_wrong(LANGUAGE, "Once upon a time, a 犀牛 came") == "犀牛"


def test_what_is_wrong_is_what_the_language_scores_as_impossible():
    """Words of other stories, which often fit; a name, a sum or an animal that is another's."""
    rng, wrong = random.Random(0), 0
    for text in STORIES:
        for _ in range(5):
            words, other = text.split(" "), rng.choice(STORIES).split(" ")
            k = rng.randrange(len(words))
            words[k] = rng.choice(other)
            found = teller.first_wrong(LANGUAGE, " ".join(words))
            assert (found is None) == (LANGUAGE.score(" ".join(words)) > -math.inf)
            assert found is None or found in [*words[k:], ""]  # never before the change
            wrong += found is not None
    assert 200 < wrong < 300
    hero = re.search(r"named (\w+) ", "".join(s for s in STORIES if " named " in s[:60]))[1]
    text = next(s for s in STORIES if f" named {hero} " in s)
    place = text.index(hero, text.index(hero) + 1)
    swapped = text[:place] + text[place:].replace(hero, "Zoe", 1)
    assert teller.first_wrong(LANGUAGE, swapped).startswith("Zoe")


def test_what_the_tour_quotes_is_how_a_story_begins():
    page = json.loads((ROOT / "notebooks/tour.ipynb").read_text(encoding="utf-8"))
    texts = ["".join(c["source"]) for c in page["cells"] if c["cell_type"] == "markdown"]
    quoted = re.findall(r"^> (.*)$", "\n".join(texts), re.M)
    assert quoted and all(teller.first_wrong(LANGUAGE, quote) == "" for quote in quoted)


def test_a_story_is_told_whole_with_its_price_and_its_own_floor(capsys):
    assert teller.main(["--seed", "4"]) == 0
    story, said = capsys.readouterr().out.replace("\n", " ").split("  ")
    nats = LANGUAGE.score(story)
    assert nats > -math.inf and said.startswith("Valid to the last word.")
    model, tokenizer = from_pretrained(teller.FOLDER, dtype="float32")
    ids = torch.tensor([[*tokenizer.encode(story), tokenizer.eos_token_id]])
    with torch.no_grad():
        log_probs = model(ids[:, :-1])[0].log_softmax(-1).gather(1, ids[0, 1:, None])
    bits = -log_probs.sum().item() / math.log(2)
    cost, per_byte, floor = map(float, re.findall(r"\d+\.\d+", said)[:3])
    assert cost == pytest.approx(bits, abs=0.06)
    assert per_byte == pytest.approx(bits / len(story.encode()), abs=6e-5)
    assert floor == pytest.approx(-nats / math.log(2), abs=0.06)


def test_the_verdicts():
    text = STORIES[0]
    floor = -LANGUAGE.score(text) / math.log(2)
    assert "by luck" not in teller.verdict(LANGUAGE, text, floor + 1)
    assert "by luck" in teller.verdict(LANGUAGE, text, floor - 1)
    said = teller.verdict(LANGUAGE, text.replace(" ", " zz ", 1), 100)
    assert said.startswith("Not valid: the first word that cannot stand there is 'zz'.")
    assert "no floor" in said and "perfect" not in said
    assert "it ends too early" in teller.verdict(LANGUAGE, text[:90], 100)


@pytest.mark.parametrize("width", [20, 60, 1000])
def test_a_text_is_shown_in_lines_of_whole_words(width, capsys):
    text = STORIES[1]
    cuts = sorted(random.Random(1).sample(range(1, len(text)), 90))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert teller.show(pieces, width) == text
    lines = capsys.readouterr().out.split("\n")
    assert " ".join(lines) == text and max(map(len, lines)) <= width
    assert all(len(a) + 1 + len(b.split(" ")[0]) > width for a, b in pairwise(lines))


def test_without_the_models_file_it_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "stories-en"
    shutil.copytree(teller.FOLDER, copy)
    (copy / "model.safetensors").unlink()
    monkeypatch.setattr(teller, "FOLDER", copy)
    assert teller.main([]) == 1
    said = capsys.readouterr()
    assert "model.safetensors is not there" in said.err and not said.out
    assert "git checkout assets/stories-en" in said.err
    size = (ROOT / "assets/stories-en/model.safetensors").stat().st_size
    assert f"({size / 1e6:.1f} MB)" in said.err


def test_a_file_that_is_cut_short_and_a_seed_too_large_get_a_sentence(
    tmp_path, monkeypatch, capsys
):
    copy = tmp_path / "stories-en"
    shutil.copytree(teller.FOLDER, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    monkeypatch.setattr(teller, "FOLDER", copy)
    assert teller.main(["--seed", "1"]) == 1
    said = capsys.readouterr()
    assert "cannot be read: " in said.err and "model.safetensors" in said.err
    with pytest.raises(SystemExit):
        teller.main(["--seed", str(2**63)])
    assert "more than 64 bits" in capsys.readouterr().err
