"""Text cut by several patterns in turn: the words and the ids are those of `tokenizers`."""

import json
import pickle
import re
import time
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_texts import END, NATURAL
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from minillm.bpe import (
    GPT2_PATTERN,
    GPT4_PATTERN,
    BPETokenizer,
    PreTokenizer,
    make_pre_tokenizer,
)
from minillm.deeper.tokenizer.bulk import blocks, chunks_of, encode_iterable
from minillm.deeper.tokenizer.hf_json import DIGEST, to_hf, to_tiktoken
from minillm.deeper.tokenizer.patterns import DEEPSEEK_V3_PATTERNS, SMOLLM_PATTERNS
from minillm.deeper.tokenizer.vocabulary import prune
from minillm.deeper.tokenizer.wrapped import load_tokenizer

KNOWN = {"smollm": SMOLLM_PATTERNS, "deepseek": DEEPSEEK_V3_PATTERNS}
OTHER = {
    "leaves out": (r"\p{N}+", r"\p{L}+"),
    "looks ahead": (r"\d{1,3}(?=(?:\d{3})*(?!\d))", r"[^\n]+|\n+", GPT4_PATTERN),
    "deepseek coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "empty matches": ("a*", r"(?=l)"),
}
TRICKY = (
    " \n\r\t\x0b\x1c\x85\u00a0\u2028\u3000.,'!sSlLaAE12é中\u0301ſかカ・゛\u3099\u3040\u3097゠ー"
    "\x00\x01\u00ad½Ⅷ٣`{~<龦𠀀"
)
texts = (
    st.text(alphabet=TRICKY, max_size=30)
    | st.text(alphabet=[chr(code) for code in range(128)], max_size=40)
    | st.sampled_from([*NATURAL.values()])
).filter(lambda text: END not in text)  # hypothesis tries strings that stand in our own code


def splits(patterns):
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def learned(steps):
    """A tokenizer that Hugging Face's library trained, with these steps."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    tokenizer.train_from_iterator([*NATURAL.values()] * 2, trainer)
    return tokenizer


STEPS = {
    "smollm": [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "digits together": [pre_tokenizers.Digits(False), *splits([GPT4_PATTERN])],
    "split, then its own": [*splits([r"\p{N}"])[:1], pre_tokenizers.ByteLevel(False)],
    "deepseek": splits(DEEPSEEK_V3_PATTERNS),
    **{name: splits(patterns) for name, patterns in OTHER.items()},
}


@pytest.fixture(scope="module", params=STEPS)
def both(request, tmp_path_factory):
    """Ours, read from the file of `tokenizers`; theirs; and ours after a save, in three readers."""
    folder = tmp_path_factory.mktemp("several")
    theirs = learned(STEPS[request.param])
    theirs.save(str(folder / "tokenizer.json"))
    ours = BPETokenizer.load(folder)
    assert isinstance(load_tokenizer(folder), BPETokenizer)
    ours.save(folder / "again")
    again = BPETokenizer.load(folder / "again")
    assert again.pattern == ours.pattern and isinstance(ours.pattern, tuple)
    saved = Tokenizer.from_file(str(folder / "again" / "tokenizer.json"))
    fast = PreTrainedTokenizerFast.from_pretrained(folder / "again")
    return ours, theirs, [again.encode, to_hf(ours).encode, saved.encode, fast.encode]


@settings(max_examples=300)
@given(text=texts)
def test_ids_are_those_of_tokenizers(both, text):
    ours, theirs, readers = both
    ids = ours.encode(text)
    assert ids == theirs.encode(text).ids == ours.encode_ordinary(text)
    assert ours.encode_batch([text, "a 1"]) == [ids, ours.encode("a 1")]
    assert [*encode_iterable(ours, text)] == ids
    assert ours.decode(ids) == text
    for encode in readers:
        found = encode(text)
        assert getattr(found, "ids", found) == ids


def test_special_tokens_are_found_before_any_pattern_cuts(both):
    ours, theirs, _ = both
    text = f"a 12{END}  34{END}{END}中文 か"
    assert ours.encode(text, allowed_special="all") == theirs.encode(text).ids
    pruned, old_ids = prune(ours, ours.encode("the cat 12"))
    assert pruned.pattern == ours.pattern
    assert [old_ids[i] for i in pruned.encode("the cat 12")] == ours.encode("the cat 12")
    copy = pickle.loads(pickle.dumps(ours))
    assert copy.encode("a  12 か・カ") == ours.encode("a  12 か・カ")


@pytest.mark.parametrize("name", [*KNOWN, *OTHER])
@settings(max_examples=500)
@given(text=texts)
def test_words_are_those_of_tokenizers(name, text):
    patterns = KNOWN.get(name) or OTHER[name]
    pre = make_pre_tokenizer(patterns)
    steps = pre_tokenizers.Sequence(splits(patterns)[:-1])
    words = [text[start:end] for _, (start, end) in steps.pre_tokenize_str(text)]
    assert pre.words(text) == words and "".join(words) == text
    head, *tail = chunks_of(pre, text)
    assert pre.words(head) + [w for chunk in tail for w in pre.words(" " + chunk)] == words


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=400)
@given(pieces=st.lists(texts, max_size=4), size=st.integers(1, 30))
def test_blocks_end_with_a_word(name, pieces, size):
    pre, whole = make_pre_tokenizer(KNOWN[name]), re.compile("s12s")
    text = "s12s".join(pieces)
    stream = [text[i : i + 3] for i in range(0, len(text), 3)]
    with patch("minillm.deeper.tokenizer.bulk.KEEP", 4):
        found = list(blocks(pre, stream, whole=whole, size=size))

    def words(text):
        parts = re.split("(s12s)", text)
        return [w for i, p in enumerate(parts) for w in ([p] if i % 2 else pre.words(p))]

    assert "".join(found) == text
    assert [word for block in found for word in words(block)] == words(text)


def test_long_text_comes_in_many_blocks_only_where_a_cut_is_known_to_be_safe():
    text = ["word 12, か・カ. " * 10_000]
    for patterns in KNOWN.values():
        assert len(list(blocks(make_pre_tokenizer(patterns), text, size=1000))) > 20
    assert len(list(blocks(make_pre_tokenizer(OTHER["leaves out"]), text, size=1000))) == 1


def test_line_ends_may_be_spelled_or_stand_themselves():
    """In DeepSeek's own file they stand themselves; that must not cost the quick way."""
    raw = [p.replace(r"\r", "\r").replace(r"\n", "\n") for p in DEEPSEEK_V3_PATTERNS]
    assert raw != [*DEEPSEEK_V3_PATTERNS]
    one, other = make_pre_tokenizer(raw), make_pre_tokenizer(DEEPSEEK_V3_PATTERNS)
    assert one.published and other.published
    for text in NATURAL.values():
        assert one.words(text) == other.words(text)


def test_one_pattern_alone_is_that_pattern():
    assert make_pre_tokenizer([GPT2_PATTERN]).pattern == GPT2_PATTERN
    assert type(make_pre_tokenizer([GPT2_PATTERN])) is PreTokenizer


@pytest.mark.parametrize("ties", ["greatest", "lowest_ids"])
@pytest.mark.parametrize("patterns", KNOWN.values(), ids=KNOWN)
def test_training_counts_the_words_of_all_patterns(patterns, ties):
    texts = ["In 2024 the cats, 12 of them, sat.  か・カ 中文\n" * 9, *NATURAL.values()]
    ours = BPETokenizer.train(texts, 500, pattern=patterns, ties=ties)
    pre = make_pre_tokenizer(patterns)
    split = [word for text in texts for word in pre.words(text)]
    by_words = BPETokenizer.train(split, 500, pattern=r"(?s:.+)", ties=ties)
    assert ours.merges == by_words.merges and ours.pattern == patterns
    assert not any(re.search(rb"[0-9]{4}|[0-9][a-z]", token) for token in ours.ranks)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ((), "one string or several"),
        ((r"\p{N}", 5), "one string or several"),
        ((r"\p{N}", "("), "not a regular expression"),
        (("(a)", "b"), "captures groups"),
        (("a{100000000}", "b"), "too much memory"),
    ],
)
def test_bad_patterns_are_refused(patterns, message):
    with pytest.raises(ValueError, match=message):
        BPETokenizer({bytes([i]): i for i in range(256)}, patterns)


def test_a_pattern_among_several_that_takes_forever_is_stopped():
    pre = make_pre_tokenizer((r"\p{N}", r"(?:\w|\w\w)+$|."))
    assert pre.words("ab!c1") == ["a", "b", "!", "c", "1"]
    start = time.process_time()
    with pytest.raises(ValueError, match=r"the pattern .* takes forever on '1aaaa"):
        pre.words("1" + "a" * 41 + "!")
    assert time.process_time() - start < 600  # one second; the whole search takes years


def test_tiktoken_has_one_pattern():
    several = BPETokenizer({bytes([i]): i for i in range(256)}, SMOLLM_PATTERNS)
    with pytest.raises(ValueError, match=r"one pattern, and this tokenizer by \('\\\\p\{N\}', "):
        to_tiktoken(several)


@pytest.mark.parametrize(
    "step",
    [
        {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Removed", "invert": True},
        {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": True},
        {"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": False},
        {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "Digits", "individual_digits": 5},
    ],
)
def test_steps_that_we_cannot_follow_are_refused(step, tmp_path):
    several = BPETokenizer({bytes([i]): i for i in range(256)}, SMOLLM_PATTERNS)
    several.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    del content["model"][DIGEST]
    content["pre_tokenizer"]["pretokenizers"].insert(1, step)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"not supported|should be true or false"):
        BPETokenizer.load(tmp_path)
