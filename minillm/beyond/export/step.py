"""One decoding step of fixed shapes: a model for other programs.

Explained in notebooks/beyond/17_leaving_the_notebook.ipynb; a file for programs without PyTorch:
`minillm.beyond.export.onnx_file`.
"""

# Built from notebooks/beyond/17_leaving_the_notebook.ipynb: edit there, then make build.

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from minillm.attention import build_mask
from minillm.deeper.fast.whole import check_step
from minillm.model import CausalLM

__all__ = ["DecodingStep", "decode", "export_step"]


class _Slots:
    """A cache of fixed size as a function sees it: written by making the buffers anew."""

    def __init__(self, keys: Tensor, values: Tensor, here: Tensor) -> None:
        self.keys, self.values, self.here = keys, values, here

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Shape: (B, G, 1, D) -> (B, G, S, D)."""
        self.keys = torch.where(self.here, k, self.keys)
        self.values = torch.where(self.here, v, self.values)
        return self.keys, self.values


class DecodingStep(nn.Module):
    """One token of each row in, its logits and the new cache out; nothing is kept inside.

    `step.empty()` gives the keys and values to begin with. Slots after `position` have weight 0,
    and must hold finite numbers. A position without a slot is not noticed: no key is written.

    Shape: ids (B, 1), position (1,), keys and values (L, B, G, S, D)
    -> logits (B, V), keys, values.
    Raises: ValueError for sizes below 1, more slots than the model has positions, and models
        whose step is not a function of these (packed ones, those with other layers).
    """

    def __init__(self, model: CausalLM, *, max_length: int, batch_size: int = 1) -> None:
        super().__init__()
        check_step(model, max_length, batch_size)
        self.lm, self.batch_size, self.max_length = model, batch_size, max_length

    def empty(self) -> tuple[Tensor, Tensor]:
        """Keys and values of no token. Shape: -> (L, B, G, S, D) each."""
        cache = self.lm.make_cache("static", batch_size=self.batch_size, max_length=self.max_length)
        layers: list[Any] = cache.layers
        keys, values = zip(*(layer.allocate(self.max_length) for layer in layers), strict=True)
        return torch.stack(keys), torch.stack(values)

    def forward(
        self, input_ids: Tensor, position: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (B, V), and keys and values with those of `position` put in."""
        slots = torch.arange(keys.shape[3], device=position.device)
        here = (slots == position)[:, None]  # (S, 1)
        cache: Any = [
            _Slots(k, v, here) for k, v in zip(keys.unbind(), values.unbind(), strict=True)
        ]
        filled = torch.where(slots <= position, slots, -1)
        decoder: Any = self.lm.model
        mask: Any = build_mask(position, filled, window=decoder.config.sliding_window)
        if getattr(decoder, "window", None) is not None:  # of some layers only
            mask = decoder.with_window(mask, position, filled)
        logits = self.lm.run(input_ids, position[None], mask, False, cache, 1)
        keys = torch.stack([layer.keys for layer in cache])
        return logits[:, 0], keys, torch.stack([layer.values for layer in cache])


def export_step(model: CausalLM, *, max_length: int, batch_size: int = 1) -> ExportedProgram:
    """`DecodingStep` as a graph of operators with its weights, which runs without this package.

    `torch.export.save` writes it to a file. Every shape is fixed: `batch_size` rows of up to
    `max_length` tokens.
    Raises: ValueError as `DecodingStep`.
    """
    step = DecodingStep(model, max_length=max_length, batch_size=batch_size)
    device, training = model.lm_head.weight.device, model.training
    ids = torch.zeros(batch_size, 1, dtype=torch.long, device=device)
    try:
        with torch.no_grad():
            return torch.export.export(step.eval(), (ids, ids[0], *step.empty()))
    finally:
        model.train(training)


def decode(
    step: Callable[..., Iterable[Tensor]],
    prompt: Tensor,
    empty: tuple[Tensor, Tensor],
    *,
    max_new_tokens: int,
) -> Tensor:
    """Greedy continuation by a step that runs anywhere: `(ids, position, keys, values)` in,
    logits, keys and values out. The prompt is fed token by token.

    Shape: prompt (B, T), `empty` keys and values (L, B, G, S, D) -> (B, T + max_new_tokens).
    Raises: ValueError if rows or tokens do not fit the cache; the last token needs no slot.
    """
    keys, values = empty
    (B, T), rows, slots = prompt.shape, keys.shape[1], keys.shape[3]
    if rows != B or T < 1 or max_new_tokens < 0 or T + max_new_tokens - 1 > slots:
        asked = f"{B} rows of {T} + {max_new_tokens} tokens"
        raise ValueError(f"{asked} do not fit a cache of {rows} rows and {slots} slots")
    ids = prompt
    for i in range(T + max_new_tokens - 1):
        position = torch.tensor([i], device=prompt.device)
        logits, keys, values = step(ids[:, i : i + 1], position, keys, values)
        if i >= T - 1:
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids
