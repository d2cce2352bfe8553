"""The step of one token, compiled once. Explained in deeper/10_fast_decoding."""

# Built from notebooks/deeper/10_fast_decoding.ipynb: edit there, then make build.

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.cache import KVCache
from minillm.model import CausalLM

__all__ = ["compiled_step"]

_FUSED: dict[str, Any] = {
    "cpp.enable_floating_point_contract_flag": "fast"
}  # a * b + c in one instruction


def compiled_step(model: CausalLM, cache: KVCache | str | None) -> Callable[..., Tensor]:
    """The model for one new token, compiled once for a cache whose shapes never change.

    Masks and positions are made outside; the compiled part sees tensors of fixed shapes only.
    Raises: ValueError unless the cache is static, and for a model that keeps states.
    """
    if model.config.stateful:
        raise ValueError(f"compile=True: a step of {model.config.model_type} cannot be compiled")
    if not isinstance(cache, KVCache) or not getattr(cache[0], "fixed_shapes", False):
        raise ValueError(
            "compile=True needs cache='static': a growing cache would be compiled anew"
        )
    if not hasattr(model, "compiled_run"):
        model.compiled_run = torch.compile(model.run, dynamic=False, options=_FUSED)
    model.before_compiling()

    def step(ids: Tensor, *, attention_mask: Tensor | None, cache: KVCache, **_: Any) -> Tensor:
        positions, mask, is_causal = model.model.prepare(ids, attention_mask, None, cache)
        # a slice of a longer row has another stride each time, which would be compiled anew
        ids, positions = (x.clone(memory_format=torch.contiguous_format) for x in (ids, positions))
        return model.compiled_run(ids, positions, mask, is_causal, cache)

    return step
