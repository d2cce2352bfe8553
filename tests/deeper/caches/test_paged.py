"""Blocks and their reference counts; a paged cache against no cache."""

import pytest
import torch
from small_caches import CHUNKS, PADDING, Decoder, cached, feed, new, tokens


def test_a_fork_of_pages_copies_one_block():
    base = new("paged", batch_size=1, layers=1)
    feed(base, tokens(10, batch_size=1, layers=1))  # blocks of 4: two full ones, one half full
    pool = base[0].pool
    used = len(pool.ref_counts) - len(pool.free)
    twin = base.fork()
    assert used == 3 and len(pool.ref_counts) - len(pool.free) == used
    feed(twin, tokens(1, 1, batch_size=1, layers=1))
    assert len(pool.ref_counts) - len(pool.free) == used + 1
    assert twin[0].block_table[0][:2] == base[0].block_table[0][:2]
    assert twin[0].block_table[0][2] != base[0].block_table[0][2]
    feed(base, tokens(1, 2, batch_size=1, layers=1))  # now the only holder: writes in place
    assert len(pool.ref_counts) - len(pool.free) == used + 1
    del twin
    assert len(pool.ref_counts) - len(pool.free) == used
    base.reset()
    assert len(pool.free) == len(pool.ref_counts)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("heads", ["GQA", "MLA"])
def test_paged_equals_uncached_past_block_edges(heads, chunks, padding):
    found, alone = cached(Decoder(heads), "paged", CHUNKS[chunks], PADDING[padding])
    for one, expected in zip(found, alone, strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-10)
