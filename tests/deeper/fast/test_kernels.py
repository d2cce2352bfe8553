"""Products and attention for a compiler give what PyTorch's own give."""

import pytest
import torch
import torch.nn.functional as F

from minillm.deeper.fast.kernels import pack_panels, panel_product, step_attention


@pytest.mark.parametrize("rows", [1, 2, 32])
@pytest.mark.parametrize("outputs", [16, 64, 97, 131])
def test_a_product_with_panels_is_the_product(rows, outputs):
    weight, x = torch.randn(outputs, 40), torch.randn(40, rows).t()  # rows that are not contiguous
    panels = pack_panels(weight)
    assert panels.shape[1:] == (40, 16) and 0 <= 16 * len(panels) - outputs < 16
    found = panel_product(x, panels, outputs)
    torch.testing.assert_close(found, (x.double() @ weight.double().T).float())
    half = panel_product(x.bfloat16(), panels.bfloat16(), outputs)
    exact = x.bfloat16().double() @ weight.bfloat16().double().T
    assert half.dtype == torch.bfloat16  # one rounding, at the end
    torch.testing.assert_close(half, exact.bfloat16(), atol=1e-2, rtol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "dim"), [(1, 16), (3, 20)])
def test_attention_as_sums_is_attention(queries, dim, masked, dtype):
    q = torch.randn(2, 3, queries, dim, dtype=dtype)
    k, v = torch.randn(2, 2, 3, 9, dim, dtype=dtype)
    mask = torch.rand(2, 1, 1, 9) > 0.4 if masked else None
    wide = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, scale=0.3)
    found = step_attention(q, k, v, mask, 0.3)
    torch.testing.assert_close(found, wide.to(dtype))
