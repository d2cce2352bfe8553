"""The tokenizer against tiktoken and Hugging Face's tokenizers, which share no code with it."""

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from minillm.tokenizer import GPT2_PATTERN, GPT4_PATTERN, BPETokenizer

END = "<|endoftext|>"
TEXT = (
    "The cat, it's said, sat on 12345 mats.\n\n  Die Katze saß da.  猫坐在垫子上。 кот 🐈‍⬛\r\n" * 4
)


@pytest.fixture(scope="module", params=[GPT2_PATTERN, GPT4_PATTERN], ids=["gpt2", "gpt4"])
def tokenizer(request):
    return BPETokenizer.train(TEXT, 400, pattern=request.param, special_tokens=[END])


def native(tokenizer):
    return tiktoken.Encoding(
        "oracle",
        pat_str=tokenizer.pattern,
        mergeable_ranks=tokenizer.ranks,
        special_tokens=tokenizer.special_tokens,
    )


@settings(max_examples=500)
@given(text=st.text() | st.text(alphabet="the cat\n 12'sS", max_size=60))
def test_ids_equal_tiktokens_and_round_trip(tokenizer, text):
    ids = tokenizer.encode_ordinary(text)
    assert ids == native(tokenizer).encode_ordinary(text)
    assert tokenizer.decode(ids) == text


def test_special_tokens_need_permission(tokenizer):
    with pytest.raises(ValueError, match="allowed_special"):
        tokenizer.encode("a" + END)
    assert tokenizer.encode("a" + END, allowed_special="all")[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in tokenizer.encode_ordinary("a" + END)


def test_padding(tokenizer):
    ids, mask = tokenizer.encode_batch(["the", "the cat, the"], padding_side="left")
    assert len(ids[0]) == len(ids[1]) and mask[0][0] == 0 and mask[0][-1] == 1
    assert ids[0][0] == tokenizer.pad_token_id


def test_saved_file_is_read_by_us_and_by_hugging_face(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = BPETokenizer.load(tmp_path)
    assert (again.ranks, again.special_tokens) == (tokenizer.ranks, tokenizer.special_tokens)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode(TEXT).ids == tokenizer.encode(TEXT) == again.encode(TEXT)


def test_streaming_joins_to_decode(tokenizer):
    ids = tokenizer.encode(TEXT)
    decoder = tokenizer.decoder()
    assert "".join([decoder.push(i) for i in ids] + [decoder.finish()]) == TEXT


def test_unknown_ids_are_errors(tokenizer):
    with pytest.raises(ValueError, match="99999"):
        tokenizer.decode([99999])
