"""One process or many: process groups, data-parallel wrapping, checkpoints of a sharded model.

Thin use of torch's own parts, for `minillm.training`; see deeper/07_many_processes.
Start with

    torchrun --nproc-per-node 2 -m minillm train ...

Without torchrun there is one process, and everything here does nothing or the plain thing.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minillm.deeper.training import checkpoint
from minillm.deeper.training.checkpoint import CheckpointError
from minillm.support.device import OneProcess


def save_parts(parts: Path, model: nn.Module, optimizer: Any) -> None:
    """Every process writes its shards."""
    import torch.distributed.checkpoint as dcp

    if dist.get_rank() == 0:
        for left in parts.parent.glob(".parts-*"):  # by a save that failed or was killed
            shutil.rmtree(left, ignore_errors=True)
    dist.barrier()
    tensors = checkpoint.model_tensors(model)
    moments = checkpoint.optimizer_tensors(model, optimizer)
    try:
        dcp.save({"model": tensors, "optimizer": moments}, checkpoint_id=parts)
    except Exception as error:  # torch wraps what went wrong, a full disk too, in its own types
        raise CheckpointError(f"could not write the shards in {parts}: {error}") from error


def load_parts(parts: Path, model: nn.Module, optimizer: Any) -> None:
    """Every process reads its shards, into moments that are made first."""
    import torch.distributed.checkpoint as dcp

    saved = dcp.FileSystemReader(parts).read_metadata().state_dict_metadata
    ours: dict[str, dict[str, Tensor]] = {"model": checkpoint.model_tensors(model), "optimizer": {}}
    for name, p in model.named_parameters():
        if f"optimizer.{name}/step" in saved:
            fresh = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            fresh = {"step": torch.zeros(()), **fresh}
            ours["optimizer"] |= {f"{name}/{key}": value for key, value in fresh.items()}
    sizes = {f"{part}.{n}": tuple(t.shape) for part in ours for n, t in ours[part].items()}
    found = {name: tuple(getattr(entry, "size", ())) for name, entry in saved.items()}
    wrong = sorted(name for name in sizes | found if sizes.get(name) != found.get(name))
    if wrong:
        raise CheckpointError(f"{parts} is of another model; differing: " + ", ".join(wrong))
    dcp.load(ours, checkpoint_id=parts)
    checkpoint.load_optimizer_tensors(model, optimizer, ours["optimizer"])


@dataclass(frozen=True)
class World:
    """How many processes there are, and which of them this is."""

    rank: int = 0
    size: int = 1


def world() -> World:
    """The processes that `start` has brought together; one, if it has not."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World()


def start(device: torch.device | str) -> torch.device:
    """Join the group that torchrun announces in the environment; returns this process's device.

    NCCL between CUDA devices, gloo between CPUs. Without torchrun nothing happens.
    """
    device = torch.device(device)
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    # while process 0 makes tokenizer and token file the others wait; NCCL would give up in 10 min
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=24))
    return device


_LEFT: list[Any] = []  # groups that were left: see stop


def stop() -> None:
    """Leave the group, if there is one.

    Its object is kept. Whoever frees it waits for its threads, and gloo's may just then wait for
    the interpreter, which the one who frees it holds (pytorch issue 56297; it hung about one run
    in fifty). A thread that asks for the interpreter while it ends aborts the process (190489), so
    `python -m minillm` leaves by `os._exit`; a script of your own may do the same.
    """
    if dist.is_available() and dist.is_initialized():
        _LEFT.append(dist.group.WORLD)
        dist.destroy_process_group()


def barrier() -> None:
    """Wait until all processes are here."""
    if world().size > 1:
        dist.barrier()


def wrap(model: nn.Module, parallel: Literal["ddp", "fsdp", "tensor"]) -> nn.Module:
    """What to call in training: the model itself; in a group, wrapped by DDP or sharded by FSDP2,
    or cut inside its layers (see `minillm.deeper.training.tensor_parallel`).

    FSDP gathers one unit at a time: each block of a `ModuleList` is a unit, without the blocks that
    lie in it; the rest is another.
    """
    if world().size == 1:
        return model
    if parallel == "tensor":
        from minillm.deeper.training.tensor_parallel import parallelize

        return parallelize(model)
    if parallel == "ddp":
        device = next(model.parameters()).device
        return nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = next(model.parameters()).device.type  # fully_shard alone takes a GPU where there is one
    mesh = init_device_mesh(kind, (world().size,))
    blocks: list[nn.Module] = []
    for part in reversed([*model.modules()]):  # inner blocks first
        blocks += part if isinstance(part, nn.ModuleList) else []
    for block in dict.fromkeys(blocks):  # one that is used twice is sharded once
        if not isinstance(block, nn.ModuleList | nn.ModuleDict):  # those are never called
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # in place
    return model


def is_sharded(model: nn.Module) -> bool:
    """Does each process hold only its part of the parameters?"""
    return any(hasattr(p, "full_tensor") for p in model.parameters())


def _saved_in_shards(model: nn.Module) -> bool:
    """FSDP's models are; those that are cut inside their layers are saved whole."""
    return hasattr(model, "set_requires_gradient_sync")


@contextmanager
def communicate(forward: nn.Module, now: bool) -> Iterator[None]:
    """Exchange gradients in this backward pass only if `now`: once, after accumulating."""
    forward = getattr(forward, "_orig_mod", forward)
    if isinstance(forward, nn.parallel.DistributedDataParallel) and not now:
        with forward.no_sync():
            yield
        return
    if set_sync := getattr(forward, "set_requires_gradient_sync", None):
        set_sync(now)
    yield


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of a tensor over all processes."""
    if world().size > 1:
        dist.all_reduce(value)
    return value


class Processes(OneProcess):
    """The processes of a group, as a `Trainer` asks them."""

    def __init__(self, parallel: Literal["ddp", "fsdp", "tensor"]) -> None:
        self.parallel, self.rank = parallel, world().rank
        # cut by tensors, all processes work on the same rows
        self.size = 1 if parallel == "tensor" else world().size

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model in DDP, sharded by FSDP, or cut inside its layers."""
        return wrap(model, self.parallel)

    def share(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows of a batch that are this process's."""
        if len(batch[0]) < self.size:
            raise ValueError(f"a batch of {len(batch[0])} rows for {self.size} processes")
        inputs, targets = (x[self.rank :: self.size] if self.size > 1 else x for x in batch)
        return inputs, targets

    def communicate(self, forward: Any, now: bool) -> Any:
        """Exchange gradients within this only if `now`."""
        return communicate(forward, now)

    def total(self, value: Tensor) -> Tensor:
        """The sum over the processes that work on different rows."""
        return sum_over_ranks(value) if self.size > 1 else value


def in_first(action: Callable[[], Any]) -> Any:
    """What `action` returns in process 0, handed to all; what it raises there is raised in all."""
    outcome: list[Any] = [None, None]
    if world().rank == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    if world().size > 1:
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def save(
    folder: str | Path,
    step: int,
    keep: int,
    model: nn.Module,
    optimizer: Any,
    rng: dict[str, Tensor],
    state: dict[str, Any],
) -> Path:
    """One checkpoint of the run: by process 0, or under FSDP by all processes together.

    Raises: CheckpointError, in every process, if it could not be written.
    """
    here, extra = world(), None
    rngs: list[dict[str, Tensor]] = [rng]
    if here.size > 1:
        rngs = [{} for _ in range(here.size)]
        dist.all_gather_object(rngs, rng)
    tensors = {"rng": {f"{kind}.{i}": t for i, one in enumerate(rngs) for kind, t in one.items()}}
    state = {**state, "processes": here.size, "sharded": _saved_in_shards(model)}
    if state["sharded"]:
        parts = Path(folder) / f".parts-{step:08d}"
        save_parts(parts, model, optimizer)

        def extra(target: Path) -> None:
            shutil.move(parts, target / "sharded")
    else:
        tensors["model"] = _gathered(checkpoint.model_tensors(model))
        tensors["optimizer"] = _gathered(checkpoint.optimizer_tensors(model, optimizer))
    write = partial(checkpoint.save_checkpoint, folder, step, tensors, state)
    return in_first(partial(write, keep=keep, extra=extra))


def load(
    path: str | Path, model: nn.Module, optimizer: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint into model and optimizer; returns the random state and the run's state.

    Whole models may go on with another number of processes.

    Raises: CheckpointError if it is damaged, of another model, or sharded where the model is not.
    """
    here = world()
    tensors, state = checkpoint.load_checkpoint(path)
    if state["sharded"] != _saved_in_shards(model):
        kinds = {True: "sharded (fsdp)", False: "whole (one process or ddp)"}
        ours = "cut (tensor)" if is_sharded(model) else kinds[False]
        ours = kinds[True] if _saved_in_shards(model) else ours
        raise CheckpointError(f"{path} is {kinds[state['sharded']]}, the model is {ours}")
    if state["sharded"]:
        load_parts(Path(path) / "sharded", model, optimizer)
    else:
        if is_sharded(model):
            from minillm.deeper.training.tensor_parallel import shard_like

            for name in ("model", "optimizer"):
                tensors[name] = shard_like(tensors[name], model)
        checkpoint.load_model_tensors(model, tensors["model"])
        checkpoint.load_optimizer_tensors(model, optimizer, tensors["optimizer"])
    mine = here.rank if here.rank < state["processes"] else 0
    suffix = f".{mine}"
    # copies: the file is mapped, and Windows replaces no mapped file
    saved = {k: t.clone() for k, t in tensors["rng"].items() if k.endswith(suffix)}
    rng = {k.removesuffix(suffix): t for k, t in saved.items()}
    return rng, state


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's state with all shards gathered, on the CPU; every process must call it."""
    whole = _gathered(checkpoint.model_tensors(model))
    return {name: tensor.detach().cpu() for name, tensor in whole.items()}


def _gathered(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors, those whole and on the CPU of which each process holds a part."""
    return {  # a GPU holds one at a time
        name: tensor.full_tensor().cpu() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in tensors.items()
    }
