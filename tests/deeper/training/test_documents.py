"""Whole documents: each once, in an order that resumes anywhere."""

import hashlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_runs import END, Documents, Language, Letters

from minillm.bpe import BPETokenizer
from minillm.cli.corpus import stories
from minillm.deeper.training.documents import DocumentBatches, StoryDocuments, TextDocuments
from minillm.deeper.training.token_file import FileDocuments, TokenDataset
from minillm.stories.language import StoryLanguage


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_document_batches_hold_whole_documents_once(layout):
    source = DocumentBatches(Documents(), 4, 48, eos_token_id=END, layout=layout, shuffle_buffer=3)
    found, widths = [], set()
    for _ in range(40):
        x, y = next(source)
        assert x.shape == y.shape
        widths.add(x.shape)
        for inputs, targets in zip(x.tolist(), y.tolist(), strict=True):
            size = sum(t != -100 for t in targets)
            assert inputs[0] == END and targets[size - 1] == END  # begins and ends with documents
            assert targets[: size - 1] == inputs[1:size]
            assert targets[size:] == [-100] * (len(targets) - size)
            documents = "|".join(map(str, targets[:size])).split(f"|{END}")[:-1]
            found += [d.strip("|") for d in documents]
            assert len(documents) == 1 or layout == "packed"
    reference = Documents()
    expected = ["|".join(map(str, next(reference))) for _ in range(source.documents.index)]
    missing = list(expected)
    for document in found:
        missing.remove(document)  # each drawn document at most once, none invented
    pending = [r for b in source._buffer[source._taken :] for r in b] + source._carry
    assert sum(sum(t == END for t in row) - 1 for row in pending) == len(missing)
    if layout == "packed":
        assert widths == {torch.Size([4, 48])}
    else:
        assert max(rows * width for rows, width in widths) <= 4 * 48 * 1.5


@pytest.mark.parametrize("layout", ["padded", "packed"])
@given(taken=st.integers(0, 25))
def test_document_batches_resume_anywhere(layout, taken):
    def fresh():
        return DocumentBatches(
            Documents(), 3, 48, eos_token_id=END, layout=layout, shuffle_buffer=4
        )

    first, second = fresh(), fresh()
    for _ in range(taken):
        next(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(12):
        for a, b in zip(next(first), next(second), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_documents_that_bring_their_begin_token_get_no_other(layout):
    class Begun(Documents):
        def __next__(self):
            return [END, *super().__next__()]

    first, second = (
        DocumentBatches(documents, 4, 48, eos_token_id=END, layout=layout, shuffle_buffer=3)
        for documents in (Documents(), Begun())
    )
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(next(first), next(second), strict=True))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_no_document_waits_for_ever(layout):
    """Carried rows are dealt soon, the longest ones too."""
    source = DocumentBatches(Documents(), 4, 48, eos_token_id=END, layout=layout, shuffle_buffer=2)
    given = set()
    for _ in range(100):
        for row in next(source)[1].tolist():
            text = "|".join(map(str, (t for t in row if t != -100)))
            given |= {d.strip("|") for d in text.split(f"|{END}")}
    reference = Documents()
    first = {"|".join(map(str, next(reference))) for _ in range(source.documents.index - 60)}
    assert len(first) > 400 and first <= given


@pytest.mark.parametrize(
    ("layout", "expected"), [("padded", "237d919f40a82e46"), ("packed", "3f59d8bd80f8acc1")]
)
def test_the_order_of_documents_is_that_of_older_versions(layout, expected):
    """Or a run that was begun with one version could not go on exactly with the next."""
    source = DocumentBatches(Documents(), 4, 48, eos_token_id=END, layout=layout, shuffle_buffer=3)
    digest = hashlib.sha256()
    for _ in range(50):
        inputs, targets = next(source)
        digest.update(json.dumps([inputs.tolist(), targets.tolist()]).encode())
    assert digest.hexdigest()[:16] == expected


def test_document_batches_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="rows of 8"):
        next(DocumentBatches(Documents(), 4, 8, eos_token_id=END))
    with pytest.raises(ValueError, match="layout='loose'"):
        DocumentBatches(Documents(), 4, 8, eos_token_id=END, layout="loose")
    source = DocumentBatches(Documents(), 4, 48, eos_token_id=END)
    other = DocumentBatches(Documents(), 5, 48, eos_token_id=END)
    with pytest.raises(ValueError, match="batch_size: saved 4, now 5"):
        other.load_state_dict(source.state_dict())


class Arrays(Documents):
    """Documents as arrays of numpy."""

    def __next__(self):
        return np.array(super().__next__(), dtype=np.uint16)


def test_documents_may_be_arrays():
    plain, arrays = (DocumentBatches(d(), 4, 48, eos_token_id=END) for d in (Documents, Arrays))
    for _ in range(20):
        for a, b in zip(next(plain), next(arrays), strict=True):
            assert torch.equal(a, b)
    assert json.dumps(arrays.state_dict()) == json.dumps(plain.state_dict())  # rows carried too


def test_file_documents_shuffle_each_epoch_anew(tmp_path):
    data = TokenDataset.write(
        tmp_path / "t.npy", ([i, i] for i in range(1, 9)), vocab_size=10, eos_token_id=0
    )
    stream = FileDocuments(data, seed=5)
    epochs = [[next(stream) for _ in range(8)] for _ in range(3)]
    assert all(sorted(e) == [[i, i] for i in range(1, 9)] for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    other = FileDocuments(data, seed=5)
    other.load_state_dict({"seed": 5, "tokens": 24, "index": 13})
    assert [next(other) for _ in range(3)] == epochs[1][5:]
    with pytest.raises(ValueError, match="seed: saved 4, now 5"):
        other.load_state_dict({"seed": 4, "tokens": 24, "index": 0})
    with pytest.raises(ValueError, match="eos_token_id"):
        FileDocuments(TokenDataset(tmp_path / "t.npy"))
    with pytest.raises(ValueError, match="no whole document"):
        FileDocuments(TokenDataset(tmp_path / "t.npy", eos_token_id=9))


def test_stories_depend_on_seed_and_number_alone():
    stream = StoryDocuments(Language(), Letters().encode_ordinary, seed=7)
    first = [next(stream) for _ in range(20)]
    stream.load_state_dict({"seed": 7, "index": 4})
    assert [next(stream) for _ in range(16)] == first[4:]
    assert bytes(first[3]).decode() == stream.text(3)
    assert first != [next(StoryDocuments(Language(), list, seed=8)) for _ in range(20)]


def test_stories_do_not_go_on_in_another_language():
    english, chinese = Language(), Language()
    english.lang, chinese.lang = "en", "zh"
    stream = StoryDocuments(english, Letters().encode_ordinary)
    next(stream)
    with pytest.raises(ValueError, match="lang: saved 'en', now 'zh'"):
        StoryDocuments(chinese, list).load_state_dict(stream.state_dict())
    again = StoryDocuments(english, Letters().encode_ordinary)
    again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert next(again) == next(stream)
    with pytest.raises(ValueError, match="lang: saved None, now 'en'"):
        again.load_state_dict({"seed": 0, "index": 1})


class Growing(Documents):
    """Documents that fit rows of 48, but for every seventh after the hundredth."""

    def __next__(self):
        document = super().__next__()
        return [1] * 60 if self.index > 100 and self.index % 7 == 0 else document


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_document_that_is_too_long_is_left_out_and_counted(layout):
    def fresh():
        return DocumentBatches(Growing(), 3, 48, eos_token_id=END, layout=layout, shuffle_buffer=4)

    source, state = fresh(), None
    with pytest.warns(UserWarning, match=r"61 tokens does not fit rows of 48: left out") as told:
        for _ in range(120):
            state = state or (
                json.loads(json.dumps(source.state_dict())) if source.skipped else None
            )
            inputs, _ = next(source)
            assert not (inputs == 1).sum(-1).gt(20).any()
    expected = sum(i % 7 == 0 for i in range(101, source.documents.index + 1))
    assert source.skipped == expected > 8
    assert len([w for w in told if "left out" in str(w.message)]) < 8  # not one for each
    again = fresh()
    with pytest.warns(UserWarning, match="left out"):
        again.load_state_dict(state)
        while again.documents.index < source.documents.index:
            next(again)
    assert again.skipped == source.skipped


def test_the_long_story_that_ended_runs_is_left_out():
    """Story 2,368 has 412 tokens; here a run goes on that stood before it."""
    texts = stories("stories-en", 2000, "tokenizer")
    tokenizer = BPETokenizer.train(texts, 400, special_tokens=["<|endoftext|>"])
    encode, end = tokenizer.encode_ordinary, tokenizer.eos_token_id
    told = StoryDocuments(StoryLanguage("en"), encode)
    assert len(encode(told.text(2368))) == 412
    source = DocumentBatches(told, 8, 412, eos_token_id=end)
    state = {"batch_size": 8, "context_length": 412, "layout": "padded", "seed": 0}
    state |= {"eos_token_id": end, "shuffle_buffer": 16, "skipped": 0}
    state |= {"carry": [], "number": 19, "taken": 0}
    state["documents"] = {"seed": 0, "lang": "en", "index": 2300}
    with pytest.warns(UserWarning, match=r"of 413 tokens does not fit rows of 412.*\(1 so far\)"):
        source.load_state_dict(state)
    assert source.skipped == 1 and source.documents.index > 2368
    assert max(len(next(source)[0][0]) for _ in range(16)) <= 412


def test_a_source_takes_no_damaged_state():
    source = DocumentBatches(Documents(), 4, 48, eos_token_id=END)
    next(source)
    whole, before = source.state_dict(), json.dumps(source.state_dict())
    for name, value in [
        ("taken", "1"), ("taken", -1), ("number", None), ("number", True), ("skipped", 0.5),
        ("carry", [1]), ("carry", [["a"]]), ("carry", None), ("documents", [1]),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=name):
            source.load_state_dict({**whole, name: value})
    assert json.dumps(source.state_dict()) == before
    for index in ("5", -1, 2.0, None, True):
        with pytest.raises(ValueError, match=f"index must be a count from 0, not {index!r}"):
            StoryDocuments(Language(), list).load_state_dict({"seed": 0, "index": index})


def test_a_list_of_texts_is_a_stream_of_documents():
    texts = ["a", "bc", "def", "gh"]
    stream = TextDocuments(texts, lambda text: list(text.encode()), seed=2)
    epochs = [[bytes(next(stream)).decode() for _ in texts] for _ in range(3)]
    assert all(sorted(epoch) == sorted(texts) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    again = TextDocuments(texts, lambda text: list(text.encode()), seed=2)
    again.load_state_dict({**stream.state_dict(), "index": 5})
    assert bytes(next(again)).decode() == epochs[1][1]
    with pytest.raises(ValueError, match="texts: saved 4, now 3"):
        TextDocuments(texts[1:], list, seed=2).load_state_dict(stream.state_dict())


def test_texts_where_a_stream_belongs_are_told_the_road():
    for texts in ("a story", ["a story", "another"]):
        with pytest.raises(ValueError, match=r"no stream of documents; .*TextDocuments\(texts"):
            DocumentBatches(texts, 2, 8, eos_token_id=0)
        with pytest.raises(ValueError, match=r"language must have sample\(rng\).*TextDocuments"):
            StoryDocuments(texts, list)
    with pytest.raises(ValueError, match="several texts, not one, 'a story'"):
        TextDocuments("a story", list)
    with pytest.raises(ValueError, match="no text to train on"):
        TextDocuments([], list)
