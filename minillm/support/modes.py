"""How a model is used: what is asked of it, the cache that is opened for it, modes for a while.

Written by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from minillm.support.checks.kinds import check_sizes
from minillm.support.checks.model import check_room, dynamic_from
from minillm.support.device import product_dtype, rng_state, set_rng_state

if TYPE_CHECKING:
    from minillm.cache import KVCache


class LanguageModel(Protocol):
    """What `generate` asks of a model: `CausalLM`, or a prompt that holds a picture."""

    config: Any  # vocab_size, eos_token_ids, pad_token_id, max_position_embeddings

    def make_cache(
        self, kind: str = ..., *, batch_size: int, max_length: int | None = ...
    ) -> KVCache: ...

    def __call__(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = ...,
        cache: KVCache | None = ...,
        logits_to_keep: int = ...,
    ) -> Tensor: ...


def open_cache(
    model: LanguageModel, cache: str | KVCache | None, input_ids: Tensor, max_new_tokens: int
) -> KVCache | None:
    """An empty cache of that kind with room for all tokens, or the given one, which may hold some.

    Raises: ValueError if it holds the whole prompt: the last token has to be computed; or if it
        would reserve more room than the model has positions.
    """
    B, T = input_ids.shape
    if isinstance(cache, str):
        check_room(model.config, cache, T, max_new_tokens)
        return model.make_cache(cache, batch_size=B, max_length=T + max_new_tokens)
    if cache is not None and cache.length >= T:
        held = f"the cache holds {cache.length} positions of a prompt of {T}"
        raise ValueError(f"{held}, but the last must be new: crop({T - 1}) the cache")
    return cache


def make_cache(
    kind: str = "dynamic",
    *,
    num_layers: int,
    batch_size: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    max_length: int | None = None,
    window: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> KVCache:
    """An empty cache: "dynamic" (which grows), "static", "sliding", "paged" or "quantized".

    Of a model's sizes, `model.make_cache(kind, batch_size=...)` makes it.
    Raises: ValueError for an unknown kind, a size below 1, a missing argument.
    """
    sizes: dict[str, Any] = {"batch_size": batch_size, "num_kv_heads": num_kv_heads}
    sizes |= {"key_dim": key_dim, "value_dim": value_dim}
    check_sizes(num_layers=num_layers, max_length=max_length, window=window, **sizes)
    sizes |= {"max_length": max_length, "dtype": dtype, "device": device}
    if kind == "dynamic":
        from minillm.cache import CacheLayer, KVCache

        return KVCache([CacheLayer(**sizes) for _ in range(num_layers)])
    from minillm.deeper.caches.kinds import cache_of

    return cache_of(kind, num_layers, window, block_size, **sizes)


def cache_for(model: Any, kind: str, **sizes: Any) -> KVCache:
    """An empty cache of these sizes, or of those that the model's attention or layers want.

    An attention says its own (heads, size of a key, size of a value) as `cache_shape`; a stack or a
    layer that keeps something else makes the cache: `make_cache(model, kind, sizes)`. The device is
    the model's, and the dtype, inside `torch.autocast` that in which keys and values come.
    Raises: ValueError for a sliding cache where the model does read all the past.
    """
    if kind == "sliding" and model.config.sliding_window is None:
        raise ValueError("a sliding cache drops keys that a model without sliding_window reads")
    layers, weight = model.model.layers, model.lm_head.weight
    sizes = {"max_length": None, "dtype": product_dtype(weight), "device": weight.device, **sizes}
    attention = next((x.self_attn for x in layers if hasattr(x, "self_attn")), None)
    if own := getattr(attention, "cache_shape", None):
        sizes.update(zip(("num_kv_heads", "key_dim", "value_dim"), own, strict=True))
    maker = next((x.make_cache for x in [model.model, *layers] if hasattr(x, "make_cache")), None)
    return make_cache(kind, **sizes) if maker is None else maker(model, kind, sizes)


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


def own_method(part: Any, name: str, usual: type) -> bool:
    """Whether a part does something of its own there; a method that only checks more says so.

    `only_checks` of the class that has the method names it.
    """
    if name in vars(part):
        return True
    from minillm.deeper.pretrained.changes import same_class

    owner = next(c for c in type(part).__mro__ if name in vars(c))
    return not same_class(owner, usual) and name not in vars(owner).get("only_checks", ())


def check_positionwise(model: Any, lost: str) -> None:
    """For who makes positions and masks itself, and calls `run`.

    Raises: ValueError for a model that keeps states, that prepares its inputs in its own way, or
        whose rotation depends on the length of the pass.
    """
    from minillm.model import CausalLM, Decoder

    kind = model.config.model_type
    if model.config.stateful:
        raise ValueError(f"{lost}: {kind} keeps states")
    makes_masks = [own_method(model.model, x, Decoder) for x in ("prepare", "layer_mask")]
    if any(makes_masks) or own_method(model, "forward", CausalLM):
        raise ValueError(f"{lost}: {kind} makes positions and masks in its own way")
    if dynamic_from(model.model.rotary) < math.inf:
        raise ValueError(f"{lost}: dynamic rope_scaling turns keys by the length of the whole pass")


@contextmanager
def looking(model: nn.Module) -> Iterator[None]:
    """Within this a model in training is looked at, and the training goes on as if it were not.

    It is in eval mode, no gradient is kept, and random numbers that are drawn are given back.
    """
    device = next(model.parameters()).device
    rng = rng_state(device)
    try:
        with EvalMode(model), torch.no_grad():
            yield
    finally:
        set_rng_state(rng, device)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Outside of autocast, for what must not be rounded: a state's sums, a router's logits."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
