"""A cache in int8, with a scale for each token and head.

Explained in notebooks/deeper/08_serving_caches.ipynb.
"""

# Built from notebooks/deeper/08_serving_caches.ipynb: edit there, then make build.

import torch
from torch import Tensor

from minillm.cache import CacheLayer
from minillm.support.checks.cache import check_kept

__all__ = ["QuantizedLayer", "quantize_int8"]


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127 and a scale for each vector: x is about numbers * scale.

    No entry is off by more than half a scale, which is 1/254 of the vector's largest entry.

    Shape: (..., D) -> (..., D) int8, (..., 1) float32.
    """
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    numbers = x / scale.clamp_min(torch.finfo(torch.float32).tiny)
    return numbers.round().to(torch.int8), scale


class QuantizedLayer(CacheLayer):
    """Keys and values in int8, with a scale for each token and head.

    New tokens are read rounded, too, so that it makes no difference in how many chunks they came.
    """

    def allocate(self, num_slots: int) -> tuple[Tensor, ...]:
        shape = (self.batch_size, self.num_kv_heads, num_slots)
        sorts = [*((dim, torch.int8) for dim in self.dims), *[(1, torch.float32)] * 2]
        with torch.inference_mode(False):
            return tuple(
                torch.zeros(*shape, dim, dtype=dtype, device=self.device) for dim, dtype in sorts
            )

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        check_kept(self, keys, values)
        (k, k_scale), (v, v_scale) = map(quantize_int8, (keys.detach(), values.detach()))
        k, v, k_scale, v_scale = self.store(k, v, k_scale, v_scale)
        return k.float().mul_(k_scale).to(self.dtype), v.float().mul_(v_scale).to(self.dtype)
