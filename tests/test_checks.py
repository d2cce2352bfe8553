"""Refusals: one text for several, a file's name for its text; long values are cut."""

import os
from pathlib import Path

import pytest

from minillm.checks import check_texts, quoted, texts_of
from minillm.ngram import NGramModel
from minillm.tokenizer.bpe import BPETokenizer
from minillm.tokenizer.pretokenizer import GPT4_PATTERN, PreTokenizer
from minillm.tokenizer.trainer import count_words


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("short", "'short'"),
        ("a" * 31 + "b" * 30, f"'{'a' * 30}'...'{'b' * 30}' (61 long)"),
        (b"x" * 60_000, f"b'{'x' * 30}'...b'{'x' * 30}' (60,000 long)"),
        ("\x1b[2J", "'\\x1b[2J'"),
        ("\ud800", "'\\ud800'"),
        (None, "None"),
        (["a" * 500], f"['{'a' * 118}..."),
    ],
)
def test_a_value_is_shown_and_a_long_one_cut(value, shown):
    assert quoted(value) == shown


TOKENIZER = BPETokenizer.train("a text", 256)

WANTS_SEVERAL = {
    "check": check_texts,
    "fit": NGramModel(2).fit,
    "cross_entropy": NGramModel(2).fit(["a"]).cross_entropy,
    "encode_batch": TOKENIZER.encode_batch,
    "count_words": lambda texts: count_words(texts, PreTokenizer(GPT4_PATTERN)),
}


@pytest.mark.parametrize("call", WANTS_SEVERAL.values(), ids=WANTS_SEVERAL)
def test_one_text_where_several_belong_is_refused(call, tmp_path):
    message = r"must be several texts, not one, 'once upon': write \[text\] for one, text.split"
    with pytest.raises(ValueError, match=message):
        call("once upon")
    with pytest.raises(ValueError, match=r"not one, 'x+'\.\.\.'x+' \(60,000 long\)"):
        call("x" * 60_000)
    with pytest.raises(ValueError, match=r"must be texts, not bytes, b'once': decode them"):
        call(b"once")
    with pytest.raises(ValueError, match=r"must be texts, not a path: .*read_text"):
        call(tmp_path)
    call(["once upon", "a time"])
    call(iter(["once upon"]))


def test_a_tokenizer_does_not_learn_the_name_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "my.txt"
    path.write_text("once upon a time", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("my.txt", str(path), os.path.join(".", "my.txt")):
        with pytest.raises(ValueError, match=r"is the name of a file: .*\.read_text\(encoding="):
            BPETokenizer.train(name, 300)
    with pytest.raises(ValueError, match=r"must be texts, not a path: \[Path\('.*my\.txt'\)"):
        BPETokenizer.train(Path("my.txt"), 300)
    with pytest.raises(ValueError, match="must be texts, not bytes"):
        BPETokenizer.train(path.read_bytes(), 300)


@pytest.mark.parametrize(
    "text", ["", ".", "my.txt", "my.txt\n", "a\0b", "\ud800", "x" * 100_000, "\\\\?\\", "no/such"]
)
def test_any_other_text_is_a_text(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert texts_of(text) == [text]
    assert len(BPETokenizer.train(text, 256)) == 256
