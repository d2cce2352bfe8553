"""Another processor, imitated: sums of products come out wrong by some parts in ten million.

Another processor, thread count or library adds the same numbers up in another order, so the last
digits of a sum are its own. What a page prints or a test compares must not hang on them.
`make jitter` runs the pages with `start`, which reads two variables: JITTER, the relative size of
the error, and JITTER_DRAW, the number of the draw.
"""

import functools
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

PRODUCTS = {
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr"),
    *("convolution", "convolution_backward", "_linear_pointwise"),
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_to_dense",  # a product in oneDNN's own layout, when it is unpacked
}
ROUNDING = torch.finfo(torch.float32).eps


class Jitter(TorchDispatchMode):
    """Inside it every sum of products is off by at most `size` of its value, in float64 by as many
    roundings. Like a processor it repeats itself: equal products are off by equal amounts.
    """

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self, size: float, draw: int = 1) -> None:
        super().__init__()
        self.size, self.draw = size, draw
        self.whole: set[Any] = set()  # operations that are made of no others

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether code may be compiled inside: yes, and what is compiled keeps its own digits."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):  # programs, which keep their own digits
            return func(*args, **(kwargs or {}))
        if func not in self.whole:
            with self:  # in inference mode compound operations arrive, with products inside
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
            self.whole.add(func)
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")  # addmm_ adds in place
        if name in PRODUCTS:
            shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
            seed = zlib.crc32(repr((self.draw, name, shapes)).encode())
            for found in out if isinstance(out, Sequence) else [out]:
                if isinstance(found, Tensor):
                    self.turn(found.detach(), seed)
        return out

    def turn(self, found: Tensor, seed: int) -> None:
        """Turn the last digits in place. A number of 16 bits or fewer stays: sums of whole numbers,
        halves and quarters are exact everywhere."""
        if found.device.type != "cpu" or found.dtype not in (torch.float32, torch.float64):
            return  # half precision has no digits as small
        size = self.size * torch.finfo(found.dtype).eps / ROUNDING
        factor = noise(seed, found.shape, found.dtype, size)
        integer, digits = (torch.int32, 8) if found.dtype == torch.float32 else (torch.int64, 37)
        exact = found.view(integer) & (2**digits - 1) == 0  # the last digits of its fraction
        found.mul_(torch.where(exact, 1.0, factor))


@functools.lru_cache(maxsize=32)  # a training loop asks for the same ones again
def noise(seed: int, shape: Sequence[int], dtype: torch.dtype, size: float) -> Tensor:
    """Factors around 1, off by at most `size`."""
    generator = torch.Generator().manual_seed(seed)
    return 1 + size * torch.empty(shape, dtype=dtype).uniform_(-1, 1, generator=generator)


def aside(export: Callable[..., Any]) -> Callable[..., Any]:
    """The same function without the jitter: torch.export records every mode as part of the program,
    and fails at one that it does not know. The program it returns runs with the jitter.
    """

    @functools.wraps(export)
    def without(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return export(*args, **kwargs)

    return without


def start() -> Jitter | None:
    """Jitter from here to the end of the process, if the variable JITTER asks for it."""
    if not os.environ.get("JITTER"):
        return None
    torch.export.export = aside(torch.export.export)
    torch.onnx.export = aside(torch.onnx.export)
    return Jitter(float(os.environ["JITTER"]), int(os.environ.get("JITTER_DRAW", "1"))).__enter__()
