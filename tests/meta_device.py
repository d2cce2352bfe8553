"""A stand-in for a GPU: the meta device, whose tensors have shapes and no numbers.

To ask it for a number is an error, as of any tensor there; `Device` also refuses what a GPU would
refuse or be slow at: a tensor left on the CPU among others, and float64, which Apple's GPUs lack.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPIES = {"_to_copy", "copy_", "_copy_from"}


class Device(TorchDispatchMode):
    """Runs what is inside as on a GPU: no float64 there, and no other device's tensor beside it."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        tensors = given + [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        if any(x.is_meta and x.dtype == torch.float64 for x in tensors):
            raise TypeError(f"{name}: no float64 on this device")
        left = [tuple(x.shape) for x in given if not x.is_meta and x.ndim]
        if left and any(x.is_meta for x in tensors) and name not in COPIES:
            raise TypeError(f"{name}: tensors of shapes {left} were left on the CPU")
        return made
