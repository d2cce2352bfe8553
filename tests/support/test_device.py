"""What to compute products in: bfloat16 where the processor has instructions for it."""

import pytest
import torch

from minillm.support.device import pick_precision


@pytest.mark.parametrize(
    ("device", "can", "precision"),
    [
        ("cpu", {"avx512_bf16": True}, "bfloat16"),
        ("cpu", {"avx512_bf16": False, "avx2": True}, "float32"),
        ("cpu", {}, "float32"),
        ("cuda", {}, "bfloat16"),
        ("mps", {"avx512_bf16": True}, "float32"),
    ],
)
def test_precision_follows_the_processor(monkeypatch, device, can, precision):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can, raising=False)
    assert pick_precision(torch.device(device)) == precision
