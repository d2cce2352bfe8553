"""How far a ring can go back (what it reads: test_base)."""

import pytest
from small_caches import feed, new, tokens


def test_a_ring_goes_back_as_far_as_it_remembers():
    cache = new("sliding")
    feed(cache, tokens(9))
    with pytest.raises(ValueError, match=r"9 positions to 7: the ring of 5 has overwritten .* 4"):
        cache.crop(7)
    assert cache.length == 9
    cache.crop(8)  # a query at 8 reads 4 to 8, and 4 is still there
    assert cache.key_positions(1).sort().values.tolist() == [4, 5, 6, 7, 8]
