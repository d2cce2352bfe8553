"""Tokenizers wrapped from `tokenizers`: transformers reads the same folder and gives the same."""

import json
import pickle
import subprocess
import sys
import time

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_folders import KINDS, byte_level, falcons, gemmas, new_style, old_style, write
from tokenizer_texts import NATURAL
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from minillm.bpe import GPT4_PATTERN, BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.generation.conversation import Conversation
from minillm.deeper.generation.stream import StopStrings, stream_text
from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.deeper.tokenizer.hf_json import DIGEST
from minillm.deeper.tokenizer.wrapped import WrappedTokenizer, load_tokenizer
from minillm.deeper.training.trainer import token_byte_lengths
from minillm.model import CausalLM

TEXTS = [
    *NATURAL.values(),
    *(
        "",
        " ",
        "  ",
        "\n",
        "a  b   c     d",
        "ends with spaces   ",
        "trailing\n\n\n\nlines <table>",
    ),
    "<0x41> is no byte, nor is <unk3> a token ▁ or Ġ",
    "龘鱻 𠜎 ᚠᛇᚻ 🦩 \u0378",  # in no vocabulary: bytes
]
# What transformers 5 reads otherwise where it finds the class LlamaTokenizer; see `theirs`.
SPACED = [" one", "  two  spaces", " \n x"]
S_KINDS = [kind for kind in KINDS if kind.startswith(("llama", "mistral"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = write(tmp_path_factory.mktemp("kind"), kind)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def ours(folder):
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = load_tokenizer(folder(kind))
        return made[kind]

    return get


@pytest.fixture(scope="module")
def theirs(folder):
    """transformers' tokenizer that follows the file: for Llama 2's old file not the automatic one.

    There AutoTokenizer builds another normalizer than the file's and SentencePiece's.
    """

    def get(kind):
        by_file = kind == "llama-2"
        cls = transformers.PreTrainedTokenizerFast if by_file else transformers.AutoTokenizer
        return cls.from_pretrained(folder(kind))

    return get


each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_ids_and_texts_are_those_of_transformers(kind, ours, theirs, folder):
    tokenizer, oracle = ours(kind), theirs(kind)
    ours_reads = kind == "deepseek"  # the same tests hold for both classes
    assert isinstance(tokenizer, BPETokenizer if ours_reads else WrappedTokenizer)
    begin, end = tokenizer.bos_token or "", tokenizer.eos_token
    inside = [f"{begin}a{end} b {end}{end}c\n", f"{end} {begin}", f"x{tokenizer.pad_token}"]
    for text in [*TEXTS, *SPACED, *inside]:
        ids = tokenizer.encode(text, allowed_special="all")
        twice = tokenizer.add_bos and text.startswith(begin)  # there by transformers, not by us
        assert ids == oracle.encode(text)[twice:]
        alone = tokenizer.encode(text, allowed_special="all", add_special_tokens=False)
        assert alone == oracle.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == oracle.decode(ids)
        skipped = tokenizer.decode(ids, skip_special_tokens=True)
        assert skipped == oracle.decode(ids, skip_special_tokens=True)
        if text not in inside:
            plain = tokenizer.encode_ordinary(text)
            assert plain == oracle.encode(text, add_special_tokens=False)
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(plain) == oracle.decode(plain)
    automatic = transformers.AutoTokenizer.from_pretrained(folder(kind))
    for text in TEXTS:
        if not text.startswith(" "):
            assert tokenizer.encode(text) == automatic.encode(text)
    assert tokenizer.vocab_size == len(oracle) == len(tokenizer)
    names = ("bos_token", "eos_token", "bos_token_id", "eos_token_id")
    assert [getattr(tokenizer, n) for n in names] == [getattr(oracle, n) for n in names]
    assert tokenizer.add_bos == (oracle.encode("")[:1] == [oracle.bos_token_id])


unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
likely_text = st.text("the catT\n\t 12'é猫▁🐈<0x>", max_size=60)


@pytest.mark.parametrize("kind", ["llama-2", "mistral-0.3", "gemma", "falcon", "deepseek"])
@given(text=unicode_text | likely_text)
def test_any_text_comes_back(kind, ours, text):
    tokenizer = ours(kind)
    ids = tokenizer.encode_ordinary(text)
    if kind in ("llama-2", "mistral-0.3", "gemma"):
        text = text.replace("▁", " ")  # the one character that SentencePiece cannot tell apart
    space = {"llama-2": text != "", "mistral-0.3": text != "" and text[0] != " "}.get(kind, False)
    assert tokenizer.decode_bytes(ids) == (" " * space + text).encode()
    strips = kind in ("llama-2", "mistral-0.3") and not space and text != ""
    assert tokenizer.decode(ids) == text[strips:]
    decoder = tokenizer.decoder()
    streamed = "".join(map(decoder.push, ids)) + decoder.finish()
    assert streamed == " " * space + text


@each_kind
def test_a_stream_continues_a_text(kind, ours):
    tokenizer = ours(kind)
    for text in NATURAL.values():
        ids, decoder = tokenizer.encode(text), tokenizer.decoder()
        start = len(ids) // 2
        head, rest = tokenizer.decode_bytes(ids[:start]), [decoder.push(i) for i in ids[start:]]
        unfinished = len(head) - len(head.decode(errors="ignore").encode())
        if not unfinished:
            assert tokenizer.decode(ids[:start]) + "".join(rest) == tokenizer.decode(ids)
        assert decoder.finish() == ""
        skipping, bare = tokenizer.decoder(skip_special_tokens=True), tokenizer.decoder()
        plain = tokenizer.encode_ordinary(text)
        streamed = map(skipping.push, [*ids, tokenizer.eos_token_id])
        assert "".join(streamed) == "".join(map(bare.push, plain))


@pytest.mark.parametrize("kind", ["llama-2", "gemma"])
def test_a_stop_string_may_begin_with_a_space(kind, ours):
    """Alone, the token of " cat" is read as "cat": the bytes of a text that goes on say more."""
    tokenizer = ours(kind)
    ids = tokenizer.encode_ordinary("the cat")
    stops = StopStrings(None, " cat", tokenizer, ModelConfig(len(tokenizer), 16, 1, 1, 32))
    ends = [stops.ended(ids[: n + 1]) for n in range(len(ids))]
    assert ends == [False] * (len(ids) - 1) + [True]
    after = len(tokenizer.encode_ordinary("the"))
    assert stops.ended(ids[after:])  # the space is the first of what is new


@each_kind
def test_workers_get_a_copy(kind, ours):
    tokenizer = ours(kind)
    copy = pickle.loads(pickle.dumps(tokenizer))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert copy.encode(text) == ids and copy.encode_ordinary(text) == ids[tokenizer.add_bos :]
        assert copy.decode(ids) == tokenizer.decode(ids)
        assert copy.decode_bytes(ids) == tokenizer.decode_bytes(ids)
    assert copy.special_tokens == tokenizer.special_tokens
    assert copy.chat_template == tokenizer.chat_template


def test_byte_fallback_is_spelled_byte_by_byte(ours):
    for kind in S_KINDS:
        tokenizer = ours(kind)
        ids = tokenizer.encode_ordinary("龘")
        assert ids[1:] == [3 + byte for byte in "龘".encode()]
        assert [tokenizer.decode_bytes([i]) for i in ids] == [b" ", b"\xe9", b"\xbe", b"\x98"]
        decoder = tokenizer.decoder()
        assert [decoder.push(i) for i in ids] == [" ", "", "", "龘"]
        assert tokenizer.decode(ids[:-1]) == "\ufffd\ufffd"
        with pytest.raises(UnicodeDecodeError):
            tokenizer.decode(ids[:-1], errors="strict")
        decoder.push(ids[1])
        assert decoder.finish() == "\ufffd"


@each_kind
def test_every_id_has_its_bytes(kind, ours, theirs):
    tokenizer, oracle = ours(kind), theirs(kind)
    special = set(tokenizer.special_tokens.values())
    for i in range(tokenizer.vocab_size):
        data = tokenizer.decode_bytes([i])
        assert data
        if i in special:
            assert data.decode() == oracle.convert_ids_to_tokens(i)
        elif "\ufffd" not in (text := oracle.decode([i])):
            assert data.decode() in (text, " " + text)
    with pytest.raises(ValueError, match="no token has the id -1; there are"):
        tokenizer.decode([0, -1])
    with pytest.raises(ValueError, match="no token has the id -1; there are"):
        tokenizer.decoder().push(-1)
    ids, none = tokenizer.encode_ordinary("the cat"), tokenizer.vocab_size
    for unknown in ([*ids, none], [none, *ids], [ids[0], none, none + 9, *ids[1:]]):
        assert tokenizer.decode(unknown) == oracle.decode(unknown) == oracle.decode(ids)
        assert tokenizer.decode_bytes(unknown) == tokenizer.decode_bytes(ids)
        assert tokenizer.decode([*unknown, 2**40], errors="strict") == tokenizer.decode(ids)
    assert tokenizer.decoder().push(none) == "" == tokenizer.decoder().push(2**40)


@each_kind
def test_ids_may_be_tensors_and_one_allowed_token_a_string(kind, ours, theirs):
    tokenizer, end = ours(kind), ours(kind).eos_token
    tensor = torch.tensor(tokenizer.encode(f"the cat{end}", allowed_special=end))
    for skip in (False, True):
        expected = theirs(kind).decode(tensor, skip_special_tokens=skip)
        for form in (tensor, [*tensor], tensor.numpy(), (*tensor,)):
            assert tokenizer.decode(form, skip_special_tokens=skip) == expected
    skipping, plain = tokenizer.decoder(skip_special_tokens=True), tokenizer.decoder()
    ids = tensor[tokenizer.add_bos :]
    assert [*map(skipping.push, ids)][-1] == "" and [*map(plain.push, ids)][-1] == end
    with pytest.raises(ValueError, match="spells the special token"):
        tokenizer.encode(f"the cat{end}", allowed_special=f"x{end}y")


@each_kind
def test_errors_have_one_of_two_names(kind, ours):
    tokenizer = ours(kind)
    if isinstance(tokenizer, WrappedTokenizer):
        with pytest.raises(ValueError, match="'ignore'"):
            tokenizer.decode([5], errors="ignore")


@each_kind
def test_special_tokens_need_leave(kind, ours, theirs):
    tokenizer, oracle = ours(kind), theirs(kind)
    end = tokenizer.eos_token
    assert oracle.eos_token_id in tokenizer.encode(f"a{end}b", allowed_special=[end])
    for allowed in ((), ["<s>b"]):
        with pytest.raises(ValueError, match="spells the special token"):
            tokenizer.encode(f"a{end}b", allowed_special=allowed)
    ids = tokenizer.encode_ordinary(f"a{end}b")
    assert not set(ids) & set(tokenizer.special_tokens.values())
    assert tokenizer.decode(ids) == f"a{end}b"
    assert ids == oracle.encode(f"a{end}b", add_special_tokens=False, split_special_tokens=True)
    assert end in tokenizer.decode(tokenizer.encode(f"a{end}b", allowed_special="all"))


def test_tokens_that_are_added_but_not_special_are_ordinary(ours):
    gemma = ours("gemma")
    ids = gemma.encode("a\n\n\nb<table>")
    assert (
        gemma.library.token_to_id("\n\n\n") in ids and gemma.library.token_to_id("<table>") in ids
    )
    assert "<table>" not in gemma.special_tokens
    assert ids == [gemma.bos_token_id, *gemma.encode_ordinary("a\n\n\nb<table>")]
    assert gemma.decode_bytes(ids[1:]) == b"a\n\n\nb<table>"


@each_kind
def test_batches_and_iterables(kind, ours, theirs):
    tokenizer, oracle = ours(kind), theirs(kind)
    oracle.pad_token = tokenizer.pad_token
    for side in ("left", "right"):
        found, mask = tokenizer.encode_batch(TEXTS[:4], padding_side=side)
        expected = oracle(TEXTS[:4], padding=True, padding_side=side)
        assert found == expected["input_ids"] and mask == expected["attention_mask"]
    assert tokenizer.encode_batch(TEXTS[:4]) == [tokenizer.encode(text) for text in TEXTS[:4]]
    alone = tokenizer.encode_batch(TEXTS[:4], add_special_tokens=False)
    assert alone == [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS[:4]]
    parts = ["The c", "at, 猫", f"坐{tokenizer.eos_token}在"]
    whole = tokenizer.encode("".join(parts), allowed_special="all")
    assert tokenizer.encode("\ud83d\ude42 \ud800") == tokenizer.encode("🙂 \ufffd")
    assert tokenizer.decode(torch.tensor(whole)) == tokenizer.decode(whole)


@each_kind
def test_saved_and_read_back(kind, ours, folder, tmp_path):
    tokenizer = ours(kind)
    (tmp_path / "chat_template.jinja").write_text("stale")
    (tmp_path / "config.json").write_text((folder(kind) / "config.json").read_text())
    tokenizer.save(tmp_path)
    again, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, *SPACED, f"a{tokenizer.eos_token} b"]:
        ids = tokenizer.encode(text, allowed_special="all")
        assert ids == again.encode(text, allowed_special="all") == theirs.encode(text)
        assert tokenizer.decode(ids) == again.decode(ids) == theirs.decode(ids)
    for name in ("bos_token", "eos_token", "pad_token", "chat_template", "special_tokens"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert theirs.eos_token == tokenizer.eos_token
    assert theirs.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("in_config", [True, False, None])
def test_whether_a_begin_token_is_added(in_file, in_config, tmp_path):
    write(tmp_path, "mistral-0.1", add_bos_token=in_config)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    if not in_file:
        content["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert found.encode("a b") == theirs.encode("a b")
    assert found.add_bos == in_file == (found.encode("a b")[0] == 1)


def test_an_end_token_that_the_file_adds(tmp_path):
    write(tmp_path, "falcon")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    end = {"id": "<|endoftext|>", "type_id": 0}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": end}]
    tokens = {end["id"]: {"id": end["id"], "ids": [602], "tokens": [end["id"]]}}
    content["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single}
    content["post_processor"]["pair"] = [single[0], {"Sequence": {"id": "B", "type_id": 1}}]
    content["post_processor"]["special_tokens"] = tokens
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert found.encode("a b") == theirs.encode("a b") == [*found.encode_ordinary("a b"), 602]
    assert not found.add_bos


def gemmas_with_runs():
    """Gemma's own file adds its runs of spaces, as it does its runs of line ends."""
    tokenizer = gemmas()
    runs = ["▁" * n for n in range(2, 32)]
    tokenizer.add_tokens([AddedToken(run, normalized=False) for run in runs])
    return tokenizer


def with_names(tokenizer):
    tokenizer.add_special_tokens(["<|é|>", "<a▁b>", "<Ġ>", "<0xE9>", "▁", "<0xe9>"])
    tokenizer.add_tokens(["<think>", "a▁▁b", "▁▁▁▁", "ĠĠ", "Ã©", "\ufffd", "猫\ufffd"])
    return tokenizer


def decoded_by(decoder, make=old_style):
    def make_it():
        tokenizer = with_names(make())
        tokenizer.decoder = decoder
        return tokenizer

    return make_it


def unigrams():
    """T5's kind."""
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.train_from_iterator([*NATURAL.values()] * 2, trainer)
    return with_names(tokenizer)


SPACE = decoders.Replace("▁", " ")
FILES = {
    "gemma": gemmas_with_runs,
    "gemma, named": lambda: with_names(gemmas()),
    "llama-2": lambda: with_names(old_style()),
    "mistral-0.3": lambda: with_names(new_style()),
    "byte level": lambda: with_names(falcons()),
    "t5": unigrams,
    **{
        f"metaspace {scheme}": decoded_by(decoders.Metaspace("▁", prepend_scheme=scheme))
        for scheme in ("always", "never", "first")
    },
    "replace alone": decoded_by(SPACE),
    "not fused": decoded_by(decoders.Sequence([decoders.ByteFallback(), SPACE])),
    "each stripped": decoded_by(decoders.Sequence([SPACE, decoders.Strip(" ", 1, 0)])),
    "both ends stripped": decoded_by(
        decoders.Sequence(
            [SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 3)]
        )
    ),
    "two replaced": decoded_by(
        decoders.Sequence([decoders.Replace("▁▁", "\t"), SPACE, decoders.Replace("e", "é")])
    ),
    "replaced when fused": decoded_by(decoders.Sequence([decoders.Fuse(), SPACE])),
    "byte level, fused": decoded_by(
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), falcons
    ),
}


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_bytes_and_text_of_every_id_are_the_same(make):
    tokenizer = WrappedTokenizer(make())
    library, lengths = tokenizer.library, token_byte_lengths(tokenizer)
    a = library.token_to_id("a")
    cut_off = set(tokenizer.special_tokens.values())
    assert library.decode([a]) == "a" and tokenizer.vocab_size > 250
    for i in range(tokenizer.vocab_size):
        if library.id_to_token(i) is None:
            continue
        for ids in ([a, i, a], [a, i, i, a], [a, a, i, a]):
            text = library.decode(ids, skip_special_tokens=False)
            decoder = tokenizer.decoder()
            streamed = "".join(map(decoder.push, ids)) + decoder.finish()
            written = tokenizer.decode_bytes(ids).decode("utf-8", "replace")
            assert tokenizer.decode(ids) == text == written == streamed, library.id_to_token(i)
        assert lengths[i] == (0 if i in cut_off else len(tokenizer.decode_bytes([i])))
    copy = pickle.loads(pickle.dumps(tokenizer))
    every = [i for i in range(tokenizer.vocab_size) if library.id_to_token(i)]
    assert copy.decode_bytes(every) == tokenizer.decode_bytes(every)


def test_four_spaces_are_four_spaces_wherever_text_is_made():
    tokenizer = WrappedTokenizer(gemmas_with_runs(), chat_template="{{ messages[0].content }}")
    config = ModelConfig(tokenizer.vocab_size, 16, 1, 1, 32)
    model, run = CausalLM(config).eval(), tokenizer.library.token_to_id("▁▁▁▁")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    always = FixedToken(run)
    prompt = torch.tensor([tokenizer.encode("a")])
    pieces = stream_text(model, tokenizer, prompt, max_new_tokens=3, sampler=always)
    assert "".join(pieces) == " " * 12
    stopped = stream_text(model, tokenizer, prompt, max_new_tokens=3, sampler=always, stop="     ")
    assert "".join(stopped) == ""
    stops = StopStrings(None, "  ", tokenizer, config)
    assert stops.ended([run]) and token_byte_lengths(tokenizer)[run] == 4
    talk = Conversation(model, tokenizer)
    assert talk.ask("a", max_new_tokens=2, sampler=always) == " " * 8


class FixedToken:
    """A sampler that always draws the same."""

    def __init__(self, token):
        self.token = token

    def __call__(self, logits, ids):
        return torch.full(logits.shape[:1], self.token)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.Fuse(), decoders.Replace("  ", " ")]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]),
        decoders.CTC(),
        decoders.BPEDecoder(),
    ],
)
def test_decoders_that_read_across_tokens_are_refused(decoder):
    with pytest.raises(ValueError, match=r"decoder .* is not supported"):
        WrappedTokenizer(decoded_by(decoder)())


def test_limits_in_the_file_do_not_cut_texts(tmp_path):
    tokenizer = old_style()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=99)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = load_tokenizer(tmp_path).encode("The cat sat on the mat.")
    assert 9 < len(ids) < 99 and 0 not in ids


def test_ids_with_a_gap(tmp_path):
    write(tmp_path, "mistral-0.1")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].get)
    content["model"]["vocab"][last] += 5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = load_tokenizer(tmp_path)
    assert found.vocab_size == len(found) + 5 == content["model"]["vocab"][last] + 1
    assert found.decode_bytes([found.vocab_size - 1]) == last.replace("▁", " ").encode()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    gap = [5, found.vocab_size - 2, 6]
    assert found.decode(gap) == theirs.decode(gap) == theirs.decode([5, 6])


def test_plain_byte_level_files_stay_ours(tmp_path):
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level([level], ("<|endoftext|>",)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert isinstance(load_tokenizer(tmp_path), BPETokenizer)


def test_our_own_file_is_never_handed_over(tmp_path):
    BPETokenizer.train("one fish two fish", 260, pattern=GPT4_PATTERN).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(
        path.read_text().replace('"content"', '"Content"').replace("Isolated", "isolated")
    )
    with pytest.raises(ValueError, match="edited since it was saved"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("scheme", ["always", "never"])
def test_a_decoder_of_unigram_models(scheme, tmp_path):
    tokenizer = old_style()
    tokenizer.normalizer = tokenizer.post_processor = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme=scheme)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("the cat sat on the mat", "a  b"):
        ids = found.encode(text)
        assert ids == theirs.encode(text) and found.decode(ids) == theirs.decode(ids) == text
        assert found.decode_bytes(ids) == (" " * (scheme == "always") + text).encode()


def test_damaged_files_and_decoders_that_we_cannot_follow(tmp_path):
    write(tmp_path, "llama-2")
    path, beside = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    whole = path.read_text()
    for length in (0, 1, len(whole) // 3, len(whole) - 3):
        path.write_text(whole[:length])
        with pytest.raises(ValueError, match=r"tokenizer\.json is not whole JSON"):
            load_tokenizer(tmp_path)
    tokenizer = old_style()
    by_regex = decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.Fuse()])
    for decoder, name in (
        (decoders.WordPiece(), "WordPiece"),
        (None, r"\[\]"),
        (by_regex, "Replace .*Regex"),
    ):
        tokenizer.decoder = decoder
        tokenizer.save(str(path))
        with pytest.raises(ValueError, match=rf"tokenizer\.json: decoder .*{name}"):
            load_tokenizer(tmp_path)
    path.write_text(whole)
    config = json.loads(beside.read_text())
    beside.write_text(json.dumps({**config, "pad_token": "[PAD]"}))  # of no vocabulary: added
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token_id == theirs.pad_token_id
    with pytest.raises(ValueError, match=r"'\[X\]' should be a special token"):
        WrappedTokenizer(load_tokenizer(tmp_path).library, pad_token="[X]")
    beside.write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(?:a|aa)+$|."])
def test_a_pattern_that_takes_forever_is_stopped(pattern, tmp_path):
    """By the library, after a count of retries: a panic, which has to become an error."""
    BPETokenizer.train("one fish two fish", 260).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["model"][DIGEST]
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    path.write_text(json.dumps(content), encoding="utf-8")
    found = WrappedTokenizer.load(tmp_path)
    assert len(found.encode("aaaa!")) == 5
    start = time.process_time()
    for encode in (found.encode, found.encode_ordinary):
        with pytest.raises(ValueError, match=r"the library tokenizers gave up: .*retry-limit"):
            encode("a" * 41 + "!")
    assert time.process_time() - start < 600  # against hanging: without a limit it takes hours


def test_a_named_token_is_special_though_the_file_does_not_say_so(tmp_path):
    write(tmp_path, "mistral-0.1")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert found.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2} == theirs.get_added_vocab()
    assert found.encode("a</s>b", allowed_special="all") == theirs.encode("a</s>b")
    assert 2 in theirs.encode("a</s>b") and 2 not in found.encode_ordinary("a</s>b")


def test_without_the_library(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"byte_fallback.*pip install tokenizers"):
        load_tokenizer(folder("llama-2"))
    with pytest.raises(ImportError, match="pip install tokenizers"):
        WrappedTokenizer.load(folder("llama-2"))


def test_the_library_is_imported_when_needed_only():
    code = "import sys, minillm.deeper.tokenizer.wrapped, minillm.deeper.tokenizer.wrapped\n"
    code += "print([m for m in ('tokenizers', 'jinja2', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_folder_with_sentencepieces_own_file_only(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.warns(UserWarning, match=r"tokenizer\.model but no tokenizer\.json"):
        assert load_tokenizer(tmp_path) is None


def test_a_model_travels_with_it_and_streams(ours, tmp_path):
    tokenizer = ours("mistral-0.1")
    sizes = {"vocab_size": tokenizer.vocab_size, "hidden_size": 16, "num_hidden_layers": 1}
    config = ModelConfig(**sizes, num_attention_heads=2, intermediate_size=24)
    model = CausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[:259] = 0  # whole characters only: loose bytes make no text
    save_pretrained(model, tokenizer, tmp_path)
    model, found = from_pretrained(tmp_path)
    assert isinstance(found, WrappedTokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path)
    prompt = "The cat"
    ids = reader(prompt, return_tensors="pt").input_ids
    assert ids.tolist() == [found.encode(prompt)]
    expected = theirs.generate(ids, do_sample=False, max_new_tokens=24)[0]
    streamed = "".join(stream_text(model, found, prompt, max_new_tokens=24))
    assert reader.decode(expected, skip_special_tokens=False) == f"<s> {prompt}{streamed}"
