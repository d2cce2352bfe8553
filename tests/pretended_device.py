"""A GPU that is not there: tensors hold numbers on the CPU and say that they live on "cuda:0".

Programs take the paths that they take on a GPU, with numbers that can be compared with the CPU's.
What a GPU refuses is refused here: an operation on tensors of two devices, `.numpy()`, a generator
of another device. What makes a program wait for a GPU is counted. Not shown: kernels, streams,
speed, what a GPU rounds otherwise.

Three parts: a tensor that wraps another, a mode that sees every operation below autograd
(`_Operations`), and one that sees every call of torch above it (`_Calls`), where devices are named.
To torch's C++ code the wrapper is on the CPU: so no driver is asked for, and autograd works.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["PretendedDevice", "PretendedTensor", "same_there"]

COPIES = {"copy_", "_copy_from", "_to_copy"}
INDEXED = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
# The others let a number that lies on the CPU, a tensor without dimensions, take part.
STRICT = {"cat", "stack", "_fused_adamw_", "_fused_adam_", "_fused_sgd_"}
GENERATOR = torch.Generator  # the real one
NUMBERS = {"_local_scalar_dense", "item", "is_nonzero"}
ASKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
FROM_PYTHON = {"tensor", "as_tensor", "asarray"}
TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices"


class PretendedTensor(Tensor):
    """A tensor of the device; `held`, on the CPU, has its numbers."""

    held: Tensor
    home: PretendedDevice
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor, home: PretendedDevice) -> PretendedTensor:
        # inside torch.inference_mode a view of an older tensor is no inference tensor
        inferring = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if inferring != held.is_inference() else nullcontext():
            x = Tensor._make_wrapper_subclass(
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                layout=held.layout,
                device="cpu",
            )
        x.held, x.home = held, home
        return x

    device = property(lambda self: self.home.device)
    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: self.home.device.type == "cuda")
    is_mps = property(lambda self: self.home.device.type == "mps")

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        raise RuntimeError(f"{function}: the pretended device has been left")

    def __repr__(self) -> str:
        return f"{self.home.read(self, 'repr')!r} on {self.device}"

    def __deepcopy__(self, memo: dict[int, Any]) -> PretendedTensor:
        if id(self) not in memo:
            twin = self.detach().clone().requires_grad_(self.requires_grad)
            parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(twin, self.requires_grad) if parameter else twin
        return memo[id(self)]

    def get_device(self) -> int:
        return self.home.device.index

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        return self.home.read(self, "tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.home.read(self, "numpy").numpy()
        raise TypeError(f"can't convert {self.device} device type tensor to numpy.")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()


def _leaves(x: Any, found: list[Any] | None = None) -> list[Any]:
    """What stands in lists and dicts of arguments."""
    found = [] if found is None else found
    for y in x.values() if isinstance(x, dict) else x:
        if isinstance(y, tuple | list | dict):
            _leaves(y, found)
        else:
            found.append(y)
    return found


def _map(change: Callable[[Tensor], Any], x: Any) -> Any:
    """The same lists and dicts with each tensor changed."""
    if isinstance(x, Tensor):
        return change(x)
    if type(x) in (tuple, list):
        return type(x)(_map(change, y) for y in x)
    return {k: _map(change, y) for k, y in x.items()} if type(x) is dict else x


class _Move(torch.autograd.Function):
    """A copy on the other side, for `to`; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, home: PretendedDevice, waits: bool) -> Tensor:
        ctx.home = home
        return home.down(x, waits) if isinstance(x, PretendedTensor) else home.up(x, waits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Move.apply(grad, ctx.home, True), None, None


class _Engine:
    """Autograd's engine, in which the backward functions of a user see the device too."""

    def __init__(self, engine: Any, calls: _Calls) -> None:
        self.engine, self.calls = engine, calls

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with self.calls:
            return self.engine.run_backward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class _Operations(TorchDispatchMode):
    """Runs each operation on what the tensors hold, unless a GPU would refuse it."""

    def __init__(self, home: PretendedDevice) -> None:
        super().__init__()
        self.home = home

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        home, kwargs, name = self.home, dict(kwargs or {}), function.overloadpacket.__name__
        given = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = any(isinstance(x, PretendedTensor) for x in given)
        writes = function._schema.is_mutable
        self.check(name, args, given, there, writes)
        wanted = kwargs.get("device")
        on_device = (there or home.named) if given else home.inside
        if wanted is not None:  # torch's own code asks for the device of its tensors: the CPU
            inside = home.named or (home.inside and (there or not given))
            on_device = home.is_here(wanted) or inside
            kwargs["device"] = torch.device("cpu") if home.is_here(wanted) else wanted
        if there:
            home.count(function, name, args, kwargs)
        plain = _map(lambda x: x.held if isinstance(x, PretendedTensor) else x, (args, kwargs))
        draws = torch.Tag.nondeterministic_seeded in function.tags
        own = draws and kwargs.get("generator") is None and (on_device or there)
        with home.own_numbers() if own else nullcontext():
            made = function(*plain[0], **plain[1])
        ours: dict[int, Tensor] = {}
        if writes:  # what was written to is returned
            self.check_written(name, given)
            ours = {id(x.held if isinstance(x, PretendedTensor) else x): x for x in given}
        wrap = home.wrap if on_device else lambda x: x
        return _map(lambda x: ours[id(x)] if id(x) in ours else wrap(x), made)

    def check(self, name: str, args: tuple, given: list[Tensor], there: bool, writes: bool) -> None:
        """Raises: RuntimeError for tensors of two devices."""
        left = [x for x in given if not isinstance(x, PretendedTensor)]
        if not there or not left or name in COPIES:
            return
        where = f"{self.home.device} and cpu"
        if name in INDEXED:
            if not isinstance(args[0], PretendedTensor):
                raise RuntimeError(
                    f"indices should be either on cpu or on the same device as the indexed tensor"
                    f" (cpu), not on {self.home.device}"
                )
            left = [x for x in args[2:3] if not isinstance(x, PretendedTensor)]  # values put there
        if name not in STRICT:
            left = [x for x in left if x.dim() or (writes and x is args[0])]
        if left:
            raise RuntimeError(
                f"{TWO_DEVICES}, {where}! ({name}: {[tuple(x.shape) for x in left]})"
            )

    def check_written(self, name: str, given: list[Tensor]) -> None:
        """Raises: NotImplementedError for what changes the shape of a tensor in its place."""
        for x in given:
            if isinstance(x, PretendedTensor) and (x.shape, x.stride()) != (
                x.held.shape,
                x.held.stride(),
            ):
                raise NotImplementedError(f"{name} changes a shape in place")


class _Calls(TorchFunctionMode):
    """Sees where a program names a device; the driver of a real one is never asked for."""

    def __init__(self, home: PretendedDevice) -> None:
        super().__init__()
        self.home = home

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        home, kwargs, name = self.home, dict(kwargs or {}), getattr(function, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, Tensor) and name in ("to", "cpu", "cuda", "type_as"):
            return self.move(function, name, first, args[1:], kwargs)
        named = kwargs.get("device")
        if name == "new_tensor":
            kwargs = {"dtype": first.dtype, **kwargs}
            device = first.device if named is None else named
            return self.from_python(torch.tensor, device, args[1:], kwargs)
        if name in FROM_PYTHON and (home.is_here(named) or isinstance(first, PretendedTensor)):
            return self.from_python(function, named, args, kwargs)
        here = home.is_here(named)
        leaves = _leaves((args, kwargs))
        there = any(isinstance(x, PretendedTensor) for x in leaves)
        if here:
            kwargs["device"] = torch.device("cpu")
        on_device = here or (there and named is None)
        for x in leaves:
            if isinstance(x, GENERATOR):
                self.check_generator(x, home.device.type if on_device else "cpu")
        before, home.inside, home.named = (home.inside, home.named), on_device, here
        try:
            return function(*args, **kwargs)
        finally:
            home.inside, home.named = before

    def check_generator(self, generator: torch.Generator, side: str) -> None:
        """Raises: RuntimeError for a generator of another device."""
        if (found := generator.device.type) != side:
            raise RuntimeError(f"Expected a '{side}' device type for generator but found '{found}'")

    def from_python(self, function: Any, device: Any, args: tuple, kwargs: dict) -> Tensor:
        """`torch.tensor` and its like, which see no device but the CPU."""
        data, kwargs = args[0], {k: v for k, v in kwargs.items() if k != "device"}
        learned = kwargs.pop("requires_grad", False)
        if isinstance(data, PretendedTensor):  # a copy, or itself
            x = data.detach().clone() if function is torch.tensor else data
            x = x if kwargs.get("dtype") is None else x.to(kwargs["dtype"])
            moves = device is not None and not self.home.is_here(device)
        else:
            x, moves = function(*args, **kwargs), self.home.is_here(device)
        x = _Move.apply(x, self.home, True) if moves else x
        return x.requires_grad_() if learned else x

    def move(self, function: Any, name: str, x: Tensor, args: tuple, kwargs: dict) -> Tensor:
        """`to` and its like, which see no device but the CPU."""
        there = isinstance(x, PretendedTensor)
        if name == "cpu":
            return _Move.apply(x, self.home, True) if there else x
        copy, dtype, waits = kwargs.pop("copy", False), None, True
        if name == "cuda":
            self.home.is_here(args[0] if args else kwargs.get("device", "cuda"))
            device: Any = torch.device("cuda")
        elif args and isinstance(args[0], Tensor):  # as another tensor
            device, dtype = args[0].device, args[0].dtype
        else:
            device, dtype, no_wait, _ = torch._C._nn._parse_to(*args, **kwargs)
            waits = not no_wait
        if device is None or self.home.is_here(device) is there:
            options = {k: v for k, v in kwargs.items() if k == "memory_format"}
            return Tensor.to(x, x.dtype if dtype is None else dtype, copy=copy, **options)
        return _Move.apply(x if dtype is None else Tensor.to(x, dtype), self.home, waits)


def _engine() -> Any:
    return torch.autograd.Variable._execution_engine


def _swapping(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`nn.Module._apply` that keeps the parameters which optimizers know, as a real move does."""

    def swapping(module: nn.Module, fn: Callable, recurse: bool = True) -> nn.Module:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(module, fn, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return swapping


def _autocast_as_on_cpu(init: Callable[..., None], kind: str) -> Callable[..., None]:
    """Where products of the device's tensors are rounded: to torch, they are on the CPU."""

    def started(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == kind:
            device_type, dtype = "cpu", dtype or torch.float16
        init(self, device_type, dtype, *args, **kwargs)

    return started


def _generator_class(kind: str) -> type[torch.Generator]:
    """`torch.Generator` that can be of the device."""

    class EveryGenerator(type(GENERATOR)):
        def __instancecheck__(cls, x: object) -> bool:
            return isinstance(x, GENERATOR)

    class Generator(GENERATOR, metaclass=EveryGenerator):
        """A generator of the CPU that says where it belongs."""

        def __new__(cls, device: Any = "cpu") -> Generator:
            made = GENERATOR.__new__(cls, "cpu")
            at = torch.device(device)
            made.at = torch.device(kind, 0) if at.type == kind else at
            return made

        device = property(lambda self: self.at)

    return Generator


class PretendedDevice:
    """While it is entered, torch has a device "cuda" (or "mps") and `torch.cuda` says so.

    Args:
        kind: "cuda", or "mps", which has no float64.
    Attributes:
        waits: how often the program waited for the device, by what it asked: item, tolist, cpu,
            nonzero, and so on.
        sent: how often numbers went from the CPU to the device, by the name of the call.
    """

    def __init__(self, kind: str = "cuda") -> None:
        self.device = torch.device(kind, 0)
        self.forget()
        self.inside = False  # whether torch's own code makes its tensors there
        self.named = False  # whether a caller said so
        self.state = torch.Generator().manual_seed(0).get_state()  # of its own random numbers

    def __enter__(self) -> PretendedDevice:
        self._stack = ExitStack()
        calls = _Calls(self)
        with self._stack as stack:
            for target, name, new in self._patches(calls):
                stack.enter_context(mock.patch.object(target, name, new))
            stack.enter_context(_Operations(self))
            stack.enter_context(calls)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _patches(self, calls: _Calls) -> Iterator[tuple[Any, str, Any]]:
        """What of torch is another thing on leaving: (where, name, instead)."""
        kind, module = self.device.type, getattr(torch, self.device.type)
        synchronize = lambda device=None: self.waits.update(["synchronize"])  # noqa: E731
        yield torch, "Generator", _generator_class(kind)
        yield torch.autograd.Variable, "_execution_engine", _Engine(_engine(), calls)
        yield nn.Module, "_apply", _swapping(nn.Module._apply)
        yield torch.autocast, "__init__", _autocast_as_on_cpu(torch.autocast.__init__, kind)
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            ask = getattr(torch, name)
            yield torch, name, lambda at="cuda", ask=ask: ask("cpu" if at == kind else at)
        yield torch.accelerator, "synchronize", synchronize
        yield module, "is_available", lambda: True
        yield module, "device_count", lambda: 1
        yield module, "manual_seed", self.seed
        yield module, "get_rng_state", lambda device=None: self.state.clone()
        yield module, "set_rng_state", lambda state, device=None: setattr(self, "state", state)
        yield module, "synchronize", synchronize
        if kind == "mps":
            yield torch.backends.mps, "is_available", lambda: True
            return
        yield module, "manual_seed_all", self.seed
        yield module, "current_device", lambda: 0
        yield module, "is_bf16_supported", lambda including_emulation=True: True
        yield module, "is_current_stream_capturing", lambda: False

    def forget(self) -> None:
        """Count from here."""
        self.waits: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def seed(self, seed: int) -> None:
        """What `torch.manual_seed` does to the device's own random numbers."""
        self.state = torch.Generator().manual_seed(seed).get_state()

    def is_here(self, device: Any) -> bool:
        """Whether that is this device. Raises: RuntimeError for another one of its kind."""
        if device is None or isinstance(device, int):
            return False
        device = torch.device(device)
        if device.type == self.device.type and device.index not in (None, 0):
            raise RuntimeError(f"{device}: invalid device ordinal")
        return device.type == self.device.type

    def wrap(self, held: Tensor) -> PretendedTensor:
        """A tensor of this device with these numbers. Raises: TypeError for float64 on mps."""
        if held.dtype == torch.float64 and self.device.type == "mps":
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        if isinstance(held, PretendedTensor):
            return held
        assert held.device.type == "cpu", f"{held.device} beside the pretended device"
        return PretendedTensor(held, self)

    def up(self, x: Tensor, waits: bool = True) -> PretendedTensor:
        """A copy on the device."""
        self.sent["to" if waits else "to, without waiting"] += 1
        return self.wrap(x.detach().clone())

    def down(self, x: PretendedTensor, waits: bool = True) -> Tensor:
        """A copy on the CPU."""
        self.waits["cpu"] += waits
        return x.held.detach().clone()

    def read(self, x: PretendedTensor, name: str) -> Tensor:
        """The numbers, for one that asks for them by this name."""
        self.waits[name] += 1
        return x.held.detach()

    def count(self, function: Any, name: str, args: tuple, kwargs: Mapping) -> None:
        """Note an operation whose answer, or whose size, the CPU needs to go on."""
        if name == "copy_" and isinstance(args[1], PretendedTensor) != isinstance(
            args[0], PretendedTensor
        ):
            waits = not (kwargs.get("non_blocking") or any(args[2:]))
            (self.waits if isinstance(args[1], PretendedTensor) else self.sent)["copy_"] += waits
        elif name in INDEXED:
            indices = [x for x in args[1] if x is not None]
            if not all(isinstance(x, PretendedTensor) for x in indices):
                self.sent["index"] += 1
            flags = [x for x in indices if x.dtype in (torch.bool, torch.uint8)]
            if flags and not ("put" in name and args[2].numel() == 1):  # which masks, and no more
                self.waits["nonzero"] += 1
        elif name == "repeat_interleave":
            counts = args[-1] if len(args) < 3 else args[1]
            self.waits[name] += isinstance(counts, Tensor) and kwargs.get("output_size") is None
        elif name in NUMBERS:
            self.waits["item"] += 1
        elif not ASKS.isdisjoint(function.tags):
            self.waits[name] += 1

    @contextmanager
    def own_numbers(self) -> Iterator[None]:
        """Draw random numbers from the device's stream, not from the CPU's."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(before)


def same_there(
    run: Callable[..., Any], *things: Any, kind: str = "cuda", atol: float = 1e-6
) -> PretendedDevice:
    """Asserts that `run` gives the same for modules and tensors on the CPU and on the device.

    What it returns there lies there. The device comes back, with its counts of what `run` asked.
    """
    copies = [copy.deepcopy(x) for x in things]
    expected = _leaves([run(*things)])
    with PretendedDevice(kind) as device:
        copies = [None if x is None else x.to(kind) for x in copies]
        device.forget()
        found = _leaves([run(*copies)])
        asked = device.waits.copy(), device.sent.copy()
        assert len(found) == len(expected)
        for x, y in zip(found, expected, strict=True):
            if isinstance(y, Tensor):
                assert isinstance(x, PretendedTensor) and x.dtype == y.dtype
                torch.testing.assert_close(x.held, y, rtol=0, atol=atol)
            else:
                assert x == y
    device.waits, device.sent = (+counts for counts in asked)
    return device
