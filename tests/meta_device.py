"""A stand-in for a GPU: the meta device, whose tensors have shapes and no numbers."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
COPIES = {"_to_copy", "copy_", "_copy_from"}


class MetaDevice(TorchDispatchMode):
    """Runs what is inside as on a GPU: no float64 there, no other device's tensor beside its own.

    A number that is asked for is an error, as of any meta tensor; with `answers` it is 0 and
    counted in `questions`: on a GPU each question waits until all work before it is done.

    Args:
        float64: whether the device has it (Apple's GPUs do not).
    Raises: TypeError for float64, and for tensors that were left on the CPU.
    """

    def __init__(self, *, answers: bool = False, float64: bool = False) -> None:
        super().__init__()
        self.answers, self.float64, self.questions = answers, float64, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        asked = self.answers and bool(args) and isinstance(args[0], Tensor) and args[0].is_meta
        if asked and function is aten._local_scalar_dense.default:  # bool(x), int(x), x.item()
            self.questions += 1
            return 0
        to = kwargs.get("device")
        if asked and function is aten._to_copy.default and to is not None and to.type == "cpu":
            self.questions += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        made = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        tensors = given + [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        if not self.float64 and any(x.is_meta and x.dtype == torch.float64 for x in tensors):
            raise TypeError(f"{name}: no float64 on this device")
        left = [tuple(x.shape) for x in given if not x.is_meta and x.ndim]
        if left and any(x.is_meta for x in tensors) and name not in COPIES:
            raise TypeError(f"{name}: tensors of shapes {left} were left on the CPU")
        return made
