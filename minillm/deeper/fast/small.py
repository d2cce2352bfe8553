"""A model made smaller: a vocabulary with fewer tokens, matrices of 8 bits a number.

Explained in notebooks/deeper/17_how_small.ipynb.
"""

# Built from notebooks/deeper/17_how_small.ipynb: edit there, then make build.

import copy
import dataclasses
from collections.abc import Iterable
from operator import index
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.bpe import BPETokenizer
from minillm.deeper.fast.whole import check_whole
from minillm.deeper.tokenizer.vocabulary import prune
from minillm.model import CausalLM

__all__ = ["Int8Embedding", "Int8Linear", "int8_copy", "prune_vocabulary", "quantize_rows"]


def prune_vocabulary(
    model: CausalLM, tokenizer: Any, keep_ids: Iterable[int]
) -> tuple[CausalLM, Any, list[int]]:
    """A copy of the model that knows some tokens only, its tokenizer, and the old id of each token.

    Kept are `keep_ids`, all that these are merged from, the bytes and the special tokens: every
    text can still be written. A kept token's embedding and its row of the head are as they were.
    Raises: ValueError for ids without a token, a tokenizer that cannot be cut, and a model that is
        packed or int8.
    """
    check_whole(model)
    if not isinstance(tokenizer, BPETokenizer):
        kind = type(tokenizer).__name__
        raise ValueError(f"a {kind} cannot be pruned; a BPETokenizer can")
    if not isinstance(model.lm_head, nn.Linear):
        raise ValueError(f"prune before int8: the head is {type(model.lm_head).__name__}")
    c = model.config
    named = {"bos_token_id": c.bos_token_id, "pad_token_id": c.pad_token_id}
    ends = [i for i in (*named.values(), *c.eos_token_ids) if i is not None]
    small_tokenizer, old_ids = prune(tokenizer, [*map(index, keep_ids), *ends])
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
    """`x @ W.T + bias` with W in int8: a quarter of the memory; each call makes the floats anew.

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
    check_whole(model)
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
