"""Tensor parallelism: every process holds some heads and hidden units of each layer, not all.

Shown in notebooks/beyond/17_leaving_the_notebook.ipynb. The first matrix of a block is cut by
its outputs, the last one by its inputs, so that one sum over the processes ends each block. The
cutting, and the sums in both directions, are those of `torch.distributed.tensor`. Started by

    torchrun --nproc-per-node 2 -m minillm train --parallel tensor ...
"""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from minillm.heads import MultiHeadAttention
from minillm.layers import MLP, GatedMLP
from minillm.model import CausalLM


def check_tensor_parallel(model: nn.Module, size: int) -> None:
    """Raises: ValueError, with the numbers, if `size` processes cannot share the model's layers.

    Each takes whole heads, key heads with the query heads that read them, and as many hidden units.
    """
    if size == 1:
        return
    if type(model) is not CausalLM:
        raise ValueError(
            f"tensor parallel cuts the layers of a CausalLM, not {type(model).__name__}"
        )
    c = model.config
    for layer in model.model.layers:
        for name, known in (("self_attn", (MultiHeadAttention,)), ("mlp", (GatedMLP, MLP))):
            part = getattr(layer, name, None)
            if type(part) not in known:
                found = f"{name} of {c.model_type} is {type(part).__name__}"
                fits = " or ".join(kind.__name__ for kind in known)
                raise ValueError(f"tensor parallel does not cut it: {found}, not {fits}")
    counts = {
        "query heads": c.num_attention_heads,
        "key/value heads": c.num_key_value_heads,
        "hidden units": c.intermediate_size,
    }
    for name, count in counts.items():
        if count % size:
            raise ValueError(f"{size} processes cannot share {count} {name} equally")


def _everywhere(module: nn.Module, mesh: Any, dim: int | None = None) -> None:
    """Give each process all weights of a module; its input is the same for all, or cut along `dim`.

    Of a cut input each process computes the weights' gradient for its part only: they are added up.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

    placement = Replicate() if dim is None else Shard(dim)

    def enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: Any) -> tuple[Tensor, ...]:
        return tuple(DTensor.from_local(x, mesh, [placement], run_check=False) for x in inputs)

    def leave(_: nn.Module, output: Any, mesh: Any) -> Tensor:
        return output.to_local()

    hooks: Any = (enter, leave)  # torch uses what they return; its types say None
    distribute_module(module, mesh, None, *hooks)
    if dim is not None:
        for weight in module.parameters():
            weight.register_hook(lambda grad: grad.redistribute(placements=[Replicate()]))


def parallelize(model: nn.Module) -> nn.Module:
    """Cut the model's layers over the processes of the group, in place; returns the model.

    Called with the same ids in every process it gives the same logits in every process. Embedding,
    norms and head are whole in each. Its caches hold the heads of this process. Alone in the world
    it stays as it is.
    Raises: ValueError as `check_tensor_parallel`.
    Source: Shoeybi et al. 2019 (Megatron-LM), section 3; embedding and head are cut there too.
    """
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    check_tensor_parallel(model, size)
    if size == 1 or not isinstance(model, CausalLM):
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(next(model.parameters()).device.type, (size,))
    whole = (Replicate(),)
    plan: dict[str, Any] = {  # a block's input is one tensor: its gradient is summed once
        name: PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
        for name in ("self_attn", "mlp")
    }
    plan |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        names = {name for name, _ in layer.named_modules()}
        parallelize_module(layer, mesh, {n: style for n, style in plan.items() if n in names})
        a: Any = layer.self_attn
        a.num_heads, a.num_kv_heads = a.num_heads // size, a.num_kv_heads // size
        for norm in (a.q_norm, a.k_norm):
            if norm is not None:
                _everywhere(norm, mesh, dim=1)  # (B, H, T, D): this process's heads
        for name, part in layer.named_children():
            if name not in ("self_attn", "mlp"):
                _everywhere(part, mesh)
    for part in (model.model.embed_tokens, model.model.norm, model.lm_head):
        _everywhere(part, mesh)
    if model.config.positions == "learned":
        _everywhere(model.model.embedding, mesh)
    model.tie_weights()
    groups = model.config.num_key_value_heads // size
    model.make_cache = partial(model.make_cache, num_kv_heads=groups)  # type: ignore[method-assign]
    return model


def shard_like(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Of whole tensors by the names of parameters, this process's part of each that is cut.

    Names may go on after a "/", as those of an optimizer's state do. Nothing is sent: every process
    has the whole. What has another shape than its parameter stays whole.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    cut = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    result = dict(tensors)
    for full, tensor in tensors.items():
        p = cut.get(full, cut.get(full.rpartition("/")[0]))
        if p is not None and tensor.shape == p.shape:
            tensor = tensor.to(p.device)
            result[full] = distribute_tensor(
                tensor, p.device_mesh, p.placements, src_data_rank=None
            )
    return result
