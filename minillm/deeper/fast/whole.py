"""Which models can leave: a plain `CausalLM`, of which this process has all weights."""

import math

from torch import nn

from minillm.model import CausalLM
from minillm.support.checks.model import context_length, dynamic_from
from minillm.support.modes import check_positionwise


def check_whole(model: nn.Module) -> None:
    """Raises: ValueError for a packed model, and one of which this process holds a part only."""
    if type(model) is not CausalLM:
        raise ValueError(f"this takes a CausalLM, not a {type(model).__name__}")
    from minillm.deeper.training.distributed import is_sharded

    if is_sharded(model):
        raise ValueError("this process holds only a part of the model: load it whole, in one")


def check_step(model: nn.Module, max_length: int, batch_size: int) -> None:
    """Raises: ValueError for a model or sizes of which no step with fixed shapes can be made."""
    check_whole(model)
    assert isinstance(model, CausalLM)
    c = model.config
    if batch_size < 1 or max_length < 1:
        raise ValueError(f"{batch_size=} and {max_length=} must be at least 1")
    known = context_length(c) if c.positions == "rotary" else c.max_position_embeddings
    if max_length > known:
        learned = "" if c.positions == "rotary" else "learned "
        raise ValueError(f"max_length {max_length}, but this model has {learned}{known} positions")
    if dynamic_from(model.model.rotary) < math.inf:
        raise ValueError("dynamic rope_scaling turns old keys anew: a step with a cache cannot")
    check_positionwise(model, "a step that is a function of ids, position, keys and values cannot")
    if own := next((x for x in model.model.layers if hasattr(x, "make_cache")), None):
        raise ValueError(f"{type(own).__name__} keeps something else than keys and values")
