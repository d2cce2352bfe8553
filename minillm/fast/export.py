"""A model for other programs: one decoding step of fixed shapes, fewer tokens, weights of 8 bits.

Explained in notebooks/beyond/17_leaving_the_notebook.ipynb. ONNX needs the packages onnx and
onnxscript, and only `to_onnx` asks for them.
"""

# Built from notebooks/beyond/17_leaving_the_notebook.ipynb: edit there, then make build.

import copy
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterable
from operator import index
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

from minillm.checks import context_length
from minillm.files import replacing, transaction
from minillm.model import CausalLM
from minillm.nn.attention import build_mask

__all__ = [
    "OPSETS",
    "DecodingStep",
    "Int8Embedding",
    "Int8Linear",
    "decode",
    "export_step",
    "int8_copy",
    "prune_vocabulary",
    "quantize_rows",
    "to_onnx",
]


def _check_whole(model: nn.Module) -> None:
    """Raises: ValueError for a packed model, and one of which this process holds a part only."""
    if type(model) is not CausalLM:
        raise ValueError(f"this takes a CausalLM, not a {type(model).__name__}")
    from minillm.training.distributed import is_sharded

    if is_sharded(model):
        raise ValueError("this process holds only a part of the model: load it whole, in one")


def prune_vocabulary(
    model: CausalLM, tokenizer: Any, keep_ids: Iterable[int]
) -> tuple[CausalLM, Any, list[int]]:
    """A copy of the model that knows some tokens only, its tokenizer, and the old id of each token.

    Kept are `keep_ids`, all that these are merged from, the bytes and the special tokens: every
    text can still be written. A kept token's embedding and its row of the head are as they were.
    Raises: ValueError for ids without a token, a tokenizer that cannot be cut, and a model that is
        packed or int8.
    """
    _check_whole(model)
    if not hasattr(tokenizer, "prune"):
        kind = type(tokenizer).__name__
        raise ValueError(f"a {kind} cannot be pruned; a BPETokenizer can")
    if not isinstance(model.lm_head, nn.Linear):
        raise ValueError(f"prune before int8: the head is {type(model.lm_head).__name__}")
    c = model.config
    named = {"bos_token_id": c.bos_token_id, "pad_token_id": c.pad_token_id}
    ends = [i for i in (*named.values(), *c.eos_token_ids) if i is not None]
    small_tokenizer, old_ids = tokenizer.prune([*map(index, keep_ids), *ends])
    new_id = {old: new for new, old in enumerate(old_ids)}
    changes: dict[str, Any] = {k: new_id[i] for k, i in named.items() if i is not None}
    if c.eos_token_id is not None:
        found = tuple(new_id[i] for i in c.eos_token_ids)
        changes["eos_token_id"] = found[0] if isinstance(c.eos_token_id, int) else found
    config = dataclasses.replace(c, vocab_size=len(old_ids), **changes)
    small = copy.deepcopy(model)
    small.config = small.model.config = config
    rows = torch.tensor(old_ids, device=model.lm_head.weight.device)
    with torch.no_grad():
        for part in (small.model.embed_tokens, small.lm_head):
            part.weight = nn.Parameter(part.weight[rows])
    small.model.embed_tokens.num_embeddings = small.lm_head.out_features = len(old_ids)
    small.tie_weights()
    return small, small_tokenizer, old_ids


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

    `step.empty()` gives the keys and values to begin with. Slots from `position` on are not read.

    Shape: ids (B, 1), position (1,), keys and values (L, B, G, S, D)
    -> logits (B, V), keys, values.
    Raises: ValueError for sizes below 1, more slots than the model has positions, and models
        whose step is not a function of these (packed ones, those with other layers).
    """

    def __init__(self, model: CausalLM, *, max_length: int, batch_size: int = 1) -> None:
        super().__init__()
        c = model.config
        _check_whole(model)
        if batch_size < 1 or max_length < 1:
            raise ValueError(f"{batch_size=} and {max_length=} must be at least 1")
        known = context_length(c) if c.positions == "rotary" else c.max_position_embeddings
        if max_length > known:
            learned = "" if c.positions == "rotary" else "learned "
            raise ValueError(
                f"max_length {max_length}, but this model has {learned}{known} positions"
            )
        scaling = c.rope_scaling or {}
        if "dynamic" in (scaling.get("rope_type"), scaling.get("type")):
            raise ValueError("dynamic rope_scaling turns old keys anew: a step with a cache cannot")
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
        slots = torch.arange(keys.shape[3], device=position.device)
        here = (slots == position)[:, None]  # (S, 1)
        cache: Any = [
            _Slots(k, v, here) for k, v in zip(keys.unbind(), values.unbind(), strict=True)
        ]
        filled = torch.where(slots <= position, slots, -1)
        mask = build_mask(position, filled, window=self.lm.config.sliding_window)
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


OPSETS = range(18, 26)  # the versions of ONNX's operators that torch 2.13 writes

_ONE_FILE = 2**30  # bytes of weights in the file itself, which may have twice as many


def to_onnx(program: ExportedProgram, path: str | Path, *, opset: int = 20) -> None:
    """Write an exported step as an ONNX file, weights included; those above 1 GiB go beside it.

    Inputs are input_ids, position, keys, values; outputs logits, new_keys, new_values. Where
    `path` is a file already, it is replaced as a whole, or stays if something goes wrong.
    Raises: ValueError for an opset that is not in OPSETS, or that the step cannot be written in;
        ImportError without onnx and onnxscript.
    """
    if opset not in OPSETS:
        known = f"{OPSETS[0]} to {OPSETS[-1]}"
        raise ValueError(f"unknown ONNX opset {opset!r}; known are {known}")
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ImportError("to_onnx needs the packages onnx and onnxscript") from None
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: Any = torch.onnx.export(
                program,
                (),
                input_names=["input_ids", "position", "keys", "values"],
                output_names=["logits", "new_keys", "new_values"],
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
    finally:
        log.setLevel(level)
    if (written := made.model.opset_imports[""]) != opset:  # torch logs it and goes on
        raise ValueError(f"this step cannot be written in ONNX opset {opset}, only in {written}")
    path = Path(path)
    if sum(tensor.nbytes for tensor in program.state_dict.values()) <= _ONE_FILE:
        with replacing(path) as temporary:
            made.save(str(temporary), external_data=False)
    else:  # the file names the other one: the two take their places together
        with transaction(path.parent) as staging:
            made.save(str(staging / path.name), external_data=True)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, and what to multiply each row of them by.

    Shape: (out, in) -> int8 (out, in), (out, 1).
    Raises: ValueError for a weight that is no matrix, or holds a number that is not finite.
    """
    if weight.ndim != 2 or not weight.isfinite().all():
        what = "with numbers that are not finite" if weight.ndim == 2 else "is no matrix"
        raise ValueError(f"a weight {tuple(weight.shape)} {what}: rows of it make no int8")
    scale = weight.abs().amax(1, keepdim=True) / 127
    scale = scale.where(scale > 0, 1.0)  # a row of zeros
    return (weight / scale).round().to(torch.int8), scale


class _Int8Rows(nn.Module):
    """A matrix as int8 with a factor for each row."""

    rows: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        rows, scale = quantize_rows(weight.detach())
        self.register_buffer("rows", rows)
        self.register_buffer("scale", scale)

    @property
    def weight(self) -> Tensor:
        """The matrix that the numbers stand for. Shape: (out, in)."""
        return self.rows * self.scale


class Int8Embedding(_Int8Rows):
    """A table of int8 rows; one row is made into numbers for each id. Shape: (...) -> (..., C)."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows[ids] * self.scale[ids]


class Int8Linear(_Int8Rows):
    """`x @ W.T + bias` with W in int8: a quarter of the memory; the product itself is in floats.

    Shape: (..., in) -> (..., out).
    """

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@torch.no_grad()
def int8_copy(model: CausalLM) -> CausalLM:
    """A copy for generation whose matrices are int8; norms, biases, and what is int8 stay.

    Raises: ValueError for a packed model, and one with matrices that are neither `nn.Linear` nor
        `nn.Embedding`.
    """
    _check_whole(model)
    small = copy.deepcopy(model)
    made: dict[Tensor, _Int8Rows] = {}
    for parent in [*small.modules()]:
        for name, part in [*parent.named_children()]:
            if isinstance(part, nn.Linear | nn.Embedding):
                new: _Int8Rows
                if isinstance(part, nn.Linear):
                    new = Int8Linear(part.weight, part.bias)
                else:
                    new = Int8Embedding(part.weight)
                twin = made.setdefault(part.weight, new)  # head and embedding may be one matrix
                new.rows, new.scale = twin.rows, twin.scale
                setattr(parent, name, new)
    if left := [name for name, p in small.named_parameters() if p.ndim > 1]:
        raise ValueError(f"only matrices of nn.Linear and nn.Embedding become int8, not {left[0]}")
    return small
