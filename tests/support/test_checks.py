"""Refusals: one text for several, a file's name for its text; long values are cut."""

import copy
import json
import os
import re
from pathlib import Path

import pytest
import torch

from minillm.beyond.answers.conversations import conversation_example
from minillm.beyond.pictures.picture_parts import PictureConfig
from minillm.beyond.pictures.pictures import PictureLM
from minillm.beyond.pictures.vision_parts import VisionConfig
from minillm.beyond.two_sequences.seq2seq import EncoderDecoder, Seq2SeqConfig
from minillm.bpe import GPT4_PATTERN, BPETokenizer, PreTokenizer, make_pre_tokenizer
from minillm.config import ModelConfig
from minillm.deeper.generation.stream import StopStrings
from minillm.deeper.pictures.qwen_vl import QwenVisionConfig, QwenVL, QwenVLConfig
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.deeper.tokenizer.hf_json import DIGEST, arguments, to_json
from minillm.deeper.tokenizer.merges import count_words
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.ngram import NGramModel
from minillm.support.checks.model import check_mask
from minillm.support.checks.texts import check_texts, check_utf8, texts_of
from minillm.support.checks.words import quoted


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


SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 16}
IDS = torch.tensor([[3, 5, 6, 7]])
TOWER = VisionConfig(image_size=16, patch_size=8, hidden_size=16, intermediate_size=16,
                     num_hidden_layers=1, num_attention_heads=2)  # fmt: skip
QWEN = QwenVisionConfig(hidden_size=32, depth=1, embed_dim=16, num_heads=2, patch_size=4)
MODELS = {
    "decoder": lambda: CausalLM(ModelConfig(**SIZES)),
    "packed": lambda: CausalLM(ModelConfig(**SIZES)).packed(),
    "LLaVA": lambda: PictureLM(PictureConfig(TOWER, ModelConfig(**SIZES), 9)),
    "Qwen2-VL": lambda: QwenVL(
        QwenVLConfig(ModelConfig(**SIZES, model_type="qwen2"), QWEN, image_token_id=36,
                     video_token_id=37, vision_start_token_id=38, vision_end_token_id=39,
                     mrope_section=(2, 1, 1))
    ),
    "encoder and decoder": lambda: EncoderDecoder(
        Seq2SeqConfig(vocab_size=40, d_model=16, max_position_embeddings=24)
    ),
}  # fmt: skip


def calls(model):
    """What a mask can be given to."""
    if isinstance(model, EncoderDecoder):
        yield lambda mask: model(IDS, IDS, attention_mask=mask)
        yield lambda mask: model(IDS, IDS, decoder_attention_mask=mask)
        yield lambda mask: model.generate(IDS, max_new_tokens=2, attention_mask=mask)
        return
    yield lambda mask: model(IDS, attention_mask=mask)
    write = model.generate if hasattr(model, "generate") else lambda x, **o: generate(model, x, **o)
    yield lambda mask: write(IDS, max_new_tokens=1, attention_mask=mask)
    yield lambda mask: write(IDS, max_new_tokens=0, attention_mask=mask)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_mask_of_floating_point_numbers_is_refused(name):
    """0.5 would count as a token in one place and as padding in another."""
    model = MODELS[name]().eval()
    for call in calls(model):
        for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64):
            call(torch.ones(1, 4, dtype=dtype))
        for mask in (torch.full((1, 4), 0.5), torch.ones(1, 4, dtype=torch.float16)):
            with pytest.raises(ValueError, match=f"is {mask.dtype}; it must be bool or an integer"):
                call(mask)


def test_no_number_of_a_mask_is_asked_for():
    for dtype in (torch.float32, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"^the mask is {dtype}; it must be bool or an integ"):
            check_mask(torch.ones(2, 3, dtype=dtype, device="meta"), "the mask")
    check_mask(torch.ones(2, 3, dtype=torch.bool, device="meta"))
    check_mask(None)


HALF = r"'\\ud800' at place 2, surrogates not allowed"


def test_half_a_character_is_found_with_its_place():
    check_utf8("a text", "a\ud7ff\ue000\U0001f642")
    with pytest.raises(
        ValueError, match=rf"^a text, 'ab\\ud800c', holds half a character: {HALF}$"
    ):
        check_utf8("a text", "ab\ud800c")


CONFIG = ModelConfig(256, 32, 1, 2, 48)
ANSWER = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"

HOLDS_HALF = {
    "a token": lambda text: BPETokenizer.train("a", 300, special_tokens=[text]),
    "the chat template": lambda text: ForeignTokenizer(TOKENIZER.ranks, "a", chat_template=text),
    "a stop string": lambda text: StopStrings(None, text, TOKENIZER, CONFIG),
    r"messages\[0\]\['content'\]": lambda text: conversation_example(
        ForeignTokenizer(TOKENIZER.ranks, GPT4_PATTERN, chat_template=ANSWER),
        [{"role": "assistant", "content": text}],
    ),
}


@pytest.mark.parametrize("name", HOLDS_HALF)
def test_half_a_character_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"^{name}, 'ab\\ud800c', holds .* {HALF}$"):
        HOLDS_HALF[name]("ab\ud800c")


@pytest.mark.parametrize("where", ["special", "template"])
def test_half_a_character_in_a_file_is_told_with_the_file(where, tmp_path):
    BPETokenizer.train("a", 300, special_tokens=["<e>"]).save(tmp_path)
    path = tmp_path / ("tokenizer.json" if where == "special" else "tokenizer_config.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    if where == "special":
        content["added_tokens"][0]["content"] = "<e\ud800"
        content["model"]["vocab"]["<e\ud800"] = content["model"]["vocab"].pop("<e>")
        del content["model"][DIGEST]
        (tmp_path / "tokenizer_config.json").unlink()
    else:
        content["chat_template"] = "{{\ud800"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{re.escape(str(tmp_path))}.*{HALF}"):
        BPETokenizer.load(tmp_path)


LONG = "x" * 60_000
RANKS = TOKENIZER.ranks
FILE = to_json(BPETokenizer(RANKS, GPT4_PATTERN))


def changed(**parts):
    content = copy.deepcopy(FILE)
    content["model"].pop(DIGEST, None)
    content["model"] |= parts.pop("model", {})
    return arguments({**content, **parts})


QUOTES = {
    "end token": lambda: BPETokenizer(RANKS, GPT4_PATTERN, eos_token=LONG),
    "both": lambda: ForeignTokenizer(RANKS, "a", {LONG: 900}, added_tokens={LONG: 901}),
    "normalizer": lambda: ForeignTokenizer(RANKS, GPT4_PATTERN, normalizer=LONG),
    "special": lambda: BPETokenizer(RANKS, GPT4_PATTERN, {LONG: 900}).encode(LONG),
    "names": lambda: BPETokenizer.train("a", 300, special_tokens=[LONG, LONG]),
    "one name": lambda: BPETokenizer.train("a", 300, special_tokens=LONG),
    "no begin": lambda: BPETokenizer.train("a", 300, special_tokens=[LONG], add_bos=True),
    "pattern": lambda: make_pre_tokenizer("(" + LONG),
    "groups": lambda: make_pre_tokenizer(f"({LONG})"),
    "left out": lambda: make_pre_tokenizer(LONG).words("abc"),
    "vocabulary": lambda: changed(model={"vocab": {**FILE["model"]["vocab"], LONG: 5000}}),
    "spelling": lambda: changed(model={"vocab": {**FILE["model"]["vocab"], "é☺" + LONG: 5000}}),
    "merge": lambda: changed(model={"merges": [[LONG, "a"]]}),
    "kind": lambda: changed(model={"type": LONG}),
    "decoder": lambda: changed(decoder={"type": LONG}),
}


@pytest.mark.parametrize("mistake", QUOTES)
def test_no_error_quotes_a_long_text_whole(mistake):
    with pytest.raises(ValueError) as caught:
        QUOTES[mistake]()
    assert len(str(caught.value)) < 1000
