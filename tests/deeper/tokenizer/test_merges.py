"""The trainer against Hugging Face's and a naive one, and within its bounds of time and memory."""

import json
import random
import sysconfig
import time
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from minillm.bpe import GPT2_PATTERN, GPT4_PATTERN, BPETokenizer, PreTokenizer
from minillm.deeper.tokenizer.hf_json import unspell
from minillm.deeper.tokenizer.merges import byte_alphabet, count_words, learn_merges
from minillm.stories.language import StoryLanguage


def sources():
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("[a-d]*.py"))][:12]


CORPORA = {
    "english stories": lambda: StoryLanguage("en").corpus(200, 1),
    "chinese stories": lambda: StoryLanguage("zh").corpus(200, 1),
    "python sources": sources,
}


def theirs(texts, vocab_size, pattern):
    """The merges of Hugging Face's trainer, as bytes."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(unspell(left), unspell(right)) for left, right in merges]


@pytest.mark.parametrize("corpus", CORPORA)
def test_merges_equal_hugging_faces_with_its_rule_for_ties(corpus):
    texts = CORPORA[corpus]()
    for vocab_size, pattern in ((300, GPT2_PATTERN), (800, GPT4_PATTERN), (3000, GPT4_PATTERN)):
        trained = BPETokenizer.train(texts, vocab_size, pattern=pattern, ties="lowest_ids")
        expected = theirs(texts, vocab_size, pattern)
        assert trained.merges == expected
        assert len(expected) == vocab_size - 256 or corpus != "python sources"


def naive(words, num_merges, best):
    """Count everything again after each merge."""
    words = [([bytes([b]) for b in word.encode()], count) for word, count in words.items()]
    merges = []
    for _ in range(num_merges):
        pairs = Counter()
        for parts, count in words:
            for pair in pairwise(parts):
                pairs[pair] += count
        if not pairs:
            break
        merges.append(pair := best(pairs, merges))
        for parts, _ in words:
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == pair:
                    parts[i : i + 2] = [parts[i] + parts[i + 1]]
                i += 1
    return merges


def greatest(pairs, _):
    return max(pairs, key=lambda pair: (pairs[pair], pair))


def lowest_ids(pairs, merges):
    tokens = [bytes([b]) for b in byte_alphabet("lowest_ids")] + [a + b for a, b in merges]
    ids = {token: i for i, token in enumerate(tokens)}
    return min(pairs, key=lambda pair: (-pairs[pair], ids[pair[0]], ids[pair[1]]))


words = st.dictionaries(st.text("abé", min_size=1, max_size=12), st.integers(1, 5), max_size=12)


@settings(max_examples=400)
@given(words=words, num_merges=st.integers(0, 25))
def test_merges_equal_the_naive_trainers(words, num_merges):
    assert learn_merges(words, num_merges) == naive(words, num_merges, greatest)
    found = learn_merges(words, num_merges, ties="lowest_ids")
    assert found == naive(words, num_merges, lowest_ids)


def test_the_example_of_the_notebook():
    tokenizer = BPETokenizer.train("aaabdaaabac", 259)
    assert tokenizer.encode("aaabdaaabac") == [258, 100, 258, 97, 99]
    assert tokenizer.merges == [(b"a", b"a"), (b"aa", b"a"), (b"aaa", b"b")]


def test_one_long_word_takes_no_quadratic_time():
    rng = random.Random(0)
    word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=1_000_000))
    start = time.process_time()
    tokenizer = BPETokenizer.train(word, 1000)
    assert time.process_time() - start < 600  # it takes three; hours in the square
    assert len(tokenizer) == 1000


def test_memory_is_bounded_by_distinct_words_not_by_text():
    line = "the quick brown fox jumps over the lazy dog, again and again\n" * 200
    tracemalloc.start()
    tokenizer = BPETokenizer.train((line for _ in range(300)), 280)  # 4 MB
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(tokenizer) == 280
    assert peak < 2e6


def test_large_corpora_are_counted_in_portions(monkeypatch):
    texts = [f"word{i % 7} and more, " * 5 for i in range(50)]
    pre = PreTokenizer(GPT4_PATTERN)
    expected = Counter(word for text in texts for word in pre.words(text))
    monkeypatch.setattr("minillm.deeper.tokenizer.merges.PORTION", 100)
    assert count_words(texts, pre) == expected


def test_special_tokens_separate_texts_and_are_not_learnt():
    texts = ["ab ab<|end|>ab ab"] * 9
    words = count_words(texts, PreTokenizer(GPT4_PATTERN), ["<|end|>"])
    assert words == {"ab": 18, " ab": 18}
    assert len(BPETokenizer.train(texts, 300, special_tokens=["<|end|>"])) == 259


def test_vocabulary_counts_special_tokens_and_ends_when_pairs_run_out():
    assert len(BPETokenizer.train("abcd" * 9, 258, special_tokens=["<a>"])) == 258
    assert BPETokenizer.train("ab", 5000).merges == [(b"a", b"b")]
    assert BPETokenizer.train([], 300).merges == []
    with pytest.raises(ValueError, match="257 < 256 bytes \\+ 2"):
        BPETokenizer.train("ab", 257, special_tokens=["<a>", "<b>"])
    with pytest.raises(ValueError, match="'first'"):
        BPETokenizer.train("ab", 300, ties="first")


def test_progress_is_shown_only_on_request(capsys):
    BPETokenizer.train("abab cdcd", 258)
    assert capsys.readouterr().err == ""
    BPETokenizer.train("abab cdcd", 258, progress=True)
    assert "merges: 100%" in capsys.readouterr().err
