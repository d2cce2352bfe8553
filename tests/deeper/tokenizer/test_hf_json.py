"""Files and libraries: what we write is read by others, what others write is read or refused."""

import base64
import json
import random
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_texts import END, NATURAL, trained
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from minillm.bpe import GPT2_PATTERN, GPT4_PATTERN, QWEN2_PATTERN, BPETokenizer
from minillm.deeper.tokenizer.bulk import encode_iterable
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.deeper.tokenizer.hf_json import (
    DIGEST,
    read_tiktoken,
    spell,
    to_hf,
    to_tiktoken,
    unspell,
)
from minillm.deeper.tokenizer.vocabulary import prune
from minillm.deeper.tokenizer.wrapped import WrappedTokenizer, load_tokenizer

TEXTS = [*NATURAL.values(), "", " ", "\n\n  a", "zqzqzq", "e\u0301"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return trained(GPT4_PATTERN)


def split_by(pattern):
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])


def byte_level(pre_tokenizer, special=(), vocab_size=600):
    """A tokenizer that Hugging Face's library trained."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(NATURAL.values()) * 2, trainer)
    return tokenizer


@pytest.mark.parametrize("pattern", [GPT2_PATTERN, GPT4_PATTERN, QWEN2_PATTERN])
@pytest.mark.parametrize(
    "options", [{}, {"normalizer": "NFC"}, {"bos_token": END, "add_bos": True}]
)
def test_what_we_save_is_read_by_three(pattern, options, tmp_path):
    trained_one = trained(pattern)
    ours = ForeignTokenizer(trained_one.ranks, pattern, trained_one.special_tokens, **options)
    ours.save(tmp_path / "new" / "folder")
    again = BPETokenizer.load(tmp_path / "new" / "folder")
    theirs = Tokenizer.from_file(str(tmp_path / "new" / "folder" / "tokenizer.json"))
    fast = PreTrainedTokenizerFast.from_pretrained(tmp_path / "new" / "folder")
    for text in [*TEXTS, f"a{END}b"]:
        ids = ours.encode(text, allowed_special="all")
        assert ids == again.encode(text, allowed_special="all")
        assert ids == theirs.encode(text).ids == fast.encode(text) == to_hf(ours).encode(text).ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert (fast.eos_token, fast.pad_token) == (again.eos_token, again.pad_token) == (END, END)
    assert [p.name for p in (tmp_path / "new" / "folder").iterdir() if p.name.startswith(".")] == []


places = {"first": (0, 1), "with a gap": (700, 708), "last": (699, 700), "in between": (700, 300)}


@pytest.mark.parametrize(("end", "pad"), places.values(), ids=places)
def test_others_read_the_ids_of_special_tokens_wherever_they_lie(tokenizer, end, pad, tmp_path):
    special = {END: end, "<|pad|>": pad}
    free = [i for i in range(len(tokenizer.ranks) + 2) if i not in (end, pad)]
    ranks = {token: free[i] for token, i in tokenizer.ranks.items()}
    ours = BPETokenizer(ranks, GPT4_PATTERN, special)
    ours.save(tmp_path)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast, again = PreTrainedTokenizerFast.from_pretrained(tmp_path), BPETokenizer.load(tmp_path)
    assert (again.ranks, again.special_tokens) == (ranks, special)
    for text in [*TEXTS, f"the cat{END}sat<|pad|>{END}"]:
        ids = ours.encode(text, allowed_special="all")
        assert ids == theirs.encode(text).ids == fast.encode(text) == to_hf(ours).encode(text).ids
        assert ids == again.encode(text, allowed_special="all")
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert (
        fast.convert_tokens_to_ids([*special]) == [*map(theirs.token_to_id, special)] == [end, pad]
    )
    before = (tmp_path / "tokenizer.json").read_bytes()
    again.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == before


def test_special_tokens_that_a_trainer_put_first_stay_there(tmp_path):
    theirs = byte_level(split_by(GPT4_PATTERN), [END, "<|pad|>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = BPETokenizer.load(tmp_path)
    assert ours.special_tokens == {END: 0, "<|pad|>": 1}
    ours.save(tmp_path)
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = f"the cat<|pad|>sat{END}"
    assert again.encode(text).ids == theirs.encode(text).ids
    assert again.get_vocab() == theirs.get_vocab()


@pytest.mark.parametrize("name", ["a", "Ġ", "é"])  # "é" is how the file spells the byte 0xE9
def test_a_special_token_that_a_file_cannot_tell_apart_is_not_saved(tokenizer, name, tmp_path):
    alike = BPETokenizer(tokenizer.ranks, GPT4_PATTERN, {name: 900})
    with pytest.raises(ValueError, match=f"cannot tell .* '{name}'"):
        alike.save(tmp_path)
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(ValueError, match=f"cannot tell .* '{name}'"):
        to_hf(alike)


def test_a_file_of_gpt2s_kind(tmp_path):
    theirs = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), [END])
    theirs.post_processor = processors.ByteLevel(trim_offsets=False)
    theirs.save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    del content["model"]["type"]  # GPT-2's own file is older than this key,
    content["model"]["merges"] = [" ".join(m) for m in content["model"]["merges"]]  # and pairs
    content["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": "", "unk_token": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = {"bos_token": END, "eos_token": {"content": END}, "unk_token": END}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = BPETokenizer.load(tmp_path)
    assert ours.pattern == GPT2_PATTERN and ours.eos_token == ours.bos_token == END
    for text in [*TEXTS, f"a{END}b"]:
        assert ours.encode(text, allowed_special="all") == theirs.encode(text).ids


def write_ranks(path, ranks):
    lines = [base64.b64encode(token) + b" %d\n" % i for token, i in ranks.items()]
    path.write_bytes(b"".join(lines))


def test_a_file_of_llama3s_kind_with_words_that_no_merge_makes(tokenizer, tmp_path):
    ranks = {**tokenizer.ranks, b"zqzqzq": 699}
    write_ranks(tmp_path / "tokenizer.model", ranks)
    names = ["<|begin_of_text|>", "<|end_of_text|>"]
    converter = TikTokenConverter(
        str(tmp_path / "tokenizer.model"), GPT4_PATTERN, extra_special_tokens=names
    )
    theirs = converter.converted()
    template = processors.TemplateProcessing(
        single=f"{names[0]} $A", pair=f"{names[0]} $A {names[0]}:1 $B:1",
        special_tokens=[(names[0], theirs.token_to_id(names[0]))],
    )  # fmt: skip
    level = processors.ByteLevel(trim_offsets=False)
    theirs.post_processor = processors.Sequence([level, template])
    theirs.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["ignore_merges"]
    ours = BPETokenizer.load(tmp_path)
    assert ours.add_bos and ours.bos_token == names[0] and ours.eos_token == names[1]
    for text in [*TEXTS, "zqzqzq a zqzqzqz", f"a{names[1]}b"]:
        assert ours.encode(text, allowed_special="all") == theirs.encode(text).ids
    ours.save(tmp_path / "again")
    again = Tokenizer.from_file(str(tmp_path / "again" / "tokenizer.json"))
    for text in [*TEXTS, "zqzqzq a zqzqzqz"]:
        assert again.encode(text).ids == ours.encode(text)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["ignore_merges"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"zqzqzq.*ignore_merges"):
        BPETokenizer.load(tmp_path)


def test_a_file_of_qwen2s_kind(tmp_path):
    theirs = byte_level(split_by(QWEN2_PATTERN))
    theirs.normalizer = normalizers.NFC()
    theirs.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    theirs.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    theirs.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    ours = BPETokenizer.load(tmp_path)
    assert (ours.normalizer, ours.eos_token, ours.pad_token) == (
        "NFC",
        "<|im_end|>",
        "<|endoftext|>",
    )
    for text in [*TEXTS, "a<tool_call>e\u0301<|im_end|>"]:
        assert ours.encode(text, allowed_special="all") == theirs.encode(text).ids
    fast = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "猫在哪儿？\n\n"},
    ]
    for prompt in (True, False):
        expected = fast.apply_chat_template(
            messages, add_generation_prompt=prompt, tokenize=True, return_dict=False
        )
        assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == expected
    ours.save(tmp_path / "again")
    again = BPETokenizer.load(tmp_path / "again")
    assert again.apply_chat_template(messages) == ours.apply_chat_template(messages)


@pytest.fixture
def thinking(tmp_path):
    """A folder of Qwen 3's kind: some of the tokens that it adds are not special."""
    theirs = byte_level(split_by(QWEN2_PATTERN))
    theirs.normalizer = normalizers.NFC()
    theirs.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    names = ["<think>", "</think>", "end|>", "<stop>", "<|user|>"]
    theirs.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    theirs.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML}
    kind = {"__type": "AddedToken", "special": True, "normalized": False}
    config |= {"eos_token": {**kind, "content": "<stop>"}, "pad_token": "<|endoftext|>"}
    config["additional_special_tokens"] = ["<|im_end|>", {**kind, "content": "<|user|>"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_tokens_that_are_added_but_not_special_may_stand_in_any_text(thinking):
    ours, fast = BPETokenizer.load(thinking), PreTrainedTokenizerFast.from_pretrained(thinking)
    assert ours.added_tokens == {"<think>": 603, "</think>": 604, "end|>": 605}
    for text in ("the <think>", "</think>e\u0301<think><thin", "an end|>"):
        ids = fast.encode(text)
        assert ours.encode(text) == ours.encode_ordinary(text) == [*encode_iterable(ours, [text])]
        assert ours.encode(text) == ids and ours.decode(ids) == fast.decode(ids)
    text = "<think>a<|im_end|>b<|im_start|></think>"  # "end|>" is a part of a special token here
    with pytest.raises(ValueError, match=r"the special token '<\|im_end\|>'"):
        ours.encode(text, allowed_special=["<|im_start|>"])
    assert ours.encode(text, allowed_special="all") == fast.encode(text)
    assert ours.encode_ordinary(text) == fast.encode(text, split_special_tokens=True)
    messages = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "<think>rat</think>mat"},
    ]
    expected = fast.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(messages) == expected and 603 in expected


def test_tokens_that_are_named_in_the_config_are_special(thinking):
    ours, fast = BPETokenizer.load(thinking), PreTrainedTokenizerFast.from_pretrained(thinking)
    assert {"<stop>", "<|user|>"} <= ours.special_tokens.keys()
    assert {*ours.special_tokens} == {*fast.all_special_tokens, "<|im_start|>"}
    assert ours.eos_token_id == 606
    for name in ("<stop>", "<|user|>"):
        with pytest.raises(ValueError, match="spells the special token"):
            ours.apply_chat_template([{"role": "user", "content": name}])


def test_saving_says_which_added_tokens_are_special(thinking):
    ours = BPETokenizer.load(thinking)
    ours.save(thinking / "again")
    again = BPETokenizer.load(thinking / "again")
    assert (again.special_tokens, again.added_tokens) == (ours.special_tokens, ours.added_tokens)
    text = "<think>rat</think>mat<|im_end|>"
    for folder in (thinking, thinking / "again"):
        fast = PreTrainedTokenizerFast.from_pretrained(folder)
        ids = fast.encode(text)
        assert ids == ours.encode(text, allowed_special="all")
        assert fast.decode(ids, skip_special_tokens=True) == "<think>rat</think>mat"


def test_an_older_chat_template_does_not_outlive_a_save(tokenizer, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("OLD")
    options = {"special_tokens": tokenizer.special_tokens, "chat_template": "NEW"}
    ForeignTokenizer(tokenizer.ranks, GPT4_PATTERN, **options).save(tmp_path)
    assert BPETokenizer.load(tmp_path).chat_template == "NEW"
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template == "NEW"


def test_of_named_templates_the_default_is_taken(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())

    def load(names):
        named = [{"name": name, "template": name + "!"} for name in names]
        path.write_text(json.dumps({**config, "chat_template": named}))
        return BPETokenizer.load(tmp_path)

    ours = load(["tool_use", "default"])
    assert ours.decode(ours.apply_chat_template([])) == "default!"
    with pytest.raises(
        ValueError, match=r"tokenizer_config\.json: no chat template is called 'default'"
    ):
        load(["tool_use"])
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert load(["tool_use"]).chat_template == "beside"


def test_chat_templates_are_fenced_in(tokenizer):
    def chat(template, content="hello", names=("<|im_start|>", "<|im_end|>")):
        special = {name: 800 + i for i, name in enumerate(names)}
        made = ForeignTokenizer(tokenizer.ranks, GPT4_PATTERN, special, chat_template=template)
        return made.apply_chat_template([{"role": "user", "content": content}])

    assert chat(CHATML)[0] == 800
    with pytest.raises(ValueError, match=r"spells the special token '<\|im_end\|>'"):
        chat(CHATML, "hello<|im_end|>\n")
    with pytest.raises(ValueError, match=r"<\|im_end\|>"):
        chat(CHATML, [{"type": "text", "text": "<|im_end|>"}])
    with pytest.raises(ValueError, match="refuses these messages: no users"):
        chat("{{ raise_exception('no users') }}")
    with pytest.raises(ValueError, match="refuses"):
        chat("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="without a chat template"):
        chat(None)


def edits(content):
    """Changes to a file's content, each with a word of the error that it must raise."""
    model, pre = content["model"], content["pre_tokenizer"]
    split, level = pre["pretokenizers"]
    return {
        "Unigram": lambda: model.update(type="Unigram"),
        "dropout": lambda: model.update(dropout=0.1),
        "byte_fallback": lambda: model.update(byte_fallback=True),
        "end_of_word_suffix": lambda: model.update(end_of_word_suffix="</w>"),
        "continuing_subword_prefix": lambda: model.update(continuing_subword_prefix="##"),
        "truncation": lambda: content.update(truncation={"max_length": 5}),
        "padding": lambda: content.update(padding={"strategy": "BatchLongest"}),
        "normalizer 'NFKC'": lambda: content.update(normalizer={"type": "NFKC"}),
        "decoder 'Metaspace'": lambda: content.update(decoder={"type": "Metaspace"}),
        "'Metaspace'": lambda: content.update(pre_tokenizer={"type": "Metaspace"}),
        "pre_tokenizer \\[None\\]": lambda: content.update(pre_tokenizer=None),
        "'Split', 'Metaspace'": lambda: pre.update(
            pretokenizers=[split, {"type": "Metaspace"}, level]
        ),
        "add_prefix_space": lambda: level.update(add_prefix_space=True),
        "its own regex": lambda: pre.update(pretokenizers=[level]),
        "Contiguous": lambda: split.update(behavior="Contiguous"),
        "not a regular expression": lambda: split.update(pattern={"Regex": "("}),
        "'RobertaProcessing'": lambda: content.update(post_processor={"type": "RobertaProcessing"}),
        "more than one begin": lambda: content.update(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": END}}],
            }
        ),
        "lstrip": lambda: content["added_tokens"][0].update(lstrip=True),
        "no byte-level": lambda: model["vocab"].update({"▁the": 900}),
        "256 bytes": lambda: (model["vocab"].pop("!"), model.update(unk_token="a")),
        "not in the vocabulary": lambda: model["merges"].append(["q", "q"]),
        "order of ids": lambda: model["merges"].reverse(),
        "not listed|no merge makes": lambda: model["merges"].pop(7),
        "id 3 as added, 699 as ordinary": lambda: content["added_tokens"][0].update(id=3),
        "share the id": lambda: (
            content["added_tokens"][0].update(id=3),
            model["vocab"].update({END: 3}),
        ),
        "KeyError": lambda: content.pop("model"),
    }


@pytest.mark.parametrize(
    "message", edits({"model": {}, "pre_tokenizer": {"pretokenizers": [0, 0]}})
)
def test_features_we_lack_and_files_that_contradict_themselves_are_refused(
    tokenizer, tmp_path, message
):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    del content["model"][DIGEST]
    path.write_text(json.dumps(content))
    assert BPETokenizer.load(path).ranks == tokenizer.ranks
    edits(content)[message]()
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        BPETokenizer.load(path)


def test_bytes_without_a_token_are_left_out_as_tokenizers_does(tokenizer, tmp_path):
    """SmolLM2's vocabulary lacks 21 bytes: control characters, and some that no text has."""
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    del content["model"][DIGEST]
    for byte in (b"\x04", b"\x1d", b"\xf1"):
        del content["model"]["vocab"][spell(byte)]
    path.write_text(json.dumps(content))
    found, library = BPETokenizer.load(path), Tokenizer.from_file(str(path))
    found.save(tmp_path / "again")
    again = BPETokenizer.load(tmp_path / "again")
    for text in ["a\x04b", "!\x04?", " \x04the", "\x04", "x\U000d0000y", *NATURAL.values()]:
        ids = library.encode(text, add_special_tokens=False).ids
        assert found.encode_ordinary(text) == again.encode_ordinary(text) == ids, text
    small, _ = prune(found, [])
    assert small.decode(small.encode_ordinary("a\x04b")) == "ab"
    with pytest.raises(ValueError, match="tiktoken needs all 256 bytes"):
        to_tiktoken(found)
    with pytest.raises(ValueError, match="3 of the 256 bytes have no id, first 4"):
        BPETokenizer(found.ranks, found.pattern, found.special_tokens)


def test_a_file_that_says_something_twice_is_an_error(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        whole = (tmp_path / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(whole.replace("{", '{"a": 1, "a": 2, ', 1), encoding="utf-8")
        with pytest.raises(ValueError, match=rf"{re.escape(name)} holds the key 'a' twice"):
            BPETokenizer.load(tmp_path)
        (tmp_path / name).write_text(whole, encoding="utf-8")


def test_a_file_cut_off_anywhere_is_an_error(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        whole = (tmp_path / name).read_bytes()
        for length in range(0, len(whole), max(1, len(whole) // 50)):
            (tmp_path / name).write_bytes(whole[:length])
            with pytest.raises(ValueError, match=rf"{re.escape(name)} is not whole JSON"):
                BPETokenizer.load(tmp_path)
        (tmp_path / name).write_bytes(whole)


def test_an_edited_file_is_an_error(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    whole = path.read_text(encoding="utf-8")
    rng = random.Random(0)
    alnum = [i for i, character in enumerate(whole) if character.isalnum()]
    for i in rng.sample(alnum, 200):
        other = rng.choice([c for c in "0123456789ab" if c != whole[i]])
        path.write_text(whole[:i] + other + whole[i + 1 :], encoding="utf-8")
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            BPETokenizer.load(tmp_path)


def test_a_failed_save_leaves_what_was_there(tokenizer, tmp_path, monkeypatch):
    tokenizer.save(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    monkeypatch.setattr("os.fsync", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        prune(tokenizer, [])[0].save(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_missing_files_say_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        BPETokenizer.load(tmp_path)


def test_tiktoken_files_are_read_and_damage_is_named(tokenizer, tmp_path):
    path = tmp_path / "ranks.tiktoken"
    write_ranks(path, tokenizer.ranks)
    special = tokenizer.special_tokens
    again = BPETokenizer(read_tiktoken(path), GPT4_PATTERN, special)
    assert (again.ranks, again.special_tokens) == (tokenizer.ranks, special)
    lines = path.read_bytes().splitlines(keepends=True)
    for i, damaged in {
        3: b"IQ==\n",
        4: b"I!Q= 4\n",
        5: lines[5].replace(b"5", b"3"),
        6: lines[2].split()[0] + b" 6\n",
        698: lines[698][:-2],
    }.items():
        path.write_bytes(b"".join([*lines[:i], damaged, *lines[i + 1 :]]))
        with pytest.raises(ValueError, match=f"line {i + 1}"):
            read_tiktoken(path)
    path.write_bytes(b"".join(lines[:100]))
    with pytest.raises(ValueError, match="156 of the 256 bytes"):
        BPETokenizer(read_tiktoken(path), GPT4_PATTERN)


def test_spelling_is_hugging_faces():
    assert spell(b" the\n") == "ĠtheĊ"
    assert sorted(spell(bytes([i])) for i in range(256)) == sorted(
        pre_tokenizers.ByteLevel.alphabet()
    )
    assert all(unspell(spell(bytes([i]))) == bytes([i]) for i in range(256))


def test_normalizers_are_not_handed_to_tiktoken(tokenizer):
    with pytest.raises(ValueError, match="NFC"):
        to_tiktoken(ForeignTokenizer(tokenizer.ranks, GPT4_PATTERN, normalizer="NFC"))


def test_the_name_of_the_file_is_in_the_error(tmp_path):
    Path(tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer\.json holds a list, not an object"):
        BPETokenizer.load(tmp_path)


def first(content):
    return content["added_tokens"][0]


# a change to tokenizer.json, and the place and value that the error must name
UNFIT = {
    "half an id": (lambda c: c["model"]["vocab"].update(a=0.5), r"model\.vocab\.a .* not 0\.5"),
    "no number": (lambda c: c["model"]["vocab"].update(a=float("inf")), r"vocab\.a .* not inf"),
    "a huge id": (lambda c: c["model"]["vocab"].update(a=10**15), r"vocab\.a .* not 10{15}"),
    "a negative id": (lambda c: c["model"]["vocab"].update(a=-1), r"vocab\.a .* not -1"),
    "true": (lambda c: c["model"]["vocab"].update(a=True), r"vocab\.a .* not True"),
    "an id twice": (lambda c: c["model"]["vocab"].update(a=1), "two tokens share the id 1"),
    "an added id twice": (lambda c: first(c).update(id=3, content="<q>"), "share the id 3"),
    "another id": (lambda c: first(c).update(id=3), "has the id 3 as added"),
    "an added text": (lambda c: first(c).update(content=5), r"added_tokens\.0\.content .* not 5"),
    "an empty text": (
        lambda c: first(c).update(content=""),
        "should be some text, not",
    ),
    "a flag": (lambda c: first(c).update(special="no"), r"added_tokens\.0\.special .* 'no'"),
    "a merge of three": (
        lambda c: c["model"]["merges"].append(["a", "b", "c"]),
        r"model\.merges\.\d+ should be two tokens",
    ),
    "a list as model": (lambda c: c.update(model=[]), r"model should be an object, not \[\]"),
    "a type": (lambda c: c["model"].update(type=5), r"model\.type should be a string, not 5"),
    "a step": (lambda c: c.update(normalizer="NFC"), r"normalizer should be an object or null"),
    "a pattern": (
        lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=5),
        r"pre_tokenizer\.pretokenizers\.0\.pattern\.Regex should be a string, not 5",
    ),
}


def rewrite(folder, change, name="tokenizer.json"):
    path = folder / name
    content = json.loads(path.read_text(encoding="utf-8"))
    content.get("model", {}).pop(DIGEST, None)
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("load", [BPETokenizer.load, WrappedTokenizer.load, load_tokenizer])
@pytest.mark.parametrize("name", UNFIT)
def test_what_a_file_may_hold_is_the_same_for_every_reader(tokenizer, tmp_path, name, load):
    tokenizer.save(tmp_path)
    change, message = UNFIT[name]
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=rf"tokenizer\.json: .*{message}"):
        load(tmp_path)


@pytest.mark.parametrize("load", [BPETokenizer.load, WrappedTokenizer.load])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eos_token": 5}, "eos_token should be a token or null, not 5"),
        ({"pad_token": {"content": 5}}, r"pad_token\.content should be a string, not 5"),
        ({"bos_token": {}}, "bos_token|content"),
        ({"chat_template": 5}, "chat_template should be a string or a list or null, not 5"),
        ({"chat_template": [5]}, r"chat_template\.0 should be an object, not 5"),
        ({"chat_template": [{"name": "default"}]}, "template"),
        (
            {"additional_special_tokens": 5},
            "additional_special_tokens should be a list or an object or",
        ),
        ({"extra_special_tokens": [5]}, r"extra_special_tokens\.0 should be a token"),
    ],
)
def test_what_a_config_may_hold(tokenizer, tmp_path, change, message, load):
    tokenizer.save(tmp_path)
    rewrite(tmp_path, lambda content: content.update(change), "tokenizer_config.json")
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: .*({message})"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("load", [BPETokenizer.load, WrappedTokenizer.load, load_tokenizer])
def test_nests_without_end_are_errors(tokenizer, tmp_path, name, load):
    tokenizer.save(tmp_path)
    (tmp_path / name).write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ValueError, match=re.escape(name)):
        load(tmp_path)


def test_ids_are_whole_numbers_also_without_a_file(tokenizer):
    for bad in (0.5, float("nan"), 10**15, -1, True, "5", None, [5]):
        with pytest.raises(ValueError, match=re.escape(repr(bad))):
            BPETokenizer({**tokenizer.ranks, b"the cat sat": bad}, GPT4_PATTERN)
        with pytest.raises(ValueError, match=re.escape(repr(bad))):
            BPETokenizer(tokenizer.ranks, GPT4_PATTERN, {"<a>": bad})


PANICS = {
    "a template that names what it lacks": lambda content: content.update(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<q>", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    ),
    "a table of characters": lambda content: content.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "a prefix longer than the tokens": lambda content: content["model"].update(
        continuing_subword_prefix="#" * 30
    ),
}


@pytest.mark.parametrize("name", PANICS)
def test_a_panic_of_the_library_is_an_error(tokenizer, tmp_path, name):
    tokenizer.save(tmp_path)
    rewrite(tmp_path, PANICS[name])
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*the library tokenizers gave up"):
        load_tokenizer(tmp_path)


def test_a_panic_while_encoding_is_an_error(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    step = {"type": "FixedLength", "length": 0}
    rewrite(tmp_path, lambda content: content.update(pre_tokenizer=step))
    found = load_tokenizer(tmp_path)
    for encode in (found.encode, found.encode_ordinary):
        with pytest.raises(ValueError, match="the library tokenizers gave up"):
            encode("the cat")


def test_an_id_that_only_the_post_processor_knows(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    text = {"Sequence": {"id": "A", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing",
        "single": [
            text,
            {"SpecialToken": {"id": "<q>", "type_id": 0}},
        ],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<q>": {"id": "<q>", "ids": [10**9], "tokens": ["<q>"]}},
    }
    rewrite(tmp_path, lambda content: content.update(post_processor=processor))
    with pytest.raises(ValueError, match=r"post_processor adds the id 1000000000, which no token"):
        load_tokenizer(tmp_path)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([10**15, "BPE", "Unigram", "ByteLevel", "Sequence", "Split", "(", "a"]),
    lambda item: st.lists(item, max_size=3) | st.dictionaries(st.text(), item, max_size=3),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=100)
@given(data=st.data())
def test_a_file_with_anything_anywhere_loads_or_is_refused(small_files, data):
    """A value somewhere in one of the two files is replaced, removed or added."""
    folder, contents = small_files
    name = data.draw(st.sampled_from([*contents]))
    content = json.loads(contents[name])
    inside, key = content, None
    while key is None or (data.draw(st.integers(0, 3)) and isinstance(inside[key], dict | list)):
        if key is not None:
            inside = inside[key]
        keys = [*inside] if isinstance(inside, dict) else [*range(len(inside))]
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
    if key in inside if isinstance(inside, dict) else key is not None and key < len(inside):
        if data.draw(st.booleans()) or name != "tokenizer.json":
            inside[key] = data.draw(anything)
        else:
            del inside[key]
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
    try:
        found = load_tokenizer(folder)
        ids = found.encode("the cat sat on 12345 mats")
        assert all(isinstance(i, int) for i in ids) and isinstance(found.decode(ids), str)
    except ValueError as error:
        assert str(error)
    finally:
        (folder / name).write_text(contents[name], encoding="utf-8")


@pytest.fixture(scope="module")
def small_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    small = BPETokenizer.train("the cat sat on the mat. " * 9, 270, special_tokens=[END, "<s>"])
    options = {"add_bos": True, "normalizer": "NFC", "chat_template": CHATML}
    ForeignTokenizer(small.ranks, GPT4_PATTERN, small.special_tokens, **options).save(folder)
    rewrite(folder, lambda content: None)
    return folder, {
        name: (folder / name).read_text(encoding="utf-8")
        for name in ("tokenizer.json", "tokenizer_config.json")
    }


def test_without_the_library_to_hf_says_what_to_install(monkeypatch):
    tokenizer = BPETokenizer.train("a", 256)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="to_hf needs a library: pip install tokenizers"):
        to_hf(tokenizer)
