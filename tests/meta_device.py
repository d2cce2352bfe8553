"""A device made of torch's meta tensors: what would make a GPU wait is counted, float64 refused."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class MetaDevice(TorchDispatchMode):
    """Under it, meta tensors answer questions with 0, as a device would after finishing its work.

    Args:
        float64: whether the device has it (Apple's GPUs do not).
    Raises: TypeError when a result in float64 lies on a device without.
    """

    def __init__(self, *, float64: bool = False) -> None:
        super().__init__()
        self.float64, self.questions = float64, 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        asked = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if asked and operator is aten._local_scalar_dense.default:  # bool(x), int(x), x.item()
            self.questions += 1
            return 0
        to = kwargs.get("device")
        if asked and operator is aten._to_copy.default and to is not None and to.type == "cpu":
            self.questions += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        result = operator(*args, **kwargs)
        for x in result if isinstance(result, tuple | list) else [result]:
            wide = isinstance(x, torch.Tensor) and x.is_meta and x.dtype == torch.float64
            if wide and not self.float64:
                raise TypeError(f"{operator} gives float64 on a device that has none")
        return result
