"""The files beside a `tokenizer.json`: whatever names a token, it is transformers' one."""

import json
import random
import shutil

import pytest
import transformers
from tokenizer_folders import SMALL, plain_byte_level
from tokenizer_texts import NATURAL
from tokenizers import AddedToken, normalizers, processors

from minillm.bpe import BPETokenizer
from minillm.deeper.tokenizer.beside import TOKENIZER_FILES
from minillm.deeper.tokenizer.wrapped import WrappedTokenizer, load_tokenizer

transformers.logging.set_verbosity_error()
END = "<|endoftext|>"
FLAGS = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
TYPED = {"__type": "AddedToken", **FLAGS}
NAMES = ("<tool>", "<a>", "<b>", "</s>", "<pad>", "<mask>", "<img>", "<x y>", "tool", "<tool")
TEXTS = [
    "the <tool> cat",
    " <a><b> </s> x</s>",
    "<mask>  the<img>cat <pad>",
    "a <x y> b<tool>tool <tool the",
    "the cat sat on the mat <|endoftext|>",
]


each_kind = pytest.mark.parametrize("kind", SMALL)


def write(folder, tokenizer, config, **files):
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def check(folder, texts=TEXTS):
    """Ids, texts and names are those of transformers."""
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    added = theirs.get_added_vocab()
    named = ours.special_tokens | getattr(ours, "added_tokens", {})
    if isinstance(ours, WrappedTokenizer):
        named = {t.content: i for i, t in ours.library.get_added_tokens_decoder().items()}
    assert named == added
    for text in [*texts, *NATURAL.values()]:
        ids = theirs.encode(text)
        assert ours.encode(text, allowed_special="all") == ids, text
        assert ours.decode(ids) == theirs.decode(ids)
        plain = theirs.encode(text, split_special_tokens=True, add_special_tokens=False)
        extra = {*theirs.all_special_tokens} - {
            t.content for t in theirs.added_tokens_decoder.values() if t.special
        }
        if not any(name in text for name in extra):  # to us these are special as well
            assert ours.encode_ordinary(text) == plain, text
    for name in ("bos_token", "eos_token", "pad_token"):
        if (token := getattr(theirs, name)) is not None:
            assert getattr(ours, name) == token
            assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    return ours, theirs


def token(name, **flags):
    return {"content": name, **FLAGS, "special": False, **flags}


CONFIGS = {
    "added_tokens_decoder": lambda n: {"added_tokens_decoder": {str(n): token("<tool>")}},
    "whose ids are others": lambda n: {
        "added_tokens_decoder": {str(n + 7): token("<b>"), str(n + 5): token("<a>", special=True)}
    },
    "with flags": lambda n: {
        "added_tokens_decoder": {
            str(n): token("<tool>", lstrip=True, normalized=True),
            str(n + 1): token("<mask>", rstrip=True, special=True),
            str(n + 2): token("tool", single_word=True),
        }
    },
    "with other flags than the file": lambda n: {
        "added_tokens_decoder": {"0": token(END, lstrip=True, rstrip=True, special=True)}
    },
    "a role beside it": lambda n: {
        "added_tokens_decoder": {str(n): token("<tool>")}, "pad_token": "<pad>",
        "mask_token": {**TYPED, "content": "<mask>", "lstrip": True},
    },
    "additional_special_tokens": lambda n: {"additional_special_tokens": ["<tool>", "<a>"]},
    "typed ones": lambda n: {
        "additional_special_tokens": [{**TYPED, "content": "<a>", "lstrip": True}, "<tool>"]
    },
    "extra_special_tokens, a list": lambda n: {"extra_special_tokens": ["<b>", "<tool>"]},
    "and both": lambda n: {
        "extra_special_tokens": ["<b>"], "additional_special_tokens": ["<tool>"]
    },
    "the first empty": lambda n: {
        "extra_special_tokens": [], "additional_special_tokens": ["<tool>"]
    },
    "extra_special_tokens, a table": lambda n: {
        "extra_special_tokens": {"image_token": "<img>", "tool_token": "<tool>"}
    },
    "roles that no vocabulary has": lambda n: {
        "bos_token": "<a>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<x y>"
    },
    "a typed role": lambda n: {"eos_token": {**TYPED, "content": "</s>", "rstrip": True}},
    "a role of the model's own": lambda n: {"image_token": "<img>"},
    "a role that is an ordinary token": lambda n: {"pad_token": "!"},
    "all of them": lambda n: {
        "added_tokens_decoder": {str(n): token("<tool>"), "0": token(END, special=True)},
        "additional_special_tokens": ["<a>", "<b>"], "pad_token": "<pad>", "image_token": "<img>",
    },
}  # fmt: skip


@each_kind
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_that_the_config_names(kind, name, tmp_path):
    tokenizer = SMALL[kind]()
    write(tmp_path, tokenizer, CONFIGS[name](tokenizer.get_vocab_size()))
    check(tmp_path)


OLDER = {
    "added_tokens": lambda n: ({}, {"added_tokens": {"<tool>": n, "<a>": n + 1}}),
    "not in order": lambda n: ({}, {"added_tokens": {"<tool>": n + 1, "<a>": n}}),
    "special by its role": lambda n: (
        {"eos_token": "</s>"}, {"added_tokens": {"<tool>": n, "</s>": n + 1}}
    ),
    "special by a list": lambda n: (
        {"additional_special_tokens": ["<a>"]}, {"added_tokens": {"<tool>": n, "<a>": n + 1}}
    ),
    "an id that the file gives another": lambda n: ({}, {"added_tokens": {"<tool>": 0}}),
    "not asked beside a list of the config's": lambda n: (
        {"added_tokens_decoder": {str(n): token("<a>")}},
        {"added_tokens": {"<tool>": n}, "special_tokens_map": {"pad_token": "<pad>"}},
    ),
    "special_tokens_map": lambda n: (
        {}, {"special_tokens_map": {"bos_token": "<a>", "pad_token": token("<pad>", lstrip=True)}}
    ),
    "which goes before the config": lambda n: (
        {"pad_token": "<a>"}, {"special_tokens_map": {"pad_token": "<pad>"}}
    ),
    "with further ones": lambda n: (
        {}, {"special_tokens_map": {"additional_special_tokens": ["<tool>", "<b>"]}}
    ),
    "with extra ones beside the config's": lambda n: (
        {"extra_special_tokens": ["<a>"]},
        {"special_tokens_map": {"extra_special_tokens": ["<tool>", "<a>"]}},
    ),
    "all": lambda n: (
        {"image_token": "<img>", "additional_special_tokens": ["<a>"]},
        {"added_tokens": {"<tool>": n, "<a>": n + 1},
         "special_tokens_map": {"pad_token": "<pad>", "mask_token": token("<mask>")}},
    ),
}  # fmt: skip


@each_kind
@pytest.mark.parametrize("name", OLDER)
def test_tokens_that_older_files_name(kind, name, tmp_path):
    tokenizer = SMALL[kind]()
    config, files = OLDER[name](tokenizer.get_vocab_size())
    write(tmp_path, tokenizer, config, **files)
    check(tmp_path)


@each_kind
@pytest.mark.parametrize("seed", range(12))
def test_files_drawn_at_random(kind, seed, tmp_path):
    draw = random.Random(seed)
    tokenizer = SMALL[kind]()
    own = draw.sample(NAMES, 3)
    tokenizer.add_tokens([AddedToken(n, normalized=draw.random() < 0.5) for n in own[:1]])
    tokenizer.add_special_tokens(own[1:])
    n, some = tokenizer.get_vocab_size(), partial_list(draw)
    config = {role: draw.choice(NAMES) for role in ("pad_token", "bos_token") if some()}
    if some():
        flags = {"special": some(), "lstrip": some(), "normalized": some()}
        chosen = draw.sample(NAMES, 3)
        config["added_tokens_decoder"] = {
            str(n + i): token(name, **flags) for i, name in enumerate(chosen)
        }
    if some():
        key = draw.choice(["additional_special_tokens", "extra_special_tokens"])
        config[key] = draw.sample(NAMES, 2)
    files = {}
    if some():
        files["added_tokens"] = {name: n + i for i, name in enumerate(draw.sample(NAMES, 3))}
    if some():
        files["special_tokens_map"] = {"eos_token": draw.choice(NAMES)}
    write(tmp_path, tokenizer, config, **files)
    check(tmp_path)


def partial_list(draw):
    return lambda: draw.random() < 0.6


def test_the_library_numbers_added_tokens_whatever_the_file_says(tmp_path):
    content = json.loads(plain_byte_level().to_str())
    n = len(content["model"]["vocab"])
    content["added_tokens"] += [{"id": n + 100, **token("<a>")}, {"id": n + 50, **token("<b>")}]
    content["model"]["vocab"]["<img>"] = n + 20  # one of the vocabulary keeps its id
    content["added_tokens"].append({"id": n + 20, **token("<img>")})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    )
    ours, _ = check(tmp_path)
    assert isinstance(ours, BPETokenizer) and ours.added_tokens["<a>"] == n + 1


@each_kind
def test_a_saved_tokenizer_takes_the_place_of_all_older_files(kind, tmp_path):
    tokenizer = SMALL[kind]()
    n = tokenizer.get_vocab_size()
    write(tmp_path / "", tokenizer, {}, added_tokens={"<tool>": n}, special_tokens_map={})
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    ours = load_tokenizer(tmp_path)
    other = tmp_path / "other"
    shutil.copytree(tmp_path, other)
    (other / "added_tokens.json").write_text(json.dumps({"<a>": n, "<b>": n + 1}))
    ours.save(other)
    assert {p.name for p in other.iterdir()} & {*TOKENIZER_FILES} == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    again, _ = check(other)
    for text in TEXTS:
        assert again.encode(text, allowed_special="all") == ours.encode(text, allowed_special="all")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("added_tokens", {"<a>": "x"}, "added_tokens.json.*'<a>'.*'x'"),
        ("added_tokens", ["<a>"], "added_tokens.json holds a list"),
        ("special_tokens_map", {"additional_special_tokens": [5]}, "5 is no token"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "a"}}}, "'x' is no id"),
        ("tokenizer_config", {"added_tokens_decoder": {"7": {}}}, "'7' is no id, or has no token"),
        ("tokenizer_config", {"eos_token": ""}, "is empty"),
    ],
)
def test_damaged_files_are_named(file, content, words, tmp_path):
    plain_byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / f"{file}.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


# vocab.json and merges.txt


def older(folder, config, model_type="llama", normalizer=None):
    tokenizer = plain_byte_level(normalizer=normalizer)
    tokenizer.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return tokenizer.get_vocab_size()


GPT2 = {"tokenizer_class": "GPT2Tokenizer"}
QWEN2 = {"tokenizer_class": "Qwen2Tokenizer"}


@pytest.mark.parametrize(
    ("config", "model_type"),
    [
        (GPT2, "llama"),
        ({"tokenizer_class": "GPT2TokenizerFast"}, "gpt2"),
        ({}, "gpt2"),
        ({**GPT2, "add_bos_token": True}, "llama"),
        ({**GPT2, "add_bos_token": True, "bos_token": "<a>", "pad_token": "<pad>"}, "gpt2"),
        ({**GPT2, "add_bos_token": True, "add_eos_token": True}, "gpt2"),
        ({**GPT2, "add_prefix_space": True}, "gpt2"),
        ({**GPT2, "additional_special_tokens": ["<tool>"]}, "gpt2"),
        (QWEN2, "qwen2"),
        (QWEN2, "llama"),
        ({}, "qwen3"),
        (GPT2, "qwen2"),
        ({**QWEN2, "eos_token": "<a>", "bos_token": None}, "qwen3"),
    ],
)
def test_vocab_and_merges_are_read_as_their_class_reads_them(config, model_type, tmp_path):
    older(tmp_path, config, model_type)
    ours, theirs = check(tmp_path, [*TEXTS, "e\u0301 12345 it's\n\n x"])
    assert ours.encode("") == theirs.encode("")
    ours.save(tmp_path)  # and once saved it is a tokenizer.json
    assert not (tmp_path / "merges.txt").exists()
    again = load_tokenizer(tmp_path)
    assert again.encode("the cat 12") == theirs.encode("the cat 12")


def test_a_tokenizer_json_goes_before_vocab_and_merges(tmp_path):
    n = older(tmp_path, GPT2)
    other = plain_byte_level(special=("<pad>", END))
    other.post_processor = processors.ByteLevel()
    other.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode_ordinary("the") == other.encode("the").ids
    assert other.get_vocab_size() == n + 1


@pytest.mark.parametrize(
    "names",
    [
        ["tokenizer.model"],
        ["spiece.model"],
        ["vocab.txt"],
        ["tekken.json"],
        ["qwen.tiktoken"],
        ["tiktoken.model"],
        ["sentencepiece.bpe.model"],
        ["source.spm", "target.spm", "vocab.json"],
        ["vocab.json"],
        ["merges.txt"],
        ["encoder.json", "vocab.bpe"],
        ["tokenizer_config.json"],
        ["vocab.json", "merges.txt"],  # of nobody knows which class
        ["tokenization_chatglm.py", "tokenizer.model"],
    ],
)
def test_files_of_a_tokenizer_that_is_not_read_are_named(names, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "README.md").write_text("")
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.warns(UserWarning, match=r"but no tokenizer\.json: no tokenizer is read") as caught:
        assert load_tokenizer(tmp_path) is None
    said = str(caught[0].message)
    assert all(name in said for name in names if name != "encoder.json") and "README" not in said


def test_a_folder_without_any_has_none_in_silence(tmp_path, recwarn):
    for name in ("config.json", "model.safetensors", "run.json", "README.md", "tokens.npy"):
        (tmp_path / name).write_text("{}")
    assert load_tokenizer(tmp_path) is None and not recwarn.list
    assert load_tokenizer(tmp_path / "nowhere") is None


def test_a_normalizer_meets_a_token_that_the_config_adds(tmp_path):
    tokenizer = plain_byte_level(normalizer=normalizers.NFC())
    n = tokenizer.get_vocab_size()
    config = {"added_tokens_decoder": {str(n): token("caf\u00e9", normalized=True)}}
    write(tmp_path, tokenizer, config)
    check(tmp_path, ["the caf\u00e9 cafe\u0301"])
