"""The tokenizer against tiktoken, on natural text, random Unicode and degenerate strings."""

import random
import re
import subprocess
import sys
import textwrap
import time
from functools import partial

import numpy as np
import pytest
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_texts import END, NATURAL, likely_text, trained, unicode_text
from transformers import PreTrainedTokenizerFast

from minillm.bpe import (
    GPT2_PATTERN,
    GPT4_PATTERN,
    PATTERNS,
    BPETokenizer,
    Memo,
    learn_merges,
    merge_word,
)
from minillm.deeper.tokenizer import bulk, merges
from minillm.deeper.tokenizer.bulk import encode_iterable
from minillm.deeper.tokenizer.hf_json import to_hf, to_tiktoken
from minillm.deeper.tokenizer.long_words import merge_long_word
from minillm.deeper.tokenizer.vocabulary import prune


@pytest.fixture(scope="module", params=["gpt2", "gpt4", "llama3", "qwen2"])
def tokenizer(request):
    return trained(PATTERNS[request.param])


@pytest.fixture(scope="module")
def native(tokenizer):
    return tiktoken.Encoding(
        "oracle",
        pat_str=tokenizer.pattern,
        mergeable_ranks=tokenizer.ranks,
        special_tokens=tokenizer.special_tokens,
    )


@pytest.fixture(scope="module")
def gpt4():
    return trained(GPT4_PATTERN)


@pytest.fixture(scope="module")
def handed_over(gpt4):
    return to_tiktoken(gpt4)


@pytest.mark.parametrize("name", NATURAL)
def test_natural_text_has_tiktokens_ids_and_returns(tokenizer, native, name):
    text = NATURAL[name] * 3
    assert tokenizer.encode(text) == native.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=1500)
@given(text=unicode_text | likely_text)
def test_random_text_has_tiktokens_ids_and_returns(tokenizer, native, text):
    ids = tokenizer.encode_ordinary(text)
    assert ids == native.encode_ordinary(text)
    assert tokenizer.decode(ids) == text


@settings(max_examples=300)
@given(text=st.text(st.characters(categories=["Cs"]) | st.sampled_from("ab 中"), max_size=20))
def test_surrogates_are_joined_or_replaced_as_tiktoken_does(gpt4, handed_over, text):
    assert gpt4.encode(text) == handed_over.encode(text)
    replaced = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert gpt4.decode(gpt4.encode(text)) == replaced


@st.composite
def any_ranks(draw):
    """Ranks that no training would give, with tokens no merge reaches and parts ranked higher."""
    tokens = draw(st.lists(st.text("ab", min_size=2, max_size=6), unique=True, max_size=14))
    order = draw(st.permutations([*(t.encode() for t in tokens), b"a", b"b"]))
    rest = [bytes([i]) for i in range(256) if i not in b"ab"]
    return {token: i for i, token in enumerate([*rest, *order])}


@settings(max_examples=500)
@given(ranks=any_ranks(), word=st.text("ab", min_size=1, max_size=200))
def test_both_ways_to_merge_agree_with_tiktoken_for_any_ranks(ranks, word):
    parts = merge_long_word(word.encode(), ranks)
    assert b"".join(parts) == word.encode()
    if len(word) <= 100:
        assert merge_word(word.encode(), ranks) == parts
    oracle = tiktoken.Encoding("any", pat_str=r"\w+", mergeable_ranks=ranks, special_tokens={})
    assert BPETokenizer(ranks, r"\w+").encode(word) == oracle.encode(word)


rng = random.Random(0)
MILLION = {
    "one letter": "a" * 10**6,
    "spaces": " " * 10**6,
    "newlines": "\n" * 10**6,
    "random letters": "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=10**6)),
    "spaces, then a word": " " * 10**6 + "x",
    "digits": "1" * 10**6,
    "marks": "!?" * 5 * 10**5,
}


@pytest.mark.parametrize("name", MILLION)
def test_a_million_characters_without_a_break_take_seconds(gpt4, name):
    text = MILLION[name]
    start = time.process_time()
    ids = gpt4.encode(text)
    assert time.process_time() - start < 600  # seconds: merging in the square takes hours
    assert gpt4.decode(ids) == text


@pytest.mark.parametrize("name", MILLION)
def test_long_words_have_tiktokens_ids(tokenizer, native, name):
    text = MILLION[name][-5000:]
    assert tokenizer.encode(text) == native.encode(text)


def test_special_tokens_need_permission(gpt4):
    text = f"a{END}b"
    with pytest.raises(ValueError, match="allowed_special"):
        gpt4.encode(text)
    a, b = gpt4.encode("a"), gpt4.encode("b")
    assert gpt4.encode(text, allowed_special="all") == [*a, gpt4.eos_token_id, *b]
    assert gpt4.encode(text, allowed_special={END}) == [*a, gpt4.eos_token_id, *b]
    assert gpt4.eos_token_id not in gpt4.encode_ordinary(text)
    assert gpt4.decode(gpt4.encode_ordinary(text)) == text


def test_one_allowed_token_may_be_given_as_a_string(gpt4):
    tokenizer = BPETokenizer(gpt4.ranks, gpt4.pattern, {END: 800, "<s>": 801})
    text = f"a<s>b{END}"
    assert tokenizer.encode("a<s>b", allowed_special="<s>") == tokenizer.encode(
        "a<s>b", allowed_special=["<s>"]
    )
    assert tokenizer.encode_batch(["<s>"], allowed_special="<s>") == [[801]]
    for allowed, refused in (("<s>", END), (END, "<s>"), ("x<s>y", "<s>"), ("", "<s>")):
        with pytest.raises(ValueError, match=re.escape(f"the special token {refused!r}")):
            tokenizer.encode(text, allowed_special=allowed)
        with pytest.raises(ValueError, match=re.escape(f"the special token {refused!r}")):
            tokenizer.encode_batch([text], allowed_special=allowed)
    assert tokenizer.encode(text, allowed_special="all")[1::2] == [801, 800]


def test_the_longest_special_token_wins_and_tiktoken_is_said_to_differ():
    ranks = {bytes([i]): i for i in range(256)}
    tokenizer = BPETokenizer(ranks, GPT4_PATTERN, {"<a>": 256, "<a><b>": 257, "<a><b><c>": 258})
    assert tokenizer.encode("<a><b><c><a><b><a>", allowed_special="all") == [258, 257, 256]
    with pytest.warns(UserWarning, match="'<a>' lies inside"):
        to_tiktoken(tokenizer)


@settings(max_examples=300)
@given(text=unicode_text | likely_text)
def test_to_tiktoken_gives_the_same_ids(gpt4, handed_over, text):
    assert handed_over.encode(text + END, allowed_special="all") == gpt4.encode(
        text + END, allowed_special="all"
    )


def test_batches_are_padded_on_either_side(gpt4):
    texts = ["the cat", "", "the cat sat on 12345 mats"]
    rows = gpt4.encode_batch(texts)
    assert rows == [gpt4.encode(text) for text in texts]
    for side in ("left", "right"):
        ids, mask = gpt4.encode_batch(texts, padding_side=side)
        assert len({len(row) for row in ids + mask}) == 1
        for row, padded, ones in zip(rows, ids, mask, strict=True):
            assert [i for i, m in zip(padded, ones, strict=True) if m] == row
            assert {i for i, m in zip(padded, ones, strict=True) if not m} <= {gpt4.pad_token_id}
        assert mask[1] == [0] * len(ids[0])
        assert mask[0][0 if side == "left" else -1] == 0
    with pytest.raises(ValueError, match="middle"):
        gpt4.encode_batch(texts, padding_side="middle")
    with pytest.raises(ValueError, match="pad token None"):
        BPETokenizer(gpt4.ranks, gpt4.pattern).encode_batch(texts, padding_side="left")


def test_a_stream_is_encoded_as_its_whole(tokenizer, monkeypatch):
    rng = random.Random(1)
    text = "".join(rng.choices([*NATURAL.values(), END, " ", "\n\n"], k=600))
    pieces, start = [], 0
    while start < len(text):
        pieces.append(text[start : start + rng.randint(0, 5000)])
        start += len(pieces[-1])
    monkeypatch.setattr(bulk, "blocks", partial(bulk.blocks, size=2000))
    streamed = list(encode_iterable(tokenizer, pieces))
    assert streamed == tokenizer.encode(text, allowed_special="all")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory as Linux sets them")
def test_twenty_megabytes_pass_through_a_fixed_memory():
    code = """
        import resource
        from minillm.bpe import BPETokenizer
        from minillm.deeper.tokenizer.bulk import encode_iterable
        tokenizer = BPETokenizer.train("the cat sat on the mat. " * 9, 280, special_tokens=["<e>"])
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        line = "the cat, number 17, sat on the mat.\\n" * 300
        count = sum(1 for _ in encode_iterable(tokenizer, (line + "<e>" for _ in range(2000))))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
        print(len(line) * 2000 / 1e6, count, grown / 1e3)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    megabytes, count, grown = map(float, done.stdout.split())
    assert megabytes > 20 and count > 1e7
    assert grown < 16  # megabytes, the text has more


def test_decoding_any_ids_is_exact_in_bytes(gpt4, handed_over):
    ids = random.Random(2).choices(range(len(gpt4)), k=2000)
    expected = b"".join(map(handed_over.decode_single_token_bytes, ids))
    assert gpt4.decode_bytes(ids) == expected
    assert gpt4.decode(ids) == expected.decode("utf-8", "replace")
    with pytest.raises(UnicodeDecodeError):
        gpt4.decode(ids, errors="strict")
    assert gpt4.decode(np.array(ids)) == gpt4.decode(torch.tensor(ids)) == gpt4.decode(iter(ids))


@settings(max_examples=500)
@given(ids=st.lists(st.integers(0, 255) | st.integers(0, 700), max_size=30))
def test_streamed_characters_are_whole_and_join_to_decode(gpt4, ids):
    ids = [i for i in ids if i < len(gpt4)]
    decoder = gpt4.decoder()
    pieces = [decoder.push(i) for i in ids]
    assert "".join([*pieces, decoder.finish()]) == gpt4.decode(ids)


def test_streaming_never_shows_half_a_character(gpt4):
    decoder = gpt4.decoder()
    assert [decoder.push(gpt4.ranks[bytes([b])]) for b in "中".encode()] == ["", "", "中"]
    assert decoder.finish() == ""


def test_ids_without_a_token_are_left_out_as_in_transformers(gpt4):
    tokenizer = BPETokenizer(gpt4.ranks, gpt4.pattern, {END: 800})  # ids 699 to 799 have none
    theirs = PreTrainedTokenizerFast(tokenizer_object=to_hf(tokenizer))
    the = tokenizer.encode("the cat")
    for ids in ([*the, 750], [750, *the], [the[0], 750, 801, *the[1:], 2**40], [750], [799, 800]):
        known = [i for i in ids if i <= 2**31]  # to the library a greater number is no id
        assert tokenizer.decode(ids) == theirs.decode(known)
        skipped = tokenizer.decode(ids, skip_special_tokens=True)
        assert skipped == theirs.decode(known, skip_special_tokens=True)
        assert tokenizer.decode_bytes(ids).decode() == theirs.decode(known)
        for skip in (False, True):
            decoder = tokenizer.decoder(skip_special_tokens=skip)
            pieces = [decoder.push(i) for i in ids]
            assert "".join(pieces) + decoder.finish() == (skipped if skip else theirs.decode(known))


@pytest.mark.parametrize(
    ("bad", "words"),
    [([0, -1], "the id -1"), ([0, 1.0], "not .*1.0"), ("ab", "one text"), ([0, "a"], "'a'"),
     ([[0, 1]], "each|one text"), (torch.tensor([[0, 1]]), "one text"),
     (torch.tensor([0.0]), "whole numbers"), ([0, None], "None")],
)  # fmt: skip
@pytest.mark.parametrize("skip", [False, True])
def test_what_is_no_id_is_an_error(gpt4, bad, words, skip):
    with pytest.raises(ValueError, match=words):
        gpt4.decode(bad, skip_special_tokens=skip)


def test_ids_may_be_tensors_wherever_ids_are_taken(gpt4):
    tokenizer = BPETokenizer(gpt4.ranks, gpt4.pattern, {END: 800})
    theirs = PreTrainedTokenizerFast(tokenizer_object=to_hf(tokenizer))
    ids = [*tokenizer.encode("the cat"), 800]
    tensor, array = torch.tensor(ids), np.array(ids)
    forms = [tensor, tensor.int(), array, [*tensor], [*array], (*tensor,), iter(tensor)]
    for form in [*forms, (t[None] for t in tensor)]:
        assert tokenizer.decode(form) == theirs.decode(ids)
    for form in (tensor, [*tensor], array, [*array]):
        skipped = tokenizer.decode(form, skip_special_tokens=True)
        assert skipped == theirs.decode(form, skip_special_tokens=True) == "the cat"
        assert tokenizer.decode_bytes(form) == b"the cat" + END.encode()
        decoder = tokenizer.decoder(skip_special_tokens=True)
        assert "".join(map(decoder.push, form)) == "the cat"
        assert prune(tokenizer, form)[1] == prune(tokenizer, ids)[1]
    assert tokenizer.decode(tensor[0]) == theirs.decode(tensor[0])  # one number alone


def test_merges_make_the_ranks(tokenizer):
    assert [a + b for a, b in tokenizer.merges] == sorted(tokenizer.ranks, key=tokenizer.ranks.get)[
        256:
    ]
    assert tokenizer.vocab_size == len(tokenizer) == 700


def test_begin_token_comes_first_and_only_from_encode(gpt4):
    tokenizer = BPETokenizer(gpt4.ranks, GPT4_PATTERN, {"<s>": 800}, add_bos=True)
    assert tokenizer.encode("a") == [800, *tokenizer.encode_ordinary("a")]
    assert list(encode_iterable(tokenizer, ["a"])) == tokenizer.encode("a")
    assert tokenizer.decode(tokenizer.encode("a")) == "<s>a"
    assert tokenizer.vocab_size == 801
    assert tokenizer.encode("") == list(encode_iterable(tokenizer, [])) == [800]


@pytest.mark.parametrize("text", ["", "a", "<s>", "<s>a", "a<s>", "<s><s>a", " <s>a<s>"])
def test_a_text_that_brings_the_begin_token_gets_no_other(gpt4, text):
    tokenizer = BPETokenizer(gpt4.ranks, GPT4_PATTERN, {"<s>": 800}, add_bos=True)
    alone = tokenizer.encode(text, allowed_special="all", add_special_tokens=False)
    assert alone == gpt4_with_begin(gpt4).encode(text, allowed_special="all")
    ids = tokenizer.encode(text, allowed_special="all")
    assert ids == (alone if text.startswith("<s>") else [800, *alone])
    for parts in ([text], list(text)):
        assert [*encode_iterable(tokenizer, parts)] == ids
        assert [*encode_iterable(tokenizer, parts, add_special_tokens=False)] == alone
    rows = tokenizer.encode_batch([text, "a"], allowed_special="all")
    assert rows == [ids, tokenizer.encode("a")]
    rows = tokenizer.encode_batch([text], allowed_special="all", add_special_tokens=False)
    assert rows == [alone]
    assert tokenizer.decode(alone) == text


def gpt4_with_begin(gpt4):
    """The same tokens, and no file that asks for the begin token."""
    return BPETokenizer(gpt4.ranks, GPT4_PATTERN, {"<s>": 800})


def test_the_end_token_begins_a_text_where_no_other_does(gpt4):
    tokenizer = BPETokenizer(gpt4.ranks, GPT4_PATTERN, gpt4.special_tokens, add_bos=True)
    end = gpt4.eos_token_id
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (end, end)
    assert tokenizer.encode("a") == [end, *gpt4.encode("a")]
    small, old_ids = prune(tokenizer, gpt4.encode("the cat"))
    assert small.add_bos and old_ids[small.encode("a")[0]] == end
    text = "the cat sat on the mat"
    trained = BPETokenizer.train(text, 300, special_tokens=[END], add_bos=True)
    assert trained.encode(text) == [trained.eos_token_id, *trained.encode_ordinary(text)]
    assert not BPETokenizer.train(text, 300, special_tokens=[END]).add_bos
    with pytest.raises(ValueError, match=r"add_bos needs a begin or end token: \['<a>'\] has none"):
        BPETokenizer.train(text, 300, special_tokens=["<a>"], add_bos=True)


@given(text=unicode_text | likely_text)
def test_only_the_text_alone_comes_back(gpt4, text):
    tokenizer = BPETokenizer(gpt4.ranks, GPT4_PATTERN, {"<s>": 800, "<x>": 801}, add_bos=True)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.decode(ids) == "<s>" + text
    for marked in (ids, [*ids[:2], 801, *ids[2:], 800], torch.tensor(ids)):
        assert tokenizer.decode(marked, skip_special_tokens=True) == text
        decoder = tokenizer.decoder(skip_special_tokens=True)
        assert "".join(map(decoder.push, map(int, marked))) + decoder.finish() == text


def test_pruning_keeps_the_tokens_of_the_domain(gpt4):
    text = NATURAL["english"]
    small, old_ids = prune(gpt4, gpt4.encode(text))
    assert len(small) == len(old_ids) < len(gpt4)
    assert [old_ids[i] for i in small.encode(text)] == gpt4.encode(text)
    assert [small.decode_bytes([i]) for i in range(len(small))] == [
        gpt4.decode_bytes([i]) for i in old_ids
    ]
    assert small.eos_token == gpt4.eos_token
    for other in NATURAL.values():
        assert small.decode(small.encode(other)) == other
    with pytest.raises(ValueError, match="id 700"):
        prune(gpt4, [700])


@settings(max_examples=300)
@given(
    words=st.dictionaries(st.text("abé", min_size=1, max_size=9), st.integers(1, 5), max_size=9),
    number=st.integers(0, 40),
)
def test_the_plain_learner_and_the_quick_one_learn_the_same(words, number):
    assert learn_merges(words, number) == merges.learn_merges(words, number)


def test_the_learner_takes_the_greatest_of_equal_pairs_and_replaces_from_the_left():
    assert learn_merges({"ab": 1, "cd": 1}, 9) == [(b"c", b"d"), (b"a", b"b")]
    assert learn_merges({"aaa": 2, "ba": 3}, 9) == [(b"a", b"a"), (b"b", b"a"), (b"aa", b"a")]
    assert learn_merges({}, 3) == learn_merges({"ab": 1}, 0) == []


def test_names_of_special_tokens_are_found_or_given(gpt4):
    assert (gpt4.eos_token, gpt4.pad_token, gpt4.bos_token) == (END, END, None)
    assert gpt4.bos_token_id is None
    special = {"<s>": 900, "<stop>": 901, "<pad>": 902}
    named = BPETokenizer(gpt4.ranks, GPT4_PATTERN, special, eos_token="<stop>", pad_token="<pad>")
    assert (named.bos_token_id, named.eos_token_id, named.pad_token_id) == (900, 901, 902)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"special_tokens": {"<a>": 5}}, "share the id 5"),
        ({"special_tokens": {"": 900}}, "empty"),
        ({"special_tokens": {"<a>": -1}}, "negative"),
        ({"eos_token": "<nope>"}, "'<nope>' is none"),
        ({"add_bos": True}, "bos_token"),
        ({"ranks": {b"a": 0}}, "255 of the 256 bytes"),
    ],
)
def test_contradictions_are_errors(gpt4, change, message):
    arguments = {"ranks": gpt4.ranks, "pattern": GPT2_PATTERN, **change}
    with pytest.raises(ValueError, match=message):
        BPETokenizer(**arguments)


@pytest.mark.parametrize("names", [END, "", ["<a>", "<b>", "<a>"]])
def test_names_of_special_tokens_to_train_with_are_a_list_of_different_ones(names):
    with pytest.raises(ValueError, match=f"special_tokens .* not {re.escape(repr(names))}"):
        BPETokenizer.train("the cat", 300, special_tokens=names)


def test_a_memo_stays_bounded():
    memo = Memo(str.upper, size=3, longest=5)
    assert [memo[w] for w in ("a", "b", "c", "d", "longer", "a")] == [
        "A",
        "B",
        "C",
        "D",
        "LONGER",
        "A",
    ]
    assert dict(memo) == {"d": "D", "a": "A"}


def test_importing_the_tokenizer_is_quick_and_needs_no_torch():
    code = """
        import sys, time
        start = time.process_time()
        from minillm.bpe import BPETokenizer
        ours = time.process_time() - start
        heavy = ("torch", "numpy", "tiktoken", "tokenizers", "transformers", "jinja2", "matplotlib")
        assert not [name for name in heavy if name in sys.modules]
        import torch
        print(ours / (time.process_time() - start))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    runs = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3))
    assert any(float(run.stdout) < 0.5 for run in runs)  # of what torch takes: a tenth
