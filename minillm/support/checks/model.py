"""Refusals of configs, ids, masks, prompts; room in a cache."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minillm.support.checks.words import quoted

if TYPE_CHECKING:
    from torch import Tensor, nn


def check_config(config: Any) -> None:
    """Raises: ValueError for a config of another library, a table of keys, or a file's name."""
    if not hasattr(config, "family"):
        road = (
            "a ModelConfig, such as ModelConfig(**keys) or ModelConfig.from_dict(their.to_dict())"
        )
        kind = f"{type(config).__module__.partition('.')[0]}.{type(config).__name__}"
        raise ValueError(f"a config of minillm is wanted, not a {kind}: {road}")


def check_model(model: Any) -> None:
    """Raises: ValueError for a model of another library, or for what is none, such as its name."""
    if not hasattr(getattr(model, "config", None), "eos_token_ids"):
        found = f"a {type(model).__module__.partition('.')[0]}.{type(model).__name__}"
        found = quoted(model) if isinstance(model, str | os.PathLike) else found
        road = "from_pretrained(folder or name) opens a checkpoint and returns (model, tokenizer)"
        raise ValueError(f"{found} is no model of minillm: {road}")


def check_mask(mask: Tensor | None, name: str = "attention_mask") -> None:
    """Raises: ValueError for a mask that holds neither bools nor integers.

    Only the type is looked at: for a number of a tensor on a GPU one would have to wait.
    """
    if mask is not None and (mask.is_floating_point() or mask.is_complex()):
        wanted = "bool or an integer type: 1 is a token, 0 is padding"
        raise ValueError(f"{name} is {mask.dtype}; it must be {wanted}")


def check_inputs(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past: int,
    rotary: Any = None,
) -> None:
    """Raises: ValueError for ids, mask and positions of shapes that do not fit each other, and for
    a piece of a text whose earlier keys the rotation would have to turn anew.
    """
    import torch
    from torch import Tensor

    more = [x for x in (attention_mask, position_ids) if x is not None]
    for x in (input_ids, *more):
        if not isinstance(x, Tensor):
            raise ValueError(f"ids, mask and positions must be tensors, not {x!r:.60}")
    shape = tuple(input_ids.shape)
    whole = input_ids.dtype in (torch.int64, torch.int32)
    if input_ids.dim() != 2 or not input_ids.numel() or not whole:
        raise ValueError(f"input_ids must be int64 or int32 (B, T), not {input_ids.dtype} {shape}")
    if attention_mask is not None and attention_mask.shape != (shape[0], past + shape[1]):
        wanted = f"(B, past + T) = {(shape[0], past + shape[1])}"
        raise ValueError(f"attention_mask {tuple(attention_mask.shape)} should be {wanted}")
    check_mask(attention_mask)
    if position_ids is not None and position_ids.shape not in (shape, (1, shape[1])):
        raise ValueError(f"position_ids {tuple(position_ids.shape)} do not fit input_ids {shape}")
    if past and shape[1] > 1 and past + shape[1] > dynamic_from(rotary):
        raise ValueError(
            f"dynamic rope_scaling turns all keys anew beyond {dynamic_from(rotary)} positions: "
            f"read these {shape[1]} and the {past} of the cache in one pass"
        )


def check_kept(logits_to_keep: int) -> None:
    """Raises: ValueError for a negative number of positions."""
    if logits_to_keep < 0:
        raise ValueError(f"logits_to_keep must not be negative: {logits_to_keep}")


def dynamic_from(rotary: Any) -> float:
    """The length from which on a rotation depends on the length; no limit for most."""
    return rotary.max_position_embeddings if getattr(rotary, "dynamic", False) else math.inf


def look_up(table: nn.Embedding, ids: Tensor, what: str) -> Tensor:
    """The rows of a table. Raises: ValueError, on the CPU, for an id that has none."""
    try:
        return table(ids)
    except IndexError:
        first, last, size = int(ids.min()), int(ids.max()), len(table.weight)
        wrong = f"{what} {first if first < 0 else last}"
        raise ValueError(f"{wrong}, but this model has learned only {size} {what}s") from None


def check_prompt(
    input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int, vocab_size: int
) -> None:
    """Raises: ValueError for unknown ids, or a prompt that has no right end to continue at."""
    from torch import Tensor

    for x in (input_ids, attention_mask):
        if x is not None and not isinstance(x, Tensor):
            road = "torch.tensor([tokenizer.encode(text)])"
            if isinstance(x, Mapping):  # what a tokenizer of transformers returns
                road = "hand in its entries, **encoding"
            raise ValueError(f"a prompt and its mask must be tensors, not {quoted(x)}: {road}")
    if input_ids.dim() != 2 or not input_ids.numel():
        shape = tuple(input_ids.shape)
        raise ValueError(f"a prompt is (B, T) ids, at least one a row, not {shape}")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be an integer, 0 or more, not {max_new_tokens!r}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        shapes = f"{tuple(attention_mask.shape)} and {tuple(input_ids.shape)}"
        raise ValueError(f"attention_mask and input_ids differ in shape: {shapes}")
    check_mask(attention_mask)
    if input_ids.is_meta:
        return  # shapes without numbers
    first, last = int(input_ids.min()), int(input_ids.max())
    if first < 0 or last >= vocab_size:
        wrong = first if first < 0 else last
        raise ValueError(f"the prompt has id {wrong}, the vocabulary ids 0 to {vocab_size - 1}")
    if attention_mask is None:
        return
    mask = attention_mask.bool()
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("padding must stand on the left: generation continues at the right end")


def check_generation(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int
) -> None:
    """Raises: ValueError for what is no model, no prompt, or no number of tokens."""
    check_model(model)
    check_prompt(input_ids, attention_mask, max_new_tokens, model.config.vocab_size)


def check_ends(ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises: ValueError for end tokens outside the vocabulary."""
    if any(not 0 <= i < vocab_size for i in ids):
        raise ValueError(f"end tokens {ids}, but ids are 0..{vocab_size - 1}")


def check_step(drawn: Any, ids: Tensor, cache: Any) -> None:
    """After a step that read these ids: not the values drawn, for which a GPU would be waited for.

    Raises: ValueError unless the sampler returned ids, one for each row, and each layer has put
        all positions into its cache (an attention of one's own may forget it).
    """
    import torch

    rows, length = ids.shape
    whole = isinstance(drawn, torch.Tensor) and drawn.dtype in (torch.int64, torch.int32)
    if not whole or drawn.shape != (rows,):
        found = f"{drawn!r:.60}"
        if isinstance(drawn, torch.Tensor):
            found = f"{drawn.dtype} {tuple(drawn.shape)}"
        raise ValueError(f"a sampler must return ids, int64 or int32 ({rows},), not {found}")
    for i, layer in enumerate(() if cache is None else cache.layers):
        if layer.length < length and getattr(layer, "holds_keys", True):
            road = "see help(minillm.MultiHeadAttention), or generate with cache=None"
            raise ValueError(f"layer {i} did not call cache.update(keys, values): {road}")


def context_length(config: Any) -> int:
    """How many positions the config is for: those of the training, or those of its scaling."""
    trained, scaling = config.max_position_embeddings, getattr(config, "rope_scaling", None) or {}
    original = scaling.get("original_max_position_embeddings") or trained
    return max(trained, int(original * (scaling.get("factor") or 1)))


def check_room(config: Any, cache: str, length: int, max_new_tokens: int) -> None:
    """Raises: ValueError if a cache of that kind would reserve more room than there are positions.

    `length` is that of the prompt.
    """
    room, known = length + max_new_tokens, context_length(config)
    reserved = {"static": room, "sliding": getattr(config, "sliding_window", None)}
    if min(room, reserved.get(cache) or 0) > known:
        raise ValueError(
            f"a prompt of {length} and max_new_tokens={max_new_tokens}, but this model has {known} "
            f"positions: cache={cache!r} reserves no more, cache='dynamic' grows"
        )
