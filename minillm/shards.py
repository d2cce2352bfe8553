"""Checkpoints of a sharded model: every process writes and reads its own part.

By torch.distributed.checkpoint; used by `minillm.distributed`, written by hand.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minillm import checkpoint
from minillm.checkpoint import CheckpointError

__all__ = ["load_parts", "save_parts"]


def save_parts(parts: Path, model: nn.Module, optimizer: Any) -> None:
    """Every process writes its shards."""
    import torch.distributed.checkpoint as dcp

    if dist.get_rank() == 0:
        shutil.rmtree(parts, ignore_errors=True)
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
    found = {name: tuple(entry.size) for name, entry in saved.items()}
    wrong = sorted(name for name in sizes | found if sizes.get(name) != found.get(name))
    if wrong:
        raise CheckpointError(f"{parts} is of another model; differing: " + ", ".join(wrong))
    dcp.load(ours, checkpoint_id=parts)
    checkpoint.load_optimizer_tensors(model, optimizer, ours["optimizer"])
