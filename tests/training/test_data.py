"""Tokens, files of them, and windows."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from training_runs import (
    TOKENS,
    needs_unix,
)

from minillm.deeper.training.token_file import TokenDataset
from minillm.support.checks.kinds import check_settings
from minillm.training import RowBatches, WindowBatches, get_batch, pad_rows


def test_get_batch_shifts_by_one_and_reaches_both_ends():
    tokens = torch.arange(7)
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(50):
        x, y = get_batch(tokens, 3, 4, generator=generator)
        assert x.shape == y.shape == (3, 4) and x.dtype == torch.long
        assert torch.equal(y, x + 1)
        seen |= set(x[:, 0].tolist())
    assert seen == {0, 1, 2}
    again = [get_batch(tokens, 2, 4, generator=torch.Generator().manual_seed(9)) for _ in range(2)]
    assert torch.equal(again[0][0], again[1][0])
    with pytest.raises(ValueError, match="7 \\+ 1 tokens from 7"):
        get_batch(tokens, 1, 7)


class OnDevice(torch.Tensor):
    """A tensor that numpy cannot read, as one on a GPU."""

    def __array__(self, *_, **__):
        raise TypeError("can't convert cuda device type tensor to numpy")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_tokens_may_lie_on_a_device():
    seeds = [torch.Generator().manual_seed(9) for _ in range(2)]
    found = get_batch(TOKENS.as_subclass(OnDevice), 3, 4, generator=seeds[0])
    for a, b in zip(found, get_batch(TOKENS, 3, 4, generator=seeds[1]), strict=True):
        assert torch.equal(a, b)


def test_windows_depend_on_seed_and_number_alone():
    a, b = WindowBatches(TOKENS, 4, 12, seed=0), WindowBatches(TOKENS, 4, 12, seed=1)
    first = [next(a)[0].tolist() for _ in range(3)]
    assert first[0] != first[1] != first[2]
    assert not any(next(b)[0].tolist() in first for _ in range(3))
    a.load_state_dict({**a.state_dict(), "index": 1})
    assert next(a)[0].tolist() == first[1]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_token_files_are_streamed_and_mapped(tmp_path, vocab_size, dtype):
    documents = [[1, 2, 3], [], [vocab_size - 1] * 5]
    data = TokenDataset.write(
        tmp_path / "t.npy", (d for d in documents), vocab_size=vocab_size, eos_token_id=0
    )
    assert isinstance(data.tokens, np.memmap) and data.tokens.dtype == dtype
    assert data.tokens.tolist() == [1, 2, 3, 0, 0, *[vocab_size - 1] * 5, 0]
    assert data.documents().tolist() == [[0, 4], [4, 5], [5, 11]]
    np.testing.assert_array_equal(np.load(tmp_path / "t.npy"), data.tokens)
    assert len(data) == 11 and data[2] == 3 and os.listdir(tmp_path) == ["t.npy"]
    x, y = get_batch(data.tokens, 2, 4)
    assert x.dtype == torch.long and torch.equal(x[:, 1:], y[:, :-1])


@needs_unix
def test_writing_tokens_keeps_the_memory_small(tmp_path):
    code = """
        import resource, sys
        from minillm.deeper.training.token_file import TokenDataset
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        data = TokenDataset.write(sys.argv[1], ([7] * 1000 for _ in range(8000)),
                                  vocab_size=100, eos_token_id=0)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(len(data), after - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "big.npy")],
        capture_output=True,
        text=True,
        check=True,
    )
    count, kilobytes = map(int, done.stdout.split())
    assert count == 8000 * 1001  # 16 MB on the disk
    assert kilobytes < 4000


def test_a_document_that_brings_its_begin_token_gets_no_other(tmp_path):
    """The end of the document before is the beginning of the next, as in a packed row."""
    documents = [[0, 1, 2], [3], np.array([0, 4]), [0], []]
    data = TokenDataset.write(tmp_path / "t.npy", documents, vocab_size=5, eos_token_id=0)
    assert data[:].tolist() == [1, 2, 0, 3, 0, 4, 0, 0, 0]


def test_a_failed_write_leaves_no_file(tmp_path):
    path = tmp_path / "t.npy"
    TokenDataset.write(path, [[1]], vocab_size=10, eos_token_id=0)
    with pytest.raises(ValueError, match=r"ids 0\.\.10, vocabulary 10"):
        TokenDataset.write(path, [[2], [10]], vocab_size=10, eos_token_id=0)
    assert os.listdir(tmp_path) == ["t.npy"]
    assert TokenDataset(path).tokens.tolist() == [1, 0]


def test_broken_token_files_are_refused(tmp_path):
    path = tmp_path / "t.npy"
    TokenDataset.write(path, [[1] * 100], vocab_size=10, eos_token_id=0)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="not a whole token file"):
        TokenDataset(path)
    path.write_bytes(b"hello")
    with pytest.raises(ValueError, match="not a whole token file"):
        TokenDataset(path)
    with open(path, "wb") as file:
        np.savez(file, np.arange(5, dtype=np.uint16))
    with pytest.raises(ValueError, match="not a whole token file"):
        TokenDataset(path)
    np.save(path, np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"float64 \(2, 2\)"):
        TokenDataset(path)
    with pytest.raises(FileNotFoundError):
        TokenDataset(tmp_path / "none.npy")


def test_settings_that_differ_are_named():
    check_settings({"a": 1}, {"a": 1})
    with pytest.raises(ValueError, match=r"a: saved 1, now 2; b: saved None, now 'x'"):
        check_settings({"a": 1}, {"a": 2, "b": "x"})


def test_a_source_goes_nowhere_with_another_ones_settings():
    rows, tokens = [[9, i, 9] for i in range(7)], torch.arange(60)
    others = [RowBatches(rows, 2, 9), RowBatches(rows, 3, 9, seed=1), RowBatches(rows[1:], 3, 9)]
    pairs = [(RowBatches(rows, 3, 9), other) for other in others]
    windows = WindowBatches(tokens, 3, 5)
    pairs += [(windows, WindowBatches(tokens, 2, 5)), (windows, WindowBatches(tokens, 3, 4))]
    pairs += [(windows, WindowBatches(tokens, 3, 5, seed=1))]
    pairs += [(windows, WindowBatches(tokens[1:], 3, 5))]
    for source, other in pairs:
        with pytest.raises(ValueError, match="saved"):
            source.load_state_dict(other.state_dict())


def test_pad_rows_shifts_and_masks():
    assert pad_rows([[1], [1, 2]], 2, 7)[0].tolist() == [[1], [1]]
    assert pad_rows([[1], [1, 2, 3]], 3, 7)[0].tolist() == [[1, 7], [1, 2]]
    x, y = pad_rows([[9, 1, 2], [9, 3]], 4, 9)
    assert x.tolist() == [[9, 1, 2], [9, 3, 9]]
    assert y.tolist() == [[1, 2, -100], [3, -100, -100]]


def test_rows_come_once_an_epoch_in_orders_of_their_own():
    rows = [[9, i, 9] for i in range(7)]

    def drawn(source, count):
        batches = [next(source)[0] for _ in range(count)]
        return [row[1].item() for batch in batches for row in batch]

    source = RowBatches(rows, 3, 9)
    epochs = [drawn(source, 3) for _ in range(4)]
    assert (
        all(sorted(epoch) == list(range(7)) for epoch in epochs)
        and len(set(map(tuple, epochs))) > 2
    )
    assert drawn(RowBatches(rows, 3, 9, seed=1), 3) != epochs[0]
    again = RowBatches(rows, 3, 9)
    again.load_state_dict({**source.state_dict(), "index": 4})
    assert drawn(again, 2) == epochs[1][3:]
    assert iter(source) is source and len(next(RowBatches(rows, 9, 9))[0]) == 7
    with pytest.raises(ValueError, match=r"rows: saved 7, now 6"):
        RowBatches(rows[1:], 3, 9).load_state_dict(source.state_dict())


@pytest.mark.parametrize(("rows", "size"), [([], 2), ([[1, 2]], 0)])
def test_rows_that_make_no_batch_are_refused(rows, size):
    with pytest.raises(ValueError, match=r"(rows|batch_size) must be at least 1, not 0"):
        RowBatches(rows, size, 0)
