"""The doors of a model: what one asks of it beside its arithmetic, done elsewhere.

Written by hand. What a door is stands in `support.door`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from minillm.support.door import Door

__all__ = ["Doors"]


class Doors(nn.Module):
    """The doors of `CausalLM`, and what its copies and compiled steps need."""

    compiled_run: Callable[..., Tensor]  # `run`, once something has compiled it

    generate = Door("minillm.generation:generate")
    packed = Door("minillm.deeper.fast.packed:PackedLM")
    num_parameters = Door("minillm.support.counting:count_parameters")
    flops_per_token = Door("minillm.support.counting:count_operations")

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **options: Any) -> Self:
        """The model of `minillm.from_pretrained`, its tokenizer not opened; its options."""
        from minillm.deeper.pretrained.load import load_model

        return load_model(name, **options)  # type: ignore[return-value]

    def save_pretrained(self, folder: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Write config, weights and tokenizer, as `minillm.save_pretrained`."""
        from minillm.deeper.pretrained.load import save_pretrained

        save_pretrained(self, tokenizer, folder)  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        c: Any = self.config if name == "lm_head" else None
        if c and c.family.scores and (change := c.family.scores(c)):
            value.register_forward_hook(change)  # `Family.scores`, on whatever head is set

    def before_compiling(self) -> None:
        """Lay out what `run` needs when compiled: here nothing."""

    def __getstate__(self) -> dict[str, Any]:
        # a compiled step reads the weights of this model, not those of its copy
        return {name: value for name, value in vars(self).items() if name != "compiled_run"}
