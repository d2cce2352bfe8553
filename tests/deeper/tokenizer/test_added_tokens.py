"""Which added token is found where several could be: as the library tokenizers finds them."""

import random

import pytest
from tokenizer_folders import SMALL, plain_byte_level
from tokenizers import AddedToken, Tokenizer, normalizers

from minillm.bpe import BPETokenizer
from minillm.deeper.tokenizer.wrapped import WrappedTokenizer, load_tokenizer

each_kind = pytest.mark.parametrize("kind", SMALL)


def opened(tokenizer: Tokenizer, folder):
    tokenizer.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def check(ours, library: Tokenizer, texts):
    blind = Tokenizer.from_str(library.to_str())
    blind.encode_special_tokens = True
    for text in texts:
        ids = library.encode(text).ids
        assert ours.encode(text, allowed_special="all") == ids, text
        assert ours.encode_ordinary(text) == blind.encode(text).ids, text
        assert ours.decode(ids) == library.decode(ids, skip_special_tokens=False)
        special = {library.id_to_token(i) for i in ids} & {*ours.special_tokens}
        if all(name not in text for name in special):  # <unk> stands for what is unknown
            assert ours.encode(text) == ids, text
        else:
            with pytest.raises(ValueError, match="spells the special token"):
                ours.encode(text)
            assert ours.encode(text, allowed_special=special) == ids


CASES = {
    "a special token inside an added one": (
        [AddedToken("<|im_start|>user", normalized=True)], ["<|im_start|>"],
        "<|im_start|>user the cat",
    ),
    "an added one that begins further left": (
        [AddedToken("abc", normalized=True), AddedToken("bcd", normalized=False)], [], "abcd bcd",
    ),
    "an added one that ends further right": (
        [AddedToken("bcd", normalized=True), AddedToken("abc", normalized=False)], [], "abcd bcd",
    ),
    "one inside the other": (
        [AddedToken("b", normalized=True), AddedToken("abc", normalized=False)], [], "abcb b",
    ),
    "the other way round": (
        [AddedToken("abc", normalized=True), AddedToken("b", normalized=False)], [], "abc ac",
    ),
    "both alike, the longest": (
        [AddedToken("<a>", normalized=False), AddedToken("<a><b>", normalized=False)], [], "<a><b>",
    ),
    "both normalized, the leftmost": (
        [AddedToken("abc", normalized=True), AddedToken("bcde", normalized=True)], [], "abcde",
    ),
    "a special one that only an added one holds": (
        [AddedToken("x<s>y", normalized=False)], ["<s>"], "x<s>y <s> x<s>",
    ),
    "a special one that is normalized": (
        [AddedToken("<s>", normalized=True, special=True), AddedToken("<", normalized=False)], [],
        "a<s>b",
    ),
    "the space on the left": ([AddedToken("<m>", lstrip=True, normalized=False)], [], "a  <m> b"),
    "the space on the right": ([AddedToken("<m>", rstrip=True, normalized=False)], [], "a <m>  b"),
    "two that take the same space": (
        [AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True)], [], "a <r>  <l> b",
    ),
    "a word of its own": (
        [AddedToken("cat", single_word=True, normalized=False)], [], "cat cats the cat, bobcat",
    ),
}  # fmt: skip


@each_kind
@pytest.mark.parametrize("name", CASES)
def test_the_token_that_the_library_finds(kind, name, tmp_path):
    added, special, text = CASES[name]
    library = SMALL[kind]()
    library.add_tokens(added)
    library.add_special_tokens(special)
    check(opened(library, tmp_path), library, [text, f" {text}{text}"])


@each_kind
@pytest.mark.parametrize("seed", range(20))
def test_tokens_drawn_at_random(kind, seed, tmp_path):
    draw = random.Random(seed)
    library = SMALL[kind]()
    plain = seed % 2  # without the flags that only the library knows
    for _ in range(draw.randint(2, 6)):
        flags = {} if plain else {f: draw.random() < 0.2 for f in ("lstrip", "rstrip")}
        name = "".join(draw.choices("ab<", k=draw.randint(1, 4)))
        token = AddedToken(name, normalized=draw.random() < 0.5, special=draw.random() < 0.3)
        library.add_tokens(
            [AddedToken(name, normalized=token.normalized, special=token.special, **flags)]
        )
    texts = ["".join(draw.choices("ab< c", k=draw.randint(1, 12))) for _ in range(60)]
    check(opened(library, tmp_path), library, texts)


def test_files_without_overlaps_stay_ours(tmp_path):
    library = plain_byte_level()
    library.add_tokens(["<tool>", "ab"])  # normalized, as add_tokens makes them
    library.add_special_tokens(["<|im_start|>", "cd"])
    ours = opened(library, tmp_path)
    assert isinstance(ours, BPETokenizer)
    check(ours, library, ["<tool>ab cd<|im_start|>abcd", "cdab"])
    library.add_tokens(["bc"])
    assert isinstance(opened(library, tmp_path), WrappedTokenizer)
    with pytest.raises(ValueError, match="added token 'bc' is normalized and overlaps"):
        BPETokenizer.load(tmp_path)


@each_kind
@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_an_end_token_keeps_its_flags(kind, flag, tmp_path):
    """Phi-3's <|end|> takes the space after it."""
    library = SMALL[kind]()
    library.add_tokens([AddedToken("<|end|>", normalized=False, **{flag: True})])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    ours = opened(library, tmp_path)
    assert ours.eos_token == "<|end|>" in ours.special_tokens
    for text in ("the cat <|end|>  mat", "a<|end|>b"):
        assert ours.encode(text, allowed_special="all") == library.encode(text).ids


def test_what_a_normalizer_makes_of_a_text_is_searched_second(tmp_path):
    library = plain_byte_level(normalizer=normalizers.Lowercase())
    library.add_tokens([AddedToken("Tool", normalized=True), AddedToken("CAT", normalized=False)])
    ours = opened(library, tmp_path)
    check(ours, library, ["a TOOL tool Tool CAT cat Cat", "toolCAT CATTOOL"])
