"""Files and libraries: what we write is read by others, what others write is read or refused."""

import base64
import json
import random
from pathlib import Path

import pytest
from test_tokenizer import END, NATURAL, trained
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

from minillm.tokenizer import GPT2_PATTERN, GPT4_PATTERN, QWEN2_PATTERN, BPETokenizer
from minillm.tokenizer_reader import DIGEST, spell, unspell

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
    ours = BPETokenizer(trained_one.ranks, pattern, trained_one.special_tokens, **options)
    ours.save(tmp_path / "new" / "folder")
    again = BPETokenizer.load(tmp_path / "new" / "folder")
    theirs = Tokenizer.from_file(str(tmp_path / "new" / "folder" / "tokenizer.json"))
    fast = PreTrainedTokenizerFast.from_pretrained(tmp_path / "new" / "folder")
    for text in [*TEXTS, f"a{END}b"]:
        ids = ours.encode(text, allowed_special="all")
        assert ids == again.encode(text, allowed_special="all")
        assert ids == theirs.encode(text).ids == fast.encode(text) == ours.to_hf().encode(text).ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert (fast.eos_token, fast.pad_token) == (again.eos_token, again.pad_token) == (END, END)
    assert [p.name for p in (tmp_path / "new" / "folder").iterdir() if p.name.startswith(".")] == []


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


def test_chat_templates_are_fenced_in(tokenizer):
    def chat(template, content="hello", names=("<|im_start|>", "<|im_end|>")):
        special = {name: 800 + i for i, name in enumerate(names)}
        made = BPETokenizer(tokenizer.ranks, GPT4_PATTERN, special, chat_template=template)
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
        "'Split', 'Split'": lambda: pre.update(pretokenizers=[split, split, level]),
        "add_prefix_space": lambda: level.update(add_prefix_space=True),
        "its own regex": lambda: level.update(use_regex=True),
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
        "256 bytes": lambda: model["vocab"].pop("!"),
        "not in the vocabulary": lambda: model["merges"].append(["q", "q"]),
        "order of ids": lambda: model["merges"].reverse(),
        "not listed|no merge makes": lambda: model["merges"].pop(7),
        "share the id": lambda: content["added_tokens"][0].update(id=3),
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


def test_a_file_cut_off_anywhere_is_an_error(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        whole = (tmp_path / name).read_bytes()
        for length in range(0, len(whole), max(1, len(whole) // 50)):
            (tmp_path / name).write_bytes(whole[:length])
            with pytest.raises(ValueError, match=f"{name}: damaged or cut off"):
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
        tokenizer.prune([])[0].save(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_missing_files_say_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        BPETokenizer.load(tmp_path)


def test_tiktoken_files_are_read_and_damage_is_named(tokenizer, tmp_path):
    path = tmp_path / "ranks.tiktoken"
    write_ranks(path, tokenizer.ranks)
    special = tokenizer.special_tokens
    again = BPETokenizer.from_tiktoken_file(path, pattern=GPT4_PATTERN, special_tokens=special)
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
            BPETokenizer.from_tiktoken_file(path)
    path.write_bytes(b"".join(lines[:100]))
    with pytest.raises(ValueError, match="156 of the 256 bytes"):
        BPETokenizer.from_tiktoken_file(path)


def test_spelling_is_hugging_faces():
    assert spell(b" the\n") == "ĠtheĊ"
    assert sorted(spell(bytes([i])) for i in range(256)) == sorted(
        pre_tokenizers.ByteLevel.alphabet()
    )
    assert all(unspell(spell(bytes([i]))) == bytes([i]) for i in range(256))


def test_normalizers_are_not_handed_to_tiktoken(tokenizer):
    with pytest.raises(ValueError, match="NFC"):
        BPETokenizer(tokenizer.ranks, GPT4_PATTERN, normalizer="NFC").to_tiktoken()


def test_the_name_of_the_file_is_in_the_error(tmp_path):
    Path(tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer file: list"):
        BPETokenizer.load(tmp_path)
