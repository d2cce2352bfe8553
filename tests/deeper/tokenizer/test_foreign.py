"""Tokenizers with what only the files of other models ask for; which class a file opens as."""

import json
import pickle
import unicodedata
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from tokenizer_texts import END, likely_text, trained, unicode_text

from minillm.bpe import GPT2_PATTERN, GPT4_PATTERN, BPETokenizer
from minillm.deeper.tokenizer.bulk import encode_iterable
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.deeper.tokenizer.hf_json import to_hf, to_tiktoken
from minillm.deeper.tokenizer.vocabulary import prune


@pytest.fixture(scope="module")
def gpt4():
    return trained(GPT4_PATTERN)


@settings(max_examples=300)
@given(text=unicode_text | likely_text)
def test_nfc_composes_before_encoding(gpt4, text):
    composing = ForeignTokenizer(gpt4.ranks, gpt4.pattern, normalizer="NFC")
    composed = unicodedata.normalize("NFC", text)
    assert composing.encode(text) == gpt4.encode(composed)
    assert list(encode_iterable(composing, text)) == gpt4.encode(composed)
    assert composing.decode(composing.encode(text)) == composed


def test_special_tokens_are_skipped_and_added_ones_are_not(gpt4):
    tokenizer = ForeignTokenizer(
        gpt4.ranks, gpt4.pattern, {END: 800}, added_tokens={"<think>": 801}
    )
    ids = tokenizer.encode(f"a<think>b{END}", allowed_special="all")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"
    assert tokenizer.decode([800, 900], skip_special_tokens=True) == ""


def test_added_tokens_are_found_in_any_text(gpt4):
    added = {"<think>": 800, "<think>s": 801}
    tokenizer = ForeignTokenizer(gpt4.ranks, GPT4_PATTERN, {END: 802}, added_tokens=added)
    text = "a<think>so<think> b"
    ids = [*gpt4.encode("a"), 801, *gpt4.encode("o"), 800, *gpt4.encode(" b")]
    assert tokenizer.encode(text) == tokenizer.encode_ordinary(text) == ids
    assert [*encode_iterable(tokenizer, text)] == ids and tokenizer.decode(ids) == text
    assert to_hf(tokenizer).encode(text).ids == ids
    with pytest.warns(UserWarning, match="'<think>' lies inside '<think>s'"):
        theirs = to_tiktoken(tokenizer)
    assert theirs.encode(f"<think>{END}", allowed_special="all") == [800, 802]
    assert len(tokenizer) == len(gpt4) + 2 and tokenizer.vocab_size == 803
    small, old_ids = prune(tokenizer, [])
    assert [old_ids[i] for i in small.added_tokens.values()] == [800, 801]
    assert small.decode(small.encode(text)) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"special_tokens": {"<a>": 5}}, "share the id 5"),
        ({"special_tokens": {"": 900}}, "empty"),
        ({"added_tokens": {"<a>": 5}}, "share the id 5"),
        ({"added_tokens": {"": 900}}, "empty"),
        ({"added_tokens": {"<a>": 901}, "special_tokens": {"<a>": 900}}, "'<a>' is special and"),
        ({"added_tokens": {"<a>": 900}, "eos_token": "<a>"}, "'<a>' is none"),
        ({"special_tokens": {"<a>": -1}}, "negative"),
        ({"eos_token": "<nope>"}, "'<nope>' is none"),
        ({"normalizer": "NFKC"}, "NFKC"),
        ({"add_bos": True}, "bos_token"),
        ({"ranks": {b"a": 0}}, "255 of the 256 bytes"),
    ],
)
def test_contradictions_are_errors(gpt4, change, message):
    arguments = {"ranks": gpt4.ranks, "pattern": GPT2_PATTERN, **change}
    with pytest.raises(ValueError, match=message):
        ForeignTokenizer(**arguments)


OLD = Path(__file__).parents[2] / "tokenizers_of_1072af8.zip"  # saved by the code of that commit
PLAIN = ("plain", "begins", "named", "several patterns")


@pytest.fixture(scope="module")
def saved_before(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    with zipfile.ZipFile(OLD) as packed:
        packed.extractall(folder)
    return folder


@pytest.mark.parametrize("name", [*PLAIN, "composing", "adding", "chatting", "lacking bytes"])
def test_a_folder_saved_before_opens_as_it_was(saved_before, tmp_path, name):
    """The same ids, names, sizes; saved again, the same bytes; a plain one is page 02's class."""
    was = json.loads((saved_before / name / "ids.json").read_text(encoding="utf-8"))
    tokenizer = BPETokenizer.load(saved_before / name)
    assert type(tokenizer) is (BPETokenizer if name in PLAIN else ForeignTokenizer)
    twin = pickle.loads(pickle.dumps(tokenizer))
    for one in (tokenizer, twin):
        assert [one.encode(text) for text in was["texts"]] == was["ids"]
    assert [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token] == was["names"]
    sizes = len(tokenizer), tokenizer.vocab_size, len(tokenizer.merges), tokenizer.add_bos
    assert sizes == (was["len"], was["vocab_size"], was["merges"], was["add_bos"])
    tokenizer.save(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (saved_before / name / file).read_bytes()


@pytest.mark.parametrize("name", ["stories-en", "chapter-07"])
def test_the_course_s_own_models_have_page_02_s_class(name):
    folder = Path(__file__).parents[3] / "assets" / name
    assert type(BPETokenizer.load(folder)) is BPETokenizer


def test_a_role_that_only_a_file_names_is_kept(gpt4, tmp_path):
    """A file that names an unknown token opens as a class that keeps the name."""
    gpt4.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "unk_token": END}))
    opened = BPETokenizer.load(tmp_path)
    assert type(opened) is ForeignTokenizer and opened.named_tokens["unk_token"] == END


def test_an_option_of_a_file_is_told_where_it_lives(gpt4):
    with pytest.raises(TypeError, match=r"normalizer is ForeignTokenizer\(normalizer=...\) here"):
        BPETokenizer(gpt4.ranks, gpt4.pattern, normalizer="NFC")
