"""Modes for a while: a model's eval mode, in which dropout is off, and no autocast.

Written by hand.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class EvalMode:
    """Inside `with EvalMode(model):` the model is in eval mode; then every part is as it was.

    It may be entered again and again, and costs next to nothing where nothing is in training mode.
    What is no module stands for its `model`, as the prompts that hold a picture do.
    """

    def __init__(self, *models: Any) -> None:
        owners = [m if isinstance(m, nn.Module) else getattr(m, "model", None) for m in models]
        self.parts = [part for m in owners if isinstance(m, nn.Module) for part in m.modules()]
        self.training: list[nn.Module] = []

    def __enter__(self) -> None:
        self.training = [part for part in self.parts if part.training]
        for part in self.training:
            part.training = False

    def __exit__(self, *error: object) -> None:
        for part in self.training:
            part.training = True


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Outside of autocast, for what must not be rounded: a state's sums, a router's logits."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
