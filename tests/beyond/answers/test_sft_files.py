"""Examples of a JSON lines file: trl's two formats, as its documentation gives them."""

import json
import unicodedata

import pytest
from tokenizer_folders import falcons
from tokenizers import normalizers

from minillm.beyond.answers.conversations import conversation_example
from minillm.beyond.answers.sft_files import completion_example, read_examples
from minillm.bpe import BPETokenizer
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.deeper.tokenizer.wrapped import WrappedTokenizer

ASK, SAY = "What color is the sky?", "It is blue."
TALK = [{"role": "user", "content": ASK}, {"role": "assistant", "content": SAY}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    made = BPETokenizer.train(f"{ASK} {SAY} ", 280, special_tokens=["<|endoftext|>"])
    made.chat_template = TEMPLATE
    return made


def write(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def learned(tokenizer, example):
    return tokenizer.decode([i for i, m in zip(*example, strict=True) if m])


def test_the_three_forms(tokenizer, tmp_path):
    path = write(
        tmp_path / "x.jsonl",
        {"messages": TALK, "source": "documentation"},
        "",
        {"prompt": TALK[:1], "completion": TALK[1:]},
        {"prompt": ASK, "completion": " " + SAY},
    )
    talk, pair, text = read_examples(tokenizer, path)
    assert talk == pair == conversation_example(tokenizer, TALK)
    assert learned(tokenizer, talk) == f"{SAY}<|endoftext|>"
    assert tokenizer.decode(text.ids) == f"{ASK} {SAY}<|endoftext|>"
    assert learned(tokenizer, text) == f" {SAY}<|endoftext|>"


def test_a_begin_token_comes_first_and_a_border_is_learned(tokenizer):
    made = BPETokenizer.train("abab" * 20, 259, special_tokens=["<|endoftext|>"], add_bos=True)
    example = completion_example(made, "a", "babab")
    assert example.ids[0] == example.ids[-1] == made.eos_token_id
    assert example.mask == [False] + [True] * (len(example.ids) - 1)
    plain = BPETokenizer.train("xy", 257)
    assert completion_example(plain, "a", "b") == ([97, 98], [False, True])  # no end token


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "line 2: Expecting"),
        ("[1]", r"line 2: must be an object, not \[1\]"),
        ({"text": "a"}, "line 2: needs messages, or prompt and completion; it has text"),
        ({"prompt": ASK, "completion": TALK[1:]}, "line 2: completion must be a text"),
        ({"prompt": ASK, "completion": ""}, "line 2: nothing to learn"),
        ({"messages": "hi"}, "line 2: messages must be a list"),
        ({"messages": TALK[:1]}, "line 2: no answer"),
    ],
)
def test_a_line_of_another_form_is_named(tokenizer, tmp_path, record, message):
    with pytest.raises(ValueError, match=message):
        read_examples(tokenizer, write(tmp_path / "x.jsonl", {"messages": TALK}, record))


def test_what_is_no_file(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError):
        read_examples(tokenizer, tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="are for conversation_examples"):
        read_examples(tokenizer, [TALK])
    with pytest.raises(ValueError, match="holds no example"):
        read_examples(tokenizer, write(tmp_path / "x.jsonl", ""))


def decomposed(text):
    return unicodedata.normalize("NFD", text)


@pytest.mark.parametrize(
    ("prompt", "completion", "first"),
    [
        ("Thủ đô Việt Nam: ", "Hà Nội", "Hà Nội"),
        ("é", "é", "é"),
        ("한국", "각", "각"),
        ("e", "\u0301x", "éx"),  # what the border joins is learned
        ("\u1100", "\u1161\u11a8", "각"),
        ("ba\u0302", "\u0323 c", "ậ c"),
        ("ab", "cd", "cd"),
        ("Å", "\u0344", "\u0308\u0301"),  # its normal form is two characters
    ],
)
def test_decomposed_text_is_the_same_example(prompt, completion, first):
    made = BPETokenizer.train("Hà Nội 각 ậ", 290, special_tokens=["<|endoftext|>"])
    composed = ForeignTokenizer(made.ranks, made.pattern, made.special_tokens, normalizer="NFC")
    example = completion_example(composed, prompt, completion)
    assert learned(composed, example) == first + "<|endoftext|>"
    whole = unicodedata.normalize("NFC", prompt + completion)
    assert composed.decode(example.ids) == whole + "<|endoftext|>"
    assert completion_example(composed, decomposed(prompt), decomposed(completion)) == example


def test_a_conversation_is_decomposed_anywhere(tokenizer):
    """In its words, in its reasoning, in what the template itself writes."""
    template = (
        "{% for m in messages %}À {{ m.reasoning }}|{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    template += "{% if add_generation_prompt %}À {% endif %}"
    talk = [{**TALK[0], "reasoning": "é"}, {**TALK[1], "content": "Hà Nội", "reasoning": "Việt"}]
    examples = []
    for form in ("NFC", "NFD"):
        special = tokenizer.special_tokens
        made = ForeignTokenizer(tokenizer.ranks, tokenizer.pattern, special, normalizer="NFC")
        made.chat_template = unicodedata.normalize(form, template)
        messages = [{k: unicodedata.normalize(form, v) for k, v in m.items()} for m in talk]
        examples.append(conversation_example(made, messages))
    assert examples[0] == examples[1]
    assert learned(made, examples[0]) == "Việt|Hà Nội<|endoftext|>"


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.NFKC()])
def test_a_wrapped_tokenizer_knows_its_places(normalizer):
    library = falcons()
    library.normalizer = normalizer
    wrapped = WrappedTokenizer(library)
    prompt, completion = decomposed("Việt "), decomposed("Nội é")
    example = completion_example(wrapped, prompt, completion)
    text = unicodedata.normalize("NFC", completion) if normalizer else completion
    assert learned(wrapped, example) == text + "<|endoftext|>"
    spelled = completion_example(wrapped, "a <|endoftext|> b", " <|endoftext|> c")
    assert len(spelled.ids) == len(spelled.mask)
    assert learned(wrapped, spelled) == " <|endoftext|> c<|endoftext|>"
    with pytest.raises(ValueError, match="writes another text than 'a'"):
        wrapped.offsets("a", [1, 2])
