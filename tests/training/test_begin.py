"""Which token begins a document: the tokenizer's, decided once, for rows, windows and measures."""

import json
import math

import pytest
import torch
from tokenizer_folders import write

from minillm.beyond.answers.sft import document_example
from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.tokenizer.wrapped import WrappedTokenizer, load_tokenizer
from minillm.deeper.training.documents import DocumentBatches, TextDocuments
from minillm.deeper.training.scoring import evaluate_text, token_log_probs
from minillm.model import CausalLM
from minillm.stories.curriculum import ExactBatches
from minillm.stories.language import StoryLanguage
from minillm.training import begin_id, document_row, evaluate

TEXTS = ["the cat sat on the mat", "a dog ran to the hat", "the hat sat"]
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
OWN = {  # names, add_bos -> which begins
    "adds its begin token": ([BEGIN, END], True, BEGIN),
    "has one and does not add it": ([BEGIN, END], False, END),
    "has none": ([END], False, END),
    "adds its end token": ([END], True, END),
}
WRAPPED = {"llama-2": "<s>", "gemma": "<bos>", "falcon": "<|endoftext|>", "silent": "</s>"}


@pytest.fixture(params=[*OWN, *WRAPPED])
def tokenizer(request, tmp_path):
    """A tokenizer, with the name of the token that begins its documents as `expected`."""
    name = request.param
    if name in OWN:
        special, add_bos, expected = OWN[name]
        made = BPETokenizer.train(TEXTS * 9, 280, special_tokens=special, add_bos=add_bos)
    else:
        folder = write(tmp_path, "llama-2" if name == "silent" else name)
        if name == "silent":  # it has <s>, and its file adds nothing
            path = folder / "tokenizer.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
        made, expected = load_tokenizer(folder), WRAPPED[name]
        assert isinstance(made, WrappedTokenizer)
    made.expected = made.special_tokens[expected]
    return made


def test_it_is_what_encode_puts_first_else_the_end_token(tokenizer):
    assert begin_id(tokenizer) == tokenizer.expected
    assert [begin_id(tokenizer)] == (tokenizer.encode("")[:1] or [tokenizer.eos_token_id])
    other = begin_id(tokenizer, 7)  # of an end token that the tokenizer does not know of
    assert other == (tokenizer.expected if tokenizer.add_bos else 7)


def test_measures_begin_with_it(tokenizer):
    config = ModelConfig(tokenizer.vocab_size, 32, 1, 2, 48, initializer_range=0.3)
    model, end = CausalLM(config, seed=1), tokenizer.eos_token_id
    rows = [[tokenizer.expected, *tokenizer.encode_ordinary(t), end] for t in TEXTS]
    found = [-token_log_probs(model, torch.tensor([row]))[0] / math.log(2) for row in rows]
    sizes = [len(text) for text in TEXTS]
    bits = float(sum(x.sum() for x in found)) / sum(sizes)
    assert evaluate(model, tokenizer, TEXTS) == pytest.approx(bits, rel=1e-5)
    for text, x, size in zip(TEXTS, found, sizes, strict=True):
        without_end = float(x[:-1].sum()) / size
        assert evaluate_text(model, tokenizer, text) == pytest.approx(without_end, rel=1e-5)


def test_rows_begin_with_it():
    assert document_row([5, 6], 1) == document_row([1, 5, 6], 1) == [1, 5, 6, 1]
    assert document_row([5, 6], 1, 2) == document_row([2, 5, 6], 1, 2) == [2, 5, 6, 1]
    assert document_row([1], 1, 2) == [2, 1, 1] and document_row([], 1, 2) == [2, 1]
    assert document_example([5], 1, 2) == ([2, 5, 1], [False, True, True])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_each_document_of_a_row_has_its_own(layout):
    documents = TextDocuments(["a", "bb", "ccc", "dddd"], lambda text: [ord(x) for x in text])
    source = DocumentBatches(documents, 2, 12, eos_token_id=1, bos_token_id=2, layout=layout)
    seen, lengths = set(), set()
    for _ in range(40):
        inputs, targets = next(source)
        for given, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
            row = [given[0], *(i for i in wanted if i != -100)]
            assert len(row) <= 13 and row[0] == 2 and row[-1] == 1
            parts = "".join(map(chr, row)).split("\1")[:-1]
            assert all(part[0] == "\2" and "\2" not in part[1:] for part in parts)
            seen |= {part[1:] for part in parts}
            lengths.add(len(parts))
    assert seen == {"a", "bb", "ccc", "dddd"} and (max(lengths) > 1) == (layout == "packed")


def test_a_run_goes_on_only_with_the_same_begin_token():
    documents = TextDocuments(["a"], lambda text: [3])
    old, new = (DocumentBatches(documents, 1, 4, eos_token_id=1, bos_token_id=b) for b in (None, 2))
    assert "bos_token_id" not in old.state_dict()  # as older versions wrote it
    with pytest.raises(ValueError, match="bos_token_id: saved None, now 2"):
        new.load_state_dict(old.state_dict())
    with pytest.raises(ValueError, match="bos_token_id must be the id of a token, not '<s>'"):
        DocumentBatches(documents, 1, 4, eos_token_id=1, bos_token_id="<s>")


def test_exact_targets_stand_at_the_same_tokens():
    language = StoryLanguage("en")
    texts = language.corpus(12, seed=0)
    tokenizer = BPETokenizer.train(texts, 400, special_tokens=[BEGIN, END], add_bos=True)
    end, found = tokenizer.eos_token_id, []
    for begin, layout in ((None, "padded"), (begin_id(tokenizer), "packed")):
        documents = TextDocuments(texts, tokenizer.encode_ordinary)
        how = {"eos_token_id": end, "bos_token_id": begin, "layout": layout}
        source = ExactBatches(DocumentBatches(documents, 2, 600, **how), language, tokenizer)
        stories = {}
        for _ in range(20):
            inputs, probs = next(source)
            for ids, row in zip(inputs.tolist(), probs, strict=True):
                start = 0
                while begin in ids[start:] or (begin is None and start == 0):
                    start += 1 if begin is None else ids[start:].index(begin) + 1
                    size = ids[start:].index(end) if end in ids[start:] else len(ids) - start
                    story = row[start - 1 : start + size]  # its tokens, and the end token
                    stories[tokenizer.decode(ids[start : start + size])] = story
        found.append(stories)
    same = found[0].keys() & found[1].keys()
    assert len(same) == len(texts)
    for text in same:
        assert torch.equal(found[0][text], found[1][text])
    assert any(((x > 0) & (x < 1)).any() for x in found[0].values())


def test_a_wrapped_tokenizer_can_be_told_to_add_one(tmp_path):
    """Its file says so to others; what stood around a text stays."""
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(write(tmp_path, "falcon"))
    plain = tokenizer.encode("A cat")
    with pytest.raises(ValueError, match="add_bos can be set to True, with a begin token"):
        tokenizer.add_bos = True
    tokenizer.bos_token, tokenizer.add_bos = tokenizer.eos_token, True
    ids = [tokenizer.eos_token_id, *plain]
    assert tokenizer.encode("A cat") == ids and tokenizer.encode_ordinary("A cat") == plain
    tokenizer.save(tmp_path / "u")
    again = load_tokenizer(tmp_path / "u")
    assert again.add_bos and again.encode("A cat") == ids and begin_id(again) == ids[0]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "u")
    assert theirs.encode("A cat") == ids and theirs.bos_token_id == ids[0]
