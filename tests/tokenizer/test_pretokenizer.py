"""Cutting text into words: the shortcuts say exactly what the plain pattern says."""

import re
from unittest.mock import patch

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.tokenizer.pretokenizer import (
    GPT2_PATTERN,
    GPT4_PATTERN,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    PreTokenizer,
    well_formed,
)

PUBLISHED = {"gpt2": GPT2_PATTERN, "gpt4": GPT4_PATTERN, "qwen2": QWEN2_PATTERN}
# white space of every kind, what only looks like it (U+001C), punctuation, digits, marks
TRICKY = " \n\r\t\x0b\x1c\x85\u00a0\u2028\u3000.,'!sSlLrRvVeE12é中\u0301ſ"
texts = st.text(alphabet=TRICKY, max_size=40) | st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module", params=PUBLISHED.values(), ids=PUBLISHED)
def pre(request):
    return PreTokenizer(request.param)


@settings(max_examples=1500)
@given(text=texts)
def test_chunks_split_into_the_words_of_the_whole(pre, text):
    words = regex.findall(pre.pattern, text)
    head, *tail = pre.chunks(text)
    found = pre.words(head) + [word for chunk in tail for word in pre.words(" " + chunk)]
    assert "".join(words) == text
    assert found == words == pre.words(text)


@settings(max_examples=1500)
@given(text=st.text(alphabet=[chr(code) for code in range(128)], max_size=60))
def test_re_finds_in_ascii_what_regex_finds(pre, text):
    assert pre.words(text) == regex.findall(pre.pattern, text)


@settings(max_examples=600)
@given(pieces=st.lists(texts, max_size=4), size=st.integers(1, 30))
def test_blocks_end_with_a_word_and_leave_special_tokens_whole(pre, pieces, size):
    whole = re.compile("s12s")
    text = "s12s".join(pieces)
    stream = [text[i : i + 3] for i in range(0, len(text), 3)]
    with patch("minillm.tokenizer.pretokenizer.KEEP", 4):
        blocks = list(pre.blocks(stream, whole=whole, size=size))
    assert "".join(blocks) == text
    assert [w for b in blocks for w in parts(pre, whole, b)] == parts(pre, whole, text)


def parts(pre, whole, text):
    pieces = re.split(f"({whole.pattern})", text)
    return [w for i, p in enumerate(pieces) for w in ([p] if i % 2 else pre.words(p))]


def test_long_text_comes_in_many_blocks_and_text_without_borders_in_one(pre):
    assert len(list(pre.blocks(["word, " * 10000], size=1000))) > 20
    assert len(list(pre.blocks(["!" * 100000], size=1000))) == 1


def test_published_patterns_say_what_the_notebook_says_of_them():
    assert LLAMA3_PATTERN == GPT4_PATTERN
    assert PreTokenizer(GPT2_PATTERN).words("it's 12345") == ["it", "'s", " 12345"]
    assert PreTokenizer(GPT4_PATTERN).words("IT'S 12345") == ["IT", "'S", " ", "123", "45"]
    assert PreTokenizer(QWEN2_PATTERN).words("12345") == list("12345")
    shipped = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    )
    assert regex.findall(shipped, "a \n ") == ["a", " \n "]
    assert PreTokenizer(GPT4_PATTERN).words("a \n ") == ["a", " \n", " "]


def test_surrogates_are_joined_or_replaced():
    assert well_formed("a\ud83d\ude00b") == "a😀b"
    assert well_formed("a\ud83db\ude00") == "a\ufffdb\ufffd"


@pytest.mark.parametrize(("pattern", "message"), [("(", "not a regular"), ("(a)|.", "captures")])
def test_bad_patterns_are_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        PreTokenizer(pattern)


def test_a_pattern_that_leaves_out_text_is_an_error():
    with pytest.raises(ValueError, match="leaves out"):
        PreTokenizer(r"\w+").words("one two")
    assert PreTokenizer(r"\w+|\W+").words("one two") == ["one", " ", "two"]
