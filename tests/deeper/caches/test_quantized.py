"""The error of int8, of a vector and of a whole decoder."""

import pytest
import torch
from small_caches import CHUNKS, PADDING, Decoder, cached

from minillm.deeper.caches.quantized import quantize_int8


def test_int8_is_off_by_half_a_step_at_most():
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) * 10
    numbers, scale = quantize_int8(x)
    error, largest = (numbers * scale - x).abs(), x.abs().amax(-1, keepdim=True)
    assert numbers.dtype == torch.int8 and numbers.min() >= -127
    assert (error <= largest / 254 * (1 + 1e-5)).all()
    assert (error > 0.9 * largest / 254).any()  # the bound is no wider than it must be
    zero, scale = quantize_int8(torch.zeros(2, 8))
    assert torch.equal(zero * scale, torch.zeros(2, 8))
    large, scale = quantize_int8(torch.full((1, 4), 60000.0, dtype=torch.float16))
    torch.testing.assert_close(large * scale, torch.full((1, 4), 60000.0))


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("heads", ["GQA", "MLA"])
def test_quantized_stays_within_two_percent_of_the_largest_logit(heads, padding):
    results = [cached(Decoder(heads), "quantized", CHUNKS[c], PADDING[padding]) for c in CHUNKS]
    for one, expected in zip(*results[0], strict=True):
        assert 0 < (one - expected).abs().max() < 0.02 * expected.abs().max()
    for found, _ in results[1:]:  # and the chunks make no difference
        for one, other in zip(found, results[0][0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
