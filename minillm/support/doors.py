"""Doors: what one asks of a whole model beside its arithmetic, done elsewhere.

Written by hand. `generate = Door("minillm.generation:generate")` makes a method of that function:
it is looked up when it is called, and `help(model.generate)` is the function's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pkgutil import resolve_name
from types import MethodType
from typing import Any, Self

from torch import Tensor, nn

__all__ = ["Door", "Doors"]


class Door:
    """A method that is a function of another file, called with the object first."""

    def __init__(self, where: str) -> None:
        self.where = where  # "package.module:function"

    def __get__(self, instance: Any, owner: type) -> Any:
        function = resolve_name(self.where)
        return function if instance is None else MethodType(function, instance)


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

    def before_compiling(self) -> None:
        """Lay out what `run` needs when compiled: here nothing."""

    def __getstate__(self) -> dict[str, Any]:
        # a compiled step reads the weights of this model, not those of its copy
        return {name: value for name, value in vars(self).items() if name != "compiled_run"}
