"""What both dialects read alike: `tokenizers`, which runs Oniguruma, cuts every text as we do."""

import json

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_folders import byte_level
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

from minillm.bpe import PATTERNS, BPETokenizer
from minillm.deeper.tokenizer.hf_json import to_hf, to_tiktoken
from minillm.deeper.tokenizer.oniguruma import _NAMES, read_alike
from minillm.deeper.tokenizer.patterns import DEEPSEEK_V3_PATTERNS, SMOLLM_PATTERNS
from minillm.deeper.tokenizer.wrapped import WrappedTokenizer, load_tokenizer

# tiktoken 0.14's, which is OpenAI's; o200k's; those of files that are published
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS}*{SMALL}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{LETTERS}+{SMALL}*"
    rf"{ENDING}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAME = [
    *(
        O200K,
        r"[\p{Han}]+|\p{N}{1,3}",
        r"[一-龥぀-ゟ]+",
        r"\d{1,3}(?=(?:\d{3})*(?!\d))",
        ".",
        r"[^\n]+",
    ),
    *(
        r"\S+|\s+",
        r"a++b?+c*+",
        "x{2,3}?",
        "(?>ab|a)c",
        r"(?<= )\p{L}+",
        r"(?<!\p{N})\p{N}",
        "[a-]",
    ),
    *(
        r"[!-/\[\]^`~]",
        r"\u4e00|\x41|\t|\\",
        r"\p{L}[\p{M}']*",
        "(?i:'[sdmt]|ve)",
        "a{,2}b",
        "[-a]+",
    ),
    *(r"[^\S\r\n]+", r"\P{L}", "(?:ab)?c|[^c]", "a*", "(?=l)", " ?é+"),
]
THEIRS = [CL100K, r"\p{N}{2}+", "a{2}?b", r"\s+$|\S+$", r"^\S+", r"\S+\Z", r"\S+\z", r"^ |a$"]
OURS = [*THEIRS, r"\w+", r"[\w']+|\W", r"[^\w\s]+|\s", r"\\w+|[\\w]"]
UNLIKE = r"""
[a&&b]  [\p{L}&&[^\p{Han}]]+  [a[bc]]  [[:alpha:]]+  []a]  [\w-z]  [\h]  [\b]  [a--b]  [a||b]
[a~~b]  \h+  \H  \R  \X  \bx  \Bx  \Gx  \Kx  \N  \O  \y  \M  \0  \xe9  \pL  \p{^L}  \p{Cn}  \p{Foo}
\p{L  (?i)a  (?i:st)  (?i:i)  (?i:\p{Lu})
(?m:.)  (?s:.)  (?~ab)  (a)\1  (a)  (?<n>a)  (?#c)a  (?<=a+)b
(?:a*)*b  a**  a+?+  a|  (?:|a)b*  a*?  a{e<=1}  {a  \L<a>
""".split()
TRICKY = "abcxlSsſKiİ'\"&-_[]^`~\\!wL ,\n\r\t\x0b\x85\u00a0\u200c\u200d\u2028"
TRICKY += "0123½²Ⅷé\u0301ßﬆﬀ中文龥かカ゠"
texts = st.text(TRICKY, max_size=24) | st.text("ab12 \n'", max_size=24)


def words_of_the_library(pattern, text):
    found = pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)
    return [word for word, _ in found]


def words(pattern, text):
    return [word for word in regex.split(f"({pattern})", text) if word]


@settings(max_examples=60)
@given(text=texts)
@pytest.mark.parametrize("pattern", SAME)
def test_what_stays_as_it_is_means_the_same(pattern, text):
    assert read_alike(pattern, theirs=True) == pattern == read_alike(pattern, theirs=False)
    assert words(pattern, text) == words_of_the_library(pattern, text)


@settings(max_examples=60)
@given(text=texts)
@pytest.mark.parametrize("pattern", THEIRS)
def test_what_the_library_means_in_our_spelling(pattern, text):
    alike = read_alike(pattern, theirs=True)
    cut = words_of_the_library(pattern, text)
    assert alike != pattern and words(alike, text) == cut == words_of_the_library(alike, text)
    assert read_alike(alike, theirs=True) == alike == read_alike(alike, theirs=False)


@settings(max_examples=60)
@given(text=texts)
@pytest.mark.parametrize("pattern", OURS)
def test_what_we_mean_in_the_librarys_spelling(pattern, text):
    alike = read_alike(pattern, theirs=False)
    cut = words(pattern, text)
    assert words(alike, text) == cut == words_of_the_library(alike, text)
    assert read_alike(alike, theirs=True) == alike == read_alike(alike, theirs=False)


@pytest.mark.parametrize("pattern", UNLIKE)
def test_the_rest_is_refused(pattern):
    for theirs in (True, False):
        with pytest.raises(ValueError, match=r"read differently|may match nothing"):
            read_alike(pattern, theirs=theirs)


def test_published_patterns_are_read_alike():
    for pattern in [*PATTERNS.values(), *SMOLLM_PATTERNS, *DEEPSEEK_V3_PATTERNS]:
        assert read_alike(pattern, theirs=True) == pattern == read_alike(pattern, theirs=False)


def test_the_sets_have_the_same_characters():
    """All that Oniguruma's Unicode has but U+0295, which a later one made a letter without case."""
    known = [
        c for c in map(chr, range(0x110000)) if not "\ud800" <= c <= "\udfff" and c != "\u0295"
    ]

    def found(pattern):
        split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
        parts = ("".join(known[i : i + 40000]) for i in range(0, len(known), 40000))
        return {c for part in parts for word, _ in split.pre_tokenize_str(part) for c in word}

    known = sorted(found(r"\P{Cn}"))
    whole = "".join(known)
    word = read_alike(r"\w", theirs=False)
    names = [rf"\p{{{name}}}" for name in _NAMES.split("|")]
    for pattern in [*names, r"\P{L}", r"\s", r"\S", r"\d", r"\D", ".", word]:
        assert found(pattern) == set("".join(regex.findall(pattern, whole))), pattern
    assert regex.findall(word, whole) == regex.findall(r"\w", whole)
    for letter in "abcdefghjklmnopqrstuvwxyzABCDEFGHJKLMNOPQRSTUVWXYZ":
        for pattern in (f"(?i:{letter})", f"(?i:[{letter}])"):
            assert read_alike(pattern, theirs=True) == pattern
            assert found(pattern) == {*regex.findall(pattern, whole)}


def write(folder, *patterns, how="isolated", invert=False, normalizer=None):
    steps = [pre_tokenizers.Split(Regex(p), how, invert) for p in patterns]
    tokenizer = byte_level([*steps, pre_tokenizers.ByteLevel(False, use_regex=False)], ("<|end|>",))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


TEXTS = [
    "1234567 in 2026\n\n  it's  \n",
    "aaa  bb \n c$",
    "中文 ab\r\n12",
    "x\n",
    "l a\nb",
    "",
    "\n \n",
]


@pytest.mark.parametrize("pattern", [*SAME, *THEIRS])
def test_files_with_such_patterns_are_ours(pattern, tmp_path):
    theirs = write(tmp_path, pattern)
    ours = load_tokenizer(tmp_path)
    assert isinstance(ours, BPETokenizer)
    ours.save(tmp_path / "again")
    again, spelled = load_tokenizer(tmp_path / "again"), to_hf(ours)
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids == again.encode(text) == spelled.encode(text).ids


@pytest.mark.parametrize(
    "pattern",
    [
        r"[\p{L}&&[^\p{Han}]]+|.",
        r"\h+",
        r"\w+",
        r"\b",
        "(?i)IT",
        "[[:alpha:]]+",
        r"(\d{3})+",
        r"\R",
    ],
)
def test_files_with_other_patterns_are_the_librarys(pattern, tmp_path):
    theirs = write(tmp_path, pattern)
    ours = load_tokenizer(tmp_path)
    assert isinstance(ours, WrappedTokenizer)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize("how", ["isolated", "removed", "merged_with_previous", "contiguous"])
@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize("pattern", [r"\p{N}{1,3}", r"\s+", PATTERNS["gpt4"], O200K])
def test_gaps_between_words_are_never_an_error(pattern, how, invert, tmp_path):
    theirs = write(tmp_path, pattern, how=how, invert=invert)
    ours = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids


def test_digits_alone_leave_gaps(tmp_path):
    level = pre_tokenizers.ByteLevel(False, use_regex=False)
    for digits in (True, False):
        theirs = byte_level([pre_tokenizers.Digits(digits), level], ("<|end|>",))
        theirs.save(str(tmp_path / "tokenizer.json"))
        ours = load_tokenizer(tmp_path)
        assert isinstance(ours, BPETokenizer)
        assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text).ids for text in TEXTS]


def test_tiktoken_gets_the_gaps_as_words(tmp_path):
    write(tmp_path, r"\p{N}{1,3}")
    ours = load_tokenizer(tmp_path)
    theirs = to_tiktoken(ours)
    assert [theirs.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_what_we_write_the_library_reads_as_we_do(tmp_path):
    ranks = {bytes([i]): i for i in range(256)} | {b"12": 256, b"34": 257}
    for pattern in (CL100K, r"\w+|[^\w\s]+|\s+", [r"\p{N}{1,3}+", r"^\s+"]):
        own = BPETokenizer(ranks, pattern)
        own.save(tmp_path)
        again, theirs = BPETokenizer.load(tmp_path), to_hf(own)
        for text in [*TEXTS, "1234", "12\u200d34²"]:
            assert own.encode(text) == again.encode(text) == theirs.encode(text).ids
    (tmp_path / "tokenizer.json").unlink()
    for pattern in (r"\bx|.|\n", r"(?s:.+)", [r"\p{N}", "(?i)st"]):
        own = BPETokenizer(ranks, pattern)
        for write_it in (own.save, lambda _, own=own: to_hf(own)):
            with pytest.raises(ValueError, match=r"read differently by the library tokenizers"):
                write_it(tmp_path)
        assert not (tmp_path / "tokenizer.json").exists()


NONE = normalizers.Sequence([])
NFC = normalizers.NFC()


@pytest.mark.parametrize(
    ("normalizer", "name"),
    [(NONE, None), (normalizers.Sequence([NONE]), None), (normalizers.Sequence([NFC]), "NFC")],
)
def test_a_sequence_of_no_normalizers_is_none(normalizer, name, tmp_path):
    theirs = write(tmp_path, *DEEPSEEK_V3_PATTERNS, normalizer=normalizer)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    if name is None:  # as DeepSeek's file has them
        content["added_tokens"][0]["normalized"] = True
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ours = load_tokenizer(tmp_path)
    assert isinstance(ours, BPETokenizer) and ours.normalizer == name
    for text in [*TEXTS, "e\u0301"]:
        assert ours.encode(text) == theirs.encode(text).ids
